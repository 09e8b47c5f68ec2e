"""decode: one token of a language model for each of some sequences, ids in and ids out."""
from typing import Mapping, Sequence

import torch
from torch import Tensor

from .._checks import FP8, KINDS, Kind, expect_given, expect_tensors, expect_values
from .._custom import OPS, call, define, fake
from .._layer_kinds import MOST_KINDS, Kinds, fields_of, parse_kinds
from .._library import Error
from .._run import Form, ready, run
from ..distributed import Group
from .all_reduce import memory_of
from .head import _draw, _given
from .layer import _KINDS as _LAYER_KINDS
from .layer import expect_layers, first_expert_of, given_layers, shown, tensors_of_layers, values_of_layers
from .packed import PackedWeight, packed_word

_STATE = ("ids", "lengths", "steps", "ended")
_HEAD = ("final_norm", "final_norm_bias", "w_head", "w_head_scale", "w_head_zero", "head_bias", "temperature", "seeds",
         "top_k", "top_p", "min_p")
_KINDS_ANGLES = ("b_angles", "c_angles")
_KINDS = {**{name: Kind(KINDS["i32"], "[batch]") for name in (*_STATE, "limits", "top_k")},
          "out": Kind(KINDS["i32"], "[batch, room]"), "stop": Kind(KINDS["i32"], "[stops]"),
          "embedding": Kind(KINDS["data"], "[vocab, features]"),
          **{name: _LAYER_KINDS[name] for name in ("angles", "pages", "memory", "first_expert", "weights",
                                                  "caches")},
          **dict.fromkeys(("kind_angles", *_KINDS_ANGLES), _LAYER_KINDS["angles"]),
          # Inputs of the layers and the head: the plan says more about them.
          "tensors": Kind(KINDS["floats"] | KINDS["ints"] | FP8, "[...]"),
          **{name: Kind(KINDS["data"], "[features]") for name in ("final_norm", "final_norm_bias")},
          "w_head": Kind(KINDS["data"] | KINDS["u8"], "[vocab, features]"),
          "w_head_scale": Kind(KINDS["floats"] | KINDS["u8"], "[...]"), "w_head_zero": Kind(KINDS["u8"], "[...]"),
          "head_bias": Kind(KINDS["data"], "[vocab]"), "seeds": Kind(KINDS["i64"], "[batch]"),
          **{name: Kind(KINDS["f32"], "[batch]") for name in ("temperature", "top_p", "min_p")}}
# Options of the head, by their names in the library, and what they are if they are left out.
_HEAD_OPTIONS = {"embed-scale": 1.0, "logit-softcap": 0.0, "pad": 0.0, "logprobs": "no"}


def _values(options, ids, lengths, steps, ended, out, limits, stop, embedding, angles, pages, b_angles, c_angles,
            memory, first_expert, *tensors):
    layers, head = tensors[:-len(_HEAD)], dict(zip(_HEAD, tensors[-len(_HEAD):]))
    batch, (vocab, d), packed = ids.shape[0], embedding.shape, options[-1]
    if not batch:
        return None
    sizes = _values_of_kinds(parse_kinds(options[0]), (batch, 1, d), (angles, b_angles, c_angles), pages, layers)
    sliced = memory is not None and not packed and head["w_head"].shape[0] != vocab
    filtered = head["top_k"] is not None
    choose = "filtered" if filtered else "argmax" if head["temperature"] is None else "sample"
    return sizes | {
        "vocab": vocab, "stops": None if stop is None else stop.shape[0], "room": out.shape[1],
        "choose": choose, "head-bias": "no" if head["head_bias"] is None else "yes",
        **({"head": "sliced"} if sliced else {}),
        **({"head-weights": packed.split("-")[0], "head-group": packed.split("-")[1]} if packed else {}),
        **({"head-zeros": "yes"} if head["w_head_zero"] is not None else {}),
        "best": options[-2] or None, **dict(zip(_HEAD_OPTIONS, options[1:]))}


def _values_of_kinds(kinds: Kinds, x: tuple[int, int, int], angles: Sequence[Tensor | None], pages, tensors) -> dict:
    """Sizes and options of the layers: those of the first kind, and a text for each other one. The angles are of the
    kinds, or the first ones of all."""
    if not kinds.order:
        return values_of_layers(kinds.parsed[0], x, angles[0], pages, tensors)
    own = any(t is not None for t in angles[1:])
    if not own:
        angles = angles[:1] * MOST_KINDS
    of_kinds = [[] for _ in kinds.forms]
    at = 0
    for kind in kinds.order:
        form = kinds.parsed[kind]
        count = len(form.before + form.behind) + form.library_state_count
        of_kinds[kind] += tensors[at:at + count]
        at += count
    found = [values_of_layers(form, x, own_angles, pages, of_kind)
             for form, own_angles, of_kind in zip(kinds.parsed, angles, of_kinds)]
    caches = {tuple(one.get(name) for name in ("cache", "page", "pages"))
              for one, form in zip(found, kinds.parsed) if form.attends}
    if len(caches) > 1:
        raise Error("decode: caches of layers have different sizes: give all the same")
    first, *others = found
    return first | dict(zip(("cache", "page", "pages"), *caches)) | {
        "layers": len(kinds.order), "pattern": kinds.pattern, "angles-for": "kinds" if own else "all",
        **{f"layers-{letter}": fields_of(other) for letter, other in zip("bc", others)}}


def _shown(buffer: str) -> str:
    """As `shown`; the angles of a kind by its letter."""
    return own if (own := buffer.replace(".", "_")) in _KINDS_ANGLES else shown(buffer)


_DECODE = Form("decode", _KINDS, _shown, _values, typed=7)


@define("decode(Tensor(a!) ids, Tensor(b!) lengths, Tensor(c!) steps, Tensor(d!) ended, "
        "Tensor(e!) out, Tensor limits, Tensor? stop, Tensor embedding, Tensor? angles, "
        "Tensor? pages, Tensor[] weights, Tensor(f!)[] caches, Tensor final_norm, "
        "Tensor? final_norm_bias, Tensor w_head, Tensor? head_bias, Tensor? temperature, "
        "Tensor? seeds, Tensor? top_k, Tensor? top_p, Tensor? min_p, str form, float embed_scale, "
        "float logit_softcap, int pad, bool logprobs, int best, Tensor? memory=None, "
        "Tensor? w_head_scale=None, Tensor? w_head_zero=None, str head_packed='', "
        "Tensor? first_expert=None, Tensor[]? kind_angles=None) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)", "decode", _KINDS)
def _(ids, lengths, steps, ended, out, limits, stop, embedding, angles, pages, weights, caches,
      final_norm, final_norm_bias, w_head, head_bias, temperature, seeds, top_k, top_p, min_p, form,
      embed_scale, logit_softcap, pad, logprobs, best, memory=None, w_head_scale=None, w_head_zero=None,
      head_packed="", first_expert=None, kind_angles=None):
    kinds = parse_kinds(form)
    if kinds.counts() not in (None, (len(weights), len(caches))):
        raise Error(f"decode: {len(weights)} weights and {len(caches)} caches: give {kinds.counts()[0]} and "
                    f"{kinds.counts()[1]} of all layers")
    rotating = sum(parsed.rotates for parsed in kinds.parsed[1:])
    if kind_angles and len(kind_angles) != rotating:
        raise Error(f"decode: angles of {len(kind_angles)} kinds of layers behind the first one: give none, or "
                    f"{rotating}")
    layers = [*kinds.layers(weights, caches)] if kinds.order else [(0, weights, caches)]
    for kind, parsed in enumerate(kinds.parsed):
        given = [layer[1:] for layer in layers if layer[0] == kind]
        expect_layers("decode", parsed, *([t for each in every for t in each] for every in zip(*given)), pages,
                      lambda cache, _: cache.is_contiguous())
    for name, tensor in zip((*_STATE, "out"), (ids, lengths, steps, ended, out)):
        if not tensor.is_contiguous() or tensor.is_cuda and tensor.data_ptr() & 15:
            raise Error(f"decode: {name} is updated in place: give a contiguous tensor"
                        + (" at an address of 16 bytes" if tensor.is_cuda else ""))
    batch, device = ids.shape[0], ids.device
    tensors = [t for kind, *of_layer in layers for t in tensors_of_layers(kinds.parsed[kind], *of_layer, embedding)]
    others = [None if t is None else ready(t) for t in (
        limits, stop, embedding, angles, pages, *kinds.angles_behind(kind_angles or ()))] + [memory, first_expert]
    head = [None if t is None else ready(t) for t in (
        final_norm, final_norm_bias, w_head, w_head_scale, w_head_zero, head_bias, temperature, seeds, top_k,
        top_p, min_p)]
    chosen = torch.empty(batch, dtype=torch.int32, device=device)
    logit = torch.empty(batch, dtype=torch.float32, device=device)
    logprob = torch.empty(batch if logprobs else 0, dtype=torch.float32, device=device)
    of_best = batch if best else 0
    best_ids = torch.empty(of_best, best, dtype=torch.int32, device=device)
    best_logprobs = torch.empty(of_best, best, dtype=torch.float32, device=device)
    results = chosen, logit, logprob, best_ids, best_logprobs
    run(_DECODE, (form, embed_scale, logit_softcap, float(pad), "yes" if logprobs else "no", best, head_packed),
        (ids, lengths, steps, ended, out, *others, *tensors, *head), _given(logprobs, best, results))
    return results


_PLACE_OF_LOGPROBS = 24  # behind ids


@fake("decode")
def _(ids, *others, **_):
    numbers = ids.new_empty(ids.shape, dtype=torch.float32)
    logprobs, best = others[_PLACE_OF_LOGPROBS:_PLACE_OF_LOGPROBS + 2]
    shape = (*ids.shape, best) if best else (0, 0)
    return (ids.new_empty(ids.shape), numbers, numbers.new_empty(ids.shape if logprobs else 0),
            ids.new_empty(shape), numbers.new_empty(shape))


def decode(ids: Tensor, lengths: Tensor, steps: Tensor, ended: Tensor, out: Tensor,
           embedding: Tensor, weights: Sequence[Mapping[str, Tensor]],
           caches: Sequence[tuple[Tensor, Tensor]], final_norm: Tensor, w_head: Tensor | PackedWeight, heads: int,
           kv_heads: int | None = None, *, limits: Tensor | None = None, stop: Tensor | None = None,
           pages: Tensor | None = None, angles: Tensor | None = None,
           final_norm_bias: Tensor | None = None, head_bias: Tensor | None = None,
           temperature: Tensor | float | None = None, seeds: Tensor | int | None = None,
           top_k: Tensor | int | None = None, top_p: Tensor | float | None = None,
           min_p: Tensor | float | None = None, embed_scale: float = 1.0,
           logit_softcap: float = 0.0, pad: int = 0, logprobs: bool = False, best: int = 0,
           options: Mapping | None = None, group: Group | None = None) -> tuple[Tensor, ...]:
    """One token of a language model per sequence: embedding, layers, head and the next id, in one plan.

    The state of the sequences advances on the device, so n tokens are n calls, or n replays of a CUDA graph
    of one call, without work on the host in between. All layers are of one kind. No gradients.

    Args:
        ids: The last id of each sequence, whose key is not in the cache yet; then the next id. int32
            [batch], updated.
        lengths: Keys in the cache, int32 [batch], updated.
        steps: Number of ids chosen, int32 [batch], updated.
        ended: 0 while a sequence goes on, 1 if it ended with an id of `stop`, 2 if it reached its limit or
            the cache is full. An ended sequence keeps its state and caches; its entry of `ids` becomes
            `pad`. int32 [batch], updated.
        out: Column t gets the id of step t, int32 [batch, room], updated.
        embedding: [vocab, d].
        weights, caches, heads, kv_heads, pages, angles: As in `layer`. Positions are those in the cache.
        final_norm: Weight of the final RMSNorm, [d]; with `final_norm_bias` of a layer normalisation.
        w_head: Weight of the head, [vocab, d]; the embedding too, or without a group a ``PackedWeight``.
        limits: Most ids of each sequence, its prompt included, int32 [batch].
        stop: Ids that end a sequence, int32 [n].
        final_norm_bias: Bias of the final layer normalisation, [d].
        head_bias: Bias of the logits, [vocab].
        temperature, seeds, top_k, top_p, min_p: As in `sample`.
        embed_scale: Factor of the embedding's rows.
        logit_softcap: `softcap` of `sample`.
        pad: Id of sequences that have ended.
        logprobs: Also return log-probabilities.
        best: Also return the best ids and their log-probabilities, as in `sample`.
        options: The other arguments of `layer` by name: act, convention, eps and so on. convention and
            eps are those of `final_norm` too.
        group: As in `layer`: its ranks have slices of the layers. Each has the whole embedding, and the
            whole head or, to choose the best id, its rows of w_head, [vocab / ranks, d].

    Returns:
        (chosen, logit), int32 and float32 [batch]; with `logprobs` also the log-probability, float32
        [batch]; with `best` also the best ids, int32 [batch, best], and their log-probabilities.
    """
    head_packed, w_head_scale, w_head_zero = "", None, None
    if isinstance(w_head, PackedWeight):
        if group is not None:
            raise Error("decode: w_head is a packed weight: with a group give a dense one")
        if isinstance(embedding, Tensor) and tuple(embedding.shape) != (w_head.n, w_head.k):
            raise Error(f"decode: w_head is a packed weight [{w_head.n}, {w_head.k}]: give one of "
                        f"{list(embedding.shape)}")
        head_packed = packed_word("decode", w_head)
        w_head, w_head_scale, w_head_zero = w_head.w, w_head.scale, w_head.zero
    expect_given("decode", ids=ids, lengths=lengths, steps=steps, ended=ended, out=out,
                 embedding=embedding, final_norm=final_norm, w_head=w_head)
    if not head_packed:
        expect_tensors("decode", {"w_head": Kind(KINDS["data"], "[vocab, features]")}, w_head=w_head)
    expect_tensors("decode", _KINDS, ids=ids, lengths=lengths, steps=steps, ended=ended, out=out,
                   limits=limits, stop=stop, embedding=embedding, angles=angles, pages=pages,
                   final_norm=final_norm, final_norm_bias=final_norm_bias, w_head=w_head,
                   head_bias=head_bias)
    expect_values("decode", positive={}, words={}, counts=dict(pad=pad, best=best),
                  flags=dict(logprobs=logprobs), numbers=dict(
        embed_scale=embed_scale, logit_softcap=logit_softcap))
    for name, tensor, dimensions in (("ids", ids, 1), ("out", out, 2), ("embedding", embedding, 2)):
        if tensor.dim() != dimensions:
            raise Error(f"decode: {name} is {list(tensor.shape)}: give {_KINDS[name].shape}")
    if options is not None and not isinstance(options, Mapping):
        raise Error("decode: options are no mapping: give the layers' by name")
    memory, link = (None, "") if group is None else memory_of(
        "decode", group, embedding, ids.shape[0] * embedding.shape[1])
    try:
        form, flat, flat_caches = given_layers(embedding, weights, caches, heads, kv_heads, angles,
                                               ranks=0 if group is None else group.ranks, link=link,
                                               **(options or {}))
    except TypeError as error:
        raise Error(f"decode: options are not those of layer: {error}") from None
    temperature, seeds, _, top_k, top_p, min_p = _draw(
        "decode", embedding.new_empty(ids.shape[0], 1, device=ids.device), temperature, seeds, None,
        top_k, top_p, min_p)
    if limits is None:
        limits = torch.full_like(ids, 2**31 - 1)
    return _given(logprobs, best, call(
        OPS.decode, ids, lengths, steps, ended, out, limits, stop, embedding, angles, pages, flat,
        flat_caches, final_norm, final_norm_bias, w_head, head_bias, temperature, seeds, top_k,
        top_p, min_p, form, embed_scale, logit_softcap, pad, logprobs, best, memory, w_head_scale, w_head_zero,
        head_packed, first_expert_of(form, group, ids.device)))

"""layer: whole transformer layers against a cache of keys and values, as one op."""
import functools
import re
from typing import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .._checks import (FP8, KINDS, Kind, expect_given, expect_tensor, expect_tensors, expect_values, named,
                       several)
from .._custom import OPS, call, define, fake, wants_gradient
from .._layer_form import (FLOAT32, PACKED, PACKED_NETWORK, WEIGHTS, Choice, LayerForm, first_expert, form_of, parse,
                           with_constants)
from .._library import Error, Plan
from .._run import Form, ready, run
from ..distributed import Group
from .all_reduce import memory_of
from .packed import PackedWeight, format_of, packed_word


# The plan says more of weights and caches.
_KINDS = {"x": Kind(KINDS["data"], "[batch, tokens, features]"),
          "positions": Kind(KINDS["i32"], "[batch, tokens]"),
          "slots": Kind(KINDS["i32"], "[...]"),  # of tokens, or of sequences' states
          "angles": Kind(KINDS["f32"], "[positions, rotary]"),
          "lengths": Kind(KINDS["i32"], "[batch]"),
          "pages": Kind(KINDS["i32"], "[batch, pages of a sequence]"),
          "state_indices": Kind(KINDS["i32"], "[batch]"),
          "memory": Kind(KINDS["i64"], "the memory of a Group"),
          "first_expert": Kind(KINDS["i32"], "[1]"),
          **{name: Kind(KINDS["floats"] | KINDS["u8"] | FP8, "[...]") for name in ("weights", "tensors")},
          "caches": Kind(KINDS["floats"] | FP8, "[...]")}
_STATES = {**dict.fromkeys(("k_cache", "v_cache", "cache"), "a cache"),
           **dict.fromkeys(("states", "conv_state", "conv_q_state", "conv_k_state", "conv_v_state"), "a state")}
_NAMES = {"group": "memory", "state_indices": "slots", "b_head": "head_bias", **_STATES}


def shown(buffer: str) -> str:
    """The name of a buffer of the library in errors."""
    layer, name = re.fullmatch(r"(?:layers\.(\d+)\.)?(?:[a-c]\.)?(.+)", buffer).groups()
    is_of_layer = name in WEIGHTS or name in _STATES
    return _NAMES.get(name, name) + (f" of layer {layer or 0}" if is_of_layer else "")


def _expect_features(form: LayerForm, layers: int, count: int, tensors: Sequence[Tensor | None]) -> None:
    """That keys and values have the features of a head. The library knows the strides of views, and reads whole
    heads."""
    before, dim = len(form.before), form.get("dim")
    for at in range(layers):
        for cache in tensors[at * count + before:at * count + before + 2]:
            if cache.shape[-1] != dim:
                raise Error(f"layer: a cache of layer {at} is {list(cache.shape)}: give {dim} features of a head")


def values_of_layers(form: LayerForm, x: tuple[int, int, int], angles: Tensor | None, pages: Tensor | None,
                     tensors: Sequence[Tensor | None]) -> dict:
    """The sizes and options of layers, by the shape of x and some of the tensors."""
    batch, s, d = x
    before, states = len(form.before), form.library_state_count
    count = len(form.before + form.behind) + states
    layers = len(tensors) // count
    h, shared_h, input_h = (tensors[before + states + form.behind.index(name)].shape[-1]
                             if name in form.behind else None for name in ("w_down", "w_shared_down", "w_input_out"))
    page = count_of_pages = cache = None
    if form.attends:
        first = tensors[before]
        count_of_pages, page = (None, None) if pages is None else first.shape[:2]
        cache = first.shape[1 if form.is_latent else 2] if pages is None else pages.shape[1] * page
        if not form.is_latent:
            _expect_features(form, layers, count, tensors)
    options = {n: value for n, value in form.options.items() if n not in ("multiplier", "packed")}
    if "null-index" in options:  # an option of the library, no size
        options["null-index"] = str(options["null-index"])
    if form.get("packed"):
        options |= dict(zip(("weights", "group"), str(form.get("packed")).split("-")))
    return {"batch": batch, "s": s if s > 1 else None, "d": d, "h": h, "shared-h": shared_h, "input-h": input_h,
            "cache": cache, "page": page, "pages": count_of_pages, "layers": layers if layers > 1 else None,
            "positions": angles.shape[0] if form.rotates and angles is not None else None} | options


def _values(options, x, positions, angles, slots, lengths, pages, memory, first_expert, *tensors):
    form, places = options
    return values_of_layers(parse(form), x.shape, angles, pages, tensors) | dict(places) if x.numel() else None


def _values_of_both(options, x, positions, angles, slots, lengths, pages, state_indices, memory, first_expert,
                    *tensors):
    return _values(options, x, positions, angles, slots, lengths, pages, memory, first_expert, *tensors)


_LAYER = Form("layer", _KINDS, shown, _values)
# The layers of this form have caches for their tokens and states for their sequences.
_BOTH = Form("layer", _KINDS, lambda buffer: buffer if buffer == "state_indices" else shown(buffer), _values_of_both)


@functools.cache  # for good, as constants are
def _every_state(batch: int, device: torch.device) -> Tensor:
    return torch.arange(batch, dtype=torch.int32, device=device)


def expect_runs(form: str, weights: Sequence[Tensor], device: int) -> None:
    """That layers with weights of these shapes run on the device, -1 for the CPU: Error if they do not.
    Their plan for one token is made, which compiles its kernels."""
    parsed = parse(form)
    tensors = {name: torch.empty(w.shape, dtype=w.dtype, device="meta")
           for name, w in zip(parsed.weights, weights)}
    if parsed.get("packed") or parsed.get("quantise"):
        like = next(tensors[name] for name in ("attn_norm", "attn_post_norm", "ffn_norm") if name in tensors)
        width = like.shape[0]
        if str(parsed.get("packed")).startswith("int4"):
            like = tensors["w_gate_scale"]
    else:
        like = tensors["w_o"] if parsed.mixes else tensors["w_down"]
        width = like.shape[-2]
    x = torch.empty(1, 1, width, dtype=like.dtype, device="meta")
    of_states = ([] if not parsed.attends else [(1, 64, parsed.get("rank") + parsed.get("rope"))] if parsed.is_latent
                 else [(1, 64, parsed.get("kv-heads"), parsed.get("dim"))] * 2) + parsed.state_shapes(1)
    caches = parsed.library_states([x.new_empty(shape, dtype=parsed.cache_dtype(x.dtype)) for shape in of_states])
    if parsed.is_recurrent:
        caches[-1] = caches[-1].float()
    if parsed.mixer == "attention" or parsed.has_both:
        caches[:2] = [t.transpose(1, 2) for t in caches[:2]]
    tensors = with_constants(parsed, tensors, x)
    tensors = {name: w.float() if name in FLOAT32 else w for name, w in tensors.items()}
    rows = torch.empty(1, 1, dtype=torch.int32, device="meta")
    rotates = parsed.rotates
    angles = torch.empty(1, parsed.rotary, device="meta") if rotates else None
    places = (None if parsed.shares_keys else rows, rows[0]) if parsed.attends else (
        rows[0] if parsed.is_recurrent else None, None)
    memory = torch.empty(Group.TABLE_WORDS, dtype=torch.int64, device="meta") if parsed.get("ranks") else None
    first = torch.empty(1, dtype=torch.int32, device="meta") if parsed.get("own-experts") else None
    inputs = (x, rows if rotates else None, angles, *places, None, *((rows[0],) if parsed.has_both else ()), memory,
              first, *map(tensors.get, parsed.before), *caches, *map(tensors.get, parsed.behind))
    kind = _BOTH if parsed.has_both else _LAYER
    kind.expect_fits(Plan(device, kind.problem((form, ()), inputs)), inputs)


def _together(weights: Sequence[Mapping]) -> tuple[list[dict[str, Tensor]], str, int]:
    """The tensors of layers with packed weights, the word for their format, and h; "" without."""
    packed = [w for one in weights for w in one.values() if isinstance(w, PackedWeight)]
    if not packed:
        return list(weights), "", 0
    first = packed[0]
    found = []
    for one in weights:
        names = {n for n, w in one.items() if isinstance(w, PackedWeight)}
        others = sorted(names ^ set(PACKED))
        if others and names != set(PACKED_NETWORK):
            raise Error(f"layer: {others[0]} is {'not' if others[0] in PACKED else 'a weight that is'} "
                        f"packed: packed weights are of {', '.join(PACKED)} together")
        tensors = {}
        for name, w in one.items():
            if not isinstance(w, PackedWeight):
                tensors[name] = w
                continue
            if format_of(w) != format_of(first):
                raise Error(f"layer: {name} has other groups than the first packed weight, another format, or "
                            "zero points where that has none")
            tensors |= {name: w.w, f"{name}_scale": w.scale}
            if w.zero is not None:
                tensors[f"{name}_zero"] = w.zero
        found.append(tensors)
    return found, packed_word("layer", first), weights[0]["w_down"].k


def _in_float32(parsed: LayerForm, weights: Sequence[Tensor]) -> list[Tensor]:
    """The weights of layers, those in float32 that kernels read so: by one kernel for the small ones of all layers."""
    found, names = list(weights), parsed.weights
    others = [at for at, w in enumerate(found) if names[at % len(names)] in FLOAT32 and w.dtype != torch.float32]
    if others:
        wide = [torch.empty_like(found[at], dtype=torch.float32) for at in others]
        torch._foreach_copy_(wide, [found[at] for at in others])
        for at, w in zip(others, wide):
            found[at] = w
    return found


def tensors_of_layers(parsed: LayerForm, weights: Sequence[Tensor], caches: Sequence[Tensor],
                      like: Tensor) -> list[Tensor | None]:
    """The tensors of all layers in the library's order. Constants are on the device of `like`."""
    count, states, found = len(parsed.weights), parsed.states, []
    weights = _in_float32(parsed, weights)
    for at in range(len(weights) // count):
        given = zip(parsed.weights, weights[at * count:(at + 1) * count])
        tensors = {name: w.contiguous() for name, w in given}
        if parsed.constants:
            tensors = with_constants(parsed, tensors, like)
        found += map(tensors.get, parsed.before)
        found += parsed.library_states(caches[states * at:states * at + states])
        found += map(tensors.get, parsed.behind)
    return found


def has_layout(cache: Tensor) -> bool:
    """Whether keys or values [batch, heads, cache, features] lie in memory as the op reads them:
    of each token all heads next to each other."""
    return cache.transpose(1, 2).is_contiguous()


def _has_pages(cache: Tensor, first: Tensor) -> bool:
    """Whether pages [pages, page, heads, features] lie in memory as the op reads them: one row behind
    the other, with heads as far from each other as those of the first cache."""
    if cache.dim() != 4 or first.dim() != 4:
        return False
    of_pages, row, head, feature = cache.stride()
    return (feature == 1 and head % cache.shape[3] == 0 and head == first.stride(2)
            and row == cache.shape[2] * head and of_pages == cache.shape[1] * row)


def _places_of(parsed: LayerForm, caches: Sequence[Tensor], pages: Tensor | None) -> tuple[tuple[str, int | str], ...]:
    """Sizes and options that shapes do not say, which are of the plan's key: where caches lie in memory."""
    if parsed.states_are_indexed:
        conv, states = caches[0], caches[1]
        return (("states", len(states)), ("conv-block", conv.stride(0)), ("state-block", states.stride(0)),
                ("state-dtype", "f32" if states.dtype is torch.float32 else "bf16"))
    gap = pages is not None and not parsed.is_latent and caches[0].stride(2) != caches[0].shape[3]
    return (("kv-head", caches[0].stride(2)),) if gap else ()


def _is_part_of_pages(cache: Tensor, first: Tensor) -> bool:
    """Whether the entries of a cache are contiguous, and as far from each other as those of the first layer."""
    return (len(cache) > 0 and cache[0].is_contiguous() and cache.stride(0) == first.stride(0) >= cache[0].numel()
            and cache.shape == first.shape and cache.dtype is first.dtype)


def expect_layers(op: str, parsed, weights: Sequence[Tensor], caches: Sequence[Tensor], pages: Tensor | None,
                  has_pages: Callable[[Tensor, Tensor], bool]) -> None:
    """That there are the tensors of whole layers, and caches that lie in memory as the op reads them."""
    count, states = len(parsed.weights), parsed.states
    layers = len(weights) // count
    if not layers or len(caches) != states * layers or len(weights) != count * layers:
        raise Error(f"{op}: {len(weights)} weights and {len(caches)} caches: give {count} and {states} of each layer")
    for at, cache in enumerate(caches):
        if parsed.states_are_indexed:
            if not _is_part_of_pages(cache, caches[at % states]):
                raise Error(f"{op}: states of layer {at // states} are {list(cache.shape)} with strides of "
                            f"{list(cache.stride())}: give contiguous ones, as far apart as those of layer 0")
            if cache.is_cuda and (cache.data_ptr() | cache.stride(0) * cache.element_size()) & 15:
                raise Error(f"{op}: states are not at addresses of 16 bytes")
            continue
        if parsed.mixer != "attention" and not (parsed.has_both and at % states < 2):
            if not cache.is_contiguous():
                raise Error(f"{op}: a {'cache' if parsed.is_latent else 'state'} is not contiguous")
            continue
        if cache.dim() != 4:
            raise Error(f"{op}: caches is {list(cache.shape)}: give [batch, kv_heads, cache, features]")
        lies = has_layout(cache) if pages is None else has_pages(cache, caches[0])
        if not lies or cache.is_cuda and cache.data_ptr() & 15:
            order = "batch, cache" if pages is None else "pages, page"
            raise Error(f"{op}: a cache does not lie in memory as [{order}, heads, features], or not at an address "
                        "of 16 bytes")


@define("layer(Tensor x, Tensor? positions, Tensor? angles, Tensor? slots, Tensor? lengths, "
        "Tensor? pages, Tensor[] weights, Tensor(a!)[] caches, str form, Tensor? memory=None, "
        "Tensor? first_expert=None) -> Tensor", "layer", _KINDS)
def _(x, positions, angles, slots, lengths, pages, weights, caches, form, memory=None, first_expert=None):
    parsed = parse(form)
    expect_layers("layer", parsed, weights, caches, pages, _has_pages)
    x = ready(x)
    y = torch.empty_like(x)
    tensors = tensors_of_layers(parsed, weights, caches, x)
    positions, angles, slots, lengths = (None if t is None else ready(t) for t in (positions, angles, slots, lengths))
    table = None if pages is None else ready(pages)
    both = (_every_state(len(x), x.device),) if parsed.has_both else ()
    run(_BOTH if both else _LAYER, (form, _places_of(parsed, caches, pages)),
        (x, positions, angles, slots, lengths, table, *both, memory, first_expert, *tensors), (y,))
    return y


@fake("layer")
def _(x, *others):
    return x.new_empty(x.shape)


@define("network(Tensor x, Tensor[] weights, str form) -> Tensor", "layer", _KINDS)
def _(x, weights, form):
    """The layer of a form without a mixer. PyTorch's inductor refuses ops that write to a list of no tensors."""
    parsed = parse(form)
    expect_layers("layer", parsed, weights, [], None, _has_pages)
    x = ready(x)
    y = torch.empty_like(x)
    run(_LAYER, (form, ()), (x, *[None] * 7, *tensors_of_layers(parsed, weights, [], x)), (y,))
    return y


@fake("network")
def _(x, *others):
    return x.new_empty(x.shape)


def _own_experts(weights: Mapping[str, Tensor], packed: str, h: int, ranks: int) -> int:
    """How many whole experts a rank's weights have; 0 if they have some features of all."""
    experts = weights["w_router"].shape[0]
    # Rows of packed weights are in tiles of 16.
    of_rank = weights["w_gate_scale"].shape[0] * 16 // h if packed else weights["w_down"].shape[0]
    if of_rank == experts or not ranks:
        return 0
    if of_rank * ranks != experts:
        raise Error(f"layer: w_down has {of_rank} experts of {experts} on each of {ranks} ranks: give experts / "
                    "ranks whole ones, or some features of all")
    return of_rank


def first_expert_of(form: str, group: Group | None, device: torch.device) -> Tensor | None:
    """The input of layers of whole experts; None of others."""
    experts = parse(form).get("own-experts")
    return first_expert(experts * group.rank, device) if experts else None


def _expect_dims(name: str, tensor, shape: str) -> None:
    expect_tensor("layer", name, tensor)
    if tensor.dim() != 4 if "cache" in name else not tensor.dim():
        raise Error(f"layer: {name} is {list(tensor.shape)}: give {shape}")


def given_layers(x: Tensor, weights, caches, heads, kv_heads, angles, *, act="silu",
                 convention="llama", eps=1e-6, softcap=0.0, scale=0.0, rope_scale=0.0, top_k=0,
                 score="softmax", order="before", renormalise=False, packing="halves", groups=0,
                 top_groups=0, group_score="max", route_scale=1.0, parallel=False,
                 rotation="halves", constants=(), grouped=False, norm_last=False, multiplier=1.0,
                 wide_logits=False, ranks=0, link="peers", window=0,
                 v_norm=False, gated_rows=False) -> tuple[str, list[Tensor], list[Tensor]]:
    """The form of a call's layers, and their weights and caches one after the other; the arguments
    are those of layer(). `x` has a gradient if the call's input has."""
    for name, given, of in (("weights", weights, Mapping), ("caches", caches, (tuple, list))):
        if not isinstance(given, (list, tuple)) or not all(isinstance(one, of) for one in given):
            raise Error(f"layer: {name} are no list of what each layer has: give mappings of "
                        "weights, and pairs of caches")
    for at, one in enumerate(weights):
        for name, tensor in one.items():
            if not isinstance(name, str) or not isinstance(tensor, (Tensor, PackedWeight)):
                raise Error(f"layer: weight {name} of layer {at} is no tensor: give tensors by name")
    for pair in caches:
        several("layer", "a pair of caches", pair, 2, "keys and values of each layer")
    # The form is that of the first layer; the custom op checks the tensors of the others.
    for name, tensor in weights[0].items() if weights else ():
        if isinstance(tensor, Tensor):
            _expect_dims(f"weight {name} of layer 0", tensor, "[rows, ...]")
    for tensor in caches[0] if caches else ():
        _expect_dims("a cache of layer 0", tensor, "[batch, kv_heads, cache, features], or with pages "
                                                   "[pages, page_size, kv_heads, features]")
    kv_heads = heads if kv_heads is None else kv_heads
    # They become parts of the string `form`.
    expect_values("layer", positive=dict(heads=heads, kv_heads=kv_heads), counts=dict(
        top_k=top_k, groups=groups, top_groups=top_groups, window=window), words=dict(
        act=act, convention=convention, score=score, order=order, packing=packing,
        group_score=group_score, rotation=rotation), numbers=dict(
        eps=eps, softcap=softcap, scale=scale, rope_scale=rope_scale, route_scale=route_scale,
        multiplier=multiplier), flags=dict(renormalise=renormalise, parallel=parallel,
                                           grouped=grouped, norm_last=norm_last,
                                           wide_logits=wide_logits, v_norm=v_norm, gated_rows=gated_rows))
    if not isinstance(constants, (list, tuple)) or not all(isinstance(c, str) for c in constants):
        raise Error(f"layer: constants are {named(constants)}: give names of weights")
    if not weights or len(weights) != len(caches):
        raise Error(f"layer: weights of {len(weights)} layers and caches of {len(caches)}")
    rows = weights[0]["w_qkv"].n if isinstance(weights[0].get("w_qkv"), PackedWeight) else None
    weights, packed, h = _together(weights)
    flat = [tensor for one in weights for tensor in one.values()]
    if wants_gradient(x, *flat):
        raise Error("layer: it has no gradient: use torch.no_grad()")
    first = weights[0]
    dim = (first["w_q"].shape[0] // heads // (1 + gated_rows) if "w_q" in first else
           (rows or first["w_qkv"].shape[0]) // (heads + 2 * kv_heads) if "w_qkv" in first else 0)
    quantise = ""
    if not packed and first.get("w_down") is not None and first["w_down"].dtype == torch.float8_e4m3fn:
        of_down = first.get("w_down_scale")
        if of_down is None:
            raise Error("layer: w_down of float8_e4m3fn without w_down_scale: give scales of rows or of blocks")
        quantise = "token" if of_down.dim() < first["w_down"].dim() else "block"
    choice = None
    if top_k and "w_router" in weights[0]:
        choice = Choice(weights[0]["w_router"].shape[0], top_k, score, order, renormalise, packing,
                        groups, top_groups, group_score, route_scale, wide_logits, experts_of_rank=
                        _own_experts(weights[0], packed, h, ranks) if "w_down" in weights[0] else 0)
    form = form_of(tuple(weights[0]), heads=heads, kv_heads=kv_heads, dim=dim, act=act, eps=eps,
                   convention=convention, rotary=0 if angles is None else angles.shape[-1],
                   softcap=softcap, scale=scale, rope_scale=rope_scale, rotates=angles is not None,
                   choice=choice, constants=constants, parallel=parallel, rotation=rotation,
                   grouped=grouped, norm_rows="q_norm" in first and first["q_norm"].shape[0] != dim,
                   norm_last=norm_last, multiplier=multiplier, packed=packed, h=h, quantise=quantise,
                   ranks=ranks, link=link, window=window, v_norm=v_norm, gated_rows=gated_rows,
                   head_gates="w_g" in first and first["w_g"].shape[0] == heads != heads * dim,
                   head_scales="k_scale" in first and first["k_scale"].shape != (1,))
    for one in weights:
        other = sorted(set(one) ^ set(weights[0]))
        if other:
            raise Error(f"layer: {other[0]} is a weight of some layers and not of others: run "
                        "those in a call of their own")
    flat = [one[name] for one in weights for name in parse(form).weights]
    return form, flat, [tensor for pair in caches for tensor in pair]


def layer(x: Tensor, weights: Sequence[Mapping[str, Tensor]],
          caches: Sequence[tuple[Tensor, Tensor]], lengths: Tensor, heads: int,
          kv_heads: int | None = None, *, slots: Tensor | None = None, pages: Tensor | None = None,
          positions: Tensor | None = None, angles: Tensor | None = None, act: str = "silu",
          convention: str = "llama", eps: float = 1e-6, softcap: float = 0.0, scale: float = 0.0,
          rope_scale: float = 0.0, top_k: int = 0, score: str = "softmax", order: str = "before",
          renormalise: bool = False, packing: str = "halves", groups: int = 0, top_groups: int = 0,
          group_score: str = "max", route_scale: float = 1.0, parallel: bool = False,
          rotation: str = "halves", constants: Sequence[str] = (), grouped: bool = False,
          norm_last: bool = False, multiplier: float = 1.0, wide_logits: bool = False,
          window: int = 0, v_norm: bool = False, gated_rows: bool = False, group: Group | None = None) -> Tensor:
    """Transformer layers in one plan, one after the other, for new tokens of sequences with a KV cache.

    A layer is norm, q, k and v, RoPE, attention over the cache, output projection, norm, and an MLP or a
    mixture of experts, each with its residual. The weights present in `weights` decide about its form. No
    gradients.

    **Weights.** All layers have the same names:

    * attention: w_q [heads · dim, d], w_k and w_v [kv_heads · dim, d], w_o [d, heads · dim]. Biases are
      b_q, b_k, b_v and b_o. One w_qkv [(heads + 2 · kv_heads) · dim, d] with b_qkv can replace the three:
      all rows of q, then k, then v; with `grouped` per head of k its heads of q, then k, then v. A logit
      per head may join the softmax: sinks [heads]. Sigmoids of a product may multiply the output: w_g
      [heads · dim, d], or [heads, d] with one for each head. With `gated_rows` w_q is [2 · heads · dim, d]: the
      rows of each head, and then those of its gate.

    * norms before: attn_norm and ffn_norm [d], with attn_norm_bias and ffn_norm_bias as layer
      normalisations. Without ffn_norm the MLP takes the same normalised input as attention, in parallel;
      with `parallel` it takes the layer's input, normalised by ffn_norm. Without both only the norms
      behind remain.

    * norms behind: attn_post_norm and ffn_post_norm [d], of what is added to the residual.

    * norms of q and k: q_norm and k_norm, [dim] per head, or [heads · dim] and [kv_heads · dim] over all
      heads; with q_norm_bias and k_norm_bias as layer normalisations.

    * MLP: w_gate and w_up [h, d], w_down [d, h], biases b_up and b_down; without w_gate it is
      ``act(x w_upᵀ) w_downᵀ``.

    * mixture of experts: w_router [experts, d]; w_gate and w_up [experts, h, d], or w_gate_up
      [experts, 2h, d] in the order of `packing`; w_down [experts, d, h]. Optional: b_router, choice_bias
      [experts] (the bias of `moe_route`), b_gate and b_up [experts, h] or b_gate_up, b_down [experts, d].
      A shared MLP beside the experts: w_shared_gate and w_shared_up [n, d], w_shared_down [d, n],
      weighted by ``sigmoid(x w_shared_routerᵀ)`` if w_shared_router [1, d] is there.

    * experts beside a network, each with norms of their own, in layers with norms before and behind: the
      shared MLP takes the result of ffn_norm, the router that of router_norm, and the experts that of
      experts_norm. Their results pass shared_post_norm and experts_post_norm, and are added in front of
      ffn_post_norm. expert_scale [experts] multiplies the weights of a token's experts.

    * keys of another layer: without w_k and w_v, and without k_norm, a layer attends to what is in its
      caches, and writes nothing there.

    * an input of the layer's own: with layer_input [batch, tokens, p], w_input_gate [p, d], w_input_out
      [d, p] and input_norm [d], ``norm((act(y w_input_gateᵀ) * layer_input) w_input_outᵀ)`` is added to y.

    * q_factors: float32 [batch, tokens], a factor of the queries of each token.

    * residual_scale: float32 [d], a factor per feature of what is added to the residual; or out_scale and ffn_scale,
      those of attention's and of the MLP's result.

    * gate_scale: float32 [h], factors of the gates of an MLP in front of `act`, without biases.

    * layer_scalar: float32 [1], a factor of the layer's output.

    **fp8.** w_qkv, w_o, w_gate, w_up or w_gate_up, and w_down may be float8_e4m3fn, or the network's weights
    alone. Each has float32 scales of rows or of 128 x 128 blocks, whose name is the weight's and "_scale".
    The layers then quantise the inputs of these products, as `linear_fp8` does.

    **Caches of float8_e4m3fn** have k_scale and v_scale in each layer's weights: float32 [1], or [kv_heads]
    both, as in `qkv` and `attention`.

    **Packed weights.** In layers with w_qkv and a gate, w_qkv, w_o, w_gate, w_up and w_down may be
    ``PackedWeight`` of one format, or w_gate, w_up and w_down alone, as in gpt-oss. Weights of experts have
    the rows of all experts: [experts · h, d], and w_down [experts · d, h].

    Args:
        x: Hidden states of the new tokens, [batch, tokens, d].
        weights: One mapping from names to tensors per layer.
        caches: One (keys, values) per layer, written in place: [batch, kv_heads, cache, dim] in memory
            order [batch, cache, kv_heads, dim]; with `pages` [pages, page_size, kv_heads, dim],
            page_size a power of two from 16 to 256. There, keys and values of a head may be neighbours
            in one tensor: ``kv.split(dim, -1)``.
        lengths: int32 [batch], the number of keys of each sequence, the new tokens included, which are
            its last.
        heads, kv_heads: Numbers of heads of q, and of k and v; kv_heads is heads by default.
        slots: int32 [batch, tokens], the cache row for each new key and value:
            ``sequence · cache + position``, or with pages ``page · page_size + row``. By default the last
            rows of `lengths`; those before the first key or behind the cache's end have none. A slot out of
            range writes nothing.
        pages: int32 [batch, n], key t of sequence i is in page ``pages[i, t // page_size]``. A page id
            out of range stands for a page of zeros.
        positions: int32 [batch, tokens], rows of `angles`; by default the positions in the cache.
        angles: float32 [rows, rotary], angles of RoPE as in `rope`. None: no RoPE.
        act, packing: As in `moe_ffn`.
        convention, eps: Settings of the norms, as in `rmsnorm`.
        softcap, scale: As in `attention`.
        rope_scale, rotation: `scale` and `rotation` of `rope`.
        top_k, score, order, renormalise, groups, top_groups, group_score: As in `moe_route`.
        route_scale: `scale` of `moe_route`.
        parallel: See the norms before.
        constants: Names of norm weights and biases that the layers lack: weights of 1, biases of 0.
        grouped: See w_qkv.
        norm_last: Norms of q and k are applied after RoPE.
        multiplier: Factor of what is added to the residual.
        wide_logits: Compute router logits as if x and w_router were float32.
        window: As in `attention`: a token sees this many keys up to its own, 0 for all. Pages that hold no key of
            a window are not read.
        v_norm: Heads of v have an RMSNorm without weights.
        gated_rows: See w_q.
        group: A `fftune.distributed.Group` whose ranks have slices of the layers: some of the heads, and
            some of the features between up and down. Ranks of a mixture may have experts / ranks whole
            experts instead, those of the first rank first, and the whole router. heads and kv_heads are
            the slice's. The outputs of attention and of the MLP are summed over the ranks within the plan.
            x, and all weights that are not sliced, are the same on all ranks; one rank has b_o and b_down,
            the others zeros.

    Returns:
        [batch, tokens, d].
    """
    expect_given("layer", x=x, lengths=lengths)
    expect_tensors("layer", _KINDS, x=x, lengths=lengths, slots=slots, pages=pages,
                   positions=positions, angles=angles)
    memory, link = (None, "") if group is None else memory_of("layer", group, x, x.numel())
    form, flat, flat_caches = given_layers(
        x, weights, caches, heads, kv_heads, angles, act=act, convention=convention, eps=eps,
        softcap=softcap, scale=scale, rope_scale=rope_scale, top_k=top_k, score=score, order=order,
        renormalise=renormalise, packing=packing, groups=groups, top_groups=top_groups,
        group_score=group_score, route_scale=route_scale, parallel=parallel, rotation=rotation,
        constants=constants, grouped=grouped, norm_last=norm_last, multiplier=multiplier,
        wide_logits=wide_logits, window=window, v_norm=v_norm, gated_rows=gated_rows,
        ranks=0 if group is None else group.ranks, link=link)
    shares = parse(form).shares_keys
    if (slots is None and not shares) or positions is None:
        batch, s, _ = x.shape
        places = (lengths[:, None] - s
                  + torch.arange(s, dtype=torch.int32, device=x.device)).to(torch.int32)
        if positions is None and angles is not None:
            positions = places
        if slots is None and not shares:
            page = caches[0][0].shape[1]
            room = caches[0][0].shape[2] if pages is None else pages.shape[1] * page
            at = places.clamp(0, room - 1).long()
            slots = (at + torch.arange(batch, device=x.device)[:, None] * room if pages is None else
                     pages.gather(1, at // page) * page + at % page)
            # The place before a sequence's first key, or behind its last, may be another sequence's.
            slots = torch.where(at == places, slots, -1).int()
    return call(OPS.layer, x, positions, angles, slots, lengths, pages, flat, flat_caches, form, memory,
                first_expert_of(form, group, x.device))


def delta_layers(x: Tensor, weights: Sequence[Mapping[str, Tensor]], states: Sequence[tuple[Tensor, Tensor]],
                 state_indices: Tensor, heads: int, v_heads: int, *, act: str = "silu", convention: str = "llama",
                 eps: float = 1e-6, mixer_eps: float = 1e-6, null_index: int = -1, state_layout: str = "kv",
                 choice: Choice | None = None) -> Tensor:
    """Layers with the gated delta rule, as `layer` has those with attention, whose states are entries of caches.

    The weights of q, k and v are packed (w_qkv, w_z, w_b, w_a) or grouped (w_qkvz, w_ba), with w_conv [channels,
    width], A_log and dt_bias [v_heads], mixer_norm [v_dim] and w_o; those of the network are as in `layer`.

    Args:
        x: [batch, tokens, d].
        weights: One mapping for each layer.
        states: For each layer the inputs of the convolution, [n, channels, entries] or [n, entries, channels], and the
            states, [n, v_heads, dim, v_dim] for state_layout="kv" or [n, v_heads, v_dim, dim] for "vk", in float32 or
            bfloat16. They are updated in place. Entries are contiguous, and may be parts of pages; all layers have
            the same strides.
        state_indices: int32 [batch], the entry of each sequence; one of at most `null_index`, -1 or 0, is padding.
        choice: How a token chooses experts, in layers with a router.

    Returns:
        [batch, tokens, d].
    """
    first, (conv, cache) = weights[0], states[0]
    channels, width = first["w_conv"].shape
    v_dim = first["mixer_norm"].shape[0]
    dim = (channels - v_heads * v_dim) // (2 * heads)
    order = "channels" if conv.shape[1] == channels else "entries"
    form = form_of(
        tuple(first), heads=heads, kv_heads=0, dim=dim, act=act, eps=eps, convention=convention, rotary=0, softcap=0.0,
        scale=0.0, rope_scale=0.0, rotates=False, choice=choice, mixer="gated-delta-rule", width=width,
        v_heads=v_heads, v_dim=v_dim, mixer_eps=mixer_eps, of_states={
            "conv-indices": "yes", "conv-order": order, "conv-entries": conv.shape[2 if order == "channels" else 1],
            "state-layout": state_layout, "null-index": null_index})
    names = parse(form).weights
    return call(OPS.layer, x, None, None, state_indices, None, None, [one[name] for one in weights for name in names],
                [tensor for pair in states for tensor in pair], form)

"""Whole transformer layers against a cache of keys and values, as one op."""
import functools
from dataclasses import dataclass
from typing import Mapping, Sequence

import torch
from torch import Tensor

from ._checks import check_number, expect_given, expect_tensors, named, several
from ._custom import OPS, call, define, expect, fake, wants_gradient
from ._library import Error
from ._run import Form, ready, run

# The tensors of one layer in the order of the op's buffers; those that a layer has not are left out.
_BEFORE_CACHES = ("attn_norm", "attn_norm_bias", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "q_norm",
                  "k_norm")
_BEHIND_CACHES = ("w_o", "b_o", "attn_post_norm", "ffn_norm", "ffn_norm_bias", "w_router", "w_gate",
                  "w_up", "w_gate_up", "w_down", "b_up", "b_down", "ffn_post_norm")
WEIGHTS = _BEFORE_CACHES + _BEHIND_CACHES
_OPTIONS = ("heads", "kv-heads", "dim", "rotary", "experts", "top-k", "act", "norm", "post-norms",
            "block", "ffn", "score", "order", "renormalise", "gate-up", "convention", "eps",
            "qkv-bias", "qk-norm", "out-bias", "ffn-bias", "rotation", "angles", "softcap", "scale",
            "rope-scale")


@dataclass(frozen=True)
class Choice:
    """How a token chooses experts, as in ops.moe_route, and how w_gate_up has gate and up."""

    experts: int
    top_k: int
    score: str = "softmax"
    order: str = "before"
    renormalise: bool = False
    packing: str = "halves"


@dataclass(frozen=True)
class LayerForm:
    """What the string `form` of the op says: the tensors that a layer has, and its options."""

    before: tuple[str, ...]
    behind: tuple[str, ...]
    options: dict

    @property
    def weights(self) -> tuple[str, ...]:
        return self.before + self.behind

    def get(self, name: str, otherwise=None):
        return self.options.get(name, otherwise)


@functools.lru_cache(256)
def parse(form: str) -> LayerForm:
    found: dict = dict(entry.split("=") for entry in form.split(" "))
    names = found.pop("weights").split(",")
    for name in found.keys() & {"heads", "kv-heads", "dim", "rotary", "experts", "top-k"}:
        found[name] = int(found[name])
    for name in found.keys() & {"eps", "softcap", "scale", "rope-scale"}:
        found[name] = float(found[name])
    return LayerForm(tuple(n for n in _BEFORE_CACHES if n in names),
                     tuple(n for n in _BEHIND_CACHES if n in names), found)


def form_of(names: Sequence[str], *, heads: int, kv_heads: int, dim: int, act: str, eps: float,
            convention: str, rotary: int, softcap: float, scale: float, rope_scale: float,
            rotates: bool, choice: Choice | None = None) -> str:
    """The form of layers with weights of these names: "name=value", with spaces between."""
    unknown = sorted(set(names) - set(WEIGHTS))
    packed = "w_gate_up" in names
    needed = {"attn_norm", "w_q", "w_k", "w_v", "w_o", "w_gate_up" if packed else "w_up",
              "w_down"} - set(names)
    if unknown or needed:
        raise Error(f"layer: a layer has {'no ' + sorted(needed)[0] if needed else unknown[0]}: "
                    f"its weights are called {', '.join(WEIGHTS)}")
    for group in (("b_q", "b_k", "b_v"), ("q_norm", "k_norm"), ("attn_post_norm", "ffn_post_norm")):
        if 0 < sum(name in names for name in group) < len(group):
            raise Error(f"layer: give all of {', '.join(group)}, or none")
    layer_norm, gated = "attn_norm_bias" in names, "w_gate" in names or packed
    if packed and ("w_gate" in names or "w_up" in names):
        raise Error("layer: w_gate_up is both w_gate and w_up: give it, or those")
    if ("w_router" in names) != (choice is not None) or packed and choice is None:
        raise Error("layer: a mixture of experts has w_router and top_k: give both"
                    + (", or w_gate and w_up in the place of w_gate_up" if packed else ""))
    if choice and (not gated or {"b_up", "b_down"} & set(names)):
        raise Error("layer: experts have gates and no biases")
    if "ffn_norm" in names and ("ffn_norm_bias" in names) != layer_norm:
        raise Error("layer: give biases of both norms, or of none")
    biased = "b_down" in names
    if ("b_up" in names) != (biased and not gated):
        raise Error("layer: b_up is of a feed-forward network without a gate, beside b_down")
    options = {"weights": ",".join([n for n in WEIGHTS if n in names]), "heads": heads, "kv-heads": kv_heads,
               "dim": dim, "act": act, "eps": float(eps)}
    if layer_norm:
        options["norm"] = "layer"
    else:
        options["convention"] = convention
    for name, holds, value in (
            ("post-norms", "attn_post_norm" in names, "yes"),
            ("block", "ffn_norm" not in names, "parallel"),
            ("ffn", choice or not gated, "moe" if choice else "plain"),
            ("qkv-bias", "b_q" in names, "yes"), ("qk-norm", "q_norm" in names, "yes"),
            ("out-bias", "b_o" in names, "yes"), ("ffn-bias", biased, "yes"),
            ("softcap", softcap, float(softcap)), ("scale", scale, float(scale)),
            ("rotation", not rotates, "none"), ("angles", rotates, "table"),
            ("rope-scale", rotates and rope_scale, float(rope_scale)),
            ("rotary", rotates and rotary != dim, rotary)):
        if holds:
            options[name] = value
    if choice:
        options |= {"experts": choice.experts, "top-k": choice.top_k, "score": choice.score,
                    "order": choice.order, "renormalise": "yes" if choice.renormalise else "no"}
        if packed:
            options["gate-up"] = choice.packing
    return " ".join([f"{name}={value}" for name, value in options.items()])


def _shapes(form: LayerForm, d: int, h: int) -> dict[str, tuple[int, ...]]:
    heads, kv_heads, dim = form.get("heads"), form.get("kv-heads"), form.get("dim")
    shapes = dict.fromkeys(WEIGHTS, (d,))
    shapes |= dict.fromkeys(("w_k", "w_v"), (kv_heads * dim, d))
    shapes |= dict.fromkeys(("b_k", "b_v"), (kv_heads * dim,))
    shapes |= dict.fromkeys(("q_norm", "k_norm"), (dim,))
    experts = (form.get("experts"),) if form.get("experts") else ()
    return shapes | dict(w_q=(heads * dim, d), b_q=(heads * dim,), w_o=(d, heads * dim),
                         w_router=(*experts, d), w_gate=(*experts, h, d), w_up=(*experts, h, d),
                         w_gate_up=(*experts, 2 * h, d), w_down=(*experts, d, h), b_up=(h,))


def _expect_three(x: Tensor) -> None:
    if x.dim() != 3:
        raise Error(f"layer: x is {list(x.shape)}: give [batch, tokens, features]")


def _values(options, x, positions, angles, slots, lengths, *own):
    form = parse(options[0])
    _expect_three(x)
    batch, s, d = x.shape
    before, count = len(form.before), len(form.weights) + 2
    layers = len(own) // count
    h = own[count - 1 - form.behind[::-1].index("w_down")].shape[-1]
    shapes = _shapes(form, d, h)
    cache = own[before].shape[2]
    for at in range(layers):
        tensors = own[at * count:(at + 1) * count]
        for name, tensor in zip(form.before, tensors):
            expect("layer", f"{name} of layer {at}", tensor, shapes[name], x.dtype)
        for name, tensor in zip(form.behind, tensors[before + 2:]):
            expect("layer", f"{name} of layer {at}", tensor, shapes[name], x.dtype)
        for tensor in tensors[before:before + 2]:
            expect("layer", f"a cache of layer {at}", tensor,
                   (batch, form.get("kv-heads"), cache, form.get("dim")), x.dtype)
    expect("layer", "lengths", lengths, (batch,), torch.int32)
    expect("layer", "slots", slots, (batch, s), torch.int32)
    rotates = form.get("rotation") != "none"
    if rotates and (positions is None or angles is None):
        raise Error("layer: no positions and angles: give both")
    if rotates:
        expect("layer", "positions", positions, (batch, s), torch.int32)
        expect("layer", "angles", angles, (angles.shape[0], form.get("rotary", form.get("dim"))),
               torch.float32)
    if not x.numel():
        return None
    return (batch, s if s > 1 else None, d, h, cache, layers if layers > 1 else None,
            angles.shape[0] if rotates else None, *map(form.get, _OPTIONS))


_LAYER = Form("layer", False,
              ("batch", "s", "d", "h", "cache", "layers", "positions", *_OPTIONS), _values,
              strided=True)


def has_layout(cache: Tensor) -> bool:
    """Whether keys or values [batch, heads, cache, features] lie in memory as the op reads them:
    of each token all heads next to each other."""
    return cache.transpose(1, 2).is_contiguous()


@define("layer(Tensor x, Tensor? positions, Tensor? angles, Tensor slots, Tensor lengths, "
        "Tensor[] weights, Tensor(a!)[] caches, str form) -> Tensor")
def _(x, positions, angles, slots, lengths, weights, caches, form):
    parsed = parse(form)
    before, count, layers = len(parsed.before), len(parsed.weights), len(caches) // 2
    if not layers or len(caches) != 2 * layers or len(weights) != count * layers:
        raise Error(f"layer: {len(weights)} weights and {len(caches)} caches: give {count} and 2 "
                    "of each layer")
    for cache in caches:
        if not has_layout(cache) or cache.is_cuda and cache.data_ptr() & 15:
            raise Error("layer: a cache does not lie in memory as [batch, cache, heads, features], "
                        "or not at an address of 16 bytes")
    x = ready(x)
    y = torch.empty_like(x)
    weights = [w if w.is_contiguous() else w.contiguous() for w in weights]
    own = []
    for at in range(layers):
        first = at * count
        own += weights[first:first + before]
        own += caches[2 * at:2 * at + 2]
        own += weights[first + before:first + count]
    positions, angles = (None if t is None else ready(t) for t in (positions, angles))
    run(_LAYER, (form,), (x, positions, angles, ready(slots), ready(lengths), *own), (y,))
    return y


@fake("layer")
def _(x, *others):
    return x.new_empty(x.shape)


def layer(x: Tensor, weights: Sequence[Mapping[str, Tensor]],
          caches: Sequence[tuple[Tensor, Tensor]], lengths: Tensor, heads: int,
          kv_heads: int | None = None, *, slots: Tensor | None = None,
          positions: Tensor | None = None, angles: Tensor | None = None, act: str = "silu",
          convention: str = "llama", eps: float = 1e-6, softcap: float = 0.0, scale: float = 0.0,
          rope_scale: float = 0.0, top_k: int = 0, score: str = "softmax", order: str = "before",
          renormalise: bool = False, packing: str = "halves") -> Tensor:
    """Transformer layers, one after the other, for new tokens of sequences with a cache: norm, q, k
    and v, RoPE, attention over the cache, output product, norm, feed-forward network or mixture of
    experts.

    x [batch, tokens, d]. weights: of each layer its tensors by name: attn_norm [d], w_q [heads *
    dim, d], w_k, w_v [kv_heads * dim, d], w_o [d, heads * dim], ffn_norm [d], w_gate, w_up [h, d],
    w_down [d, h]; and where it has them attn_norm_bias, ffn_norm_bias (then the norms are layer
    normalisation), b_q, b_k, b_v, b_o, b_up, b_down, the norms of heads q_norm, k_norm [dim], and
    attn_post_norm, ffn_post_norm of what is added to the residual. Without w_gate the network is
    act(x w_upᵀ) w_downᵀ; without ffn_norm it takes the same normalised x as attention, beside it.
    With w_router [experts, d] it is a mixture of experts, of which a token chooses `top_k`, by
    `score`, `order` and `renormalise` as in moe_route: w_gate, w_up [experts, h, d], w_down
    [experts, d, h]; or w_gate_up [experts, 2h, d] in the place of the first two, with `packing` as
    in moe_ffn.

    caches: keys and values of each layer, [batch, kv_heads, cache, dim] that were made as
    torch.zeros(batch, cache, kv_heads, dim).transpose(1, 2); they are written in place. lengths
    [batch] int32: how many keys each sequence has, with the new ones, which are its last. slots
    [batch, tokens] int32: where keys and values of new tokens go, i * cache + place for sequence i;
    the places in front of `lengths` if left out. angles [rows, rotary] float32: of RoPE, found by
    positions [batch, tokens] int32, which are the places if left out; without angles there is no
    RoPE. scale: of scores, 0 for 1 / sqrt(dim). -> [batch, tokens, d]. No gradients.
    """
    expect_given("layer", x=x, lengths=lengths)
    expect_tensors("layer", x=x, lengths=lengths, slots=slots, positions=positions, angles=angles)
    for name, given, of in (("weights", weights, Mapping), ("caches", caches, (tuple, list))):
        if not isinstance(given, (list, tuple)) or not all(isinstance(one, of) for one in given):
            raise Error(f"layer: {name} are no list of what each layer has: give mappings of "
                        "weights, and pairs of caches")
    for at, one in enumerate(weights):
        for name, tensor in one.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise Error(f"layer: weight {name} of layer {at} is no tensor: give tensors by name")
    for pair in caches:
        several("layer", "a pair of caches", pair, 2, "keys and values of each layer")
    for name, number in (("heads", heads), ("top_k", top_k), ("kv_heads", kv_heads)):
        if number is None and name == "kv_heads":
            continue
        if type(number) is not int or number < (name != "top_k"):
            raise Error(f"layer: {name} is {named(number)}: give a positive integer")
    # They become parts of the string `form`.
    for name, word in (("act", act), ("convention", convention), ("score", score),
                       ("order", order), ("packing", packing)):
        if not isinstance(word, str) or not word.replace("-", "").isalnum():
            raise Error(f"layer: {name} is {named(word)}: give a word")
    for name, number in (("eps", eps), ("softcap", softcap), ("scale", scale),
                         ("rope_scale", rope_scale)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise Error(f"layer: {name} is {named(number)}: give a number")
        check_number("layer", name, number)
    if not weights or len(weights) != len(caches):
        raise Error(f"layer: weights of {len(weights)} layers and caches of {len(caches)}")
    _expect_three(x)
    flat = [tensor for one in weights for tensor in one.values()]
    if wants_gradient(x, *flat):
        raise Error("layer: it has no gradient: use torch.no_grad()")
    kv_heads = heads if kv_heads is None else kv_heads
    dim = weights[0]["w_q"].shape[0] // heads if "w_q" in weights[0] else 0
    choice = None
    if top_k and "w_router" in weights[0]:
        choice = Choice(weights[0]["w_router"].shape[0], top_k, score, order, renormalise, packing)
    form = form_of(tuple(weights[0]), heads=heads, kv_heads=kv_heads, dim=dim, act=act, eps=eps,
                   convention=convention, rotary=0 if angles is None else angles.shape[-1],
                   softcap=softcap, scale=scale, rope_scale=rope_scale, rotates=angles is not None,
                   choice=choice)
    for one in weights:
        other = sorted(set(one) ^ set(weights[0]))
        if other:
            raise Error(f"layer: {other[0]} is a weight of some layers and not of others: run "
                        "those in a call of their own")
    flat = [one[name] for one in weights for name in parse(form).weights]
    if slots is None or positions is None:
        batch, s, _ = x.shape
        places = (lengths[:, None] - s
                  + torch.arange(s, dtype=torch.int32, device=x.device)).to(torch.int32)
        if positions is None and angles is not None:
            positions = places
        if slots is None:
            starts = torch.arange(batch, dtype=torch.int32, device=x.device)[:, None]
            slots = places + starts * caches[0][0].shape[2]
    return call(OPS.layer, x, positions, angles, slots, lengths, flat,
                [tensor for pair in caches for tensor in pair], form)

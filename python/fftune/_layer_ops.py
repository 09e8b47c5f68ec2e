"""Whole transformer layers against a cache of keys and values, as one op."""
import functools
from dataclasses import dataclass
from typing import Mapping, Sequence

import torch
from torch import Tensor

from ._checks import check_number, expect, expect_given, expect_tensors, flag, named, several
from ._custom import OPS, call, define, fake, wants_gradient
from ._library import Error, Plan
from ._run import Form, ready, run

# The tensors of one layer in the order of the op's buffers; those that a layer has not are left out.
_BEFORE_CACHES = ("attn_norm", "attn_norm_bias", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "w_qkv",
                  "b_qkv", "q_norm", "k_norm", "q_norm_bias", "k_norm_bias")
_BEHIND_CACHES = ("sinks", "residual_scale", "w_o", "b_o", "attn_post_norm", "ffn_norm",
                  "ffn_norm_bias", "w_router", "b_router", "choice_bias", "w_gate", "w_up",
                  "w_gate_up", "w_down", "b_gate", "b_up", "b_gate_up", "b_down",
                  "w_shared_router", "w_shared_gate", "w_shared_up", "w_shared_down",
                  "ffn_post_norm")
WEIGHTS = _BEFORE_CACHES + _BEHIND_CACHES
# Weights and biases that norms have if a model's do not: 1 and 0.
_CONSTANTS = ("attn_norm", "attn_norm_bias", "q_norm", "k_norm", "attn_post_norm", "ffn_norm",
              "ffn_norm_bias", "ffn_post_norm")
_FLOAT32 = ("sinks", "choice_bias", "residual_scale")  # as the kernels read them
_OPTIONS = ("heads", "kv-heads", "dim", "rotary", "experts", "top-k", "groups", "top-groups", "act",
            "norm", "post-norms", "block", "ffn", "score", "order", "renormalise", "group-score",
            "choice-bias", "router-bias", "route-scale", "logits", "shared-gate", "gate-up",
            "convention", "eps", "qkv-weights", "qkv-bias", "qk-norm", "qk-norm-order", "sinks",
            "residual-scale", "out-bias", "ffn-bias", "rotation", "angles",
            "softcap", "scale", "rope-scale")
_INTEGERS = {"heads", "kv-heads", "dim", "rotary", "experts", "top-k", "groups", "top-groups"}
_FLOATS = {"eps", "softcap", "scale", "rope-scale", "route-scale", "multiplier"}


@dataclass(frozen=True)
class Choice:
    """How a token chooses experts, as in ops.moe_route, and how w_gate_up has gate and up."""

    experts: int
    top_k: int
    score: str = "softmax"
    order: str = "before"
    renormalise: bool = False
    packing: str = "halves"
    groups: int = 0
    top_groups: int = 0
    group_score: str = "max"
    scale: float = 1.0
    wide: bool = False  # logits are float32


@dataclass(frozen=True)
class LayerForm:
    """The parsed string `form` of the op: the tensors that a layer has, those that are constants,
    and its options."""

    before: tuple[str, ...]
    behind: tuple[str, ...]
    constants: tuple[str, ...]
    options: dict

    @property
    def weights(self) -> tuple[str, ...]:
        """Those that the op is given: all but the constants."""
        return tuple(n for n in self.before + self.behind if n not in self.constants)

    def get(self, name: str, otherwise=None):
        return self.options.get(name, otherwise)


@functools.lru_cache(256)
def parse(form: str) -> LayerForm:
    found: dict = dict(entry.split("=") for entry in form.split(" "))
    names = found.pop("weights").split(",")
    constants = tuple(n for n in found.pop("constants", "").split(",") if n)
    for name in found.keys() & _INTEGERS:
        found[name] = int(found[name])
    for name in found.keys() & _FLOATS:
        found[name] = float(found[name])
    return LayerForm(tuple(n for n in _BEFORE_CACHES if n in names),
                     tuple(n for n in _BEHIND_CACHES if n in names), constants, found)


def _expect_names(names: set[str], choice: Choice | None, parallel: bool) -> None:
    """That a layer has these tensors, and no others."""
    unknown = sorted(names - set(WEIGHTS))
    packed = "w_gate_up" in names
    needed = {*(("w_qkv",) if "w_qkv" in names else ("w_q", "w_k", "w_v")), "w_o",
              "w_gate_up" if packed else "w_up", "w_down"} - names
    if parallel or "ffn_norm" in names or "attn_post_norm" not in names:
        needed |= {"attn_norm"} - names
    if unknown or needed:
        raise Error(f"layer: a layer has {'no ' + sorted(needed)[0] if needed else unknown[0]}: "
                    f"its weights are called {', '.join(WEIGHTS)}")
    others = sorted(names & ({"w_q", "w_k", "w_v", "b_q", "b_k", "b_v"} if "w_qkv" in names
                             else {"b_qkv"}))
    if others:
        raise Error(f"layer: {others[0]} does not go with {'w_qkv' if 'w_qkv' in names else 'w_q'}: "
                    "give q, k and v packed, or each")
    for group in (("b_q", "b_k", "b_v"), ("q_norm", "k_norm"), ("q_norm_bias", "k_norm_bias"),
                  ("attn_post_norm", "ffn_post_norm"),
                  ("w_shared_gate", "w_shared_up", "w_shared_down")):
        if 0 < sum(name in names for name in group) < len(group):
            raise Error(f"layer: give all of {', '.join(group)}, or none")
    if "q_norm_bias" in names and "q_norm" not in names:
        raise Error("layer: q_norm_bias without q_norm: give the norm's weights too")
    gated = "w_gate" in names or packed
    if packed and ("w_gate" in names or "w_up" in names):
        raise Error("layer: w_gate_up is both w_gate and w_up: give it, or those")
    if ("w_router" in names) != (choice is not None) or packed and choice is None:
        raise Error("layer: a mixture of experts has w_router and top_k: give both"
                    + (", or w_gate and w_up in the place of w_gate_up" if packed else ""))
    if choice and not gated:
        raise Error("layer: experts have gates: give w_gate too")
    of_experts = sorted(names & {"b_router", "choice_bias", "w_shared_gate", "w_shared_router"})
    if of_experts and not choice:
        raise Error(f"layer: {of_experts[0]} is of a mixture of experts: there is no w_router")
    if "w_shared_router" in names and "w_shared_gate" not in names:
        raise Error("layer: w_shared_router without w_shared_gate: give the network that it weighs")
    if "ffn_norm" in names and ("ffn_norm_bias" in names) != ("attn_norm_bias" in names):
        raise Error("layer: give biases of both norms, or of none")
    if choice:
        needed = {"b_down", *(("b_gate_up",) if packed else ("b_gate", "b_up"))}
        biases = names & {"b_gate", "b_up", "b_gate_up", "b_down"}
        if biases and biases != needed:
            raise Error(f"layer: experts have all of {', '.join(sorted(needed))}, or none")
    elif names & {"b_gate", "b_gate_up"} or ("b_up" in names) != ("b_down" in names and not gated):
        raise Error("layer: b_up is of a feed-forward network without a gate, beside b_down")


def form_of(names: Sequence[str], *, heads: int, kv_heads: int, dim: int, act: str, eps: float,
            convention: str, rotary: int, softcap: float, scale: float, rope_scale: float,
            rotates: bool, choice: Choice | None = None, constants: Sequence[str] = (),
            parallel: bool = False, rotation: str = "halves", grouped: bool = False,
            norm_rows: bool = False, norm_last: bool = False, multiplier: float = 1.0) -> str:
    """The form of layers with weights of these names: "name=value", with spaces between. `grouped`
    is of w_qkv, `norm_rows` and `norm_last` are of q_norm and k_norm; see layer()."""
    if multiplier != 1:
        if "residual_scale" in names:
            raise Error("layer: residual_scale and a multiplier: give one of them")
        constants = (*constants, "residual_scale")
    others = sorted(set(constants) - {*_CONSTANTS, "residual_scale"} | set(constants) & set(names))
    if others:
        raise Error(f"layer: {others[0]} is no constant: it is a weight"
                    if others[0] in names else
                    f"layer: {others[0]} is no constant: use {', '.join(_CONSTANTS)}")
    names = {*names, *constants}
    if grouped and "w_qkv" not in names:
        raise Error("layer: grouped is of w_qkv: give that in the place of w_q, w_k and w_v")
    _expect_names(names, choice, parallel)
    gated = "w_gate" in names or "w_gate_up" in names
    norms = [name for name in ("attn_norm", "ffn_norm") if name in names]
    options = {"weights": ",".join([n for n in WEIGHTS if n in names]), "heads": heads,
               "kv-heads": kv_heads, "dim": dim, "act": act, "eps": float(eps)}
    if constants:
        options["constants"] = ",".join([n for n in WEIGHTS if n in constants])
    if "attn_norm_bias" in names:
        options["norm"] = "layer"
    else:
        options["convention"] = convention
    post_norms = "attn_post_norm" in names
    if len(norms) == 1 and not post_norms:
        parallel = True
    for name, holds, value in (
            ("post-norms", post_norms, "yes" if norms else "only"),
            ("block", parallel, "parallel" if len(norms) == 1 else "parallel-norms"),
            ("ffn", choice or not gated, "moe" if choice else "plain"),
            ("qkv-weights", "w_qkv" in names, "grouped" if grouped else "packed"),
            ("qkv-bias", bool({"b_q", "b_qkv"} & names), "yes"),
            ("qk-norm", "q_norm" in names,
             "rows" if norm_rows else "layer" if "q_norm_bias" in names else "yes"),
            ("qk-norm-order", norm_last, "after"),
            ("residual-scale", "residual_scale" in names, "yes"),
            ("multiplier", multiplier != 1, float(multiplier)),
            ("sinks", "sinks" in names, "yes"), ("out-bias", "b_o" in names, "yes"),
            ("ffn-bias", "b_down" in names, "yes"),
            ("softcap", softcap, float(softcap)), ("scale", scale, float(scale)),
            ("rotation", not rotates or rotation != "halves", rotation if rotates else "none"),
            ("angles", rotates, "table"),
            ("rope-scale", rotates and rope_scale, float(rope_scale)),
            ("rotary", rotates and rotary != dim, rotary)):
        if holds:
            options[name] = value
    if choice:
        options |= {"experts": choice.experts, "top-k": choice.top_k, "score": choice.score,
                    "order": choice.order, "renormalise": "yes" if choice.renormalise else "no"}
        for name, holds, value in (
                ("gate-up", "w_gate_up" in names, choice.packing),
                ("groups", choice.groups, choice.groups),
                ("top-groups", choice.groups and choice.top_groups, choice.top_groups),
                ("group-score", choice.groups, choice.group_score),
                ("choice-bias", "choice_bias" in names, "yes"),
                ("router-bias", "b_router" in names, "yes"),
                ("route-scale", choice.scale * multiplier != 1, float(choice.scale * multiplier)),
                ("logits", choice.wide, "f32"),
                ("shared-gate", "w_shared_router" in names, "yes")):
            if holds:
                options[name] = value
    return " ".join([f"{name}={value}" for name, value in options.items()])


def _shapes(form: LayerForm, d: int, h: int, shared_h: int | None) -> dict[str, tuple[int, ...]]:
    heads, kv_heads, dim = form.get("heads"), form.get("kv-heads"), form.get("dim")
    shapes = dict.fromkeys(WEIGHTS, (d,))
    shapes |= dict.fromkeys(("w_k", "w_v"), (kv_heads * dim, d))
    shapes |= dict.fromkeys(("b_k", "b_v"), (kv_heads * dim,))
    rows = form.get("qk-norm") == "rows"
    shapes |= dict(q_norm=(heads * dim if rows else dim,), k_norm=(kv_heads * dim if rows else dim,))
    shapes |= dict.fromkeys(("q_norm_bias", "k_norm_bias"), (dim,))
    shapes |= dict(w_qkv=((heads + 2 * kv_heads) * dim, d), b_qkv=((heads + 2 * kv_heads) * dim,))
    shapes |= dict.fromkeys(("w_shared_gate", "w_shared_up"), (shared_h, d))
    experts = (form.get("experts"),) if form.get("experts") else ()
    shapes |= dict.fromkeys(("w_gate", "w_up"), (*experts, h, d))
    shapes |= dict.fromkeys(("b_gate", "b_up"), (*experts, h))
    shapes |= dict.fromkeys(("b_router", "choice_bias"), experts)
    if experts:
        shapes |= dict(b_down=(*experts, d), b_gate_up=(*experts, 2 * h))
    return shapes | dict(w_q=(heads * dim, d), b_q=(heads * dim,), w_o=(d, heads * dim),
                         sinks=(heads,), w_router=(*experts, d), w_gate_up=(*experts, 2 * h, d),
                         w_down=(*experts, d, h), w_shared_router=(1, d),
                         w_shared_down=(d, shared_h))


@functools.cache  # for good: captured graphs read them
def constant(value: float, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((elements,), value, dtype=dtype, device=device)


def with_constants(form: LayerForm, own: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """The tensors of a layer by name, with those that the form has as constants."""
    shapes, filled = _shapes(form, like.shape[-1], 0, 0), dict(own)
    for name in form.constants:
        value = form.get("multiplier") if name == "residual_scale" else float(
            not name.endswith("_bias"))
        dtype = torch.float32 if name in _FLOAT32 else like.dtype
        filled[name] = constant(value, shapes[name][0], dtype, like.device)
    return filled


def _expect_three(x: Tensor) -> None:
    if x.dim() != 3:
        raise Error(f"layer: x is {list(x.shape)}: give [batch, tokens, features]")


def _values(options, x, positions, angles, slots, lengths, *own):
    form = parse(options[0])
    _expect_three(x)
    batch, s, d = x.shape
    before, count = len(form.before), len(form.before + form.behind) + 2
    layers = len(own) // count
    h, shared_h = (own[before + 2 + form.behind.index(name)].shape[-1]
                   if name in form.behind else None for name in ("w_down", "w_shared_down"))
    shapes = _shapes(form, d, h, shared_h)
    cache = own[before].shape[2]
    for at in range(layers):
        tensors = own[at * count:(at + 1) * count]
        for name, tensor in zip(form.before, tensors):
            expect("layer", f"{name} of layer {at}", tensor, shapes[name], x.dtype)
        for name, tensor in zip(form.behind, tensors[before + 2:]):
            expect("layer", f"{name} of layer {at}", tensor, shapes[name],
                   torch.float32 if name in _FLOAT32 else x.dtype)
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
    return (batch, s if s > 1 else None, d, h, shared_h, cache, layers if layers > 1 else None,
            angles.shape[0] if rotates else None, *map(form.get, _OPTIONS))


_LAYER = Form("layer", False,
              ("batch", "s", "d", "h", "shared-h", "cache", "layers", "positions", *_OPTIONS), _values,
              strided=True)


def expect_runs(form: str, weights: Sequence[Tensor], device: int) -> None:
    """That layers with weights of these shapes run on the device, -1 for the CPU: Error if they do not.
    Their plan for one token is made, which compiles its kernels."""
    parsed = parse(form)
    own = {name: torch.empty(w.shape, dtype=w.dtype, device="meta")
           for name, w in zip(parsed.weights, weights)}
    like = own["w_o"]
    x = torch.empty(1, 1, like.shape[0], dtype=like.dtype, device="meta")
    cache = x.new_empty(1, parsed.get("kv-heads"), 64, parsed.get("dim"))
    own = with_constants(parsed, own, x)
    own = {name: w.float() if name in _FLOAT32 else w for name, w in own.items()}
    rows = torch.empty(1, 1, dtype=torch.int32, device="meta")
    rotates = parsed.get("rotation") != "none"
    angles = torch.empty(1, parsed.get("rotary", parsed.get("dim")), device="meta") if rotates else None
    inputs = (x, rows if rotates else None, angles, rows, rows[0], *map(own.get, parsed.before), cache,
              cache, *map(own.get, parsed.behind))
    Plan(device, _LAYER.problem((form,), inputs))


def has_layout(cache: Tensor) -> bool:
    """Whether keys or values [batch, heads, cache, features] lie in memory as the op reads them:
    of each token all heads next to each other."""
    return cache.transpose(1, 2).is_contiguous()


@define("layer(Tensor x, Tensor? positions, Tensor? angles, Tensor slots, Tensor lengths, "
        "Tensor[] weights, Tensor(a!)[] caches, str form) -> Tensor")
def _(x, positions, angles, slots, lengths, weights, caches, form):
    parsed = parse(form)
    count, layers = len(parsed.weights), len(caches) // 2
    if not layers or len(caches) != 2 * layers or len(weights) != count * layers:
        raise Error(f"layer: {len(weights)} weights and {len(caches)} caches: give {count} and 2 "
                    "of each layer")
    for cache in caches:
        if not has_layout(cache) or cache.is_cuda and cache.data_ptr() & 15:
            raise Error("layer: a cache does not lie in memory as [batch, cache, heads, features], "
                        "or not at an address of 16 bytes")
    x = ready(x)
    y = torch.empty_like(x)
    own = []
    for at in range(layers):
        given = zip(parsed.weights, weights[at * count:(at + 1) * count])
        tensors = {name: (w.float() if name in _FLOAT32 else w).contiguous() for name, w in given}
        if parsed.constants:
            tensors = with_constants(parsed, tensors, x)
        own += map(tensors.get, parsed.before)
        own += caches[2 * at:2 * at + 2]
        own += map(tensors.get, parsed.behind)
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
          renormalise: bool = False, packing: str = "halves", groups: int = 0, top_groups: int = 0,
          group_score: str = "max", route_scale: float = 1.0, parallel: bool = False,
          rotation: str = "halves", constants: Sequence[str] = (), grouped: bool = False,
          norm_last: bool = False, multiplier: float = 1.0, wide_logits: bool = False) -> Tensor:
    """Transformer layers, one after the other, for new tokens of sequences with a cache: norm, q, k
    and v, RoPE, attention over the cache, output product, norm, feed-forward network or mixture of
    experts.

    `x` [batch, tokens, d]. `weights`: the tensors of each layer by name. All layers have attn_norm [d],
    w_q [heads * dim, d], w_k, w_v [kv_heads * dim, d], w_o [d, heads * dim], ffn_norm [d], w_gate, w_up
    [h, d], w_down [d, h]. Some have attn_norm_bias, ffn_norm_bias (then the norms are layer
    normalisation), b_q, b_k, b_v, b_o, b_up, b_down, and the norms of heads q_norm, k_norm [dim]. The
    norms attn_post_norm, ffn_post_norm apply to the summands of the residual. Without w_gate the
    network is act(x w_upᵀ) w_downᵀ; without ffn_norm it takes the same normalised x as attention,
    beside it, and with `parallel` and ffn_norm it takes x by that norm. Without attn_norm and ffn_norm
    there are only the norms of the summands. `constants` names weights and biases of norms that the
    layers do not have: they are 1 and 0.

    The tensors w_qkv [(heads + 2 kv_heads) dim, d] and b_qkv may stand for w_q, w_k and w_v: all rows
    of q, then of k, then of v. With `grouped` they have the rows of the heads of q that share a head of
    k, then of that head of k, then of v. The norms q_norm [heads * dim] and k_norm [kv_heads * dim] are
    over all heads together; with q_norm_bias and k_norm_bias heads have layer normalisation; with
    `norm_last` norms are behind RoPE. `multiplier` is a factor of the summands of the residual, or
    residual_scale [d] float32 one for each feature.

    With w_router [experts, d] it is a mixture of experts: a token chooses `top_k` of them, by `score`,
    `order` and `renormalise` as in moe_route. The experts are w_gate, w_up [experts, h, d], w_down
    [experts, d, h]; or w_gate_up [experts, 2h, d] in the place of the first two, with `packing` as in
    moe_ffn. It may have b_router, choice_bias [experts] (the bias of moe_route), `groups`, `top_groups`
    and `group_score`, `route_scale` (its scale), and `wide_logits` (float32, as if x and w_router
    were). Its biases are b_gate, b_up [experts, h] or b_gate_up, and b_down [experts, d]. A network of
    all tokens may stand beside the experts: w_shared_gate, w_shared_up [n, d], w_shared_down [d, n],
    weighted by sigmoid(x w_shared_routerᵀ) if there is w_shared_router [1, d]. With sinks [heads] each
    head has a logit that joins the softmax.

    `caches`: keys and values of each layer, [batch, kv_heads, cache, dim] that were made as
    torch.zeros(batch, cache, kv_heads, dim).transpose(1, 2); they are written in place. `lengths`
    [batch] int32: how many keys each sequence has, with the new ones, which are its last. `slots`
    [batch, tokens] int32: rows for keys and values of new tokens, i * cache + place for sequence i; the
    places in front of `lengths` if left out. `angles` [rows, rotary] float32: for RoPE, with `rotation`
    and the columns as in ops.rope, found by positions [batch, tokens] int32, which are the places if
    left out; without angles there is no RoPE. `scale`: factor of scores, 0 for 1 / sqrt(dim). Returns
    [batch, tokens, d]. No gradients.
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
    for name, number in (("heads", heads), ("top_k", top_k), ("kv_heads", kv_heads),
                         ("groups", groups), ("top_groups", top_groups)):
        if number is None and name == "kv_heads":
            continue
        if type(number) is not int or number < (name in ("heads", "kv_heads")):
            raise Error(f"layer: {name} is {named(number)}: give a positive integer")
    # They become parts of the string `form`.
    for name, word in (("act", act), ("convention", convention), ("score", score),
                       ("order", order), ("packing", packing), ("group_score", group_score),
                       ("rotation", rotation)):
        if not isinstance(word, str) or not word.replace("-", "").isalnum():
            raise Error(f"layer: {name} is {named(word)}: give a word")
    for name, number in (("eps", eps), ("softcap", softcap), ("scale", scale),
                         ("rope_scale", rope_scale), ("route_scale", route_scale),
                         ("multiplier", multiplier)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise Error(f"layer: {name} is {named(number)}: give a number")
        check_number("layer", name, number)
    for name, value in (("renormalise", renormalise), ("parallel", parallel), ("grouped", grouped),
                        ("norm_last", norm_last), ("wide_logits", wide_logits)):
        flag("layer", name, value)
    if not isinstance(constants, (list, tuple)) or not all(isinstance(c, str) for c in constants):
        raise Error(f"layer: constants are {named(constants)}: give names of weights")
    if not weights or len(weights) != len(caches):
        raise Error(f"layer: weights of {len(weights)} layers and caches of {len(caches)}")
    _expect_three(x)
    flat = [tensor for one in weights for tensor in one.values()]
    if wants_gradient(x, *flat):
        raise Error("layer: it has no gradient: use torch.no_grad()")
    kv_heads = heads if kv_heads is None else kv_heads
    first = weights[0]
    dim = (first["w_q"].shape[0] // heads if "w_q" in first else
           first["w_qkv"].shape[0] // (heads + 2 * kv_heads) if "w_qkv" in first else 0)
    choice = None
    if top_k and "w_router" in weights[0]:
        choice = Choice(weights[0]["w_router"].shape[0], top_k, score, order, renormalise, packing,
                        groups, top_groups, group_score, route_scale, wide_logits)
    form = form_of(tuple(weights[0]), heads=heads, kv_heads=kv_heads, dim=dim, act=act, eps=eps,
                   convention=convention, rotary=0 if angles is None else angles.shape[-1],
                   softcap=softcap, scale=scale, rope_scale=rope_scale, rotates=angles is not None,
                   choice=choice, constants=constants, parallel=parallel, rotation=rotation,
                   grouped=grouped, norm_rows="q_norm" in first and first["q_norm"].shape[0] != dim,
                   norm_last=norm_last, multiplier=multiplier)
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

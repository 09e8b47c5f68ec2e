"""Mixtures of experts: the router's choice, and the experts' gated MLPs."""
import math
from typing import Sequence

import torch
from torch import Tensor

from ._checks import expect, expect_given, flag, float32, int32, several
from ._custom import (OPS, call, define, empty, fake, gradient, is_disabled, save_gates,
                      wants_gradient, yes)
from ._library import Error
from ._run import Form, ready, run

# Weights of a token's choices are float32 whatever the activations are.
_KEEPS = (2,)
_EXPERTS = "Tensor w_gate, Tensor? w_up, Tensor w_down"
_INPUTS = f"Tensor x, Tensor ids, Tensor weights, {_EXPERTS}"
_BIASES = "Tensor? b_gate_up, Tensor? b_down"
_OPTIONS = "str act, str packing, str weigh, int shared, str routing"


def _gate_up_values(x, ids, weights, w_gate, w_up, w_down, packing, shared) -> tuple:
    """The sizes of tensors that fit together, and how gate and up are given."""
    d, k = x.shape[-1], ids.shape[-1]
    if not 0 <= shared <= w_gate.shape[0]:
        raise Error(f"moe-ffn: w_gate is {list(w_gate.shape)}, shared {shared}: give [experts + "
                    "shared, h, d]")
    experts, h = w_gate.shape[0], w_gate.shape[1] // (2 if w_up is None else 1)
    expect("moe-ffn", "w_gate", w_gate, (experts, h if w_up is not None else 2 * h, d))
    expect("moe-ffn", "w_up", w_up, (experts, h, d))
    expect("moe-ffn", "w_down", w_down, (experts, d, h))
    expect("moe-ffn", "ids", ids, (*x.shape[:-1], k))
    expect("moe-ffn", "weights", weights, (*x.shape[:-1], k))
    if w_up is None and packing not in ("halves", "interleaved"):
        raise Error(f"moe-ffn: there is no packing '{packing}': give halves or interleaved")
    return (x.shape[:-1].numel(), d, h, k, experts - shared, shared or None,
            packing if w_up is None else None)


def _expect_biases(w_gate, w_down, b_gate_up, b_down) -> None:
    expect("moe-ffn", "b_gate_up", b_gate_up, w_gate.shape[:2])
    expect("moe-ffn", "b_down", b_down, w_down.shape[:2])


def _option_values(options, bias) -> tuple:
    act, _, weigh, _, routing = options
    expect_given("moe-ffn", act=act, weigh=weigh)
    return act, routing or None, weigh if weigh != "after" else None, bias


def _forward_values(options, x, ids, weights, w_gate, w_up, w_down, b_gate_up, b_down):
    *options, save = options
    sizes = _gate_up_values(x, ids, weights, w_gate, w_up, w_down, options[1], options[3])
    if (b_gate_up is None) != (b_down is None):
        raise Error("moe-ffn: give biases of both products, or of none")
    if b_down is not None and w_up is not None:
        raise Error("moe-ffn: biases are for gate and up in one tensor: leave w_up out")
    _expect_biases(w_gate, w_down, b_gate_up, b_down)
    return (*sizes, *_option_values(options, None if b_down is None else "all"), save) if sizes[0] else None


def _backward_values(options, dy, x, ids, weights, gate, up, w_gate, w_up, w_down, b_gate_up,
                     b_down, *into):
    *options, bias = options
    shared = options[3]
    sizes = _gate_up_values(x, ids, weights, w_gate, w_up, w_down, options[1], shared)
    _expect_biases(w_gate, w_down, b_gate_up, b_down)
    expect("moe-ffn", "dy", dy, x.shape)
    if (gate is None) != (up is None):
        raise Error("moe-ffn: gate without up, or up without gate: give both, or neither")
    for name, tensor in (("gate", gate), ("up", up)):
        expect("moe-ffn", name, tensor, (sizes[0] * (ids.shape[-1] + shared), sizes[2]))
    for weight, tensor in zip((w_gate, w_up, w_down), into):
        expect("moe-ffn", "a gradient to add to", tensor, weight.shape)
    return (*sizes, *_option_values(options, bias), "input" if gate is None else "preact",
            "yes" if into else None) if sizes[0] else None


_GATE_UP_NAMES = ("m", "d", "h", "top-k", "experts", "shared", "gate-up", "act", "routing")
_NAMES = (*_GATE_UP_NAMES, "weigh", "bias", "save")
_FORWARD = Form("moe-ffn", False, _NAMES, _forward_values)
_BACKWARD = Form("moe-ffn", True, (*_NAMES, "accumulate"), _backward_values)


def _choices(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """As the kernels read them."""
    if ids.dtype is torch.int64:
        # An invalid id must stay invalid, which a cast alone would not ensure.
        ids = ids.clamp(_INT32.min, _INT32.max)
    return ready(int32("moe-ffn", "ids", ids)), ready(float32("moe-ffn", "weights", weights))


_INT32 = torch.iinfo(torch.int32)


@define(f"moe_ffn({_INPUTS}, {_BIASES}, {_OPTIONS}) -> Tensor", casts=True, keeps=_KEEPS,
        by_row=True)
def _(x, ids, weights, w_gate, w_up, w_down, b_gate_up, b_down, *options):
    x = ready(x)
    y = torch.empty_like(x)
    run(_FORWARD, (*options, None),
        (x, *_choices(ids, weights), w_gate, w_up, w_down, b_gate_up, b_down), (y,))
    return y


@define(f"moe_ffn_preact({_INPUTS}, {_BIASES}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
        casts=True, keeps=_KEEPS)
def _(x, ids, weights, w_gate, w_up, w_down, b_gate_up, b_down, *options):
    x = ready(x)
    y, gate = torch.empty_like(x), empty(x, *_hidden_shape(ids, w_down, options[3]))
    up = torch.empty_like(gate)
    run(_FORWARD, (*options, "preact"),
        (x, *_choices(ids, weights), w_gate, w_up, w_down, b_gate_up, b_down), (y, gate, up))
    return y, gate, up


def _hidden_shape(ids: Tensor, w_down: Tensor, shared: int) -> tuple[int, int]:
    # Size.numel() would make a constant of a symbolic size.
    return ids.numel() + math.prod(ids.shape[:-1]) * shared, w_down.shape[2]


@define(f"moe_ffn_backward(Tensor dy, Tensor x, Tensor ids, Tensor weights, Tensor? gate, "
        f"Tensor? up, {_EXPERTS}, {_BIASES}, {_OPTIONS}) -> Tensor[]")
def _(dy, x, ids, weights, gate, up, w_gate, w_up, w_down, b_gate_up, b_down, *options):
    given = [None if t is None else ready(t) for t in (w_gate, w_up, w_down, b_gate_up, b_down)]
    x, (ids, weights) = ready(x), _choices(ids, weights)
    results = [torch.empty_like(t) for t in (x, weights, *given) if t is not None]
    # The kernels read only the biases that a gradient depends on.
    *experts, b_gate_up, b_down = given
    run(_BACKWARD, (*options, None if b_down is None else "all"),
        (dy, x, ids, weights, gate, up, *experts, b_gate_up if gate is None else None,
         b_down if options[2] == "after" else None), results)
    return results


@define("moe_ffn_backward_into(Tensor dy, Tensor x, Tensor ids, Tensor weights, Tensor? gate, "
        "Tensor? up, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor(a!) d_gate, "
        "Tensor(b!) d_up, Tensor(c!) d_down, str act, str routing) -> (Tensor, Tensor)")
def _(dy, x, ids, weights, gate, up, w_gate, w_up, w_down, d_gate, d_up, d_down, act, routing):
    into = d_gate, d_up, d_down
    for tensor in into:
        if not tensor.is_contiguous() or tensor.is_cuda and tensor.data_ptr() & 15:
            raise Error("moe-ffn: a gradient to add to is not contiguous, or not at an address of "
                        "16 bytes")
    ids, weights = _choices(ids, weights)
    dx, d_weights = empty(x, *x.shape), torch.empty_like(weights)
    if dx.numel():
        run(_BACKWARD, (act, "", "after", 0, routing, None),
            (dy, x, ids, weights, gate, up, w_gate, w_up, w_down, None, None, *into),
            (dx, d_weights, *into))
    return dx, d_weights


@fake("moe_ffn")
def _(x, *others):
    return x.new_empty(x.shape)


@fake("moe_ffn_preact")
def _(x, ids, weights, w_gate, w_up, w_down, *others):
    hidden = _hidden_shape(ids, w_down, others[5])
    return x.new_empty(x.shape), x.new_empty(hidden), x.new_empty(hidden)


@fake("moe_ffn_backward")
def _(dy, x, ids, weights, gate, up, *others):
    return [x.new_empty(x.shape), weights.new_empty(weights.shape, dtype=torch.float32),
            *(t.new_empty(t.shape) for t in others[:5] if t is not None)]


@fake("moe_ffn_backward_into")
def _(dy, x, ids, weights, *others):
    return x.new_empty(x.shape), weights.new_empty(weights.shape, dtype=torch.float32)


def _save(ctx, inputs, output):
    tensors, ctx.options = inputs[:8], inputs[8:]
    save_gates(ctx, tensors, output)


@gradient("moe_ffn", _save)
def _(ctx, dy, *_unused):
    if dy is None:
        return (None,) * 13
    x, ids, weights, *given, gate, up = ctx.saved_tensors
    dx, d_weights, *gradients = call(OPS.moe_ffn_backward, dy, x, ids, weights, gate, up, *given,
                                     *ctx.options)
    gradients = iter(gradients)
    return (dx, None, d_weights.to(weights.dtype),
            *(None if t is None else next(gradients) for t in given), *(None,) * 5)


gradient("moe_ffn_preact", _save)(_)


# in fp8: for inference

def _fp8_values(options, x, ids, weights, w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale,
                hidden_scale, w_down_scale):
    act, routing, packing, shared = options
    expect_given("moe-ffn", act=act)
    sizes = _gate_up_values(x, ids, weights, w_gate, w_up, w_down, packing, shared)
    m, d, h, *_ = sizes
    experts, rows = w_gate.shape[:2]
    lead, blocks = x.shape[:-1], lambda extent: -(-extent // 128)
    scales = ("tensor" if hidden_scale is not None else
              "block" if w_gate_scale.dim() == 3 else "token")
    of_x, of_gate, of_down = {
        "tensor": ((1,), (experts,) if w_up is not None else (experts, 2), (experts,)),
        "token": ((*lead, 1), (experts, rows), (experts, d)),
        "block": ((*lead, blocks(d)), (experts, blocks(rows), blocks(d)),
                  (experts, blocks(d), blocks(h)))}[scales]
    for name, scale, shape in (("x", x_scale, of_x), ("w_gate", w_gate_scale, of_gate),
                               ("w_up", w_up_scale, of_gate), ("hidden", hidden_scale, (1,)),
                               ("w_down", w_down_scale, of_down)):
        expect("moe-ffn", f"{name}_scale", scale, shape)
    if (w_up is None) != (w_up_scale is None):
        raise Error("moe-ffn: give w_up and its scale, or neither")
    return (*sizes, act, routing, scales) if m else None


_FP8 = Form("moe-ffn", False, (*_GATE_UP_NAMES, "scales"), _fp8_values, home="moe-ffn-fp8")


@define(f"moe_ffn_fp8({_INPUTS}, Tensor x_scale, "
        "Tensor w_gate_scale, Tensor? w_up_scale, Tensor? hidden_scale, Tensor w_down_scale, "
        "str act, str packing, int shared, str routing) -> Tensor")
def _(x, ids, weights, w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale, hidden_scale,
      w_down_scale, act, packing, shared, routing):
    x = ready(x)
    y = torch.empty_like(x, dtype=torch.bfloat16)
    run(_FP8, (act, routing or None, packing, shared),
        (x, *_choices(ids, weights), w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale,
         hidden_scale, w_down_scale), (y,))
    return y


@fake("moe_ffn_fp8")
def _(x, *others):
    return x.new_empty(x.shape, dtype=torch.bfloat16)


def moe_ffn_fp8(x: Tensor, ids: Tensor, weights: Tensor, w_gate: Tensor, w_up: Tensor | None,
                w_down: Tensor, x_scale: Tensor, w_gate_scale: Tensor, w_up_scale: Tensor | None,
                w_down_scale: Tensor, hidden_scale: Tensor | None = None, *, act: str = "silu",
                packing: str = "halves", shared: int = 0, routing: str | None = None) -> Tensor:
    """`moe_ffn` of float8_e4m3fn elements with float32 scales -> bfloat16 [..., d]. No gradients.

    E stands for all matrices, those of `shared` experts too. The scales are one of three kinds.
    Tensor scales: x_scale [1], weights' [E] (for gate and up in one tensor [E, 2]), and
    hidden_scale [1], the scale of the product in the middle, which is given for this kind alone.
    Token and row scales: x_scale [..., 1], w_gate_scale, w_up_scale [E, h] (or [E, 2h]),
    w_down_scale [E, d]. Scales of blocks of 128: x_scale [..., ⌈d/128⌉], weights' [E, ⌈rows/128⌉,
    ⌈columns/128⌉].
    """
    return call(OPS.moe_ffn_fp8, x, ids, weights, w_gate, w_up, w_down, x_scale,
                w_gate_scale, w_up_scale, hidden_scale, w_down_scale, act, packing, shared,
                "" if routing is None else routing)


def moe_ffn_into(y: Tensor, x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor,
                 w_down: Tensor, scales: tuple[Tensor, Tensor, Tensor] | None = None, *,
                 act: str = "silu") -> None:
    """`moe_ffn` without gradients, written to y [..., d]; with `scales`, those of x, w_gate_up and
    w_down, `moe_ffn_fp8`. It is no custom op: for callers that torch.compile does not trace."""
    dtype = x.dtype if scales is None else torch.bfloat16
    expect("moe-ffn", "y", y, x.shape, dtype)
    if not y.is_contiguous() or y.is_cuda and y.data_ptr() & 15:
        raise Error("moe-ffn: y is not contiguous, or not at an address of 16 bytes")
    if is_disabled():
        y.copy_(moe_ffn(x, ids, weights, w_gate_up, None, w_down, act=act) if scales is None else
                moe_ffn_fp8(x, ids, weights, w_gate_up, None, w_down, scales[0], scales[1], None,
                            scales[2], act=act))
        return
    inputs = (ready(x), *_choices(ids, weights), w_gate_up, None, w_down)
    if scales is None:
        run(_FORWARD, (act, "halves", "after", 0, "", None), (*inputs, None, None), (y,))
    else:
        run(_FP8, (act, None, "halves", 0), (*inputs, *scales[:2], None, None, scales[2]), (y,))


def moe_ffn(x: Tensor, ids: Tensor, weights: Tensor, w_gate: Tensor, w_up: Tensor | None,
            w_down: Tensor, *, biases: tuple[Tensor, Tensor] | None = None, act: str = "silu",
            packing: str = "halves", weigh: str = "after", shared: int = 0,
            recompute: bool = False, routing: str | None = None) -> Tensor:
    """Σ_j weights_j * ffn of expert ids_j (x), over the choices j of each token.

    `x` [..., d]; `ids` [..., k] of integers: the experts that a token chose, each once; one outside
    of [0, experts) is not here and adds nothing. `weights` [..., k] of any floating type, float32 in
    the kernels. `w_gate`, `w_up` [experts, h, d]; `w_down` [experts, d, h]. Returns [..., d].
    Without w_up, w_gate [experts, 2h, d] holds both: per expert all gate rows, then all up rows;
    with packing="interleaved" they alternate. Then there may be biases [experts, 2h], in the same
    order, and [experts, d]. `weigh="before"`: a token is multiplied by its weights before the
    experts' first product. `act="swiglu-oai"` is gpt-oss' clamped activation. `shared`: this many of
    the experts, the last ones, process every token, with weight 1.

    x, weights (for the router), the experts and their biases have gradients. act and recompute: as
    of `ffn`. routing: how tokens are expected to choose, to choose kernels by: "uniform" (the
    default) or "zipf:1"; any choice is right.
    """
    biases = (None, None) if biases is None else several(
        "moe-ffn", "biases", biases, 2, "those of gate and up, and of down")
    arguments = (x, ids, weights, w_gate, w_up, w_down, *biases, act, packing, weigh, shared,
                 "" if routing is None else routing)
    if (wants_gradient(x, weights, w_gate, w_up, w_down, *biases)
            and not flag("moe-ffn", "recompute", recompute)):
        return call(OPS.moe_ffn_preact, *arguments)[0]
    return call(OPS.moe_ffn, *arguments)


def moe_ffn_backward(dy: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor | None,
                     up: Tensor | None, w_gate: Tensor, w_up: Tensor, w_down: Tensor, *,
                     act: str = "silu", into: Sequence[Tensor] | None = None,
                     routing: str | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (dx, d_weights, dw_gate, dw_up, dw_down) of `moe_ffn` without biases and shared
    experts, with gate and up apart; d_weights is float32. `dy` [..., d]; `gate`, `up` [tokens * k,
    h]: results of torch.ops.fftune.moe_ffn_preact, or None to compute them again. `into`: three
    tensors like the experts' weights, to which their gradients are added."""
    arguments = dy, x, ids, weights, gate, up, w_gate, w_up, w_down
    if into is None:
        return tuple(call(OPS.moe_ffn_backward, *arguments, None, None, act, "halves", "after", 0,
                          "" if routing is None else routing))
    into = several("moe-ffn", "into", into, 3, "tensors like the experts' three weights")
    return *call(OPS.moe_ffn_backward_into, *arguments, *into, act,
                 "" if routing is None else routing), *into


# moe-route

_ROUTER = ("int top_k, str score, str order, int groups, int top_groups, str group_score, "
           "bool renormalise, float scale")


def _route_values(options, logits, bias):
    top_k, score, order, groups, top_groups, group_score, renormalise, scale = options
    expect_given("moe-route", score=score, order=order, group_score=group_score, scale=scale)
    m, experts = logits.shape[:-1].numel(), logits.shape[-1]
    expect("moe-route", "bias", bias, (experts,))
    return (m, top_k, experts, groups or None, top_groups or None, score, order,
            "yes" if renormalise else "no", float(scale), group_score, yes(bias)) if m else None


def _route_backward_values(options, d_weights, logits, ids):
    top_k, score, order, renormalise, scale = options
    m, experts = logits.shape[:-1].numel(), logits.shape[-1]
    expect("moe-route", "ids", ids, (*logits.shape[:-1], top_k))
    expect("moe-route", "d_weights", d_weights, ids.shape)
    return (m, top_k, experts, None, None, score, order, "yes" if renormalise else "no",
            float(scale)) if m else None


_ROUTE_NAMES = ("m", "top-k", "experts", "groups", "top-groups", "score", "order", "renormalise",
                "scale")
_ROUTE = Form("moe-route", False, (*_ROUTE_NAMES, "group-score", "bias"), _route_values)
_ROUTE_BACKWARD = Form("moe-route", True, _ROUTE_NAMES, _route_backward_values, typed_by=1)


@define(f"moe_route(Tensor logits, Tensor? bias, {_ROUTER}) -> (Tensor, Tensor)", by_row=True)
def _(logits, bias, top_k, *options):
    if top_k < 1:
        raise Error(f"moe-route: top_k is {top_k}: give 1 or more")
    shape = *logits.shape[:-1], top_k
    weights = empty(logits, *shape, dtype=torch.float32)
    ids = torch.empty_like(weights, dtype=torch.int32)
    run(_ROUTE, (top_k, *options), (logits, float32("moe-route", "bias", bias)),
        (ids, weights))
    return weights, ids


@define("moe_route_backward(Tensor d_weights, Tensor logits, Tensor ids, str score, str order, "
        "bool renormalise, float scale) -> Tensor")
def _(d_weights, logits, ids, *options):
    logits = ready(logits)
    d_logits = torch.empty_like(logits)
    run(_ROUTE_BACKWARD, (ids.shape[-1], *options),
        (float32("moe-route", "d_weights", d_weights), logits, int32("moe-route", "ids", ids)),
        (d_logits,))
    return d_logits


@fake("moe_route")
def _(logits, bias, top_k, *options):
    shape = *logits.shape[:-1], top_k
    return (logits.new_empty(shape, dtype=torch.float32),
            logits.new_empty(shape, dtype=torch.int32))


@fake("moe_route_backward")
def _(d_weights, logits, *others):
    return logits.new_empty(logits.shape)


def _save_route(ctx, inputs, output):
    logits, _, _, score, order, _, _, _, renormalise, scale = inputs
    _, ids = output
    ctx.mark_non_differentiable(ids)
    ctx.options = score, order, renormalise, scale
    ctx.save_for_backward(logits, ids)


@gradient("moe_route", _save_route)
def _(ctx, d_weights, _):
    return call(OPS.moe_route_backward, d_weights, *ctx.saved_tensors,
                *ctx.options), *(None,) * 9


def moe_route(logits: Tensor, top_k: int, *, bias: Tensor | None = None, score: str = "softmax",
              order: str = "before", groups: int = 0, top_groups: int = 0,
              group_score: str = "max", renormalise: bool = False, scale: float = 1.0
              ) -> tuple[Tensor, Tensor]:
    """(ids, weights): the `top_k` experts that each token chooses, the best first, and their
    weights, as `moe_ffn` takes them.

    `logits` [..., experts]. Returns int32 [..., top_k] and float32 [..., top_k]; the weights have
    gradients to the logits. `score`: "softmax" of all logits, or with order="after" of those chosen
    alone; or "sigmoid". `bias` [experts]: is added to the scores for the choice alone (DeepSeek).
    With `groups` groups of neighbours only the best `top_groups` take part, by their best expert or
    with group_score="top2" by the sum of their best two. `renormalise`: a token's weights add up to
    `scale`, which otherwise only multiplies them.
    """
    weights, ids = call(OPS.moe_route, logits, bias, top_k, score, order, groups,
                        top_groups, group_score, renormalise, scale)
    return ids, weights

"""moe_ffn: the gated MLPs of a mixture of experts."""
from typing import Sequence

import torch
from torch import Tensor

from .._checks import count_of, expect, expect_dims, expect_tensor, flag, float32, has_sizes, int32, named, several
from .._custom import OPS, call, gradient, is_disabled, save_gates, wants_gradient
from .._declare import FROZEN, declare, run_into
from .._layer_form import first_expert as first_expert_tensor
from .._library import Error
from .._run import ready
from .ffn import expect_both
from .packed import (FORMATS, PackedWeight, autocasts, format_of, group_word, has_zeros, named_packed, parts_of,
                     suffix)

_CHOICES = "x, ids:ints, weights:floats"
_SEPARATE = "w_gate=w_gate|w_gate_up, w_up?, w_down"
_BIASES = "b_gate_up?, b_down?"
_OPTIONS = "act, packing=gate-up:str, weigh, shared, routing"
_SHARED = "moe-ffn: shared is {} beside experts of other ranks: every rank would add those"


def _expect_experts(w_gate, w_up, packing="halves", shared=0, gate=None, up=None, b_gate_up=None,
                    b_down=None, **_):
    if not 0 <= shared <= w_gate.shape[0]:
        raise Error(f"moe-ffn: w_gate is {list(w_gate.shape)}, shared {shared}: give [experts + "
                    "shared, h, d]")
    if w_up is None and packing not in ("halves", "interleaved"):
        raise Error(f"moe-ffn: there is no packing '{packing}': give halves or interleaved")
    expect_both("moe-ffn", gate, up)


def _expect_biases(w_up, b_gate_up, b_down, **others):
    _expect_experts(w_up=w_up, **others)
    if (b_gate_up is None) != (b_down is None):
        raise Error("moe-ffn: give biases of both products, or of none")
    if b_down is not None and w_up is not None:
        raise Error("moe-ffn: biases are for gate and up in one tensor: leave w_up out")


def _expect_scales(w_up, w_up_scale, **others):
    _expect_experts(w_up=w_up, **others)
    if (w_up is None) != (w_up_scale is None):
        raise Error("moe-ffn: give w_up and its scale, or neither")


_FORWARD, _ = (
    declare(name, "moe-ffn", f"{_CHOICES}, {_SEPARATE}, {_BIASES}, {_OPTIONS}", results,
            check=_expect_biases, casts=True, keeps=("weights",), by_row=by_row, loose=("gate-up",))
    for name, results, by_row in (("moe_ffn", "y", True), ("moe_ffn_preact", "y, gate, up", False)))
# Whole experts of a rank: ids are those of all experts, which first_expert makes its own.
declare("moe_ffn_slice", "moe-ffn", f"x, ids:ints, first_expert, weights:floats, {_SEPARATE}, {_BIASES}, "
        "experts, act, packing=gate-up:str, weigh, routing", "y", check=_expect_biases, casts=True,
        by_row=True, fixed={"shared": "", "own-experts": "given"}, loose=("gate-up",))
# The kernels read only the biases that a gradient depends on, and for frozen experts x only where they
# compute gate and up again or d_weights from it.
_BACKWARD = dict(back=True, check=_expect_experts, loose=("gate-up",))
_READ = {"b_gate_up": lambda b, gate: b if gate is None else None,
         "b_down": lambda b, weigh: b if weigh == "after" else None}
declare("moe_ffn_backward", "moe-ffn", f"dy, {_CHOICES}, gate?, up?, {_SEPARATE}, {_BIASES}, "
        f"{_OPTIONS}", "dx, d_weights, dw_gate=dw_gate|dw_gate_up:w_gate, dw_up:w_up?w_up, "
        "dw_down, db_gate_up:b_gate_up?b_gate_up, db_down:b_down?b_down", returns="Tensor[]",
        prepare=_READ, **_BACKWARD)
declare("moe_ffn_frozen_backward", "moe-ffn", f"dy, x?, ids:ints, weights:floats, gate?, up?, "
        f"{_SEPARATE}, {_BIASES}, {_OPTIONS}", "dx, d_weights", fixed=FROZEN, **_BACKWARD, prepare={
            **_READ, "x": lambda x, gate, weigh: x if gate is None or weigh == "before" else None})
declare("moe_ffn_backward_into", "moe-ffn", f"dy, {_CHOICES}, gate?, up?, w_gate, w_up, w_down, "
        "d_gate=dw_gate_before!, d_up=dw_up_before!, d_down=dw_down_before!, act, routing",
        "dx, d_weights", back=True, check=_expect_experts)
_FP8 = declare(
    "moe_ffn_fp8", "moe-ffn", f"{_CHOICES}, {_SEPARATE}, x_scale, "
        "w_gate_scale=w_gate_scale|w_gate_up_scale, w_up_scale?, hidden_scale?, w_down_scale, "
        "act, packing=gate-up:str, shared, routing", "y", fixed={"dtype": "fp8", "weights": "dense"},
        check=_expect_scales, loose=("gate-up",))
for _scales in ("token", "block"):
    declare(f"moe_ffn_fp8_{_scales}", "moe-ffn", f"{_CHOICES}, {_SEPARATE}, "
            "w_gate_scale=w_gate_scale|w_gate_up_scale, w_up_scale?, w_down_scale, act, packing=gate-up:str, "
            "shared, routing", "y", fixed={"quantise": _scales, "weights": "dense"}, label="moe_ffn_fp8",
            by_row=True, check=_expect_scales, loose=("gate-up",))

for _format in FORMATS:
    _zeros = ("gate_zero=w_gate_zero?, up_zero=w_up_zero?, down_zero=w_down_zero?, "
              if has_zeros(_format) else "")
    declare(f"moe_ffn_packed{suffix(_format)}", "moe-ffn",
            f"{_CHOICES}, w_gate, w_up, w_down, gate_scale=w_gate_scale, up_scale=w_up_scale, "
            f"down_scale=w_down_scale, {_zeros}b_gate?, b_up?, b_down?, experts, h, act, weigh, shared, "
            "group, routing", "y", fixed={"weights": _format}, by_row=True,
            **autocasts(_format, "gate_scale", "up_scale", "down_scale", keeps=("weights",)))


def _save(ctx, inputs, output):
    tensors, ctx.options = inputs[:8], inputs[8:]
    save_gates(ctx, tensors, output)


@gradient("moe_ffn", _save)
def _(ctx, dy, *_unused):
    if dy is None:
        return (None,) * 13
    x, ids, weights, *given, gate, up = ctx.saved_tensors
    arguments = dy, x, ids, weights, gate, up, *given, *ctx.options
    if not any(ctx.needs_input_grad[3:8]):
        dx, d_weights = call(OPS.moe_ffn_frozen_backward, *arguments)
        return dx, None, d_weights.to(weights.dtype), *(None,) * 10
    dx, d_weights, *gradients = call(OPS.moe_ffn_backward, *arguments)
    gradients = iter(gradients)
    return (dx, None, d_weights.to(weights.dtype),
            *(None if t is None else next(gradients) for t in given), *(None,) * 5)


gradient("moe_ffn_preact", _save)(_)


def moe_ffn(x: Tensor, ids: Tensor, weights: Tensor, w_gate: Tensor, w_up: Tensor | None,
            w_down: Tensor, *, biases: tuple[Tensor, Tensor] | None = None, act: str = "silu",
            packing: str = "halves", weigh: str = "after", shared: int = 0,
            recompute: bool = False, routing: str | None = None, experts: int | None = None,
            first_expert: int = 0) -> Tensor:
    """Mixture of experts: ``Σ_j weights_j · ffn_{ids_j}(x)`` over the choices j of each token.

    x, weights, the experts and their biases have gradients.

    Args:
        x: Input, [..., d].
        ids: Integers [..., k], the experts that a token chose, each once. An id outside of
            [0, experts) adds nothing.
        weights: [..., k] of any floating-point type; kernels use float32.
        w_gate, w_up: [experts, h, d]. With ``w_up=None`` w_gate is [experts, 2h, d] and holds both, in
            the order of `packing`.
        w_down: [experts, d, h]. All three weights may be ``PackedWeight`` of all experts' rows,
            [experts · h, d] and [experts · d, h], with d and h multiples of 16; these have no gradients.
        biases: ([experts, 2h], [experts, d]) of the two products, only with ``w_up=None``. With packed
            weights ([experts, h], [experts, h], [experts, d]).
        act: As in `ffn`, or "swiglu-oai", the clamped activation of gpt-oss.
        packing: "halves" for all rows of gate, then all of up; "interleaved" for alternating rows.
        weigh: "after" the experts, or "before": x is multiplied by the weight (Llama 4).
        shared: The last `shared` experts process every token, with weight 1.
        recompute: As in `ffn`.
        routing: Expected distribution of the choices: "uniform", the default, or "zipf:EXPONENT". It
            affects the choice of kernels, not the results.
        experts, first_expert: For a rank with whole experts: the number of experts on all ranks, and this
            rank's first one. ids number the experts of all ranks; other ranks' experts add nothing, and
            `all_reduce` sums the results. Not with `shared`, which every rank would add.

    Returns:
        [..., d].
    """
    routing = "" if routing is None else routing
    if experts is not None:
        count = _experts_of(w_down, x)
        if not _is_zero(shared):
            raise Error(_SHARED.format(named(shared)))
        # Where x or w_down is wrong, the op says so.
        _expect_slice(experts, first_expert, 0 if count is None else count)
        if count is not None and has_sizes(ids):
            if not isinstance(w_down, PackedWeight) and not isinstance(w_gate, PackedWeight) and not wants_gradient(
                    x, weights, w_gate, w_up, w_down, *(biases if isinstance(biases, (tuple, list)) else ())):
                return _slice(x, ids, weights, (w_gate, w_up, w_down), biases, act, packing, weigh,
                              routing, experts, first_expert)
            # The op with a gradient, and that of packed weights, take ids of their own experts.
            ids = torch.where(ids < first_expert, -1, ids - first_expert)
    elif not _is_zero(first_expert):
        raise Error(f"moe-ffn: first_expert is {named(first_expert)} without experts: give how many all ranks have")
    if any(isinstance(w, PackedWeight) for w in (w_gate, w_up, w_down)):
        return _packed(x, ids, weights, (w_gate, w_up, w_down), biases, act, weigh, shared,
                       routing)
    biases = _two_biases(biases)
    arguments = (x, ids, weights, w_gate, w_up, w_down, *biases, act, packing, weigh, shared,
                 routing)
    if (wants_gradient(x, weights, w_gate, w_up, w_down, *biases)
            and not flag("moe-ffn", "recompute", recompute)):
        return call(OPS.moe_ffn_preact, *arguments)[0]
    return call(OPS.moe_ffn, *arguments)


def _expect_slice(experts: int, first: int, own: int) -> None:
    for name, value in (("experts", experts), ("first_expert", first)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise Error(f"moe-ffn: {name} is {named(value)}: give a number")
    if first < 0 or first + own > experts:
        raise Error(f"moe-ffn: experts {first} to {first + own - 1} of the weights are not all of 0 to "
                    f"{experts - 1}: give experts of all ranks, and the first one here")


def _two_biases(biases) -> Sequence[Tensor | None]:
    return (None, None) if biases is None else several(
        "moe-ffn", "biases", biases, 2, "those of gate and up, and of down")


def _is_zero(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 0


def _experts_of(w_down: Tensor | PackedWeight, x: Tensor) -> int | None:
    """How many experts have weights; None where these or x are none."""
    if not has_sizes(x) or not x.dim() or not x.shape[-1]:
        return None
    if isinstance(w_down, PackedWeight):
        return w_down.n // x.shape[-1]
    return w_down.shape[0] if has_sizes(w_down) and w_down.dim() == 3 else None


def _slice(x: Tensor, ids: Tensor, weights: Tensor, own: Sequence[Tensor | None],
           biases: tuple[Tensor, Tensor] | None, act: str, packing: str, weigh: str,
           routing: str, experts: int, first: int) -> Tensor:
    biases = _two_biases(biases)
    return call(OPS.moe_ffn_slice, x, ids, first_expert_tensor(first, x.device), weights, *own, *biases,
                experts, act, packing, weigh, routing)


def _packed(x: Tensor, ids: Tensor, weights: Tensor, experts: Sequence[PackedWeight],
            biases: Sequence[Tensor] | None, act: str, weigh: str, shared: int, routing: str) -> Tensor:
    for name, w in zip(("w_gate", "w_up", "w_down"), experts):
        named_packed("moe-ffn", name, w, "three packed weights")
        if format_of(w) != format_of(experts[0]):
            raise Error(f"moe-ffn: {name} has another format than w_gate")
    expect_tensor("moe-ffn", "x", x)
    expect_dims("moe-ffn", "x", x, "[..., d]")
    gate, up, down = experts
    d, h, shared = x.shape[-1], down.k, count_of("moe-ffn", "shared", shared)
    count = down.n // max(d, 1)
    if not d or (gate.n, gate.k) != (count * h, d) or (up.n, up.k) != (count * h, d) or down.n % d:
        raise Error(f"moe-ffn: w_gate is [{gate.n}, {gate.k}], w_up [{up.n}, {up.k}], w_down [{down.n}, "
                    f"{down.k}]: give [experts * h, {d}], the same, and [experts * {d}, h]")
    if not 0 <= shared < count:
        raise Error(f"moe-ffn: shared is {shared} of {count} experts: give 0 or more, and fewer than all")
    biases = (None, None, None) if biases is None else several(
        "moe-ffn", "biases", biases, 3, "those of gate, of up and of down")
    if len({b is None for b in biases}) > 1:
        raise Error("moe-ffn: one of biases is None: give those of gate, of up and of down, or biases=None")
    if wants_gradient(x, weights, *biases):
        raise Error("moe-ffn: packed weights have no gradients: use torch.no_grad()")
    return call(getattr(OPS, f"moe_ffn_packed{suffix(gate.format)}"), x, ids, weights, *parts_of(*experts),
                *biases, count - shared, h, act, weigh, shared,
                group_word("moe-ffn", gate.group, gate.format), routing)


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
    given = (ready(x), ready(int32("moe-ffn", "ids", ids)), ready(float32("moe-ffn", "weights", weights)),
             w_gate_up, None, w_down)
    if scales is None:
        run_into(_FORWARD, (*given, None, None, act, "halves", "after", 0, ""), (y,))
    else:
        x_scale, w_gate_up_scale, w_down_scale = scales
        run_into(_FP8, (*given, x_scale, w_gate_up_scale, None, None, w_down_scale, act, "halves", 0,
                        ""), (y,))


def moe_ffn_backward(dy: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor | None,
                     up: Tensor | None, w_gate: Tensor, w_up: Tensor, w_down: Tensor, *,
                     act: str = "silu", into: Sequence[Tensor] | None = None,
                     routing: str | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `moe_ffn` without biases and shared experts, for autograd functions of your own.

    Args:
        dy: Gradient of the result, [..., d].
        x, ids, weights, w_gate, w_up, w_down, act, routing: As in `moe_ffn`, with w_gate and w_up apart.
        gate, up: [tokens · k, h], results of ``torch.ops.fftune.moe_ffn_preact``; None to compute them
            again.
        into: Three tensors with the shapes of the experts' weights. The gradients of the weights are
            added to them in place, and these tensors are returned.

    Returns:
        (dx, d_weights, dw_gate, dw_up, dw_down); d_weights is float32.
    """
    arguments = dy, x, ids, weights, gate, up, w_gate, w_up, w_down
    if into is None:
        return tuple(call(OPS.moe_ffn_backward, *arguments, None, None, act, "halves", "after", 0,
                          "" if routing is None else routing))
    into = several("moe-ffn", "into", into, 3, "tensors like the experts' three weights")
    return *call(OPS.moe_ffn_backward_into, *arguments, *into, act,
                 "" if routing is None else routing), *into


def moe_ffn_fp8(x: Tensor, ids: Tensor, weights: Tensor, w_gate: Tensor, w_up: Tensor | None,
                w_down: Tensor, x_scale: Tensor | None, w_gate_scale: Tensor, w_up_scale: Tensor | None,
                w_down_scale: Tensor, hidden_scale: Tensor | None = None, *, act: str = "silu",
                packing: str = "halves", shared: int = 0, routing: str | None = None) -> Tensor:
    """`moe_ffn` in float8_e4m3fn, without gradients.

    Scales are float32. E counts all experts, shared ones included. The kinds are:

    * per tensor: x_scale [1], weights' scales [E] ([E, 2] for gate and up in one tensor), and
      `hidden_scale` [1], which is given for this kind alone;

    * per token and row: x_scale [..., 1], w_gate_scale and w_up_scale [E, h] (or [E, 2h]),
      w_down_scale [E, d];

    * per block of 128: x_scale [..., ⌈d / 128⌉], weights' scales [E, ⌈rows / 128⌉, ⌈columns / 128⌉];

    * without `x_scale` the op quantises the tokens of x too, by blocks or by token as the weights' scales
      are, and the activation between the products by blocks of 128 elements of a token.

    Args:
        x: [..., d], float8_e4m3fn; without `x_scale` of another type.
        ids, weights, act, packing, shared, routing: As in `moe_ffn`.
        w_gate, w_up, w_down: Shapes as in `moe_ffn`, float8_e4m3fn.
        x_scale, w_gate_scale, w_up_scale, w_down_scale: Scales; value = element × scale.
        hidden_scale: Scale of the activation between the products, [1].

    Returns:
        [..., d], bfloat16; without `x_scale` of x's element type.
    """
    routing = "" if routing is None else routing
    if x_scale is None:
        if hidden_scale is not None:
            raise Error("moe_ffn_fp8: hidden_scale without x_scale: the op that quantises tokens computes both")
        by_row = isinstance(w_gate_scale, Tensor) and w_gate_scale.dim() == 2
        return call(OPS.moe_ffn_fp8_token if by_row else OPS.moe_ffn_fp8_block, x, ids, weights, w_gate, w_up,
                    w_down, w_gate_scale, w_up_scale, w_down_scale, act, packing, shared, routing)
    return call(OPS.moe_ffn_fp8, x, ids, weights, w_gate, w_up, w_down, x_scale,
                w_gate_scale, w_up_scale, hidden_scale, w_down_scale, act, packing, shared, routing)

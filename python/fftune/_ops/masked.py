"""masked_linear and masked_ffn: two experts behind a mask."""
from typing import Sequence

from torch import Tensor

from .._checks import flag, several
from .._custom import OPS, call, wants_gradient
from .._declare import FROZEN, declare
from .ffn import UNREAD, expect_both

_LINEAR = "x, mask:bytes, w_true, w_false"
_SIX = ("w_gate_true, w_up_true, w_down_true, w_gate_false, w_up_false, w_down_false, act, "
        "pattern=mask:str")


def _expect_gates(gate, up, **_):
    expect_both("masked-ffn", gate, up)


declare("masked_linear", "masked-linear", f"{_LINEAR}, pattern=mask:str", "y", casts=True,
        by_row=True, gradient="masked_linear_backward")
declare("masked_linear_backward", "masked-linear", f"dy, {_LINEAR}, pattern=mask:str",
        "dx, dw_true, dw_false", back=True)
declare("masked_linear_frozen_backward", "masked-linear", "dy, mask:bytes, w_true, w_false, "
        "pattern=mask:str", "dx", back=True, fixed=FROZEN)
declare("masked_linear_backward_into", "masked-linear", f"dy, {_LINEAR}, d_true=dw_true_before!, "
        "d_false=dw_false_before!, pattern=mask:str", "dx", back=True)
for _name, _results, _by_row in (("masked_ffn", "y", True),
                                 ("masked_ffn_preact", "y, gate, up", False)):
    declare(_name, "masked-ffn", f"x, mask:bytes, {_SIX}", _results, casts=True, by_row=_by_row,
            gradient="masked_ffn_backward")
declare("masked_ffn_backward", "masked-ffn", f"dy, x, mask:bytes, gate?, up?, {_SIX}",
        "dx, dw_gate_true, dw_up_true, dw_down_true, dw_gate_false, dw_up_false, dw_down_false",
        back=True, check=_expect_gates)
declare("masked_ffn_frozen_backward", "masked-ffn", f"dy, x?, mask:bytes, gate?, up?, {_SIX}", "dx",
        back=True, fixed=FROZEN, check=_expect_gates, prepare=UNREAD)
declare("masked_ffn_backward_into", "masked-ffn", "dy, x, mask:bytes, gate?, up?, " + ", ".join(
    f"d_{name}=dw_{name}_before!" for name in ("gate_true", "up_true", "down_true", "gate_false",
                                               "up_false", "down_false")) + f", {_SIX}", "dx",
        back=True, check=_expect_gates)


def _or_empty(pattern: str | None) -> str:
    return "" if pattern is None else pattern


def masked_linear(x: Tensor, mask: Tensor, w_true: Tensor, w_false: Tensor, *,
                  pattern: str | None = None) -> Tensor:
    """``x_i w_trueᵀ`` where ``mask_i``, else ``x_i w_falseᵀ``.

    Args:
        x: Input, [..., k].
        mask: bool [...], or bytes that are not 0 where it is set.
        w_true, w_false: [n, k].
        pattern: Expected distribution of the mask, by which kernels are chosen; results do not depend
            on it. "block:SHARE" is one run of this share of the tokens, "random:SHARE" scattered tokens;
            also "all", "none", "tail:SHARE" and "even:SHARE". The default is "block:0.33".

    Returns:
        [..., n].
    """
    return call(OPS.masked_linear, x, mask, w_true, w_false, _or_empty(pattern))


def masked_ffn(x: Tensor, mask: Tensor, w_gate_true: Tensor, w_up_true: Tensor,
               w_down_true: Tensor, w_gate_false: Tensor, w_up_false: Tensor, w_down_false: Tensor,
               *, act: str = "silu", recompute: bool = False, pattern: str | None = None
               ) -> Tensor:
    """`ffn` with the first three weights where ``mask_i``, else with the other three.

    Args:
        x: Input, [..., d].
        mask, pattern: As in `masked_linear`.
        w_gate_true, w_up_true, w_gate_false, w_up_false: [h, d].
        w_down_true, w_down_false: [d, h].
        act, recompute: As in `ffn`.

    Returns:
        [..., d].
    """
    arguments = (x, mask, w_gate_true, w_up_true, w_down_true, w_gate_false, w_up_false,
                 w_down_false)
    if wants_gradient(*arguments) and not flag("masked-ffn", "recompute", recompute):
        return call(OPS.masked_ffn_preact, *arguments, act, _or_empty(pattern))[0]
    return call(OPS.masked_ffn, *arguments, act, _or_empty(pattern))


def masked_linear_backward(dy: Tensor, x: Tensor, mask: Tensor, w_true: Tensor, w_false: Tensor, *,
                           into: Sequence[Tensor] | None = None, pattern: str | None = None
                           ) -> tuple[Tensor, ...]:
    """Gradients of `masked_linear`, for autograd functions of your own.

    Args:
        dy: Gradient of the result, [..., n].
        x, mask, w_true, w_false, pattern: As in `masked_linear`.
        into: Two tensors with the shapes of the weights. The gradients of the weights are added to them
            in place, and these tensors are returned.

    Returns:
        (dx, dw_true, dw_false).
    """
    arguments = dy, x, mask, w_true, w_false
    if into is None:
        return call(OPS.masked_linear_backward, *arguments, _or_empty(pattern))
    into = several("masked-linear", "into", into, 2, "tensors like the two weights")
    return call(OPS.masked_linear_backward_into, *arguments, *into, _or_empty(pattern)), *into


def masked_ffn_backward(dy: Tensor, x: Tensor, mask: Tensor, gate: Tensor | None,
                        up: Tensor | None, *weights: Tensor, act: str = "silu",
                        into: Sequence[Tensor] | None = None, pattern: str | None = None
                        ) -> tuple[Tensor, ...]:
    """Gradients of `masked_ffn`, for autograd functions of your own.

    Args:
        dy: Gradient of the result, [..., d].
        x, mask, pattern, act: As in `masked_ffn`.
        gate, up: Results of ``torch.ops.fftune.masked_ffn_preact``; None to compute them again.
        weights: The six weights in the order of `masked_ffn`.
        into: Six tensors with the shapes of the weights. The gradients of the weights are added to them
            in place, and these tensors are returned.

    Returns:
        dx, then the gradients of the six weights.
    """
    arguments = dy, x, mask, gate, up
    weights = several("masked-ffn", "weights", weights, 6, "the six weights of masked_ffn")
    if into is None:
        return call(OPS.masked_ffn_backward, *arguments, *weights, act, _or_empty(pattern))
    into = several("masked-ffn", "into", into, 6, "tensors like the six weights")
    return call(OPS.masked_ffn_backward_into, *arguments, *into, *weights, act,
                _or_empty(pattern)), *into

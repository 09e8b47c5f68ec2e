"""bias_gelu and act_mul: activations of what a product wrote; and scale_."""
from torch import Tensor

from .._checks import has_sizes, named
from .._custom import OPS, call
from .._declare import FROZEN, declare
from .._library import Error

declare("bias_gelu", "bias-gelu", "x, bias:row, act", "y", by_row=True,
        gradient="bias_gelu_backward")
declare("bias_gelu_backward", "bias-gelu", "dy, x, bias:row, act", "dx, dbias:bias", back=True)
declare("bias_gelu_frozen_backward", "bias-gelu", "dy, x, bias:row, act", "dx", back=True, fixed=FROZEN)


def _expect_even(gate, **_):
    if gate.shape[-1] % 2:
        raise Error(f"act-mul: gate is {list(gate.shape)}: give [..., 2h], or up beside it")


declare("act_mul", "act-mul", "gate, up, act", "y=out", by_row=True,
        gradient="act_mul_backward")
declare("act_mul_backward", "act-mul", "dy=dout, gate, up, act", "dgate, dup", back=True)
declare("act_mul_packed", "act-mul", "gate=gate_up, act", "y=out", check=_expect_even, by_row=True,
        gradient="act_mul_packed_backward")
declare("act_mul_packed_backward", "act-mul", "dy=dout, gate=gate_up, act", "dgate=dgate_up", back=True,
        check=_expect_even)

declare("scale_", "scale", "x!, factor", "")


_GELU = {"none": "gelu", "tanh": "gelu-tanh"}


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none") -> Tensor:
    """``gelu(x + bias)``.

    Args:
        x: [..., h].
        bias: [h], of x's element type or float32.
        approximate: "none" for gelu with erf, "tanh" for its approximation, as in
            ``torch.nn.functional.gelu``.

    Returns:
        [..., h].
    """
    act = _GELU.get(approximate) if isinstance(approximate, str) else None
    if act is None:
        raise Error(f"bias-gelu: approximate is {named(approximate)}: give 'none' or 'tanh'")
    return call(OPS.bias_gelu, x, bias, act)


def act_mul(gate: Tensor, up: Tensor | None = None, *, act: str = "silu") -> Tensor:
    """``act(gate) * up``, the activation of a gated MLP.

    Args:
        gate: [..., h]; without `up` [..., 2h], with gate in the first half of each row and up in the
            second.
        up: [..., h].
        act: "silu", "gelu" (with erf), "gelu-tanh" or "relu".

    Returns:
        [..., h].
    """
    if up is None:
        return call(OPS.act_mul_packed, gate, act)
    return call(OPS.act_mul, gate, up, act)


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """``x *= factor``, in place and rounded once; a factor of 1 neither reads nor writes `x`.

    Args:
        x: [..., h], contiguous.
        factor: float32, one number on x's device.

    Returns:
        `x`.
    """
    if has_sizes(factor) and factor.dim() == 0:
        factor = factor.reshape(1)
    call(OPS.scale_, x, factor)
    return x

"""layernorm: layer normalisation, with and without a residual."""
from torch import Tensor

from .._custom import OPS, call
from .._declare import FROZEN, declare

declare("layernorm", "layernorm", "x, w, b, eps", "y", by_row=True,
        gradient="layernorm_backward")
declare("add_layernorm", "layernorm", "x, residual, w, b, eps", "y, sum", by_row=True,
        gradient="layernorm_backward")
declare("layernorm_backward", "layernorm", "dy, x, w, dsum?, eps", "dx, dw, db", back=True)
declare("layernorm_frozen_backward", "layernorm", "dy, x, w, dsum?, eps", "dx", back=True, fixed=FROZEN)


def layernorm(x: Tensor, w: Tensor, b: Tensor, *, eps: float = 1e-5) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * w + b`` over the last dimension, with the biased variance.

    Args:
        x: Input, [..., d].
        w, b: [d].
        eps: Added to the variance.

    Returns:
        [..., d].
    """
    return call(OPS.layernorm, x, w, b, eps)


def add_layernorm(x: Tensor, residual: Tensor, w: Tensor, b: Tensor, *, eps: float = 1e-5
                  ) -> tuple[Tensor, Tensor]:
    """``s = x + residual`` and its layer normalisation, in one kernel.

    Args:
        x, residual: [..., d].
        w, b, eps: As in `layernorm`.

    Returns:
        (layernorm(s), s), [..., d] each.
    """
    return call(OPS.add_layernorm, x, residual, w, b, eps)

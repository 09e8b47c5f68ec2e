"""rmsnorm: root mean square normalisation, with and without a residual."""
import torch
from torch import Tensor

from .._checks import flag
from .._custom import OPS, call, wants_gradient
from .._declare import FROZEN, declare
from .._library import Error

for _rstd in ("", "_rstd"):
    _also = ", rstd" if _rstd else ""
    declare("rmsnorm" + _rstd, "rmsnorm", "x, w:row, eps, convention", "y" + _also, by_row=True,
            gradient="rmsnorm_backward")
    declare("add_rmsnorm" + _rstd, "rmsnorm", "x, residual, w:row, eps, convention",
            "y, sum" + _also, by_row=True, gradient="rmsnorm_backward")
declare("rmsnorm_quantised", "rmsnorm", "x, residual?, w:row, eps, convention, int8=output:bool",
        "y, scale, sum?residual", words={"int8": {True: "i8", False: "fp8"}})
_BACK = "dy, x, w:row, dsum?, rstd?, eps, convention"
declare("rmsnorm_backward", "rmsnorm", _BACK, "dx, dw:w", back=True)
declare("rmsnorm_frozen_backward", "rmsnorm", _BACK, "dx", back=True, fixed=FROZEN)


def rmsnorm(x: Tensor, w: Tensor, *, eps: float = 1e-6, convention: str = "llama",
            save_rstd: bool = False) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * w``, with the mean over the last dimension.

    Zhang and Sennrich, `Root Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_.

    Args:
        x: Input, [..., d].
        w: Weight, [d], of x's element type or float32.
        eps: Added to the mean of squares.
        convention: "llama" rounds the normalised value to x's element type before the product with w;
            "t5" rounds once, after it; "gemma" rounds once and multiplies by ``1 + w``.
        save_rstd: Save ``1 / sqrt(mean(x²) + eps)`` of each row for the backward pass, instead of
            computing it again there.

    Returns:
        [..., d].
    """
    if save_rstd is not False and flag("rmsnorm", "save_rstd", save_rstd) and wants_gradient(x, w):
        return call(OPS.rmsnorm_rstd, x, w, eps, convention)[0]
    return call(OPS.rmsnorm, x, w, eps, convention)


def add_rmsnorm(x: Tensor, residual: Tensor, w: Tensor, *, eps: float = 1e-6,
                convention: str = "llama", save_rstd: bool = False) -> tuple[Tensor, Tensor]:
    """``s = x + residual`` and its RMSNorm, in one kernel.

    Args:
        x, residual: [..., d].
        w, eps, convention, save_rstd: As in `rmsnorm`.

    Returns:
        (rmsnorm(s), s), [..., d] each.
    """
    if (save_rstd is not False and flag("rmsnorm", "save_rstd", save_rstd)
            and wants_gradient(x, residual, w)):
        return call(OPS.add_rmsnorm_rstd, x, residual, w, eps, convention)[:2]
    return call(OPS.add_rmsnorm, x, residual, w, eps, convention)


def rmsnorm_quantised(x: Tensor, w: Tensor, residual: Tensor | None = None, *, eps: float = 1e-6,
                      convention: str = "llama", dtype: torch.dtype = torch.float8_e4m3fn
                      ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """RMSNorm whose result is quantised with one scale per row. No gradients.

    Args:
        x: [..., d].
        w: [d].
        residual: [..., d]; if given, the norm is that of ``s = x + residual``.
        eps, convention: As in `rmsnorm`.
        dtype: Torch.float8_e4m3fn or torch.int8.

    Returns:
        (q, scale), or (q, scale, s) with a residual. q [..., d] has element type `dtype`, scale [...] is
        float32, and the norm is ``q * scale``.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.int8, torch.float8_e4m3fn):
        raise Error(f"rmsnorm: quantised to {dtype}: give torch.float8_e4m3fn or torch.int8")
    results = call(OPS.rmsnorm_quantised, x, residual, w, eps, convention,
                    dtype == torch.int8)
    return results[:2] if residual is None else results

"""gated_rmsnorm: RMSNorm with a gate behind it or before it."""
import torch
from torch import Tensor

from .._custom import OPS, call
from .._declare import FROZEN, declare
from .._library import Error


def _laid(z: Tensor) -> tuple:
    """The gate as the kernels read it: features next to each other, rows a constant stride apart, which is None
    where it is the number of features."""
    if z.is_contiguous() and not (z.is_cuda and z.data_ptr() & 15):
        return z, None
    step = 16 // z.element_size() if z.is_cuda else 1
    if z.dim() < 2 or z.stride(-1) != 1 or z.stride(-2) < z.shape[-1] or z.stride(-2) % step or (
            z.is_cuda and z.data_ptr() & 15) or any(
            z.shape[i] > 1 and z.stride(i) != z.stride(i + 1) * z.shape[i + 1] for i in range(z.dim() - 2)):
        return z.clone(memory_format=torch.contiguous_format), None
    return z, z.stride(-2)


def _check(groups, **_):
    if groups < 1:
        raise Error(f"gated-rmsnorm: groups is {groups}: give 1 or more")


_RULES = "eps, order, gate, convention, groups:int"
_FORM = {"check": _check, "lays": {"z": (_laid, ["z-row"])}}
declare("gated_rmsnorm", "gated-rmsnorm", f"x, z, w:row, {_RULES}", "y", gradient="gated_rmsnorm_backward", **_FORM)
declare("gated_rmsnorm_backward", "gated-rmsnorm", f"dy, x, z, w:row, {_RULES}", "dx:x, dz:x, dw:w", back=True,
        **_FORM)
declare("gated_rmsnorm_frozen_backward", "gated-rmsnorm", f"dy, x, z, w:row, {_RULES}", "dx:x, dz:x", back=True,
        fixed=FROZEN, **_FORM)


def gated_rmsnorm(x: Tensor, z: Tensor, w: Tensor, *, eps: float = 1e-6, order: str = "after", gate: str = "silu",
                  convention: str = "t5", groups: int = 1) -> Tensor:
    """``rmsnorm(x) * w * act(z)``, or with ``order="before"`` ``rmsnorm(x * act(z)) * w``.

    Args:
        x: [..., groups * d]. The heads of a token are rows of their own: [..., heads, d].
        z: The gate, of x's shape. Columns of a wider tensor are read where they are.
        w: Weight, [groups * d], of x's element type or float32.
        eps: Added to the mean of squares.
        order: "after" the norm as in the gated delta rule, or "before" it as in Mamba-2.
        gate: "silu" or "sigmoid".
        convention: "t5" rounds once, at the end; "llama" also rounds the normalised value, and its product with a
            weight of x's element type.
        groups: Parts of the last dimension, each with a norm of its own.

    Returns:
        [..., groups * d].
    """
    return call(OPS.gated_rmsnorm, x, z, w, eps, order, gate, convention, groups)

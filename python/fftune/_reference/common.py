"""Activations, rows and quantised numbers that the definitions of several ops share."""
import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "none": lambda x: x,
}


def activation_backward(act: str, dy: Tensor, x: Tensor) -> Tensor:
    """dy times the derivative of the activation at x."""
    if act == "silu":
        return aten.silu_backward(dy, x)
    if act == "relu":
        return aten.threshold_backward(dy, x, 0)
    if act == "none":
        return dy
    return aten.gelu_backward(dy, x, approximate="tanh" if act == "gelu-tanh" else "none")


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _added(y: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    if bias is not None:
        y = y + bias
    return y if residual is None else y + residual


def _add(into: tuple, gradients: tuple) -> None:
    for tensor, gradient in zip(into, gradients, strict=True):
        tensor += gradient


def _dequantised(q: Tensor, scale: Tensor, rows: int) -> Tensor:
    """Elements times scales: one in all, or one for each `rows` x 128 of them."""
    if scale.numel() == 1:
        return q.float() * scale
    spread = scale.repeat_interleave(rows, -2).repeat_interleave(128, -1)
    return q.float() * spread[..., : q.shape[-2], : q.shape[-1]]


def quantise(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """fp8 elements [..., k] and their scales: one for each 128 of a row, or the one given."""
    if scale is not None:
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
    k = x.shape[-1]
    blocks = F.pad(x.float(), (0, -k % 128)).unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale == 0, 1.0, scale)
    return ((blocks / scale).flatten(-2)[..., :k].to(torch.float8_e4m3fn), scale.squeeze(-1))


def quantise_weight(w: Tensor, block: bool) -> tuple[Tensor, Tensor]:
    """fp8 elements [n, k] and their scales: [1], or one for each 128 x 128 of them."""
    n, k = w.shape
    if not block:
        scale = (w.float().abs().max() / 448).reshape(1)
        scale = torch.where(scale == 0, 1.0, scale)
        return quantise(w, scale)[0], scale
    tiles = F.pad(w.float(), (0, -k % 128, 0, -n % 128)).unflatten(-1, (-1, 128))
    tiles = tiles.unflatten(0, (-1, 128))  # [n / 128, 128, k / 128, 128]
    scale = tiles.abs().amax((1, 3), keepdim=True) / 448
    scale = torch.where(scale == 0, 1.0, scale)
    q = (tiles / scale).flatten(0, 1).flatten(1, 2)[:n, :k]
    return q.to(torch.float8_e4m3fn), scale.squeeze((1, 3))


def _wide(x):
    return None if x is None else x.to(torch.promote_types(x.dtype, torch.float32))

"""rmsnorm and layernorm."""
import torch
import torch.nn.functional as F
from torch import Tensor

from .common import _rows


def _normalised(x: Tensor, eps: float) -> Tensor:
    x = x.float() if x.dtype != torch.float64 else x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rmsnorm(x, w, eps, convention):
    normed = _normalised(x, eps)
    if convention == "llama":
        return (normed.to(x.dtype) * w).to(x.dtype)
    wide = w.to(normed.dtype)
    return (normed * (1 + wide if convention == "gemma" else wide)).to(x.dtype)


def add_rmsnorm(x, residual, w, eps, convention):
    total = x + residual
    return rmsnorm(total, w, eps, convention), total


def _rstd(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.to(torch.promote_types(x.dtype, torch.float32)).pow(2).mean(-1) + eps)


def rmsnorm_rstd(x, w, eps, convention):
    return rmsnorm(x, w, eps, convention), _rstd(x, eps)


def add_rmsnorm_rstd(x, residual, w, eps, convention):
    y, total = add_rmsnorm(x, residual, w, eps, convention)
    return y, total, _rstd(total, eps)


def rmsnorm_backward(dy, x, w, dsum, rstd, eps, convention):
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, grad = x.to(wide), dy.to(wide)
    rstd = (_rstd(x, eps) if rstd is None else rstd.to(wide)).unsqueeze(-1)
    normed = rows * rstd
    scaled = grad * (1 + w.to(wide) if convention == "gemma" else w.to(wide))
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    if dsum is not None:
        dx = dx + dsum.to(wide)
    return dx.to(x.dtype), _rows(grad * normed).sum(0).to(w.dtype)


def rmsnorm_frozen_backward(*arguments):
    return rmsnorm_backward(*arguments)[0]


def rmsnorm_quantised(x, residual, w, eps, convention, int8):
    total = x if residual is None else x + residual
    y = _normalised(total, eps) * (1 + w.float() if convention == "gemma" else w.float())
    largest = y.abs().amax(-1)
    scale = torch.where(largest <= 2.0**-100, 1.0, largest / (127 if int8 else 448))
    y = (y / scale.unsqueeze(-1)).nan_to_num(0.0) if int8 else y / scale.unsqueeze(-1)
    q = y.round().to(torch.int8) if int8 else y.to(torch.float8_e4m3fn)
    return q, scale, total.new_empty(0) if residual is None else total


def layernorm(x, w, b, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.layer_norm(x.to(wide), x.shape[-1:], w.to(wide), b.to(wide), eps).to(x.dtype)


def add_layernorm(x, residual, w, b, eps):
    total = x + residual
    return layernorm(total, w, b, eps), total


def layernorm_backward(dy, x, w, dsum, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, grad = x.to(wide), dy.to(wide)
    centred = rows - rows.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    normed, scaled = centred * rstd, grad * w.to(wide)
    dx = rstd * (scaled - scaled.mean(-1, keepdim=True)
                 - normed * (scaled * normed).mean(-1, keepdim=True))
    if dsum is not None:
        dx = dx + dsum.to(wide)
    return dx.to(x.dtype), _rows(grad * normed).sum(0).to(w.dtype), _rows(grad).sum(0).to(w.dtype)


def layernorm_frozen_backward(*arguments):
    return layernorm_backward(*arguments)[0]


def _gate(z: Tensor, gate: str) -> tuple[Tensor, Tensor]:
    """The activation of a gate, and its derivative."""
    s = torch.sigmoid(z)
    return (s, s * (1 - s)) if gate == "sigmoid" else (z * s, s + z * s * (1 - s))


def _groups(t: Tensor, groups: int) -> Tensor:
    return t.unflatten(-1, (groups, t.shape[-1] // groups))


def gated_rmsnorm(x, z, w, eps, order, gate, convention, groups):
    wide = torch.promote_types(x.dtype, torch.float32)
    a, _ = _gate(z.to(wide), gate)
    rows = x.to(wide) * a if order == "before" else x.to(wide)
    normed = _normalised(_groups(rows, groups), eps).flatten(-2)
    if convention == "llama":
        normed = normed.to(x.dtype) * w
    else:
        normed = normed * w.to(wide)
    return (normed if order == "before" else normed.to(wide) * a).to(x.dtype)


def gated_rmsnorm_backward(dy, x, z, w, eps, order, gate, convention, groups):
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, grad, weight = x.to(wide), dy.to(wide), w.to(wide)
    a, slope = _gate(z.to(wide), gate)
    before = order == "before"
    inner = _groups(rows * a if before else rows, groups)
    rstd = torch.rsqrt(inner.pow(2).mean(-1, keepdim=True) + eps)
    normed = inner * rstd
    of_norm = _groups(grad if before else grad * a, groups)
    scaled = of_norm * _groups(weight, groups)
    d_inner = (rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))).flatten(-2)
    dz = (d_inner * rows if before else grad * normed.flatten(-2) * weight) * slope
    dx = d_inner * a if before else d_inner
    return dx.to(x.dtype), dz.to(x.dtype), _rows((of_norm * normed).flatten(-2)).sum(0).to(w.dtype)


def gated_rmsnorm_frozen_backward(*arguments):
    return gated_rmsnorm_backward(*arguments)[:2]

"""linear."""
import torch
import torch.nn.functional as F

from .common import _add, _added, _dequantised, _rows, quantise


def linear(x, w, bias, residual):
    return _added(F.linear(x, w), bias, residual)


def _rounded_tokens(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale <= 2.0**-100, 1.0, scale)
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def _rounded_blocks(x):
    return _dequantised(*quantise(x), 1)


def linear_fp8_token(x, w, w_scale, bias, residual):
    q = _rounded_tokens(x)
    return _added(F.linear(q, w.float() * w_scale[:, None]), bias, residual).to(x.dtype)


def linear_fp8_block(x, w, w_scale, bias, residual):
    q = _rounded_blocks(x)
    return _added(F.linear(q, _dequantised(w, w_scale, 128)), bias, residual).to(x.dtype)


def linear_backward(dy, x, w, bias):
    rows = _rows(dy)
    dbias = rows.sum(0) if bias else rows.new_empty(0)
    return dy @ w, rows.T @ _rows(x), dbias


def linear_backward_into(dy, x, w, dw, dbias):
    dx, *gradients = linear_backward(dy, x, w, dbias is not None)
    _add((dw,) if dbias is None else (dw, dbias), gradients[:1 if dbias is None else 2])
    return dx

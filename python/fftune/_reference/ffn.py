"""ffn and mlp."""
import torch.nn.functional as F

from .common import ACTIVATIONS, _add, _added, _dequantised, _rows, activation_backward, quantise
from .linear import linear_fp8_block, linear_fp8_token
from .norms import rmsnorm


def ffn_preact(x, w_gate, w_up, w_down, bias, residual, act):
    gate, up = F.linear(x, w_gate), F.linear(x, w_up)
    y = F.linear(ACTIVATIONS[act](gate) * up, w_down)
    return _added(y, bias, residual), gate, up


def ffn(x, w_gate, w_up, w_down, bias, residual, act):
    return ffn_preact(x, w_gate, w_up, w_down, bias, residual, act)[0]


def ffn_backward(dy, x, gate, up, w_gate, w_up, w_down, act):
    if gate is None:
        gate, up = F.linear(x, w_gate), F.linear(x, w_up)
    hidden = ACTIVATIONS[act](gate) * up
    d_hidden = dy @ w_down
    d_gate = activation_backward(act, d_hidden * up, gate)
    d_up = d_hidden * ACTIVATIONS[act](gate)
    dx = d_gate @ w_gate + d_up @ w_up
    dy, x, d_gate, d_up, hidden = map(_rows, (dy, x, d_gate, d_up, hidden))
    return dx, d_gate.T @ x, d_up.T @ x, dy.T @ hidden


def ffn_frozen_backward(dy, x, gate, *others):
    # x has no part in dx where gate is given
    return ffn_backward(dy, dy if x is None else x, gate, *others)[0]


def ffn_backward_into(dy, x, gate, up, w_gate, w_up, w_down, d_gate, d_up, d_down, act):
    dx, *gradients = ffn_backward(dy, x, gate, up, w_gate, w_up, w_down, act)
    _add((d_gate, d_up, d_down), gradients)
    return dx


def ffn_block(x, residual, w_norm, w_gate, w_up, w_down, act, convention, eps):
    total = x if residual is None else x + residual
    normed = rmsnorm(total, w_norm, eps, convention)
    return ffn(normed, w_gate, w_up, w_down, None, total, act)


def mlp(x, w_up, w_down, b_up, b_down, residual, act):
    return _added(F.linear(ACTIVATIONS[act](F.linear(x, w_up, b_up)), w_down, b_down), None, residual)


def ffn_fp8(x, w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale, hidden_scale, w_down_scale,
            act):
    x = _dequantised(x, x_scale, 1)
    gate = F.linear(x, _dequantised(w_gate, w_gate_scale, 128))
    up = F.linear(x, _dequantised(w_up, w_up_scale, 128))
    q, scale = quantise(ACTIVATIONS[act](gate) * up, hidden_scale)
    y = F.linear(_dequantised(q, scale, 1), _dequantised(w_down, w_down_scale, 128))
    return y.bfloat16()


def _ffn_fp8_of(product, x, w_gate, w_up, w_down, gate_scale, up_scale, down_scale, bias, residual, act):
    gate, up = (product(x.float(), w, scale, None, None) for w, scale in ((w_gate, gate_scale), (w_up, up_scale)))
    y = product(ACTIVATIONS[act](gate) * up, w_down, down_scale, None, None)
    return _added(y, bias, residual).to(x.dtype)


def ffn_fp8_token(*arguments):
    return _ffn_fp8_of(linear_fp8_token, *arguments)


def ffn_fp8_block(*arguments):
    return _ffn_fp8_of(linear_fp8_block, *arguments)

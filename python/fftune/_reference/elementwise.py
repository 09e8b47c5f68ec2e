"""bias_gelu, act_mul and scale."""
import torch

from .common import ACTIVATIONS, _rows, activation_backward


def bias_gelu(x, bias, act):
    return ACTIVATIONS[act]((x + bias).to(x.dtype))


def bias_gelu_backward(dy, x, bias, act):
    dx = activation_backward(act, dy, (x + bias).to(x.dtype))
    return dx, _rows(dx).sum(0).to(bias.dtype)


def bias_gelu_frozen_backward(*arguments):
    return bias_gelu_backward(*arguments)[0]


def act_mul(gate, up, act):
    return ACTIVATIONS[act](gate) * up


def act_mul_backward(dy, gate, up, act):
    return activation_backward(act, dy * up, gate), dy * ACTIVATIONS[act](gate)


def scale_(x, factor):
    x.mul_(factor)


def act_mul_packed(gate_up, act):
    return act_mul(*gate_up.chunk(2, -1), act)


def act_mul_packed_backward(dy, gate_up, act):
    return torch.cat(act_mul_backward(dy, *gate_up.chunk(2, -1), act), -1)

"""masked_linear and masked_ffn: two experts behind a mask."""
import torch
import torch.nn.functional as F
from torch import Tensor

from .common import _add, _rows
from .ffn import ffn, ffn_backward


def _chosen(mask: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.where(mask.bool().unsqueeze(-1), first, second)


def masked_linear(x, mask, w_true, w_false, pattern):
    return _chosen(mask, F.linear(x, w_true), F.linear(x, w_false))


def masked_linear_backward(dy, x, mask, w_true, w_false, pattern):
    marked = mask.bool().unsqueeze(-1)
    results = []
    for dy_part, w in ((torch.where(marked, dy, 0), w_true), (torch.where(marked, 0, dy), w_false)):
        results.append((dy_part @ w, _rows(dy_part).T @ _rows(x)))
    return results[0][0] + results[1][0], results[0][1], results[1][1]


def masked_linear_frozen_backward(dy, mask, w_true, w_false, pattern):
    x = dy.new_zeros(*dy.shape[:-1], w_true.shape[1])
    return masked_linear_backward(dy, x, mask, w_true, w_false, pattern)[0]


def masked_ffn(x, mask, w_gate_true, w_up_true, w_down_true, w_gate_false, w_up_false, w_down_false,
               act, pattern):
    return _chosen(mask, ffn(x, w_gate_true, w_up_true, w_down_true, None, None, act),
                   ffn(x, w_gate_false, w_up_false, w_down_false, None, None, act))


def masked_ffn_preact(x, mask, *weights_and_options):
    """Here gate and up are those of the tokens in their order; the kernels save them in the mask's."""
    w_gate_true, w_up_true, _, w_gate_false, w_up_false, *_ = weights_and_options
    return (masked_ffn(x, mask, *weights_and_options),
            _chosen(mask, F.linear(x, w_gate_true), F.linear(x, w_gate_false)),
            _chosen(mask, F.linear(x, w_up_true), F.linear(x, w_up_false)))


def masked_ffn_backward(dy, x, mask, gate, up, *weights_and_options):
    *weights, act, _ = weights_and_options
    marked = mask.bool().unsqueeze(-1)
    true = ffn_backward(torch.where(marked, dy, 0), x, gate, up, *weights[:3], act)
    false = ffn_backward(torch.where(marked, 0, dy), x, gate, up, *weights[3:], act)
    return (true[0] + false[0], *true[1:], *false[1:])


def masked_ffn_frozen_backward(dy, x, *others):
    return masked_ffn_backward(dy, dy if x is None else x, *others)[0]


def masked_linear_backward_into(dy, x, mask, w_true, w_false, d_true, d_false, pattern):
    dx, *gradients = masked_linear_backward(dy, x, mask, w_true, w_false, pattern)
    _add((d_true, d_false), gradients)
    return dx


def masked_ffn_backward_into(dy, x, mask, gate, up, *others):
    dx, *gradients = masked_ffn_backward(dy, x, mask, gate, up, *others[6:])
    _add(others[:6], gradients)
    return dx

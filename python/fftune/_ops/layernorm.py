"""layernorm: layer normalisation, with and without a residual."""
from torch import Tensor

from .._custom import OPS, call, gradient
from .._declare import declare

declare("layernorm", "layernorm", "x, w, b, eps", "y", by_row=True)
declare("add_layernorm", "layernorm", "x, residual, w, b, eps", "y, sum", by_row=True)
declare("layernorm_backward", "layernorm", "dy, x, w, dsum?, eps", "dx, dw, db", back=True)


def _save(ctx, inputs, output):
    x, w, _, ctx.eps = inputs
    ctx.save_for_backward(x, w)


@gradient("layernorm", _save)
def _(ctx, dy):
    return *call(OPS.layernorm_backward, dy, *ctx.saved_tensors, None, ctx.eps), None


def _save_sum(ctx, inputs, output):
    _, _, w, _, ctx.eps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], w)


@gradient("add_layernorm", _save_sum)
def _(ctx, dy, dsum):
    if dy is None:
        return dsum, dsum, None, None, None
    dx, dw, db = call(OPS.layernorm_backward, dy, *ctx.saved_tensors, dsum, ctx.eps)
    return dx, dx, dw, db, None


def layernorm(x: Tensor, w: Tensor, b: Tensor, *, eps: float = 1e-5) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * w + b over the last dimension. x [..., d]; w, b [d]. ->
    [..., d]"""
    return call(OPS.layernorm, x, w, b, eps)


def add_layernorm(x: Tensor, residual: Tensor, w: Tensor, b: Tensor, *, eps: float = 1e-5
                  ) -> tuple[Tensor, Tensor]:
    """(layernorm(s), s) of s = x + residual. x, residual [..., d]; w, b [d]. -> two of [..., d]"""
    return call(OPS.add_layernorm, x, residual, w, b, eps)

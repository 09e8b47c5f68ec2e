"""Layer normalisation, with and without a residual."""
import torch
from torch import Tensor

from ._checks import expect, expect_given
from ._custom import OPS, call, define, empty, fake, gradient, yes
from ._run import Form, ready, run


def _values(options, x, residual, w, b, dy=None):
    expect_given("layernorm", eps=options[0], w=w)
    m, d = x.shape[:-1].numel(), x.shape[-1]
    expect("layernorm", "residual", residual, x.shape)
    expect("layernorm", "w", w, (d,))
    expect("layernorm", "b", b, (d,))
    expect("layernorm", "dy", dy, x.shape)
    return (m, d, *options, yes(residual)) if m else None


def _backward_values(options, x, w, dy, dsum):
    return _values(options, x, dsum, w, None, dy)


def _forward_values(options, x, residual, w, b):
    expect_given("layernorm", b=b)
    return _values(options, x, residual, w, b)


_FORWARD = Form("layernorm", False, ("m", "d", "eps", "residual"), _forward_values)
_BACKWARD = Form("layernorm", True, ("m", "d", "eps", "residual"), _backward_values)


@define("layernorm(Tensor x, Tensor w, Tensor b, float eps) -> Tensor", by_row=True)
def _(x, w, b, eps):
    x = ready(x)
    y = torch.empty_like(x)
    run(_FORWARD, (eps,), (x, None, w, b), (y,))
    return y


@define("add_layernorm(Tensor x, Tensor residual, Tensor w, Tensor b, float eps) "
        "-> (Tensor, Tensor)", by_row=True)
def _(x, residual, w, b, eps):
    x = ready(x)
    y, total = torch.empty_like(x), torch.empty_like(x)
    run(_FORWARD, (eps,), (x, residual, w, b), (y, total))
    return y, total


@define("layernorm_backward(Tensor dy, Tensor x, Tensor w, Tensor? dsum, float eps) "
        "-> (Tensor, Tensor, Tensor)")
def _(dy, x, w, dsum, eps):
    x, w = ready(x), ready(w)
    dx, dw, db = torch.empty_like(x), torch.empty_like(w), empty(w, *w.shape)
    run(_BACKWARD, (eps,), (x, w, dy, dsum), (dx, dw, db))
    return dx, dw, db


@fake("layernorm")
def _(x, w, b, eps):
    return x.new_empty(x.shape)


@fake("add_layernorm")
def _(x, residual, w, b, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@fake("layernorm_backward")
def _(dy, x, w, dsum, eps):
    return x.new_empty(x.shape), w.new_empty(w.shape), w.new_empty(w.shape)


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

"""masked_softmax: the softmax of scores that are in memory."""
from torch import Tensor

from .._checks import expect
from .._custom import OPS, call, empty, fake, gradient
from .._declare import define
from .._library import Error
from .._run import Form, run

def _values(options, x, mask):
    causal, scale = options
    b, heads, s, n = x.shape
    kind, mask_heads = "causal" if causal else None, None
    if mask is not None:
        if causal:
            raise Error("masked-softmax: causal and a mask: give a mask that is causal itself")
        if mask.shape[1] not in (1, heads):
            raise Error(f"masked-softmax: the mask is {list(mask.shape)}: give [batch, 1 or "
                        "heads, queries, keys]")
        expect("masked-softmax", "mask", mask, (b, mask.shape[1], s, n))
        kind, mask_heads = "bool", "each" if mask.shape[1] > 1 else None
    return (s, b, heads, n, kind, mask_heads, float(scale)) if x.numel() else None


def _backward_values(options, y, dy):
    expect("masked-softmax", "dy", dy, y.shape, y.dtype)
    b, heads, s, n = y.shape
    causal, scale = options
    return (s, b, heads, n, "causal" if causal else None, float(scale)) if y.numel() else None


_SHAPES = dict.fromkeys(("x", "mask", "y", "dy"), "[batch, heads, queries, keys]")
_SHAPES["mask"] = "[batch, 1 or heads, queries, keys]"


@define("masked_softmax", "masked-softmax", "x, mask:mask?, causal:bool, scale", "Tensor",
        shapes=_SHAPES)
def _(x, mask, causal, scale):
    y = empty(x, *x.shape)
    run(_SOFTMAX, (causal, scale), (x, mask), (y,))
    return y


@define("masked_softmax_backward", "masked-softmax", "dy, y, causal:bool, scale", "Tensor",
        back=True, shapes=_SHAPES)
def _(dy, y, causal, scale):
    dx = empty(y, *y.shape)
    run(_SOFTMAX_BACKWARD, (causal, scale), (y, dy), (dx,))
    return dx


_SOFTMAX = Form("masked-softmax", False, OPS.masked_softmax.kinds,
                ("s", "b", "heads", "n", "mask", "mask-heads", "scale"), _values)
_SOFTMAX_BACKWARD = Form("masked-softmax", True, OPS.masked_softmax_backward.kinds,
                         ("s", "b", "heads", "n", "mask", "scale"), _backward_values)


@fake("masked_softmax")
def _(x, mask, causal, scale):
    return x.new_empty(x.shape)


@fake("masked_softmax_backward")
def _(dy, y, causal, scale):
    return y.new_empty(y.shape)


def _save_softmax(ctx, inputs, output):
    *_, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(output)


@gradient("masked_softmax", _save_softmax)
def _(ctx, dy):
    y, = ctx.saved_tensors
    return call(OPS.masked_softmax_backward, dy, y, ctx.causal, ctx.scale), None, None, None


def masked_softmax(x: Tensor, mask: Tensor | None = None, *, causal: bool = False,
                   scale: float = 1.0) -> Tensor:
    """softmax(scale * x) over the last dimension, of the columns that each row may see.

    `x` [batch, heads, queries, keys]; `mask` [batch, 1 or heads, queries, keys] of bool, or causal:
    the last row stands at the last column. Returns a tensor like x. Masked elements are 0, and so
    is a row without allowed elements.
    """
    return call(OPS.masked_softmax, x, mask, causal, scale)

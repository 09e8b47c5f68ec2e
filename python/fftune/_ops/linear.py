"""linear: a product with a weight."""
from typing import Sequence

import torch
from torch import Tensor

from .._checks import flag, several
from .._custom import OPS, call, gradient, rows
from .._declare import declare
from .packed import PackedWeight, linear_packed

declare("linear", "linear", "x, w, bias?, residual?", "y", casts=True, by_row=True)
for _scales in ("token", "block"):
    declare(f"linear_fp8_{_scales}", "linear", "x, w, w_scale, bias?, residual?", "y",
            fixed={"quantise": _scales, "weights": "dense"}, label="linear_fp8", by_row=True)
declare("linear_backward", "linear", "dy, x, w, bias:bool", "dx, dw, dbias?bias", back=True)
declare("linear_backward_into", "linear", "dy, x, w, dw=dw_before!, dbias=dbias_before?!", "dx",
        back=True)


def _save_linear(ctx, inputs, output):
    x, w, bias, _ = inputs
    ctx.save_for_backward(x, w)
    ctx.has_bias = bias is not None


def gradients_of(dy: Tensor, x: Tensor, w: Tensor, needs: Sequence[bool]) -> tuple:
    """Those of x, w and a bias that are needed, None for the others."""
    dx = dw = dbias = None
    if needs[0] and needs[1] and not torch.is_grad_enabled():
        dx, dw, dbias = call(OPS.linear_backward, dy, x, w, needs[2])
    else:
        if needs[0]:
            dx = dy @ w
        if needs[1]:
            dw = rows(dy).T @ rows(x)
        if needs[2]:
            dbias = rows(dy).sum(0)
    return dx, dw, dbias if needs[2] else None


@gradient("linear", _save_linear, twice=True)
def _(ctx, dy):
    x, w = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return *gradients_of(dy, x, w, needs), dy if needs[3] else None


def linear(x: Tensor, w: Tensor | PackedWeight, bias: Tensor | None = None,
           residual: Tensor | None = None) -> Tensor:
    """``x wᵀ + bias + residual``.

    Args:
        x: Input, [..., k].
        w: Weight, [n, k], dense or a ``PackedWeight`` whose scales have x's element type.
        bias: [n].
        residual: [..., n].

    Returns:
        [..., n]. With a dense weight all inputs have gradients; with a packed weight x, bias and
        residual.
    """
    if isinstance(w, PackedWeight):
        return linear_packed(x, w, bias, residual)
    return call(OPS.linear, x, w, bias, residual)


def linear_fp8(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None,
               residual: Tensor | None = None) -> Tensor:
    """`linear` with a weight of float8_e4m3fn, for which the op quantises the tokens. No gradients.

    A scale of x is the largest magnitude of its elements over 448. The scales of the weight say which
    elements these are: a token's, for a scale of each row of w; or 128 of a token's, for scales of blocks.

    Args:
        x: Input, [..., k].
        w: Weight, [n, k], float8_e4m3fn.
        w_scale: float32, of each row, [n], as compressed-tensors has them; or of each block of
            128 x 128, [⌈n / 128⌉, ⌈k / 128⌉], as DeepSeek-V3 and transformers' FP8Linear.
        bias: [n].
        residual: [..., n].

    Returns:
        [..., n], of x's element type.
    """
    by_row = isinstance(w_scale, Tensor) and w_scale.dim() == 1
    return call(OPS.linear_fp8_token if by_row else OPS.linear_fp8_block, x, w, w_scale, bias, residual)


def linear_backward(dy: Tensor, x: Tensor, w: Tensor, *, bias: bool = False,
                    into: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    """Gradients of `linear`, for autograd functions of your own.

    Args:
        dy: Gradient of the result, [..., n].
        x: Input of the forward pass, [..., k].
        w: Weight, [n, k].
        bias: Whether to compute the gradient of a bias.
        into: (dw,), or (dw, dbias) with `bias`: gradients of earlier passes. The new gradients are added
            to them in place, and these tensors are returned.

    Returns:
        (dx, dw), or (dx, dw, dbias) with `bias`.
    """
    bias = flag("linear", "bias", bias)
    if into is None:
        dx, dw, dbias = call(OPS.linear_backward, dy, x, w, bias)
        return (dx, dw, dbias) if bias else (dx, dw)
    into = several("linear", "into", into, 1 + bias, "dw, and with bias dbias")
    return call(OPS.linear_backward_into, dy, x, w, into[0], into[1] if bias else None), *into

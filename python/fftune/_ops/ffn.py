"""ffn: the feed-forward network, with a gate (ffn) and without (mlp)."""
from typing import Sequence

from torch import Tensor

from .. import reference
from .._checks import flag, several
from .._custom import OPS, call, gradient, rows, save_gates, wants_gradient
from .._declare import FROZEN, declare, run_into
from .._library import Error
from .linear import gradients_of
from .packed import (FORMATS, PackedWeight, autocasts, ffn_packed, format_of, group_word, has_zeros, named_packed,
                     packed_word, parts_of, suffix)
from .rmsnorm import add_rmsnorm, rmsnorm

_WEIGHTS = "w_gate, w_up, w_down"


def expect_both(op: str, gate: Tensor | None, up: Tensor | None) -> None:
    if (gate is None) != (up is None):
        raise Error(f"{op}: gate without up, or up without gate: give both, or neither")


def _expect_gates(gate, up, **_):
    expect_both("ffn", gate, up)


# For frozen weights x is read only to compute gate and up again.
UNREAD = {"x": lambda x, gate: x if gate is None else None}


for _name, _results in (("ffn", "y"), ("ffn_preact", "y, gate, up")):
    declare(_name, "ffn", f"x, {_WEIGHTS}, bias=b_down?, residual?, act", _results, casts=True,
            by_row=True)
declare("ffn_backward", "ffn", f"dy, x, gate?, up?, {_WEIGHTS}, act",
        "dx, dw_gate, dw_up, dw_down", back=True, check=_expect_gates)
declare("ffn_frozen_backward", "ffn", f"dy, x?, gate?, up?, {_WEIGHTS}, act", "dx", back=True,
        fixed=FROZEN, check=_expect_gates, prepare=UNREAD)
declare("ffn_backward_into", "ffn", f"dy, x, gate?, up?, {_WEIGHTS}, d_gate=dw_gate_before!, "
        "d_up=dw_up_before!, d_down=dw_down_before!, act", "dx", back=True, check=_expect_gates)
declare("ffn_fp8", "ffn", f"x, {_WEIGHTS}, x_scale, w_gate_scale, w_up_scale, hidden_scale?, "
        "w_down_scale, act", "y", fixed={"dtype": "fp8"})
for _scales in ("token", "block"):
    declare(f"ffn_fp8_{_scales}", "ffn", f"x, {_WEIGHTS}, w_gate_scale, w_up_scale, w_down_scale, bias=b_down?, "
            "residual?, act", "y", fixed={"quantise": _scales, "weights": "dense"}, label="ffn_fp8", by_row=True)


# The sum that the norm's stage writes is the residual that the last stage reads: it is an input and
# an output, and without a residual x itself.
def _run_block(form, x, residual, *others):
    y, total = x.new_empty(x.shape), x if residual is None else x.new_empty(x.shape)
    run_into(form, (x, residual, *others, total), (y,) if residual is None else (y, total))
    return y


declare("ffn_block", "ffn", f"x, residual=x_residual?, w_norm, {_WEIGHTS}, act, convention, eps, "
        "-total=residual", "y, -sum", kernel=_run_block, by_row=True)


def _save_ffn(ctx, inputs, output):
    x, w_gate, w_up, w_down, bias, residual, ctx.act = inputs
    save_gates(ctx, (x, w_gate, w_up, w_down), output)


@gradient("ffn", _save_ffn)
def _(ctx, dy, *_unused):
    if dy is None:
        return (None,) * 7
    x, w_gate, w_up, w_down, gate, up = ctx.saved_tensors
    needs, arguments = ctx.needs_input_grad, (dy, x, gate, up, w_gate, w_up, w_down, ctx.act)
    grads = (None,) * 4
    if any(needs[1:4]):
        grads = call(OPS.ffn_backward, *arguments)
    elif needs[0]:
        grads = (call(OPS.ffn_frozen_backward, *arguments), None, None, None)
    return (*grads, rows(dy).sum(0) if needs[4] else None, dy if needs[5] else None, None)


gradient("ffn_preact", _save_ffn)(_)


def _save_block(ctx, inputs, output):
    *tensors, ctx.act, ctx.convention, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


@gradient("ffn_block", _save_block)
def _(ctx, dy):
    x, residual, w_norm, *weights = ctx.saved_tensors
    total = x if residual is None else x + residual
    normed = call(OPS.rmsnorm, total, w_norm, ctx.eps, ctx.convention)
    arguments = dy, normed, None, None, *weights, ctx.act
    if any(ctx.needs_input_grad[3:6]):
        d_normed, *d_weights = call(OPS.ffn_backward, *arguments)
    else:
        d_normed, d_weights = call(OPS.ffn_frozen_backward, *arguments), [None] * 3
    arguments = d_normed, total, w_norm, dy, None, ctx.eps, ctx.convention
    dx, d_norm = (call(OPS.rmsnorm_backward, *arguments) if ctx.needs_input_grad[2] else
                  (call(OPS.rmsnorm_frozen_backward, *arguments), None))
    return dx, None if residual is None else dx, d_norm, *d_weights, None, None, None


def ffn(x: Tensor, w_gate: Tensor | PackedWeight, w_up: Tensor | PackedWeight,
        w_down: Tensor | PackedWeight, bias: Tensor | None = None, residual: Tensor | None = None,
        *, act: str = "silu", recompute: bool = False) -> Tensor:
    """Gated MLP: ``(act(x w_gateᵀ) ⊙ (x w_upᵀ)) w_downᵀ + bias + residual``.

    The GLU variants of Shazeer, `GLU Variants Improve Transformer
    <https://arxiv.org/abs/2002.05202>`_; with ``act="silu"`` the MLP of Llama.

    Args:
        x: Input, [..., d].
        w_gate, w_up: Weights of the first products, [h, d]. The three weights may be ``PackedWeight`` of
            one format, with scales of x's element type.
        w_down: Weight of the last product, [d, h].
        bias: [d].
        residual: [..., d].
        act: "silu", "gelu" (with erf), "gelu-tanh", "relu" or "none".
        recompute: Save only the inputs for the backward pass, and compute both first products again
            there. By default these products, [..., h] each, are saved too.

    Returns:
        [..., d]. With dense weights all inputs have gradients; with packed weights x, bias and residual.
    """
    if any(isinstance(w, PackedWeight) for w in (w_gate, w_up, w_down)):
        return ffn_packed(x, w_gate, w_up, w_down, bias, residual, act)
    if wants_gradient(x, w_gate, w_up, w_down) and not flag("ffn", "recompute", recompute):
        return call(OPS.ffn_preact, x, w_gate, w_up, w_down, bias, residual, act)[0]
    return call(OPS.ffn, x, w_gate, w_up, w_down, bias, residual, act)


def ffn_backward(dy: Tensor, x: Tensor, gate: Tensor | None, up: Tensor | None, w_gate: Tensor,
                 w_up: Tensor, w_down: Tensor, *, act: str = "silu",
                 into: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `ffn` without bias and residual, for autograd functions of your own.

    Args:
        dy: Gradient of the result, [..., d].
        x: Input of the forward pass, [..., d].
        gate, up: The products before the activation, ``x w_gateᵀ`` and ``x w_upᵀ``, [..., h]; None to
            compute them again.
        w_gate, w_up: [h, d].
        w_down: [d, h].
        act: As in `ffn`.
        into: Three tensors with the shapes of the weights. The gradients of the weights are added to
            them in place, as gradient accumulation needs, and these tensors are returned.

    Returns:
        (dx, dw_gate, dw_up, dw_down).
    """
    if into is None:
        return call(OPS.ffn_backward, dy, x, gate, up, w_gate, w_up, w_down, act)
    into = several("ffn", "into", into, 3, "tensors like the three weights")
    return call(OPS.ffn_backward_into, dy, x, gate, up, w_gate, w_up, w_down, *into, act), *into


def ffn_block(x: Tensor, residual: Tensor | None, w_norm: Tensor, w_gate: Tensor, w_up: Tensor,
              w_down: Tensor, *, act: str = "silu", convention: str = "llama", eps: float = 1e-6,
              recompute: bool = False) -> Tensor:
    """MLP block of a pre-norm layer: ``s + ffn(rmsnorm(s))`` with ``s = x + residual``.

    Without gradients one plan runs all of it. With gradients it runs `add_rmsnorm` and `ffn`, or with
    `recompute` the one plan.

    Args:
        x: Input, [..., d].
        residual: [..., d], or None for ``s = x``.
        w_norm: Weight of the norm, [d].
        w_gate, w_up: [h, d].
        w_down: [d, h].
        act: As in `ffn`.
        convention, eps: As in `rmsnorm`.
        recompute: Save only the inputs for the backward pass.

    Returns:
        [..., d].
    """
    if (wants_gradient(x, residual, w_norm, w_gate, w_up, w_down)
            and not flag("ffn", "recompute", recompute)):
        if residual is None:
            normed = rmsnorm(x, w_norm, eps=eps, convention=convention)
        else:
            normed, x = add_rmsnorm(x, residual, w_norm, eps=eps, convention=convention)
        return ffn(normed, w_gate, w_up, w_down, residual=x, act=act, recompute=recompute)
    return call(OPS.ffn_block, x, residual, w_norm, w_gate, w_up, w_down, act,
                 convention, eps)


def ffn_fp8(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, x_scale: Tensor | None,
            w_gate_scale: Tensor, w_up_scale: Tensor, w_down_scale: Tensor,
            hidden_scale: Tensor | None = None, *, bias: Tensor | None = None,
            residual: Tensor | None = None, act: str = "silu") -> Tensor:
    """`ffn` in float8_e4m3fn, without gradients.

    Scales are float32 and of one of these kinds:

    * per tensor, if `hidden_scale` is given: every scale is [1];

    * per block: x_scale [..., ⌈d / 128⌉] has one scale per 128 elements of a row of x, and a weight's
      scale [⌈rows / 128⌉, ⌈columns / 128⌉] one per 128 × 128 elements. The scales of the activation
      between the products are computed;

    * without `x_scale` the op quantises the tokens of x too, as `linear_fp8` does: by blocks, or by token
      where a weight's scale is one for each row, [rows].

    Args:
        x: [..., d], float8_e4m3fn; without `x_scale` of another type.
        w_gate, w_up: [h, d], float8_e4m3fn.
        w_down: [d, h], float8_e4m3fn.
        x_scale, w_gate_scale, w_up_scale, w_down_scale: Scales; value = element × scale.
        hidden_scale: Scale of the activation between the products, [1].
        bias: [d], only without `x_scale`.
        residual: [..., d], only without `x_scale`.
        act: As in `ffn`.

    Returns:
        [..., d], bfloat16; without `x_scale` of x's element type.

    See also:
        ``fftune.reference.quantise`` and ``quantise_weight``, which quantise tensors, and
        ``fftune.nn.GatedMLP.to_fp8``, which quantises a module.
    """
    if x_scale is None:
        if hidden_scale is not None:
            raise Error("ffn_fp8: hidden_scale without x_scale: the op that quantises tokens computes both")
        by_row = isinstance(w_gate_scale, Tensor) and w_gate_scale.dim() == 1
        return call(OPS.ffn_fp8_token if by_row else OPS.ffn_fp8_block, x, w_gate, w_up, w_down, w_gate_scale,
                    w_up_scale, w_down_scale, bias, residual, act)
    if bias is not None or residual is not None:
        raise Error("ffn_fp8: bias or residual beside x_scale: the op has them where it quantises the tokens")
    return call(OPS.ffn_fp8, x, w_gate, w_up, w_down, x_scale, w_gate_scale,
                w_up_scale, hidden_scale, w_down_scale, act)


# mlp: ffn without a gate

def _expect_biases(b_up, b_down, **_):
    if b_up is not None and b_down is None:
        raise Error("mlp: b_up without b_down: give zeros as b_down")


declare("mlp", "ffn", "x, w_up, w_down, b_up?, b_down?, residual?, act", "y", label="mlp",
        fixed={"gate": "no"}, check=_expect_biases, casts=True, by_row=True)


for _format in FORMATS:
    _zeros = "up_zero=w_up_zero?, down_zero=w_down_zero?, " if has_zeros(_format) else ""
    declare(f"mlp_packed{suffix(_format)}", "ffn", "x, w_up, w_down, up_scale=w_up_scale, "
            f"down_scale=w_down_scale, {_zeros}b_up?, b_down?, residual?, h, group, act", "y", label="mlp",
            fixed={"gate": "no", "weights": _format}, check=_expect_biases, by_row=True,
            **autocasts(_format, "up_scale", "down_scale"))


def _save_mlp(ctx, inputs, output):
    *tensors, _, ctx.act = inputs
    ctx.save_for_backward(*tensors)


@gradient("mlp", _save_mlp)
def _(ctx, dy):
    x, w_up, w_down, b_up, b_down = ctx.saved_tensors
    x_needs, up_needs, down_needs, b_up_needs, b_down_needs, residual_needs, _ = ctx.needs_input_grad
    before = x_needs or up_needs or b_up_needs
    dx = dw_up = db_up = hidden = activated = None
    if before or down_needs:
        hidden = call(OPS.linear, x, w_up, b_up, None)
    if down_needs:
        activated = reference.ACTIVATIONS[ctx.act](hidden)
    d_hidden, dw_down, db_down = gradients_of(dy, activated, w_down, (before, down_needs, b_down_needs))
    if before:
        d_up = reference.activation_backward(ctx.act, d_hidden, hidden)
        dx, dw_up, db_up = gradients_of(d_up, x, w_up, (x_needs, up_needs, b_up_needs))
    return dx, dw_up, dw_down, db_up, db_down, dy if residual_needs else None, None


def mlp(x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor | None = None,
        b_down: Tensor | None = None, residual: Tensor | None = None, *, act: str = "gelu"
        ) -> Tensor:
    """MLP without a gate: ``act(x w_upᵀ + b_up) w_downᵀ + b_down + residual``.

    The backward pass saves only the inputs.

    Args:
        x: Input, [..., d].
        w_up: [h, d].
        w_down: [d, h]. Both weights may be ``PackedWeight``, which have no gradients.
        b_up: [h].
        b_down: [d].
        residual: [..., d].
        act: "silu", "gelu" (with erf), "gelu-tanh", "relu" or "none".

    Returns:
        [..., d].
    """
    if not isinstance(w_up, PackedWeight) and not isinstance(w_down, PackedWeight):
        return call(OPS.mlp, x, w_up, w_down, b_up, b_down, residual, act)
    named_packed("mlp", "w_up", w_up, "two packed weights")
    named_packed("mlp", "w_down", w_down, "two packed weights")
    if format_of(w_up) != format_of(w_down) or (w_up.n, w_up.k) != (w_down.k, w_down.n):
        raise Error(f"mlp: w_up is {packed_word('mlp', w_up)} [{w_up.n}, {w_up.k}], w_down "
                    f"{packed_word('mlp', w_down)} [{w_down.n}, {w_down.k}]: give [h, d] and [d, h] of one format")
    if wants_gradient(x, b_up, b_down, residual):
        raise Error("mlp: packed weights have no gradients: use torch.no_grad()")
    return call(getattr(OPS, f"mlp_packed{suffix(w_up.format)}"), x, *parts_of(w_up, w_down), b_up, b_down,
                residual, w_up.n, group_word("mlp", w_up.group, w_up.format), act)

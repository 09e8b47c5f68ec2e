"""fftune's ops as functions of tensors.

Each is backed by custom ops (torch.ops.fftune.*) with fake kernels, gradients and autocast rules, so
that torch.compile(fullgraph=True) keeps them whole and CUDA graphs capture them. Activations are
[..., features] with any leading dimensions, weights [out_features, in_features]. Inputs that are
not contiguous are copied, but for those of `rope`, whose strides the kernels take.

Element types: bfloat16, float16 and float32 on a GPU; float32 and bfloat16 on the CPU. All tensors
of a call have one type, but where a function says otherwise. Errors are fftune.Error.
"""
from typing import Sequence

import torch
from torch import Tensor

from . import reference
from ._attention_ops import attention, masked_softmax, pack_mask
from ._checks import expect, expect_given, flag, float32, int32, named, several
from ._custom import OPS, call, define, empty, fake, gradient, rows, save_gates, wants_gradient, yes
from ._layer_ops import layer
from ._layernorm_ops import add_layernorm, layernorm
from ._library import Error
from ._moe_ops import moe_ffn, moe_ffn_backward, moe_ffn_fp8, moe_route
from ._qkv_ops import qkv
from ._run import Form, ready, run

__all__ = ["ffn", "ffn_backward", "ffn_block", "ffn_fp8", "mlp", "linear", "linear_backward",
           "masked_ffn", "masked_ffn_backward", "masked_linear", "masked_linear_backward",
           "rmsnorm", "add_rmsnorm", "rmsnorm_quantised", "bias_gelu", "act_mul", "rope", "ngram_block",
           "attention", "masked_softmax", "pack_mask", "moe_ffn", "moe_ffn_backward", "moe_route",
           "moe_ffn_fp8", "qkv", "layernorm", "add_layernorm", "layer"]

def _expect_into(op: str, weights: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for weight, tensor in zip(weights, into):
        expect(op, "a gradient to add to", tensor, weight.shape)


def _run_into(form: Form, options: tuple, x: Tensor, inputs: Sequence[Tensor | None],
              into: Sequence[Tensor]) -> Tensor:
    """Adds to the gradients `into`, where they are. -> dx"""
    for tensor in into:
        if not tensor.is_contiguous() or tensor.is_cuda and tensor.data_ptr() & 15:
            raise Error(f"{form.op}: a gradient to add to is not contiguous, or not at an address "
                        "of 16 bytes")
    dx = empty(x, *x.shape)
    if dx.numel():
        run(form, options, (*inputs, *into), (dx, *into))
    return dx


def _expect_both(op: str, gate: Tensor | None, up: Tensor | None) -> None:
    if (gate is None) != (up is None):
        raise Error(f"{op}: gate without up, or up without gate: give both, or neither")


def _or_empty(pattern: str | None) -> str:
    return "" if pattern is None else pattern


def _yes_if(into: Sequence) -> str | None:
    return "yes" if into else None


# ffn

def _expect_ffn(x, w_gate, w_up, w_down) -> tuple[int, int, int]:
    """The tokens, d and h of tensors that fit together."""
    d, h = x.shape[-1], w_gate.shape[0]
    expect("ffn", "w_gate", w_gate, (h, d))
    expect("ffn", "w_up", w_up, (h, d))
    expect("ffn", "w_down", w_down, (d, h))
    return x.shape[:-1].numel(), d, h


def _ffn_values(options, x, w_gate, w_up, w_down, bias, residual):
    m, d, h = _expect_ffn(x, w_gate, w_up, w_down)
    expect_given("ffn", act=options[0])
    expect("ffn", "bias", bias, (d,))
    expect("ffn", "residual", residual, x.shape)
    return (m, d, h, *options, None if bias is None else "down", yes(residual)) if m else None


def _ffn_backward_values(options, dy, x, gate, up, w_gate, w_up, w_down, *into):
    m, d, h = _expect_ffn(x, w_gate, w_up, w_down)
    _expect_into("ffn", (w_gate, w_up, w_down), into)
    expect_given("ffn", act=options[0])
    expect("ffn", "dy", dy, x.shape)
    _expect_both("ffn", gate, up)
    for name, tensor in (("gate", gate), ("up", up)):
        expect("ffn", name, tensor, (*x.shape[:-1], h))
    save = "input" if gate is None else "preact"
    return (m, d, h, *options, save, _yes_if(into)) if m else None


def _ffn_block_values(options, x, w_gate, w_up, w_down, total, residual, w_norm):
    m, d, h = _expect_ffn(x, w_gate, w_up, w_down)
    expect("ffn", "residual", residual, x.shape)
    expect_given("ffn", act=options[0], convention=options[1], eps=options[2])
    expect("ffn", "w_norm", w_norm, (d,))
    return (m, d, h, *options, "rms" if residual is None else "add-rms") if m else None


def _ffn_fp8_values(options, x, w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale,
                    hidden_scale, w_down_scale):
    scales = x_scale, w_gate_scale, w_up_scale, hidden_scale, w_down_scale
    m, d, h = _expect_ffn(x, w_gate, w_up, w_down)
    expect_given("ffn", act=options[0])
    blocks = lambda extent: -(-extent // 128)
    by_block = scales[3] is None
    shapes = ((*x.shape[:-1], blocks(d)), (blocks(h), blocks(d)), (blocks(h), blocks(d)), (),
              (blocks(d), blocks(h))) if by_block else ((1,),) * 5
    for name, scale, shape in zip(("x", "w_gate", "w_up", "hidden", "w_down"), scales, shapes):
        expect("ffn", f"{name}_scale", scale, shape)
    return (m, d, h, *options, "block" if by_block else None) if m else None


_FFN = Form("ffn", False, ("m", "d", "h", "act", "save", "bias", "residual"), _ffn_values)
_FFN_BACKWARD = Form("ffn", True, ("m", "d", "h", "act", "save", "accumulate"),
                     _ffn_backward_values)
_FFN_BLOCK = Form("ffn", False, ("m", "d", "h", "act", "convention", "eps", "norm"),
                  _ffn_block_values, {"residual": "yes"})
_FFN_FP8 = Form("ffn", False, ("m", "d", "h", "act", "scales"), _ffn_fp8_values, home="ffn-fp8")
_FFN_ARGUMENTS = ("(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor? bias, "
                  "Tensor? residual, str act)")


@define("ffn" + _FFN_ARGUMENTS + " -> Tensor", casts=True, by_row=True)
def _(x, w_gate, w_up, w_down, bias, residual, act):
    x = ready(x)
    y = torch.empty_like(x)
    run(_FFN, (act, None), (x, w_gate, w_up, w_down, bias, residual), (y,))
    return y


@define("ffn_preact" + _FFN_ARGUMENTS + " -> (Tensor, Tensor, Tensor)", casts=True, by_row=True)
def _(x, w_gate, w_up, w_down, bias, residual, act):
    x = ready(x)
    y, gate = torch.empty_like(x), empty(x, *x.shape[:-1], w_gate.shape[0])
    up = torch.empty_like(gate)
    run(_FFN, (act, "preact"), (x, w_gate, w_up, w_down, bias, residual), (y, gate, up))
    return y, gate, up


@define("ffn_backward(Tensor dy, Tensor x, Tensor? gate, Tensor? up, Tensor w_gate, Tensor w_up, "
         "Tensor w_down, str act) -> (Tensor, Tensor, Tensor, Tensor)")
def _(dy, x, gate, up, w_gate, w_up, w_down, act):
    x, *weights = map(ready, (x, w_gate, w_up, w_down))
    results = tuple(map(torch.empty_like, (x, *weights)))
    run(_FFN_BACKWARD, (act,), (dy, x, gate, up, *weights), results)
    return results


@define("ffn_backward_into(Tensor dy, Tensor x, Tensor? gate, Tensor? up, Tensor w_gate, "
         "Tensor w_up, Tensor w_down, Tensor(a!) d_gate, Tensor(b!) d_up, Tensor(c!) d_down, "
         "str act) -> Tensor")
def _(dy, x, gate, up, w_gate, w_up, w_down, d_gate, d_up, d_down, act):
    return _run_into(_FFN_BACKWARD, (act,), x, (dy, x, gate, up, w_gate, w_up, w_down),
                     (d_gate, d_up, d_down))


@define("ffn_block(Tensor x, Tensor? residual, Tensor w_norm, Tensor w_gate, Tensor w_up, "
         "Tensor w_down, str act, str convention, float eps) -> Tensor", by_row=True)
def _(x, residual, w_norm, w_gate, w_up, w_down, act, convention, eps):
    x = ready(x)
    y = torch.empty_like(x)
    if residual is None:
        run(_FFN_BLOCK, (act, convention, eps), (x, w_gate, w_up, w_down, x, None, w_norm), (y,))
    else:
        # The sum that the norm's stage writes is the residual that the last stage reads.
        total = torch.empty_like(x)
        run(_FFN_BLOCK, (act, convention, eps),
            (x, w_gate, w_up, w_down, total, residual, w_norm), (y, total))
    return y


@define("ffn_fp8(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor x_scale, "
         "Tensor w_gate_scale, Tensor w_up_scale, Tensor? hidden_scale, Tensor w_down_scale, "
         "str act) -> Tensor")
def _(x, w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale, hidden_scale, w_down_scale, act):
    x = ready(x)
    y = torch.empty_like(x, dtype=torch.bfloat16)
    run(_FFN_FP8, (act,), (x, w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale,
                           hidden_scale, w_down_scale), (y,))
    return y


@fake("ffn")
def _(x, w_gate, w_up, w_down, bias, residual, act):
    return x.new_empty(x.shape)


@fake("ffn_preact")
def _(x, w_gate, w_up, w_down, bias, residual, act):
    hidden = (*x.shape[:-1], w_gate.shape[0])
    return x.new_empty(x.shape), x.new_empty(hidden), x.new_empty(hidden)


@fake("ffn_backward")
def _(dy, x, gate, up, w_gate, w_up, w_down, act):
    return tuple(x.new_empty(t.shape) for t in (x, w_gate, w_up, w_down))


@fake("ffn_block")
def _(x, residual, w_norm, w_gate, w_up, w_down, act, convention, eps):
    return x.new_empty(x.shape)


@fake("ffn_fp8")
def _(x, w_gate, *others):
    return x.new_empty(x.shape, dtype=torch.bfloat16)


def _save_ffn(ctx, inputs, output):
    x, w_gate, w_up, w_down, bias, residual, ctx.act = inputs
    save_gates(ctx, (x, w_gate, w_up, w_down), output)


def _input_gradient(dy, x, gate, up, w_gate, w_up, w_down, act):
    """dx alone, for weights that are frozen."""
    if gate is None:
        gate, up = x @ w_gate.T, x @ w_up.T
    d_gate, d_up = call(OPS.act_mul_backward, dy @ w_down, gate, up, act)
    return d_gate @ w_gate + d_up @ w_up


@gradient("ffn", _save_ffn)
def _(ctx, dy, *_unused):
    if dy is None:
        return (None,) * 7
    x, w_gate, w_up, w_down, gate, up = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if any(needs[1:4]) or ctx.act == "none":
        grads = call(OPS.ffn_backward, dy, x, gate, up, w_gate, w_up, w_down,
                     ctx.act)
    elif needs[0]:
        grads = (_input_gradient(dy, x, gate, up, w_gate, w_up, w_down, ctx.act), None, None, None)
    else:
        grads = (None,) * 4
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
    d_normed, *d_weights = call(OPS.ffn_backward, dy, normed, None, None, *weights,
                                ctx.act)
    dx, d_norm = call(OPS.rmsnorm_backward, d_normed, total, w_norm, dy, None,
                      ctx.eps, ctx.convention)
    return dx, None if residual is None else dx, d_norm, *d_weights, None, None, None


def ffn(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, bias: Tensor | None = None,
        residual: Tensor | None = None, *, act: str = "silu", recompute: bool = False) -> Tensor:
    """(act(x w_gateᵀ) ⊙ (x w_upᵀ)) w_downᵀ (+ bias) (+ residual).

    x [..., d]; w_gate, w_up [h, d]; w_down [d, h]; bias [d]; residual [..., d]. -> [..., d].
    act: silu, gelu, gelu-tanh, relu or none. For the backward pass x and, unless `recompute`, the
    two products before the activation, [..., h] each, are kept.
    """
    if wants_gradient(x, w_gate, w_up, w_down) and not flag("ffn", "recompute", recompute):
        return call(OPS.ffn_preact, x, w_gate, w_up, w_down, bias, residual, act)[0]
    return call(OPS.ffn, x, w_gate, w_up, w_down, bias, residual, act)


def ffn_backward(dy: Tensor, x: Tensor, gate: Tensor | None, up: Tensor | None, w_gate: Tensor,
                 w_up: Tensor, w_down: Tensor, *, act: str = "silu",
                 into: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, dw_gate, dw_up, dw_down) of `ffn`. dy, x [..., d]; gate, up [..., h]: the products
    before the activation, or None to compute them again.

    With `into`, three tensors like the weights, the gradients of the weights are added to those in
    place, and given as those: what gradient accumulation over several batches needs.
    """
    if into is None:
        return call(OPS.ffn_backward, dy, x, gate, up, w_gate, w_up, w_down, act)
    into = several("ffn", "into", into, 3, "tensors like the three weights")
    return call(OPS.ffn_backward_into, dy, x, gate, up, w_gate, w_up, w_down, *into, act), *into


def ffn_block(x: Tensor, residual: Tensor | None, w_norm: Tensor, w_gate: Tensor, w_up: Tensor,
              w_down: Tensor, *, act: str = "silu", convention: str = "llama", eps: float = 1e-6,
              recompute: bool = False) -> Tensor:
    """The MLP block of a pre-norm layer: s + ffn(rmsnorm(s)), where s = x (+ residual).

    x, residual [..., d]; w_norm [d]; weights as for `ffn`. -> [..., d]. For inference one plan runs
    all of it. With gradients it is `add_rmsnorm` and `ffn`, or with `recompute` the one plan, which
    saves only its inputs.
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


def ffn_fp8(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, x_scale: Tensor,
            w_gate_scale: Tensor, w_up_scale: Tensor, w_down_scale: Tensor,
            hidden_scale: Tensor | None = None, *, act: str = "silu") -> Tensor:
    """`ffn` of float8_e4m3fn elements with float32 scales -> bfloat16 [..., d]. No gradients.

    With `hidden_scale` [1], which is the scale of the product in the middle, all scales are [1].
    Without, one is for 128 elements of a row of x, [..., ⌈d/128⌉], or 128 x 128 of a weight,
    [⌈rows/128⌉, ⌈columns/128⌉], and those of the middle are found. fftune.reference.quantise and
    quantise_weight make such tensors; fftune.nn.GatedMLP.to_fp8 does it all.
    """
    return call(OPS.ffn_fp8, x, w_gate, w_up, w_down, x_scale, w_gate_scale,
                 w_up_scale, hidden_scale, w_down_scale, act)


# mlp: ffn without a gate

def _mlp_values(options, x, w_up, w_down, b_up, b_down, residual):
    expect_given("mlp", act=options[0])
    d, h = x.shape[-1], w_up.shape[0]
    expect("mlp", "w_up", w_up, (h, d))
    expect("mlp", "w_down", w_down, (d, h))
    expect("mlp", "b_up", b_up, (h,))
    expect("mlp", "b_down", b_down, (d,))
    expect("mlp", "residual", residual, x.shape)
    if b_up is not None and b_down is None:
        raise Error("mlp: b_up without b_down: give zeros as b_down")
    m = x.shape[:-1].numel()
    bias = "both" if b_up is not None else "down" if b_down is not None else None
    return (m, d, h, *options, bias, yes(residual)) if m else None


_MLP = Form("ffn", False, ("m", "d", "h", "act", "bias", "residual"), _mlp_values, {"gate": "no"},
            home="mlp")


@define("mlp(Tensor x, Tensor w_up, Tensor w_down, Tensor? b_up, Tensor? b_down, Tensor? residual, "
        "str act) -> Tensor", casts=True, by_row=True)
def _(x, w_up, w_down, b_up, b_down, residual, act):
    x = ready(x)
    y = torch.empty_like(x)
    run(_MLP, (act,), (x, w_up, w_down, b_up, b_down, residual), (y,))
    return y


@fake("mlp")
def _(x, *others):
    return x.new_empty(x.shape)


def _save_mlp(ctx, inputs, output):
    *tensors, _, ctx.act = inputs
    ctx.save_for_backward(*tensors)


@gradient("mlp", _save_mlp)
def _(ctx, dy):
    x, w_up, w_down, b_up, b_down = ctx.saved_tensors
    hidden = call(OPS.linear, x, w_up, b_up, None)
    back = OPS.linear_backward
    d_hidden, dw_down, db_down = call(back, dy, reference.ACTIVATIONS[ctx.act](hidden), w_down,
                                      b_down is not None)
    d_up = reference.activation_backward(ctx.act, d_hidden, hidden)
    dx, dw_up, db_up = call(back, d_up, x, w_up, b_up is not None)
    return (dx, dw_up, dw_down, None if b_up is None else db_up, None if b_down is None else db_down,
            dy if ctx.needs_input_grad[5] else None, None)


def mlp(x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor | None = None,
        b_down: Tensor | None = None, residual: Tensor | None = None, *, act: str = "gelu"
        ) -> Tensor:
    """act(x w_upᵀ (+ b_up)) w_downᵀ (+ b_down) (+ residual): the network without a gate.

    x [..., d]; w_up [h, d]; w_down [d, h]; b_up [h]; b_down [d]; residual [..., d]. -> [..., d].
    act: silu, gelu, gelu-tanh, relu or none. For the backward pass the inputs alone are kept.
    """
    return call(OPS.mlp, x, w_up, w_down, b_up, b_down, residual, act)


# linear

def _linear_values(options, x, w, bias, residual):
    n, k = w.shape
    expect("linear", "x", x, (*x.shape[:-1], k))
    expect("linear", "bias", bias, (n,))
    expect("linear", "residual", residual, (*x.shape[:-1], n))
    m = x.shape[:-1].numel()
    return (m, k, n, yes(bias), yes(residual)) if m else None


def _linear_backward_values(options, dy, x, w, *into):
    n, k = w.shape
    _expect_into("linear", (w, w[:, 0]), into)
    expect("linear", "x", x, (*x.shape[:-1], k))
    expect("linear", "dy", dy, (*x.shape[:-1], n))
    m = x.shape[:-1].numel()
    return (m, k, n, *options, _yes_if(into)) if m else None


_LINEAR = Form("linear", False, ("m", "k", "n", "bias", "residual"), _linear_values)
_LINEAR_BACKWARD = Form("linear", True, ("m", "k", "n", "bias", "accumulate"),
                        _linear_backward_values)


@define("linear(Tensor x, Tensor w, Tensor? bias, Tensor? residual) -> Tensor", casts=True,
        by_row=True)
def _(x, w, bias, residual):
    y = empty(x, *x.shape[:-1], w.shape[0])
    run(_LINEAR, (), (x, w, bias, residual), (y,))
    return y


@define("linear_backward(Tensor dy, Tensor x, Tensor w, bool bias) -> (Tensor, Tensor, Tensor)")
def _(dy, x, w, bias):
    x, w = ready(x), ready(w)
    dx, dw, dbias = torch.empty_like(x), torch.empty_like(w), empty(w, w.shape[0] if bias else 0)
    run(_LINEAR_BACKWARD, ("yes" if bias else None,), (dy, x, w),
        (dx, dw, dbias) if bias else (dx, dw))
    return dx, dw, dbias


@define("linear_backward_into(Tensor dy, Tensor x, Tensor w, Tensor(a!) dw, Tensor(b!)? dbias) "
         "-> Tensor")
def _(dy, x, w, dw, dbias):
    return _run_into(_LINEAR_BACKWARD, (yes(dbias),), x, (dy, x, w),
                     (dw,) if dbias is None else (dw, dbias))


@fake("linear")
def _(x, w, bias, residual):
    return x.new_empty(*x.shape[:-1], w.shape[0])


@fake("linear_backward")
def _(dy, x, w, bias):
    return x.new_empty(x.shape), w.new_empty(w.shape), w.new_empty(w.shape[0] if bias else 0)


def _save_linear(ctx, inputs, output):
    x, w, bias, _ = inputs
    ctx.save_for_backward(x, w)
    ctx.has_bias = bias is not None


@gradient("linear", _save_linear, twice=True)
def _(ctx, dy):
    x, w = ctx.saved_tensors
    needs = ctx.needs_input_grad
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
    return dx, dw, dbias if needs[2] else None, dy if needs[3] else None


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None,
           residual: Tensor | None = None) -> Tensor:
    """x wᵀ (+ bias) (+ residual). x [..., k]; w [n, k]; bias [n]; residual [..., n]. -> [..., n]"""
    return call(OPS.linear, x, w, bias, residual)


def linear_backward(dy: Tensor, x: Tensor, w: Tensor, *, bias: bool = False,
                    into: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    """(dx, dw) of `linear`, or (dx, dw, dbias) with `bias`. dy [..., n]; x [..., k]; w [n, k].

    With `into`, (dw,) or (dw, dbias) of former passes, the gradients of w and bias are added to
    those in place, and given as those.
    """
    bias = flag("linear", "bias", bias)
    if into is None:
        dx, dw, dbias = call(OPS.linear_backward, dy, x, w, bias)
        return (dx, dw, dbias) if bias else (dx, dw)
    into = several("linear", "into", into, 1 + bias, "dw, and with bias dbias")
    return call(OPS.linear_backward_into, dy, x, w, into[0], into[1] if bias else None), *into


# two experts behind a mask

def _expect_mask(op, mask, x):
    expect(op, "mask", mask, x.shape[:-1])


def _masked_linear_values(options, x, mask, w_true, w_false, dy=None):
    n, k = w_true.shape
    expect("masked-linear", "x", x, (*x.shape[:-1], k))
    expect("masked-linear", "w_false", w_false, (n, k))
    expect("masked-linear", "dy", dy, (*x.shape[:-1], n))
    _expect_mask("masked-linear", mask, x)
    m = x.shape[:-1].numel()
    return (m, k, n, *options) if m else None


def _masked_linear_backward_values(options, dy, x, mask, w_true, w_false, *into):
    _expect_into("masked-linear", (w_true, w_false), into)
    return _masked_linear_values((*options, _yes_if(into)), x, mask, w_true, w_false, dy)


def _masked_ffn_values(options, x, mask, *own):
    weights = own[:6]
    expect_given("masked-ffn", act=options[0])
    m, d, h = _expect_ffn(x, *weights[:3])
    expect("masked-ffn", "w_gate_false", weights[3], (h, d))
    _expect_ffn(x, *weights[3:])
    _expect_mask("masked-ffn", mask, x)
    return (m, d, h, *options) if m else None


def _masked_ffn_backward_values(options, dy, x, mask, gate, up, *own):
    weights, into = own[:6], own[6:]
    _expect_into("masked-ffn", weights, into)
    expect("masked-ffn", "dy", dy, x.shape)
    _expect_both("masked-ffn", gate, up)
    for name, tensor in (("gate", gate), ("up", up)):
        expect("masked-ffn", name, tensor, (*x.shape[:-1], weights[0].shape[0]))
    save = "input" if gate is None else "preact"
    return _masked_ffn_values((*options, save, _yes_if(into)), x, mask, *weights)


_MASKED_LINEAR = Form("masked-linear", False, ("m", "k", "n", "mask"), _masked_linear_values)
_MASKED_LINEAR_BACKWARD = Form("masked-linear", True, ("m", "k", "n", "mask", "accumulate"),
                               _masked_linear_backward_values)
_MASKED_FFN = Form("masked-ffn", False, ("m", "d", "h", "act", "mask", "save"), _masked_ffn_values)
_MASKED_FFN_BACKWARD = Form("masked-ffn", True,
                            ("m", "d", "h", "act", "mask", "save", "accumulate"),
                            _masked_ffn_backward_values)
_MASKED_WEIGHTS = ("Tensor w_gate_true, Tensor w_up_true, Tensor w_down_true, "
                   "Tensor w_gate_false, Tensor w_up_false, Tensor w_down_false, str act, "
                   "str pattern")


@define("masked_linear(Tensor x, Tensor mask, Tensor w_true, Tensor w_false, str pattern) "
         "-> Tensor", casts=True, by_row=True)
def _(x, mask, w_true, w_false, pattern):
    y = empty(x, *x.shape[:-1], w_true.shape[0])
    run(_MASKED_LINEAR, (pattern or None,), (x, mask, w_true, w_false), (y,))
    return y


@define("masked_linear_backward(Tensor dy, Tensor x, Tensor mask, Tensor w_true, Tensor w_false, "
         "str pattern) -> (Tensor, Tensor, Tensor)")
def _(dy, x, mask, w_true, w_false, pattern):
    x, w_true, w_false = map(ready, (x, w_true, w_false))
    results = tuple(map(torch.empty_like, (x, w_true, w_false)))
    run(_MASKED_LINEAR_BACKWARD, (pattern or None,), (dy, x, mask, w_true, w_false), results)
    return results


@define("masked_linear_backward_into(Tensor dy, Tensor x, Tensor mask, Tensor w_true, "
         "Tensor w_false, Tensor(a!) d_true, Tensor(b!) d_false, str pattern) -> Tensor")
def _(dy, x, mask, w_true, w_false, d_true, d_false, pattern):
    return _run_into(_MASKED_LINEAR_BACKWARD, (pattern or None,), x,
                     (dy, x, mask, w_true, w_false), (d_true, d_false))


@define(f"masked_ffn(Tensor x, Tensor mask, {_MASKED_WEIGHTS}) -> Tensor", casts=True, by_row=True)
def _(x, mask, *weights_and_options):
    *weights, act, pattern = weights_and_options
    x = ready(x)
    y = torch.empty_like(x)
    run(_MASKED_FFN, (act, pattern or None, None), (x, mask, *weights), (y,))
    return y


@define(f"masked_ffn_preact(Tensor x, Tensor mask, {_MASKED_WEIGHTS}) "
         "-> (Tensor, Tensor, Tensor)", casts=True)
def _(x, mask, *weights_and_options):
    *weights, act, pattern = weights_and_options
    x = ready(x)
    y, gate = torch.empty_like(x), empty(x, *x.shape[:-1], weights[0].shape[0])
    up = torch.empty_like(gate)
    run(_MASKED_FFN, (act, pattern or None, "preact"), (x, mask, *weights), (y, gate, up))
    return y, gate, up


@define(f"masked_ffn_backward(Tensor dy, Tensor x, Tensor mask, Tensor? gate, Tensor? up, "
         f"{_MASKED_WEIGHTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
def _(dy, x, mask, gate, up, *weights_and_options):
    *weights, act, pattern = weights_and_options
    x, *weights = map(ready, (x, *weights))
    results = tuple(map(torch.empty_like, (x, *weights)))
    run(_MASKED_FFN_BACKWARD, (act, pattern or None), (dy, x, mask, gate, up, *weights), results)
    return results


_MASKED_FFN_INTO = ", ".join(f"Tensor({letter}!) d_{name}" for letter, name in zip(
    "abcdef", ("gate_true", "up_true", "down_true", "gate_false", "up_false", "down_false")))


@define(f"masked_ffn_backward_into(Tensor dy, Tensor x, Tensor mask, Tensor? gate, Tensor? up, "
         f"{_MASKED_FFN_INTO}, {_MASKED_WEIGHTS}) -> Tensor")
def _(dy, x, mask, gate, up, *others):
    into, weights, (act, pattern) = others[:6], others[6:12], others[12:]
    return _run_into(_MASKED_FFN_BACKWARD, (act, pattern or None), x,
                     (dy, x, mask, gate, up, *weights), into)


@fake("masked_linear")
def _(x, mask, w_true, w_false, pattern):
    return x.new_empty(*x.shape[:-1], w_true.shape[0])


@fake("masked_linear_backward")
def _(dy, x, mask, w_true, w_false, pattern):
    return tuple(x.new_empty(t.shape) for t in (x, w_true, w_false))


@fake("masked_ffn")
def _(x, mask, *weights_and_options):
    return x.new_empty(x.shape)


@fake("masked_ffn_preact")
def _(x, mask, w_gate_true, *others):
    hidden = (*x.shape[:-1], w_gate_true.shape[0])
    return x.new_empty(x.shape), x.new_empty(hidden), x.new_empty(hidden)


@fake("masked_ffn_backward")
def _(dy, x, mask, gate, up, *weights_and_options):
    return tuple(x.new_empty(t.shape) for t in (x, *weights_and_options[:-2]))


def _save_masked_linear(ctx, inputs, output):
    *tensors, ctx.pattern = inputs
    ctx.save_for_backward(*tensors)


@gradient("masked_linear", _save_masked_linear)
def _(ctx, dy):
    dx, d_true, d_false = call(OPS.masked_linear_backward, dy, *ctx.saved_tensors,
                               ctx.pattern)
    return dx, None, d_true, d_false, None


def _save_masked_ffn(ctx, inputs, output):
    *tensors, ctx.act, ctx.pattern = inputs
    save_gates(ctx, tensors, output)


@gradient("masked_ffn", _save_masked_ffn)
def _(ctx, dy, *_unused):
    if dy is None:
        return (None,) * 10
    x, mask, *weights, gate, up = ctx.saved_tensors
    dx, *d_weights = call(OPS.masked_ffn_backward, dy, x, mask, gate, up, *weights,
                          ctx.act, ctx.pattern)
    return dx, None, *d_weights, None, None


gradient("masked_ffn_preact", _save_masked_ffn)(_)


for _name in ("ffn", "linear", "masked_linear", "masked_ffn"):
    @fake(f"{_name}_backward_into")
    def _(dy, x, *others):
        return x.new_empty(x.shape)


def masked_linear(x: Tensor, mask: Tensor, w_true: Tensor, w_false: Tensor, *,
                  pattern: str | None = None) -> Tensor:
    """x_i w_trueᵀ where mask_i, else x_i w_falseᵀ.

    `x` [..., k]; `mask` [...] of bool, or of bytes that are not 0 if it is set; `w_true`, `w_false`
    [n, k]. Returns [..., n]. `pattern`: the distribution of masks, which helps to choose kernels;
    any mask gives right results. The pattern "block:0.33" (the default) is one run of a third of
    the tokens, "random:0.33" a third of them here and there; also all, none, tail:SHARE and
    even:SHARE.
    """
    return call(OPS.masked_linear, x, mask, w_true, w_false, _or_empty(pattern))


def masked_ffn(x: Tensor, mask: Tensor, w_gate_true: Tensor, w_up_true: Tensor,
               w_down_true: Tensor, w_gate_false: Tensor, w_up_false: Tensor, w_down_false: Tensor,
               *, act: str = "silu", recompute: bool = False, pattern: str | None = None
               ) -> Tensor:
    """`ffn` with the first three weights where mask_i, else with the others.

    x [..., d]; mask [...]; w_gate, w_up [h, d]; w_down [d, h]. -> [..., d]. pattern: as of
    `masked_linear`.
    """
    arguments = (x, mask, w_gate_true, w_up_true, w_down_true, w_gate_false, w_up_false,
                 w_down_false)
    if wants_gradient(*arguments) and not flag("masked-ffn", "recompute", recompute):
        return call(OPS.masked_ffn_preact, *arguments, act, _or_empty(pattern))[0]
    return call(OPS.masked_ffn, *arguments, act, _or_empty(pattern))


def masked_linear_backward(dy: Tensor, x: Tensor, mask: Tensor, w_true: Tensor, w_false: Tensor, *,
                           into: Sequence[Tensor] | None = None, pattern: str | None = None
                           ) -> tuple[Tensor, ...]:
    """(dx, dw_true, dw_false) of `masked_linear`; with `into`, two tensors like the weights, the
    gradients of the weights are added to those, and given as those."""
    arguments = dy, x, mask, w_true, w_false
    if into is None:
        return call(OPS.masked_linear_backward, *arguments, _or_empty(pattern))
    into = several("masked-linear", "into", into, 2, "tensors like the two weights")
    return call(OPS.masked_linear_backward_into, *arguments, *into, _or_empty(pattern)), *into


def masked_ffn_backward(dy: Tensor, x: Tensor, mask: Tensor, gate: Tensor | None,
                        up: Tensor | None, *weights: Tensor, act: str = "silu",
                        into: Sequence[Tensor] | None = None, pattern: str | None = None
                        ) -> tuple[Tensor, ...]:
    """dx and the gradients of the six weights of `masked_ffn`, which are given in its order.

    gate, up: what torch.ops.fftune.masked_ffn_preact gave, or None to compute them again. into:
    six tensors like the weights, to which their gradients are added.
    """
    arguments = dy, x, mask, gate, up
    weights = several("masked-ffn", "weights", weights, 6, "the six weights of masked_ffn")
    if into is None:
        return call(OPS.masked_ffn_backward, *arguments, *weights, act, _or_empty(pattern))
    into = several("masked-ffn", "into", into, 6, "tensors like the six weights")
    return call(OPS.masked_ffn_backward_into, *arguments, *into, *weights, act,
                _or_empty(pattern)), *into


# rmsnorm

def _norm_values(options, x, residual, w, dy=None):
    expect_given("rmsnorm", eps=options[0], convention=options[1])
    d = x.shape[-1]
    expect("rmsnorm", "residual", residual, x.shape)
    expect("rmsnorm", "w", w, (d,))
    expect("rmsnorm", "dy", dy, x.shape)
    m = x.shape[:-1].numel()
    return (m, d, *options, None if w.dtype == x.dtype else "f32", yes(residual)) if m else None


def _norm_backward_values(options, x, w, dy, dsum, rstd):
    expect("rmsnorm", "rstd", rstd, x.shape[:-1])
    return _norm_values((*options, None if rstd is None else "rstd"), x, dsum, w, dy)


_NORM = Form("rmsnorm", False,
             ("m", "d", "eps", "convention", "output", "save", "weights", "residual"), _norm_values)
_NORM_BACKWARD = Form("rmsnorm", True,
                      ("m", "d", "eps", "convention", "save", "weights", "residual"),
                      _norm_backward_values)


def _row(op: str, name: str, x: Tensor, row: Tensor) -> Tensor:
    """A weight or bias as the kernels take it: of x's type, or of float32."""
    return row if row.dtype is x.dtype else float32(op, name, row)


@define("rmsnorm(Tensor x, Tensor w, float eps, str convention) -> Tensor", by_row=True)
def _(x, w, eps, convention):
    x = ready(x)
    y = torch.empty_like(x)
    run(_NORM, (eps, convention, None, None), (x, None, _row("rmsnorm", "w", x, w)), (y,))
    return y


@define("rmsnorm_rstd(Tensor x, Tensor w, float eps, str convention) -> (Tensor, Tensor)",
        by_row=True)
def _(x, w, eps, convention):
    x = ready(x)
    y, rstd = torch.empty_like(x), empty(x, *x.shape[:-1], dtype=torch.float32)
    run(_NORM, (eps, convention, None, "rstd"), (x, None, _row("rmsnorm", "w", x, w)), (y, rstd))
    return y, rstd


@define("add_rmsnorm(Tensor x, Tensor residual, Tensor w, float eps, str convention) "
         "-> (Tensor, Tensor)", by_row=True)
def _(x, residual, w, eps, convention):
    x = ready(x)
    y, total = torch.empty_like(x), torch.empty_like(x)
    run(_NORM, (eps, convention, None, None), (x, residual, _row("rmsnorm", "w", x, w)), (y, total))
    return y, total


@define("add_rmsnorm_rstd(Tensor x, Tensor residual, Tensor w, float eps, str convention) "
         "-> (Tensor, Tensor, Tensor)", by_row=True)
def _(x, residual, w, eps, convention):
    x = ready(x)
    y, total = torch.empty_like(x), torch.empty_like(x)
    rstd = empty(x, *x.shape[:-1], dtype=torch.float32)
    run(_NORM, (eps, convention, None, "rstd"), (x, residual, _row("rmsnorm", "w", x, w)),
        (y, total, rstd))
    return y, total, rstd


@define("rmsnorm_quantised(Tensor x, Tensor? residual, Tensor w, float eps, str convention, "
         "bool int8) -> (Tensor, Tensor, Tensor)")
def _(x, residual, w, eps, convention, int8):
    x = ready(x)
    y = torch.empty_like(x, dtype=torch.int8 if int8 else torch.float8_e4m3fn)
    scale = empty(x, *x.shape[:-1], dtype=torch.float32)
    total = empty(x, 0) if residual is None else torch.empty_like(x)
    run(_NORM, (eps, convention, "i8" if int8 else "fp8", None),
        (x, residual, _row("rmsnorm", "w", x, w)),
        (y, scale) if residual is None else (y, total, scale))
    return y, scale, total


@define("rmsnorm_backward(Tensor dy, Tensor x, Tensor w, Tensor? dsum, Tensor? rstd, float eps, "
         "str convention) -> (Tensor, Tensor)")
def _(dy, x, w, dsum, rstd, eps, convention):
    x, own = ready(x), ready(_row("rmsnorm", "w", x, w))
    dx, dw = torch.empty_like(x), torch.empty_like(own)
    run(_NORM_BACKWARD, (eps, convention), (x, own, dy, dsum, rstd), (dx, dw))
    return dx, dw.to(w.dtype)


@fake("rmsnorm")
def _(x, w, eps, convention):
    return x.new_empty(x.shape)


@fake("add_rmsnorm")
def _(x, residual, w, eps, convention):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@fake("rmsnorm_quantised")
def _(x, residual, w, eps, convention, int8):
    dtype = torch.int8 if int8 else torch.float8_e4m3fn
    return (x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32),
            x.new_empty(0 if residual is None else x.shape))


@fake("rmsnorm_rstd")
def _(x, w, eps, convention):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@fake("add_rmsnorm_rstd")
def _(x, residual, w, eps, convention):
    return (x.new_empty(x.shape), x.new_empty(x.shape),
            x.new_empty(x.shape[:-1], dtype=torch.float32))


@fake("rmsnorm_backward")
def _(dy, x, w, dsum, rstd, eps, convention):
    return x.new_empty(x.shape), w.new_empty(w.shape)


def _save_norm(ctx, inputs, output):
    x, w, ctx.eps, ctx.convention = inputs
    rstd = None
    if isinstance(output, tuple):
        rstd = output[1]
        ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w, rstd)


@gradient("rmsnorm", _save_norm)
def _(ctx, dy, *_unused):
    if dy is None:
        return (None,) * 4
    x, w, rstd = ctx.saved_tensors
    return *call(OPS.rmsnorm_backward, dy, x, w, None, rstd, ctx.eps,
                 ctx.convention), None, None


gradient("rmsnorm_rstd", _save_norm)(_)


def _save_add_norm(ctx, inputs, output):
    _, _, w, ctx.eps, ctx.convention = inputs
    total, rstd = output[1], None
    if len(output) > 2:
        rstd = output[2]
        ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, w, rstd)


@gradient("add_rmsnorm", _save_add_norm)
def _(ctx, dy, dsum, *_unused):
    total, w, rstd = ctx.saved_tensors
    if dy is None:
        return dsum, dsum, None, None, None
    dx, dw = call(OPS.rmsnorm_backward, dy, total, w, dsum, rstd, ctx.eps,
                  ctx.convention)
    return dx, dx, dw, None, None


gradient("add_rmsnorm_rstd", _save_add_norm)(_)


def rmsnorm(x: Tensor, w: Tensor, *, eps: float = 1e-6, convention: str = "llama",
            save_rstd: bool = False) -> Tensor:
    """x / sqrt(mean(x²) + eps) * w, the mean over the last dimension.

    `x` [..., d]; `w` [d], of x's type or float32. Returns [..., d]. `convention`: "llama" rounds to
    x's type before it multiplies with w; "t5" rounds once, at the end; "gemma" does so too, and
    multiplies with 1 + w. `save_rstd`: keep 1 / sqrt(mean(x²) + eps) of every token for the
    backward pass, which computes it again otherwise.
    """
    if save_rstd is not False and flag("rmsnorm", "save_rstd", save_rstd) and wants_gradient(x, w):
        return call(OPS.rmsnorm_rstd, x, w, eps, convention)[0]
    return call(OPS.rmsnorm, x, w, eps, convention)


def add_rmsnorm(x: Tensor, residual: Tensor, w: Tensor, *, eps: float = 1e-6,
                convention: str = "llama", save_rstd: bool = False) -> tuple[Tensor, Tensor]:
    """(rmsnorm(s), s) of s = x + residual. x, residual [..., d]; w [d]. -> two of [..., d]"""
    if (save_rstd is not False and flag("rmsnorm", "save_rstd", save_rstd)
            and wants_gradient(x, residual, w)):
        return call(OPS.add_rmsnorm_rstd, x, residual, w, eps, convention)[:2]
    return call(OPS.add_rmsnorm, x, residual, w, eps, convention)


def rmsnorm_quantised(x: Tensor, w: Tensor, residual: Tensor | None = None, *, eps: float = 1e-6,
                      convention: str = "llama", dtype: torch.dtype = torch.float8_e4m3fn
                      ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """rmsnorm quantised with a scale for each token: (q, scale), or (q, scale, s) with a residual.

    x, residual [..., d]; w [d]. q [..., d] of float8_e4m3fn or int8, scale [...] of float32: the
    norm is q * scale. No gradients.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.int8, torch.float8_e4m3fn):
        raise Error(f"rmsnorm: quantised to {dtype}: give torch.float8_e4m3fn or torch.int8")
    results = call(OPS.rmsnorm_quantised, x, residual, w, eps, convention,
                    dtype == torch.int8)
    return results[:2] if residual is None else results


# bias-gelu and act-mul

def _bias_gelu_values(options, x, bias, dy=None):
    h, m = x.shape[-1], x.shape[:-1].numel()
    expect("bias-gelu", "bias", bias, (h,))
    expect("bias-gelu", "dy", dy, x.shape)
    return (m, h, *options, None if bias.dtype == x.dtype else "f32") if m else None


def _act_mul_values(options, gate, up, dy=None):
    expect_given("act-mul", act=options[0])
    h, m = gate.shape[-1], gate.shape[:-1].numel()
    if up is None:
        if h % 2:
            raise Error(f"act-mul: gate is {list(gate.shape)}: give [..., 2h], or up beside it")
        h //= 2
    else:
        expect("act-mul", "up", up, gate.shape)
    expect("act-mul", "dy", dy, (*gate.shape[:-1], h))
    return (m, h, *options, "yes" if up is None else None) if m else None


_BIAS_GELU = Form("bias-gelu", False, ("m", "h", "act", "biases"), _bias_gelu_values)
_BIAS_GELU_BACKWARD = Form("bias-gelu", True, ("m", "h", "act", "biases"), _bias_gelu_values)
_ACT_MUL = Form("act-mul", False, ("m", "h", "act", "packed"), _act_mul_values)
_ACT_MUL_BACKWARD = Form("act-mul", True, ("m", "h", "act", "packed"), _act_mul_values)


@define("bias_gelu(Tensor x, Tensor bias, str act) -> Tensor", by_row=True)
def _(x, bias, act):
    x = ready(x)
    y = torch.empty_like(x)
    run(_BIAS_GELU, (act,), (x, _row("bias-gelu", "bias", x, bias)), (y,))
    return y


@define("bias_gelu_backward(Tensor dy, Tensor x, Tensor bias, str act) -> (Tensor, Tensor)")
def _(dy, x, bias, act):
    x, own = ready(x), ready(_row("bias-gelu", "bias", x, bias))
    dx, dbias = torch.empty_like(x), torch.empty_like(own)
    run(_BIAS_GELU_BACKWARD, (act,), (x, own, dy), (dx, dbias))
    return dx, dbias.to(bias.dtype)


@define("act_mul(Tensor gate, Tensor up, str act) -> Tensor", by_row=True)
def _(gate, up, act):
    gate = ready(gate)
    y = torch.empty_like(gate)
    run(_ACT_MUL, (act,), (gate, up), (y,))
    return y


@define("act_mul_backward(Tensor dy, Tensor gate, Tensor up, str act) -> (Tensor, Tensor)")
def _(dy, gate, up, act):
    gate = ready(gate)
    results = torch.empty_like(gate), torch.empty_like(gate)
    run(_ACT_MUL_BACKWARD, (act,), (gate, up, dy), results)
    return results


@define("act_mul_packed(Tensor gate_up, str act) -> Tensor", by_row=True)
def _(gate_up, act):
    *lead, width = gate_up.shape or (0,)
    y = empty(gate_up, *lead, width // 2)
    run(_ACT_MUL, (act,), (gate_up, None), (y,))
    return y


@define("act_mul_packed_backward(Tensor dy, Tensor gate_up, str act) -> Tensor")
def _(dy, gate_up, act):
    gate_up = ready(gate_up)
    d_gate_up = torch.empty_like(gate_up)
    run(_ACT_MUL_BACKWARD, (act,), (gate_up, None, dy), (d_gate_up,))
    return d_gate_up


@fake("bias_gelu")
def _(x, bias, act):
    return x.new_empty(x.shape)


@fake("bias_gelu_backward")
def _(dy, x, bias, act):
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


@fake("act_mul")
def _(gate, up, act):
    return gate.new_empty(gate.shape)


@fake("act_mul_backward")
def _(dy, gate, up, act):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


@fake("act_mul_packed")
def _(gate_up, act):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@fake("act_mul_packed_backward")
def _(dy, gate_up, act):
    return gate_up.new_empty(gate_up.shape)


def _save_inputs(ctx, inputs, output):
    *tensors, ctx.act = inputs
    ctx.save_for_backward(*tensors)


@gradient("bias_gelu", _save_inputs)
def _(ctx, dy):
    return *call(OPS.bias_gelu_backward, dy, *ctx.saved_tensors, ctx.act), None


@gradient("act_mul", _save_inputs)
def _(ctx, dy):
    return *call(OPS.act_mul_backward, dy, *ctx.saved_tensors, ctx.act), None


@gradient("act_mul_packed", _save_inputs)
def _(ctx, dy):
    return call(OPS.act_mul_packed_backward, dy, *ctx.saved_tensors, ctx.act), None


_GELU = {"none": "gelu", "tanh": "gelu-tanh"}


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none") -> Tensor:
    """gelu(x + bias), with erf or with approximate="tanh". x [..., h]; bias [h], of x's type or
    float32. -> [..., h]"""
    act = _GELU.get(approximate) if isinstance(approximate, str) else None
    if act is None:
        raise Error(f"bias-gelu: approximate is {named(approximate)}: give 'none' or 'tanh'")
    return call(OPS.bias_gelu, x, bias, act)


def act_mul(gate: Tensor, up: Tensor | None = None, *, act: str = "silu") -> Tensor:
    """act(gate) * up. gate, up [..., h]; or without `up`, gate [..., 2h] that holds both. ->
    [..., h]. act: silu, gelu, gelu-tanh or relu."""
    if up is None:
        return call(OPS.act_mul_packed, gate, act)
    return call(OPS.act_mul, gate, up, act)


# rope

_ROPE_NUMBERS = ("base", "factor", "context", "low", "high", "beta-fast", "beta-slow", "scale")
_ROPE_USED = {"table": (7,), "base": (0, 1, 7), "llama3": (0, 1, 2, 3, 4, 7),
              "yarn": (0, 1, 2, 5, 6, 7)}
_ROPE_SIZES = ("s", "b", "heads", "dim", "kv-heads", "rotary", "positions", "q-row", "q-outer",
               "q-head", "k-row", "k-outer", "k-head", "layout", "rotation", "angles", "starts")
_ROPE_ARGUMENTS = ("Tensor? angles, Tensor? starts, Tensor? offsets, str rotation, int rotary, "
                   "str rule, float[] numbers")


def _strided(x: Tensor) -> Tensor:
    """Queries or keys as the kernels read them: features next to each other, rows that do not
    overlap, and on a GPU all at addresses of 16 bytes."""
    step = 16 // x.element_size() if x.is_cuda else 1
    strides = x.stride()
    good = (strides[-1] == 1 and all(s >= x.shape[-1] and s % step == 0 for s in strides[:-1])
            and (not x.is_cuda or x.data_ptr() % 16 == 0))
    return x if good else x.clone(memory_format=torch.contiguous_format)


def _stride_values(x: Tensor, packed: bool) -> tuple:
    """(row, outer, head) of q or k; None where they are what the library takes for granted."""
    if x.is_contiguous():
        return None, None, None
    if packed:
        return x.stride(0), None, x.stride(1)
    return x.stride(1), x.stride(0), x.stride(2)


def _rope_values(options, q, k, angles, offsets, starts):
    strides, rotation, rotary, rule, numbers = options
    packed = offsets is not None
    if q.dim() != (3 if packed else 4):
        raise Error(f"rope: q is {list(q.shape)}: give [batch, tokens, heads, features], or "
                    "[tokens, heads, features] with offsets")
    *lead, heads, dim = q.shape
    if k is not None:
        expect("rope", "k", k, (*lead, k.shape[-2], dim))
    expect_given("rope", rotation=rotation)
    if rule not in _ROPE_USED:
        raise Error(f"rope: there is no rule '{rule}': give {', '.join(_ROPE_USED)}")
    if (rule == "table") != (angles is not None):
        raise Error("rope: angles are given with rule='table', and only with it")
    b, s = (offsets.numel() - 1, lead[0]) if packed else lead
    if angles is not None:
        expect("rope", "angles", angles, (angles.shape[0], rotary or dim))
    expect("rope", "starts", starts, (b,))
    if not q.numel():
        return None
    return (s, b, heads, dim, None if k is None else k.shape[-2], rotary or None,
            None if angles is None else angles.shape[0], *strides, "thd" if packed else "bshd",
            rotation, rule, yes(starts),
            *(number if i in _ROPE_USED[rule] else None for i, number in enumerate(numbers)))


_ROPE = Form("rope", False, _ROPE_SIZES + _ROPE_NUMBERS, _rope_values, strided=True)
_ROPE_BACKWARD = Form("rope", True, _ROPE_SIZES + _ROPE_NUMBERS, _rope_values, strided=True)


def _run_rope(form, q, k, angles, starts, offsets, rotation, rotary, rule, numbers):
    results = [empty(t, *t.shape) for t in (q, k) if t is not None]
    q = _strided(q)
    packed = offsets is not None
    strides = _stride_values(q, packed)
    if k is None:
        strides += None, None, None
    else:
        k = _strided(k)
        strides += _stride_values(k, packed)
    offsets, starts = (None if t is None else ready(int32("rope", name, t))
                       for name, t in (("offsets", offsets), ("starts", starts)))
    run(form, (strides, rotation, rotary, rule, tuple(numbers)),
        (q, k, None if angles is None else ready(angles), offsets, starts), results)
    return results


@define(f"rope(Tensor q, {_ROPE_ARGUMENTS}) -> Tensor")
def _(q, *arguments):
    return _run_rope(_ROPE, q, None, *arguments)[0]


@define(f"rope_backward(Tensor dq, {_ROPE_ARGUMENTS}) -> Tensor")
def _(dq, *arguments):
    return _run_rope(_ROPE_BACKWARD, dq, None, *arguments)[0]


@define(f"rope_qk(Tensor q, Tensor k, {_ROPE_ARGUMENTS}) -> (Tensor, Tensor)")
def _(q, k, *arguments):
    return tuple(_run_rope(_ROPE, q, k, *arguments))


@define(f"rope_qk_backward(Tensor dq, Tensor dk, {_ROPE_ARGUMENTS}) -> (Tensor, Tensor)")
def _(dq, dk, *arguments):
    return tuple(_run_rope(_ROPE_BACKWARD, dq, dk, *arguments))


for _name in ("rope", "rope_backward"):
    @fake(_name)
    def _(q, *arguments):
        return q.new_empty(q.shape)

for _name in ("rope_qk", "rope_qk_backward"):
    @fake(_name)
    def _(q, k, *arguments):
        return q.new_empty(q.shape), k.new_empty(k.shape)


def _save_rope(ctx, inputs, output):
    *_, angles, starts, offsets, rotation, rotary, rule, numbers = inputs
    ctx.save_for_backward(angles, starts, offsets)
    ctx.others = rotation, rotary, rule, list(numbers)


@gradient("rope", _save_rope)
def _(ctx, dq):
    return call(OPS.rope_backward, dq, *ctx.saved_tensors, *ctx.others), *(None,) * 7


@gradient("rope_qk", _save_rope)
def _(ctx, dq, dk):
    return *call(OPS.rope_qk_backward, dq, dk, *ctx.saved_tensors, *ctx.others), \
        *(None,) * 7


def rope(q: Tensor, k: Tensor | None = None, *, angles: Tensor | None = None,
         starts: Tensor | None = None, offsets: Tensor | None = None, rotation: str = "halves",
         rotary: int = 0, rule: str | None = None, base: float = 10000.0, factor: float = 1.0,
         context: float = 8192.0, low: float = 1.0, high: float = 4.0, beta_fast: float = 32.0,
         beta_slow: float = 1.0, scale: float = 0.0) -> Tensor | tuple[Tensor, Tensor]:
    """Rotary position embedding: x cos f + rotated(x) sin f, of q, or of q and k at once.

    q [batch, tokens, heads, features], k the same with its own number of heads; or both [tokens,
    heads, features] of sequences that begin at `offsets` [sequences + 1]. They may be views: the
    kernels take their strides. Results are contiguous.

    angles [positions, rotary] of float32: f of every token's position in its sequence. Without it,
    f is position times a frequency, by rule "base" (the default), "llama3" or "yarn". `starts`
    [batch]: the position of each sequence's first token. `rotary`: features to rotate, 0 for all.
    `rotation`: "halves" (Llama) or "interleaved" (GPT-J). `scale`: factor of sines and cosines, 0
    for the rule's own.
    """
    if rule is None:
        rule = "base" if angles is None else "table"
    arguments = (angles, starts, offsets, rotation, rotary, rule,
                 [base, factor, context, low, high, beta_fast, beta_slow, scale])
    if k is None:
        return call(OPS.rope, q, *arguments)
    return call(OPS.rope_qk, q, k, *arguments)


# ngram-block

def _ngram_values(options, ids, logits, prefix, lengths, prefix_lengths, ns):
    n, padding = options
    b, vocab = logits.shape
    expect("ngram-block", "ids", ids, (b, ids.shape[-1]))
    expect("ngram-block", "lengths", lengths, (b,))
    expect("ngram-block", "n", ns, (b,))
    beams = None
    if prefix is not None:
        groups = prefix.shape[0]
        if not groups or b % groups:
            raise Error(f"ngram-block: {b} rows cannot share {groups} prefixes evenly")
        expect("ngram-block", "prefix", prefix, (groups, prefix.shape[-1]), ids.dtype)
        expect("ngram-block", "prefix_lengths", prefix_lengths, (groups,))
        beams = b // groups
        if (lengths is None) != (prefix_lengths is None):
            raise Error("ngram-block: give lengths of the rows and of the prefixes, or of neither")
    if not ids.numel():
        return None
    return (b, ids.shape[-1], vocab, None if prefix is None else prefix.shape[-1], beams,
            "i64" if ids.dtype == torch.int64 else "i32", None if lengths is None else "own",
            None if ns is None else "own", None if ns is not None else float(n),
            None if padding == -1 else float(padding))


_NGRAM = Form("ngram-block", False, ("b", "len", "vocab", "prefix", "beams", "ids", "lengths",
                                     "ngrams", "n", "padding"), _ngram_values, typed_by=1)


@define("ngram_block(Tensor ids, Tensor(a!) logits, int n, int padding, Tensor? lengths, "
         "Tensor? prefix, Tensor? prefix_lengths, Tensor? ns) -> Tensor")
def _(ids, logits, n, padding, lengths, prefix, prefix_lengths, ns):
    invalid = empty(logits, logits.shape[0], dtype=torch.int32)
    own = ready(logits)
    if prefix is not None and not ids.shape[-1] and prefix.shape[-1]:
        # The library's rows have at least one place; here no id of it counts.
        ids = ids.new_zeros(*ids.shape[:-1], 1)
        if prefix_lengths is None and lengths is None:
            lengths = ids.new_zeros(ids.shape[0])
            prefix_lengths = ids.new_full(prefix.shape[:1], prefix.shape[-1])
        elif lengths is not None:
            lengths = torch.zeros_like(lengths)
    counts = [int32("ngram-block", name, t) for name, t in (
        ("lengths", lengths), ("prefix_lengths", prefix_lengths), ("n", ns))]
    run(_NGRAM, (n, padding), (ids, own, prefix, *counts), (invalid,))
    if own is not logits:
        logits.copy_(own)
    return invalid


@fake("ngram_block")
def _(ids, logits, *others):
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


def ngram_block(ids: Tensor, logits: Tensor, n: int | Tensor = 3, *, padding: int = -1,
                lengths: Tensor | None = None, prefix: Tensor | None = None,
                prefix_lengths: Tensor | None = None) -> Tensor:
    """Sets, in place, the logits to -inf of tokens that would repeat an n-gram of their row.

    `ids` [rows, length] of int32 or int64: the generated ids. `logits` [rows, vocabulary]; `n` one
    for all rows or [rows]; `padding`: an id that never matches; `lengths` [rows]: how many ids of
    each row count. `prefix` [rows / beams, length]: ids in front of theirs that neighbouring rows
    share, with prefix_lengths. Returns int32 [rows]: how many ids of each row are no tokens.
    """
    ns = n if isinstance(n, Tensor) else None
    return call(OPS.ngram_block, ids, logits, 1 if ns is not None else n, padding,
                 lengths, prefix, prefix_lengths, ns)

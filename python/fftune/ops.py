"""fftune's ops as functions of tensors.

Each is backed by custom ops (torch.ops.fftune.*) with fake kernels, gradients and autocast rules, so
that torch.compile(fullgraph=True) keeps them whole and CUDA graphs capture them. Activations are
[..., features] with any leading dimensions, weights [out_features, in_features]. Inputs that are
not contiguous are copied, but for those of `rope`, whose strides the kernels take.

Element types: bfloat16, float16 and float32 on a GPU; float32 and bfloat16 on the CPU. All tensors
of a call have one type, but where a function says otherwise. Errors are fftune.Error.
"""
import os
from math import prod

import torch
from torch import Tensor

from . import reference
from ._library import Error
from ._run import Form, ready, run

__all__ = ["ffn", "ffn_block", "ffn_fp8", "linear", "masked_ffn", "masked_linear", "rmsnorm",
           "add_rmsnorm", "rmsnorm_quantised", "bias_gelu", "act_mul", "rope", "ngram_block"]

_library = torch.library.Library("fftune", "DEF")
_DISABLED = os.environ.get("FFTUNE_DISABLE", "0") not in ("", "0")
_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def _define(schema: str, *, casts: bool = False):
    """Defines torch.ops.fftune.<name>, run by the decorated function on the CPU and CUDA, or with
    FFTUNE_DISABLE=1 by the function of that name in fftune.reference. `casts`: under autocast its
    tensors of floating point take the type of autocast."""
    def decorate(kernel):
        name = schema.split("(", 1)[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        implementation = _by_reference(name) if _DISABLED else kernel
        for backend in ("CPU", "CUDA"):
            _library.impl(name, implementation, backend)
        if casts:
            for device, key in _AUTOCAST_KEYS.items():
                _library.impl(name, _autocast(name, device, key), key)
        return kernel
    return decorate


def _by_reference(name: str):
    function = getattr(reference, name)

    def implementation(*arguments):
        result = function(*arguments)
        # An op's results are tensors of their own, contiguous ones.
        own = lambda t: t.clone(memory_format=torch.contiguous_format)
        return tuple(map(own, result)) if isinstance(result, tuple) else own(result)
    return implementation


def _autocast(name: str, device: str, key: str):
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def implementation(*arguments):
        dtype = torch.get_autocast_dtype(device)
        cast = [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a
                for a in arguments]
        with torch._C._ExcludeDispatchKeyGuard(below):
            return getattr(torch.ops.fftune, name).default(*cast)
    return implementation


def _fake(name: str):
    return torch.library.register_fake(f"fftune::{name}", lib=_library)


def _gradient(name: str, setup):
    def decorate(backward):
        torch.library.register_autograd(f"fftune::{name}", backward, setup_context=setup,
                                        lib=_library)
        return backward
    return decorate


def _tokens(x: Tensor) -> int:
    return prod(x.shape[:-1])


def _expect(op: str, **wanted: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """That tensors have these shapes: the library sees addresses alone."""
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise Error(f"{op}: {name} is {list(tensor.shape)}, not {list(shape)}")


def _expect_dtype(op: str, dtype: torch.dtype, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.dtype != dtype:
            raise Error(f"{op}: tensors of {dtype} and of {tensor.dtype}: give all one type")


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# ffn

_FFN = Form("ffn", False, ("m", "d", "h", "act", "bias", "residual", "save"))
_FFN_BACKWARD = Form("ffn", True, ("m", "d", "h", "act", "save"))
_FFN_BLOCK = Form("ffn", False, ("m", "d", "h", "act", "norm", "convention", "eps"),
                  {"residual": "yes"})
_FFN_FP8 = Form("ffn", False, ("m", "d", "h", "act", "scales"))
_FFN_ARGUMENTS = ("(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor? bias, "
                  "Tensor? residual, str act)")


def _expect_ffn(x, w_gate, w_up, w_down):
    d, h = x.shape[-1], w_gate.shape[0]
    _expect("ffn", w_gate=(w_gate, (h, d)), w_up=(w_up, (h, d)), w_down=(w_down, (d, h)))
    _expect_dtype("ffn", x.dtype, w_gate, w_up, w_down)
    return _tokens(x), d, h


def _run_ffn(x, w_gate, w_up, w_down, bias, residual, act, saves):
    m, d, h = _expect_ffn(x, w_gate, w_up, w_down)
    _expect("ffn", bias=(bias, (d,)), residual=(residual, tuple(x.shape)))
    _expect_dtype("ffn", x.dtype, bias, residual)
    tensors = [ready(t) for t in (x, w_gate, w_up, w_down, bias, residual) if t is not None]
    results = [x.new_empty(x.shape)]
    if saves:
        results += [x.new_empty(*x.shape[:-1], h) for _ in range(2)]
    if m:
        run(_FFN, (m, d, h, act, None if bias is None else "down",
                   None if residual is None else "yes", "preact" if saves else None),
            tensors + results, x.dtype)
    return results


@_define("ffn" + _FFN_ARGUMENTS + " -> Tensor", casts=True)
def _(x, w_gate, w_up, w_down, bias, residual, act):
    return _run_ffn(x, w_gate, w_up, w_down, bias, residual, act, False)[0]


@_define("ffn_preact" + _FFN_ARGUMENTS + " -> (Tensor, Tensor, Tensor)", casts=True)
def _(x, w_gate, w_up, w_down, bias, residual, act):
    return tuple(_run_ffn(x, w_gate, w_up, w_down, bias, residual, act, True))


@_define("ffn_backward(Tensor dy, Tensor x, Tensor? gate, Tensor? up, Tensor w_gate, Tensor w_up, "
         "Tensor w_down, str act) -> (Tensor, Tensor, Tensor, Tensor)")
def _(dy, x, gate, up, w_gate, w_up, w_down, act):
    m, d, h = _expect_ffn(x, w_gate, w_up, w_down)
    _expect("ffn", dy=(dy, tuple(x.shape)))
    _expect_dtype("ffn", x.dtype, dy, gate, up)
    tensors = [ready(t) for t in (dy, x, gate, up, w_gate, w_up, w_down) if t is not None]
    results = [x.new_empty(t.shape) for t in (x, w_gate, w_up, w_down)]
    if m:
        run(_FFN_BACKWARD, (m, d, h, act, "input" if gate is None else "preact"),
            tensors + results, x.dtype)
    else:
        for result in results:
            result.zero_()
    return tuple(results)


@_define("ffn_block(Tensor x, Tensor? residual, Tensor w_norm, Tensor w_gate, Tensor w_up, "
         "Tensor w_down, str act, str convention, float eps) -> Tensor")
def _(x, residual, w_norm, w_gate, w_up, w_down, act, convention, eps):
    m, d, h = _expect_ffn(x, w_gate, w_up, w_down)
    _expect("ffn", residual=(residual, tuple(x.shape)), w_norm=(w_norm, (d,)))
    _expect_dtype("ffn", x.dtype, residual, w_norm)
    x, *weights = map(ready, (x, w_gate, w_up, w_down))
    y = torch.empty_like(x)
    if residual is None:
        tensors = [x, *weights, x, ready(w_norm), y]
    else:
        # The sum that the norm's stage writes is the residual that the last stage reads.
        total = torch.empty_like(x)
        tensors = [x, *weights, total, ready(residual), ready(w_norm), y, total]
    if m:
        run(_FFN_BLOCK, (m, d, h, act, "rms" if residual is None else "add-rms", convention, eps),
            tensors, x.dtype)
    return y


@_define("ffn_fp8(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor x_scale, "
         "Tensor w_gate_scale, Tensor w_up_scale, Tensor? hidden_scale, Tensor w_down_scale, "
         "str act) -> Tensor")
def _(x, w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale, hidden_scale, w_down_scale, act):
    m, d, h = _expect_ffn(x, w_gate, w_up, w_down)
    scales = [x_scale, w_gate_scale, w_up_scale, hidden_scale, w_down_scale]
    if hidden_scale is None:
        blocks = lambda extent: -(-extent // 128)
        _expect("ffn", x_scale=(x_scale, (*x.shape[:-1], blocks(d))),
                w_gate_scale=(w_gate_scale, (blocks(h), blocks(d))),
                w_up_scale=(w_up_scale, (blocks(h), blocks(d))),
                w_down_scale=(w_down_scale, (blocks(d), blocks(h))))
    else:
        for scale in scales:
            _expect("ffn", scale=(scale, (1,)))
    _expect_dtype("ffn", torch.float8_e4m3fn, x)
    _expect_dtype("ffn", torch.float32, *scales)
    y = x.new_empty(x.shape, dtype=torch.bfloat16)
    if m:
        run(_FFN_FP8, (m, d, h, act, "block" if hidden_scale is None else None),
            [*map(ready, (x, w_gate, w_up, w_down)),
             *(ready(s) for s in scales if s is not None), y], x.dtype)
    return y


@_fake("ffn")
def _(x, w_gate, w_up, w_down, bias, residual, act):
    return x.new_empty(x.shape)


@_fake("ffn_preact")
def _(x, w_gate, w_up, w_down, bias, residual, act):
    hidden = (*x.shape[:-1], w_gate.shape[0])
    return x.new_empty(x.shape), x.new_empty(hidden), x.new_empty(hidden)


@_fake("ffn_backward")
def _(dy, x, gate, up, w_gate, w_up, w_down, act):
    return tuple(x.new_empty(t.shape) for t in (x, w_gate, w_up, w_down))


@_fake("ffn_block")
def _(x, residual, w_norm, w_gate, w_up, w_down, act, convention, eps):
    return x.new_empty(x.shape)


@_fake("ffn_fp8")
def _(x, w_gate, *others):
    return x.new_empty(x.shape, dtype=torch.bfloat16)


def _save_ffn(ctx, inputs, output):
    x, w_gate, w_up, w_down, bias, residual, ctx.act = inputs
    gate = up = None
    if isinstance(output, tuple):
        _, gate, up = output
        ctx.mark_non_differentiable(gate, up)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w_gate, w_up, w_down, gate, up)


def _input_gradient(dy, x, gate, up, w_gate, w_up, w_down, act):
    """dx alone, for weights that are frozen."""
    if gate is None:
        gate, up = x @ w_gate.T, x @ w_up.T
    d_gate, d_up = torch.ops.fftune.act_mul_backward(dy @ w_down, gate, up, act)
    return d_gate @ w_gate + d_up @ w_up


@_gradient("ffn", _save_ffn)
def _(ctx, dy, *_unused):
    if dy is None:
        return (None,) * 7
    x, w_gate, w_up, w_down, gate, up = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if any(needs[1:4]) or ctx.act == "none":
        grads = torch.ops.fftune.ffn_backward(dy, x, gate, up, w_gate, w_up, w_down, ctx.act)
    elif needs[0]:
        grads = (_input_gradient(dy, x, gate, up, w_gate, w_up, w_down, ctx.act), None, None, None)
    else:
        grads = (None,) * 4
    return (*grads, _rows(dy).sum(0) if needs[4] else None, dy if needs[5] else None, None)


_gradient("ffn_preact", _save_ffn)(_)


def _save_block(ctx, inputs, output):
    *tensors, ctx.act, ctx.convention, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


@_gradient("ffn_block", _save_block)
def _(ctx, dy):
    x, residual, w_norm, *weights = ctx.saved_tensors
    total = x if residual is None else x + residual
    normed = torch.ops.fftune.rmsnorm(total, w_norm, ctx.eps, ctx.convention)
    d_normed, *d_weights = torch.ops.fftune.ffn_backward(dy, normed, None, None, *weights, ctx.act)
    dx, d_norm = torch.ops.fftune.rmsnorm_backward(d_normed, total, w_norm, dy, ctx.eps,
                                                   ctx.convention)
    return dx, None if residual is None else dx, d_norm, *d_weights, None, None, None


def ffn(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, bias: Tensor | None = None,
        residual: Tensor | None = None, *, act: str = "silu", recompute: bool = False) -> Tensor:
    """(act(x w_gateᵀ) ⊙ (x w_upᵀ)) w_downᵀ (+ bias) (+ residual).

    x [..., d]; w_gate, w_up [h, d]; w_down [d, h]; bias [d]; residual [..., d]. -> [..., d].
    act: silu, gelu, gelu-tanh, relu or none. For the backward pass x and, unless `recompute`, the
    two products before the activation, [..., h] each, are kept.
    """
    if not recompute and _wants_gradient(x, w_gate, w_up, w_down):
        return torch.ops.fftune.ffn_preact(x, w_gate, w_up, w_down, bias, residual, act)[0]
    return torch.ops.fftune.ffn(x, w_gate, w_up, w_down, bias, residual, act)


def ffn_block(x: Tensor, residual: Tensor | None, w_norm: Tensor, w_gate: Tensor, w_up: Tensor,
              w_down: Tensor, *, act: str = "silu", convention: str = "llama", eps: float = 1e-6,
              recompute: bool = False) -> Tensor:
    """The MLP block of a pre-norm layer: s + ffn(rmsnorm(s)), where s = x (+ residual).

    x, residual [..., d]; w_norm [d]; weights as for `ffn`. -> [..., d]. For inference one plan runs
    all of it. With gradients it is `add_rmsnorm` and `ffn`, or with `recompute` the one plan, of
    which only the inputs are kept.
    """
    if not recompute and _wants_gradient(x, residual, w_norm, w_gate, w_up, w_down):
        if residual is None:
            normed = rmsnorm(x, w_norm, eps=eps, convention=convention)
        else:
            normed, x = add_rmsnorm(x, residual, w_norm, eps=eps, convention=convention)
        return ffn(normed, w_gate, w_up, w_down, residual=x, act=act)
    return torch.ops.fftune.ffn_block(x, residual, w_norm, w_gate, w_up, w_down, act, convention,
                                      eps)


def ffn_fp8(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, x_scale: Tensor,
            w_gate_scale: Tensor, w_up_scale: Tensor, w_down_scale: Tensor,
            hidden_scale: Tensor | None = None, *, act: str = "silu") -> Tensor:
    """`ffn` of float8_e4m3fn elements with float32 scales -> bfloat16 [..., d]. No gradients.

    With `hidden_scale` [1], which is the scale of the product in the middle, all scales are [1].
    Without, one is for 128 elements of a row of x, [..., ⌈d/128⌉], or 128 x 128 of a weight,
    [⌈rows/128⌉, ⌈columns/128⌉], and those of the middle are found. fftune.reference.quantise and
    quantise_weight make such tensors; fftune.nn.GatedMLP.to_fp8 does it all.
    """
    return torch.ops.fftune.ffn_fp8(x, w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale,
                                    hidden_scale, w_down_scale, act)


# linear

_LINEAR = Form("linear", False, ("m", "k", "n", "bias", "residual"))
_LINEAR_BACKWARD = Form("linear", True, ("m", "k", "n", "bias"))


@_define("linear(Tensor x, Tensor w, Tensor? bias, Tensor? residual) -> Tensor", casts=True)
def _(x, w, bias, residual):
    (n, k), m = w.shape, _tokens(x)
    shape = (*x.shape[:-1], n)
    _expect("linear", x=(x, (*x.shape[:-1], k)), bias=(bias, (n,)), residual=(residual, shape))
    _expect_dtype("linear", x.dtype, w, bias, residual)
    y = x.new_empty(shape)
    if m:
        run(_LINEAR, (m, k, n, None if bias is None else "yes",
                      None if residual is None else "yes"),
            [*(ready(t) for t in (x, w, bias, residual) if t is not None), y], x.dtype)
    return y


@_define("linear_backward(Tensor dy, Tensor x, Tensor w, bool bias) -> (Tensor, Tensor, Tensor)")
def _(dy, x, w, bias):
    (n, k), m = w.shape, _tokens(x)
    _expect("linear", x=(x, (*x.shape[:-1], k)), dy=(dy, (*x.shape[:-1], n)))
    _expect_dtype("linear", x.dtype, dy, w)
    results = [x.new_empty(x.shape), w.new_empty(w.shape), w.new_empty(n if bias else 0)]
    if m:
        run(_LINEAR_BACKWARD, (m, k, n, "yes" if bias else None),
            [*map(ready, (dy, x, w)), *results[:3 if bias else 2]], x.dtype)
    else:
        for result in results:
            result.zero_()
    return tuple(results)


@_fake("linear")
def _(x, w, bias, residual):
    return x.new_empty(*x.shape[:-1], w.shape[0])


@_fake("linear_backward")
def _(dy, x, w, bias):
    return x.new_empty(x.shape), w.new_empty(w.shape), w.new_empty(w.shape[0] if bias else 0)


def _save_linear(ctx, inputs, output):
    x, w, bias, _ = inputs
    ctx.save_for_backward(x, w)
    ctx.has_bias = bias is not None


@_gradient("linear", _save_linear)
def _(ctx, dy):
    x, w = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx = dw = dbias = None
    if needs[0] and needs[1]:
        dx, dw, dbias = torch.ops.fftune.linear_backward(dy, x, w, needs[2])
    else:
        if needs[0]:
            dx = dy @ w
        if needs[1]:
            dw = _rows(dy).T @ _rows(x)
        if needs[2]:
            dbias = _rows(dy).sum(0)
    return dx, dw, dbias if needs[2] else None, dy if needs[3] else None


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None,
           residual: Tensor | None = None) -> Tensor:
    """x wᵀ (+ bias) (+ residual). x [..., k]; w [n, k]; bias [n]; residual [..., n]. -> [..., n]"""
    return torch.ops.fftune.linear(x, w, bias, residual)


# two experts behind a mask

_MASKED_LINEAR = Form("masked-linear", False, ("m", "k", "n"))
_MASKED_LINEAR_BACKWARD = Form("masked-linear", True, ("m", "k", "n"))
_MASKED_FFN = Form("masked-ffn", False, ("m", "d", "h", "act", "save"))
_MASKED_FFN_BACKWARD = Form("masked-ffn", True, ("m", "d", "h", "act", "save"))
_MASKED_WEIGHTS = ("Tensor w_gate_true, Tensor w_up_true, Tensor w_down_true, "
                   "Tensor w_gate_false, Tensor w_up_false, Tensor w_down_false, str act")


def _mask_bytes(mask: Tensor, op: str) -> Tensor:
    if mask.dtype not in (torch.bool, torch.uint8, torch.int8):
        raise Error(f"{op}: mask is {mask.dtype}: give torch.bool, or bytes that are not 0")
    return ready(mask)


def _expect_masked_linear(x, mask, w_true, w_false):
    (n, k), lead = w_true.shape, tuple(x.shape[:-1])
    _expect("masked-linear", x=(x, (*lead, k)), mask=(mask, lead), w_false=(w_false, (n, k)))
    _expect_dtype("masked-linear", x.dtype, w_true, w_false)
    return _tokens(x), k, n


@_define("masked_linear(Tensor x, Tensor mask, Tensor w_true, Tensor w_false) -> Tensor",
         casts=True)
def _(x, mask, w_true, w_false):
    m, k, n = _expect_masked_linear(x, mask, w_true, w_false)
    y = x.new_empty(*x.shape[:-1], n)
    if m:
        run(_MASKED_LINEAR, (m, k, n),
            [ready(x), _mask_bytes(mask, "masked-linear"), ready(w_true), ready(w_false), y],
            x.dtype)
    return y


@_define("masked_linear_backward(Tensor dy, Tensor x, Tensor mask, Tensor w_true, Tensor w_false) "
         "-> (Tensor, Tensor, Tensor)")
def _(dy, x, mask, w_true, w_false):
    m, k, n = _expect_masked_linear(x, mask, w_true, w_false)
    _expect("masked-linear", dy=(dy, (*x.shape[:-1], n)))
    _expect_dtype("masked-linear", x.dtype, dy)
    results = [x.new_empty(t.shape) for t in (x, w_true, w_false)]
    if m:
        run(_MASKED_LINEAR_BACKWARD, (m, k, n),
            [ready(dy), ready(x), _mask_bytes(mask, "masked-linear"), ready(w_true),
             ready(w_false), *results], x.dtype)
    else:
        for result in results:
            result.zero_()
    return tuple(results)


def _expect_masked_ffn(x, mask, weights):
    for three in (weights[:3], weights[3:]):
        m, d, h = _expect_ffn(x, *three)
    _expect("masked-ffn", mask=(mask, tuple(x.shape[:-1])),
            w_gate_false=(weights[3], tuple(weights[0].shape)))
    return m, d, h


def _run_masked_ffn(x, mask, weights, act, saves):
    m, d, h = _expect_masked_ffn(x, mask, weights)
    results = [x.new_empty(x.shape)]
    if saves:
        results += [x.new_empty(*x.shape[:-1], h) for _ in range(2)]
    if m:
        run(_MASKED_FFN, (m, d, h, act, "preact" if saves else None),
            [ready(x), _mask_bytes(mask, "masked-ffn"), *map(ready, weights), *results], x.dtype)
    return results


@_define(f"masked_ffn(Tensor x, Tensor mask, {_MASKED_WEIGHTS}) -> Tensor", casts=True)
def _(x, mask, *weights_and_act):
    *weights, act = weights_and_act
    return _run_masked_ffn(x, mask, weights, act, False)[0]


@_define(f"masked_ffn_preact(Tensor x, Tensor mask, {_MASKED_WEIGHTS}) "
         "-> (Tensor, Tensor, Tensor)", casts=True)
def _(x, mask, *weights_and_act):
    *weights, act = weights_and_act
    return tuple(_run_masked_ffn(x, mask, weights, act, True))


@_define(f"masked_ffn_backward(Tensor dy, Tensor x, Tensor mask, Tensor? gate, Tensor? up, "
         f"{_MASKED_WEIGHTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
def _(dy, x, mask, gate, up, *weights_and_act):
    *weights, act = weights_and_act
    m, d, h = _expect_masked_ffn(x, mask, weights)
    _expect("masked-ffn", dy=(dy, tuple(x.shape)))
    _expect_dtype("masked-ffn", x.dtype, dy, gate, up)
    results = [x.new_empty(t.shape) for t in (x, *weights)]
    if m:
        saved = [] if gate is None else [ready(gate), ready(up)]
        run(_MASKED_FFN_BACKWARD, (m, d, h, act, "preact" if saved else "input"),
            [ready(dy), ready(x), _mask_bytes(mask, "masked-ffn"), *saved, *map(ready, weights),
             *results], x.dtype)
    else:
        for result in results:
            result.zero_()
    return tuple(results)


@_fake("masked_linear")
def _(x, mask, w_true, w_false):
    return x.new_empty(*x.shape[:-1], w_true.shape[0])


@_fake("masked_linear_backward")
def _(dy, x, mask, w_true, w_false):
    return tuple(x.new_empty(t.shape) for t in (x, w_true, w_false))


@_fake("masked_ffn")
def _(x, mask, *weights_and_act):
    return x.new_empty(x.shape)


@_fake("masked_ffn_preact")
def _(x, mask, w_gate_true, *others):
    hidden = (*x.shape[:-1], w_gate_true.shape[0])
    return x.new_empty(x.shape), x.new_empty(hidden), x.new_empty(hidden)


@_fake("masked_ffn_backward")
def _(dy, x, mask, gate, up, *weights_and_act):
    return tuple(x.new_empty(t.shape) for t in (x, *weights_and_act[:-1]))


def _save_masked_linear(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@_gradient("masked_linear", _save_masked_linear)
def _(ctx, dy):
    x, mask, w_true, w_false = ctx.saved_tensors
    dx, d_true, d_false = torch.ops.fftune.masked_linear_backward(dy, x, mask, w_true, w_false)
    return dx, None, d_true, d_false


def _save_masked_ffn(ctx, inputs, output):
    *tensors, ctx.act = inputs
    gate = up = None
    if isinstance(output, tuple):
        _, gate, up = output
        ctx.mark_non_differentiable(gate, up)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, gate, up)


@_gradient("masked_ffn", _save_masked_ffn)
def _(ctx, dy, *_unused):
    if dy is None:
        return (None,) * 9
    x, mask, *weights, gate, up = ctx.saved_tensors
    dx, *d_weights = torch.ops.fftune.masked_ffn_backward(dy, x, mask, gate, up, *weights, ctx.act)
    return dx, None, *d_weights, None


_gradient("masked_ffn_preact", _save_masked_ffn)(_)


def masked_linear(x: Tensor, mask: Tensor, w_true: Tensor, w_false: Tensor) -> Tensor:
    """x_i w_trueᵀ where mask_i, else x_i w_falseᵀ.

    x [..., k]; mask [...] of bool, or of bytes that are not 0 where it is set; w_true, w_false
    [n, k]. -> [..., n]
    """
    return torch.ops.fftune.masked_linear(x, mask, w_true, w_false)


def masked_ffn(x: Tensor, mask: Tensor, w_gate_true: Tensor, w_up_true: Tensor,
               w_down_true: Tensor, w_gate_false: Tensor, w_up_false: Tensor, w_down_false: Tensor,
               *, act: str = "silu", recompute: bool = False) -> Tensor:
    """`ffn` with the first three weights where mask_i, else with the others.

    x [..., d]; mask [...]; w_gate, w_up [h, d]; w_down [d, h]. -> [..., d]
    """
    arguments = (x, mask, w_gate_true, w_up_true, w_down_true, w_gate_false, w_up_false,
                 w_down_false)
    if not recompute and _wants_gradient(*arguments):
        return torch.ops.fftune.masked_ffn_preact(*arguments, act)[0]
    return torch.ops.fftune.masked_ffn(*arguments, act)


# rmsnorm

_NORM = Form("rmsnorm", False, ("m", "d", "eps", "convention", "weights", "residual", "output"))
_NORM_BACKWARD = Form("rmsnorm", True, ("m", "d", "eps", "convention", "weights", "residual"))


def _norm_weight(x: Tensor, w: Tensor) -> tuple[Tensor, str | None]:
    """The weight as the kernels take it, of x's type or float32, and the option that says so."""
    _expect("rmsnorm", w=(w, (x.shape[-1],)))
    if w.dtype == x.dtype:
        return ready(w), None
    return ready(w.float()), "f32" if x.dtype != torch.float32 else None


def _run_norm(x, residual, w, eps, convention, output=None):
    _expect("rmsnorm", residual=(residual, tuple(x.shape)))
    _expect_dtype("rmsnorm", x.dtype, residual)
    m, (w, weights) = _tokens(x), _norm_weight(x, w)
    types = {None: x.dtype, "fp8": torch.float8_e4m3fn, "i8": torch.int8}
    results = [x.new_empty(x.shape, dtype=types[output])]
    if residual is not None:
        results.append(x.new_empty(x.shape))
    if output is not None:
        results.append(x.new_empty(x.shape[:-1], dtype=torch.float32))
    if m:
        inputs = [ready(x), w] if residual is None else [ready(x), ready(residual), w]
        run(_NORM, (m, x.shape[-1], eps, convention, weights,
                    None if residual is None else "yes", output), inputs + results, x.dtype)
    return results


@_define("rmsnorm(Tensor x, Tensor w, float eps, str convention) -> Tensor")
def _(x, w, eps, convention):
    return _run_norm(x, None, w, eps, convention)[0]


@_define("add_rmsnorm(Tensor x, Tensor residual, Tensor w, float eps, str convention) "
         "-> (Tensor, Tensor)")
def _(x, residual, w, eps, convention):
    return tuple(_run_norm(x, residual, w, eps, convention))


@_define("rmsnorm_quantised(Tensor x, Tensor? residual, Tensor w, float eps, str convention, "
         "bool int8) -> (Tensor, Tensor, Tensor)")
def _(x, residual, w, eps, convention, int8):
    y, *total, scale = _run_norm(x, residual, w, eps, convention, "i8" if int8 else "fp8")
    return y, scale, total[0] if total else x.new_empty(0)


@_define("rmsnorm_backward(Tensor dy, Tensor x, Tensor w, Tensor? dsum, float eps, "
         "str convention) -> (Tensor, Tensor)")
def _(dy, x, w, dsum, eps, convention):
    _expect("rmsnorm", dy=(dy, tuple(x.shape)), dsum=(dsum, tuple(x.shape)))
    _expect_dtype("rmsnorm", x.dtype, dy, dsum)
    m, (weight, weights) = _tokens(x), _norm_weight(x, w)
    dx, dw = x.new_empty(x.shape), torch.empty_like(weight)
    if m:
        inputs = [ready(t) for t in (x, weight, dy, dsum) if t is not None]
        run(_NORM_BACKWARD, (m, x.shape[-1], eps, convention, weights,
                             None if dsum is None else "yes"), [*inputs, dx, dw], x.dtype)
    else:
        dw.zero_()
    return dx, dw.to(w.dtype)


@_fake("rmsnorm")
def _(x, w, eps, convention):
    return x.new_empty(x.shape)


@_fake("add_rmsnorm")
def _(x, residual, w, eps, convention):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@_fake("rmsnorm_quantised")
def _(x, residual, w, eps, convention, int8):
    dtype = torch.int8 if int8 else torch.float8_e4m3fn
    return (x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32),
            x.new_empty(0 if residual is None else x.shape))


@_fake("rmsnorm_backward")
def _(dy, x, w, dsum, eps, convention):
    return x.new_empty(x.shape), w.new_empty(w.shape)


def _save_norm(ctx, inputs, output):
    x, w, ctx.eps, ctx.convention = inputs
    ctx.save_for_backward(x, w)


@_gradient("rmsnorm", _save_norm)
def _(ctx, dy):
    x, w = ctx.saved_tensors
    return *torch.ops.fftune.rmsnorm_backward(dy, x, w, None, ctx.eps, ctx.convention), None, None


def _save_add_norm(ctx, inputs, output):
    _, _, w, ctx.eps, ctx.convention = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], w)


@_gradient("add_rmsnorm", _save_add_norm)
def _(ctx, dy, dsum):
    total, w = ctx.saved_tensors
    if dy is None:
        return dsum, dsum, None, None, None
    dx, dw = torch.ops.fftune.rmsnorm_backward(dy, total, w, dsum, ctx.eps, ctx.convention)
    return dx, dx, dw, None, None


def rmsnorm(x: Tensor, w: Tensor, *, eps: float = 1e-6, convention: str = "llama") -> Tensor:
    """x / sqrt(mean(x²) + eps) * w, the mean over the last dimension.

    x [..., d]; w [d], of x's type or float32. -> [..., d]. convention: "llama" rounds to x's type
    before it multiplies with w; "t5" rounds once, at the end; "gemma" too, and multiplies with
    1 + w.
    """
    return torch.ops.fftune.rmsnorm(x, w, eps, convention)


def add_rmsnorm(x: Tensor, residual: Tensor, w: Tensor, *, eps: float = 1e-6,
                convention: str = "llama") -> tuple[Tensor, Tensor]:
    """(rmsnorm(s), s) of s = x + residual. x, residual [..., d]; w [d]. -> two of [..., d]"""
    return torch.ops.fftune.add_rmsnorm(x, residual, w, eps, convention)


def rmsnorm_quantised(x: Tensor, w: Tensor, residual: Tensor | None = None, *, eps: float = 1e-6,
                      convention: str = "llama", dtype: torch.dtype = torch.float8_e4m3fn
                      ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """rmsnorm quantised with a scale for each token: (q, scale), or (q, scale, s) with a residual.

    x, residual [..., d]; w [d]. q [..., d] of float8_e4m3fn or int8, scale [...] of float32: the
    norm is q * scale. No gradients.
    """
    if dtype not in (torch.int8, torch.float8_e4m3fn):
        raise Error(f"rmsnorm: quantised to {dtype}: give torch.float8_e4m3fn or torch.int8")
    results = torch.ops.fftune.rmsnorm_quantised(x, residual, w, eps, convention,
                                                 dtype == torch.int8)
    return results[:2] if residual is None else results


# bias-gelu and act-mul

_BIAS_GELU = Form("bias-gelu", False, ("m", "h", "act", "biases"))
_BIAS_GELU_BACKWARD = Form("bias-gelu", True, ("m", "h", "act", "biases"))
_ACT_MUL = Form("act-mul", False, ("m", "h", "act", "packed"))
_ACT_MUL_BACKWARD = Form("act-mul", True, ("m", "h", "act", "packed"))


def _bias(x: Tensor, bias: Tensor) -> tuple[Tensor, str | None]:
    _expect("bias-gelu", bias=(bias, (x.shape[-1],)))
    if bias.dtype == x.dtype:
        return ready(bias), None
    return ready(bias.float()), "f32" if x.dtype != torch.float32 else None


@_define("bias_gelu(Tensor x, Tensor bias, str act) -> Tensor")
def _(x, bias, act):
    m, (bias, biases), y = _tokens(x), _bias(x, bias), x.new_empty(x.shape)
    if m:
        run(_BIAS_GELU, (m, x.shape[-1], act, biases), [ready(x), bias, y], x.dtype)
    return y


@_define("bias_gelu_backward(Tensor dy, Tensor x, Tensor bias, str act) -> (Tensor, Tensor)")
def _(dy, x, bias, act):
    _expect("bias-gelu", dy=(dy, tuple(x.shape)))
    _expect_dtype("bias-gelu", x.dtype, dy)
    m, (own, biases) = _tokens(x), _bias(x, bias)
    dx, dbias = x.new_empty(x.shape), torch.empty_like(own)
    if m:
        run(_BIAS_GELU_BACKWARD, (m, x.shape[-1], act, biases),
            [ready(x), own, ready(dy), dx, dbias], x.dtype)
    else:
        dbias.zero_()
    return dx, dbias.to(bias.dtype)


@_define("act_mul(Tensor gate, Tensor up, str act) -> Tensor")
def _(gate, up, act):
    _expect("act-mul", up=(up, tuple(gate.shape)))
    _expect_dtype("act-mul", gate.dtype, up)
    m, y = _tokens(gate), gate.new_empty(gate.shape)
    if m:
        run(_ACT_MUL, (m, gate.shape[-1], act, None), [ready(gate), ready(up), y], gate.dtype)
    return y


@_define("act_mul_backward(Tensor dy, Tensor gate, Tensor up, str act) -> (Tensor, Tensor)")
def _(dy, gate, up, act):
    _expect("act-mul", up=(up, tuple(gate.shape)), dy=(dy, tuple(gate.shape)))
    _expect_dtype("act-mul", gate.dtype, up, dy)
    m, results = _tokens(gate), [gate.new_empty(gate.shape) for _ in range(2)]
    if m:
        run(_ACT_MUL_BACKWARD, (m, gate.shape[-1], act, None),
            [ready(gate), ready(up), ready(dy), *results], gate.dtype)
    return tuple(results)


@_define("act_mul_packed(Tensor gate_up, str act) -> Tensor")
def _(gate_up, act):
    m, h = _tokens(gate_up), gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], h)
    if m:
        run(_ACT_MUL, (m, h, act, "yes"), [ready(gate_up), y], gate_up.dtype)
    return y


@_define("act_mul_packed_backward(Tensor dy, Tensor gate_up, str act) -> Tensor")
def _(dy, gate_up, act):
    m, h = _tokens(gate_up), gate_up.shape[-1] // 2
    _expect("act-mul", dy=(dy, (*gate_up.shape[:-1], h)))
    _expect_dtype("act-mul", gate_up.dtype, dy)
    d_gate_up = gate_up.new_empty(gate_up.shape)
    if m:
        run(_ACT_MUL_BACKWARD, (m, h, act, "yes"), [ready(gate_up), ready(dy), d_gate_up],
            gate_up.dtype)
    return d_gate_up


@_fake("bias_gelu")
def _(x, bias, act):
    return x.new_empty(x.shape)


@_fake("bias_gelu_backward")
def _(dy, x, bias, act):
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


@_fake("act_mul")
def _(gate, up, act):
    return gate.new_empty(gate.shape)


@_fake("act_mul_backward")
def _(dy, gate, up, act):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


@_fake("act_mul_packed")
def _(gate_up, act):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@_fake("act_mul_packed_backward")
def _(dy, gate_up, act):
    return gate_up.new_empty(gate_up.shape)


def _save_inputs(ctx, inputs, output):
    *tensors, ctx.act = inputs
    ctx.save_for_backward(*tensors)


@_gradient("bias_gelu", _save_inputs)
def _(ctx, dy):
    return *torch.ops.fftune.bias_gelu_backward(dy, *ctx.saved_tensors, ctx.act), None


@_gradient("act_mul", _save_inputs)
def _(ctx, dy):
    return *torch.ops.fftune.act_mul_backward(dy, *ctx.saved_tensors, ctx.act), None


@_gradient("act_mul_packed", _save_inputs)
def _(ctx, dy):
    return torch.ops.fftune.act_mul_packed_backward(dy, *ctx.saved_tensors, ctx.act), None


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none") -> Tensor:
    """gelu(x + bias), with erf or with approximate="tanh". x [..., h]; bias [h], of x's type or
    float32. -> [..., h]"""
    return torch.ops.fftune.bias_gelu(x, bias, "gelu-tanh" if approximate == "tanh" else "gelu")


def act_mul(gate: Tensor, up: Tensor | None = None, *, act: str = "silu") -> Tensor:
    """act(gate) * up. gate, up [..., h]; or without `up`, gate [..., 2h] that holds both. ->
    [..., h]. act: silu, gelu, gelu-tanh or relu."""
    if up is None:
        return torch.ops.fftune.act_mul_packed(gate, act)
    return torch.ops.fftune.act_mul(gate, up, act)


# rope

_ROPE_NUMBERS = ("base", "factor", "context", "low", "high", "beta-fast", "beta-slow", "scale")
_ROPE_USED = {"table": (7,), "base": (0, 1, 7), "llama3": (0, 1, 2, 3, 4, 7),
              "yarn": (0, 1, 2, 5, 6, 7)}
_ROPE_SIZES = ("s", "b", "heads", "dim", "kv-heads", "rotary", "positions", "q-row", "q-outer",
               "q-head", "k-row", "k-outer", "k-head", "layout", "rotation", "angles", "starts")
_ROPE = Form("rope", False, _ROPE_SIZES + _ROPE_NUMBERS)
_ROPE_BACKWARD = Form("rope", True, _ROPE_SIZES + _ROPE_NUMBERS)
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


def _run_rope(form, q, k, angles, starts, offsets, rotation, rotary, rule, numbers):
    packed = offsets is not None
    if q.dim() != (3 if packed else 4):
        raise Error(f"rope: q is {list(q.shape)}: give [batch, tokens, heads, features], or "
                    "[tokens, heads, features] with offsets")
    *lead, heads, dim = q.shape
    _expect("rope", k=(k, (*lead, k.shape[-2], dim)) if k is not None else (None, ()))
    _expect_dtype("rope", q.dtype, k)
    if rule not in _ROPE_USED:
        raise Error(f"rope: there is no rule '{rule}': give {', '.join(_ROPE_USED)}")
    if (rule == "table") != (angles is not None):
        raise Error("rope: angles are given with rule='table', and only with it")
    b, s = (offsets.numel() - 1, lead[0]) if packed else lead
    if angles is not None:
        _expect("rope", angles=(angles, (angles.shape[0], rotary or dim)))
        _expect_dtype("rope", torch.float32, angles)
    _expect("rope", starts=(starts, (b,)))
    results = [t.new_empty(t.shape) for t in (q, k) if t is not None]
    if not q.numel():
        return results
    q = _strided(q)
    if k is not None:
        k = _strided(k)
    inputs = [q] if k is None else [q, k]
    if angles is not None:
        inputs.append(ready(angles))
    inputs += [ready(t.to(torch.int32)) for t in (offsets, starts) if t is not None]
    used = _ROPE_USED[rule]
    values = (s, b, heads, dim, None if k is None else k.shape[-2], rotary or None,
              None if angles is None else angles.shape[0], *_stride_values(q, packed),
              *((None,) * 3 if k is None else _stride_values(k, packed)),
              "thd" if packed else "bshd", rotation, rule, None if starts is None else "yes",
              *(number if i in used else None for i, number in enumerate(numbers)))
    run(form, values, inputs + results, q.dtype)
    return results


@_define(f"rope(Tensor q, {_ROPE_ARGUMENTS}) -> Tensor")
def _(q, *arguments):
    return _run_rope(_ROPE, q, None, *arguments)[0]


@_define(f"rope_backward(Tensor dq, {_ROPE_ARGUMENTS}) -> Tensor")
def _(dq, *arguments):
    return _run_rope(_ROPE_BACKWARD, dq, None, *arguments)[0]


@_define(f"rope_qk(Tensor q, Tensor k, {_ROPE_ARGUMENTS}) -> (Tensor, Tensor)")
def _(q, k, *arguments):
    return tuple(_run_rope(_ROPE, q, k, *arguments))


@_define(f"rope_qk_backward(Tensor dq, Tensor dk, {_ROPE_ARGUMENTS}) -> (Tensor, Tensor)")
def _(dq, dk, *arguments):
    return tuple(_run_rope(_ROPE_BACKWARD, dq, dk, *arguments))


for _name in ("rope", "rope_backward"):
    @_fake(_name)
    def _(q, *arguments):
        return q.new_empty(q.shape)

for _name in ("rope_qk", "rope_qk_backward"):
    @_fake(_name)
    def _(q, k, *arguments):
        return q.new_empty(q.shape), k.new_empty(k.shape)


def _save_rope(ctx, inputs, output):
    *_, angles, starts, offsets, rotation, rotary, rule, numbers = inputs
    ctx.save_for_backward(angles, starts, offsets)
    ctx.others = rotation, rotary, rule, list(numbers)


@_gradient("rope", _save_rope)
def _(ctx, dq):
    return torch.ops.fftune.rope_backward(dq, *ctx.saved_tensors, *ctx.others), *(None,) * 7


@_gradient("rope_qk", _save_rope)
def _(ctx, dq, dk):
    return *torch.ops.fftune.rope_qk_backward(dq, dk, *ctx.saved_tensors, *ctx.others), \
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

    angles [positions, rotary] of float32: f of every token's position in its sequence. Without, f
    is position times a frequency, of rule "base" (the default), "llama3" or "yarn". starts [batch]:
    the position of each sequence's first token. rotary: features to rotate, 0 for all. rotation:
    "halves" (Llama) or "interleaved" (GPT-J). scale: of sines and cosines, 0 for the rule's own.
    """
    rule = rule or ("base" if angles is None else "table")
    arguments = (angles, starts, offsets, rotation, rotary, rule,
                 [base, factor, context, low, high, beta_fast, beta_slow, scale])
    if k is None:
        return torch.ops.fftune.rope(q, *arguments)
    return torch.ops.fftune.rope_qk(q, k, *arguments)


# ngram-block

_NGRAM = Form("ngram-block", False, ("b", "len", "vocab", "prefix", "beams", "ids", "lengths",
                                     "ngrams", "n", "padding"))


@_define("ngram_block(Tensor ids, Tensor(a!) logits, int n, int padding, Tensor? lengths, "
         "Tensor? prefix, Tensor? prefix_lengths, Tensor? ns) -> Tensor")
def _(ids, logits, n, padding, lengths, prefix, prefix_lengths, ns):
    b, vocab = logits.shape
    _expect("ngram-block", ids=(ids, (b, ids.shape[-1])), lengths=(lengths, (b,)), ns=(ns, (b,)))
    if ids.dtype not in (torch.int32, torch.int64):
        raise Error(f"ngram-block: ids are {ids.dtype}: give int32 or int64")
    invalid = torch.empty(b, dtype=torch.int32, device=logits.device)
    if not b or not ids.shape[-1]:
        return invalid.zero_()
    own = ready(logits)
    tensors = [ready(ids), own]
    beams = None
    if prefix is not None:
        groups = prefix.shape[0]
        if not groups or b % groups:
            raise Error(f"ngram-block: {b} rows cannot share {groups} prefixes evenly")
        _expect_dtype("ngram-block", ids.dtype, prefix)
        _expect("ngram-block", prefix_lengths=(prefix_lengths, (groups,)))
        if (lengths is None) != (prefix_lengths is None):
            raise Error("ngram-block: give lengths of the rows and of the prefixes, or of neither")
        beams = b // groups
        tensors.append(ready(prefix))
    tensors += [ready(t.to(torch.int32)) for t in (lengths, prefix_lengths, ns) if t is not None]
    run(_NGRAM, (b, ids.shape[-1], vocab, None if prefix is None else prefix.shape[-1], beams,
                 "i64" if ids.dtype == torch.int64 else "i32",
                 None if lengths is None else "own", None if ns is None else "own",
                 None if ns is not None else float(n), float(padding)),
        [*tensors, invalid], logits.dtype)
    if own is not logits:
        logits.copy_(own)
    return invalid


@_fake("ngram_block")
def _(ids, logits, *others):
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


def ngram_block(ids: Tensor, logits: Tensor, n: int | Tensor = 3, *, padding: int = -1,
                lengths: Tensor | None = None, prefix: Tensor | None = None,
                prefix_lengths: Tensor | None = None) -> Tensor:
    """Sets, in place, the logits to -inf of tokens that would repeat an n-gram of their row.

    ids [rows, length] of int32 or int64: what was generated; logits [rows, vocabulary]; n one for
    all rows or [rows]; padding: an id that never matches; lengths [rows]: how many ids of each row
    count. prefix [rows / beams, length]: ids in front of theirs that rows next to each other share,
    with prefix_lengths. -> int32 [rows]: how many ids of each row are no tokens.
    """
    ns = n if isinstance(n, Tensor) else None
    return torch.ops.fftune.ngram_block(ids, logits, 1 if ns is not None else n, padding, lengths,
                                        prefix, prefix_lengths, ns)

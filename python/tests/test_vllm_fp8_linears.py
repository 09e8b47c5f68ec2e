"""Linear layers of fp8 inside a stand-in for vLLM."""
import importlib
import logging

import pytest
import torch
from torch import nn

from quantised_layers import rounded_to_fp8

QUANTISATION = "vllm.model_executor.layers.quantization"
METHODS = {"Fp8LinearMethod": f"{QUANTISATION}.fp8",
           "CompressedTensorsW8A8Fp8": f"{QUANTISATION}.compressed_tensors.schemes.compressed_tensors_w8a8_fp8"}


@pytest.fixture
def methods(vllm, monkeypatch):
    monkeypatch.setenv("FFTUNE_VLLM", "fp8-linears")
    importlib.import_module("fftune.vllm").register()
    return {name: getattr(importlib.import_module(module), name) for name, module in METHODS.items()}


def a_layer(kind, n=160, k=272, dtype=torch.bfloat16):
    layer = nn.Module()
    codes, scale = rounded_to_fp8(torch.randn(n, k), 128 if kind == "block" else None)
    layer.weight = nn.Parameter(codes, requires_grad=False)
    name = "weight_scale_inv" if kind == "block" else "weight_scale"
    scale = torch.rand(n, 1) * 0.01 + 0.01 if kind == "rows" else scale
    setattr(layer, name, nn.Parameter(scale.float(), requires_grad=False))
    return layer


def error(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def loaded(method, layer, caplog):
    caplog.clear()
    with caplog.at_level(logging.INFO):
        method.process_weights_after_loading(layer)
    return caplog.text


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ("block", "tensor", "rows"))
def test_calls_run_by_linear_with_the_same_roundings(methods, caplog, name, kind):
    layer = a_layer(kind)
    method = methods[name](kind == "block", torch.bfloat16)
    words = loaded(method, layer, caplog)
    assert f"run by linear, with activations rounded by {'blocks of 128' if kind == 'block' else 'tokens'}" in words
    kernel, place = method.fp8_linear, layer.weight.data_ptr()
    bias = torch.randn(160, dtype=torch.bfloat16)
    apply = getattr(method, "apply", None) or method.apply_weights
    for shape in ((1, 272), (17, 272), (0, 272), (2, 3, 272), (300, 272)):
        kernel.calls = 0
        x = torch.randn(shape, dtype=torch.bfloat16)
        y = apply(layer, x, bias)
        assert kernel.calls == 0 and y.shape == (*shape[:-1], 160)
        if x.numel():
            assert error(y, type(kernel).apply_weights(kernel, layer, x, bias)) < 0.005
    assert layer.weight.data_ptr() == place  # vLLM's weight, in memory once
    if kind == "tensor":
        compiled = torch.compile(lambda x: apply(layer, x) * 2, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), apply(layer, x) * 2)


@pytest.mark.parametrize("change, words", (
    (dict(static=True), "activations rounded by a static scale"),
    (dict(e8m0=True), "scales of activations that are powers of two"),
    (dict(dtype=torch.float32), "activations of torch.float32"),
    (dict(group=64), "activations rounded in groups of (1, 64)"),
    (dict(scale=torch.ones(2, 4)), "scales of torch.float32 [2, 4], or in an order of the kernel's own"),
    (dict(order=True), "a weight in an order of the kernel's own")), ids=str)
def test_others_stay(methods, caplog, change, words):
    layer, block = a_layer("block"), True
    method = methods["Fp8LinearMethod"](block, change.get("dtype", torch.bfloat16), change.get("static", False))
    kernel = method.fp8_linear
    kernel.use_deep_gemm_e8m0 = change.get("e8m0", False)
    if "group" in change:
        keys = importlib.import_module(f"{QUANTISATION}.fp8_kernels")
        kernel.config.activation_quant_key = keys.key(False, 1, change["group"])
    if "scale" in change:
        layer.weight_scale_inv = nn.Parameter(change["scale"])
    if "order" in change:
        layer.weight.data = layer.weight.data.t().contiguous().t()
    assert f"linear layers by StandInKernel stay vLLM's: {words}" in loaded(method, layer, caplog)
    assert "apply_weights" not in kernel.__dict__


def test_a_layer_that_computes_something_else_stays_when_it_is_loaded_again_too(methods, caplog, monkeypatch):
    layer = a_layer("tensor")
    method = methods["Fp8LinearMethod"](False, torch.bfloat16)
    module = importlib.import_module("fftune.vllm.fp8_linears")
    run = module._run
    monkeypatch.setattr(module, "_run", lambda *given: run(*given) * 1.5)
    assert "results differ from vLLM's by 0.5" in loaded(method, layer, caplog)
    monkeypatch.setattr(module, "_run", run)
    layer._parameters = a_layer("tensor")._parameters
    loaded(method, layer, caplog)
    assert "apply_weights" not in vars(method.fp8_linear)


@pytest.mark.parametrize("kind", ("block", "tensor", "rows"))
def test_a_layer_that_is_loaded_again_reads_its_numbers_where_graphs_do(methods, caplog, kind):
    layer = a_layer(kind)
    method = methods["Fp8LinearMethod"](kind == "block", torch.bfloat16)
    loaded(method, layer, caplog)
    places = {name: tensor.data_ptr() for name, tensor in layer.named_buffers()}
    for _ in range(2):
        layer._parameters = a_layer(kind)._parameters
        for parameter in list(layer.parameters())[1:]:
            parameter.data *= 3
        loaded(method, layer, caplog)
        x = torch.randn(3, 272, dtype=torch.bfloat16)
        own = type(method.fp8_linear).apply_weights(method.fp8_linear, layer, x)
        assert error(method.apply(layer, x), own) < 0.005
        assert {name: tensor.data_ptr() for name, tensor in layer.named_buffers()} == places
    assert len(importlib.import_module("fftune.vllm.products")._kinds) == 1


def test_nobody_gets_it_unasked(vllm):
    importlib.import_module("fftune.vllm").register()
    for name, module in METHODS.items():
        cls = getattr(importlib.import_module(module), name)
        assert not hasattr(cls.process_weights_after_loading, "_fftune_original")

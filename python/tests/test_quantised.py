"""patch() of layers with weights of 4 and 8 bits, as GPTQModel, AutoAWQ, compressed-tensors and
transformers have them."""
import copy
import functools
import importlib
import io
import sys
import types

import pytest
import torch
from torch import nn

import fftune
from fftune.patching.decoding import head_of
from fftune.patching.quantised import packed_of
from quantised_layers import (Experts, TorchLinear, WQLinear_GEMM, compressed, forward_quantize, fp8_experts, fp8_linear,
                              gptq_of, of_file,
                              packed, product_of_fp8, quantise_by_compressed_tensors, quantise_by_gptq, quantise_to_fp8, rounded_to_fp8,
                              with_expert_modules)

pytest.importorskip("safetensors")

GROUPS = {"gptq_v1_sym_g128": 128, "gptq_v1_sym_g128_desc_act": 128, "gptq_v1_sym_g32": 32,
          "gptq_v1_sym_g32_desc_act": 32, "gptq_v1_sym_channel": 0, "gptq_v1_asym_g64": 64,
          "gptq_v1_asym_zero0": 64, "gptq_v2_asym_g64": 64, "awq_gemm_g128": 128, "awq_gemm_g32": 32,
          "ct_int4_sym_g128": 128, "ct_int4_sym_g64_g_idx": 64, "ct_int4_sym_channel_k100": 0,
          "ct_int4_asym_g128": 128, "ct_int4_asym_g32_n20": 32, "ct_int8_pack_sym_g128": 128,
          "ct_int8_channel": 0, "ct_mxfp4": 32, "ct_nvfp4": 16, "ct_fp8_channel": 0,
          "ct_fp8_tensor": 0, "ct_fp8_block": 128}
DEVICES = [("cpu", torch.float32), ("cpu", torch.bfloat16)] + [
    pytest.param("cuda", dtype, marks=pytest.mark.skipif(not torch.cuda.is_available(),
                                                         reason="no GPU"))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)]


def bits_of(module):
    return {name: (tensor.dtype, tensor.shape, tensor.contiguous().flatten().view(torch.uint8).tolist())
            for name, tensor in module.state_dict().items()}


def model_of(layer, dtype):
    """With a parameter that says the model's type."""
    model = nn.Sequential(layer)
    model.register_parameter("embedding", nn.Parameter(torch.zeros(1, dtype=dtype)))
    return model


def error(ours, theirs):
    return ((ours.double() - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("device, dtype", DEVICES)
@pytest.mark.parametrize("name", GROUPS)
def test_a_layer_of_a_package_computes_what_its_file_says(name, device, dtype):
    layer, expected = of_file(name)
    before = bits_of(layer)
    model = model_of(layer, dtype).to(device)
    report = fftune.patch(model)
    assert not report.left, str(report)
    ((where, words),) = report.replaced
    assert where == "0" and "by linear with a packed weight" in words
    assert packed_of(layer).group == GROUPS[name]
    x = torch.randn(3, 5, expected.shape[1], dtype=dtype, device=device)
    right = x.double() @ expected.double().to(device).T
    # No further than a dense weight in this type is.
    dense = error(x @ expected.to(device, dtype).T, right)
    assert error(model(x), right) <= 1.5 * dense + 4e-7
    many = x.repeat(7, 3, 1)
    assert error(model(many), right.repeat(7, 3, 1)) <= 1.5 * dense + 4e-7
    assert bits_of(layer) == before
    fftune.unpatch(model)
    assert bits_of(layer) == before and "forward" not in layer.__dict__
    assert not any(name.startswith("_fftune") for name in (*layer.__dict__, *layer._buffers))


def test_float32_scales_are_the_files_exactly():
    layer, expected = of_file("gptq_v1_asym_g64")
    fftune.patch(model_of(layer, torch.float32))
    assert torch.equal(packed_of(layer).dense(), expected)


@pytest.mark.parametrize("version", (1, 2))
def test_the_version_of_zero_points_is_found_by_what_the_layer_computes(version):
    layer = gptq_of(nn.Linear(128, 64), group=64, version=version)
    layer.qzero_format = None
    del layer.qzero_format
    type_of = type("Unnamed", (TorchLinear,), {"qzero_format": property(lambda self: lambda: None)})
    layer.__class__ = type_of
    x = torch.randn(4, 128)
    before = layer(x)
    report = fftune.patch(layer)
    assert report.replaced and error(layer(x), before.double()) < 1e-5


def test_a_layer_with_a_bias_and_gradients_in_front():
    layer = gptq_of(nn.Linear(128, 64), group=32, desc_act=True)
    x = torch.randn(4, 128, requires_grad=True)
    before = layer(x)
    before.sum().backward()
    right, x.grad = x.grad, None
    assert fftune.patch(layer).replaced[0][1].endswith("in the order of its groups)")
    ours = layer(x)
    ours.sum().backward()
    assert error(ours, before.double()) < 1e-5 and error(x.grad, right.double()) < 1e-5


def left(module):
    report = fftune.patch(module)
    assert not report.replaced
    return report.left[0][1] if report.left else ""


def test_layers_that_are_no_such_are_left_alone_with_the_reason():
    layer = gptq_of(nn.Linear(128, 64), group=32)
    layer.qweight = layer.qweight.flip(0)  # a kernel's order, say
    layer.dense = gptq_of(nn.Linear(128, 64), group=32).dense
    assert "does not compute what its tensors say" in left(layer)
    layer = gptq_of(nn.Linear(128, 64), group=32)
    layer.bits = 8
    assert left(layer) == "its weights have 8 bits, for which there is no kernel"
    layer = gptq_of(nn.Linear(96, 64), group=24)
    assert "groups that kernels have are multiples of 32" in left(layer)
    layer = gptq_of(nn.Linear(128, 64), group=32)
    layer.scales[1, 2] = float("inf")
    assert left(layer) == "its scales are not finite"
    layer = gptq_of(nn.Linear(128, 64), group=32)
    del layer.qzeros
    assert left(layer) == "TorchLinear has codes in a layout for which there is no kernel"
    layer = gptq_of(nn.Linear(128, 64), group=32)
    layer.qweight = layer.qweight[:8]
    assert "no layout of 64 outputs and 128 inputs" in left(layer)
    layer = gptq_of(nn.Linear(128, 64), group=32)
    layer.forward = lambda x: x
    assert left(layer) == "its forward was replaced already"
    layer = gptq_of(nn.Linear(128, 64), group=32)
    layer.adapter = object()
    assert left(layer) == "it has an adapter"
    model = model_of(gptq_of(nn.Linear(128, 64), group=32), torch.float16)
    model[0].scales = model[0].scales.bfloat16() * 1e-8
    model[0].version = 1
    model.embedding.data = model.embedding.data.bfloat16()
    fftune.patch(model)  # bfloat16 has room for them


@pytest.mark.parametrize("change, reason", (
    ({"weight_scale": torch.rand(64, 3)}, "128 inputs in groups of 32 have 4 scales, not 3"),
    ({"weight_scale": torch.rand(64, 1)}, "128 inputs in groups of 32 have 4 scales, not 1"),
    ({"weight_scale": torch.rand(64, 4, 1)}, "weight_scale is [64, 4, 1], not [64, groups]"),
    ({"weight_scale": None}, "it has no weight_scale")))
def test_scales_that_are_not_those_of_the_groups_are_named(change, reason):
    tensors = {name: t for name, t in {**tensors_of(), **change}.items() if t is not None}
    assert left(compressed(tensors, symmetric=True, group_size=32)) == reason


@pytest.mark.parametrize("name", ("gptq_v1_sym_g32", "ct_int4_asym_g128", "ct_int8_channel", "ct_fp8_channel",
                                  "ct_nvfp4", "ct_mxfp4"))
def test_a_patched_layer_follows_its_model_to_other_types(name):
    layer, expected = of_file(name)
    model = model_of(layer, torch.float32)
    assert fftune.patch(model).replaced
    x = torch.randn(5, expected.shape[1])
    name = f"0.{layer._fftune[0].name}"
    before = model.state_dict()[name].view(torch.uint8)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.float32):
        y = model.to(dtype)(x.to(dtype))
        assert y.dtype == dtype and error(y, x.double() @ expected.double().T) < 0.02
        assert torch.equal(model.state_dict()[name].view(torch.uint8), before)


def tensors_of(n=64, k=128, group=32):
    return {"weight_packed": torch.randint(-2**31, 2**31, (n, k // 8), dtype=torch.int32),
            "weight_scale": torch.rand(n, k // group) + 0.1, "weight_shape": torch.tensor([n, k])}


def test_compressed_layers_without_a_certain_format_are_left_alone():
    tensors = tensors_of()
    if "compressed_tensors" not in sys.modules:
        layer = compressed(tensors, symmetric=True, group_size=32, activations=object())
        assert "compressed-tensors has no forward_quantize" in left(layer)
    layer = compressed(tensors, symmetric=True, group_size=32)
    layer.quantization_scheme.output_activations = object()
    assert "its results are quantised" in left(layer)
    layer = compressed(tensors, symmetric=False, group_size=32)
    assert "there is no weight_zero_point" in left(layer)
    layer = compressed(tensors, symmetric=True, group_size=32)
    layer.quantization_status = "frozen"
    assert "without a scheme" in left(layer)
    layer = compressed(tensors, symmetric=True, group_size=32, bits=3)
    assert left(layer) == "its weights are int3, for which there is no kernel"
    layer = compressed(tensors, symmetric=False, group_size=32, bits=8)
    assert left(layer) == "its weights are int8 with zero points, for which there is no kernel"
    layer = compressed(tensors, symmetric=True, group_size=32, bits=8)
    assert left(layer) == "weight_packed is [64, 16], not [64, 32]"


@pytest.fixture
def compressed_tensors(monkeypatch):
    """The function of the package that rounds activations, where the package is."""
    name = "compressed_tensors"
    for part in ("", ".quantization", ".lifecycle", ".forward"):
        name += part
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(forward_quantize=forward_quantize))


ROUNDINGS = {"ct_fp8_channel": ("float", "token", None), "ct_fp8_tensor": ("float", "tensor", None),
             "ct_fp8_block": ("float", "group", 128), "ct_int8_channel": ("int", "token", None)}


@pytest.mark.parametrize("device, dtype", DEVICES)
@pytest.mark.parametrize("name", ROUNDINGS)
def test_activations_are_rounded_as_compressed_tensors_does_it(name, device, dtype, compressed_tensors):
    layer, expected = of_file(name)
    kind, strategy, size = ROUNDINGS[name]
    args = types.SimpleNamespace(type=kind, strategy=strategy, group_size=size, dynamic=strategy != "tensor")
    layer.quantization_scheme.input_activations = args
    if not args.dynamic:
        layer.input_scale = nn.Parameter(torch.tensor([0.01]))
    model = model_of(layer, dtype).to(device)
    before = bits_of(layer)
    assert "rounded activations" in fftune.patch(model).replaced[0][1]
    x = torch.randn(3, 5, expected.shape[1], dtype=dtype, device=device)
    rounded = forward_quantize(types.SimpleNamespace(
        quantization_status="compressed", input_scale=getattr(layer, "input_scale", None)), x, "input", args)
    assert error(rounded, x.double()) > 1e-3
    right = rounded.double() @ expected.double().to(device).T
    assert error(model(x), right) <= 1.5 * error(rounded @ expected.to(device, dtype).T, right) + 4e-7
    layer.quantization_enabled = False
    assert error(model(x), x.double() @ expected.double().to(device).T) < 1e-2 * error(rounded, x.double()) + 4e-3
    assert bits_of(layer) == before
    fftune.unpatch(model)
    assert bits_of(layer) == before and layer.quantization_scheme.input_activations is args


def test_the_forward_that_compressed_tensors_gives_its_layers_is_no_other_forward():
    # It has the name and the module of Linear.forward, by functools.wraps.
    of_package = {"__name__": "compressed_tensors.quantization.lifecycle.forward", "functools": functools}
    exec("def wrapped(of):\n    @functools.wraps(of)\n    def forward(self, x):\n        return of(self, x)\n"
         "    return forward", of_package)
    for globals_of, is_known in ((of_package, True), ({**of_package, "__name__": "peft.layer"}, False)):
        layer, _ = of_file("ct_int4_sym_g128")
        own = types.FunctionType(of_package["wrapped"].__code__, globals_of)(nn.Linear.forward)
        layer.forward = types.MethodType(own, layer)
        report = fftune.patch(layer)
        assert bool(report.replaced) == is_known, str(report)
        fftune.unpatch(layer)
        assert layer.forward.__func__ is own


def test_rounded_layers_are_merged_with_no_others(compressed_tensors):
    """Products of several layers together, as in MLPs, would skip the rounding."""
    torch.manual_seed(0)
    names = ("gate_proj", "up_proj", "down_proj")

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            for name in names:
                layer, _ = of_file("ct_int8_channel")
                layer.quantization_scheme.input_activations = types.SimpleNamespace(
                    type="int", strategy="token", group_size=None, dynamic=True)
                setattr(self, name, layer)
            self.act_fn = nn.SiLU()

        def forward(self, x):
            hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
            return self.down_proj(hidden.repeat(1, 4))

    mlp = MLP()
    report = fftune.patch(model_of(mlp, torch.float32))
    assert len(report.replaced) == 3 and all("rounded" in words for _, words in report.replaced), str(report)


def test_layers_of_bitsandbytes_are_left_alone():
    for name, reason in (("Linear8bitLt", "rounds activations to int8"), ("Linear4bit", "no kernel")):
        layer = type(name, (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})(64, 32, bias=False)
        layer.weight = nn.Parameter(torch.zeros(32, 64, dtype=torch.int8), requires_grad=False)
        assert reason in left(layer)


@pytest.fixture
def fp8_kernels(monkeypatch):
    """transformers' kernels for FP8Linear, which are on its hub."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    monkeypatch.setattr(finegrained, "load_finegrained_fp8_kernel",
                        lambda: types.SimpleNamespace(matmul=product_of_fp8))
    monkeypatch.setattr(importlib.import_module("transformers.integrations.compressed_tensors"),
                        "_scaled_mm_rowwise", product_of_rounded_tokens)


def product_of_rounded_tokens(x, w, scale_a, scale_b, out_dtype, bias=None):
    y = (x.double() * scale_a) @ (w.double() * scale_b)
    return (y if bias is None else y + bias).to(out_dtype)


def fp8_of_rows(n, k, rows):
    """The layer for compressed-tensors' files, with one scale or one for each row."""
    kind = pytest.importorskip("transformers.integrations.compressed_tensors").CompressedTensorsFP8Linear
    layer, (codes, _) = kind(k, n), rounded_to_fp8(torch.randn(n, k), None)
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.weight_scale = nn.Parameter((torch.rand(1, rows) + 0.5) / 448)  # float16 holds what 1e4 gives
    return layer


def fp8_of(n, k, block=128, **options):
    torch.manual_seed(3)
    return fp8_linear(*rounded_to_fp8(torch.randn(n, k), block), **options)


FP8_LAYERS = {"file": lambda: of_file("fp8_block_deepseek_v3")[0],
              "ragged": lambda: fp8_of(200, 330, bias=nn.Parameter(torch.randn(200))),
              "rows": lambda: fp8_of_rows(96, 200, 96), "rows of one scale": lambda: fp8_of_rows(96, 200, 1),
              "tensor": lambda: fp8_of(96, 272, None, block_size=None),
              "one block": lambda: fp8_of(64, 64, None, block_size=(64, 64))}


@pytest.mark.parametrize("device, dtype", DEVICES)
@pytest.mark.parametrize("kind", FP8_LAYERS)
def test_fp8_linear_rounds_activations_as_the_layer_itself(kind, device, dtype, fp8_kernels):
    layer = FP8_LAYERS[kind]().to(device)
    x = torch.randn(3, 5, layer.weight.shape[1], dtype=dtype, device=device)
    x[0, 0] = 0
    x[0, 1, 3], x[0, 2, 3], x[0, 3, 3] = float("nan"), float("inf"), 1e4
    if layer.bias is not None:
        layer.bias.data = layer.bias.data.to(dtype)
    before, theirs = bits_of(layer), layer(x)
    ((_, words),) = fftune.patch(layer).replaced
    assert words.endswith("by blocks of 128" if kind in ("file", "ragged") else "by token")
    ours = layer(x)
    finite = theirs.isfinite()
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isfinite(), finite)
    assert ours.dtype == dtype and finite.sum() > ours.numel() * 0.8
    rounding = torch.finfo(dtype).eps
    assert error(ours[finite], theirs[finite].double()) <= 2 * rounding + 4e-7
    assert layer(x[:0]).shape == (0, 5, len(layer.weight))
    assert bits_of(layer) == before
    fftune.unpatch(layer)
    assert bits_of(layer) == before and "forward" not in layer.__dict__


@pytest.mark.parametrize("device, dtype", DEVICES)
@pytest.mark.parametrize("block, bias", ((64, True), (128, False)))
def test_fp8_linear_with_a_static_scale(block, bias, device, dtype, fp8_kernels):
    layer = fp8_of(200, 384, block, block_size=(block, block), scheme="static",
                   bias=nn.Parameter(torch.randn(200)) if bias else None)
    layer.activation_scale = nn.Parameter(torch.tensor(0.004))
    model = model_of(layer, dtype).to(device)
    if bias:
        layer.bias.data = layer.bias.data.to(dtype)
    x = torch.randn(3, 5, 384, dtype=dtype, device=device)
    x[0, 0, 3], x[0, 1, 3], x[0, 2, 3] = float("nan"), float("inf"), 1e4
    before, theirs = bits_of(layer), layer(x)
    ((_, words),) = fftune.patch(model).replaced
    assert words.startswith("FP8Linear by linear with a packed weight") and words.endswith("rounded activations)")
    ours = model(x)
    finite = theirs.isfinite()
    assert torch.equal(ours.isnan(), theirs.isnan()) and ours.dtype == dtype and finite.sum() > ours.numel() * 0.8
    assert error(ours[finite], theirs[finite].double()) <= 2 * torch.finfo(dtype).eps + 4e-7
    assert model(x[:0]).shape == (0, 5, 200) and bits_of(layer) == before
    wanted = torch.randn(4, 384, dtype=dtype, device=device, requires_grad=True)
    y = layer(wanted)
    y.float().square().sum().backward()
    ours, wanted.grad = wanted.grad, None
    fftune.unpatch(model)
    scale = layer.weight_scale_inv.double().repeat_interleave(block, 0)[:200].repeat_interleave(block, 1)
    assert error(ours, 2 * y.double() @ (layer.weight.double() * scale)) <= 4 * torch.finfo(dtype).eps
    assert bits_of(layer) == before and "forward" not in layer.__dict__
    if hasattr(sys.modules[type(layer).__module__], "FP8LinearFunction"):  # older layers have no backward pass
        layer(wanted).float().square().sum().backward()
        assert error(ours, wanted.grad.double()) <= 16 * torch.finfo(dtype).eps


def test_fp8_layers_that_round_otherwise_are_left_alone_with_the_reason():
    layer, _ = of_file("fp8_block_deepseek_v3")
    layer.weight_scale_inv.data = layer.weight_scale_inv.data[:, :1]
    assert "weight_scale_inv is" in left(layer) and "of blocks of 128 by 128" in left(layer)
    layer, _ = of_file("fp8_block_deepseek_v3")
    layer.weight_scale_inv.data[0, 0] = float("nan")
    assert left(layer) == "its scales are not finite"
    for name in ("fp8_block_deepseek_v3", "ct_fp8_channel"):
        layer, _ = of_file(name)
        layer.weight.data.view(torch.uint8)[3, 5] = 0x7F
        assert left(layer) == "its weight has NaN"
    layer, _ = of_file("ct_fp8_block")
    layer.weight_scale.data = layer.weight_scale.data[:, :1]
    assert "not of blocks of 128 by 128" in left(layer)
    assert "its blocks are 64 by 64" in left(fp8_of(128, 128, 64, block_size=(64, 64)))
    no_number = fp8_of(128, 256, scheme="static")
    no_number.activation_scale = nn.Parameter(torch.tensor(0.0))
    assert left(no_number) == "its activation_scale is no positive number"
    of_one_scale = "its weight has one scale: kernels then leave activation_scale unread, or read it"
    assert left(fp8_of(96, 272, None, block_size=None, scheme="static")) == of_one_scale
    assert left(fp8_of(64, 64, None, block_size=(64, 64), scheme="static")) == of_one_scale
    assert left(of_file("fp8_block_ue8m0")[0]) == (
        "its scales are float8_e8m0fnu, for which kernels round activations in several ways")
    of_one_scale = fp8_of(96, 272, None, block_size=None)
    of_one_scale.weight_scale_inv.data = torch.ones(2)
    assert left(of_one_scale) == "weight_scale_inv is [2], not one scale, or one for each row"
    assert "weight_scale is [1, 95], not one scale, or one" in left(fp8_of_rows(96, 200, 95))


def test_calls_that_the_fp8_product_does_not_serve_are_the_layers_own(fp8_kernels):
    layer = fp8_of(200, 256)
    x = torch.randn(4, 256)
    own, ours = copy.deepcopy(layer), layer
    assert fftune.patch(ours).replaced
    copied = copy.deepcopy(ours)
    assert torch.equal(copied(x), ours(x))
    for module in (own, ours):
        wanted = x.clone().requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            assert module(wanted).requires_grad
    assert torch.equal(ours(x.double()), own(x.double()))
    bias = nn.Parameter(torch.randn(200))
    own.bias = ours.bias = bias
    gradients = []
    for module in (own, ours):  # each adds it to its result
        y = module(x.bfloat16())
        assert y.dtype == torch.bfloat16
        gradients.append(torch.autograd.grad(y.float().square().sum(), bias)[0])
    assert error(gradients[1], gradients[0].double()) < 0.01
    own.bias = ours.bias = None
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    assert "forward" not in torch.load(file, weights_only=False).__dict__
    # Its codes are numbers from here on, to the layer itself too.
    assert torch.equal(ours.to(torch.bfloat16)(x.bfloat16()), own.to(torch.bfloat16)(x.bfloat16()))


def with_hook(*layers):
    """A model that compressed-tensors makes dense in its first call."""
    model = nn.Sequential(*layers)

    def hook(model, args):
        made.append([m for m in model.modules() if hasattr(m, "quantization_scheme")])

    made = []
    model.ct_decompress_hook = model.register_forward_pre_hook(hook)
    return model, made


def test_compressed_tensors_does_not_make_replaced_layers_dense():
    layer = compressed(tensors_of(), symmetric=True, group_size=32)
    model, made = with_hook(layer)
    assert fftune.patch(model).replaced
    model(torch.randn(2, 128))
    assert made == [] and not hasattr(layer, "quantization_scheme")
    fftune.unpatch(model)
    assert layer.quantization_status == "compressed" and len(model._forward_pre_hooks) == 1
    other = compressed(tensors_of(128, 64), symmetric=True, group_size=32, bits=3)
    model, made = with_hook(layer, other)
    report = fftune.patch(model)
    assert not report.replaced and len(report.left) == 2
    assert "makes all dense together" in report.left[1][1]
    assert len(model._forward_pre_hooks) == 1 and hasattr(layer, "quantization_scheme")


def test_a_state_dict_that_is_loaded_ends_the_replacement():
    layer, other = (gptq_of(nn.Linear(128, 64), group=32) for _ in range(2))
    x = torch.randn(4, 128)
    right = other(x)
    fftune.patch(layer)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), right) and "forward" not in layer.__dict__


def test_a_copy_of_a_patched_layer_is_one_of_its_own():
    layer = gptq_of(nn.Linear(128, 64), group=32)
    x = torch.randn(4, 128)
    fftune.patch(layer)
    right, saved = layer(x), bits_of(layer)
    other = copy.deepcopy(layer)
    fftune.unpatch(layer)
    assert torch.equal(other(x), right) and bits_of(other) == saved
    fftune.unpatch(other)
    assert bits_of(other) == saved


def test_types_without_kernels_and_autocast():
    layer = gptq_of(nn.Linear(128, 64), group=32)
    x = torch.randn(4, 128)
    before = layer(x)
    fftune.patch(layer)
    assert error(layer(x.double()), before.double()) < 1e-5
    assert layer(x.double()).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16 and error(y, before.double()) < 0.02


def test_torch_compile_keeps_it_whole():
    torch._dynamo.reset()  # whatever other tests have compiled
    layer = gptq_of(nn.Linear(128, 64), group=32, desc_act=True)
    x = torch.randn(4, 128)
    fftune.patch(layer)
    for module in (layer, fp8_of(64, 128)):
        assert fftune.patch(module).replaced
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), module(x))


def test_a_forward_of_a_subclass_is_not_replaced():
    layer = compressed(tensors_of(), symmetric=True, group_size=32)
    layer.__class__ = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})
    assert left(layer) == "Doubled has a forward of its own"


def test_padding_of_the_last_word_is_given_back():
    q = torch.randint(0, 16, (100, 24))
    scales = torch.rand(1, 24) + 0.1
    layer = TorchLinear(packed(nn.functional.pad(q, (0, 0, 0, 4)), 0), packed(torch.full((1, 24), 7), 1),
                        scales, torch.zeros(100, dtype=torch.int32), group_size=-1, desc_act=False)
    before = bits_of(layer)
    x = torch.randn(3, 100)
    right = layer(x)
    assert fftune.patch(layer).replaced
    assert error(layer(x), right.double()) < 1e-5 and bits_of(layer) == before
    fftune.unpatch(layer)
    layer.qweight[-1] |= 1 << 30  # a code of padding
    assert left(layer) == "qweight has bits behind its last input"


def test_awq_with_a_bias_and_a_row_as_the_group():
    q, z = torch.randint(0, 16, (96, 16)), torch.randint(0, 16, (1, 16))

    def words(codes):
        places = torch.empty_like(codes)
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            places[:, place::8] = codes[:, output::8]
        return packed(places, 1)

    layer = WQLinear_GEMM(words(q), words(z), torch.rand(1, 16) + 0.1, torch.randn(16), group_size=-1)
    x = torch.randn(3, 96)
    right = layer(x)
    assert fftune.patch(layer).replaced and packed_of(layer).group == 0
    assert error(layer(x), right.double()) < 1e-5


# whole models

SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, eos_token_id=None)


def dense_llama(kind="Llama", dtype=torch.float32, device="cpu", **sizes):
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1)
    return model.to(device, dtype).eval()


def llama(kind="Llama", dtype=torch.float32, device="cpu", **options):
    return quantise_by_gptq(dense_llama(kind, dtype, device), **options)


@pytest.mark.parametrize("device, dtype", DEVICES)
@pytest.mark.parametrize("kind, desc_act", (("Llama", False), ("Llama", True), ("Qwen3", False),
                                            ("Qwen2", False), ("Phi", False)))
def test_a_model_with_quantised_layers(kind, desc_act, device, dtype):
    model = llama(kind, dtype, device, group=32, desc_act=desc_act)
    ids = torch.randint(3, 96, (2, 9), device=device)
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        right, before = wide(ids).logits, error(model(ids).logits, wide(ids).logits)
    saved = bits_of(model)
    report = str(fftune.patch(model))
    assert "self_attn.q_proj" in report and "by linear with a packed weight" in report
    if kind != "Phi":
        assert "projections of" in report.split("left alone")[0], report
        assert ("by ffn with packed weights (silu)" in report) is not desc_act, report
    with torch.no_grad():
        assert error(model(ids).logits, right) <= 1.5 * before + 1e-5
        for _ in range(2):  # with a cache, in steps of one token
            step = model(ids, use_cache=True)
            last = model(ids[:, -1:], past_key_values=step.past_key_values).logits
        wide_step = wide(ids, use_cache=True)
        assert error(last, wide(ids[:, -1:], past_key_values=wide_step.past_key_values).logits) \
            <= 2 * before + 1e-5
    assert bits_of(model) == saved
    fftune.unpatch(model)
    assert bits_of(model) == saved


@pytest.mark.parametrize("device, dtype", DEVICES)
@pytest.mark.parametrize("kind, fits_the_head", (("Llama", False), ("Llama", True), ("Qwen2", False),
                                                 ("Qwen3", False)))
def test_all_layers_of_a_quantised_model_by_one_op(kind, fits_the_head, device, dtype):
    model = llama(kind, dtype, device, group=32, skip=() if fits_the_head else ("lm_head",))
    ids = torch.randint(3, 96, (2, 5), device=device)
    narrow, wide, saved = copy.deepcopy(model), copy.deepcopy(model).double(), bits_of(model)
    report = str(fftune.patch(model, whole_layers=True))
    assert "2 layers of" in report and "by layer in calls" in report, report
    given = fftune.generate(model, ids, 8)[:, ids.shape[1]:]
    assert fits_the_head == isinstance(head_of(model).weight, fftune.ops.PackedWeight)
    with torch.no_grad():
        logits, rounded = (of(torch.cat((ids, given[:, :-1]), 1)).logits[:, ids.shape[1] - 1:]
                           for of in (wide, narrow))
    # The best id, or one that the roundings of the model in this type do not tell from it.
    chosen = logits.gather(-1, given[..., None])[..., 0]
    assert (logits.amax(-1) - chosen <= 4 * (rounded - logits).abs().max() + 1e-4).all()
    assert bits_of(model) == saved
    fftune.unpatch(model)
    assert bits_of(model) == saved
    assert not [name for name, _ in model.named_buffers() if "_fftune" in name]


@pytest.mark.parametrize("whole", (False, True))
@pytest.mark.parametrize("kind, skip", (("Qwen3", ("lm_head", "k_proj")), ("Llama", ()), ("Qwen2", ("lm_head",))))
def test_a_model_of_compressed_layers(kind, skip, whole):
    """They are of class Linear, and have no weight."""
    model, dense = quantise_by_compressed_tensors(dense_llama(kind), skip)
    ids, saved = torch.randint(3, 96, (2, 9)), bits_of(model)
    report = str(fftune.patch(model, whole_layers=whole))
    assert "Linear by linear with a packed weight (compressed-tensors, groups of 32)" in report, report
    assert ("2 layers of" in report) == (whole and not skip[1:]), report
    with torch.no_grad():
        for tokens in (ids, ids[:1, :1]):
            assert error(model(tokens).logits, dense(tokens).logits.double()) < 1e-5
    given = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert torch.equal(given, dense.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None))
    losses = [each.train()(ids, labels=ids).loss for each in (model, dense)]
    assert error(*losses) < 1e-5
    assert bits_of(model) == saved
    fftune.unpatch(model)
    assert bits_of(model) == saved


def counts_of(run):
    with torch.profiler.profile() as profile:
        run()
    return {event.key.removeprefix("fftune::"): event.count for event in profile.key_averages()
            if event.key.startswith("fftune::")}


def of_roundings(model, ids):
    """How far logits are apart that differ by roundings of each layer's results. Another rounding before that
    of the activations may lead to their next fp8 number, and then all that follow."""
    own = copy.deepcopy(model)
    size = 2 * torch.finfo(own.dtype).eps
    for layer in own.model.layers:
        for part in (layer.self_attn, layer.mlp):
            part.register_forward_hook(lambda module, given, y: (
                (y[0] * (1 + size * torch.randn_like(y[0])), *y[1:]) if isinstance(y, tuple)
                else y * (1 + size * torch.randn_like(y))))
    right = model(ids).logits.double()
    return max(error(own(ids).logits, right) for _ in range(3))


# Heads of q, k and v that are whole blocks of 128 rows.
WHOLE_BLOCKS = dict(hidden_size=256, intermediate_size=192, head_dim=64)


@pytest.mark.parametrize("device, dtype", DEVICES)
@pytest.mark.parametrize("kind, sizes, qkv", (("Qwen3", WHOLE_BLOCKS, 2), ("Qwen2", WHOLE_BLOCKS, 2), ("Qwen3", dict(head_dim=48), 0)))
def test_a_model_of_fp8_layers(kind, sizes, qkv, device, dtype, fp8_kernels):
    model = quantise_to_fp8(dense_llama(kind, dtype, device, **sizes))
    ids, saved = torch.randint(3, 96, (2, 9), device=device), bits_of(model)
    with torch.no_grad():
        before, near = model(ids).logits, of_roundings(model, ids)
        report = str(fftune.patch(model, whole_layers=True))
        assert "13 more: FP8Linear by linear of fp8" in report, report
        assert "MLP by ffn of fp8, with rounded activations (silu)" in report, report
        assert ("2 layers of" in report) == bool(qkv), report
        assert error(model(ids).logits, before.double()) <= 3 * max(near, 5e-3)
        counts = counts_of(lambda: model(ids))
        assert {name: count for name, count in counts.items() if "fp8" in name} == {
            "ffn_fp8_block": 2, "linear_fp8_block": 2 if qkv else 8, **({"qkv_fp8_block": qkv} if qkv else {})}
        few = []
        assert counts_of(lambda: few.append(over_a_cache(model, ids))).get("layer", 0) == bool(qkv)
        assert error(few[0], before.double()) <= 3 * max(near, 5e-3)
    assert bits_of(model) == saved
    fftune.unpatch(model)
    assert bits_of(model) == saved
    assert not any("_fftune" in name for name, _ in model.named_buffers())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def over_a_cache(model, ids):
    """Logits of few tokens, which whole layers serve over a static cache."""
    from transformers import StaticCache
    return model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=16)).logits


@torch.no_grad()
def test_whole_layers_of_fp8_run_while_their_tensors_are_merged_and_e4m3(fp8_kernels):
    model = quantise_to_fp8(dense_llama("Qwen3", **WHOLE_BLOCKS))
    x = torch.randint(3, 96, (1, 5))
    assert "2 layers of Qwen3Model by layer" in str(fftune.patch(model, whole_layers=True))

    def runs_whole():
        return counts_of(lambda: over_a_cache(model, x)).get("layer", 0) == 1

    assert runs_whole()
    right = over_a_cache(model, x)
    key = model.model.layers[1].self_attn.k_proj
    key.weight = nn.Parameter(key.weight.clone(), requires_grad=False)  # in other memory
    model(x)  # merges them again
    assert runs_whole() and torch.equal(over_a_cache(model, x), right)
    key.weight = nn.Parameter(torch.zeros_like(key.weight), requires_grad=False)
    assert not runs_whole()
    assert error(over_a_cache(model, x), right.double()) > 1e-2 and runs_whole()


@torch.no_grad()
def test_whole_layers_of_compressed_fp8_round_by_token(fp8_kernels):
    model = dense_llama("Qwen2", torch.bfloat16)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if type(child) is nn.Linear:
                    own = fp8_of_rows(child.out_features, child.in_features, child.out_features)
                    scale = child.weight.float().abs().amax(1) / 448
                    own.weight.data = (child.weight.float() / scale[:, None]).to(torch.float8_e4m3fn)
                    own.weight_scale.data, own.bias = scale[None], child.bias
                    setattr(part, name, own)
    x, given = torch.randint(3, 96, (1, 5)), []
    before, near = model(x).logits, of_roundings(model, x)
    assert "2 layers of Qwen2Model by layer" in str(fftune.patch(model, whole_layers=True))
    assert counts_of(lambda: given.append(over_a_cache(model, x)))["layer"] == 1
    assert error(given[0], before.double()) <= 3 * max(near, 5e-3)


@pytest.mark.parametrize("attention", (False, True))
@torch.no_grad()
def test_whole_layers_of_fp8_experts(attention, fp8_kernels):
    model, given = fp8_mixture(hidden_size=256, head_dim=64), []
    if attention:
        quantise_to_fp8(model)
    saved, x = bits_of(model), torch.randint(3, 96, (1, 5))
    before, near = model(x).logits, of_roundings(model, x)
    assert "layers of Qwen3MoeModel by layer" in (report := str(fftune.patch(model, whole_layers=True))), report
    assert counts_of(lambda: given.append(over_a_cache(model, x)))["layer"] == 1
    assert error(given[0], before.double()) <= 3 * max(near, 5e-3)
    experts = model.model.layers[0].mlp.experts
    experts.down_proj_scale_inv.data.mul_(2)  # in place
    assert error(over_a_cache(model, x), model(x).logits.double()) <= 3 * max(near, 5e-3)
    experts.down_proj_scale_inv.data.mul_(0.5)
    fftune.unpatch(model)
    assert bits_of(model) == saved


def test_whole_layers_of_fp8_are_left_alone_with_the_reason(fp8_kernels):
    def reasons(change):
        model = quantise_to_fp8(dense_llama("Qwen3", **WHOLE_BLOCKS))
        change(model.model.layers[0])
        return str(fftune.patch(model, whole_layers=True))

    def dense(layer):
        layer.self_attn.o_proj = nn.Linear(layer.self_attn.o_proj.in_features, 256, bias=False)

    def narrow(layer):
        down = layer.mlp.down_proj
        down.weight_scale_inv.data = down.weight_scale_inv.data.bfloat16()

    assert "layers: some of its linear layers round activations to fp8, and some do not" in reasons(dense)
    assert "layers: the scales of its linear layers are not float32" in reasons(narrow)


@torch.no_grad()
def test_merged_projections_of_fp8_follow_their_layers(fp8_kernels, tmp_path):
    """The layers' tensors are views of the merged ones: what changes them changes those."""
    model = quantise_to_fp8(dense_llama("Qwen3", **WHOLE_BLOCKS))
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.self_attn.k_proj.weight_scale_inv.mul_(3)
        layer.self_attn.v_proj.weight.data = layer.self_attn.v_proj.weight.data.flip(0)
    x = torch.randint(3, 96, (1, 5))
    changed = other(x).logits
    assert error(model(x).logits, changed.double()) > 0.01
    fftune.patch(model)
    assert counts_of(lambda: model(x))["qkv_fp8_block"] == 2
    copied = copy.deepcopy(model)
    right = model(x).logits
    model.load_state_dict(other.state_dict())  # in place
    assert error(model(x).logits, changed.double()) < 1e-3
    assert torch.equal(copied(x).logits, right)
    for layer in copied.model.layers:  # by tensors in other memory
        for name in ("k_proj", "v_proj"):
            own = getattr(layer.self_attn, name)
            own.load_state_dict({key: t.clone() for key, t in own_state(other, layer, name).items()}, assign=True)
    assert error(copied(x).logits, changed.double()) < 1e-3
    assert counts_of(lambda: copied(x))["qkv_fp8_block"] == 2
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file
    for name, saved in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(saved.view(torch.uint8), model.state_dict()[name].view(torch.uint8)), name


def own_state(model, layer, name):
    return getattr(model.model.layers[layer.self_attn.layer_idx].self_attn, name).state_dict()


def gptq_mixture(**options):
    import transformers

    config = transformers.Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2,
                                         moe_intermediate_size=64)
    torch.manual_seed(1)
    model = with_expert_modules(transformers.AutoModelForCausalLM.from_config(config).eval())
    return quantise_by_gptq(model, group=32, **options)


@torch.no_grad()
def test_experts_with_quantised_layers_of_their_own():
    model = gptq_mixture()
    ids, saved = torch.randint(3, 96, (2, 9)), bits_of(model)
    before = model(ids).logits
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    report = str(fftune.patch(model))
    assert "mlp.experts.0 and 7 more: Expert by ffn with packed weights (silu)" in report, report
    assert "mlp.experts and 1 more: 4 experts of Experts by moe-ffn with packed weights (silu)" in report, report
    assert "Qwen3MoeTopKRouter by moe-route" in report, report
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in (*model.parameters(), *model.buffers())}
    assert sum(storages.values()) < 1.4 * size  # in memory once, beside a header of each layer
    for tokens in (ids, ids[:1, :1], ids[:0]):
        if tokens.numel():
            assert counts_of(lambda: model(tokens))["moe_ffn_packed"] == 2
    assert error(model(ids).logits, before.double()) < 1e-5 and bits_of(model) == saved
    copied = copy.deepcopy(model)
    experts = model.model.layers[0].mlp.experts
    x, chosen, shares = torch.randn(5, 64), torch.tensor([[0, 3]] * 5), torch.rand(5, 2)
    right = experts(x, chosen, shares)
    assert experts(x[:0], chosen[:0], shares[:0]).shape == (0, 64)
    with torch.enable_grad():
        wanted = x.clone().requires_grad_()
        assert error(experts(wanted, chosen, shares), right.double()) < 1e-5
    assert error(experts[1](x), fftune.unpatch(copy.deepcopy(experts[1]))(x).double()) < 1e-5
    experts[0].up_proj.load_state_dict(experts[1].up_proj.state_dict())  # ends its replacement
    assert error(experts(x, chosen, shares), right.double()) > 0.01
    fftune.unpatch(model)
    assert torch.equal(copied(ids).logits, copied(ids).logits) and bits_of(copied) == saved
    fftune.unpatch(copied)
    assert torch.equal(copied(ids).logits, before) and bits_of(copied) == saved
    assert not [name for name, _ in copied.named_buffers() if "_fftune" in name]


class WeighedBefore(Experts):
    def forward(self, x, ids, shares):
        y = torch.zeros_like(x)
        for number, expert in enumerate(self):
            token, place = torch.where(ids == number)
            y = y.index_add(0, token, expert(x[token] * shares[token, place, None]))
        return y


class Squared(Experts):
    def forward(self, x, ids, shares):
        return super().forward(x, ids, shares.square())


@torch.no_grad()
def test_modules_around_experts_are_known_by_what_they_compute():
    x, ids, shares = torch.randn(7, 64), torch.randint(0, 2, (7, 1)), torch.rand(7, 1) + 0.5
    for kind, words in ((WeighedBefore, "by moe-ffn"), (Squared, "Squared computes nothing that is known")):
        model = gptq_mixture()
        experts = model.model.layers[0].mlp.experts
        experts.__class__ = kind
        right = experts(x, ids, shares)
        report = str(fftune.patch(model))
        assert words in report and error(experts(x, ids, shares), right.double()) < 1e-5, report
    model = gptq_mixture(desc_act=True)
    right = model(ids.T).logits
    report = str(fftune.patch(model))
    assert "by moe-ffn" not in report and error(model(ids.T).logits, right.double()) < 1e-5


def fp8_mixture(dtype=torch.float32, **changes):
    import transformers

    config = transformers.Qwen3MoeConfig(**{**SIZES, **dict(hidden_size=192, head_dim=32, num_experts=4,
                                                            num_experts_per_tok=2, moe_intermediate_size=128), **changes})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for layer in model.model.layers:
        layer.mlp.experts = fp8_experts(layer.mlp.experts)
    return model


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@torch.no_grad()
def test_experts_of_fp8(dtype, fp8_kernels):
    model = fp8_mixture(dtype)
    experts = model.model.layers[0].mlp.experts
    saved, own = bits_of(model), copy.deepcopy(experts)
    report = str(fftune.patch(model))
    assert "FP8Experts by moe-ffn of fp8, with activations rounded by blocks of 128 (silu)" in report, report
    assert "Qwen3MoeTopKRouter by moe-route" in report, report
    for rows in (0, 1, 17):
        x = torch.randn(rows, 192, dtype=dtype)
        ids = torch.stack([torch.randperm(4)[:2] for _ in range(rows)]) if rows else torch.empty(0, 2).long()
        shares = torch.rand(rows, 2).to(dtype)
        ours = experts(x, ids, shares)
        assert ours.shape == x.shape and ours.dtype == dtype
        if rows:
            # Some numbers of hidden round to the next fp8 number: a difference of an eighth in one of 128.
            assert error(ours, own(x, ids, shares).double()) < (2e-3 if dtype == torch.float32 else 2e-2)
    with torch.enable_grad():
        wanted = torch.randn(3, 192, dtype=dtype, requires_grad=True)
        assert experts(wanted, ids[:3], shares[:3]).requires_grad
    ids = torch.randint(3, 96, (2, 9))
    assert counts_of(lambda: model(ids))["moe_ffn_fp8_block"] == 2
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
    assert bits_of(model) == saved
    fftune.unpatch(model)
    assert bits_of(model) == saved and "forward" not in experts.__dict__


def test_experts_of_fp8_that_round_otherwise_are_left_alone_with_the_reason():
    experts = fp8_mixture(num_hidden_layers=1).model.layers[0].mlp.experts

    def changed(**attributes):
        own = copy.deepcopy(experts)
        for name, value in attributes.items():
            setattr(own, name, value)
        return own

    wide = experts.down_proj_scale_inv.clone()
    wide[0] = float("inf")
    for attributes, reason in (
            (dict(activation_scheme="static"), "its activations are rounded by static scales, for which"),
            (dict(block_size=None), "its tokens are rounded as a whole, for which there is no kernel"),
            (dict(block_size=(64, 64)), "its blocks are 64 by 64"),
            (dict(limit=5.0), "FP8Experts computes an activation for which there is no kernel"),
            (dict(has_gate=False), "FP8Experts has no gate"),
            (dict(forward=lambda *_: None), "its forward was replaced already"),
            (dict(down_proj_scale_inv=nn.Parameter(wide)), "its scales are not finite"),
            (dict(down_proj_scale_inv=nn.Parameter(experts.down_proj_scale_inv.to(torch.float8_e8m0fnu),
                                                   requires_grad=False)), "its scales are float8_e8m0fnu, for"),
            (dict(down_proj_scale_inv=nn.Parameter(wide[:, :1])), "down_proj_scale_inv is [4, 1, 1], not [4, 2, 1]"),
            (dict(down_proj=nn.Parameter(experts.down_proj.view(torch.int8), requires_grad=False)),
             "its weights are not float8_e4m3fn")):
        assert reason in left(changed(**attributes)), attributes
    assert "a block of 128 rows has rows of gate and of up, which have 96" in left(
        fp8_mixture(num_hidden_layers=1, moe_intermediate_size=96).model.layers[0].mlp.experts)


def test_whole_layers_need_packed_weights_of_one_format():
    for skip, options, words in ((("lm_head", "o_proj"), {}, "some of its weights have 4 bits"),
                                 (("lm_head",), {"desc_act": True}, "LlamaMLP is no MLP that was replaced")):
        report = fftune.patch(llama(group=32, skip=skip, **options), whole_layers=True)
        assert any(words in entry for _, entry in report.left), str(report)


def test_steps_after_a_state_dict_was_loaded():
    model = llama(group=32)
    fftune.patch(model, whole_layers=True)
    ids = torch.randint(3, 96, (1, 5))
    right = fftune.generate(model, ids, 6)[:, 5:]
    layer = model.model.layers[1].mlp.up_proj
    layer.load_state_dict(layer.state_dict())
    assert "forward" not in layer.__dict__
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False,
                                      eos_token_id=None)[:, 5:], right)


@torch.no_grad()
def test_projections_of_one_packed_weight():
    model = llama("Qwen3", group=32)
    ids = torch.randint(3, 96, (1, 4))
    fftune.patch(model)
    counts = counts_of(lambda: model(ids))
    assert counts.get("qkv_packed") == 2, counts
    attention = model.model.layers[0].self_attn
    x = torch.randn(3, 64)
    for name in "qkv":  # each by itself too
        layer = attention._modules[f"{name}_proj"]
        ours = layer(x)
        fftune.unpatch(layer)
        assert error(ours, layer(x).double()) < 1e-5


def test_an_mlp_whose_layer_was_exchanged_runs_its_own_forward():
    model = llama()
    fftune.patch(model)
    mlp = model.model.layers[0].mlp
    x = torch.randn(3, 64)
    right = mlp(x)
    with torch.profiler.profile() as profile:
        mlp(x)
    assert any("ffn_packed" in event.key for event in profile.key_averages())
    mlp.up_proj = nn.Linear(64, 128, bias=False)
    assert error(mlp(x), right.double()) > 0.1
    mlp.down_proj.register_forward_hook(lambda module, args, y: y * 0)
    assert not mlp(x).any()

"""Experts with weights of 4 and 8 bits inside a stand-in for vLLM."""
import importlib
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from quantised_layers import AWQ_ORDER, packed

QUANTISATION = "vllm.model_executor.layers.quantization"
MODULES = {"AutoGPTQMoEMethod": f"{QUANTISATION}.auto_gptq", "AutoAWQMoEMethod": f"{QUANTISATION}.auto_awq",
           "GptOssMxfp4MoEMethod": f"{QUANTISATION}.mxfp4", "Mxfp4MoEMethod": f"{QUANTISATION}.mxfp4",
           "CompressedTensorsWNA16MarlinMoEMethod":
               f"{QUANTISATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16_marlin"}
EXPERTS, D, H, GROUP = 4, 64, 32, 32


@pytest.fixture
def methods(vllm, monkeypatch):
    monkeypatch.setenv("FFTUNE_VLLM", "packed-experts")
    importlib.import_module("fftune.vllm").register()
    return {name: getattr(importlib.import_module(module), name) for name, module in MODULES.items()}


def along_k(q):
    """Words of GPTQ, [experts, k / 8, n], of codes [experts, n, k]."""
    return torch.stack([packed(own.t(), 0) for own in q])


def along_k_of_8_bits(q):
    rows = q.to(torch.uint8).contiguous().view(torch.int32)  # [experts, n, k / 4]
    return rows.transpose(1, 2).contiguous()


def along_n(q, order=None):
    """Words along n, [experts, k, n / 8]."""
    q = q.transpose(1, 2)
    if order is not None:
        places = torch.empty_like(q)
        for place, output in enumerate(order):
            places[..., place::8] = q[..., output::8]
        q = places
    return torch.stack([packed(own, 1) for own in q])


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def a_layer(method, dtype=torch.bfloat16, bits=4, zeros=False, biases=False, activation="SILU", n_first=False):
    """(layer, attributes of its method), as the checkpoint is loaded."""
    layer, attributes, dense = nn.Module(), {}, []
    for part, n, k in (("w13", 2 * H, D), ("w2", D, H)):
        own = {}
        if "Mxfp4" in method:
            q, e = torch.randint(0, 16, (EXPERTS, n, k)), torch.randint(120, 124, (EXPERTS, n, k // 32))
            own = {"weight": (q[..., 0::2] | q[..., 1::2] << 4).to(torch.uint8), "weight_scale": e.to(torch.uint8)}
            value = E2M1[q & 7] * torch.where(q > 7, -1.0, 1.0)
            dense.append(value.double() * torch.exp2(e.double() - 127).repeat_interleave(32, 2))
        else:
            top = 1 << bits
            q, s = torch.randint(0, top, (EXPERTS, n, k)), torch.rand(EXPERTS, n, k // GROUP) * 0.05 + 0.01
            s = (s / (top / 16)).to(dtype)
            z = torch.randint(0, 16, s.shape) if zeros else torch.full(s.shape, top // 2)
            words = along_k(q) if bits == 4 else along_k_of_8_bits(q)
            scales = s.transpose(1, 2).contiguous()
            if method == "AutoAWQMoEMethod":
                own = {"qweight": along_n(q, AWQ_ORDER), "scales": scales, "qzeros": along_n(z, AWQ_ORDER)}
            elif method == "AutoGPTQMoEMethod":
                own = {"qweight": words, "scales": scales}
            else:
                own = {"weight_packed": words, "weight_scale": scales}
                if zeros:
                    own["weight_zero_point"] = along_n(z)
            dense.append((q - z.repeat_interleave(GROUP, 2)).double() * s.double().repeat_interleave(GROUP, 2))
        for name, tensor in own.items():
            tensor = tensor.transpose(1, 2).contiguous() if n_first else tensor
            layer.register_parameter(f"{part}_{name}", nn.Parameter(tensor, requires_grad=False))
        if biases:
            layer.register_parameter(f"{part}_bias", nn.Parameter(torch.randn(EXPERTS, n).bfloat16(), False))
    layer._loaded_expert_biases = set()  # of 0.33, by the methods that fill biases
    layer.dense, layer.biases = dense, (layer.w13_bias, layer.w2_bias) if biases else None
    activations = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.triton_moe").MoEActivation
    layer.activation, layer.expert_map = activations[activation], None
    layer.global_num_experts, layer.apply_router_weight_on_input = EXPERTS, False
    if method == "AutoGPTQMoEMethod":
        attributes["quant_config"] = SimpleNamespace(weight_bits=bits, desc_act=False)
    elif "Compressed" in method:
        attributes |= {"num_bits": bits, "is_transposed": not n_first}
    return layer, attributes


def loaded(method, layer, caplog):
    """The log of loading a layer, with the model's element type as PyTorch's default, as in vLLM."""
    caplog.clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with caplog.at_level(logging.INFO):
            method.process_weights_after_loading(layer)
    finally:
        torch.set_default_dtype(torch.float32)
    return caplog.text


def error(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


CASES = {"GPTQ": ("AutoGPTQMoEMethod", {}), "GPTQ of 8 bits": ("AutoGPTQMoEMethod", dict(bits=8)),
         "AWQ": ("AutoAWQMoEMethod", dict(zeros=True)),
         "compressed-tensors": ("CompressedTensorsWNA16MarlinMoEMethod", {}),
         "compressed-tensors with zero points": ("CompressedTensorsWNA16MarlinMoEMethod", dict(zeros=True)),
         "compressed-tensors of 0.33": ("CompressedTensorsWNA16MarlinMoEMethod", dict(zeros=True, n_first=True)),
         "mxfp4": ("Mxfp4MoEMethod", {}),
         "gpt-oss": ("GptOssMxfp4MoEMethod", dict(biases=True, activation="SWIGLUOAI"))}


@pytest.mark.parametrize("case", CASES)
def test_experts_run_by_moe_ffn_and_are_in_memory_once(methods, caplog, case):
    name, options = CASES[case]
    layer, attributes = a_layer(name, **options)
    method = methods[name](torch.bfloat16, **attributes)
    words = loaded(method, layer, caplog)
    assert f"experts of {name} run by moe-ffn with packed weights" in words, words
    method.calls = 0
    for rows in (0, 1, 17):
        x = torch.randn(rows, D, dtype=torch.bfloat16)
        shares, ids = torch.rand(rows, EXPERTS).topk(2)
        given = dict(layer=layer, x=x, topk_weights=shares, topk_ids=ids.int(), shared_experts=None,
                     shared_experts_input=None)
        y = method.apply(**given)
        assert method.calls == 0 and y.shape == x.shape and y.dtype == x.dtype
        if rows:
            assert error(y, type(method).apply(method, **given)) < 0.01
            method.calls = 0
    assert sum(p.numel() for p in layer.parameters()) == (sum(b.numel() for b in layer.biases) if layer.biases else 0)


@pytest.mark.parametrize("case", ["GPTQ", "AWQ", "compressed-tensors of 0.33", "gpt-oss"])
def test_experts_that_are_loaded_again_go_where_graphs_read_them(methods, caplog, case):
    name, options = CASES[case]
    layer, attributes = a_layer(name, **options)
    method = methods[name](torch.bfloat16, **attributes)
    loaded(method, layer, caplog)
    own, run = layer._fftune_packed, method.apply
    places = [weight.w.data_ptr() for weight in own.weights]
    fresh, _ = a_layer(name, **options)
    layer._parameters, layer.dense, layer.biases = fresh._parameters, fresh.dense, fresh.biases
    loaded(method, layer, caplog)
    x = torch.randn(5, D, dtype=torch.bfloat16)
    shares, ids = torch.rand(5, EXPERTS).topk(2)
    given = layer, x, shares, ids.int(), None, None
    assert method.apply is run and layer._fftune_packed is own
    assert error(run(*given), type(method).apply(method, *given)) < 0.01
    assert [weight.w.data_ptr() for weight in own.weights] == places
    assert not any(p.numel() for key, p in layer.named_parameters() if "bias" not in key)


@pytest.mark.parametrize("config, words", [
    (SimpleNamespace(offload_config=SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=2))),
     "weights that are offloaded"),
    (SimpleNamespace(aux_output_config=SimpleNamespace(enable_return_routed_experts=True)),
     "requests get the experts that were chosen")])
def test_what_the_configuration_of_the_engine_leaves_to_vllm(methods, caplog, monkeypatch, config, words):
    monkeypatch.setattr("fftune.vllm.packed_experts.current", lambda: config)
    layer, _ = a_layer("GptOssMxfp4MoEMethod", biases=True, activation="SWIGLUOAI")
    method = methods["GptOssMxfp4MoEMethod"](torch.bfloat16, is_monolithic=True)
    assert f"stay vLLM's: {words}" in loaded(method, layer, caplog) and "apply_monolithic" not in vars(method)


def test_a_router_inside_of_the_kernel(methods, caplog):
    layer, _ = a_layer("GptOssMxfp4MoEMethod", biases=True, activation="SWIGLUOAI")
    method = methods["GptOssMxfp4MoEMethod"](torch.bfloat16, is_monolithic=True)
    assert "run by moe-ffn" in loaded(method, layer, caplog)
    x, logits = torch.randn(5, D, dtype=torch.bfloat16), torch.randn(5, EXPERTS)
    own = type(method).apply_monolithic(method, layer, x, logits)
    method.calls = 0
    assert error(method.apply_monolithic(layer=layer, x=x, router_logits=logits, input_ids=None), own) < 0.01
    assert method.calls == 0


def test_experts_of_other_ranks_and_weights_before(methods, caplog):
    layer, attributes = a_layer("AutoGPTQMoEMethod")
    layer.expert_map = torch.tensor([-1, 0, 1, -1, 2, 3], dtype=torch.int32)
    layer.global_num_experts, layer.apply_router_weight_on_input = 6, True
    method = methods["AutoGPTQMoEMethod"](torch.bfloat16, top_k=1, **attributes)
    assert "run by moe-ffn" in loaded(method, layer, caplog)
    x, ids = torch.randn(6, D, dtype=torch.bfloat16), torch.arange(6, dtype=torch.int32)[:, None]
    given = layer, x, torch.rand(6, 1) + 0.5, ids, None, None
    ours, theirs = method.apply(*given), type(method).apply(method, *given)
    assert error(ours, theirs) < 0.01 and not ours[0].any() and not ours[3].any()


@pytest.mark.parametrize("name, options, change, words", (
    ("AutoGPTQMoEMethod", {}, lambda m, l: setattr(m.quant_config, "desc_act", True), "act-order"),
    ("AutoGPTQMoEMethod", {}, lambda m, l: setattr(m, "input_dtype", torch.float8_e4m3fn), "activations that are rounded"),
    ("AutoGPTQMoEMethod", {}, lambda m, l: setattr(m.moe, "is_lora_enabled", True), "LoRA"),
    ("AutoGPTQMoEMethod", {}, lambda m, l: setattr(m.moe.moe_parallel_config, "enable_eplb", True), "tokens that go"),
    ("AutoGPTQMoEMethod", {}, lambda m, l: setattr(m, "mk_can_overlap_shared_experts", True), "shared experts that run"),
    ("AutoGPTQMoEMethod", {}, lambda m, l: setattr(m, "is_monolithic", True), "a router inside of vLLM's kernel"),
    ("AutoGPTQMoEMethod", {}, lambda m, l: l.dense.__setitem__(0, -l.dense[0]), "results differ from vLLM's"),
    ("CompressedTensorsWNA16MarlinMoEMethod", {}, lambda m, l: setattr(m, "actorder", "group"), "act-order"),
    ("Mxfp4MoEMethod", {}, lambda m, l: setattr(l, "swiglu_limit", 10.0), "a clamped activation"),
    ("Mxfp4MoEMethod", dict(activation="SWIGLUOAI"), lambda m, l: None, "a clamped activation"),
    ("GptOssMxfp4MoEMethod", dict(activation="SWIGLUOAI"), lambda m, l: setattr(
        m, "mxfp4_backend", SimpleNamespace(name="AITER_MXFP4_FP8")), "activations that are rounded")),
    ids=range(11))
def test_others_stay(methods, caplog, name, options, change, words):
    layer, attributes = a_layer(name, **options)
    method = methods[name](torch.bfloat16, **attributes)
    change(method, layer)
    assert f"experts of {name} stay vLLM's: {words}" in loaded(method, layer, caplog)
    assert "apply" not in method.__dict__ and all(p.numel() for p in layer.parameters())


@pytest.mark.parametrize("given, is_there", [("1", True), ("experts,layers", False), ("packed-experts", True)])
def test_it_is_on_by_default(vllm, monkeypatch, given, is_there):
    monkeypatch.setenv("FFTUNE_VLLM", given)
    importlib.import_module("fftune.vllm").register()
    for name, module in MODULES.items():
        cls = getattr(importlib.import_module(module), name)
        assert hasattr(cls.process_weights_after_loading, "_fftune_original") == is_there

"""`fftune tune-vllm` searches the problems that the plugin gives to the library, and no others."""
import json
import subprocess

import pytest
import torch

from fftune import _run, tuning
from fftune.__main__ import tool_environment
from fftune._library import Plan, tool_path
from cases import trusted
from test_vllm_layers import BLOCK, batch_of, model_of, packed_llama_of, step, stand_in, warm  # noqa: F401

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
                 "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                 "qwen3_moe": "Qwen3MoeForCausalLM"}
WITH_WINDOWS = {"gpt_oss": "GptOssForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM"}
REQUESTS = (5, 40, 1, 16)  # four of 48 keys at most: the stand-in's tables have three blocks


def config_of(kind, tp):
    """The configuration of the stand-in's model, whose sizes are those of one device."""
    if kind in WITH_WINDOWS:
        more = dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"])
        more |= (dict(num_local_experts=4, num_experts_per_tok=2, model_type=kind) if kind == "gpt_oss" else
                 dict(query_pre_attn_scalar=64, hidden_activation="gelu_pytorch_tanh"))
        more |= dict(attn_logit_softcapping=5.0) if kind == "gemma2" else {}
    else:
        more = {}
    return {**more, "architectures": [(ARCHITECTURES | WITH_WINDOWS)[kind]], "hidden_size": 64, "intermediate_size": 96 * tp,
            "num_attention_heads": 4 * tp, "num_key_value_heads": 2 * tp, "head_dim": 16,
            "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
            **({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96 * tp, "norm_topk_prob": True}
               if kind == "qwen3_moe" else {})}


def tune(folder, config, tp=1):
    """Searches briefly what tune-vllm finds for the configuration; the folder of presets."""
    (folder / "config.json").write_text(json.dumps(config))
    words = ["tune-vllm", folder, "--m", len(REQUESTS), "--tp", tp, "--max-model-len", 3 * BLOCK,
             "--device", "cpu", "--budget", "3s", "--wait", "0s", "--keep-undecided", "--max-variants", 1,
             "--out", folder / "presets",
             *(["--parts", "experts,layers,linears,ranks"] if tp > 1 else [])]
    subprocess.run([str(tool_path()), *map(str, words)], env=tool_environment(), check=True,
                   capture_output=True)
    return trusted(folder / "presets")


def problems_of_step(model):
    """Those that a step of the warm model gives to the library, each with its plan's description."""
    found = {}
    with _run.listening(found):
        step(model, *batch_of(model, REQUESTS))
    return [(problem, Plan(device, problem).describe()) for device, problem in found.values()]


@pytest.mark.parametrize("kind, tp", [*((kind, 1) for kind in ARCHITECTURES), ("llama", 2)])
def test_every_problem_of_a_step_has_a_record(stand_in, tmp_path, monkeypatch, kind, tp):  # noqa: F811
    monkeypatch.setenv("FFTUNE_PRESETS", str(tune(tmp_path, config_of(kind, tp), tp)))
    tuning.forget_plans()
    found = problems_of_step(warm(model_of(stand_in, kind, tp=tp)))
    for problem, described in found:
        if problem["op"] == "layer":  # the records of its parts serve
            assert described["reason"].endswith(
                "records of attn_norm, qkv, attention, out, ffn_norm, ffn"), described["reason"]
        else:
            assert described["preset"] and described["preset"]["exact_shape"], problem
    written = {path.stem for path in (tmp_path / "presets").glob("*/*.json")}
    assert written >= {problem["op"] for problem, _ in found} - {"layer"}
    assert written >= {"qkv", "attention", "linear", "rmsnorm"}
    assert (kind == "qwen3_moe") == ("moe-route" in written)


@pytest.mark.parametrize("kind", WITH_WINDOWS)
def test_layers_with_windows_have_records(stand_in, tmp_path, monkeypatch, kind):  # noqa: F811
    monkeypatch.setenv("FFTUNE_PRESETS", str(tune(tmp_path, config_of(kind, 1))))
    tuning.forget_plans()
    found = problems_of_step(warm(model_of(stand_in, kind)))
    parts = ("attn_norm, qkv, attention, out, ffn_norm, router, route, experts" if kind == "gpt_oss" else
             "attn_norm, qkv, attention, out, attn_post_norm, ffn_norm, ffn, ffn_post_norm")
    layers = [described["reason"] for problem, described in found if problem["op"] == "layer"]
    assert len(layers) == 2 and all(reason.endswith(f"records of {parts}") for reason in layers), layers


def test_architectures_are_those_of_the_plugin(tmp_path):
    """Each model class that the plugin wraps, and no other one."""
    from fftune.vllm import interfaces

    def said(architecture):
        config = config_of("qwen3_moe", 1) | {"architectures": [architecture], "model_type": "gpt_oss"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return subprocess.run([str(tool_path()), "tune-vllm", str(tmp_path), "--list", "--m", "1"],
                              env=tool_environment(), text=True, capture_output=True).stderr

    for cls in interfaces.MODELS.values():
        assert "is not Llama" not in said(cls.replace("Model", "ForCausalLM")), cls
    assert "is not Llama" in said("GemmaForCausalLM")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("quantisation", [GPTQ, AWQ], ids=lambda config: config["quant_method"])
def test_packed_layers_have_records(stand_in, tmp_path, monkeypatch, quantisation):  # noqa: F811
    config = config_of("llama", 1) | {"quantization_config": quantisation}
    monkeypatch.setenv("FFTUNE_PRESETS", str(tune(tmp_path, config)))
    tuning.forget_plans()
    model = warm(packed_llama_of(stand_in, zeros=quantisation is AWQ))
    found = {problem["op"]: described for problem, described in problems_of_step(model)}
    assert found.keys() == {"layer", "rmsnorm"}  # and the norm behind all layers
    assert found["layer"]["reason"].endswith("records of attn_norm, qkv, attention, out, ffn_norm, ffn"), found
    assert found["rmsnorm"]["preset"]["exact_shape"]
    # Other batches run the network as one op.
    found, network = {}, model.layers[0].mlp
    with _run.listening(found):
        network(torch.randn(len(REQUESTS), 64).bfloat16())
    (device, problem), = found.values()
    assert problem["op"] == "ffn" and Plan(device, problem).describe()["preset"]["exact_shape"]


@pytest.mark.parametrize("changes", [{"quantization_config": GPTQ | {"desc_act": True}},
                                     {"quantization_config": AWQ, "tp": 2}], ids=["order", "tp"])
def test_packed_linears_alone_have_records(tmp_path, monkeypatch, changes):
    """Where layers stay vLLM's, each linear layer is one op."""
    from fftune import ops
    from test_vllm_layers import packed_of

    changes = dict(changes)
    tp, own = changes.pop("tp", 1), changes["quantization_config"]
    monkeypatch.setenv("FFTUNE_PRESETS", str(tune(tmp_path, config_of("llama", tp) | changes, tp)))
    tuning.forget_plans()
    for n, k in ((128, 64), (64, 64), (192, 64), (64, 96)):  # q, k and v; the output; gate and up; down
        packed, found = packed_of((n, k), zeros=own is AWQ), {}
        with _run.listening(found):
            ops.linear(torch.randn(len(REQUESTS), k).bfloat16(), packed)
        (device, problem), = found.values()
        assert Plan(device, problem).describe()["preset"]["exact_shape"], problem


def test_parts_are_those_of_the_plugin(tmp_path):
    from fftune.vllm import plugin

    (tmp_path / "config.json").write_text(json.dumps(config_of("llama", 1)))
    said = [subprocess.run([str(tool_path()), "tune-vllm", *map(str, words)], env=tool_environment(), text=True,
                           capture_output=True) for words in (["--help"], [tmp_path, "--list", "--parts", "none"])]
    assert ",".join(plugin.PARTS) in "".join(said[0].stdout.split())
    assert said[1].returncode == 2
    assert all(word in said[1].stderr for word in (*plugin.PARTS, *plugin.OPT_IN)), said[1].stderr


@pytest.mark.parametrize("parts, words", [
    ("layers", "layers stay vLLM's: they have states, which needs states in --parts and in FFTUNE_VLLM"),
    ("layers,states", "layers with states are not searched: how far states are apart"),
    ("states", "--parts states without layers")])
def test_layers_with_states_are_not_searched(tmp_path, parts, words):
    (tmp_path / "config.json").write_text(json.dumps({
        **config_of("llama", 1), "architectures": ["Qwen3NextForCausalLM"]}))
    done = subprocess.run([str(tool_path()), "tune-vllm", str(tmp_path), "--list", "--parts", parts],
                          env=tool_environment(), text=True, capture_output=True)
    assert done.returncode == 2 and words in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize("field", [None, "linear_num_key_heads", "ssm_state_size", "mamba_n_heads"])
def test_cores_of_linear_attention_are_not_searched(tmp_path, field):
    (tmp_path / "config.json").write_text(json.dumps({**config_of("llama", 1), **({field: 16} if field else {})}))
    done = subprocess.run([str(tool_path()), "tune-vllm", str(tmp_path), "--list", "--parts", "linear-attention"],
                          env=tool_environment(), text=True, capture_output=True)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert ("there is nothing to search: no part that --parts names" in said) == (field is None)
    assert ("cores of linear attention are not searched" in said) == (field is not None)

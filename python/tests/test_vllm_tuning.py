"""`fftune tune-vllm` searches the problems that the plugin gives to the library, and no others."""
import importlib
import json
import subprocess

import pytest

from fftune import _run, tuning
from fftune.__main__ import tool_environment
from fftune._library import Plan, tool_path
from test_vllm_layers import BLOCK, batch_of, model_of, step, stand_in, warm  # noqa: F401

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
                 "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                 "qwen3_moe": "Qwen3MoeForCausalLM"}
REQUESTS = (5, 40, 1, 16)  # four of 48 keys at most: the stand-in's tables have three blocks


def config_of(kind, tp):
    """The configuration of the stand-in's model, whose sizes are those of one device."""
    return {"architectures": [ARCHITECTURES[kind]], "hidden_size": 64, "intermediate_size": 96 * tp,
            "num_attention_heads": 4 * tp, "num_key_value_heads": 2 * tp, "head_dim": 16,
            "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
            **({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96 * tp, "norm_topk_prob": True}
               if kind == "qwen3_moe" else {})}


@pytest.mark.parametrize("kind, tp", [*((kind, 1) for kind in ARCHITECTURES), ("llama", 2)])
def test_every_problem_of_a_step_has_a_record(stand_in, tmp_path, monkeypatch, kind, tp):  # noqa: F811
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind, tp)))
    words = ["tune-vllm", tmp_path, "--m", len(REQUESTS), "--tp", tp, "--max-model-len", 3 * BLOCK,
             "--device", "cpu", "--budget", "3s", "--wait", "0s", "--max-variants", 1, "--parts",
             "experts,layers", "--out", tmp_path / "presets"]
    subprocess.run([str(tool_path()), *map(str, words)], env=tool_environment(), check=True,
                   capture_output=True)
    monkeypatch.setenv("FFTUNE_PRESETS", str(tmp_path / "presets"))
    tuning.forget_plans()
    model = warm(model_of(stand_in, kind, tp=tp))
    found = {}
    with _run.listening(found):
        step(model, *batch_of(model, REQUESTS))
    ops = {problem["op"] for _, problem in found.values()}
    for text, (device, problem) in found.items():
        described = Plan(device, problem).describe()
        if problem["op"] == "layer":  # the records of its parts serve
            assert described["reason"].endswith(
                "records of attn_norm, qkv, attention, out, ffn_norm, ffn"), described["reason"]
        else:
            assert described["preset"] and described["preset"]["exact_shape"], text
    written = {path.stem for path in (tmp_path / "presets").glob("*/*.json")}
    assert written >= ops - {"layer"}
    assert written >= {"qkv", "attention", "linear", "rmsnorm"}
    assert (kind == "qwen3_moe") == ("moe-route" in written)

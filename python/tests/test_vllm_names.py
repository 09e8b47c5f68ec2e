"""`fftune tune-vllm` finds the experts of every configuration class of transformers, by the names that each uses."""
import json
import re
import subprocess

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from fftune.__main__ import tool_environment
from fftune._library import tool_path

# Names that transformers' attribute maps do not give to the usual one.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOICES = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
# Experts that vLLM's kernels for experts do not run: in an encoder, without a gate, or another kind of layer.
OTHERS = {"vitpose_backbone", "dots3_note_vision_encoder", "nllb-moe", "switch_transformers", "doge"}
LEFT = ("a clamped activation", "the activation relu2")


def first(config, names):
    """The first of these that the class has, as the model would read it."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:  # it may differ by layer
            value = config.to_dict().get(name)
        if value is None and getattr(config, "ffn_config", None) is not None:
            value = getattr(config.ffn_config, name, None)
        if value is not None:
            return value
    return None


def text_of(config):
    for name in ("text_config", "thinker_config"):
        inner = getattr(config, name, None)
        if isinstance(inner, transformers.PreTrainedConfig):
            return text_of(inner)
    return config


def configurations():
    """Default configurations that have experts, by model_type."""
    found = {}
    for kind in CONFIG_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[kind]()
        except Exception:
            continue  # a class without defaults, or one that needs another package
        own = text_of(config)
        count, choices = first(own, COUNTS), first(own, CHOICES)
        is_moe = getattr(own, "enable_moe_block", True) and getattr(own, "is_moe", True)
        if kind not in OTHERS and count and choices and is_moe and count != 1:
            found[kind] = config
    return found


def lists_of(value):
    return value if isinstance(value, list) else [value]


def problems(config, folder):
    saved = json.loads(config.to_json_string(use_diff=False)) | {"architectures": ["ForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(saved))
    done = subprocess.run([str(tool_path()), "tune-vllm", str(folder), "--list", "--m", "1", "--parts", "experts"],
                          env={**tool_environment(), "COLUMNS": "500"}, capture_output=True, text=True)
    return done.stdout.splitlines(), done.stderr


def test_experts_of_all_classes(tmp_path):
    classes, wrong = configurations(), []
    assert len(classes) > 50
    for kind, config in classes.items():
        own = text_of(config)
        lines, said = problems(config, tmp_path)
        if any(reason in said for reason in LEFT):
            continue
        d = first(own, ("moe_latent_size", "moe_hidden_size")) or own.hidden_size
        right = {(d, count, h, choices) for count in lists_of(first(own, COUNTS))
                 for h in lists_of(first(own, WIDTHS)) for choices in lists_of(first(own, CHOICES))}
        found = {tuple(int(re.search(rf" {name}=(\d+)", line)[1]) for name in ("d", "experts", "h", "top-k"))
                 for line in lines}
        if found != right:
            wrong.append((kind, right, found, said))
    assert not wrong, wrong


@pytest.mark.parametrize("changes", [
    {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}])
def test_gemma_4(changes, tmp_path):
    config = transformers.AutoConfig.for_model("gemma4_text", **changes)
    lines, said = problems(config, tmp_path)
    assert len(lines) == 1 and "act=gelu-tanh " in lines[0] and " experts=128 h=704 " in lines[0], said


def test_no_new_name_of_experts():
    """A class whose experts are counted by another name is to be seen."""
    known, pattern = {*COUNTS, *CHOICES}, re.compile(r"(^num|^n_|count).*experts?$|experts_per_tok|top_?k(_experts)?$")
    harmless = {"num_shared_experts", "n_shared_experts", "moe_num_shared_experts", "index_topk", "num_redundant_experts",
                "num_experts_per_layer"}
    new = {}
    for kind in CONFIG_MAPPING_NAMES:
        try:
            keys = text_of(CONFIG_MAPPING[kind]()).to_dict()
        except Exception:
            continue
        names = {key for key in keys if pattern.search(key)} - known - harmless
        if names and not {*COUNTS} & keys.keys():
            new[kind] = names
    assert not new

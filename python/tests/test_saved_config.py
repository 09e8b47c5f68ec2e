"""`fftune check --weights`: the problem of a layer, beside what transformers computes with the same config.json."""
import json
import subprocess

import pytest
import transformers

from fftune.__main__ import tool_environment
from fftune._library import tool_path
from models import make
from test_run_model import CLASSES, REFUSED, save_with, saved_without_defaults

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh"}


def check(folder, layer=0):
    """(exit code, the problem of the layer for one token, the error)."""
    words = ["check", "--weights", folder, "--layer", layer, "--op", "layer", "--m", 1, "--batch", 1, "--s", 1,
             "--cache", 64, "--device", "cpu", "--seeds", 1, "--json"]
    done = subprocess.run([str(tool_path()), *map(str, words)], env=tool_environment(), capture_output=True, text=True)
    problem = json.loads(done.stdout)["checks"][0]["problem"] if done.stdout else {}
    return done.returncode, problem, done.stderr


def expected(config, layer):
    """The words and the numbers of the op for what transformers makes of the configuration."""
    kind, get = config.model_type, lambda key, otherwise=None: getattr(config, key, otherwise)
    types = get("layer_types") or []
    only = kind in ("mistral", "mixtral", "phi3", "qwen3_moe")
    slides = bool(get("sliding_window")) and (only or types[layer:layer + 1] == ["sliding_attention"])
    rope = get("rope_parameters") or {}
    rope = rope.get("sliding_attention" if slides else "full_attention", rope)
    dim = get("head_dim") or config.hidden_size // config.num_attention_heads
    scalar, softcap = get("query_pre_attn_scalar"), get("attn_logit_softcapping") if kind == "gemma2" else None
    act = {"gemma2": "hidden_activation", "gemma3_text": "hidden_activation", "gpt2": "activation_function"}
    words = dict(act=ACTIVATIONS[get(act.get(kind, "hidden_act"))],
                 convention="gemma" if kind.startswith("gemma") else None,
                 renormalise="yes" if kind == "mixtral" or get("norm_topk_prob") else None)
    numbers = dict(eps=get("rms_norm_eps") or get("layer_norm_eps") or get("layer_norm_epsilon"),
                   base=rope.get("rope_theta"), softcap=softcap, scale=scalar and scalar ** -0.5,
                   window=config.sliding_window if slides else None,
                   dim=dim, heads=config.num_attention_heads, rotary=int(dim * rope.get("partial_rotary_factor", 1)))
    numbers["kv-heads"] = get("num_key_value_heads") or config.num_attention_heads
    numbers["top-k"] = get("num_experts_per_tok")
    return words, numbers


def expect_right(config, folder, layer):
    code, found, said = check(folder, layer)
    assert code == 0, said
    words, numbers = expected(config, layer)
    ours = dict(renormalise="no", convention="llama", act="silu") | found
    for name, word in words.items():
        assert word is None or ours[name] == word, (name, found)
    usual = dict(eps=1e-6, base=1e4, scale=ours["dim"] ** -0.5, rotary=ours["dim"], softcap=0.0, window=0)
    usual["kv-heads"] = ours["heads"]
    for name, number in numbers.items():
        if number is None and name in ("base", "top-k"):
            continue  # no angles, no experts
        right = usual.get(name) if number is None else number
        own = ours.get(name)
        if name == "scale" and own in (None, "0"):
            own = usual["scale"]
        assert float(usual[name] if own is None else own) == pytest.approx(right, rel=1e-5), (name, found)


@pytest.mark.parametrize("name", CLASSES)
def test_keys_that_are_missing_have_transformers_values(name, tmp_path):
    model = saved_without_defaults(name, 6, tmp_path)
    for layer in (0, 1, len(model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.h) - 1):
        expect_right(model.config, tmp_path, layer)


@pytest.mark.parametrize("name, changes", (
    ("gemma", dict(hidden_act="gelu")), ("gemma2", dict(hidden_act="gelu", sliding_window=8)),
    ("gemma3", dict(attn_logit_softcapping=2.0, sliding_window=8)),
    *((name, dict(layer_types=None, sliding_window=8) | more) for name in ("qwen2", "qwen3")
      for more in ({}, dict(use_sliding_window=True), dict(use_sliding_window=True, max_window_layers=1))),
    ("qwen3-moe", dict(sliding_window=8, use_sliding_window=True)), ("qwen3-moe", dict(sliding_window=8)),
    ("mistral-window", {}), ("llama", dict(sliding_window=8)), ("phi3", dict(sliding_window=8)),
    ("mixtral", dict(sliding_window=8)), ("llama", dict(rope_theta=500.0)),
    ("llama", dict(rope_scaling=dict(rope_type="default", rope_theta=700.0)))), ids=str)
def test_configurations(name, changes, tmp_path):
    save_with(tmp_path, make(name), **changes)
    for layer in (0, 1):
        expect_right(transformers.AutoConfig.from_pretrained(tmp_path), tmp_path, layer)


@pytest.mark.parametrize("name, changes, words", (
    *REFUSED, ("llama", dict(model_type="granite"), "model_type granite"),
    ("llama", dict(per_layer_config={"0": {"num_attention_heads": 2}}), "per_layer_config")), ids=str)
def test_keys_that_are_refused(name, changes, words, tmp_path):
    save_with(tmp_path, make(name), **changes)
    code, _, said = check(tmp_path)
    assert code == 2 and said.count("\n") == 1 and words in said, said


# Keys that decide about a layer: from config.json, or from the tensors that there are.
KNOWN = set("""activation_function add_cross_attention attention_bias attention_chunk_size attn_logit_softcapping
    decoder_sparse_step head_dim hidden_act hidden_activation hidden_size intermediate_size is_causal layer_norm_eps
    layer_norm_epsilon layer_types mlp_bias mlp_only_layers moe_intermediate_size n_embd n_inner norm_topk_prob
    num_attention_heads num_experts num_experts_per_tok num_key_value_heads num_local_experts
    original_max_position_embeddings partial_rotary_factor per_layer_config qk_layernorm query_pre_attn_scalar
    rms_norm_eps rope_parameters scale_attn_by_inverse_layer_idx scale_attn_weights sliding_window
    use_bidirectional_attention""".split())
# Of training, of what lies around the layers, or of how they are computed.
HARMLESS = set("""_attn_implementation attention_dropout attn_pdrop classifier_dropout default_theta embd_pdrop
    final_logit_softcapping hidden_dropout image_token_id initializer_range json kv_sharing_modes
    max_position_embeddings mm_tokens_per_image n_layer num_hidden_layers num_labels output_router_logits pad_token_id
    problem_type reorder_and_upcast_attn resid_pdrop router_aux_loss_coef router_jitter_noise summary_activation
    summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type summary_use_proj text_config
    use_cache vision_config vocab_size""".split())


def test_every_key_that_transformers_reads_is_known():
    import re
    from pathlib import Path

    root = Path(transformers.__file__).parent
    folders = "llama mistral qwen2 qwen3 gemma gemma2 gemma3 phi phi3 gpt2 mixtral qwen3_moe".split()
    files = [root / "models" / name / f"modeling_{name}.py" for name in folders]
    files += [root / name for name in ("masking_utils.py", "modeling_rope_utils.py", "cache_utils.py")]
    pattern = re.compile(r'\bconfig\.([a-z_0-9]+)\b(?!\s*\()|getattr\((?:\w+\.)*config, "([a-z_0-9]+)"')
    read = {first or second for file in files for first, second in pattern.findall(file.read_text())}
    assert read > {"hidden_act", "sliding_window", "is_causal"}
    assert not read - KNOWN - HARMLESS

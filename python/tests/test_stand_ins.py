"""Stand-ins of layers with large networks: narrow ones with few experts, on which the layer is told from others."""
import pytest
import torch
import transformers
from torch import nn

import fftune
from fftune.patching import layer_specs, recognise
from fftune.patching.layer_specs import Recogniser
from fftune.patching.recognise import Numbers

_COMMON = dict(hidden_size=96, num_attention_heads=4, num_key_value_heads=2, vocab_size=96, num_hidden_layers=1,
               pad_token_id=0, bos_token_id=1, eos_token_id=2)


def qwen3_moe():
    return transformers.Qwen3MoeConfig(**_COMMON, head_dim=16, num_experts=64, num_experts_per_tok=4,
                                       moe_intermediate_size=128, intermediate_size=128, norm_topk_prob=True)


def groups():
    """A shared expert that is as wide as the others, and groups of experts."""
    return transformers.DeepseekV3Config(
        **_COMMON | dict(num_key_value_heads=4), n_routed_experts=64, n_group=8, topk_group=4, num_experts_per_tok=4,
        moe_intermediate_size=128, intermediate_size=128, n_shared_experts=1, first_k_dense_replace=0, kv_lora_rank=32,
        q_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)


def as_many_experts_as_features():
    return transformers.Qwen2MoeConfig(**_COMMON, num_experts=256, num_experts_per_tok=4, moe_intermediate_size=256,
                                       shared_expert_intermediate_size=512, decoder_sparse_step=1)


def gates_as_wide_as_the_model():
    """Gate and up together have as many rows as the model has features."""
    return transformers.MixtralConfig(**_COMMON | dict(hidden_size=256), num_local_experts=32, num_experts_per_tok=2,
                                      intermediate_size=128, head_dim=16)


def dense():
    return transformers.LlamaConfig(**_COMMON, intermediate_size=512)


def products_alone():
    """Both products are children of the layer."""
    return transformers.OPTConfig(hidden_size=96, num_attention_heads=4, vocab_size=96, num_hidden_layers=1,
                                  ffn_dim=512, max_position_embeddings=64, word_embed_proj_dim=96,
                                  activation_function="gelu")


SIZES = {qwen3_moe: {128: 32, 256: 64, 64: 16}, groups: {128: 32, 256: 64, 64: 16},
         as_many_experts_as_features: {256: 64, 512: 128, 1024: 256}, gates_as_wide_as_the_model: {32: 16},
         dense: {512: 32, 1024: 64}, products_alone: {512: 32, 1024: 64}}


@pytest.fixture
def compared(monkeypatch):
    """The networks of each stand-in by which a layer was compared, and their sizes."""
    seen, original = [], Recogniser._compared

    def listen(self, layer, order, candidates, networks):
        seen.append(networks)
        return original(self, layer, order, candidates, networks)

    monkeypatch.setattr(Recogniser, "_compared", listen)
    monkeypatch.setattr(layer_specs, "_LARGE_NETWORK", 1)
    return seen


def expect_patched(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config()).eval()
    report = fftune.patch(model, whole_layers=True)
    assert any("1 layers of" in words for _, words in report.replaced), report


@pytest.mark.parametrize("config", SIZES, ids=lambda config: config.__name__)
def test_networks_are_small(config, compared):
    expect_patched(config)
    children = ("fc1", "fc2") if config is products_alone else ("mlp",)
    assert compared == [dict.fromkeys(children, SIZES[config])]


def test_a_layer_that_needs_its_sizes(compared, monkeypatch):
    """Some modules have their sizes in a configuration too: a stand-in with other sizes does not run."""
    original = layer_specs.stand_in

    def fails(module, sizes=None, **options):
        if sizes:
            raise RuntimeError("shapes do not go together")
        return original(module, sizes, **options)

    monkeypatch.setattr(layer_specs, "stand_in", fails)
    expect_patched(qwen3_moe)
    assert compared == [{"mlp": SIZES[qwen3_moe]}, {}]


def test_large_weights_repeat_numbers_and_no_rows(monkeypatch):
    monkeypatch.setattr(recognise, "_MOST_DRAWN", 101)
    linear = nn.Linear(16, 64, bias=False)
    Numbers(0).fill(linear)
    assert len(linear.weight.unique(dim=0)) == 64 and len(linear.weight.unique()) == 101
    assert 0.2 < linear.weight.std() < 0.3  # products with normally distributed rows are so too

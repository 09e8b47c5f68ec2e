"""Sparse attention of transformers' DeepSeek-V3.2 and GLM-5 (DSA) by `indexer` and `mla`."""
import importlib

import pytest
import torch
import transformers

from fftune import ops

# With few heads many scores are 0, and topk chooses any of them.
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
             q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
             index_n_heads=16, index_head_dim=16, index_topk=5, attn_implementation="eager")
MODELS = {"DeepseekV32": "deepseek_v32", "GlmMoeDsa": "glm_moe_dsa"}


def make(name):
    module = importlib.import_module(f"transformers.models.{MODELS[name]}.modeling_{MODELS[name]}")
    torch.manual_seed(5)
    attention = getattr(module, f"{name}Attention")(getattr(transformers, f"{name}Config")(**SIZES), 0).eval()
    for p in attention.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return module, attention


def rows_of(module, attention, x, angles):
    """The results of the products in front: queries and rows of the cache, of the indexer and of attention."""
    own, rope = attention.indexer, attention.qk_rope_head_dim
    resid = attention.q_a_layernorm(attention.q_a_proj(x))
    q = attention.q_b_proj(resid).unflatten(-1, (-1, attention.qk_head_dim)).transpose(1, 2)
    latent, key = attention.kv_a_proj_with_mqa(x).split((attention.kv_lora_rank, rope), -1)
    q_rope, key = module.apply_rotary_pos_emb_interleave(q[..., -rope:], key[:, None], *angles)
    cache = torch.cat((attention.kv_a_layernorm(latent), key[:, 0]), -1)
    rotate = module.apply_rotary_pos_emb if module.__name__.endswith("v32") else module.apply_rotary_pos_emb_interleave
    index_q, index_k = own.wq_b(resid).unflatten(-1, (own.n_heads, -1)), own.k_norm(own.wk(x))[..., None, :]
    turned = rotate(index_q[..., :rope], index_k[..., :rope], *angles, unsqueeze_dim=2)
    index_q, index_k = (torch.cat((t, all[..., rope:]), -1) for t, all in zip(turned, (index_q, index_k)))
    return q[..., :-rope].transpose(1, 2), q_rope.transpose(1, 2), cache, index_q, own.weights_proj(x), index_k[:, :, 0]


@pytest.mark.parametrize("queries", [20, 3, 1])
@pytest.mark.parametrize("name", MODELS)
def test_attention_to_the_chosen_keys_is_that_of_the_model(name, queries):
    module, attention = make(name)
    x, positions = torch.randn(2, 20, 32), torch.arange(20)[None]
    angles = getattr(module, f"{name}RotaryEmbedding")(attention.config)(x, positions)
    mask = torch.zeros(2, 1, 20, 20).masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf)
    with torch.no_grad():
        right = attention(x, angles, mask, position_ids=positions)[0][:, -queries:]
        q, q_rope, cache, index_q, weights, index_k = rows_of(module, attention, x, angles)
        own = slice(-queries, None)
        chosen = ops.indexer(index_q[:, own], weights[:, own], index_k, top=attention.indexer.index_topk)
        nope = attention.qk_nope_head_dim
        kv_b = attention.kv_b_proj.weight.unflatten(0, (-1, nope + attention.v_head_dim))
        latent = ops.head_linear(q[:, own].contiguous(), kv_b[:, :nope], transposed=True)
        out = ops.mla(latent, q_rope[:, own].contiguous(), cache, chosen=chosen, scale=attention.scaling)
        y = attention.o_proj(ops.head_linear(out, kv_b[:, nope:]).flatten(-2))
        # All keys would give something else.
        dense = ops.mla(latent, q_rope[:, own].contiguous(), cache, scale=attention.scaling)
    assert torch.allclose(y, right, atol=1e-5)
    assert (out - dense)[:, -1].abs().max() > 0.01

"""Tiny transformers models with random weights."""
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

RELEASE = tuple(int(word) for word in transformers.__version__.split(".")[:2])  # (5, 23)
_SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
              num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
              bos_token_id=1, eos_token_id=2, pad_token_id=0)
_GPT2 = dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1,
             eos_token_id=2)
_T5 = dict(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
           decoder_start_token_id=0)

MODELS = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "llama3": lambda: transformers.LlamaConfig(
        **_SIZES, rope_parameters=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0,
                                       low_freq_factor=1.0, high_freq_factor=4.0,
                                       original_max_position_embeddings=64)),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, sliding_window=None),
    "gemma": lambda: transformers.GemmaConfig(**_SIZES, head_dim=8),
    "phi": lambda: transformers.PhiConfig(**_SIZES),
    "gpt2": lambda: transformers.GPT2Config(**_GPT2),
    "t5": lambda: transformers.T5Config(**_T5),
    "t5-gated": lambda: transformers.T5Config(**_T5, feed_forward_proj="gated-gelu"),
}

# Those that patch(whole_layers=True) knows beside them.
LAYERED = {
    "olmo2": lambda: transformers.Olmo2Config(**_SIZES),  # norms behind blocks, of all heads together
    "olmo": lambda: transformers.OlmoConfig(**_SIZES),  # norms without weights
    "smollm3": lambda: transformers.SmolLM3Config(**_SIZES, no_rope_layers=[1, 0]),
    "glm4": lambda: transformers.Glm4Config(**_SIZES, head_dim=8, partial_rotary_factor=0.5),
    "cohere": lambda: transformers.CohereConfig(**_SIZES),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(
        **{k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}, rotary_pct=0.5),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, max_position_embeddings=128, dropout=0.0),
    # Its attention is its own, and reads the mask.
    "xglm": lambda: transformers.XGLMConfig(
        vocab_size=96, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, max_position_embeddings=128,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0),
    # Each layer has an attention to an encoder's states too, which is not causal.
    "mbart": lambda: transformers.MBartConfig(
        vocab_size=96, d_model=32, decoder_layers=2, decoder_ffn_dim=48, decoder_attention_heads=4,
        encoder_layers=2, encoder_ffn_dim=48, encoder_attention_heads=4, is_decoder=True,
        is_encoder_decoder=False, max_position_embeddings=128, dropout=0.0),
    "stablelm": lambda: transformers.StableLmConfig(**_SIZES),
    "granite": lambda: transformers.GraniteConfig(**_SIZES, residual_multiplier=0.22,
                                                  embedding_multiplier=6.0),
    # Layers as those of Llama.
    "granite-plain": lambda: transformers.GraniteConfig(**_SIZES, residual_multiplier=1.0),
    "hunyuan": lambda: transformers.HunYuanDenseV1Config(**_SIZES, head_dim=8),
    "mistral-window": lambda: transformers.MistralConfig(**_SIZES, sliding_window=14),
    "gemma2": lambda: transformers.Gemma2Config(**_SIZES, head_dim=8, sliding_window=64),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**_SIZES, "num_hidden_layers": 3}, head_dim=8, sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
    "phi3": lambda: transformers.Phi3Config(**_SIZES),
    # Wider than stand-ins of layers are.
    "phi3-wide": lambda: transformers.Phi3Config(**{**_SIZES, "intermediate_size": 520}),
    "linear": lambda: transformers.LlamaConfig(
        **_SIZES, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
    "yarn": lambda: transformers.LlamaConfig(
        **_SIZES, rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                                       original_max_position_embeddings=32)),
}

_EXPERTS = dict(_SIZES, num_experts_per_tok=2)
# Mixtures of experts: transformers 5 has their experts' weights in one tensor each.
MIXTURES = {
    "mixtral": lambda: transformers.MixtralConfig(**_EXPERTS, num_local_experts=6,
                                                  sliding_window=None),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **_EXPERTS, num_experts=6, moe_intermediate_size=24, shared_expert_intermediate_size=40,
        decoder_sparse_step=1),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **_EXPERTS, num_experts=6, moe_intermediate_size=24, head_dim=8, norm_topk_prob=True),
    "deepseek": lambda: transformers.DeepseekV3Config(
        **dict(_EXPERTS, num_key_value_heads=4), n_routed_experts=8, n_shared_experts=1, n_group=4,
        topk_group=2, moe_intermediate_size=24, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8),
    "gpt-oss": lambda: transformers.GptOssConfig(**_EXPERTS, num_local_experts=6, head_dim=8,
                                                 sliding_window=64),
    "dots1": lambda: transformers.Dots1Config(
        **_EXPERTS, head_dim=8, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1,
        moe_intermediate_size=24, first_k_dense_replace=1),
}


class Adapter(torch.nn.Module):
    """As adapters are: attributes are those of what it wraps."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def make(name: str, dtype=torch.float32, device="cpu"):
    config = {**MODELS, **LAYERED, **MIXTURES}[name]()
    for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    torch.manual_seed(3)
    kind = (transformers.AutoModelForSeq2SeqLM if name.startswith("t5")
            else transformers.AutoModelForCausalLM)
    model = kind.from_config(config)
    with torch.no_grad():  # initial weights are too small and too much alike to show mistakes
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1)
    return model.to(device, dtype).eval()


def inputs(name: str, batch: int = 2, tokens: int = 9, device="cpu") -> dict:
    ids = torch.randint(3, 96, (batch, tokens), device=device)
    if name.startswith("t5"):
        return {"input_ids": ids, "decoder_input_ids": ids.flip(0)}
    return {"input_ids": ids}

"""The models that models.py builds: their sizes, how many of the real model's layers they have, and
the names by which pages call them. Pure data: needs no PyTorch."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Dense:
    name: str          # of the real model
    prefix: str        # of transformers' classes
    hidden: int
    intermediate: int
    layers: int        # of the model that is built
    all_layers: int    # of the real model
    heads: int
    kv_heads: int
    vocabulary: int


@dataclass(frozen=True)
class Mixture:
    name: str
    hidden: int
    intermediate: int  # of an expert
    experts: int
    chosen: int        # experts of a token
    layers: int
    all_layers: int
    heads: int


# A number behind a slash is the divisor of the layers: llama-8b/4 has a quarter of them.
DENSE = {
    "llama-1b": Dense("Llama-3.2-1B", "Llama", 2048, 8192, 16, 16, 32, 8, 128256),
    "llama-8b/4": Dense("Llama-3.1-8B", "Llama", 4096, 14336, 8, 32, 32, 8, 128256),
    "qwen2.5-7b-6-layers": Dense("Qwen2.5-7B", "Qwen2", 3584, 18944, 6, 28, 28, 4, 152064),
    "phi-3-mini-8-layers": Dense("Phi-3-mini", "Phi3", 3072, 8192, 8, 32, 32, 32, 32064),
    "olmo-2-1b": Dense("OLMo-2-1B", "Olmo2", 2048, 8192, 16, 16, 16, 16, 100352)}
MIXTURES = {
    "mixtral-8x7b/16": Mixture("Mixtral-8x7B", 4096, 14336, 8, 2, 2, 32, 32),
    "qwen3-30b-a3b/12": Mixture("Qwen3-30B-A3B", 2048, 768, 128, 8, 4, 48, 32)}


@dataclass(frozen=True)
class Hybrid:
    """A model with layers of several kinds, or with latents in its cache."""

    name: str
    prefix: str     # of transformers' classes
    layers: int
    all_layers: int
    settings: dict  # of its configuration
    suffix: str = ""  # between the prefix and Model or Config


LINEAR = ["linear_attention"] * 3 + ["full_attention"]
DELTA = dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
             linear_conv_kernel_dim=4, head_dim=256)
LATENT = dict(kv_lora_rank=512, qk_rope_head_dim=64, n_shared_experts=1, first_k_dense_replace=1)
GEMMA = dict(layer_types=["sliding_attention"] * 3 + ["full_attention"], head_dim=256, global_head_dim=512,
             final_logit_softcapping=30.0)
HYBRIDS = {
    "qwen3-next/12": Hybrid("Qwen3-Next-80B-A3B", "Qwen3Next", 4, 48, dict(
        **DELTA, hidden_size=2048, intermediate_size=5120, num_attention_heads=16, num_key_value_heads=2,
        num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        layer_types=LINEAR)),
    "qwen3.5-9b/4": Hybrid("Qwen3.5-9B", "Qwen3_5", 8, 32, dict(
        **DELTA, hidden_size=4096, intermediate_size=12288, num_attention_heads=16, num_key_value_heads=4,
        layer_types=LINEAR * 2), "Text"),
    "olmo-hybrid/8": Hybrid("OLMo-Hybrid-7B", "OlmoHybrid", 4, 32, dict(
        hidden_size=3840, intermediate_size=11008, num_attention_heads=30, num_key_value_heads=30,
        linear_num_key_heads=30, linear_num_value_heads=30, linear_key_head_dim=96, linear_value_head_dim=192,
        layer_types=LINEAR)),
    "kimi-linear/7": Hybrid("Kimi-Linear-48B-A3B", "KimiLinear", 4, 27, dict(
        hidden_size=2304, intermediate_size=9216, num_attention_heads=32, num_key_value_heads=32, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=1024, layer_types=LINEAR)),
    "bamba-9b/8": Hybrid("Bamba-9B", "Bamba", 4, 32, dict(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        attn_layer_indices=[3], mamba_n_heads=128, mamba_d_head=64, mamba_d_state=256, mamba_n_groups=1)),
    "granite-4-small/10": Hybrid("Granite-4.0-H-Small", "GraniteMoeHybrid", 4, 40, dict(
        hidden_size=4096, intermediate_size=768, num_attention_heads=32, num_key_value_heads=8,
        num_local_experts=72, num_experts_per_tok=10, shared_intermediate_size=1536, mamba_n_heads=128,
        mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, position_embedding_type=None,
        layer_types=["mamba"] * 3 + ["attention"])),
    "lfm2-1.2b": Hybrid("LFM2-1.2B", "Lfm2", 16, 16, dict(
        hidden_size=2048, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, conv_L_cache=3,
        layer_types=[("full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv") for i in range(16)])),
    "deepseek-v2-lite/6": Hybrid("DeepSeek-V2-Lite", "DeepseekV2", 4, 27, dict(
        **LATENT | dict(n_shared_experts=2), hidden_size=2048, intermediate_size=10944, num_attention_heads=16,
        num_key_value_heads=16, q_lora_rank=None, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=64,
        num_experts_per_tok=6, moe_intermediate_size=1408)),
    "glm-4.7-flash/12": Hybrid("GLM-4.7-Flash", "Glm4MoeLite", 4, 47, dict(
        **LATENT, hidden_size=2048, intermediate_size=10240, num_attention_heads=20, num_key_value_heads=20,
        q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, n_routed_experts=64, num_experts_per_tok=4,
        moe_intermediate_size=1536)),
    "minicpm3-4b/8": Hybrid("MiniCPM3-4B", "MiniCPM3", 8, 62, dict(
        hidden_size=2560, intermediate_size=6400, num_attention_heads=40, num_key_value_heads=40, q_lora_rank=768,
        kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)),
    "mistral-small-4/9": Hybrid("Mistral-Small-4", "Mistral4", 4, 36, dict(
        hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=32, q_lora_rank=1024,
        kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=128,
        num_experts_per_tok=4, n_shared_experts=1, moe_intermediate_size=2048)),
    "nemotron-nano-9b/14": Hybrid("Nemotron-Nano-9B-v2", "NemotronH", 4, 56, dict(
        hidden_size=4480, intermediate_size=15680, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
        mamba_num_heads=128, mamba_head_dim=80, n_groups=8, ssm_state_size=128,
        layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"])),
    "arcee-4.5b/9": Hybrid("AFM-4.5B", "Arcee", 4, 36, dict(
        hidden_size=2560, intermediate_size=18432, num_attention_heads=20, num_key_value_heads=4, head_dim=128)),
    "gemma-4-31b/15": Hybrid("Gemma-4-31B", "Gemma4", 4, 60, dict(
        **GEMMA, hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16,
        num_global_key_value_heads=4, attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=1024),
        "Text"),
    "gemma-4-26b-a4b/7": Hybrid("Gemma-4-26B-A4B", "Gemma4", 4, 30, dict(
        **GEMMA, hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_key_value_heads=8,
        num_global_key_value_heads=2, attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=1024,
        enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704), "Text"),
    "gemma-4-e2b/4": Hybrid("Gemma-4-E2B", "Gemma4", 8, 35, dict(
        **GEMMA | dict(layer_types=GEMMA["layer_types"] * 2), hidden_size=1536, intermediate_size=6144,
        num_attention_heads=8, num_key_value_heads=1, num_kv_shared_layers=4, vocab_size_per_layer_input=32000,
        use_double_wide_mlp=True), "Text")}


def title(name: str) -> str:
    """The model's name on pages: "Qwen3-30B-A3B (4 of 48 layers)"; a whole model has no number."""
    model = {**DENSE, **MIXTURES, **HYBRIDS}[name]
    if model.layers == model.all_layers:
        return model.name
    return f"{model.name} ({model.layers} of {model.all_layers} layers)"

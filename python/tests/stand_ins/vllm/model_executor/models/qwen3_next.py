import torch
from torch import nn

from vllm.model_executor.layers import parts
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from .llama import LlamaModel, layer_forward, support_torch_compile
from .qwen2_moe import Qwen2MoeMLP
from .qwen3_moe import MoERunner


class SharedExperts(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self._layer = layer


class Qwen3NextRunner(MoERunner):
    def __init__(self, gate, shared, c, count):
        super().__init__(gate, c, count)
        self.shared_experts = SharedExperts(shared)

    def forward(self, hidden_states, router_logits):
        return self.shared_experts._layer(hidden_states) + super().forward(hidden_states)


class GateLinear(parts.ReplicatedLinear):
    out_dtype = None


class Qwen3NextSparseMoeBlock(nn.Module):
    is_sequence_parallel = replicate_shared_expert = is_fused_shared_expert_enabled = False

    def __init__(self, c):
        super().__init__()
        self.gate, self.shared_expert = GateLinear(4, c.d), Qwen2MoeMLP(c, gated=True)
        self.experts = Qwen3NextRunner(self.gate, self.shared_expert, c, 4)

    def forward(self, hidden_states):
        return self.experts(hidden_states=hidden_states, router_logits=hidden_states)


class Qwen3NextAttention(nn.Module):
    attn_output_gate, dual_chunk_attention_config = True, None

    def __init__(self, c, prefix):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = c.heads, c.kv_heads, c.dim
        self.qkv_proj = parts.QKVParallelLinear((2 * c.heads + 2 * c.kv_heads) * c.dim, c.d)
        self.o_proj = parts.RowParallelLinear(c.d, c.heads * c.dim, tp_size=c.tp)
        self.rotary_emb = c.rotary
        self.q_norm, self.k_norm = (parts.GemmaRMSNorm(c.dim) for _ in "qk")
        self.attn = parts.Attention(f"{prefix}.attn", c.heads, c.kv_heads, c.dim)

    def forward(self, positions, hidden_states):
        positions = positions[0] if positions.dim() == 2 else positions
        sizes = [n * self.head_dim for n in (2 * self.num_heads, *[self.num_kv_heads] * 2)]
        both, k, v = self.qkv_proj(hidden_states).split(sizes, -1)
        q, gate = both.unflatten(-1, (self.num_heads, -1)).chunk(2, -1)
        k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (k, v))
        q, k = (self.rotary_emb(positions, norm(x)) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        return self.o_proj(self.attn(q, k, v).flatten(1) * torch.sigmoid(gate.flatten(1)))


class Qwen3NextDecoderLayer(nn.Module):
    layer_scale = use_attn_reduce_scatter_for_moe = False
    interleaved, mixture = True, True

    def __init__(self, c, prefix):
        super().__init__()
        self.layer_type = "full_attention" if int(prefix.split(".")[2]) % 4 == 3 else "linear_attention"
        if self.layer_type == "full_attention":
            self.self_attn = Qwen3NextAttention(c, f"{prefix}.self_attn")
        else:
            self.linear_attn = QwenGatedDeltaNetAttention(f"{prefix}.linear_attn", d=c.d,
                                                          gqa_interleaved_layout=self.interleaved)
        self.mlp = Qwen3NextSparseMoeBlock(c) if self.mixture else Qwen2MoeMLP(c)
        self.input_layernorm, self.post_attention_layernorm = (parts.GemmaRMSNorm(c.d) for _ in "12")

    def mix(self, positions, hidden_states):
        if self.layer_type == "full_attention":
            return self.self_attn(positions, hidden_states)
        return self.linear_attn(hidden_states)

    forward = layer_forward(mix)


@support_torch_compile
class Qwen3NextModel(LlamaModel):
    layer = Qwen3NextDecoderLayer

    def __init__(self, *, vllm_config):
        super().__init__(vllm_config=vllm_config)
        self.norm = parts.GemmaRMSNorm(vllm_config.model_config.hf_config.d)

from types import SimpleNamespace

import torch
from torch import nn

from vllm.model_executor.layers import parts

from .llama import LlamaModel, layer_forward, support_torch_compile
from .qwen3_moe import FusedTopKRouter, MoERunner, RoutedExperts

WINDOW = 7  # of every second layer


class OAIAttention(nn.Module):
    def __init__(self, c, prefix):
        super().__init__()
        self.num_attention_heads, self.num_key_value_heads = 2 * c.heads, 2 * c.kv_heads  # of two ranks
        self.num_local_attention_heads, self.num_local_key_value_heads, self.head_dim = c.heads, c.kv_heads, c.dim
        self.qkv_proj = parts.QKVParallelLinear((c.heads + 2 * c.kv_heads) * c.dim, c.d, bias=True)
        self.o_proj = parts.RowParallelLinear(c.d, c.heads * c.dim, bias=True, tp_size=c.tp)
        self.rotary_emb = c.rotary
        self.sinks = nn.Parameter(torch.randn(c.heads), requires_grad=False)
        self.attn = parts.Attention(f"{prefix}.attn", c.heads, c.kv_heads, c.dim,
                                    window=None if int(prefix.split(".")[2]) % 2 else WINDOW, sinks=self.sinks)

    def forward(self, hidden_states, positions):
        sizes = [n * self.head_dim for n in (self.num_local_attention_heads, *[self.num_local_key_value_heads] * 2)]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim))
                   for part in self.qkv_proj(hidden_states).split(sizes, -1))
        q, k = (self.rotary_emb(positions, x) for x in (q, k))
        return self.o_proj(self.attn(q, k, v).flatten(1))


class GateLinear(parts.ReplicatedLinear):
    out_dtype = None


class GptOssRoutedExperts(RoutedExperts):
    activation = SimpleNamespace(value="swigluoai")

    def __init__(self, c, count):
        super().__init__(c, count)
        self.w13_bias, self.w2_bias = (nn.Parameter(0.1 * torch.randn(count, rows), requires_grad=False)
                                       for rows in (2 * c.h, c.d))

    def forward(self, x, weights, ids):
        y = torch.zeros_like(x)
        for expert in range(len(self.w13_weight)):
            share = (weights * (ids == expert)).sum(-1, keepdim=True).to(x.dtype)
            both = x @ self.w13_weight[expert].T + self.w13_bias[expert]
            gate, up = both[..., 0::2].clamp(max=7), both[..., 1::2].clamp(-7, 7)
            hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            y = y + (hidden @ self.w2_weight[expert].T + self.w2_bias[expert]) * share
        return y


class GptOssRunner(MoERunner):
    def __init__(self, c, count):
        nn.Module.__init__(self)
        self.gate, self.routed_experts, self.shared_experts = None, GptOssRoutedExperts(c, count), None
        self.router = FusedTopKRouter(top_k=2, renormalize=True, scoring_func="softmax", eplb_state=None)

    def forward(self, hidden_states, router_logits):
        return self.routed_experts(hidden_states, *self.router.select(router_logits))


class MLPBlock(nn.Module):
    is_sequence_parallel = False

    def __init__(self, c, prefix):
        super().__init__()
        self.router = GateLinear(4, c.d, bias=True)
        self.experts = GptOssRunner(c, 4)

    def forward(self, x):
        return self.experts(hidden_states=x, router_logits=self.router(x))


class TransformerBlock(nn.Module):
    def __init__(self, c, prefix):
        super().__init__()
        self.attn = OAIAttention(c, f"{prefix}.attn")
        self.mlp = MLPBlock(c, f"{prefix}.mlp")
        self.input_layernorm, self.post_attention_layernorm = (parts.RMSNorm(c.d) for _ in "12")

    forward = layer_forward(lambda layer, positions, x: layer.attn(x, positions))


@support_torch_compile
class GptOssModel(LlamaModel):
    layer = TransformerBlock

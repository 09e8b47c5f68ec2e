from torch import nn

from vllm.model_executor.layers import parts

from .llama import LlamaAttention, LlamaModel, support_torch_compile

WINDOW = 7  # of every layer but each third one


class Gemma2MLP(nn.Module):
    def __init__(self, c, prefix=""):
        super().__init__()
        self.gate_up_proj = parts.MergedColumnParallelLinear(2 * c.h, c.d)
        self.down_proj = parts.RowParallelLinear(c.d, c.h, tp_size=c.tp)
        self.act_fn = parts.GeluAndMul("tanh")

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class Gemma2Attention(nn.Module):
    softcap, head_norms = 5.0, False

    def __init__(self, c, prefix):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = c.heads, c.kv_heads, c.dim
        self.qkv_proj = parts.QKVParallelLinear((c.heads + 2 * c.kv_heads) * c.dim, c.d)
        self.o_proj = parts.RowParallelLinear(c.d, c.heads * c.dim, tp_size=c.tp)
        is_sliding = int(prefix.split(".")[2]) % 3 != 1
        self.rotary_emb = self.rotary_of(c, is_sliding)
        if self.head_norms:
            self.q_norm, self.k_norm = (parts.GemmaRMSNorm(c.dim) for _ in "qk")
        self.attn = parts.Attention(f"{prefix}.attn", c.heads, c.kv_heads, c.dim, 0.125, WINDOW if is_sliding else None,
                                    self.softcap)

    @staticmethod
    def rotary_of(c, is_sliding):
        return c.rotary

    forward = LlamaAttention.forward


class Gemma2DecoderLayer(nn.Module):
    attention, network = Gemma2Attention, Gemma2MLP

    def __init__(self, c, prefix):
        super().__init__()
        self.self_attn = self.attention(c, f"{prefix}.self_attn")
        self.mlp = self.network(c, f"{prefix}.mlp")
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(self, f"{name}_layernorm", parts.GemmaRMSNorm(c.d))

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.post_attention_layernorm(self.self_attn(positions, hidden_states))
        hidden_states, residual = self.pre_feedforward_layernorm(hidden_states, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden_states)), residual


@support_torch_compile
class Gemma2Model(LlamaModel):
    layer = Gemma2DecoderLayer

    def __init__(self, *, vllm_config):
        super().__init__(vllm_config=vllm_config)
        self.norm = parts.GemmaRMSNorm(vllm_config.model_config.hf_config.d)

    def embed_input_ids(self, input_ids):
        return self.embed_tokens(input_ids) * 0.5

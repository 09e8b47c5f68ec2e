from types import SimpleNamespace

from torch import nn

from vllm.model_executor.layers import parts


def support_torch_compile(model):
    """Gives the class a call of its own, as vLLM's decorator does; this one counts."""

    def call(self, *arguments, **named):
        self.calls += 1
        return self.forward(*arguments, **named)

    model.__call__ = call
    return model


def layer_forward(mix):
    """A decoder layer's forward, in which mix(layer, positions, x) is attention or a mixer."""

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = mix(self, positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual

    return forward


class LlamaMLP(nn.Module):
    def __init__(self, c, prefix=""):
        super().__init__()
        self.gate_up_proj = parts.MergedColumnParallelLinear(2 * c.h, c.d)
        self.down_proj = parts.RowParallelLinear(c.d, c.h, tp_size=c.tp)
        self.act_fn = parts.SiluAndMul()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class LlamaAttention(nn.Module):
    qkv_bias = out_bias = head_norms = False

    def __init__(self, c, prefix):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = c.heads, c.kv_heads, c.dim
        self.qkv_proj = parts.QKVParallelLinear((c.heads + 2 * c.kv_heads) * c.dim, c.d,
                                                bias=self.qkv_bias)
        self.o_proj = parts.RowParallelLinear(c.d, c.heads * c.dim, bias=self.out_bias,
                                              tp_size=c.tp)
        self.rotary_emb = c.rotary
        if self.head_norms:
            self.q_norm, self.k_norm = (parts.RMSNorm(c.dim, 1e-6) for _ in "qk")
        self.attn = parts.Attention(f"{prefix}.attn", c.heads, c.kv_heads, c.dim)

    def forward(self, positions, hidden_states):
        sizes = [n * self.head_dim for n in (self.num_heads, *[self.num_kv_heads] * 2)]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim))
                   for part in self.qkv_proj(hidden_states).split(sizes, -1))
        if self.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (self.rotary_emb(positions, x) for x in (q, k))
        return self.o_proj(self.attn(q, k, v).flatten(1))


class LlamaDecoderLayer(nn.Module):
    attention, network = LlamaAttention, LlamaMLP

    def __init__(self, c, prefix):
        super().__init__()
        self.self_attn = self.attention(c, f"{prefix}.self_attn")
        self.mlp = self.network(c, f"{prefix}.mlp")
        self.input_layernorm, self.post_attention_layernorm = (parts.RMSNorm(c.d) for _ in "12")

    forward = layer_forward(lambda layer, positions, x: layer.self_attn(positions, x))


@support_torch_compile
class LlamaModel(nn.Module):
    layer = LlamaDecoderLayer
    aux_hidden_state_layers = ()

    def __init__(self, *, vllm_config):
        super().__init__()
        c = vllm_config.model_config.hf_config
        self.vllm_config = vllm_config
        self.embed_tokens = nn.Embedding(c.vocabulary, c.d)
        self.layers = nn.ModuleList(self.layer(c, f"model.layers.{i}") for i in range(c.layers))
        self.start_layer, self.end_layer = 0, c.layers
        self.norm = parts.RMSNorm(c.d)
        self.calls = 0

    def embed_input_ids(self, input_ids):
        return self.embed_tokens(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual, hidden = None, []
        for place, layer in enumerate(self.layers):
            self._note(hidden, place, x, residual)
            x, residual = layer(positions, x, residual)
        self._note(hidden, len(self.layers), x, residual)
        y = self.norm(x, residual)[0]
        return (y, hidden) if hidden else y

    def _note(self, hidden, place, x, residual):
        if place in self.aux_hidden_state_layers:
            hidden.append(x if residual is None else x + residual)


def config_of(c, dtype, **changes):
    """The configuration of an engine with a model of these sizes."""
    compilation = SimpleNamespace(cudagraph_mode=parts.CUDAGraphMode(name="FULL_AND_PIECEWISE"),
                                  pass_config=SimpleNamespace(enable_sp=False))
    parallel = SimpleNamespace(
        pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1,
        prefill_context_parallel_size=1, enable_dbo=False)
    whole = dict(model_config=SimpleNamespace(hf_config=c, dtype=dtype, max_model_len=128),
                 scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=4096),
                 parallel_config=parallel, compilation_config=compilation, lora_config=None,
                 quant_config=None, speculative_config=None, kv_transfer_config=None)
    for path, value in changes.items():
        home, _, name = path.partition("__")
        if name:
            setattr(whole[home], name, value)
        else:
            whole[home] = value
    return SimpleNamespace(**whole)

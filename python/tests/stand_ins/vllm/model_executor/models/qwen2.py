from .llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel, support_torch_compile


class Qwen2MLP(LlamaMLP):
    pass


class Qwen2Attention(LlamaAttention):
    qkv_bias = True
    dual_chunk_attention_config = None


class Qwen2DecoderLayer(LlamaDecoderLayer):
    attention, network = Qwen2Attention, Qwen2MLP


@support_torch_compile
class Qwen2Model(LlamaModel):
    layer = Qwen2DecoderLayer

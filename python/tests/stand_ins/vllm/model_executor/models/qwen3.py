from .llama import LlamaAttention, LlamaDecoderLayer, LlamaModel, support_torch_compile
from .qwen2 import Qwen2MLP


class Qwen3Attention(LlamaAttention):
    head_norms = True


class Qwen3DecoderLayer(LlamaDecoderLayer):
    attention, network = Qwen3Attention, Qwen2MLP


@support_torch_compile
class Qwen3Model(LlamaModel):
    layer = Qwen3DecoderLayer

from .llama import LlamaAttention, LlamaDecoderLayer, LlamaModel
from .qwen2 import Qwen2MLP


class Qwen3Attention(LlamaAttention):
    head_norms = True


class Qwen3DecoderLayer(LlamaDecoderLayer):
    attention, network = Qwen3Attention, Qwen2MLP


class Qwen3Model(LlamaModel):
    layer = Qwen3DecoderLayer

    def __call__(self, *arguments, **named):
        self.calls += 1
        return self.forward(*arguments, **named)

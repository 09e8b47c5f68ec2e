from vllm.model_executor.layers import parts

from .gemma2 import Gemma2Attention, Gemma2DecoderLayer, Gemma2MLP, Gemma2Model
from .llama import support_torch_compile


class Gemma3MLP(Gemma2MLP):
    pass


class Gemma3Attention(Gemma2Attention):
    softcap, head_norms = None, True

    @staticmethod
    def rotary_of(c, is_sliding):
        if not is_sliding:
            return c.rotary
        if not hasattr(c, "local_rotary"):
            c.local_rotary = parts.RotaryEmbedding(c.dim, base=100.0)
        return c.local_rotary


class Gemma3DecoderLayer(Gemma2DecoderLayer):
    attention, network = Gemma3Attention, Gemma3MLP


@support_torch_compile
class Gemma3Model(Gemma2Model):
    layer = Gemma3DecoderLayer

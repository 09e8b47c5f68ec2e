from .llama import support_torch_compile
from .qwen3_next import Qwen3NextDecoderLayer, Qwen3NextModel


class Qwen3_5DecoderLayer(Qwen3NextDecoderLayer):
    interleaved = mixture = False


@support_torch_compile
class Qwen3_5Model(Qwen3NextModel):
    layer = Qwen3_5DecoderLayer

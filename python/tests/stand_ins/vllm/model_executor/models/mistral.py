from .llama import LlamaAttention, LlamaDecoderLayer, LlamaModel, support_torch_compile


class MistralAttention(LlamaAttention):
    do_llama_4_scaling = False


class MistralDecoderLayer(LlamaDecoderLayer):
    attention = MistralAttention
    ada_rms_norm_t_cond = None


@support_torch_compile
class MistralModel(LlamaModel):
    layer = MistralDecoderLayer

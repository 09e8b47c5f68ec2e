from .llama import LlamaAttention, LlamaDecoderLayer, LlamaModel


class MistralAttention(LlamaAttention):
    do_llama_4_scaling = False


class MistralDecoderLayer(LlamaDecoderLayer):
    attention = MistralAttention
    ada_rms_norm_t_cond = None


class MistralModel(LlamaModel):
    layer = MistralDecoderLayer

    def __call__(self, *arguments, **named):
        self.calls += 1
        return self.forward(*arguments, **named)

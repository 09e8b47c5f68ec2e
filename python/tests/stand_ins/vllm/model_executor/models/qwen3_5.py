from .qwen3_next import Qwen3NextDecoderLayer, Qwen3NextModel


class Qwen3_5DecoderLayer(Qwen3NextDecoderLayer):
    interleaved = mixture = False


class Qwen3_5Model(Qwen3NextModel):
    layer = Qwen3_5DecoderLayer

    def __call__(self, *arguments, **named):
        self.calls += 1
        return self.forward(*arguments, **named)

from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod


class CompressedTensorsW8A8Fp8:
    def __init__(self, block, out_dtype, static=False):
        self.method = Fp8LinearMethod(block, out_dtype, static)
        self.fp8_linear = self.method.fp8_linear

    def process_weights_after_loading(self, layer):
        Fp8LinearMethod.process_weights_after_loading.__get__(self.method)(layer)

    def apply_weights(self, layer, x, bias=None):
        return self.fp8_linear.apply_weights(layer, x, bias)

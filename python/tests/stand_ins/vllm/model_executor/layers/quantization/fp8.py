from .fp8_kernels import StandInKernel


class Fp8LinearMethod:
    """vLLM's keeps a weight with blocks as it is, and transposes one with a scale of all."""

    def __init__(self, block, out_dtype, static=False):
        self.fp8_linear = StandInKernel(block, out_dtype, static)

    def process_weights_after_loading(self, layer):
        if not self.fp8_linear.block:
            layer.weight.data = layer.weight.data.t()
        layer.input_scale = None
        self.fp8_linear.process_weights_after_loading(layer)

    def apply(self, layer, x, bias=None):
        return self.fp8_linear.apply_weights(layer, x, bias)

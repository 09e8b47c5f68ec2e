"""Kernels that round activations to fp8 by token or by blocks of 128, and multiply by PyTorch."""
from dataclasses import dataclass

import torch


@dataclass
class FP8ScaledMMLinearLayerConfig:
    weight_shape: tuple
    input_dtype: torch.dtype
    out_dtype: torch.dtype


def rounded(x, columns):
    blocks = x.float().unflatten(-1, (-1, columns))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


class Kernel:
    def apply_weights(self, layer, x, bias=None):
        self.calls = getattr(self, "calls", 0) + 1
        y = rounded(x, self.columns(layer)) @ self.dense(layer)
        return (y if bias is None else y + bias).to(self.config.out_dtype)


class CutlassFP8ScaledMMLinearKernel(Kernel):
    def __init__(self, config, layer_param_names):
        self.config, self.layer_param_names = config, layer_param_names

    def columns(self, layer):
        return layer.weight.shape[0]

    def dense(self, layer):
        return layer.weight.float() * layer.weight_scale.reshape(1, -1)

    def process_weights_after_loading(self, layer):
        pass


class CutlassFp8BlockScaledMMKernel(Kernel):
    def __init__(self, config):
        self.config, self.weight_group_shape = config, (128, 128)

    def columns(self, layer):
        return 128

    def dense(self, layer):
        n, k = layer.weight.shape
        wide = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
        return (layer.weight.float() * wide).t()

    def process_weights_after_loading(self, layer):
        pass

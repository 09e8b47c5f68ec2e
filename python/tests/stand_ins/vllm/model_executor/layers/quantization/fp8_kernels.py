"""Kernels that round activations, with the attributes of vLLM's; they compute in float64."""
from dataclasses import dataclass
from typing import NamedTuple

import torch


class GroupShape(NamedTuple):
    row: int
    col: int


@dataclass(frozen=True)
class ScaleDesc:
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True)
class QuantKey:
    scale: ScaleDesc


@dataclass
class FP8ScaledMMLinearLayerConfig:
    weight_quant_key: QuantKey
    activation_quant_key: QuantKey
    weight_shape: tuple
    input_dtype: torch.dtype
    out_dtype: torch.dtype


def key(static, row, col):
    return QuantKey(ScaleDesc(static, GroupShape(row, col)))


class StandInKernel:
    def __init__(self, block, out_dtype, static=False):
        self.block, self.calls, self.use_deep_gemm_e8m0 = block, 0, False
        self.config = FP8ScaledMMLinearLayerConfig(
            key(True, 128, 128) if block else key(True, -1, 1), key(static, 1, 128 if block else -1), (), out_dtype,
            out_dtype)

    def process_weights_after_loading(self, layer):
        if not self.block:
            self.logical_output_size = layer.weight.shape[1]

    def apply_weights(self, layer, x, bias=None):
        self.calls += 1
        weight, scale = (layer.weight, layer.weight_scale_inv) if self.block else (
            layer.weight.t(), layer.weight_scale.reshape(-1, 1))
        size = 128 if self.block else x.shape[-1]
        parts = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
        own = (parts.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
        rounded = ((parts / own).to(torch.float8_e4m3fn).double() * own).flatten(-2)[..., :x.shape[-1]]
        wide = scale.double()
        if self.block:
            wide = wide.repeat_interleave(128, 0).repeat_interleave(128, 1)[:weight.shape[0], :weight.shape[1]]
        y = rounded @ (weight.double() * wide).t()
        return (y if bias is None else y + bias).to(self.config.out_dtype)

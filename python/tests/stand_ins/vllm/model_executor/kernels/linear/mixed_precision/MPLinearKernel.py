"""A kernel with the parameters of a checkpoint, which it dequantises by PyTorch. As vLLM's kernels do,
it takes them away from the layer when they are loaded."""
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ScalarType:
    size_bits: int
    bias: int

    def is_signed(self):
        return False

    def __str__(self):
        return f"uint{self.size_bits}" + (f"b{self.bias}" if self.bias else "")


@dataclass
class MPLinearLayerConfig:
    full_weight_shape: tuple
    partition_weight_shape: tuple
    weight_type: ScalarType
    act_type: torch.dtype
    group_size: int
    zero_points: bool
    has_g_idx: bool
    out_type: torch.dtype | None = None


def unpacked(words, dim, count, bits=4):
    shifts = torch.arange(0, 32, bits)
    shape = [1, 1, 1]
    shape[dim + 1] = 32 // bits
    return ((words.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)).flatten(dim, dim + 1).narrow(
        dim, 0, count)


class MPLinearKernel:
    def __init__(self, config, w_q, w_s, w_zp=None, w_gidx=None):
        self.config = config
        self.w_q_name, self.w_s_name, self.w_zp_name, self.w_gidx_name = w_q, w_s, w_zp, w_gidx

    def _get_weight_params(self, layer):
        return tuple(getattr(layer, name or "", None) for name in (
            self.w_q_name, self.w_s_name, self.w_zp_name, self.w_gidx_name))

    def process_weights_after_loading(self, layer):
        k, n = self.config.partition_weight_shape
        w_q, w_s, w_zp, index = self._get_weight_params(layer)
        q = unpacked(w_q.data, w_q.input_dim, k, self.config.weight_type.size_bits)
        q = q if w_q.input_dim == 0 else q.t()
        s = w_s.data if w_s.output_dim == 1 else w_s.data.t()
        z = self.config.weight_type.bias
        size = k if self.config.group_size == -1 else self.config.group_size
        at = index.data.long() if self.config.has_g_idx else torch.arange(k) // size
        if self.config.zero_points:
            z = unpacked(w_zp.data, w_zp.output_dim, n)
            z = (z if w_zp.output_dim == 1 else z.t())[at]
        self.dense = ((q - z) * s[at].float()).to(self.config.act_type)
        w_q.data = torch.zeros_like(w_q.data)  # in an order of its own

    def apply_weights(self, layer, x, bias=None):
        self.calls = getattr(self, "calls", 0) + 1
        y = x @ self.dense
        return y if bias is None else y + bias

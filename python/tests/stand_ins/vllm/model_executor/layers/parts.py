"""Linear layers, norms, RoPE and attention."""
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class UnquantizedLinearMethod:
    pass


class _Linear(nn.Module):
    def __init__(self, rows, columns, bias=False, tp_size=1):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * columns**-0.5, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(rows), requires_grad=False) if bias else None
        self.quant_method, self.skip_bias_add = UnquantizedLinearMethod(), False
        self.tp_size, self.tp_rank = tp_size, 0

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class QKVParallelLinear(_Linear):
    pass


class MergedColumnParallelLinear(_Linear):
    pass


class ReplicatedLinear(_Linear):
    pass


class RowParallelLinear(_Linear):
    reduce_results = input_is_parallel = True

    def forward(self, x):
        from vllm.distributed import tensor_model_parallel_all_reduce

        y = super().forward(x)
        return tensor_model_parallel_all_reduce(y) if self.tp_size > 1 else y


class RMSNorm(nn.Module):
    variance_size_override, has_weight = None, True

    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(d), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        wide = total if total.dtype is torch.float64 else total.float()
        normed = wide * (wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        y = normed.to(x.dtype) * self.weight
        return y if residual is None else (y, total)


class GemmaRMSNorm(nn.Module):
    """Its weight is kept as the distance from 1."""

    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(d), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        wide = total if total.dtype is torch.float64 else total.float()
        normed = wide * (wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        y = (normed * (1 + self.weight.to(wide.dtype))).to(x.dtype)
        return y if residual is None else (y, total)


class RMSNormGated(nn.Module):
    activation, group_size, norm_before_gate, bias = "silu", None, True, None

    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(d), requires_grad=False)
        self.eps = eps

    def forward(self, x, z):
        wide, gate = (t if t.dtype is torch.float64 else t.float() for t in (x, z))
        normed = wide * (wide.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return (normed * self.weight.to(wide.dtype) * F.silu(gate)).to(x.dtype)


class SiluAndMul(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class GeluAndMul(nn.Module):
    def __init__(self, approximate="none"):
        super().__init__()
        self.approximate = approximate

    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return F.gelu(gate, approximate=self.approximate) * up


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, positions=256, base=1e4, is_neox_style=True, factor=1.0):
        super().__init__()
        self.rotary_dim, self.is_neox_style = dim, is_neox_style
        frequencies = base ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.arange(positions)[:, None] * frequencies
        table = torch.cat((angles.cos(), angles.sin()), -1) * factor
        self.register_buffer("cos_sin_cache", table.bfloat16(), persistent=False)

    def forward(self, positions, x):
        """x [tokens, heads, features]"""
        cos, sin = self.cos_sin_cache[positions, None].to(x.dtype).chunk(2, -1)
        rotated, rest = x[..., :self.rotary_dim], x[..., self.rotary_dim:]
        a, b = (rotated.chunk(2, -1) if self.is_neox_style else
                (rotated[..., 0::2], rotated[..., 1::2]))
        a, b = a * cos - b * sin, b * cos + a * sin
        whole = (torch.cat((a, b), -1) if self.is_neox_style else
                 torch.stack((a, b), -1).flatten(-2))
        return torch.cat((whole, rest), -1)


class MRotaryEmbedding(RotaryEmbedding):
    pass


class FlashAttentionImpl:
    alibi_slopes = None

    def __init__(self, scale, softcap, sinks):
        self.scale, self.logits_soft_cap, self.sinks = scale, softcap, sinks


def _coded(x, scale):
    """Numbers as e4m3 keeps them, divided by their scale."""
    wide = x if x.dtype is torch.float64 else x.float()
    return (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


class Attention(nn.Module):
    """Over a cache [blocks, 2, block, kv heads, features], or [blocks, kv heads, block, 2 *
    features] as in 0.33. One of fp8 has bytes; queries are rounded to e4m3 then, too."""

    attn_type, kv_cache_dtype = "decoder", "auto"
    rounds_queries = True  # where the cache is of fp8
    kv_sharing_target_layer_name = None

    def __init__(self, name, heads, kv_heads, dim, scale=None, window=None, softcap=0, sinks=None):
        super().__init__()
        self.layer_name, self.sliding_window = name, window
        self.impl = FlashAttentionImpl(dim**-0.5 if scale is None else scale, softcap, sinks)
        self.num_heads, self.num_kv_heads, self.head_size = heads, kv_heads, dim
        self.kv_cache = torch.tensor([])
        self._q_scale, self._k_scale, self._v_scale = torch.ones(3).unbind()

    def forward(self, q, k, v):
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        if context.attn_metadata is None:
            return torch.zeros_like(q)
        metadata, cache = context.attn_metadata[self.layer_name], self.kv_cache
        scales = [scale.view(-1, 1) for scale in (self._k_scale, self._v_scale)]
        is_fp8 = self.kv_cache_dtype.startswith("fp8")
        if is_fp8:
            cache = cache.view(torch.float8_e4m3fn)
            k, v = (_coded(t, scale) for t, scale in zip((k, v), scales))
            if self.rounds_queries:
                q = (_coded(q, self._q_scale).float() * self._q_scale).to(q.dtype)
        block = cache.shape[2]
        # [blocks, block, kv heads, features] of keys and of values.
        parts = (cache.unbind(1) if cache.dim() == 5 else
                 cache.transpose(1, 2).split(self.head_size, -1))
        for token, slot in enumerate(context.slot_mapping[self.layer_name].tolist()):
            if slot >= 0:
                parts[0][slot // block, slot % block] = k[token]
                parts[1][slot // block, slot % block] = v[token]
        y = torch.zeros_like(q)
        starts = metadata.query_start_loc.tolist()
        for row, (first, last, length) in enumerate(zip(starts, starts[1:],
                                                        metadata.seq_lens.tolist())):
            if not length:
                continue
            keys, values = ((part.double() * scale).to(q.dtype) if is_fp8 else part for part, scale in zip(
                (part[metadata.block_table[row].long()].flatten(0, 1)[:length] for part in parts), scales))
            keys, values = (part.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for part in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q[first:last], keys) * self.impl.scale
            if self.impl.logits_soft_cap:
                scores = self.impl.logits_soft_cap * torch.tanh(scores / self.impl.logits_soft_cap)
            places, seen = torch.arange(length - (last - first), length)[:, None], torch.arange(length)
            scores.masked_fill_(seen > places, float("-inf"))
            if self.sliding_window is not None:
                scores.masked_fill_(seen <= places - self.sliding_window, float("-inf"))
                # vLLM has given these blocks to others.
                values = torch.where((seen > places[0] - self.sliding_window)[:, None, None], values, 0)
            if self.impl.sinks is not None:
                sinks = self.impl.sinks.to(scores.dtype)[:, None, None].expand(-1, last - first, 1)
                scores = torch.cat((scores, sinks), -1)
            y[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], values)
        return y


class CUDAGraphMode(SimpleNamespace):
    def __bool__(self):
        return self.name != "NONE"

    def decode_mode(self):
        return SimpleNamespace(name=self.name.split("_")[0])

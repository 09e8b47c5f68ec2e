"""Weights of 4 and 8 bits, and the ops that take them. kernels/gemm/packed/layout.cuh has the layout."""
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from .._codes import ONLY_GROUP, codes_of_pairs, pairs_of_codes
from .experts import moe_ffn
from .ffn import ffn, mlp
from .head import head, head_logits
from .linear import linear
from .qkv import qkv, qkv_cached

_MAGIC = {"int4": 0x34576666, "mxfp4": 0x344D6666, "fp8": 0x38466666, "int8": 0x38496666,
          "nvfp4": 0x344E6666}
_BITS = {"int4": 4, "mxfp4": 4, "fp8": 8, "int8": 8, "nvfp4": 4}


def _places(n: int, k: int, device, bits: int) -> tuple[Tensor, Tensor]:
    """The byte and the shift of each code [n, k] in the packed weight."""
    row = torch.arange(n, device=device).unsqueeze(1)
    column = torch.arange(k, device=device)
    block = row // 16 * -(-k // 64) + column // 64
    lane, step = row % 16 // 2 * 4 + column % 8 // 2, column % 64 // 16
    if bits == 8:
        byte = row % 2 + column % 2 * 2 + column % 16 // 8 * 4
        byte = (1 + block * 2 + step // 2) * 512 + lane * 16 + step % 2 * 8 + byte
        return byte, torch.zeros_like(byte)
    nibble = row % 2 + column % 16 // 8 * 2 + column % 2 * 4
    return (1 + block) * 512 + lane * 16 + step * 4 + nibble // 2, nibble % 2 * 4


# Bits of the e2m1 codes of a word, by the places where they are stored.
_E2M1_BITS = ((6, 7, 8, 15), (10, 11, 12, 19), (0, 1, 2, 9), (4, 13, 14, 21),
              (22, 23, 24, 31), (26, 27, 28, 3), (16, 17, 18, 25), (20, 29, 30, 5))


def _e2m1_words(w: Tensor, back: bool) -> Tensor:
    """Bytes behind the header with eight codes in the order of nibbles as they are stored, or back."""
    bytes_ = w[512:].view(-1, 4).long()  # CUDA has no products of integers
    words = sum(bytes_[:, i] << 8 * i for i in range(4))
    result = torch.zeros_like(words)
    for code, places in enumerate(_E2M1_BITS):
        for bit, stored in enumerate(places):
            one, other = (stored, 4 * code + bit) if back else (4 * code + bit, stored)
            result |= (words >> one & 1) << other
    rows = torch.stack([result >> 8 * i & 255 for i in range(4)], 1)
    return torch.cat((w[:512], rows.flatten().to(w.dtype)))


def _by_tiles(rows: Tensor) -> Tensor:
    """[n, groups] as [tiles of 16 rows, groups, 16]."""
    return F.pad(rows, (0, 0, 0, -len(rows) % 16)).unflatten(0, (-1, 16)).transpose(1, 2).contiguous()


def _by_rows(tiles: Tensor, n: int) -> Tensor:
    return tiles.transpose(1, 2).flatten(0, 1)[:n].contiguous()


def _packed_codes(format: str, codes: Tensor, k: int) -> Tensor:
    n, bits = len(codes), _BITS[format]
    plain = (codes if bits == 8 else codes_of_pairs(codes, k)).int()
    parts = -(-n // 16) * -(-k // 64) * bits // 4
    w = torch.zeros((parts + 1) * 512, dtype=torch.int32, device=codes.device)
    byte, shift = _places(n, k, codes.device, bits)
    w.index_add_(0, byte.flatten(), (plain << shift.int()).flatten())
    if format in ONLY_GROUP:
        w = _e2m1_words(w, False)
    header = torch.tensor([_MAGIC[format], 2, n, k], dtype=torch.int32).view(torch.uint8)
    w[:16] = header.to(w)
    return w.to(torch.uint8).view(-1, 512)


def _plain_codes(format: str, w: Tensor, n: int, k: int) -> Tensor:
    byte, shift = _places(n, k, w.device, _BITS[format])
    w = w.flatten()
    codes = (_e2m1_words(w, True) if format in ONLY_GROUP else w)[byte] >> shift.to(torch.uint8)
    return codes if _BITS[format] == 8 else pairs_of_codes(codes & 15)


def _pack_weight(codes, scale, zero, k):
    no_zero = codes.new_empty(0)
    return (_packed_codes("int4", codes, k), _by_tiles(scale),
            no_zero if zero is None else _by_tiles(zero))


def _unpack_weight(w, scale, zero, n, k):
    return (_plain_codes("int4", w, n, k), _by_rows(scale, n),
            w.new_empty(0) if zero is None else _by_rows(zero, n))


def _pack_other(format, codes, scale, k):
    return _packed_codes(format, codes, k), _by_tiles(scale)


def _unpack_other(format, w, scale, n, k):
    return _plain_codes(format, w, n, k), _by_rows(scale, n)


def pack_weight_nvfp4(codes, scale, row_scale, k):
    """Scales [tiles, 2 + pairs of groups, 32]: the rows' in bytes, then two of each row."""
    pairs = F.pad(scale, (0, scale.shape[1] % 2)).unflatten(1, (-1, 2))
    pairs = F.pad(pairs, (0, 0, 0, 0, 0, -len(pairs) % 16)).unflatten(0, (-1, 16)).transpose(1, 2)
    rows = F.pad(row_scale.float(), (0, -len(row_scale) % 16)).view(-1, 16).view(torch.uint8)
    return _packed_codes("nvfp4", codes, k), torch.cat((rows.view(-1, 2, 32), pairs.flatten(2)), 1)


def _nvfp4_scales(scale: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    rows = scale[:, :2].flatten(1).view(torch.float32).flatten()[:n].clone()
    groups = scale[:, 2:].unflatten(2, (16, 2)).transpose(1, 2).flatten(2).flatten(0, 1)
    return groups[:n, :k // 16].contiguous(), rows


def unpack_weight_nvfp4(w, scale, n, k):
    return _plain_codes("nvfp4", w, n, k), *_nvfp4_scales(scale, n, k)


pack_weight_128 = pack_weight_64 = pack_weight_32 = pack_weight_row = _pack_weight
unpack_weight_128 = unpack_weight_64 = unpack_weight_32 = unpack_weight_row = _unpack_weight

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _dense(format, w, scale, zero, n, k, group, dtype):
    """The weight [n, k] of a packed one."""
    if format == "nvfp4":
        scale, rows = _nvfp4_scales(scale, n, k)
        scale = scale.view(torch.float8_e4m3fn).float() * rows[:, None]
    else:
        scale = _by_rows(scale, n)
    group = ONLY_GROUP.get(format) or (k if group == "row" else int(group))
    groups = torch.arange(k, device=w.device) // group
    codes = _plain_codes(format, w, n, k)
    if format == "fp8":
        values = codes.view(torch.float8_e4m3fn).float()
    elif format == "int8":
        values = codes.view(torch.int8).float()
    elif format in ONLY_GROUP:
        table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=w.device)
        values = table[codes_of_pairs(codes, k).long()]
        scale = scale if format == "nvfp4" else torch.where(scale == 255, torch.nan, torch.exp2(scale.float() - 127))
    else:
        offset = _by_rows(zero, n).float()[:, groups] if zero is not None else 8.0
        values = codes_of_pairs(codes, k).float() - offset
    return (values * scale.float()[:, groups]).to(dtype)


def _linear_packed(format, x, w, scale, zero, bias, residual, n, group):
    return linear(x, _dense(format, w, scale, zero, n, x.shape[-1], group, x.dtype), bias, residual)


def _ffn_packed(format, x, w_gate, w_up, w_down, gate_scale, up_scale, down_scale, *others):
    gate_zero, up_zero, down_zero = others[:3] if format == "int4" else (None,) * 3
    bias, residual, h, group, act = others[-5:]
    d = x.shape[-1]
    return ffn(x, _dense(format, w_gate, gate_scale, gate_zero, h, d, group, x.dtype),
               _dense(format, w_up, up_scale, up_zero, h, d, group, x.dtype),
               _dense(format, w_down, down_scale, down_zero, d, h, group, x.dtype), bias, residual, act)


def _with_dense(format, x, w, scale, *others):
    """The arguments of qkv, or qkv_cached, for the dense weight."""
    zero, others = (others[0], others[1:]) if format == "int4" else (None, others)
    bias, q_norm, k_norm, positions, angles, *others = others
    caches, (heads, kv_heads, dim, group, *options) = others[:-9], others[-9:]
    w = _dense(format, w, scale, zero, (heads + 2 * kv_heads) * dim, x.shape[-1], group, x.dtype)
    return (x, w, None, None, bias, None, None, q_norm, k_norm, positions, angles, *caches, heads,
            kv_heads, *options)


def _mlp_packed(format, x, w_up, w_down, up_scale, down_scale, *others):
    zeros, others = (others[:2], others[2:]) if format == "int4" else ((None, None), others)
    b_up, b_down, residual, h, group, act = others
    d = x.shape[-1]
    return mlp(x, _dense(format, w_up, up_scale, zeros[0], h, d, group, x.dtype),
               _dense(format, w_down, down_scale, zeros[1], d, h, group, x.dtype), b_up, b_down, residual, act)


def _with_dense_head(format, logits_alone, x, w_norm, b_norm, w, scale, *others):
    """head, or head_logits, for the dense weight."""
    zero, others = (others[0], others[1:]) if format == "int4" else (None, others)
    bias, *draw, vocab, group = others[:3 if logits_alone else 9]
    w = _dense(format, w, scale, zero, vocab, x.shape[-1], group, x.dtype)
    return (head_logits if logits_alone else head)(x, w_norm, b_norm, w, bias, *draw,
                                                   *others[3 if logits_alone else 9:])


def _moe_ffn_packed(format, x, ids, weights, w_gate, w_up, w_down, *others):
    scales, others = others[:3], others[3:]
    zeros, others = (others[:3], others[3:]) if format == "int4" else ((None,) * 3, others)
    b_gate, b_up, b_down, experts, h, act, weigh, shared, group, routing = others
    d, count = x.shape[-1], experts + shared
    gate, up, down = (
        _dense(format, w, scale, zero, count * n, k, group, x.dtype).view(count, n, k)
        for w, scale, zero, n, k in zip((w_gate, w_up, w_down), scales, zeros, (h, h, d), (d, d, h)))
    b_gate_up = None if b_gate is None else torch.cat((b_gate, b_up), 1)
    return moe_ffn(x, ids, weights, torch.cat((gate, up), 1), None, down, b_gate_up, b_down, act, "halves",
                   weigh, shared, routing)


def _define_packed(format: str) -> None:
    """The ops of a format, by their names."""
    end = "" if format == "int4" else f"_{format}"

    def linear_packed(x, w, scale, *others):
        zero, others = (others[0], others[1:]) if format == "int4" else (None, others)
        return _linear_packed(format, x, w, scale, zero, *others)

    globals().update({
        f"linear_packed{end}": linear_packed,
        f"ffn_packed{end}": functools.partial(_ffn_packed, format),
        f"mlp_packed{end}": functools.partial(_mlp_packed, format),
        f"head_packed{end}": functools.partial(_with_dense_head, format, False),
        f"head_logits_packed{end}": functools.partial(_with_dense_head, format, True),
        f"moe_ffn_packed{end}": functools.partial(_moe_ffn_packed, format),
        f"qkv_packed{end}": lambda *a: qkv(*_with_dense(format, *a)),
        f"qkv_packed_cached{end}": lambda *a: qkv_cached(*_with_dense(format, *a))})
    if format not in ("int4", "nvfp4"):
        for word in ("",) if format == "mxfp4" else ("_128", "_64", "_32", "_row"):
            globals()[f"pack_weight{end}{word}"] = functools.partial(_pack_other, format)
            globals()[f"unpack_weight{end}{word}"] = functools.partial(_unpack_other, format)


for _format in _BITS:
    _define_packed(_format)

"""Every op in plain PyTorch. These run with FFTUNE_DISABLE=1, and tests compare with them. Functions
take the arguments of the custom ops of the same names (fftune.ops)."""
import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ._codes import ONLY_GROUP, codes_of_pairs, pairs_of_codes
from ._layer_form import packed_sizes, parse, with_constants
from ._library import Error

aten = torch.ops.aten

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "none": lambda x: x,
}


def activation_backward(act: str, dy: Tensor, x: Tensor) -> Tensor:
    """dy times the derivative of the activation at x."""
    if act == "silu":
        return aten.silu_backward(dy, x)
    if act == "relu":
        return aten.threshold_backward(dy, x, 0)
    if act == "none":
        return dy
    return aten.gelu_backward(dy, x, approximate="tanh" if act == "gelu-tanh" else "none")


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _added(y: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    if bias is not None:
        y = y + bias
    return y if residual is None else y + residual


# ffn

def ffn_preact(x, w_gate, w_up, w_down, bias, residual, act):
    gate, up = F.linear(x, w_gate), F.linear(x, w_up)
    y = F.linear(ACTIVATIONS[act](gate) * up, w_down)
    return _added(y, bias, residual), gate, up


def ffn(x, w_gate, w_up, w_down, bias, residual, act):
    return ffn_preact(x, w_gate, w_up, w_down, bias, residual, act)[0]


def ffn_backward(dy, x, gate, up, w_gate, w_up, w_down, act):
    if gate is None:
        gate, up = F.linear(x, w_gate), F.linear(x, w_up)
    hidden = ACTIVATIONS[act](gate) * up
    d_hidden = dy @ w_down
    d_gate = activation_backward(act, d_hidden * up, gate)
    d_up = d_hidden * ACTIVATIONS[act](gate)
    dx = d_gate @ w_gate + d_up @ w_up
    dy, x, d_gate, d_up, hidden = map(_rows, (dy, x, d_gate, d_up, hidden))
    return dx, d_gate.T @ x, d_up.T @ x, dy.T @ hidden


def ffn_frozen_backward(dy, x, gate, *others):
    # x has no part in dx where gate is given
    return ffn_backward(dy, dy if x is None else x, gate, *others)[0]


def _add(into: tuple, gradients: tuple) -> None:
    for tensor, gradient in zip(into, gradients, strict=True):
        tensor += gradient


def ffn_backward_into(dy, x, gate, up, w_gate, w_up, w_down, d_gate, d_up, d_down, act):
    dx, *gradients = ffn_backward(dy, x, gate, up, w_gate, w_up, w_down, act)
    _add((d_gate, d_up, d_down), gradients)
    return dx


def ffn_block(x, residual, w_norm, w_gate, w_up, w_down, act, convention, eps):
    total = x if residual is None else x + residual
    normed = rmsnorm(total, w_norm, eps, convention)
    return ffn(normed, w_gate, w_up, w_down, None, total, act)


def mlp(x, w_up, w_down, b_up, b_down, residual, act):
    return _added(F.linear(ACTIVATIONS[act](F.linear(x, w_up, b_up)), w_down, b_down), None, residual)


def _dequantised(q: Tensor, scale: Tensor, rows: int) -> Tensor:
    """Elements times scales: one in all, or one for each `rows` x 128 of them."""
    if scale.numel() == 1:
        return q.float() * scale
    spread = scale.repeat_interleave(rows, -2).repeat_interleave(128, -1)
    return q.float() * spread[..., : q.shape[-2], : q.shape[-1]]


def quantise(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """fp8 elements [..., k] and their scales: one for each 128 of a row, or the one given."""
    if scale is not None:
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
    k = x.shape[-1]
    blocks = F.pad(x.float(), (0, -k % 128)).unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale == 0, 1.0, scale)
    return ((blocks / scale).flatten(-2)[..., :k].to(torch.float8_e4m3fn), scale.squeeze(-1))


def quantise_weight(w: Tensor, block: bool) -> tuple[Tensor, Tensor]:
    """fp8 elements [n, k] and their scales: [1], or one for each 128 x 128 of them."""
    n, k = w.shape
    if not block:
        scale = (w.float().abs().max() / 448).reshape(1)
        scale = torch.where(scale == 0, 1.0, scale)
        return quantise(w, scale)[0], scale
    tiles = F.pad(w.float(), (0, -k % 128, 0, -n % 128)).unflatten(-1, (-1, 128))
    tiles = tiles.unflatten(0, (-1, 128))  # [n / 128, 128, k / 128, 128]
    scale = tiles.abs().amax((1, 3), keepdim=True) / 448
    scale = torch.where(scale == 0, 1.0, scale)
    q = (tiles / scale).flatten(0, 1).flatten(1, 2)[:n, :k]
    return q.to(torch.float8_e4m3fn), scale.squeeze((1, 3))


def ffn_fp8(x, w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale, hidden_scale, w_down_scale,
            act):
    x = _dequantised(x, x_scale, 1)
    gate = F.linear(x, _dequantised(w_gate, w_gate_scale, 128))
    up = F.linear(x, _dequantised(w_up, w_up_scale, 128))
    q, scale = quantise(ACTIVATIONS[act](gate) * up, hidden_scale)
    y = F.linear(_dequantised(q, scale, 1), _dequantised(w_down, w_down_scale, 128))
    return y.bfloat16()


def _ffn_fp8_of(product, x, w_gate, w_up, w_down, gate_scale, up_scale, down_scale, bias, residual, act):
    gate, up = (product(x.float(), w, scale, None, None) for w, scale in ((w_gate, gate_scale), (w_up, up_scale)))
    y = product(ACTIVATIONS[act](gate) * up, w_down, down_scale, None, None)
    return _added(y, bias, residual).to(x.dtype)


def ffn_fp8_token(*arguments):
    return _ffn_fp8_of(linear_fp8_token, *arguments)


def ffn_fp8_block(*arguments):
    return _ffn_fp8_of(linear_fp8_block, *arguments)


# linear

def linear(x, w, bias, residual):
    return _added(F.linear(x, w), bias, residual)


def _rounded_tokens(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale <= 2.0**-100, 1.0, scale)
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def _rounded_blocks(x):
    return _dequantised(*quantise(x), 1)


def linear_fp8_token(x, w, w_scale, bias, residual):
    q = _rounded_tokens(x)
    return _added(F.linear(q, w.float() * w_scale[:, None]), bias, residual).to(x.dtype)


def linear_fp8_block(x, w, w_scale, bias, residual):
    q = _rounded_blocks(x)
    return _added(F.linear(q, _dequantised(w, w_scale, 128)), bias, residual).to(x.dtype)


def linear_backward(dy, x, w, bias):
    rows = _rows(dy)
    dbias = rows.sum(0) if bias else rows.new_empty(0)
    return dy @ w, rows.T @ _rows(x), dbias


def linear_backward_into(dy, x, w, dw, dbias):
    dx, *gradients = linear_backward(dy, x, w, dbias is not None)
    _add((dw,) if dbias is None else (dw, dbias), gradients[:1 if dbias is None else 2])
    return dx


# packed weights: kernels/gemm/packed/layout.cuh has the layout

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


# two experts behind a mask

def _chosen(mask: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.where(mask.bool().unsqueeze(-1), first, second)


def masked_linear(x, mask, w_true, w_false, pattern):
    return _chosen(mask, F.linear(x, w_true), F.linear(x, w_false))


def masked_linear_backward(dy, x, mask, w_true, w_false, pattern):
    marked = mask.bool().unsqueeze(-1)
    results = []
    for dy_part, w in ((torch.where(marked, dy, 0), w_true), (torch.where(marked, 0, dy), w_false)):
        results.append((dy_part @ w, _rows(dy_part).T @ _rows(x)))
    return results[0][0] + results[1][0], results[0][1], results[1][1]


def masked_linear_frozen_backward(dy, mask, w_true, w_false, pattern):
    x = dy.new_zeros(*dy.shape[:-1], w_true.shape[1])
    return masked_linear_backward(dy, x, mask, w_true, w_false, pattern)[0]


def masked_ffn(x, mask, w_gate_true, w_up_true, w_down_true, w_gate_false, w_up_false, w_down_false,
               act, pattern):
    return _chosen(mask, ffn(x, w_gate_true, w_up_true, w_down_true, None, None, act),
                   ffn(x, w_gate_false, w_up_false, w_down_false, None, None, act))


def masked_ffn_preact(x, mask, *weights_and_options):
    """Here gate and up are those of the tokens in their order; the kernels save them in the mask's."""
    w_gate_true, w_up_true, _, w_gate_false, w_up_false, *_ = weights_and_options
    return (masked_ffn(x, mask, *weights_and_options),
            _chosen(mask, F.linear(x, w_gate_true), F.linear(x, w_gate_false)),
            _chosen(mask, F.linear(x, w_up_true), F.linear(x, w_up_false)))


def masked_ffn_backward(dy, x, mask, gate, up, *weights_and_options):
    *weights, act, _ = weights_and_options
    marked = mask.bool().unsqueeze(-1)
    true = ffn_backward(torch.where(marked, dy, 0), x, gate, up, *weights[:3], act)
    false = ffn_backward(torch.where(marked, 0, dy), x, gate, up, *weights[3:], act)
    return (true[0] + false[0], *true[1:], *false[1:])


def masked_ffn_frozen_backward(dy, x, *others):
    return masked_ffn_backward(dy, dy if x is None else x, *others)[0]


def masked_linear_backward_into(dy, x, mask, w_true, w_false, d_true, d_false, pattern):
    dx, *gradients = masked_linear_backward(dy, x, mask, w_true, w_false, pattern)
    _add((d_true, d_false), gradients)
    return dx


def masked_ffn_backward_into(dy, x, mask, gate, up, *others):
    dx, *gradients = masked_ffn_backward(dy, x, mask, gate, up, *others[6:])
    _add(others[:6], gradients)
    return dx


# mixtures of experts

def _rows_by_expert(ids, experts):
    """Yields every chosen expert: its number, the tokens, and which choice of theirs it is."""
    for expert in range(experts):
        tokens, choices = torch.where(ids == expert)
        if tokens.numel():
            yield expert, tokens, choices


def _gate_and_up(both, packing):
    return both.chunk(2, 0) if packing == "halves" else (both[0::2], both[1::2])


def _swiglu_oai(gate, up):
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _activated(act, gate, up):
    return _swiglu_oai(gate, up) if act == "swiglu-oai" else ACTIVATIONS[act](gate) * up


def _with_shared(ids, weights, experts, shared):
    """Choices of every token beside its own: the last experts, with weight 1."""
    more = torch.arange(experts - shared, experts, device=ids.device, dtype=ids.dtype)
    more = more.expand(*ids.shape[:-1], shared)
    return (torch.cat((torch.where(ids < experts - shared, ids, -1), more), -1),
            torch.cat((weights, torch.ones_like(more, dtype=weights.dtype)), -1))


def _of_expert(expert, given, w_gate, w_up, b_gate_up, packing):
    """gate and up of its tokens."""
    if w_up is not None:
        return tuple(F.linear(given, w[expert]) for w in (w_gate, w_up))
    weights = _gate_and_up(w_gate[expert], packing)
    biases = (None, None) if b_gate_up is None else _gate_and_up(b_gate_up[expert], packing)
    return tuple(F.linear(given, w, b) for w, b in zip(weights, biases))


def moe_ffn_preact(x, ids, weights, w_gate, w_up, w_down, b_gate_up, b_down, act, packing, weigh,
                   shared, routing):
    ids, weights = _with_shared(ids, weights, w_gate.shape[0], shared)
    rows, ids, shares = _rows(x), _rows(ids), _rows(weights)
    y = torch.zeros(rows.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    gates, ups = [], []
    for expert, tokens, choices in _rows_by_expert(ids, w_gate.shape[0]):
        share = shares[tokens, choices, None]
        given = rows[tokens] if weigh == "after" else (rows[tokens] * share).to(x.dtype)
        gate, up = _of_expert(expert, given, w_gate, w_up, b_gate_up, packing)
        bias = None if b_down is None else b_down[expert]
        out = F.linear(_activated(act, gate, up), w_down[expert], bias).to(y.dtype)
        y = y.index_add(0, tokens, out * share.to(y.dtype) if weigh == "after" else out)
        gates.append(gate)
        ups.append(up)
    missing = x.new_zeros(ids.numel() - sum(map(len, gates)), w_down.shape[2])
    return y.to(x.dtype).view(x.shape), torch.cat((*gates, missing)), torch.cat((*ups, missing))


def moe_ffn(*arguments):
    return moe_ffn_preact(*arguments)[0]


def moe_ffn_slice(x, ids, first_expert, weights, w_gate, w_up, w_down, b_gate_up, b_down, experts, act,
                  packing, weigh, routing):
    own = ids.long() - first_expert
    own = torch.where((own < 0) | (own >= w_down.shape[0]), -1, own)
    return moe_ffn(x, own, weights, w_gate, w_up, w_down, b_gate_up, b_down, act, packing, weigh, 0, routing)


def _expert_of_fp8(w, scale):
    """Weights [experts, n, k] times their scales, of each expert, of rows or of blocks."""
    if scale.dim() == 3:
        return _dequantised(w, scale, 128)
    rows = scale.view(len(w), -1, 1)
    return w.float() * rows.repeat_interleave(w.shape[1] // rows.shape[1], 1)


def moe_ffn_fp8(x, ids, weights, w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale,
                hidden_scale, w_down_scale, act, packing, shared, routing):
    by_token = w_gate_scale.dim() == 2 and hidden_scale is None
    rows = _rows(x).float() * (x_scale if hidden_scale is not None else
                               _rows(x_scale).repeat_interleave(x.shape[-1] if by_token else 128, -1)
                               [:, :x.shape[-1]])
    if hidden_scale is not None:
        round_hidden = lambda hidden: _dequantised(*quantise(hidden, hidden_scale), 1)
    else:
        round_hidden = _rounded_tokens if by_token else _rounded_blocks
    y = _experts_fp8(rows.view(x.shape), round_hidden, ids, weights, w_gate, w_up, w_down, w_gate_scale, w_up_scale,
                     w_down_scale, act, packing, shared)
    return y.bfloat16()


def moe_ffn_fp8_token(x, *arguments):
    return _experts_fp8(_rounded_tokens(x), _rounded_blocks, *arguments[:-1]).to(x.dtype)


def moe_ffn_fp8_block(x, *arguments):
    return _experts_fp8(_rounded_blocks(x), _rounded_blocks, *arguments[:-1]).to(x.dtype)


def _experts_fp8(x, round_hidden, ids, weights, w_gate, w_up, w_down, w_gate_scale, w_up_scale, w_down_scale, act,
                 packing, shared):
    ids, weights = _with_shared(ids, weights, w_gate.shape[0], shared)
    rows, ids, shares = (_rows(t) for t in (x, ids, weights))
    both = _expert_of_fp8(w_gate, w_gate_scale)
    gate, up = both.chunk(2, 1) if w_up is None else (both, _expert_of_fp8(w_up, w_up_scale))
    if w_up is None and packing == "interleaved":
        gate, up = both[:, 0::2], both[:, 1::2]
    down = _expert_of_fp8(w_down, w_down_scale)
    y = torch.zeros_like(rows)
    for expert, tokens, choices in _rows_by_expert(ids, len(down)):
        own = rows[tokens]
        hidden = round_hidden(ACTIVATIONS[act](F.linear(own, gate[expert])) * F.linear(own, up[expert]))
        y = y.index_add(0, tokens, shares[tokens, choices, None] * F.linear(hidden, down[expert]))
    return y.view(x.shape)


def _activated_backward(act, d_hidden, gate, up):
    """The gradients by gate and by up."""
    if act != "swiglu-oai":
        return activation_backward(act, d_hidden * up, gate), d_hidden * ACTIVATIONS[act](gate)
    near, share = gate.clamp(max=7.0), torch.sigmoid(1.702 * gate.clamp(max=7.0))
    d_gate = d_hidden * (up.clamp(-7.0, 7.0) + 1) * (share + 1.702 * near * share * (1 - share))
    # As the gradient of clamp, which is 0 at NaN.
    return (torch.where(gate <= 7, d_gate, 0.0),
            torch.where(up.abs() <= 7, d_hidden * near * share, 0.0))


def moe_ffn_backward(dy, x, ids, weights, gate, up, w_gate, w_up, w_down, b_gate_up, b_down, act,
                     packing, weigh, shared, routing):
    wide, k = torch.promote_types(x.dtype, torch.float32), ids.shape[-1]
    ids, every = _with_shared(ids, weights, w_gate.shape[0], shared)
    rows, grads, ids, shares = (_rows(t) for t in (x, dy, ids, every))
    dx, d_shares = torch.zeros_like(rows, dtype=wide), torch.zeros_like(shares, dtype=wide)
    d_experts = [None if t is None else torch.zeros_like(t)
                 for t in (w_gate, w_up, w_down, b_gate_up, b_down)]
    dw_gate, dw_up, dw_down, db_gate_up, db_down = d_experts
    for expert, tokens, choices in _rows_by_expert(ids, w_gate.shape[0]):
        own, grad, share = rows[tokens], grads[tokens], shares[tokens, choices, None].to(x.dtype)
        given, grad_out = (own, grad * share) if weigh == "after" else (own * share, grad)
        gate, up = _of_expert(expert, given, w_gate, w_up, b_gate_up, packing)
        hidden = _activated(act, gate, up)
        d_gates = _activated_backward(act, grad_out @ w_down[expert], gate, up)
        matrices = ((w_gate[expert], w_up[expert]) if w_up is not None
                    else _gate_and_up(w_gate[expert], packing))
        d_given = sum(d @ w for d, w in zip(d_gates, matrices))
        dx.index_add_(0, tokens, (d_given if weigh == "after" else d_given * share).to(wide))
        if weigh == "after":
            out = F.linear(hidden, w_down[expert], None if b_down is None else b_down[expert])
            d_share = (grad * out).sum(-1)
        else:
            d_share = (own * d_given).sum(-1)
        d_shares[tokens, choices] = d_share.to(wide)
        into = ((dw_gate[expert], dw_up[expert]) if w_up is not None
                else _gate_and_up(dw_gate[expert], packing))
        for total, d in zip(into, d_gates):
            total.copy_(d.T @ given)
        dw_down[expert] = grad_out.T @ hidden
        if b_down is not None:
            for total, d in zip(_gate_and_up(db_gate_up[expert], packing), d_gates):
                total.copy_(d.sum(0))
            db_down[expert] = grad_out.sum(0)
    return (dx.to(x.dtype).view(x.shape), d_shares.view(every.shape)[..., :k].contiguous(),
            *(t for t in d_experts if t is not None))


def moe_ffn_frozen_backward(*arguments):
    return moe_ffn_backward(*arguments)[:2]


def moe_ffn_backward_into(dy, x, ids, weights, gate, up, *others):
    experts, into, (act, routing) = others[:3], others[3:6], others[6:]
    dx, d_weights, *grads = moe_ffn_backward(dy, x, ids, weights, gate, up, *experts, None, None,
                                             act, "halves", "after", 0, routing)
    for total, own in zip(into, grads):
        total += own
    return dx, d_weights


def _router_scores(logits, score):
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide)
    return logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)


def _router_weights(logits, ids, score, order, renormalise, scale):
    """Weights of the chosen experts."""
    if order == "after":
        wide = torch.promote_types(logits.dtype, torch.float32)
        return scale * logits.to(wide).gather(-1, ids).softmax(-1)
    weights = _router_scores(logits, score).gather(-1, ids)
    if renormalise:
        # Sigmoids may all underflow: as transformers' DeepSeek-V3.
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if score == "sigmoid" else 0))
    return scale * weights


def moe_route(logits, bias, top_k, score, order, groups, top_groups, group_score, renormalise,
              scale):
    # Softmax and sigmoid keep the order of the logits, which differ also where all scores are NaN.
    by_logits = bias is None and not (groups and group_score == "top2")
    by = logits.detach()
    if not by_logits and order != "after":
        by = _router_scores(by, score)
    if bias is not None:
        by = by + bias
    if groups:
        grouped = by.unflatten(-1, (groups, -1))
        counted = min(2 if group_score == "top2" else 1, grouped.shape[-1])
        best = grouped.topk(counted, -1)[0].sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(
            -1, best.topk(top_groups or groups, -1)[1], True)
        by = grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)
    ids = by.sort(stable=True, dim=-1, descending=True)[1][..., :top_k]
    return _router_weights(logits, ids, score, order, renormalise, scale), ids.to(torch.int32)


def moe_route_backward(d_weights, logits, ids, score, order, renormalise, scale):
    ids = ids.long()
    if order == "after":
        weights = _router_weights(logits, ids, score, order, renormalise, scale)
        d_chosen = weights * (d_weights - (d_weights * weights / scale).sum(-1, keepdim=True))
        return torch.zeros_like(d_chosen[..., :1]).expand(logits.shape).scatter(
            -1, ids, d_chosen).to(logits.dtype)
    scores = _router_scores(logits, score)
    chosen = scores.gather(-1, ids)
    d_chosen = scale * d_weights.to(scores.dtype)
    if renormalise:
        total = chosen.sum(-1, keepdim=True)
        d_chosen = (d_chosen - (d_chosen * chosen / total).sum(-1, keepdim=True)) / total
    d_scores = torch.zeros_like(scores).scatter(-1, ids, d_chosen)
    if score == "sigmoid":
        return (d_scores * scores * (1 - scores)).to(logits.dtype)
    return (scores * (d_scores - (d_scores * scores).sum(-1, keepdim=True))).to(logits.dtype)


# heads

def _philox(seeds: Tensor, quads: Tensor, steps: Tensor) -> list[Tensor]:
    """The four words of Philox4x32-10 for 64-bit keys, in int64 that wraps around."""
    low = 0xffffffff
    k0, k1 = seeds & low, seeds >> 32 & low
    zero = torch.zeros_like(quads + steps)
    c = [quads + zero, zero, (steps & low) + zero, zero]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 & low ^ c[1] ^ k0, second & low, first >> 32 & low ^ c[3] ^ k1, first & low]
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return c


def _kept(logits, temperature, top_k, top_p, min_p):
    """Which ids the filters keep, those of equal logits together. NaN is above every number."""
    vocab = logits.shape[-1]
    ordered, order = logits.sort(-1, descending=True)
    same = (ordered[..., 1:] == ordered[..., :-1]) | ordered[..., 1:].isnan() & ordered[..., :-1].isnan()
    places = torch.arange(vocab, device=logits.device)
    # For each id, how many are better.
    better = (places * F.pad(~same, (1, 0), value=False)).cummax(-1)[0]
    kept = better < torch.where(top_k > 0, top_k, vocab)
    largest = logits.nan_to_num(-math.inf, math.inf, -math.inf).amax(-1, keepdim=True)
    # Where the largest is infinite no id has a mass.
    mass = ((ordered - largest) / temperature).exp().nan_to_num(0.0)
    counted = torch.where(kept, mass, 0.0)
    limit = (top_p.double() * counted.sum(-1, keepdim=True)).clamp(min=2.0**-44)
    above = (counted.cumsum(-1) - counted).gather(-1, better)
    kept &= (above < limit) | ~(top_p < 1)
    kept &= (mass >= min_p) | ~(ordered < largest) | ~(min_p > 0)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def sample(logits, temperature, seeds, steps, top_k, top_p, min_p, softcap, logprobs, best):
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap:
        wide = softcap * torch.tanh(wide / softcap)
    scores = wide
    if temperature is not None:
        temperature, seeds, steps = (t.unsqueeze(-1) for t in (temperature, seeds, steps))
        quads = torch.arange(-(-wide.shape[-1] // 4), device=wide.device)
        words = torch.stack(_philox(seeds, quads, steps.long()), -1).flatten(-2)
        uniform = (words[..., :wide.shape[-1]].double() + 0.5) / 2**32
        scores = wide.double() / temperature - (-(-uniform).log1p()).log()
        if top_k is not None:
            kept = _kept(wide.double(), temperature, *(t.unsqueeze(-1) for t in (top_k, top_p, min_p)))
            scores = torch.where(kept, scores, -math.inf)
        scores = torch.where(temperature > 0, scores, wide.double())
    ids = scores.argmax(-1, keepdim=True)
    logit = wide.gather(-1, ids).squeeze(-1)
    sums = wide.logsumexp(-1) if logprobs or best else None
    none = logits.new_empty(0, dtype=torch.float32)
    of_best = none.int(), none
    if best:
        of_best = (wide + 0.0).sort(dim=-1, descending=True, stable=True).indices[..., :best]
        of_best = of_best.int(), (wide.gather(-1, of_best) - sums.unsqueeze(-1)).float()
    return (ids.squeeze(-1).int(), logit.float(), (logit - sums).float() if logprobs else none, *of_best)


def head_logits(x, w_norm, b_norm, w, bias, eps, convention, logits):
    if b_norm is not None:
        x = layernorm(x, w_norm, b_norm, eps)
    elif w_norm is not None:
        x = rmsnorm(x, w_norm, eps, convention)
    if logits == "same":
        return F.linear(x, w, bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), w.to(wide), None if bias is None else bias.to(wide)).float()


def head(x, w_norm, b_norm, w, bias, temperature, seeds, steps, top_k, top_p, min_p, eps, convention,
         softcap, logits, logprobs, best):
    return sample(head_logits(x, w_norm, b_norm, w, bias, eps, convention, logits), temperature, seeds,
                  steps, top_k, top_p, min_p, softcap, logprobs, best)


# decode

def decode(ids, lengths, steps, ended, out, limits, stop, embedding, angles, pages, weights, caches,
           final_norm, final_norm_bias, w_head, head_bias, temperature, seeds, top_k, top_p, min_p,
           form, embed_scale, logit_softcap, pad, logprobs, best, memory=None, w_head_scale=None,
           w_head_zero=None, head_packed="", first_expert=None):
    _expect_no_group("decode", memory)
    found = parse(form)
    if head_packed:
        format, group = head_packed.split("-")
        w_head = _dense(format, w_head, w_head_scale, w_head_zero, *embedding.shape, group, embedding.dtype)
    page = caches[0].shape[1] if pages is not None else 0
    cache = pages.shape[1] * page if page else caches[0].shape[2]
    alive = (ended == 0) & (lengths < cache)
    exists = (ids >= 0) & (ids < embedding.shape[0])
    x = embedding[ids.clamp(0, embedding.shape[0] - 1).long()].float() * embed_scale
    x = torch.where(exists[:, None], x, 0).to(embedding.dtype)[:, None]
    keys = torch.where(alive, lengths.clamp(min=0) + 1, lengths.clamp(1, cache))
    places = (keys - 1)[:, None].long()
    if page:
        own = pages.gather(1, places // page)
        slots = torch.where((own >= 0) & (own < caches[0].shape[0]), own * page + places % page, -1)
    else:
        slots = torch.arange(len(ids), device=ids.device)[:, None] * cache + places
    slots = torch.where(alive[:, None], slots, -1)
    x = layer(x, places, angles, slots, keys, pages, weights, caches, form)[:, 0]
    chosen, *others = head(
        x, final_norm, final_norm_bias, w_head, head_bias, temperature, seeds,
        None if temperature is None else steps, top_k, top_p, min_p, found.get("eps"),
        found.get("convention", "llama"), logit_softcap, "same", logprobs, best)
    ids.copy_(torch.where(alive, chosen, pad))
    column = torch.arange(out.shape[1], device=out.device)
    out.copy_(torch.where(alive[:, None] & (column == steps[:, None]), chosen[:, None], out))
    stops = torch.zeros_like(alive) if stop is None else (chosen[:, None] == stop).any(-1)
    full = (keys >= cache) | (keys + 1 >= limits)
    ends = torch.where(stops, 1, torch.where(full, 2, 0)).int()
    ended.copy_(torch.where(alive, ends, torch.where(ended == 0, 2, ended)))
    lengths.copy_(torch.where(alive, keys, lengths))
    steps.add_(alive.int())
    return chosen, *others


# rmsnorm

def _normalised(x: Tensor, eps: float) -> Tensor:
    x = x.float() if x.dtype != torch.float64 else x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rmsnorm(x, w, eps, convention):
    normed = _normalised(x, eps)
    if convention == "llama":
        return (normed.to(x.dtype) * w).to(x.dtype)
    wide = w.to(normed.dtype)
    return (normed * (1 + wide if convention == "gemma" else wide)).to(x.dtype)


def add_rmsnorm(x, residual, w, eps, convention):
    total = x + residual
    return rmsnorm(total, w, eps, convention), total


def _rstd(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.to(torch.promote_types(x.dtype, torch.float32)).pow(2).mean(-1) + eps)


def rmsnorm_rstd(x, w, eps, convention):
    return rmsnorm(x, w, eps, convention), _rstd(x, eps)


def add_rmsnorm_rstd(x, residual, w, eps, convention):
    y, total = add_rmsnorm(x, residual, w, eps, convention)
    return y, total, _rstd(total, eps)


def rmsnorm_backward(dy, x, w, dsum, rstd, eps, convention):
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, grad = x.to(wide), dy.to(wide)
    rstd = (_rstd(x, eps) if rstd is None else rstd.to(wide)).unsqueeze(-1)
    normed = rows * rstd
    scaled = grad * (1 + w.to(wide) if convention == "gemma" else w.to(wide))
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    if dsum is not None:
        dx = dx + dsum.to(wide)
    return dx.to(x.dtype), _rows(grad * normed).sum(0).to(w.dtype)


def rmsnorm_frozen_backward(*arguments):
    return rmsnorm_backward(*arguments)[0]


def rmsnorm_quantised(x, residual, w, eps, convention, int8):
    total = x if residual is None else x + residual
    y = _normalised(total, eps) * (1 + w.float() if convention == "gemma" else w.float())
    largest = y.abs().amax(-1)
    scale = torch.where(largest <= 2.0**-100, 1.0, largest / (127 if int8 else 448))
    y = (y / scale.unsqueeze(-1)).nan_to_num(0.0) if int8 else y / scale.unsqueeze(-1)
    q = y.round().to(torch.int8) if int8 else y.to(torch.float8_e4m3fn)
    return q, scale, total.new_empty(0) if residual is None else total


# layernorm

def layernorm(x, w, b, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.layer_norm(x.to(wide), x.shape[-1:], w.to(wide), b.to(wide), eps).to(x.dtype)


def add_layernorm(x, residual, w, b, eps):
    total = x + residual
    return layernorm(total, w, b, eps), total


def layernorm_backward(dy, x, w, dsum, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, grad = x.to(wide), dy.to(wide)
    centred = rows - rows.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    normed, scaled = centred * rstd, grad * w.to(wide)
    dx = rstd * (scaled - scaled.mean(-1, keepdim=True)
                 - normed * (scaled * normed).mean(-1, keepdim=True))
    if dsum is not None:
        dx = dx + dsum.to(wide)
    return dx.to(x.dtype), _rows(grad * normed).sum(0).to(w.dtype), _rows(grad).sum(0).to(w.dtype)


def layernorm_frozen_backward(*arguments):
    return layernorm_backward(*arguments)[0]


# elementwise

def bias_gelu(x, bias, act):
    return ACTIVATIONS[act]((x + bias).to(x.dtype))


def bias_gelu_backward(dy, x, bias, act):
    dx = activation_backward(act, dy, (x + bias).to(x.dtype))
    return dx, _rows(dx).sum(0).to(bias.dtype)


def bias_gelu_frozen_backward(*arguments):
    return bias_gelu_backward(*arguments)[0]


def act_mul(gate, up, act):
    return ACTIVATIONS[act](gate) * up


def act_mul_backward(dy, gate, up, act):
    return activation_backward(act, dy * up, gate), dy * ACTIVATIONS[act](gate)


def scale_(x, factor):
    x.mul_(factor)


def act_mul_packed(gate_up, act):
    return act_mul(*gate_up.chunk(2, -1), act)


def act_mul_packed_backward(dy, gate_up, act):
    return torch.cat(act_mul_backward(dy, *gate_up.chunk(2, -1), act), -1)


# rope

def _frequencies(rotary: int, rule: str, numbers: list[float]) -> tuple[Tensor, float]:
    """Frequencies of the pairs, and the factor of sines and cosines, by kernels/rope/rope.hpp."""
    base, factor, context, low, high, beta_fast, beta_slow, scale = numbers
    exponents = torch.arange(0, rotary, 2, dtype=torch.float64) / rotary
    plain = base**-exponents
    if rule == "base":
        return (plain / factor).float(), scale or 1.0
    if rule == "llama3":
        turns = context * plain / (2 * math.pi)  # context / wavelength
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return ((1 - share) * plain / factor + share * plain).float(), scale or 1.0

    def pair(turns: float) -> float:
        return rotary * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair(beta_fast)), 0)
    last = min(math.ceil(pair(beta_slow)), rotary - 1)
    ramp = (torch.arange(rotary // 2) - first) / max(last - first, 1e-3)
    share = 1 - ramp.clamp(0, 1)
    own = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return ((1 - share) * plain / factor + share * plain).float(), scale or own


def _rope_angles(q, angles, starts, offsets, rotation, rotary, rule, numbers):
    """The angle of every rotated feature, [..., tokens, 1, rotary], and the factor."""
    rotary = rotary or q.shape[-1]
    if offsets is not None:
        token = torch.arange(q.shape[0], device=q.device)
        sequence = torch.searchsorted(offsets[1:].contiguous(), token.to(offsets.dtype), right=True)
        position = token - offsets[sequence]
        if starts is not None:
            position = position + starts[sequence]
    else:
        position = torch.arange(q.shape[1], device=q.device).expand(q.shape[0], -1)
        if starts is not None:
            position = position + starts[:, None]
    angle, factor = angles_at(position, angles, rotation, rotary, rule, numbers)
    return angle.unsqueeze(-2), factor


def angles_at(position, angles, rotation, rotary, rule, numbers):
    """The angle of every rotated feature at positions [...], [..., rotary], and the factor."""
    if rule == "table":
        return angles[position.long().clamp(0, angles.shape[0] - 1)], numbers[7] or 1.0
    values, factor = _frequencies(rotary, rule, numbers)
    pairs = position[..., None].float() * values.to(position.device)
    return (torch.cat((pairs, pairs), -1) if rotation == "halves"
            else pairs.repeat_interleave(2, -1)), factor


def _partners(x: Tensor, rotation: str) -> Tensor:
    """r of y = x cos f + r sin f."""
    if rotation == "halves":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _rotated(x: Tensor, angle: Tensor, factor: float, rotation: str, back: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    rotary = angle.shape[-1]
    part, rest = x[..., :rotary].to(wide), x[..., rotary:]
    cosine, sine = angle.to(wide).cos() * factor, angle.to(wide).sin() * factor
    if back:
        y = part * cosine - _partners(part * sine, rotation)
    else:
        y = part * cosine + _partners(part, rotation) * sine
    return torch.cat((y.to(x.dtype), rest), -1)


def rope(q, angles, starts, offsets, rotation, rotary, rule, numbers, back=False):
    angle, factor = _rope_angles(q, angles, starts, offsets, rotation, rotary, rule, numbers)
    return _rotated(q, angle, factor, rotation, back)


def rope_backward(dq, *arguments):
    return rope(dq, *arguments, back=True)


def rope_qk(q, k, *arguments, back=False):
    angles, starts, offsets, rotation, rotary, rule, numbers = arguments
    angle, factor = _rope_angles(q, angles, starts, offsets, rotation, rotary, rule, numbers)
    return _rotated(q, angle, factor, rotation, back), _rotated(k, angle, factor, rotation, back)


def rope_qk_backward(dq, dk, *arguments):
    return rope_qk(dq, dk, *arguments, back=True)


# qkv

def qkv(x, w_q, w_k, w_v, b_q, b_k, b_v, q_norm, k_norm, positions, angles, heads, kv_heads, eps,
        rotation, rotary, rule, numbers):
    if w_k is None:
        dim = w_q.shape[0] // (heads + 2 * kv_heads)
        sizes = [n * dim for n in (heads, kv_heads, kv_heads)]
        parts = F.linear(x, w_q, b_q).split(sizes, -1)
    else:
        dim = w_q.shape[0] // heads
        parts = (F.linear(x, w, b) for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in parts)
    if q_norm is not None:
        q, k = (rmsnorm(t, w, eps, "t5") for t, w in ((q, q_norm), (k, k_norm)))
    if positions is not None:
        angle, factor = angles_at(positions, angles, rotation, rotary or dim, rule, numbers)
        q, k = (_rotated(t, angle.unsqueeze(-2), factor, rotation, False) for t in (q, k))
    return q, k, v


def _qkv_fp8(product, x, w, w_scale, bias, q_norm, k_norm, positions, angles, heads, kv_heads, _dim, *options):
    # The product with a unit matrix is the rows of q, k and v.
    rows = product(x.float(), w, w_scale, None if bias is None else bias.float(), None)
    parts = qkv(rows, torch.eye(len(w), device=x.device), None, None, None, None, None, q_norm, k_norm, positions,
                angles, heads, kv_heads, *options)
    return tuple(t.to(x.dtype) for t in parts)


def qkv_fp8_token(*arguments):
    return _qkv_fp8(linear_fp8_token, *arguments)


def qkv_fp8_block(*arguments):
    return _qkv_fp8(linear_fp8_block, *arguments)


def qkv_cached(*arguments):
    k_cache, v_cache, slots = arguments[11:14]
    q, k, v = qkv(*arguments[:11], *arguments[14:])
    for cache, rows in ((k_cache, k), (v_cache, v)):
        there = slots.flatten() >= 0
        cache.flatten(0, -3)[slots.flatten()[there].long()] = rows.flatten(0, -3)[there]
    return q


# layer

def _expect_no_group(op, memory):
    if memory is not None:
        raise Error(f"{op}: the reference has no sums over the ranks of a group: unset FFTUNE_DISABLE")


def layer(x, positions, angles, slots, lengths, pages, weights, caches, form, memory=None, first_expert=None):
    _expect_no_group("layer", memory)
    found = parse(form)
    count = len(found.weights)
    for at in range(len(caches) // 2):
        own = dict(zip(found.weights, weights[at * count:(at + 1) * count]))
        for name, (n, k) in packed_sizes(found, x.shape[-1]).items() if found.get("packed") else ():
            format, group = found.get("packed").split("-")
            own[name] = _dense(format, *(own.get(f"{name}{part}") for part in ("", "_scale", "_zero")),
                               n, k, group, x.dtype)
            if found.get("experts") and name not in ("w_qkv", "w_o"):
                own[name] = own[name].view(found.get("experts"), -1, k)
        if found.constants:
            own = with_constants(found, own, x)
        x = _one_layer(x, positions, angles, slots, lengths, pages, own, caches[2 * at:2 * at + 2],
                       found)
    return x


def _one_layer(x, positions, angles, slots, lengths, pages, w, caches, form):
    eps = form.get("eps")

    def norm(t, name):
        if form.get("norm") == "layer":
            return layernorm(t, w[name], w[f"{name}_bias"], eps)
        return rmsnorm(t, w[name], eps, form.get("convention"))

    def scaled(y):
        if "residual_scale" not in w:
            return y
        return (_wide(y) * w["residual_scale"].to(_wide(y).dtype)).to(x.dtype)

    def added(y, name, residual):
        return residual + (norm(y, name) if form.get("post-norms") else y)

    def norm_heads(t, name):
        if name not in w:
            return t
        if form.get("qk-norm") == "layer":
            return layernorm(t, w[name], w[f"{name}_bias"], eps)
        convention = "gemma" if form.get("convention") == "gemma" else "t5"
        shape = t.shape
        if form.get("qk-norm") == "rows":
            t = t.flatten(2)
        return rmsnorm(t, w[name], eps, convention).view(shape)

    normed = norm(x, "attn_norm") if "attn_norm" in w else x
    q, k, v = _heads(normed, w, form)
    norms_last = form.get("qk-norm-order") == "after"
    if not norms_last:
        q, k = norm_heads(q, "q_norm"), norm_heads(k, "k_norm")
    if form.get("rotation") != "none":
        rotation = form.get("rotation", "halves")
        angle, factor = angles_at(positions, angles, rotation, None, "table",
                                  [0.0] * 7 + [form.get("rope-scale", 0.0)])
        q, k = (_rotated(t, angle.unsqueeze(-2), factor, rotation, False) for t in (q, k))
    if norms_last:
        q, k = norm_heads(q, "q_norm"), norm_heads(k, "k_norm")
    keys, values = caches if pages is not None else (cache.transpose(1, 2) for cache in caches)
    for cache, rows in ((keys, k), (values, v)):
        own, to = cache.view(-1, *cache.shape[2:]), slots.flatten().long()
        # A token whose slot is no row goes to one behind the last, which is dropped.
        to = torch.where((to < 0) | (to >= own.shape[0]), own.shape[0], to)
        own.copy_(F.pad(own, (0, 0, 0, 0, 0, 1)).index_copy(0, to, rows.flatten(0, 1))[:-1])
    if pages is not None:
        exists = ((pages >= 0) & (pages < keys.shape[0]))[..., None, None, None]
        keys, values = (torch.where(exists, cache[pages.clamp(0, cache.shape[0] - 1).long()], 0)
                        .flatten(1, 2) for cache in (keys, values))
    # For every sequence at once: in a CUDA graph the lengths cannot be looked at.
    places = torch.arange(keys.shape[1], device=x.device)
    last = lengths[:, None] - x.shape[1] + torch.arange(x.shape[1], device=x.device)
    allowed = (places <= last[..., None])[:, None]
    group = q.shape[2] // keys.shape[2]
    q, keys, values = (_wide(t).transpose(1, 2) for t in (q, keys, values))
    keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
    scores = (form.get("scale") or q.shape[-1] ** -0.5) * (q @ keys.transpose(2, 3))
    if softcap := form.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, -math.inf)
    if "sinks" in w:
        sinks = w["sinks"].to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    attended = scores.softmax(-1)[..., :keys.shape[2]] @ values
    attended = attended.to(x.dtype).transpose(1, 2).flatten(2)
    mid = added(scaled(_product(attended, w, "w_o", "b_o")), "attn_post_norm", x)
    if "ffn_norm" in w:
        inner = norm(x if form.get("block") == "parallel-norms" else mid, "ffn_norm")
    else:
        inner = normed if form.get("block") == "parallel" else mid
    if "w_router" in w:
        return added(_experts(inner, w, form, scaled), "ffn_post_norm", mid)
    hidden = ACTIVATIONS[form.get("act")](_product(inner, w, "w_gate" if "w_gate" in w else "w_up", "b_up"))
    if "w_gate" in w:
        hidden = hidden * _product(inner, w, "w_up")
    return added(scaled(_product(hidden, w, "w_down", "b_down")), "ffn_post_norm", mid)


def _product(x, w, name, bias=""):
    """That of a layer's weight. With float8_e4m3fn x is quantised."""
    if w[name].dtype != torch.float8_e4m3fn:
        return F.linear(x, w[name], w.get(bias))
    scale = w[f"{name}_scale"]
    return (linear_fp8_token if scale.dim() == 1 else linear_fp8_block)(x, w[name], scale, w.get(bias), None)


def _heads(x, w, form):
    """q, k and v [batch, tokens, heads, dim] of x."""
    heads, kv_heads, dim = form.get("heads"), form.get("kv-heads"), form.get("dim")
    if "w_qkv" not in w:
        return tuple(F.linear(x, w[f"w_{part}"], w.get(f"b_{part}")).unflatten(-1, (-1, dim))
                     for part in "qkv")
    rows = _product(x, w, "w_qkv", "b_qkv")
    if form.get("qkv-weights") != "grouped":
        return rows.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), -2)
    group = heads // kv_heads
    q, k, v = rows.unflatten(-1, (kv_heads, group + 2, dim)).split((group, 1, 1), -2)
    return q.flatten(-3, -2), k.flatten(-3, -2), v.flatten(-3, -2)


def _experts(x, w, form, scaled):
    """The experts of a layer; if the residual's summands have a factor, route-scale includes it."""
    router = [None if t is None else _wide(t) if form.get("logits") == "f32" else t
              for t in (x, w["w_router"], w.get("b_router"))]
    weights, ids = moe_route(F.linear(*router), w.get("choice_bias"),
                             form.get("top-k"), form.get("score"), form.get("order"),
                             form.get("groups", 0), form.get("top-groups", 0),
                             form.get("group-score", "max"), form.get("renormalise") == "yes",
                             form.get("route-scale", 1.0))
    if form.get("quantise"):
        first = "w_gate_up" if "w_gate_up" in w else "w_gate"
        return (moe_ffn_fp8_token if form.get("quantise") == "token" else moe_ffn_fp8_block)(
            x, ids, weights, w[first], w.get("w_up"), w["w_down"], w[f"{first}_scale"], w.get("w_up_scale"),
            w["w_down_scale"], form.get("act"), form.get("gate-up", "halves"), 0, "")
    w_gate_up, b_gate_up = w.get("w_gate_up"), w.get("b_gate_up")
    if w_gate_up is None:
        w_gate_up = torch.cat((w["w_gate"], w["w_up"]), 1)
        b_gate_up = torch.cat((w["b_gate"], w["b_up"]), 1) if "b_gate" in w else None
    y = moe_ffn(x, ids, weights, w_gate_up, None, w["w_down"], b_gate_up, w.get("b_down"),
                form.get("act"), form.get("gate-up", "halves"), "after", 0, "")
    if "w_shared_gate" not in w:
        return y
    hidden = act_mul(F.linear(x, w["w_shared_gate"]), F.linear(x, w["w_shared_up"]), form.get("act"))
    shared = F.linear(hidden, w["w_shared_down"])
    if "w_shared_router" in w:
        shared = shared * torch.sigmoid(F.linear(x, w["w_shared_router"]))
    return y + scaled(shared)


# ngram-block

def ngram_block(ids, logits, n, padding, lengths, prefix, prefix_lengths, ns):
    """Row by row on the host, as a processor of logits does it."""
    rows, vocab = logits.shape
    beams = rows // prefix.shape[0] if prefix is not None else 1
    invalid = torch.zeros(rows, dtype=torch.int32)
    for row in range(rows):
        text = []
        if prefix is not None:
            group = prefix[row // beams]
            text += group[: prefix_lengths[row // beams]].tolist() if lengths is not None \
                else group.tolist()
        text += ids[row][: lengths[row]].tolist() if lengths is not None else ids[row].tolist()
        invalid[row] = sum(token != padding and not 0 <= token < vocab for token in text)
        size = int(ns[row]) if ns is not None else n
        if not 1 <= size <= len(text):
            continue
        last = text[len(text) - size + 1:]
        if padding in last:
            continue
        banned = [text[end] for end in range(size - 1, len(text))
                  if text[end - size + 1: end] == last and text[end] != padding
                  and 0 <= text[end] < vocab]
        if banned:
            logits[row, banned] = -math.inf
    return invalid.to(logits.device)


# attention

def _attend(q, k, v, allowed, bias, sinks, softcap, scale):
    """One sequence: q [heads, queries, features], k, v [kv heads, keys, features], allowed and bias
    [1 or heads, queries, keys] -> (y, lse)."""
    group = q.shape[0] // k.shape[0]
    k, v = (t.repeat_interleave(group, 0) for t in (k, v))
    scores = scale * (q @ k.transpose(1, 2))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~allowed, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, q.shape[1], 1)), -1)
    lse = scores.logsumexp(-1)
    lse = torch.where(lse == math.inf, math.nan, lse)  # as softmax is NaN there
    weights = torch.where((lse != -math.inf)[..., None], torch.exp(scores - lse[..., None]), 0)
    return weights[..., :v.shape[1]] @ v, lse


def _unpacked(bits, keys):
    shifts = torch.arange(32, device=bits.device)
    return (bits[..., None] >> shifts & 1).flatten(-2)[..., :keys].bool()


def _sequences(q, k, v, pages, mask, bits, bias, offsets, kv_offsets, lengths, causal, window):
    """Yields for every sequence the places of its queries and of its keys, and the allowed
    pairs."""
    packed = offsets is not None
    count = offsets.numel() - 1 if packed else q.shape[0]
    for i in range(count):
        rows = (slice(int(offsets[i]), int(offsets[i + 1])),) if packed else (i,)
        if pages is not None:
            page, own = k.shape[1], pages[i].long()[:, None]
            flat = own * page + torch.arange(page, device=q.device)
            # A page that the cache does not have is one of the row of zeros behind it.
            flat = torch.where((own >= 0) & (own < k.shape[0]), flat, k.shape[0] * page).flatten()
            columns = (flat[:max(0, int(lengths[i]))],) if lengths is not None else (flat,)
        elif packed:
            own = offsets if kv_offsets is None else kv_offsets
            columns = (slice(int(own[i]), int(own[i + 1])),)
        else:
            columns = (i, slice(0, max(0, int(lengths[i])))) if lengths is not None else (i,)
        queries_of = q[rows].shape[0]
        keys_of = columns[0].numel() if pages is not None else k[columns].shape[0]
        place = torch.arange(queries_of, device=q.device)[:, None] + keys_of - queries_of
        j = torch.arange(keys_of, device=q.device)
        allowed = torch.ones(queries_of, keys_of, dtype=torch.bool, device=q.device)
        if causal:
            allowed &= j <= place
        if window:
            allowed &= j > place - window
        allowed = allowed[None]
        if bits is not None:
            mask = _unpacked(bits, k.shape[1])
        if mask is not None:
            allowed = allowed & mask[i].bool()[..., :keys_of]
        own_bias = None if bias is None else bias[i if bias.shape[0] > 1 else 0][..., :keys_of]
        yield rows, columns, allowed, own_bias


def _wide(x):
    return None if x is None else x.to(torch.promote_types(x.dtype, torch.float32))


def _lse_rows(offsets, rows):
    return (slice(None), *rows) if offsets is not None else rows


def attention(q, k, v, pages, mask, bits, flags, bias, offsets, kv_offsets, lengths, sinks, causal,
              window, softcap, scale, lse):
    scale = scale or q.shape[-1] ** -0.5
    keys, values = (F.pad(t.flatten(0, 1), (0, 0, 0, 0, 0, 1)) if pages is not None else t
                    for t in (k, v))
    parts = []
    for rows, columns, allowed, own in _sequences(q, k, v, pages, mask, bits, bias, offsets,
                                                  kv_offsets, lengths, causal, window):
        heads_first = (_wide(t).transpose(0, 1) for t in (q[rows], keys[columns], values[columns]))
        parts.append(_attend(*heads_first, allowed, _wide(own), _wide(sinks), softcap, scale))
    outputs, sums = [part[0].transpose(0, 1) for part in parts], [part[1] for part in parts]
    if offsets is None:
        y, own = torch.stack(outputs), torch.stack(sums)
    else:
        y, own = torch.cat(outputs), torch.cat(sums, 1)
    own = own if own.dtype == torch.float64 else own.float()
    return y.to(q.dtype), own if lse else own.new_empty(0)


def attention_backward(dy, q, k, v, y, lse, mask, bits, flags, bias, offsets, kv_offsets, lengths,
                       sinks, causal, window, softcap, scale, deterministic):
    scale = scale or q.shape[-1] ** -0.5
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (q, k, v))
    d_sinks = torch.zeros(0 if sinks is None else sinks.numel(), dtype=wide, device=q.device)
    for rows, columns, allowed, own in _sequences(q, k, v, None, mask, bits, bias, offsets,
                                                  kv_offsets, lengths, causal, window):
        heads_first = lambda t: _wide(t).transpose(0, 1)
        own_q, own_k, own_v = (heads_first(t) for t in (q[rows], k[columns], v[columns]))
        grad, out = heads_first(dy[rows]), heads_first(y[rows])
        group = own_q.shape[0] // own_k.shape[0]
        many_k, many_v = (t.repeat_interleave(group, 0) for t in (own_k, own_v))
        raw = scale * (own_q @ many_k.transpose(1, 2))
        slope = 1.0
        if softcap:
            raw = softcap * torch.tanh(raw / softcap)
            slope = 1 - (raw / softcap) ** 2
        if own is not None:
            raw = raw + _wide(own)
        total = lse[_lse_rows(offsets, rows)].to(wide)[..., None]
        weights = torch.where(allowed & (total != -math.inf), torch.exp(raw - total), 0)
        delta = (grad * out).sum(-1, keepdim=True)
        d_scores = scale * slope * weights * (grad @ many_v.transpose(1, 2) - delta)
        d_scores = d_scores.masked_fill(~allowed, 0)  # even where v or delta is not finite
        shared = lambda t: t.unflatten(0, (-1, group)).sum(1).transpose(0, 1)
        dq[rows] = (d_scores @ many_k).transpose(0, 1)
        dk[columns] = shared(d_scores.transpose(1, 2) @ own_q)
        dv[columns] = shared(weights.transpose(1, 2) @ grad)
        if sinks is not None:
            share = torch.where(total != -math.inf,
                                torch.exp(_wide(sinks)[:, None, None] - total), 0)
            d_sinks -= (share * delta).sum((1, 2))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), \
        d_sinks if wide == torch.float64 else d_sinks.float()


def pack_mask(mask):
    b, heads, s, keys = mask.shape
    words, tiles = -(-keys // 128) * 4, lambda extent: -(-extent // 64)
    seen = mask.bool()
    padded = F.pad(seen.long(), (0, words * 32 - keys)).unflatten(-1, (words, 32))
    bits = (padded << torch.arange(32, device=mask.device)).sum(-1)
    bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    square = lambda t: F.pad(t.long(), (0, tiles(keys) * 64 - keys, 0, tiles(s) * 64 - s)).unflatten(
        -1, (-1, 64)).unflatten(-3, (-1, 64)).sum((-3, -1))
    some, all_pairs = square(seen), square(torch.ones_like(seen))
    flags = torch.where(some == 0, 0, torch.where(some == all_pairs, 1, 2))
    return bits, flags.to(torch.uint8)


def masked_softmax(x, mask, causal, scale):
    s, n = x.shape[-2:]
    seen = torch.ones(s, n, dtype=torch.bool, device=x.device)
    if causal:
        seen = seen.tril(n - s)
    if mask is not None:
        seen = seen & mask.bool()
    scores = (scale * _wide(x)).masked_fill(~seen, -math.inf)
    any_left = (scores != -math.inf).any(-1, keepdim=True)
    return torch.where(any_left, scores.softmax(-1), 0.0).to(x.dtype)


def masked_softmax_backward(dy, y, causal, scale):
    wide_y, grad = _wide(y), _wide(dy)
    return (scale * wide_y * (grad - (wide_y * grad).sum(-1, keepdim=True))).to(y.dtype)


# cross_entropy

def _capped(logits, softcap):
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    return softcap * torch.tanh(wide / softcap) if softcap else wide


def _loss_parts(logits, labels, class_weights, ignore_index, softcap):
    z = _capped(logits, softcap)
    counts = labels != ignore_index
    known = counts & (labels >= 0) & (labels < z.shape[-1])
    weights = z.new_ones(z.shape[-1]) if class_weights is None else class_weights.to(z.dtype)
    other = torch.where(counts, math.nan, 0.0).to(z.dtype)  # a label that is no id, or is ignored
    return z, torch.where(known, labels, 0)[..., None], known, weights, other


def cross_entropy_rows(logits, labels, class_weights, ignore_index, label_smoothing, z_loss, softcap,
                       logprobs, entropies, whole=0):
    """`whole`: ids of the vocabulary that the logits are a slice of, or 0."""
    z, ids, known, weights, other = _loss_parts(logits, labels, class_weights, ignore_index, softcap)
    most = z.detach().amax(-1, keepdim=True)
    most = most.masked_fill(most == -math.inf, 0.0)
    lse = (z - most).exp().sum(-1).log() + most[..., 0]
    logprob = z.gather(-1, ids)[..., 0] - lse
    if whole:  # labels in other slices
        logprob, known = torch.where(known, logprob, 0.0), labels != ignore_index
    loss = -(1 - label_smoothing) * weights[ids[..., 0]] * logprob
    if label_smoothing:
        loss = loss + label_smoothing / (whole or z.shape[-1]) * (weights * (lse[..., None] - z)).sum(-1)
    if z_loss:
        loss = loss + z_loss * lse * lse
    p = (z - lse[..., None]).exp()
    entropy = lse - torch.where(p == 0, 0.0, p * z).sum(-1)
    none = loss.new_empty(0)
    return (torch.where(known, loss, other), torch.where(known, lse, other),
            torch.where(known, logprob, other) if logprobs else none,
            torch.where(known, entropy, other) if entropies else none)


def cross_entropy(logits, labels, class_weights, items, *rules):
    loss, *more = cross_entropy_rows(logits, labels, class_weights, *rules)
    return (loss.sum() / items).reshape(1), *more


def cross_entropy_rows_backward(dloss, logits, labels, class_weights, lse, ignore_index,
                                label_smoothing, z_loss, softcap, whole=0):
    z, ids, known, weights, other = _loss_parts(logits, labels, class_weights, ignore_index, softcap)
    p = (z - lse[..., None]).exp()
    of_label = ((1 - label_smoothing) * weights[ids[..., 0]])[..., None]
    value = of_label * (p - torch.zeros_like(p).scatter(-1, ids, known.to(p.dtype)[..., None]))
    if whole:
        known = labels != ignore_index
    if label_smoothing:
        value = value + label_smoothing / (whole or z.shape[-1]) * ((whole or weights.sum()) * p - weights)
    if z_loss:
        value = value + 2 * z_loss * lse[..., None] * p
    if softcap:
        value = value * (1 - (z / softcap)**2)
    return torch.where(known[..., None], dloss[..., None] * value, other[..., None]).to(logits.dtype)


def cross_entropy_backward(dloss, logits, labels, class_weights, items, lse, *rules):
    of_rows = (dloss / items).reshape(()).expand(labels.shape)
    return cross_entropy_rows_backward(of_rows, logits, labels, class_weights, lse, *rules)


def cross_entropy_slice(logits, labels, ignore_index, label_smoothing, z_loss, softcap, slice_of,
                        logprobs, entropies):
    return cross_entropy_rows(logits, labels, None, ignore_index, label_smoothing, z_loss, softcap,
                              logprobs, entropies, int(slice_of))


def cross_entropy_slice_backward(dloss, logits, labels, lse, *rules):
    *rules, slice_of = rules
    return cross_entropy_rows_backward(dloss, logits, labels, None, lse, *rules, int(slice_of))


def linear_cross_entropy_slice(x, w, bias, labels, ignore_index, label_smoothing, z_loss, softcap,
                               slice_of, workspace, logprobs, entropies):
    return cross_entropy_slice(F.linear(x, w, bias), labels, ignore_index, label_smoothing, z_loss,
                               softcap, slice_of, logprobs, entropies)


def linear_cross_entropy(x, w, bias, labels, class_weights, items, ignore_index, label_smoothing,
                         z_loss, softcap, workspace, logprobs, entropies):
    return cross_entropy(F.linear(x, w, bias), labels, class_weights, items, ignore_index,
                         label_smoothing, z_loss, softcap, logprobs, entropies)


def linear_cross_entropy_rows(x, w, bias, labels, class_weights, ignore_index, label_smoothing, z_loss,
                              softcap, workspace, logprobs, entropies):
    return cross_entropy_rows(F.linear(x, w, bias), labels, class_weights, ignore_index,
                              label_smoothing, z_loss, softcap, logprobs, entropies)


def _linear_gradients(x, w, bias, dlogits):
    rows = _rows(dlogits)
    return dlogits @ w, rows.T @ _rows(x), x.new_empty(0) if bias is None else rows.sum(0)


def linear_cross_entropy_backward(dloss, x, w, bias, *arguments):
    *rest, _ = arguments  # without the workspace
    return _linear_gradients(x, w, bias, cross_entropy_backward(dloss, F.linear(x, w, bias), *rest))


def linear_cross_entropy_rows_backward(dloss, x, w, bias, *arguments):
    *rest, _ = arguments
    return _linear_gradients(x, w, bias,
                             cross_entropy_rows_backward(dloss, F.linear(x, w, bias), *rest))


def linear_cross_entropy_slice_backward(dloss, x, w, bias, *arguments):
    *rest, _ = arguments
    return _linear_gradients(x, w, bias,
                             cross_entropy_slice_backward(dloss, F.linear(x, w, bias), *rest))


def linear_cross_entropy_slice_frozen_backward(*arguments):
    return linear_cross_entropy_slice_backward(*arguments)[0]


def linear_cross_entropy_frozen_backward(*arguments):
    return linear_cross_entropy_backward(*arguments)[0]


def linear_cross_entropy_rows_frozen_backward(*arguments):
    return linear_cross_entropy_rows_backward(*arguments)[0]


def linear_cross_entropy_gradients(x, w, bias, labels, class_weights, items, *rest):
    results = linear_cross_entropy(x, w, bias, labels, class_weights, items, *rest)
    with torch.no_grad():
        *rules, _, _ = rest
        gradients = linear_cross_entropy_backward(torch.ones_like(results[0]), x, w, bias, labels,
                                                  class_weights, items, results[1], *rules)
    return *results, *gradients


def linear_cross_entropy_gradients_frozen(*arguments):
    return linear_cross_entropy_gradients(*arguments)[:5]

"""q, k and v of attention."""
import torch
import torch.nn.functional as F

from .linear import linear_fp8_block, linear_fp8_token
from .norms import rmsnorm
from .rope import _rotated, angles_at


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


def qkv_cached_e4m3(*arguments):
    # A cast to float8_e4m3fn does not saturate.
    k_scale, v_scale = arguments[14:16]
    return _into_caches(arguments[11:14], qkv(*arguments[:11], *arguments[16:]), *(
        lambda rows, scale=scale: (rows.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        for scale in (k_scale, v_scale)))


qkv_cached_e4m3_heads = qkv_cached_e4m3


def qkv_cached(*arguments):
    return _into_caches(arguments[11:14], qkv(*arguments[:11], *arguments[14:]), lambda rows: rows, lambda rows: rows)


def _into_caches(written, parts, k_stored, v_stored):
    k_cache, v_cache, slots = written
    q, k, v = parts
    for cache, rows in ((k_cache, k_stored(k)), (v_cache, v_stored(v))):
        own, to = cache.flatten(0, -3), slots.flatten().long()
        there = (to >= 0) & (to < own.shape[0])
        own[to[there]] = rows.flatten(0, -3)[there]
    return q

"""Attention, its gradients, packed masks and masked_softmax."""
import math

import torch
import torch.nn.functional as F

from .common import _wide


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


def attention_e4m3(q, k, v, k_scale, v_scale, *rules):
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (t.to(wide) * scale[:, None] for t, scale in ((k, k_scale), (v, v_scale)))
    return attention(q, k, v, *rules)


attention_e4m3_heads = attention_e4m3


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

"""Latent attention in its absorbed form."""
import math

import torch

from .common import _wide
from .norms import rmsnorm
from .rope import _rotated, angles_at


def _of_lists(scores, keys, chosen):
    """The scores [heads, queries, keys] of the entries of each query's list, and their keys."""
    exists = (chosen >= 0) & (chosen < len(keys))
    at = chosen.where(exists, 0)
    if not len(keys):
        none = scores.new_full((*scores.shape[:2], chosen.shape[1]), -math.inf)
        return none, keys.new_zeros(*at.shape, keys.shape[1])
    scores = scores.gather(-1, at.expand(len(scores), -1, -1)).masked_fill(~exists, -math.inf)
    seen = (scores > -math.inf).any(0) | scores.isnan().any(0)
    return scores, torch.where(seen[..., None], keys[at], 0)


def mla(q_latent, q_rope, cache, pages, lengths, chosen, scale, lse):
    q = _wide(q_latent if q_rope is None else torch.cat((q_latent, q_rope), -1))
    rank = q_latent.shape[-1]
    out, sums = torch.zeros_like(q[..., :rank]), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])
    for i in range(len(q)):
        keys = _wide(cache[i] if pages is None else cache.new_zeros(0, cache.shape[2]))
        if pages is not None:
            own = pages[i].long()
            exists = (own >= 0) & (own < len(cache))
            keys = _wide(torch.where(exists[:, None, None], cache[own.where(exists, 0)], 0).flatten(0, 1))
        if lengths is not None:
            keys = keys[:max(0, int(lengths[i]))]
        scores = (scale or q.shape[-1] ** -0.5) * (q[i].transpose(0, 1) @ keys.T)
        place = torch.arange(q.shape[1], device=q.device)[:, None] + len(keys) - q.shape[1]
        scores = scores.masked_fill(torch.arange(len(keys), device=q.device) > place, -math.inf)
        if chosen is not None:
            scores, keys = _of_lists(scores, keys, chosen[i].long())
        sums[i] = scores.logsumexp(-1)
        sums[i] = torch.where(sums[i] == math.inf, math.nan, sums[i])
        weights = torch.where((sums[i] != -math.inf)[..., None], torch.exp(scores - sums[i][..., None]), 0)
        values = keys[..., :rank]
        out[i] = torch.einsum("hqk,kr->qhr" if values.dim() == 2 else "hqk,qkr->qhr", weights, values)
    return out.to(q_latent.dtype), sums if lse else q.new_zeros(0)


def mla_rope(q, kv, norm, positions, angles, cache, slots, rotation, rope_order, eps, rule, numbers):
    rank = norm.shape[0]
    rope = kv.shape[-1] - rank
    latent, key, q = rmsnorm(kv[..., :rank], norm, eps, "t5"), kv[..., None, rank:], q[..., -rope:]
    if rotation != "none":
        angle, factor = angles_at(positions, angles, rotation, rope, rule, numbers)
        q, key = (_rotated(t, angle.unsqueeze(-2), factor, rotation, False) for t in (q, key))
    if rope_order == "halves":
        q, key = (torch.cat((t[..., 0::2], t[..., 1::2]), -1) for t in (q, key))
    rows, to = torch.cat((latent, key[..., 0, :]), -1).flatten(0, -2), slots.flatten().long()
    exists = (to >= 0) & (to < cache.shape[0])
    cache[to[exists]] = rows[exists]
    return q.contiguous()


def head_linear(x, w):
    return torch.einsum("...hk,hnk->...hn", _wide(x), _wide(w)).to(x.dtype)


def head_linear_transposed(x, w):
    return head_linear(x, w.mT)

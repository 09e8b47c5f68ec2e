"""The head of a language model, and draws."""
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .norms import layernorm, rmsnorm


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

"""A decode step."""
import torch

from .._layer_kinds import parse_kinds
from .head import head
from .layer import _expect_no_group, layer
from .packed import _dense


def decode(ids, lengths, steps, ended, out, limits, stop, embedding, angles, pages, weights, caches,
           final_norm, final_norm_bias, w_head, head_bias, temperature, seeds, top_k, top_p, min_p,
           form, embed_scale, logit_softcap, pad, logprobs, best, memory=None, w_head_scale=None,
           w_head_zero=None, head_packed="", first_expert=None, kind_angles=None):
    _expect_no_group("decode", memory)
    kinds = parse_kinds(form)
    found = kinds.parsed[0]
    angles = [angles, *(kinds.angles_behind(kind_angles) if kind_angles else [angles] * len(kinds.forms))]
    layers = list(kinds.layers(weights, caches))
    if head_packed:
        format, group = head_packed.split("-")
        w_head = _dense(format, w_head, w_head_scale, w_head_zero, *embedding.shape, group, embedding.dtype)
    first = next((own[0] for kind, _, own in layers if kinds.parsed[kind].attends), None)
    page = first.shape[1] if pages is not None else 0
    cache = pages.shape[1] * page if page else 2**31 - 1 if first is None else first.shape[-2]
    alive = (ended == 0) & (lengths < cache)
    exists = (ids >= 0) & (ids < embedding.shape[0])
    x = embedding[ids.clamp(0, embedding.shape[0] - 1).long()].float() * embed_scale
    x = torch.where(exists[:, None], x, 0).to(embedding.dtype)[:, None]
    keys = torch.where(alive, lengths.clamp(min=0) + 1, lengths.clamp(1, cache))
    places = (keys - 1)[:, None].long()
    if page:
        own = pages.gather(1, places // page)
        slots = torch.where((own >= 0) & (own < first.shape[0]), own * page + places % page, -1)
    else:
        slots = torch.arange(len(ids), device=ids.device)[:, None] * cache + places
    slots = torch.where(alive[:, None], slots, -1)
    for kind, own, states in layers if kinds.order else [(0, weights, caches)]:
        parsed, form = kinds.parsed[kind], kinds.forms[kind]
        if parsed.attends:
            x = layer(x, places, angles[kind] if parsed.rotates else None, slots, keys, pages, own, states, form)
            continue
        before = [t.clone() for t in states]
        sequences = torch.arange(len(ids), dtype=torch.int32, device=ids.device) if parsed.is_recurrent else None
        x = layer(x, None, None, sequences, None, None, own, states, form)
        for state, old in zip(states, before):  # a sequence that has ended keeps its states
            state.copy_(torch.where(alive.view(-1, *[1] * (state.dim() - 1)), state, old))
    x = x[:, 0]
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

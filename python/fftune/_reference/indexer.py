"""The choice of keys of sparse attention."""
import torch


def indexer(q, weights, k, pages, lengths, top):
    return indexer_e4m3(q, weights, k, k.new_ones(k.shape[:2], dtype=torch.float32), pages, lengths, top)


def indexer_e4m3(q, weights, k, k_scale, pages, lengths, top):
    k, k_scale = k.double(), k_scale.double()
    if pages is not None:
        exists = (pages >= 0) & (pages < len(k))
        at = pages.long().where(exists, 0)
        k, k_scale = (torch.where(exists.view(*exists.shape, *[1] * (t.dim() - 1)), t[at], 0).flatten(1, 2)
                      for t in (k, k_scale))
    products = torch.einsum("bqhd,bkd->bqhk", q.double(), k).relu()
    scores = torch.einsum("bqh,bqhk->bqk", weights.double(), products) * k_scale[:, None]
    ids = torch.full((*q.shape[:2], top), -1, dtype=torch.int32, device=q.device)
    for i in range(len(q)):
        length = k.shape[1] if lengths is None else min(max(0, int(lengths[i])), k.shape[1])
        for j in range(q.shape[1]):
            visible = max(0, min(length, j + length - q.shape[1] + 1))
            best = scores[i, j, :visible].sort(descending=True, stable=True).indices[:top].sort().values
            ids[i, j, :len(best)] = best
    return ids

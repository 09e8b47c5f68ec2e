"""The choice of keys of sparse attention."""
import math

import torch


def indexer(q, weights, k, lengths, top):
    return indexer_e4m3(q, weights, k, k.new_ones(k.shape[:2]), lengths, top)


def indexer_e4m3(q, weights, k, k_scale, lengths, top):
    products = torch.einsum("bqhd,bkd->bqhk", q.double(), k.double()).relu()
    scores = torch.einsum("bqh,bqhk->bqk", weights.double(), products) * k_scale.double()[:, None]
    ids = torch.full((*q.shape[:2], top), -1, dtype=torch.int32, device=q.device)
    for i in range(len(q)):
        length = k.shape[1] if lengths is None else min(max(0, int(lengths[i])), k.shape[1])
        for j in range(q.shape[1]):
            visible = max(0, min(length, j + length - q.shape[1] + 1))
            own = scores[i, j, :visible].nan_to_num(math.inf, math.inf, -math.inf)
            best = own.sort(descending=True, stable=True).indices[:top].sort().values
            ids[i, j, :len(best)] = best
    return ids

#!/usr/bin/env python3
"""Times attention of new tokens over pages of keys, as engines run it, beside FlashAttention 3.

usage: peers_pages.py [NAME...] [--page KEYS] [--json OUT]

A batch has sequences with one new token (decoding) and with many (prompts, or chunks of them behind
keys that are there already). Pages lie in memory in random order. Contenders (bf16, causal):

fftune      fftune.ops.attention with pages, offsets and lengths
FA3         flash_attn_varlen_func of vLLM's build, where vllm is installed
contiguous  fftune.ops.attention of the same batch without pages, where no sequence has earlier keys

NAME chooses the batches whose label contains it. The L2 cache is flushed before each replay of a CUDA
graph, and the contenders take turns; the median of the rounds counts. `error` is the difference from
the last contender, relative to its norm.
"""
import argparse
import json
import statistics

import torch

from contenders import ROUNDS, graph_of
from fftune import ops

HEADS = {"32/8, 128": (32, 8, 128), "32/8, 64": (32, 8, 64), "32/4, 128": (32, 4, 128)}
# The new tokens of each sequence, and its keys, these among them.
BATCHES = {
    "1 x 512": ([512], [512]),
    "4 x 1024": ([1024] * 4, [1024] * 4),
    "60 decoding, 512": ([1] * 60 + [512], [1088] * 60 + [512]),
    "60 decoding, 7 x 1024": ([1] * 60 + [1024] * 7, [1088] * 60 + [1024] * 7),
    "2048 behind 6144": ([2048], [8192]),
    "8 x 200 behind 300": ([200] * 8, [500] * 8),
    "64 decoding": ([1] * 64, [2048] * 64),
}


def microseconds(runs, flush):
    """The median of each contender's cold rounds."""
    graphs = [graph_of([run]) for run in runs]
    times = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for graph, found in zip(graphs, times):
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e3)
    return [statistics.median(found) for found in times]


def contenders(heads, kv_heads, dim, new, keys, page):
    """Each contender's name and what runs it; all give [new tokens, heads, dim]."""
    per_sequence = -(-max(keys) // page)
    pages = len(keys) * per_sequence
    # Keys and values of a page side by side, as vLLM lays its cache out.
    cache = torch.randn(pages, 2, page, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(pages, device="cuda").view(len(keys), per_sequence).int()
    q = torch.randn(sum(new), heads, dim, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0] + new, device="cuda").cumsum(0).int()
    lengths = torch.tensor(keys, device="cuda").int()
    flat, doubled = cache.view(-1, page, kv_heads, dim), table * 2
    found = {"fftune": lambda: ops.attention(q, flat[:-1], flat[1:], pages=doubled, offsets=offsets,
                                             lengths=lengths, causal=True)}
    if new == keys:
        gathered = cache[table.long().flatten()].view(len(keys), per_sequence, 2, page, kv_heads, dim)
        k, v = (torch.cat([gathered[i, :, part].reshape(-1, kv_heads, dim)[:n]
                           for i, n in enumerate(keys)]) for part in (0, 1))
        found["contiguous"] = lambda: ops.attention(q, k, v, offsets=offsets, causal=True)
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return found
    out = torch.empty_like(q)
    found["FA3"] = lambda: flash_attn_varlen_func(
        q, cache[:, 0], cache[:, 1], max_seqlen_q=max(new), cu_seqlens_q=offsets,
        max_seqlen_k=max(keys), seqused_k=lengths, causal=True, block_table=table, out=out,
        fa_version=3)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--page", type=int, default=16, metavar="KEYS")
    parser.add_argument("--json", metavar="OUT")
    given = parser.parse_args()
    torch.manual_seed(0)
    flush = torch.empty(64 << 20, dtype=torch.float32, device="cuda")
    rows = []
    for heads_label, heads in HEADS.items():
        for label, (new, keys) in BATCHES.items():
            label = f"{heads_label}: {label}"
            if given.names and not any(name in label for name in given.names):
                continue
            runs = contenders(*heads, new, keys, given.page)
            outputs = [run().clone() for run in runs.values()]
            error = (outputs[0] - outputs[-1]).float().norm() / outputs[-1].float().norm()
            times = dict(zip(runs, microseconds(list(runs.values()), flush)))
            rows.append({"label": label, "us": times, "error": error.item()})
            print(f"{label:36}", " ".join(f"{name} {time:8.1f}" for name, time in times.items()),
                  f"  error {error.item():.1e}", flush=True)
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()

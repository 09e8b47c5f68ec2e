"""Decoding steps of all layers of a model, split among the GPUs of one host: one plan for each rank,
whose sums over ranks are kernels of it.

    python bench/layer_ranks.py                       Llama-3.1-8B, two ranks, batch 1, 16, 64
    python bench/layer_ranks.py --model qwen3-8b --batch 1 --keys 512 --token

    python bench/layer_ranks.py --run "--batch 1" --run "--model llama-3.1-70b --layers 1 --tokens 8192"

bf16, CUDA graphs, microseconds: the median of the replays, the larger of the ranks. `--token` is a whole
token with embedding and head; each rank has a part of its rows. `--whole` has all layers on each GPU, for
comparison. `--tune` searches before. `--check` first compares two layers'
slices with the whole layers on one GPU, `--timeline` prints the kernels of a call. Several `--run` have
the arguments of a measurement each.
"""
import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from all_reduce import leave, replay_time

CALLS = 2  # in a graph

# d, h, heads, kv_heads, dim, layers, vocab, norms of heads
MODELS = {"llama-3.1-8b": (4096, 14336, 32, 8, 128, 32, 128256, False),
          "qwen3-8b": (4096, 12288, 32, 8, 128, 36, 151936, True),
          "llama-3.1-70b": (8192, 28672, 64, 8, 128, 80, 128256, False)}


def make_weights(model: tuple, ranks: int, norm_heads: bool) -> dict[str, torch.Tensor]:
    d, h, heads, kv_heads, dim, *_ = model

    def random(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

    ones = torch.ones(d, device="cuda", dtype=torch.bfloat16)
    weights = {"attn_norm": ones, "w_q": random(heads * dim // ranks, d),
               "w_k": random(kv_heads * dim // ranks, d), "w_v": random(kv_heads * dim // ranks, d),
               "w_o": random(d, heads * dim // ranks), "ffn_norm": ones,
               "w_gate": random(h // ranks, d), "w_up": random(h // ranks, d),
               "w_down": random(d, h // ranks)}
    if norm_heads:
        weights |= {name: ones[:dim].clone() for name in ("q_norm", "k_norm")}
    return weights


def make_caches(batch: int, keys: int, kv_heads: int, dim: int, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(batch, keys, kv_heads, dim, device=device, dtype=torch.bfloat16).transpose(1, 2)
                 for _ in "kv")


def check(model: tuple, rank: int, ranks: int, group) -> None:
    """Two layers' slices against the whole layers, for a few numbers of tokens."""
    import fftune
    d, h, heads, kv_heads, dim, _, _, norm_heads = model
    torch.manual_seed(3)  # the same on all ranks
    weights = [make_weights(model, 1, norm_heads) for _ in range(2)]
    own = [fftune.distributed.slice_layer(w, rank, ranks, heads, kv_heads) for w in weights]
    angles = torch.rand(256, dim // 2, device="cuda").repeat(1, 2)
    for batch, s in ((1, 1), (5, 1), (16, 1), (64, 1), (1, 100)):
        caches = [make_caches(batch, 256, kv_heads, dim) for _ in weights]
        own_caches = [tuple(c.chunk(ranks, 1)[rank].transpose(1, 2).contiguous().transpose(1, 2) for c in pair)
                      for pair in caches]
        lengths = torch.full((batch,), 200, dtype=torch.int32, device="cuda")
        x = torch.randn(batch, s, d, device="cuda", dtype=torch.bfloat16)
        whole = fftune.ops.layer(x, weights, caches, lengths, heads, kv_heads, angles=angles)
        part = fftune.ops.layer(x, own, own_caches, lengths, heads // ranks, kv_heads // ranks,
                                angles=angles, group=group)
        torch.cuda.synchronize()
        group.check()
        error = (part.float() - whole.float()).norm() / whole.float().norm()
        own_result = part.float().cpu()
        same = [torch.empty_like(own_result) for _ in range(ranks)]
        dist.all_gather(same, own_result)
        assert all(torch.equal(other, own_result) for other in same), "ranks have other bits"
        assert error < 1e-2, f"batch {batch}, {s} tokens: error {error}"
        if rank == 0:
            print(f"check batch {batch} tokens {s} error {error:.5f}", flush=True)


def print_timeline(call, rank: int, ranks: int, replays: int = 5) -> None:
    """The kernels of a replayed call by name: how many, how long, and by how much each moved the end of all
    that ran before it. Launches overlap, so the latter add up to the call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    dist.barrier()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    end = None
    for event in sorted((e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA),
                        key=lambda e: e.time_range.end):
        entry = kernels.setdefault(event.name.replace("fftune::", "")[:110], [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += event.time_range.end - event.time_range.start
        entry[2] += event.time_range.end - end if end is not None else 0
        end = event.time_range.end
    for own in range(ranks):
        dist.barrier()
        for name, (count, busy, moved) in sorted(kernels.items(), key=lambda k: -k[1][2]):
            if rank == own and count > replays * 2:
                print(f"  rank {rank} {count / replays:6.1f} x {busy / count:8.2f} us, moves the end "
                      f"{moved / count:8.2f} us each, {moved / replays:9.1f} us a call  {name}", flush=True)


def measure(given: argparse.Namespace, rank: int, group) -> None:
    import fftune
    model = MODELS[given.model]
    ranks = group.ranks
    if given.check:
        check(model, rank, ranks, group)
    d, h, heads, kv_heads, dim, layers, vocab, norm_heads = model
    layers = given.layers or layers
    if given.whole:
        ranks, group = 1, None
    torch.manual_seed(rank)
    weights = [make_weights(model, ranks, norm_heads) for _ in range(layers)]
    angles = torch.rand(given.keys + 8, dim // 2, device="cuda").repeat(1, 2)
    torch.manual_seed(5)
    for batch in map(int, given.batch.split(",")):
        s = given.tokens
        caches = [make_caches(batch, given.keys, kv_heads // ranks, dim) for _ in range(layers)]
        lengths = torch.full((batch,), given.keys, dtype=torch.int32, device="cuda")
        if given.token:
            embedding = torch.randn(vocab, d, device="cuda", dtype=torch.bfloat16)
            head = torch.randn(vocab // ranks, d, device="cuda", dtype=torch.bfloat16) / d**0.5
            norm = torch.ones(d, device="cuda", dtype=torch.bfloat16)
            ids, steps, ended = (torch.zeros(batch, dtype=torch.int32, device="cuda") for _ in range(3))
            out = torch.zeros(batch, 8, dtype=torch.int32, device="cuda")
            limits = torch.full((batch,), 1 << 30, dtype=torch.int32, device="cuda")

            def call():
                # Each call has the same keys: without this the sequence would end with the cache.
                lengths.fill_(given.keys - 1)
                ended.zero_()
                fftune.ops.decode(ids, lengths, steps, ended, out, embedding, weights, caches, norm, head,
                                  heads // ranks, kv_heads // ranks, limits=limits, angles=angles,
                                  group=group)
        else:
            x = torch.randn(batch, s, d, device="cuda", dtype=torch.bfloat16)

            def call():
                fftune.ops.layer(x, weights, caches, lengths, heads // ranks, kv_heads // ranks,
                                 angles=angles, group=group)
        if given.tune and group is not None:
            with torch.no_grad():
                group.tune(call, budget=given.tune, presets=given.presets)
        call()
        torch.cuda.synchronize()
        if rank == 0:
            print(f"# set up after {time.monotonic() - given.begin:.1f} s", flush=True)
        microseconds = replay_time(call, CALLS, given.replays)
        if group is not None:
            group.check()
        if rank == 0:
            what = "".join(f" {word}" for word, has in (("token", given.token), ("tuned", given.tune)) if has)
            print(f"{given.model} layers {layers} ranks {ranks} batch {batch} tokens {s} keys {given.keys}"
                  f"{what} {microseconds:.1f} us", flush=True)
        if given.timeline:
            print_timeline(call, rank, dist.get_world_size())


def run(rank: int, store: str, runs: list) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=runs[0].ranks)
    import fftune

    group = fftune.distributed.init_group(max_bytes=1 << 27, timeout=runs[0].timeout)
    for given in runs:
        measure(given, rank, group)
    group.close()
    leave()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", default="1,16,64", help="numbers of sequences")
    parser.add_argument("--tokens", type=int, default=1, help="new tokens of a sequence")
    parser.add_argument("--keys", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=0, help="all of the model if left out")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=20)
    parser.add_argument("--token", action="store_true", help="a decode step, with embedding and head")
    parser.add_argument("--tune", type=float, default=0, help="seconds of a search on all ranks before")
    parser.add_argument("--presets", help="the folder to which a search writes its records")
    parser.add_argument("--whole", action="store_true", help="no slices: all of the model on each GPU")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--timeline", action="store_true", help="print the kernels of a call and their time")
    parser.set_defaults(begin=time.monotonic())
    parser.add_argument("--run", action="append", default=[], help="the arguments of one measurement")
    arguments = parser.parse_args()
    all_runs = [parser.parse_args(line.split()) for line in arguments.run] or [arguments]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (os.path.join(folder, "store"), all_runs), nprocs=arguments.ranks)

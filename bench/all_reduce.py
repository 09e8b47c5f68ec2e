"""All-reduce with residual and RMSNorm on the GPUs of one host: fftune beside NCCL.

    python bench/all_reduce.py            two ranks; bf16; CUDA graphs; microseconds

NCCL is torch.distributed's all_reduce with a compiled add and norm behind it; "nccl+fftune" is fftune's
plan of link=nccl, NCCL's sum with a kernel behind it. A time is that of a
graph of 20 calls, divided by 20: the median of 30 replays, the larger of the ranks.
"""
import argparse
import os
import statistics
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = ((1, 4096), (6, 6144), (64, 4096), (138, 6144), (1024, 4096), (4096, 8192), (8192, 8192),
         (16384, 8192))
CALLS, REPLAYS = 20, 30


def replay_time(call, calls: int = CALLS, replays: int = REPLAYS) -> float:
    """Microseconds of one call in a graph of several, the larger of the ranks."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the first one brings the ranks together
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    worst = torch.tensor([statistics.median(times)], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def leave() -> None:
    """Ends a rank that still has its process group: to drop one of gloo holds Python's lock while it waits for a
    thread that may need it."""
    sys.stdout.flush()
    os._exit(0)


def run(rank: int, ranks: int, store: str, wanted: list) -> None:
    torch.cuda.set_device(rank)
    # Without NCCL's columns the ranks meet in a fraction of the time.
    dist.init_process_group("gloo" if wanted == ["fftune"] else "nccl", init_method=f"file://{store}",
                            rank=rank, world_size=ranks)
    import fftune

    group = fftune.distributed.init_group(max_bytes=1 << 28)
    groups = [group]
    if not wanted or "nccl+fftune" in wanted:
        groups.append(fftune.distributed.init_group(max_bytes=1, nccl=True))

    def add_and_norm(x, residual, w):
        total = x + residual
        f = total.float()
        return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w, total

    if not wanted or "nccl+norm" in wanted:
        add_and_norm = torch.compile(add_and_norm, dynamic=False)

    def nccl(x, residual, w):
        dist.all_reduce(x)
        return add_and_norm(x, residual, w)

    for m, d in SIZES:
        x, residual = (torch.randn(m, d, device="cuda", dtype=torch.bfloat16) / 64
                       for _ in range(2))
        dist.broadcast(residual, 0)
        w = torch.ones(d, device="cuda", dtype=torch.bfloat16)
        line = f"{m:5} {d:5}"
        for name, call in (
                ("nccl", lambda: dist.all_reduce(x)),
                ("nccl+norm", lambda: nccl(x, residual, w)),
                ("nccl+fftune",
                 lambda: fftune.ops.all_reduce_norm(x, w, residual=residual, group=groups[1])),
                ("fftune", lambda: fftune.ops.all_reduce_norm(x, w, residual=residual, group=group))):
            if not wanted or name in wanted:
                line += f"  {name} {replay_time(call):7.2f}"
                x.normal_().div_(64)
        for each in groups:
            each.check()
        if rank == 0:
            print(line, flush=True)
    for each in groups:
        each.close()
    leave()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="nccl, nccl+norm, nccl+fftune or fftune")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (given.ranks, os.path.join(folder, "store"), given.only), nprocs=given.ranks)

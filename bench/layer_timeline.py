"""Where the microseconds of decode steps go: the kernels of one layer in the middle of a graph of all layers.

    python bench/layer_timeline.py                                  four models, 16 and 64 sequences, 512 and 2048 keys
    python bench/layer_timeline.py --model qwen3-30b-a3b --layers 12 --batch 16 --keys 512

bf16 activations, random weights and caches, the layers' own or presets' choices, traced by CUPTI. A row is a
kernel of a layer: when it starts and ends behind the layer's first kernel, and what it adds, which is the time
from the end of all kernels before it to its own end. Each is the median over the inner layers of all replays.
The layer's floor is its weights and caches, read once at the rate at which the device copies; of experts,
those that the tokens choose. An untraced time of the same graph stands beside it.
"""
import argparse
import statistics
from dataclasses import dataclass
from typing import NamedTuple

import torch

from layer_ranks import make_caches


@dataclass(frozen=True)
class Model:
    d: int
    h: int
    heads: int
    kv_heads: int
    dim: int
    layers: int
    norms_heads: bool = False
    experts: int = 0
    chosen: int = 0
    packed: bool = False


LLAMA_8B = (4096, 14336, 32, 8, 128, 32)
MODELS = {"llama-3.2-1b": Model(2048, 8192, 32, 8, 64, 16),
          "llama-3.1-8b": Model(*LLAMA_8B),
          "llama-3.1-8b-int4": Model(*LLAMA_8B, packed=True),
          "qwen3-30b-a3b": Model(2048, 768, 32, 4, 128, 48, norms_heads=True, experts=128, chosen=8)}


class Kernel(NamedTuple):
    name: str
    start: float
    end: float


class Row(NamedTuple):
    name: str
    start: float
    end: float
    adds: float


def period_of(names: list[str], layers: int) -> tuple[int, int]:
    """How many kernels a layer has, and which is the second layer's first: what a plan runs in front of its layers
    and behind them is less than a layer."""
    length = len(names) // layers
    for first in range(length, min(2 * length, len(names) - length * (layers - 2) + 1)):
        inner = names[first:first + length * (layers - 2)]
        if length and inner == inner[:length] * (layers - 2):
            return length, first
    raise ValueError(f"{len(names)} kernels of {layers} layers do not repeat")


def rows_of(replays: list[list[Kernel]], layers: int) -> list[Row]:
    """The kernels of a layer, from the kernels of each replay by their ends."""
    length, first = period_of([k.name for k in replays[0]], layers)
    found: list[list[tuple[float, float, float]]] = [[] for _ in range(length)]
    for kernels in replays:
        for begin in range(first, first + length * (layers - 2), length):
            zero = kernels[begin].start
            for at in range(length):
                kernel = kernels[begin + at]
                found[at].append((kernel.start - zero, kernel.end - zero, kernel.end - kernels[begin + at - 1].end))
    return [Row(replays[0][first + at].name, *(statistics.median(column) for column in zip(*found[at])))
            for at in range(length)]


def kernels_of(graph: torch.cuda.CUDAGraph, replays: int) -> list[list[Kernel]]:
    """The kernels of each replay, by their ends."""
    found = []
    for _ in range(replays):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            torch.cuda.synchronize()
        found.append(sorted((Kernel(e.name.replace("fftune::", ""), e.time_range.start, e.time_range.end)
                             for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA),
                            key=lambda kernel: kernel.end))
    return found


def make_layer(model: Model, device: str = "cuda") -> dict:
    import fftune

    def random(*shape):
        return torch.randn(*shape, device=device, dtype=torch.bfloat16) / shape[-1] ** 0.5

    def weight(n, k):
        if not model.packed:
            return random(n, k)
        codes = torch.randint(0, 256, (n, k // 2), device=device, dtype=torch.uint8)
        return fftune.ops.pack_weight(codes, torch.rand(n, k // 128, device=device, dtype=torch.bfloat16) / k**0.5)

    d, rows = model.d, model.heads * model.dim
    weights = {"attn_norm": torch.ones(d, device=device, dtype=torch.bfloat16),
               "w_qkv": weight(rows + 2 * model.kv_heads * model.dim, d), "w_o": weight(d, rows),
               "ffn_norm": torch.ones(d, device=device, dtype=torch.bfloat16)}
    if model.norms_heads:
        weights |= {name: torch.ones(model.dim, device=device, dtype=torch.bfloat16) for name in ("q_norm", "k_norm")}
    if model.experts:
        return weights | {"w_router": random(model.experts, d), "w_gate": random(model.experts, model.h, d),
                          "w_up": random(model.experts, model.h, d), "w_down": random(model.experts, d, model.h)}
    return weights | {"w_gate": weight(model.h, d), "w_up": weight(model.h, d), "w_down": weight(d, model.h)}


def floor_bytes(model: Model, batch: int, keys: int) -> float:
    """Bytes of weights and caches that a layer reads: an expert if one of the tokens chooses it, each expert with
    the same probability."""
    width = model.dim * (model.heads * 2 + model.kv_heads * 2)
    element = 0.5 + 2 / 128 if model.packed else 2
    touched = model.experts * (1 - (1 - model.chosen / model.experts) ** batch) if model.experts else 1
    weights = element * model.d * (width + 3 * model.h * touched) + 2 * model.d * model.experts
    return weights + 2 * 2 * batch * keys * model.kv_heads * model.dim


def copy_rate() -> float:
    """Bytes a second, read and written, of the device's copies."""
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    begin.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 10 * 2 * source.numel() / (begin.elapsed_time(end) / 1e3)


def call_of(model: Model, weights: list[dict], batch: int, keys: int, device: str = "cuda"):
    import fftune
    caches = [make_caches(batch, keys, model.kv_heads, model.dim, device) for _ in weights]
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
    angles = torch.rand(keys, model.dim // 2, device=device).repeat(1, 2)
    x = torch.randn(batch, 1, model.d, device=device, dtype=torch.bfloat16)
    chosen = {"top_k": model.chosen, "renormalise": True} if model.experts else {}
    return lambda: fftune.ops.layer(x, weights, caches, lengths, model.heads, model.kv_heads, angles=angles, **chosen)


def measure(name: str, layers: int, batch: int, keys: int, weights: list[dict], rate: float, replays: int) -> None:
    model = MODELS[name]
    call = call_of(model, weights, batch, keys)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    untraced, floor = statistics.median(times) / layers, floor_bytes(model, batch, keys) / rate * 1e6
    print(f"\n{name}, {batch} sequences, {keys} keys: {untraced:.1f} us a layer, {untraced / floor:.2f} times the "
          f"floor of {floor:.1f}", flush=True)
    try:
        rows = rows_of(kernels_of(graph, replays), layers)
    except ValueError as error:
        print(f"  {error}: layers in one launch")
        return
    print(f"  {'starts':>8} {'ends':>8} {'adds':>8}  kernel")
    for row in rows:
        print(f"  {row.start:8.1f} {row.end:8.1f} {row.adds:8.1f}  {row.name[:100]}")
    print(f"  {'':8} {'':8} {sum(row.adds for row in rows):8.1f}  traced", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="all if left out")
    parser.add_argument("--batch", default="16,64", help="numbers of sequences")
    parser.add_argument("--keys", default="512,2048")
    parser.add_argument("--layers", type=int, default=12, help="layers of the plan, at least 4, at most the model's")
    parser.add_argument("--replays", type=int, default=5)
    given = parser.parse_args()
    if given.layers < 4:
        parser.error("--layers: give at least 4: the first and the last are no inner layers")
    rate = copy_rate()
    print(f"# {torch.cuda.get_device_name()}: copies {rate / 1e12:.2f} TB/s", flush=True)
    for name in given.model or MODELS:
        layers = min(given.layers, MODELS[name].layers)
        weights = [make_layer(MODELS[name]) for _ in range(layers)]
        for batch in map(int, given.batch.split(",")):
            for keys in map(int, given.keys.split(",")):
                measure(name, layers, batch, keys, weights, rate, given.replays)
        del weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

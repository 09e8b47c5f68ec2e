#!/usr/bin/env python3
"""Times fftune's C API beside what a PyTorch user would call, in one process.

usage: peers.py LIBFFTUNE.so PRESETS [D,H,M[,M...]]... [--json OUT]

Contenders of ffn (bf16, silu): eager (three linears and silu * mul), merged (gate and up as one
product on concatenated weights, silu * mul compiled), compile (torch.compile of the eager form)
and fftune. Each is a CUDA graph that goes through enough sets of
inputs to overflow the L2 three times; the graphs are replayed in turn, and the median of the rounds
is what a pass takes. The error is against float64 on the CPU, of the first set's first 32 tokens.
"""
import ctypes
import json
import statistics
import sys

import torch
import torch.nn.functional as F

SHAPES = ["1024,2048,1,16,64,256,1024,4096,16384", "4096,14336,1,16,64,256,1024,4096,16384",
          "8192,28672,1,256,4096"]
ROUNDS = 15


class Fftune:
    """The few calls of fftune.h that a run needs."""

    def __init__(self, library, presets):
        self.lib = ctypes.CDLL(library)
        self.lib.fftune_last_error.restype = ctypes.c_char_p
        self.lib.fftune_plan_describe.restype = ctypes.c_char_p
        self.lib.fftune_plan_workspace_bytes.restype = ctypes.c_size_t
        self.context = ctypes.c_void_p()
        self.check(self.lib.fftune_context_create(0, presets.encode(), ctypes.byref(self.context)))

    def check(self, status):
        if status != 0:
            sys.exit(f"peers.py: {self.lib.fftune_last_error().decode()}")

    def plan(self, problem):
        plan = ctypes.c_void_p()
        self.check(self.lib.fftune_plan_create(self.context, json.dumps(problem).encode(),
                                               ctypes.byref(plan)))
        return plan

    def run(self, plan, tensors, workspace):
        pointers = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.check(self.lib.fftune_plan_run(plan, pointers, ctypes.c_size_t(len(tensors)),
                                            ctypes.c_void_p(workspace.data_ptr()), stream))


def eager(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def silu_mul(both):
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def graph_of(passes):
    """A CUDA graph of all passes, one after the other."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in passes[:2]:
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in passes:
            run()
    return graph


def seconds(graph, repeats):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def case(library, d, h, m):
    def random(*shape):
        return torch.randn(shape, device="cuda").to(torch.bfloat16)

    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    per_set = 2 * (3 * d * h + m * (2 * d + h))
    count = max(2, min(64, 3 * l2 // per_set + 1))
    sets = []
    for _ in range(count):
        gate, up = random(h, d) / d**0.5, random(h, d) / d**0.5
        sets.append((random(m, d), gate, up, random(d, h) / h**0.5))
    outs = [torch.empty(m, d, device="cuda", dtype=torch.bfloat16) for _ in sets]
    merged = [torch.cat((s[1], s[2])) for s in sets]

    torch._dynamo.reset()
    compiled_act = torch.compile(silu_mul, dynamic=False)
    compiled = torch.compile(eager, dynamic=False)
    plan = library.plan({"op": "ffn", "dtype": "bf16", "m": m, "d": d, "h": h})
    workspace = torch.empty(max(1, library.lib.fftune_plan_workspace_bytes(plan)), device="cuda",
                            dtype=torch.uint8)
    contenders = {
        "eager": lambda s, i: eager(*s),
        "merged": lambda s, i: F.linear(compiled_act(F.linear(s[0], merged[i])), s[3]),
        "compile": lambda s, i: compiled(*s),
        "fftune": lambda s, i: library.run(plan, [*s, outs[i]], workspace),
    }
    result = {"d": d, "h": h, "m": m}
    rows = min(m, 32)
    x, gate, up, down = (t.double().cpu() for t in sets[0])
    truth = eager(x[:rows], gate, up, down)
    graphs = {}
    for name, call in contenders.items():
        value = call(sets[0], 0)
        torch.cuda.synchronize()
        value = outs[0] if value is None else value
        error = (value[:rows].double().cpu() - truth).norm() / truth.norm()
        result[name + "_error"] = float(error)
        graphs[name] = graph_of([lambda s=s, i=i, call=call: call(s, i)
                                 for i, s in enumerate(sets)])
    repeats = {name: max(1, int(0.01 / seconds(graph, 2))) for name, graph in graphs.items()}
    samples = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            samples[name].append(seconds(graph, repeats[name]) / len(sets) * 1e6)
    for name, times in samples.items():
        result[name] = statistics.median(times)
    best = min(("eager", "merged", "compile"), key=lambda name: result[name])
    result["best"], result["ratio"] = best, result[best] / result["fftune"]
    print(f"{d:5d} {h:6d} {m:6d} " + " ".join(f"{result[n]:9.2f}" for n in contenders)
          + f"  {result['ratio']:5.2f} x {best:8s} error {result['fftune_error']:.2e}"
          f" ({best} {result[best + '_error']:.2e})", flush=True)
    return result


def main(arguments):
    out = None
    if "--json" in arguments:
        place = arguments.index("--json")
        out = arguments[place + 1]
        del arguments[place:place + 2]
    if len(arguments) < 2:
        sys.exit(__doc__)
    torch.manual_seed(1)
    library = Fftune(*arguments[:2])
    print("    d      h      m     eager    merged   compile    fftune  fftune against the best")
    results = []
    for shape in arguments[2:] or SHAPES:
        d, h, *tokens = (int(word) for word in shape.split(","))
        for m in tokens:
            results.append(case(library, d, h, m))
            torch.cuda.empty_cache()
            if out:
                json.dump(results, open(out, "w"), indent=1)
    product = 1.0
    for result in results:
        product *= result["ratio"]
    print(f"geometric mean {product ** (1 / len(results)):.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])

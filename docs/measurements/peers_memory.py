#!/usr/bin/env python3
"""Times the memory-bound ops through fftune's C API beside what a PyTorch user would call, in one
process.

usage: peers_memory.py LIBFFTUNE.so PRESETS [NAME...] [--json OUT]

Contenders (bf16): eager, compile (torch.compile of eager) and fftune, of the cases below or of those
whose label contains a NAME. Each is a CUDA graph that goes through enough sets of inputs to overflow
the L2 three times; the graphs are replayed in turn, and the median of the rounds is what a pass
takes. The error is against float64 on the CPU, of the first rows.
"""
import json
import statistics
import sys

import torch
import torch.nn.functional as F

from peers import Fftune, graph_of, seconds

ROUNDS = 15
ERROR_ROWS = 32


def random(*shape, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


def rmsnorm(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)


def bias_gelu(x, bias):
    return F.gelu(x + bias)


def bias_gelu_gradient(x, bias, dy):
    z = (x + bias).to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    slope = 0.5 * (1 + torch.erf(z / 2**0.5)) + z * torch.exp(-z * z / 2) / (2 * torch.pi) ** 0.5
    dx = dy * slope
    return dx.to(x.dtype), dx.sum(0).to(x.dtype)


def rope(q, angles):
    cosine, sine = angles.cos()[:, None, None].to(q.dtype), angles.sin()[:, None, None].to(q.dtype)
    first, second = q.chunk(2, dim=-1)
    return q * cosine + torch.cat((-second, first), dim=-1) * sine


def rope_angles(s, dim):
    steps = torch.arange(0, dim, 2, device="cuda", dtype=torch.float32)
    angles = torch.arange(s, device="cuda").float()[:, None] * 10000 ** (-steps / dim)
    return torch.cat((angles, angles), dim=-1)


def layer(op, m, d, inputs, function, outputs=1, size="d", **problem):
    """A case whose tensors are rows [m, d] first and last and vectors [d] between."""
    return {"label": f"{op} {problem.get('pass', 'fwd')} {m} x {d}",
            "problem": {"op": op, "dtype": "bf16", "m": m, size: d, **problem},
            "inputs": inputs, "function": function, "outputs": outputs,
            "bytes": 2 * m * d * (2 if outputs == 1 else 3)}


def rope_case(s, b, heads, dim):
    return {"label": f"rope fwd s{s} b{b} heads {heads} dim {dim}",
            "problem": {"op": "rope", "dtype": "bf16", "s": s, "b": b, "heads": heads, "dim": dim},
            "inputs": lambda: (random(s, b, heads, dim), rope_angles(s, dim)),
            "function": rope, "outputs": 1, "bytes": 4 * s * b * heads * dim}


CASES = [layer("rmsnorm", m, d, lambda m=m, d=d: (random(m, d), random(d)), rmsnorm)
         for m, d in ((64, 4096), (4096, 4096), (16384, 8192))]
CASES += [layer("bias-gelu", m, h, lambda m=m, h=h: (random(m, h), random(h)), bias_gelu, size="h")
          for m, h in ((4096, 4096), (16384, 8192))]
CASES += [layer("bias-gelu", 16384, 8192,
                lambda: (random(16384, 8192), random(8192), random(16384, 8192)),
                bias_gelu_gradient, outputs=2, size="h", **{"pass": "bwd"})]
CASES += [rope_case(2048, 2, 32, 128), rope_case(8192, 1, 8, 256), rope_case(512, 16, 32, 64)]


def error_of(case, inputs, result):
    """Relative, of the first rows of the first output; vectors belong to every row."""
    part = [t[:ERROR_ROWS] if t.dim() > 1 else t for t in inputs]
    truth = case["function"](*(t.double().cpu() for t in part))
    truth = truth[0] if isinstance(truth, tuple) else truth
    value = (result[0] if isinstance(result, tuple) else result)[:ERROR_ROWS].double().cpu()
    return float((value - truth).norm() / truth.norm())


def measure(library, case):
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    sets = [case["inputs"]() for _ in range(max(2, min(128, 3 * l2 // case["bytes"] + 1)))]
    torch._dynamo.reset()
    compiled = torch.compile(case["function"], dynamic=False)
    plan = library.plan(case["problem"])
    workspace = torch.empty(max(1, library.lib.fftune_plan_workspace_bytes(plan)), device="cuda",
                            dtype=torch.uint8)
    first = case["function"](*sets[0])
    first = first if isinstance(first, tuple) else (first,)
    outs = [tuple(torch.empty_like(t) for t in first) for _ in sets]

    def fftune(inputs, index):
        library.run(plan, [*inputs, *outs[index]], workspace)
        return outs[index]

    contenders = {"eager": lambda s, i: case["function"](*s), "compile": lambda s, i: compiled(*s),
                  "fftune": fftune}
    result = {"case": case["label"], "sets": len(sets)}
    graphs = {}
    for name, call in contenders.items():
        value = call(sets[0], 0)
        torch.cuda.synchronize()
        result[name + "_error"] = error_of(case, sets[0], value)
        graphs[name] = graph_of([lambda s=s, i=i, call=call: call(s, i)
                                 for i, s in enumerate(sets)])
    repeats = {name: max(1, int(0.01 / seconds(graph, 2))) for name, graph in graphs.items()}
    samples = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            samples[name].append(seconds(graph, repeats[name]) / len(sets) * 1e6)
    for name, times in samples.items():
        result[name] = statistics.median(times)
    result["ratio"] = min(result["eager"], result["compile"]) / result["fftune"]
    print(f"{case['label']:34s}" + " ".join(f"{result[name]:9.2f}" for name in contenders)
          + f"  {result['ratio']:5.2f} x  error {result['fftune_error']:.2e}"
          f" (compile {result['compile_error']:.2e})", flush=True)
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
    print(f"{'case':34s}    eager   compile    fftune  fftune against the best")
    names = arguments[2:]
    results = []
    for case in CASES:
        if names and not any(name in case["label"] for name in names):
            continue
        results.append(measure(library, case))
        torch.cuda.empty_cache()
        if out:
            json.dump(results, open(out, "w"), indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])

#!/usr/bin/env python3
"""Times fftune's C API beside what a PyTorch user would call, in one process.

usage: peers.py LIBFFTUNE.so PRESETS [D,H,M[,M...]]... [--json OUT]

Contenders of ffn (bf16, silu): eager (three linears and silu * mul), merged (gate and up as one
product on concatenated weights, silu * mul compiled), compile (torch.compile of the eager form)
and fftune. Each is a CUDA graph that goes through enough sets of
inputs to overflow the L2 three times; the graphs are replayed round-robin, and the median of the
rounds is what a pass takes. The error is against float64 on the CPU, of the first set's first 32 tokens.
"""
import json
import sys

import torch
import torch.nn.functional as F

from contenders import Fftune, arguments_of, microseconds, random, sets_of

SHAPES = ["1024,2048,1,16,64,256,1024,4096,16384", "4096,14336,1,16,64,256,1024,4096,16384",
          "8192,28672,1,256,4096"]


def eager(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def silu_mul(both):
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def case(library, d, h, m):
    sets = sets_of(lambda: (random(m, d), random(h, d, scale=d**-0.5), random(h, d, scale=d**-0.5),
                            random(d, h, scale=h**-0.5)), 2 * (3 * d * h + m * (2 * d + h)), 64)
    outs = [torch.empty(m, d, device="cuda", dtype=torch.bfloat16) for _ in sets]
    merged = [torch.cat((s[1], s[2])) for s in sets]

    torch._dynamo.reset()
    compiled_act = torch.compile(silu_mul, dynamic=False)
    compiled = torch.compile(eager, dynamic=False)
    plan = library.plan({"op": "ffn", "dtype": "bf16", "m": m, "d": d, "h": h})
    workspace = library.workspace(plan)
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
    for name, call in contenders.items():
        value = call(sets[0], 0)
        torch.cuda.synchronize()
        value = outs[0] if value is None else value
        error = (value[:rows].double().cpu() - truth).norm() / truth.norm()
        result[name + "_error"] = float(error)
    result.update(microseconds(contenders, sets))
    best = min(("eager", "merged", "compile"), key=lambda name: result[name])
    result["best"], result["ratio"] = best, result[best] / result["fftune"]
    print(f"{d:5d} {h:6d} {m:6d} " + " ".join(f"{result[n]:9.2f}" for n in contenders)
          + f"  {result['ratio']:5.2f} x {best:8s} error {result['fftune_error']:.2e}"
          f" ({best} {result[best + '_error']:.2e})", flush=True)
    return result


def main(arguments):
    arguments, out = arguments_of(arguments, __doc__, 2)
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

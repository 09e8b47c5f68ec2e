#!/usr/bin/env python3
"""Times the memory-bound ops, and ffn behind a norm, through fftune's C API beside what a PyTorch
user would call, in one process.

usage: peers_memory.py LIBFFTUNE.so PRESETS [NAME...] [--json OUT]

Contenders (bf16): eager, compile (torch.compile of eager), liger (Liger-Kernel's rmsnorm),
processor (the NoRepeatNGramLogitsProcessor of transformers), apart (rmsnorm and ffn of fftune as
two plans) and fftune, of the cases below or of those whose label contains a NAME. Liger and
transformers are left out where they are not installed. Each contender is a CUDA graph that goes
through enough sets of inputs to overflow the L2 three times; the graphs are replayed
round-robin, and the median of the rounds is what a pass takes. The processor works on the host, so that no graph can
hold it: it is timed by the host's clock. The error is against float64 on the CPU, of the first
rows.
"""
import importlib.util
import json
import statistics
import sys
import time
import types

import torch
import torch.nn.functional as F

from contenders import Fftune, arguments_of, microseconds, random, sets_of

ERROR_ROWS = 32


def rmsnorm(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)


def rmsnorm_gradient(x, w, dy):
    wide = x if x.dtype == torch.float64 else x.float()
    r = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
    g, normalised = dy * w, wide * r
    dx = r * (g - normalised * (g * normalised).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * normalised).sum(0).to(x.dtype)


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


def rope_given_sines(q, angles, cosine, sine):
    first, second = q.chunk(2, dim=-1)
    return q * cosine + torch.cat((-second, first), dim=-1) * sine


def norm_ffn(x, w_gate, w_up, w_down, w_norm):
    x = rmsnorm(x, w_norm)
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def block_ngrams(ids, logits, n=3):
    """The definition as tensor operations: every window against the row's last n - 1 ids."""
    windows = ids.unfold(1, n, 1)
    same = (windows[:, :, :-1] == ids[:, None, 1 - n:]).all(-1)
    followers = torch.where(same, windows[:, :, -1], 0)
    amount = torch.where(same, float("-inf"), 0.0).to(logits.dtype)
    return logits.scatter_add(1, followers, amount)


def rope_angles(s, dim):
    steps = torch.arange(0, dim, 2, device="cuda", dtype=torch.float32)
    angles = torch.arange(s, device="cuda").float()[:, None] * 10000 ** (-steps / dim)
    return torch.cat((angles, angles), dim=-1)


def layer(op, m, d, inputs, function, outputs=1, size="d", **problem):
    """A case whose tensors are rows [m, d] first and last and vectors [d] between."""
    return {"label": f"{op} {problem.get('pass', 'fwd')} {m} x {d}",
            "problem": {"op": op, "dtype": "bf16", "m": m, size: d, **problem},
            "inputs": inputs, "function": function,
            "bytes": 2 * m * d * (2 if outputs == 1 else 3)}


def rope_case(s, b, heads, dim):
    def inputs():
        angles = rope_angles(s, dim)
        sines = [f(angles)[:, None, None].to(torch.bfloat16) for f in (torch.cos, torch.sin)]
        return (random(s, b, heads, dim), angles, *sines)

    return {"label": f"rope fwd s{s} b{b} heads {heads} dim {dim}",
            "problem": {"op": "rope", "dtype": "bf16", "s": s, "b": b, "heads": heads, "dim": dim},
            "inputs": inputs, "function": lambda q, angles, *_: rope(q, angles),
            "others": {"given sines": rope_given_sines}, "read": 2,
            "bytes": 4 * s * b * heads * dim}


def norm_case(d, h, m):
    return {"label": f"norm + ffn {d}, {h}, {m}",
            "problem": {"op": "ffn", "dtype": "bf16", "m": m, "d": d, "h": h, "norm": "rms"},
            "inputs": lambda: (random(m, d), random(h, d, scale=d**-0.5),
                               random(h, d, scale=d**-0.5), random(d, h, scale=h**-0.5), random(d)),
            "function": norm_ffn, "apart": True, "bytes": 2 * (3 * d * h + m * (2 * d + h))}


def ngram_case(b, length, vocab):
    return {"label": f"ngram-block {b} x {length}, vocab {vocab}",
            "problem": {"op": "ngram-block", "dtype": "bf16", "b": b, "len": length, "vocab": vocab,
                        "ids": "i64", "n": "3"},
            "inputs": lambda: (torch.randint(0, 32, (b, length), device="cuda"), random(b, vocab)),
            "function": block_ngrams, "in_place": True, "bytes": 2 * b * vocab + 8 * b * length}


CASES = [layer("rmsnorm", m, d, lambda m=m, d=d: (random(m, d), random(d)), rmsnorm)
         for m, d in ((64, 4096), (4096, 4096), (16384, 8192))]
CASES += [layer("rmsnorm", m, d, lambda m=m, d=d: (random(m, d), random(d), random(m, d)),
                rmsnorm_gradient, outputs=2, **{"pass": "bwd"})
          for m, d in ((4096, 4096), (16384, 8192))]
CASES += [layer("bias-gelu", m, h, lambda m=m, h=h: (random(m, h), random(h)), bias_gelu, size="h")
          for m, h in ((4096, 4096), (16384, 8192))]
CASES += [layer("bias-gelu", 16384, 8192,
                lambda: (random(16384, 8192), random(8192), random(16384, 8192)),
                bias_gelu_gradient, outputs=2, size="h", **{"pass": "bwd"})]
CASES += [rope_case(2048, 2, 32, 128), rope_case(8192, 1, 8, 256), rope_case(512, 16, 32, 64)]
CASES += [norm_case(d, h, m) for d, h in ((1024, 2048), (4096, 14336)) for m in (1, 16, 256, 4096)]
CASES += [ngram_case(256, 512, 32128), ngram_case(512, 8192, 32128)]


def liger_rmsnorm():
    """Liger's forward pass as a function of x and w, or nothing."""
    try:
        from liger_kernel.ops.rms_norm import rms_norm_forward
    except ImportError as error:
        print(f"liger is left out: {error}")
        return None
    return lambda x, w: rms_norm_forward(x, w, 1e-6, 0.0, "llama", None)[0]


def ngram_processor():
    """The processor of transformers as a function of ids and logits, or nothing. Its module alone
    is loaded, with what it imports of its package and does not need here left empty."""
    found = importlib.util.find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        print("the processor is left out: there is no transformers")
        return None
    names = ["transformers", "transformers.generation", "transformers.utils",
             "transformers.utils.logging", "transformers.pytorch_utils"]
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules["transformers.utils"].add_start_docstrings = lambda *_: lambda function: function
    sys.modules["transformers.utils.logging"].get_logger = lambda name: None
    sys.modules["transformers.pytorch_utils"].isin_mps_friendly = torch.isin
    spec = importlib.util.spec_from_file_location(
        "transformers.generation.logits_process",
        found.submodule_search_locations[0] + "/generation/logits_process.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in names:
        del sys.modules[name]
    return module.NoRepeatNGramLogitsProcessor(3)


def host_microseconds(call, sets, rounds=5):
    times = []
    for index in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(sets[index % len(sets)], 0)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def error_of(case, inputs, result):
    """Relative, of the first rows of the first output; vectors belong to every row."""
    if case.get("in_place"):
        return float((result != case["function"](*inputs)).sum())
    def is_weight(i):
        return case.get("apart") and i > 0

    part = [t[:ERROR_ROWS] if t.dim() > 1 and not is_weight(i) else t
            for i, t in enumerate(inputs)]
    truth = case["function"](*(t.double().cpu() for t in part))
    truth = truth[0] if isinstance(truth, tuple) else truth
    value = (result[0] if isinstance(result, tuple) else result)[:ERROR_ROWS].double().cpu()
    return float((value - truth).norm() / truth.norm())


def fftune_contenders(library, case, sets):
    """fftune as one plan, and the norm and ffn as two where the case is both."""
    problem = case["problem"]
    plan = library.plan(problem)
    workspace = library.workspace(plan)
    first = case["function"](*sets[0])
    first = first if isinstance(first, tuple) else (first,)
    if case.get("in_place"):
        counts = [torch.empty(s[0].shape[0], device="cuda", dtype=torch.int32) for s in sets]
        logits = [s[1].clone() for s in sets]

        def updated(inputs, index):
            library.run(plan, [inputs[0], logits[index], counts[index]], workspace)
            return logits[index]

        return {"fftune": updated}
    outs = [tuple(torch.empty_like(t) for t in first) for _ in sets]

    def fftune(inputs, index):
        library.run(plan, [*inputs[:case.get("read", len(inputs))], *outs[index]], workspace)
        return outs[index]

    contenders = {"fftune": fftune}
    if case.get("apart"):
        norm = library.plan({"op": "rmsnorm", "dtype": "bf16", "m": problem["m"],
                             "d": problem["d"]})
        ffn = library.plan({name: value for name, value in problem.items() if name != "norm"})
        normalised = torch.empty_like(sets[0][0])
        both = library.workspace(norm), library.workspace(ffn)

        def apart(inputs, index):
            library.run(norm, [inputs[0], inputs[4], normalised], both[0])
            library.run(ffn, [normalised, *inputs[1:4], *outs[index]], both[1])
            return outs[index]

        contenders["apart"] = apart
    return contenders


def measure(library, case, peers):
    sets = sets_of(case["inputs"], case["bytes"], 128)
    torch._dynamo.reset()
    compiled = torch.compile(case["function"], dynamic=False)
    contenders = {"eager": lambda s, i: case["function"](*s), "compile": lambda s, i: compiled(*s)}
    for name, function in case.get("others", {}).items():
        other = torch.compile(function, dynamic=False)
        contenders[name] = lambda s, i, other=other: other(*s)
    op = case["problem"]["op"]
    if op == "rmsnorm" and "pass" not in case["problem"] and peers["liger"]:
        contenders["liger"] = lambda s, i: peers["liger"](*s)
    contenders.update(fftune_contenders(library, case, sets))
    result = {"case": case["label"], "sets": len(sets)}
    for name, call in contenders.items():
        value = call(sets[0], 0)
        torch.cuda.synchronize()
        result[name + "_error"] = error_of(case, sets[0], value)
    times = microseconds(contenders, sets)
    if op == "ngram-block" and peers["processor"]:
        times["processor"] = host_microseconds(lambda s, i: peers["processor"](*s), sets)
    result.update(times)
    ours = times.pop("fftune")
    result["ratio"] = min(times.values()) / ours
    print(f"{case['label']:36s} fftune {ours:8.2f}  {result['ratio']:5.2f} x  "
          + "  ".join(f"{name} {value:.2f}" for name, value in times.items())
          + f"  error {result['fftune_error']:.2e} (compile {result['compile_error']:.2e})",
          flush=True)
    return result


def main(arguments):
    arguments, out = arguments_of(arguments, __doc__, 2)
    torch.manual_seed(1)
    library = Fftune(*arguments[:2])
    peers = {"liger": liger_rmsnorm(), "processor": ngram_processor()}
    names = arguments[2:]
    results = []
    for case in CASES:
        if names and not any(name in case["label"] for name in names):
            continue
        results.append(measure(library, case, peers))
        torch.cuda.empty_cache()
        if out:
            json.dump(results, open(out, "w"), indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])

#!/usr/bin/env python3
"""The host's time for one op: rmsnorm of f32 [1, 64] by the package, and as an op in C++.

usage: host_overhead.py [--include DIR] [--build DIR] [--plans]

It builds op.cpp twice with c++, on PyTorch's stable ABI and on its C++ API, against the headers of
the PyTorch that runs. Contenders, in microseconds a call; the least of rounds in which each has its
turn:

  aten.rms_norm    PyTorch's own
  package          fftune.ops.rmsnorm
  stable           the op on the stable ABI, with an autograd.Function in Python
  C++              the op whose gradient is a torch::autograd::Function, which the stable ABI lacks

Then a plan for a new number of rows: the host's milliseconds in fftune_plan_create, without those in
NVRTC; the median of 20 neighbouring numbers of rows. --plans prints this table alone.
"""
import argparse
import ctypes
import statistics
import subprocess
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

import fftune
from fftune._library import Plan, check_status, context, library, library_path

HERE = Path(__file__).resolve().parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(folder: Path, include: str, stable: bool) -> None:
    out = folder / ("stable.so" if stable else "cpp.so")
    version = torch.__version__.split("+")[0].split(".")
    target = f"-DTORCH_TARGET_VERSION=0x{int(version[0]):02x}{int(version[1]):02x}000000000000ULL"
    own = ["-DFFTUNE_STABLE", target] if stable else ["-ltorch", "-ltorch_cpu", "-lc10"]
    own = [*own, "-ltorch_cpu"] if stable else own
    subprocess.run(
        ["c++", "-std=c++20", "-O2", "-shared", "-fPIC", str(HERE / "op.cpp"), "-o", str(out),
         f"-I{include}", f"-I{sysconfig.get_paths()['include']}",
         *(f"-I{p}" for p in include_paths()), *(f"-L{p}" for p in library_paths()),
         str(library_path().resolve()), f"-Wl,-rpath,{library_path().resolve().parent}", *own],
        check=True)
    torch.ops.load_library(str(out))


class Stable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.ops.fftune_stable.rmsnorm.default(x, w)

    @staticmethod
    def backward(ctx, dy):
        return torch.ops.fftune_stable.rmsnorm_backward.default(dy, *ctx.saved_tensors)


def stable(x, w):
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        return Stable.apply(x, w)
    return torch.ops.fftune_stable.rmsnorm.default(x, w)


def times_of(calls: dict, context) -> dict:
    least = {}
    with context:
        for round_ in range(40):
            for name, call in calls.items():
                for _ in range(50 if round_ == 0 else 2):
                    call()
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(100):
                    call()
                spent = (time.perf_counter() - start) / 100 * 1e6
                least[name] = min(least.get(name, spent), spent)
    return least


class Counters(ctypes.Structure):
    """fftune_counters"""

    _fields_ = [("struct_size", ctypes.c_size_t),
                *((name, ctypes.c_uint64) for name in
                  ("compilations", "compile_nanoseconds", "from_cache", "from_bundle", "plans",
                   "plan_nanoseconds"))]


def plan_milliseconds(device: int, problem: dict) -> float:
    """Those of one plan."""
    def read() -> int:
        counters = Counters(ctypes.sizeof(Counters))
        check_status(library().fftune_context_counters(context(device).handle,
                                                       ctypes.byref(counters)))
        return counters.plan_nanoseconds - counters.compile_nanoseconds

    before = read()
    Plan(device, problem)
    return (read() - before) / 1e6


# The ops of a batch with prompts, with the sizes of Qwen3-30B-A3B; ffn with those of Llama-3.1-8B.
HEADS = {"heads": 32, "kv-heads": 4, "dim": 128}
PROBLEMS = [
    {"op": "moe-ffn", "d": 2048, "h": 768, "experts": 128, "top-k": 8},
    {"op": "moe-ffn", "d": 2048, "h": 768, "experts": 128, "top-k": 8, "weights": "int4"},
    {"op": "qkv", "d": 2048, **HEADS},
    {"op": "attention", "b": 16, **HEADS, "kv": 4096, "page": 16, "layout": "thd",
     "mask": "causal", "lengths": "yes"},
    {"op": "linear", "k": 4096, "n": 2048, "residual": "yes"},
    {"op": "ffn", "d": 4096, "h": 14336},
    {"op": "rmsnorm", "d": 2048},
]


def print_plans() -> None:
    device = torch.cuda.current_device() if DEVICE == "cuda" else -1
    rows = (1, 16, 64, 256, 1024, 4096, 8192)
    print(f"a plan for a new number of rows, {DEVICE}: milliseconds")
    print(" " * 12 + "".join(f"{count:9}" for count in rows))
    for problem in PROBLEMS:
        size = "s" if problem["op"] == "attention" else "m"
        found = []
        for count in rows:
            times = [plan_milliseconds(device, {**problem, size: count + more})
                     for more in range(20)]
            found.append(statistics.median(times))
        name = " ".join([problem["op"], problem.get("weights", "")])
        print(f"{name:12}" + "".join(f"{value:9.2f}" for value in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--include", default=str(HERE.parents[1] / "lib/include"))
    parser.add_argument("--build", default="build/host_overhead")
    parser.add_argument("--plans", action="store_true")
    options = parser.parse_args()
    if options.plans:
        return print_plans()
    folder = Path(options.build)
    folder.mkdir(parents=True, exist_ok=True)
    for on_stable in (True, False):
        build(folder.resolve(), options.include, on_stable)
    contenders = {"aten.rms_norm": lambda x, w: torch.rms_norm(x, (64,), w, 1e-6),
                  "package": fftune.ops.rmsnorm, "stable": stable,
                  "C++": torch.ops.fftune_cpp.rmsnorm.default}
    x, w = torch.randn(1, 64, device=DEVICE), torch.rand(64, device=DEVICE)
    right = contenders["package"](x, w)
    own_x, own_w, dy = x.clone().requires_grad_(), w.clone().requires_grad_(), torch.ones_like(x)
    for name, function in contenders.items():
        assert torch.allclose(function(x, w), right, rtol=1e-5, atol=1e-5), name
    gradients = {name: torch.autograd.grad(function(own_x, own_w), (own_x, own_w), dy)
                 for name, function in contenders.items()}
    for name, found in gradients.items():
        assert all(map(torch.allclose, found, gradients["package"])), name

    def both(function):
        torch.autograd.backward((function(own_x, own_w),), (dy,))
        own_x.grad = own_w.grad = None

    print(f"{torch.__version__}, {DEVICE}: microseconds a call")
    rows = {"without gradients": (torch.no_grad(), lambda f: lambda: f(x, w)),
            "forward, with gradients": (nullcontext(), lambda f: lambda: f(own_x, own_w)),
            "forward and backward": (nullcontext(), lambda f: lambda: both(f))}
    for label, (context, made) in rows.items():
        found = times_of({name: made(f) for name, f in contenders.items()}, context)
        print(f"{label:26}" + "".join(f"{name} {value:6.2f}   " for name, value in found.items()))
    print_plans()


if __name__ == "__main__":
    main()

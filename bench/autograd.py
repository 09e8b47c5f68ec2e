#!/usr/bin/env python3
"""Compares fftune's backward passes, through the C API, with PyTorch's autograd on the GPU.

usage: autograd.py LIBFFTUNE.so PRESETS [PART/PARTS]

For every dtype, form and size, the relative error of each gradient against autograd in float64,
beside that of autograd in the dtype itself. fftune must not be worse than 1.5 times autograd and
four roundings. Where gradients accumulate, they do so in place. Ends with 1 where one is wrong.
Nearly all of the time is compiling: `for i in $(seq 12); do autograd.py LIB PRESETS $i/12 & done`
uses as many cores, each for every twelfth case.
"""
import sys

import torch
import torch.nn.functional as F

from contenders import Fftune

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "f32": 2.0**-23}
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu,
               "gelu-tanh": lambda g: F.gelu(g, approximate="tanh")}
MASKS = ("block", "random", "all", "none")
SIZES = [(1, 8, 8), (2, 64, 128), (77, 136, 264), (1001, 520, 328), (1024, 1024, 2048)]


def run_once(fftune, problem, tensors):
    plan = fftune.plan(problem)
    fftune.run(plan, tensors, fftune.workspace(plan))
    torch.cuda.synchronize()
    fftune.destroy(plan)


def ffn(act, x, w_gate, w_up, w_down):
    return F.linear(ACTIVATIONS[act](F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def gradients(function, inputs, dy, dtype):
    leaves = [t.to(dtype).requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves), leaves, dy.to(dtype))


def random(*shape, scale=1.0):
    return torch.randn(*shape, device="cuda") * scale


class Report:
    def __init__(self):
        self.wrong = 0
        print("problem | gradient | fftune | autograd")

    def compare(self, text, dtype, names, ours, exact, theirs):
        for name, got, right, other in zip(names, ours, exact, theirs):
            norm = right.norm().item() or 1.0
            error = (got.double() - right).norm().item() / norm
            reference = (other.double() - right).norm().item() / norm
            bad = not error <= 1.5 * reference + 4 * ROUNDING[dtype]
            self.wrong += bad
            print(f"{text} | {name} | {error:.2e} | {reference:.2e}{' WRONG' if bad else ''}")


def check_ffn(fftune, report, name, m, d, h, act, save, accumulate):
    dtype = DTYPES[name]
    inputs = [t.to(dtype) for t in (random(m, d), random(h, d, scale=d**-0.5),
                                    random(h, d, scale=d**-0.5), random(d, h, scale=h**-0.5))]
    x, w_gate, w_up, w_down = inputs
    dy = random(m, d).to(dtype)
    saved = [F.linear(x, w_gate), F.linear(x, w_up)] if save == "preact" else []
    weights = [w_gate, w_up, w_down]
    before = [torch.randn_like(w) if accumulate else torch.full_like(w, float("nan"))
              for w in weights]
    grads = [b.clone() for b in before]
    dx = torch.full_like(x, float("nan"))
    run_once(fftune, {"op": "ffn", "pass": "bwd", "dtype": name, "m": m, "d": d, "h": h,
                      "act": act, "save": save, "accumulate": "yes" if accumulate else "no"},
             [dy, x, *saved, *weights, *(grads if accumulate else []), dx, *grads])
    function = lambda *leaves: ffn(act, *leaves)
    exact = list(gradients(function, inputs, dy, torch.float64))
    theirs = list(gradients(function, inputs, dy, dtype))
    if accumulate:
        exact[1:] = [g + b.double() for g, b in zip(exact[1:], before)]
        theirs[1:] = [g + b for g, b in zip(theirs[1:], before)]
    report.compare(f"ffn {name} m={m} d={d} h={h} {act} {save}{' accumulate' * accumulate}", name,
                   ["dx", "dw_gate", "dw_up", "dw_down"], [dx, *grads], exact, theirs)


def mask_of(kind, m):
    """Bytes of torch.bool, but that true is not always 1: a third in one block, or at random."""
    marks = {"none": torch.zeros(m), "all": torch.ones(m), "random": torch.rand(m).round(),
             "block": ((torch.arange(m) >= m // 3) & (torch.arange(m) < 2 * m // 3)).float()}[kind]
    return (marks * torch.randint(1, 256, (m,))).to(torch.uint8).cuda()


def masked(mask, first, second):
    return torch.where(mask.bool()[:, None], first, second)


def start(weights, accumulate):
    """Buffers that gradients of these weights are added to, or whose NaN shows that they were
    kept."""
    before = [torch.randn_like(w) if accumulate else torch.full_like(w, float("nan"))
              for w in weights]
    return before, [b.clone() for b in before]


def check_masked_linear(fftune, report, name, m, k, n, kind, accumulate):
    dtype, mask = DTYPES[name], mask_of(kind, m)
    x, dy = random(m, k).to(dtype), random(m, n).to(dtype)
    weights = [random(n, k, scale=k**-0.5).to(dtype) for _ in range(2)]
    before, grads = start(weights, accumulate)
    dx = torch.full_like(x, float("nan"))
    run_once(fftune, {"op": "masked-linear", "pass": "bwd", "dtype": name, "m": m, "k": k, "n": n,
                      "accumulate": "yes" if accumulate else "no"},
             [dy, x, mask, *weights, *(grads if accumulate else []), dx, *grads])
    function = lambda x, first, second: masked(mask, F.linear(x, first), F.linear(x, second))
    compare_masked(report, f"masked-linear {name} m={m} k={k} n={n} {kind}", name, function,
                   [x, *weights], dy, ["dx", "dw_true", "dw_false"], [dx, *grads], before,
                   accumulate)


def check_masked_ffn(fftune, report, name, m, d, h, act, kind, save, accumulate):
    dtype, mask = DTYPES[name], mask_of(kind, m)
    x, dy = random(m, d).to(dtype), random(m, d).to(dtype)
    weights = [t.to(dtype) for _ in range(2)
               for t in (random(h, d, scale=d**-0.5), random(h, d, scale=d**-0.5),
                         random(d, h, scale=h**-0.5))]
    saved = []
    if save == "preact":
        y = torch.full_like(x, float("nan"))
        saved = [torch.full((m, h), float("nan"), dtype=dtype, device="cuda") for _ in range(2)]
        run_once(fftune, {"op": "masked-ffn", "pass": "fwd", "dtype": name, "m": m, "d": d, "h": h,
                          "act": act, "save": save}, [x, mask, *weights, y, *saved])
    before, grads = start(weights, accumulate)
    dx = torch.full_like(x, float("nan"))
    run_once(fftune, {"op": "masked-ffn", "pass": "bwd", "dtype": name, "m": m, "d": d, "h": h,
                      "act": act, "save": save, "accumulate": "yes" if accumulate else "no"},
             [dy, x, mask, *saved, *weights, *(grads if accumulate else []), dx, *grads])
    function = lambda x, *w: masked(mask, ffn(act, x, *w[:3]), ffn(act, x, *w[3:]))
    names = ["dx", *[f"dw_{part}_{expert}" for expert in ("true", "false")
                     for part in ("gate", "up", "down")]]
    compare_masked(report, f"masked-ffn {name} m={m} d={d} h={h} {act} {kind} {save}", name,
                   function, [x, *weights], dy, names, [dx, *grads], before, accumulate)


def compare_masked(report, text, name, function, inputs, dy, names, ours, before, accumulate):
    exact = list(gradients(function, inputs, dy, torch.float64))
    theirs = list(gradients(function, inputs, dy, DTYPES[name]))
    if accumulate:
        exact[1:] = [g + b.double() for g, b in zip(exact[1:], before)]
        theirs[1:] = [g + b for g, b in zip(theirs[1:], before)]
    report.compare(text + " accumulate" * accumulate, name, names, ours, exact, theirs)


def check_linear(fftune, report, name, m, k, n, accumulate):
    dtype = DTYPES[name]
    x, w, bias = random(m, k).to(dtype), random(n, k, scale=k**-0.5).to(dtype), random(n).to(dtype)
    dy = random(m, n).to(dtype)
    y = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
    run_once(fftune, {"op": "linear", "pass": "fwd", "dtype": name, "m": m, "k": k, "n": n,
                      "bias": "yes"}, [x, w, bias, y])
    before = [torch.randn_like(t) if accumulate else torch.full_like(t, float("nan"))
              for t in (w, bias)]
    grads = [b.clone() for b in before]
    dx = torch.full_like(x, float("nan"))
    run_once(fftune, {"op": "linear", "pass": "bwd", "dtype": name, "m": m, "k": k, "n": n,
                      "bias": "yes", "accumulate": "yes" if accumulate else "no"},
             [dy, x, w, *(grads if accumulate else []), dx, *grads])
    exact = [F.linear(x.double(), w.double(), bias.double()),
             *gradients(F.linear, [x, w, bias], dy, torch.float64)]
    theirs = [F.linear(x, w, bias), *gradients(F.linear, [x, w, bias], dy, dtype)]
    if accumulate:
        exact[2:] = [g + b.double() for g, b in zip(exact[2:], before)]
        theirs[2:] = [g + b for g, b in zip(theirs[2:], before)]
    report.compare(f"linear {name} m={m} k={k} n={n}{' accumulate' * accumulate}", name,
                   ["y", "dx", "dw", "dbias"], [y, dx, *grads], exact, theirs)


def cases():
    """Every check and its arguments, in order."""
    for name in DTYPES:
        for m, d, h in SIZES:
            for save in ("preact", "input"):
                yield check_ffn, (name, m, d, h, "silu", save, m % 2 == 1)
            yield check_linear, (name, m, d, h, m % 2 == 1)
            for kind in MASKS:
                yield check_masked_linear, (name, m, d, h, kind, m % 2 == 1)
                save = "preact" if kind in ("block", "none") else "input"
                yield check_masked_ffn, (name, m, d, h, "silu", kind, save, m % 2 == 1)
        for act in ACTIVATIONS:
            yield check_ffn, (name, 130, 136, 72, act, "preact", False)
            yield check_masked_ffn, (name, 130, 136, 72, act, "random", "preact", False)


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    part, parts = map(int, sys.argv[3].split("/")) if len(sys.argv) == 4 else (1, 1)
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    fftune, report = Fftune(sys.argv[1], sys.argv[2]), Report()
    for check, arguments in list(cases())[part - 1::parts]:
        check(fftune, report, *arguments)
    print(f"{report.wrong} wrong")
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()

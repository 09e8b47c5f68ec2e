#!/usr/bin/env python3
"""Times the loss of a language model's head with its gradients, beside PyTorch's.

usage: peers_loss.py [TOKENS,D,VOCAB]... [--workspace MIB] [--ignored SHARE] [--json OUT]

Forward and backward pass of x [tokens, d] (bf16) and w [vocab, d]: the loss, and the gradients of both.
Contenders:

fftune     fftune.ops.linear_cross_entropy: gradients along with the loss
recompute  the same with recompute=True
eager      F.linear, float32, F.cross_entropy
compile    torch.compile of it
liger      Liger-Kernel's fused linear cross-entropy, where it is installed

Each is warmed up and then run in turn, the median of the rounds; `GB` is the peak of the memory that a
run allocates beyond its inputs, the gradients among it; `dx` and `dw` are the errors of the gradients
relative to those of float32, from some rows and some ids.
"""
import argparse
import importlib.util
import json
import statistics

import torch
import torch.nn.functional as F

import fftune

CASES = ["8192,4096,131072", "8192,2048,128256"]
ROUNDS = 7


def plain(x, w, labels):
    return F.cross_entropy(F.linear(x, w).float(), labels)


def contenders(workspace):
    of = lambda **options: lambda x, w, labels: fftune.ops.linear_cross_entropy(
        x, w, labels, workspace=workspace, **options)
    found = {"fftune": of(), "recompute": of(recompute=True), "eager": plain,
             "compile": torch.compile(plain, dynamic=False)}
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
        found["liger"] = lambda x, w, labels: liger_fused_linear_cross_entropy(x, w, labels)
    return found


def step(function, x, w, labels):
    loss = function(x, w, labels)
    loss.backward()
    gradients = x.grad, w.grad
    x.grad = w.grad = None
    return loss.detach(), *gradients


def right(x, w, labels, rows, ids):
    """In float32, of some rows and of some ids' weights: all logits take too much memory at once."""
    count = (labels != -100).sum()
    wide = w.float()
    dx = torch.empty(len(rows), x.shape[1], device=x.device)
    dw = torch.zeros(len(ids), x.shape[1], device=x.device)
    total = 0.0
    at = {int(r): i for i, r in enumerate(rows)}
    for first in range(0, len(x), 512):
        part = x[first:first + 512].float()
        logits = part @ wide.T
        own = labels[first:first + 512]
        total += F.cross_entropy(logits, own, reduction="sum").item()
        p = logits.softmax(-1)
        known = own != -100
        p[known.nonzero()[:, 0], own[known]] -= 1
        p = p * known[:, None] / count
        dw += p[:, ids].T @ part
        for r, i in at.items():
            if first <= r < first + 512:
                dx[i] = p[r - first] @ wide
    return total / count.item(), dx, dw


def measure(case, options):
    tokens, d, vocab = map(int, case.split(","))
    torch.manual_seed(0)
    x = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(vocab, d, device="cuda") * 2 * d**-0.5).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    labels[torch.rand(tokens, device="cuda") < options.ignored] = -100
    rows = torch.arange(3, tokens, max(1, tokens // 16), device="cuda")
    ids = torch.arange(5, vocab, max(1, vocab // 512), device="cuda")
    expected = right(x.detach(), w.detach(), labels, rows, ids)
    torch.backends.cuda.matmul.allow_tf32 = False
    results, functions = {}, contenders(options.workspace)
    for name, function in list(functions.items()):
        try:
            for _ in range(2):
                step(function, x, w, labels)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss, dx, dw = step(function, x, w, labels)
            error = lambda a, b: ((a.float() - b).norm() / b.norm()).item()
            results[name] = {
                "gb": (torch.cuda.max_memory_allocated() - before) / 1e9, "loss": loss.item(),
                "loss_error": abs(loss.item() - expected[0]) / expected[0],
                "dx_error": error(dx[rows], expected[1]), "dw_error": error(dw[ids], expected[2]),
                "times": []}
            del loss, dx, dw
        except Exception as error:  # one line, and the others go on
            print(f"{case} {name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            del functions[name]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            step(function, x, w, labels)
            begin.record()
            for _ in range(2):
                step(function, x, w, labels)
            end.record()
            end.synchronize()
            results[name]["times"].append(begin.elapsed_time(end) / 2)
    for name, result in results.items():
        result["ms"] = statistics.median(result.pop("times"))
        print(f"{case:18} {name:10} {result['ms']:8.2f} ms {result['gb']:7.2f} GB   loss "
              f"{result['loss']:.5f} (off {result['loss_error']:.1e})  dx {result['dx_error']:.1e}  "
              f"dw {result['dw_error']:.1e}", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--workspace", type=float, default=512)
    parser.add_argument("--ignored", type=float, default=0.0)
    parser.add_argument("--json")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), f"workspace {options.workspace} MiB")
    found = {case: measure(case, options) for case in options.cases or CASES}
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()

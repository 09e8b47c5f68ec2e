#!/usr/bin/env python3
"""A vision-language layer with two experts behind a mask, beside both experts run on all tokens.

usage: two_experts.py [--bsz N] [--tiny]     on a GPU 4096 tokens a sequence, 1024 -> 2048 -> 1024;
                                             on a CPU smaller, for some seconds
"""
import argparse
import time

import torch
import torch.nn.functional as F

import fftune
from fftune.tuning import OtherWork, device_line

parser = argparse.ArgumentParser()
parser.add_argument("--bsz", type=int, default=1)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
tokens, d, h = ((64, 64, 128) if options.tiny else
                (4096, 1024, 2048) if DEVICE == "cuda" else (256, 256, 512))
print(f"{device_line(DEVICE)}: {options.bsz} x {tokens} tokens, {d} -> {h} -> {d}", flush=True)

torch.manual_seed(0)
layer = fftune.nn.MaskedMLP(d, h).to(DEVICE, torch.bfloat16)
x = torch.randn(options.bsz * tokens, d, device=DEVICE, dtype=torch.bfloat16)
mask = torch.zeros(options.bsz, tokens, dtype=torch.bool, device=DEVICE)
mask[:, tokens // 3: 2 * tokens // 3] = True  # an image in the middle of the text
mask = mask.flatten()


def both_experts(x):
    true = layer.w2(F.silu(layer.w1(x)) * layer.w3(x))
    false = layer.u2(F.silu(layer.u1(x)) * layer.u3(x))
    return torch.where(mask[:, None], true, false)


def fused(x):  # the call of the Triton package; layer(x, mask) does the same
    weights = (getattr(layer, name).weight.T for name in ("w1", "w2", "w3", "u1", "u2", "u3"))
    return fftune.MaskedFFN.apply(x, *weights, mask)


def milliseconds(run):
    times = []
    for _ in range(20 if DEVICE == "cuda" else 5):
        start = time.perf_counter()
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


others = OtherWork()
with torch.no_grad():
    a, b = both_experts(x).float(), fused(x).float()
    print(f"results differ by {((a - b).norm() / a.norm()).item():.1e}", flush=True)
    for name, run in (("both experts", both_experts), ("fused", fused)):
        print(f"{name}: forward {milliseconds(lambda: run(x)):.3f} ms", flush=True)
for name, run in (("both experts", both_experts), ("fused", fused)):
    time_of_step = milliseconds(lambda: run(x).sum().backward())
    print(f"{name}: forward and backward {time_of_step:.3f} ms", flush=True)
if note := str(others):
    print(note)

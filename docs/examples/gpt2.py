#!/usr/bin/env python3
"""GPT-2 with bias and gelu fused: forward, and forward with backward, beside eager PyTorch.

usage: gpt2.py [--tiny]     on a GPU batch 256 x 16 with GPT-2's sizes; on a CPU 4 x 16 with fewer and
                            smaller layers, for some seconds
"""
import copy
import sys
import time

print("loading PyTorch and transformers", flush=True)
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fftune
from fftune.tuning import OtherWork, device_line

TINY = "--tiny" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def milliseconds(run, repeats=20 if DEVICE == "cuda" else 3):
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


sizes, batch = {}, 256
if TINY:
    sizes, batch = dict(n_embd=64, n_layer=2, n_head=4, vocab_size=256), 2
elif DEVICE == "cpu":
    sizes, batch = dict(n_embd=256, n_layer=2, n_head=4, vocab_size=4096), 4
if sizes:
    sizes |= dict(bos_token_id=0, eos_token_id=0)
print(f"{device_line(DEVICE)}: GPT-2, batch {batch} x 16, bf16", flush=True)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(**sizes)).to(DEVICE, torch.bfloat16).eval()
patched = copy.deepcopy(model)
print(fftune.patch(patched), flush=True)
ids = torch.randint(0, model.config.vocab_size, (batch, 16), device=DEVICE)

others = OtherWork()
with torch.no_grad():
    a, b = model(ids).logits.float(), patched(ids).logits.float()
    print(f"logits differ by {((a - b).norm() / a.norm()).item():.1e}", flush=True)
    for name, module in (("eager", model), ("patched", patched)):
        print(f"{name}: forward {milliseconds(lambda: module(ids)):.2f} ms", flush=True)
for name, module in (("eager", model), ("patched", patched)):
    step = lambda: module(ids, labels=ids).loss.backward()
    print(f"{name}: forward and backward {milliseconds(step):.2f} ms", flush=True)
if note := str(others):
    print(note)

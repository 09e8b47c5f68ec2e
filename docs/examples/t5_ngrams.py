#!/usr/bin/env python3
"""T5 that generates without repeating an n-gram: norms and the blocking of n-grams are fused.

usage: t5_ngrams.py [--tiny]     on a GPU T5-base's sizes, batch 256; on a CPU smaller, for some seconds
"""
import copy
import sys
import time

print("loading PyTorch and transformers", flush=True)
import torch
from transformers import T5Config, T5ForConditionalGeneration

import fftune
from fftune.tuning import OtherWork, device_line

TINY = "--tiny" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 8 if TINY else 128 if DEVICE == "cuda" else 16

sizes, batch = dict(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12), 256
if TINY:
    sizes = dict(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=256)
    batch = 2
elif DEVICE == "cpu":
    sizes = dict(d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=4, vocab_size=4096)
    batch = 4
print(f"{device_line(DEVICE)}: T5, batch {batch}, bf16, {TOKENS} tokens", flush=True)
torch.manual_seed(0)
model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes))
model = model.to(DEVICE, torch.bfloat16).eval()
patched = copy.deepcopy(model)
print(fftune.patch(patched), flush=True)
ids = torch.full((batch, 1), 5, device=DEVICE)


def generate(module):
    return module.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
                           no_repeat_ngram_size=3)


others = OtherWork()
for name, module in (("eager", model), ("patched", patched)):
    print(f"{name}: generating twice, of which the second counts", flush=True)
    generate(module)
    start = time.perf_counter()
    text = generate(module)
    text.cpu()
    print(f"{name}: {TOKENS} tokens in {(time.perf_counter() - start) * 1e3:.0f} ms",
          flush=True)
if note := str(others):
    print(note)

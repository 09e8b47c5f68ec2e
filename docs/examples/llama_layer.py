#!/usr/bin/env python3
"""A layer of Llama, and its MLP alone: is fftune as exact as PyTorch here, and how fast is it?

usage: llama_layer.py [--tiny]     on a GPU hidden 1024, intermediate 11008, 2 x 1024 tokens; on a
                                   CPU smaller, for some seconds
"""
import sys

print("loading PyTorch and transformers", flush=True)
import torch
from transformers import LlamaConfig, LlamaModel

import fftune
from fftune.tuning import device_line

TINY = "--tiny" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

hidden, intermediate, batch, tokens = ((64, 96, 2, 16) if TINY else
                                       (1024, 11008, 2, 1024) if DEVICE == "cuda" else
                                       (256, 704, 2, 64))
print(f"{device_line(DEVICE)}: hidden {hidden}, intermediate {intermediate}, {batch} x {tokens} tokens",
      flush=True)
torch.manual_seed(0)
model = LlamaModel(LlamaConfig(hidden_size=hidden, intermediate_size=intermediate,
                               num_hidden_layers=1, num_attention_heads=8, vocab_size=256))
model = model.to(DEVICE, torch.bfloat16).eval()
x = torch.randn(batch, tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
positions = model.rotary_emb(x, torch.arange(tokens, device=DEVICE)[None])

print("the MLP:", fftune.check(model.layers[0].mlp, x), "", sep="\n", flush=True)
print("the layer:", fftune.check(model.layers[0], {"hidden_states": x,
                                                   "position_embeddings": positions}), sep="\n",
      flush=True)
dtype = {"op": "ffn", "dtype": "bf16", "m": batch * tokens, "d": hidden, "h": intermediate}
plan = fftune.explain(dtype, DEVICE)
print("\nthe MLP runs", " + ".join(v["id"] for v in plan["variants"]), "because of", plan["reason"])

#!/usr/bin/env python3
"""fp8 linear layers of vLLM beside fftune's linear with a packed weight of fp8.

usage: vllm_fp8_linears.py --out FILE.json

vLLM's layer rounds tokens to fp8 by a kernel and multiplies by CUTLASS; compiled code may round them in the norm
ahead of it, so the product alone is timed too. Rows have the microseconds of a call, of those in a CUDA graph
with weights that overflow L2, and how far the results lie from each other.
"""
import argparse
import json
import statistics
from pathlib import Path

import torch
import vllm._custom_ops as kernels

import fftune


def microseconds(calls):
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 5 / len(calls))
    del kept
    return statistics.median(times)


@torch.no_grad()
def rows():
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        count = max(2, -(-240_000_000 // (n * k)))
        weights = [torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(count)]
        scales = torch.rand(n, 1, device="cuda") * 0.01 + 0.01
        packed = [fftune.ops.pack_weight(w, scales, group=0, format="fp8") for w in weights]
        for m in (1, 4, 8, 16, 32, 64):
            x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
            rounded = kernels.scaled_fp8_quant(x, use_per_token_if_dynamic=True)

            def product(w, given=rounded):
                return kernels.cutlass_scaled_mm(given[0], w.t(), scale_a=given[1], scale_b=scales,
                                                 out_dtype=torch.bfloat16)

            def layer(w):
                return product(w, kernels.scaled_fp8_quant(x, use_per_token_if_dynamic=True))

            ours, theirs = (y.double() for y in (fftune.ops.linear(x, packed[0]), layer(weights[0])))
            yield {"n": n, "k": k, "m": m, "floor": n * k / 3.35e6,
                   "fftune": microseconds([lambda p=p: fftune.ops.linear(x, p) for p in packed]),
                   "vllm": microseconds([lambda w=w: layer(w) for w in weights]),
                   "vllm_product_alone": microseconds([lambda w=w: product(w) for w in weights]),
                   "difference": ((ours - theirs).norm() / ours.norm()).item()}


def write_rows(rows, about):
    """The rows into the file after --out, as they come."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out, found = parser.parse_args().out, []
    for row in rows:
        print(row, flush=True)
        found.append(row)
        out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "unit": "microseconds", "rows": found}, indent=1))


if __name__ == "__main__":
    write_rows(rows(), __doc__)

#!/usr/bin/env python3
"""vLLM's Machete, cuBLAS in bf16 and fftune's linear on the same int4 weights, groups of 128, in one run.

usage: vllm_int4_linears.py --out FILE.json

All three are untuned and in CUDA graphs with weights that overflow L2; cuBLAS multiplies the dequantised
weights. A row has microseconds, and how far each result lies from the product in float64.
"""
import torch
import vllm._custom_ops as kernels
from vllm.scalar_type import scalar_types
from vllm_fp8_linears import microseconds, write_rows

import fftune

SIZES = ((4096, 28672), (14336, 4096), (4096, 6144), (2048, 16384))  # k, n
GROUP = 128


def machete_weight(codes, scale):
    words = codes.view(torch.int32).t()  # [k / 8, n]; k is contiguous
    return kernels.machete_prepack_B(words, torch.bfloat16, scalar_types.uint4b8, torch.bfloat16), scale.t().contiguous()


def dense_weight(codes, scale):
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1).to(scale.dtype) - 8
    return numbers * scale.repeat_interleave(GROUP, 1)


def machete(x, weight):
    return kernels.machete_mm(a=x, b_q=weight[0], b_type=scalar_types.uint4b8, b_group_scales=weight[1],
                              b_group_size=GROUP)


@torch.no_grad()
def rows():
    for k, n in SIZES:
        count = max(2, -(-240_000_000 // (n * k)))
        weights = [(torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"),
                    (torch.rand(n, k // GROUP, device="cuda") * 0.01 + 0.01).bfloat16()) for _ in range(count)]
        kinds = {"fftune": (fftune.ops.linear, [fftune.ops.pack_weight(*w, group=GROUP) for w in weights]),
                 "machete": (machete, [machete_weight(*w) for w in weights]),
                 "cublas_bf16": (torch.nn.functional.linear, [dense_weight(*w) for w in weights])}
        exact = dense_weight(weights[0][0], weights[0][1].double())
        for m in (1, 16, 64, 256, 1024, 4096):
            x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
            some = x[:64].double() @ exact.t()
            row = {"k": k, "n": n, "m": m}
            for name, (product, of_kind) in kinds.items():
                row[name] = microseconds([lambda w=w: product(x, w) for w in of_kind])
                row[name + "_error"] = ((product(x, of_kind[0])[:64] - some).norm() / some.norm()).item()
            yield row


if __name__ == "__main__":
    write_rows(rows(), __doc__)

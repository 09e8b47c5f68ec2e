#!/usr/bin/env python3
"""fftune's experts beside vLLM's own, both behind vLLM's modular kernel, over a grid of problems.

usage: vllm_experts.py --out FILE.json [--m 1,3,...] [--cases NAME,...]

vLLM and fftune have to be installed. Each problem has random weights and inputs. Both results are compared
with one in float32, which takes fp8 inputs as vLLM quantises them: fftune's may be off by one and a
half times as much as that of vLLM's TritonExperts. A problem that fftune leaves to vLLM is an error
too. Rows have the relative errors in the Euclidean norm, and the times of one call in microseconds, of
20 in a CUDA graph.
"""
import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F


@dataclasses.dataclass(frozen=True)
class Case:
    experts: int
    top_k: int
    d: int
    h: int
    fp8: bool = False
    ranks: int = 1  # of expert parallelism: this one has the second share of the experts
    act: str = "silu"
    weighed: bool = False  # inputs are multiplied by the router's weights


CASES = {
    "qwen3-30b-a3b": Case(128, 8, 2048, 768), "mixtral": Case(8, 2, 4096, 7168),
    "qwen3-next": Case(512, 10, 2048, 128), "odd": Case(12, 3, 1536, 704),
    "gelu": Case(16, 2, 1024, 512, act="gelu"), "gelu-tanh": Case(16, 2, 1024, 512, act="gelu_tanh"),
    "one-choice": Case(16, 1, 2048, 1024, weighed=True),
    "map": Case(128, 8, 2048, 768, ranks=4), "map-of-few": Case(8, 2, 1024, 512, ranks=8),
    "fp8": Case(128, 8, 2048, 768, fp8=True), "fp8-mixtral": Case(8, 2, 4096, 3584, fp8=True),
    "fp8-map": Case(64, 6, 2048, 1408, fp8=True, ranks=2)}
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def blocks(weight):
    """fp8 of a weight with a scale for each block of 128 x 128, and what they stand for."""
    count, n, k = weight.shape
    wide = weight.float().view(count, n // 128, 128, k // 128, 128)
    scale = wide.abs().amax((2, 4), keepdim=True) / 448
    codes = (wide / scale).to(torch.float8_e4m3fn)
    return (codes.view(weight.shape), scale[:, :, 0, :, 0].contiguous(),
            (codes.float() * scale).view(weight.shape))


class Problem:
    def __init__(self, case, device):
        self.case, own = case, case.experts // case.ranks
        make = torch.Generator(device).manual_seed(3)
        self.make, self.device = make, device
        normal = lambda *shape: torch.randn(shape, generator=make, device=device) * shape[-1]**-0.5
        w1, w2 = normal(own, 2 * case.h, case.d).bfloat16(), normal(own, case.d, case.h).bfloat16()
        self.scales = None
        if case.fp8:
            (w1, s1, self.wide1), (w2, s2, self.wide2) = blocks(w1), blocks(w2)
            self.scales = s1, s2
        else:
            self.wide1, self.wide2 = w1.float(), w2.float()
        self.w1, self.w2 = w1, w2
        self.map = None
        if case.ranks > 1:
            self.map = torch.full((case.experts,), -1, dtype=torch.int32, device=device)
            self.map[own:2 * own] = torch.arange(own, dtype=torch.int32, device=device)

    def inputs(self, m):
        x = torch.randn(m, self.case.d, generator=self.make, device=self.device).bfloat16()
        logits = torch.randn(m, self.case.experts, generator=self.make, device=self.device)
        weights, ids = logits.softmax(-1).topk(self.case.top_k)
        if not self.case.weighed:
            weights = weights / weights.sum(-1, keepdim=True)
        return x, weights, ids.int()

    def right(self, x, weights, ids):
        """In float32."""
        case, y = self.case, torch.zeros(x.shape, device=x.device)
        given = x.float()
        if case.weighed:
            given, weights = (x * weights.bfloat16()).float(), torch.ones_like(weights)
        if case.fp8:
            from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

            codes, scale = per_token_group_quant_fp8(given.bfloat16(), 128)
            given = codes.float() * scale.repeat_interleave(128, -1)
        for expert in range(case.experts):
            own = expert if self.map is None else int(self.map[expert])
            rows, place = (ids == expert).nonzero(as_tuple=True)
            if own >= 0 and len(rows):
                gate, up = (given[rows] @ self.wide1[own].T).chunk(2, -1)
                part = (ACTIVATIONS[case.act](gate) * up) @ self.wide2[own].T
                y.index_add_(0, rows, part * weights[rows, place, None])
        return y

    def kernel(self, cls):
        from vllm.model_executor.layers.fused_moe import config as of
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
        from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
            MoEPrepareAndFinalizeNoDPEPModular)

        case = self.case
        config = of.FusedMoEConfig(
            num_experts=case.experts, experts_per_token=case.top_k, hidden_dim=case.d,
            intermediate_size=case.h, num_local_experts=len(self.w1), num_logical_experts=case.experts,
            activation=MoEActivation(case.act), device=self.device,
            routing_method=of.RoutingMethodType.Default, in_dtype=torch.bfloat16,
            moe_parallel_config=of.FusedMoEParallelConfig.make_no_parallel())
        quant = of.FUSED_MOE_UNQUANTIZED_CONFIG if self.scales is None else of.fp8_w8a8_moe_quant_config(
            *self.scales, block_shape=[128, 128])
        kernel = FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), cls(config, quant))
        return lambda x, weights, ids: kernel.apply(
            x, self.w1, self.w2, weights, ids, MoEActivation(case.act), case.experts, self.map,
            case.weighed)


def microseconds(call, repeats=20):
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(3):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / (3 * repeats)


def compare(name, numbers, rows):
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    from fftune.vllm import experts

    ran, own = [], experts._run
    experts._run = lambda *given: ran.append(1) or own(*given)
    problem = Problem(CASES[name], torch.device("cuda"))
    theirs, mine = problem.kernel(TritonExperts), problem.kernel(experts.experts_class(TritonExperts))
    mine(*problem.inputs(64))  # its result is vLLM's, with which it is compared
    for m in numbers:
        given = problem.inputs(m)
        ran.clear()
        right = problem.right(*given)
        results = theirs(*given).float(), mine(*given).float()
        own_error, error = ((y - right).norm() / right.norm().clamp(min=1e-30) for y in results)
        row = dict(case=name, m=m, own_error=own_error.item(), error=error.item(), ran=len(ran),
                   own=microseconds(lambda: theirs(*given)), mine=microseconds(lambda: mine(*given)))
        row["wrong"] = bool(not ran or not error <= 1.5 * own_error + 1e-5)
        rows.append(row)
        print(f"{name:16} m {m:5}  errors {own_error:.2e} {error:.2e}  vLLM {row['own']:9.1f}  fftune "
              f"{row['mine']:9.1f}  ratio {row['own'] / row['mine']:.2f}{'  WRONG' * row['wrong']}",
              flush=True)
    experts._run = own


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--m", default="1,3,16,64,222,1024,4096")
    parser.add_argument("--cases", default=",".join(CASES))
    arguments = parser.parse_args()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager

    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    init_workspace_manager(torch.device("cuda"))
    rows = []
    with torch.inference_mode(), set_current_vllm_config(VllmConfig()):
        for name in arguments.cases.split(","):
            compare(name, [int(word) for word in arguments.m.split(",")], rows)
            torch.cuda.empty_cache()
            arguments.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows},
                                                indent=1))
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

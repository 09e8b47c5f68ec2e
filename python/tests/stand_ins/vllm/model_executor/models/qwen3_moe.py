from types import SimpleNamespace

import torch
from torch import nn

from vllm.model_executor.layers import parts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import MoEActivation

from .llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel, support_torch_compile


class Qwen3MoeMLP(LlamaMLP):
    pass


class Qwen3MoeAttention(LlamaAttention):
    head_norms = True


class UnquantizedFusedMoEMethod:
    def __init__(self):
        from vllm.model_executor.layers.fused_moe.oracle import unquantized

        self.experts_cls = unquantized.backend_to_kernel_cls("TRITON")


class RoutedExperts(nn.Module):
    activation, apply_router_weight_on_input, expert_map, swiglu_limit = MoEActivation.SILU, False, None, None

    def __init__(self, c, count):
        super().__init__()
        self.w13_weight, self.w2_weight = (
            nn.Parameter(torch.randn(count, rows, columns) * columns**-0.5, requires_grad=False)
            for rows, columns in ((2 * c.h, c.d), (c.d, c.h)))
        self.quant_method = UnquantizedFusedMoEMethod()

    def forward(self, x, weights, ids):
        y = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.w13_weight, self.w2_weight)):
            share = (weights * (ids == expert)).sum(-1, keepdim=True).to(x.dtype)
            y = y + parts.SiluAndMul()(x @ up.T) @ down.T * share
        return y


class FusedTopKRouter(SimpleNamespace):
    def select(self, logits):
        weights, ids = logits.softmax(-1, torch.promote_types(logits.dtype, torch.float32)).topk(self.top_k)
        return weights / weights.sum(-1, keepdim=True) if self.renormalize else weights, ids


class MoERunner(nn.Module):
    def __init__(self, gate, c, count):
        super().__init__()
        self.gate, self.routed_experts, self.shared_experts = gate, RoutedExperts(c, count), None
        self.router = FusedTopKRouter(top_k=2, renormalize=True, scoring_func="softmax", eplb_state=None)

    def forward(self, x):
        from vllm.forward_context import get_forward_context

        padding = getattr(get_forward_context(), "is_padding", None)
        weights, ids = self.router.select(self.gate(x))
        if padding is not None:  # as vLLM's kernel has it
            assert len(padding) == len(x), "is_padding size mismatch"
            ids = ids.masked_fill(padding[:, None], -1)
        return self.routed_experts(x, weights, ids)


class Qwen3MoeSparseMoeBlock(nn.Module):
    """Two experts for each token. The forward context counts the blocks that ran, as vLLM's does."""

    is_sequence_parallel = False

    def __init__(self, c, prefix):
        super().__init__()
        self.index = int(prefix.split(".")[2])
        self.gate = parts.ReplicatedLinear(4, c.d, tp_size=c.tp)
        self.experts = MoERunner(self.gate, c, 4)

    def forward(self, x):
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        assert context.moe_layer_index == self.index, "another layer's experts"
        context.moe_layer_index += 1
        return self.experts(x)


class Qwen3MoeDecoderLayer(LlamaDecoderLayer):
    attention = Qwen3MoeAttention

    @staticmethod
    def network(c, prefix):
        return Qwen3MoeSparseMoeBlock(c, prefix)


@support_torch_compile
class Qwen3MoeModel(LlamaModel):
    layer = Qwen3MoeDecoderLayer

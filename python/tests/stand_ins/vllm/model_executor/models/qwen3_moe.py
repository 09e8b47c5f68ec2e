import torch
from torch import nn

from .llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel


class Qwen3MoeMLP(LlamaMLP):
    pass


class Qwen3MoeAttention(LlamaAttention):
    head_norms = True


class Qwen3MoeSparseMoeBlock(nn.Module):
    """Two experts for each token. The forward context counts the blocks that ran, as vLLM's does."""

    is_sequence_parallel = False

    def __init__(self, c, prefix):
        super().__init__()
        self.index = int(prefix.split(".")[2])
        self.gate = nn.Linear(c.d, 4, bias=False)
        self.experts = nn.ModuleList(LlamaMLP(c) for _ in range(4))

    def forward(self, x):
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        assert context.moe_layer_index == self.index, "another layer's experts"
        context.moe_layer_index += 1
        weights, ids = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for expert, network in enumerate(self.experts):
            share = (weights * (ids == expert)).sum(-1, keepdim=True)
            y = y + network(x) * share
        return y


class Qwen3MoeDecoderLayer(LlamaDecoderLayer):
    attention = Qwen3MoeAttention

    @staticmethod
    def network(c, prefix):
        return Qwen3MoeSparseMoeBlock(c, prefix)


class Qwen3MoeModel(LlamaModel):
    layer = Qwen3MoeDecoderLayer

    def __call__(self, *arguments, **named):
        self.calls += 1
        return self.forward(*arguments, **named)

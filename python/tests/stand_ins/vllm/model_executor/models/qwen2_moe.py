import torch

from vllm.model_executor.layers import parts

from .llama import LlamaMLP


class Qwen2MoeMLP(LlamaMLP):
    """With a gate it is beside experts, whose runner reduces the sum of both."""

    def __init__(self, c, prefix="", gated=False):
        super().__init__(c, prefix)
        self.down_proj.reduce_results = not gated
        self.expert_gate = parts.ReplicatedLinear(1, c.d) if gated else None

    def forward(self, x):
        y = super().forward(x)
        return y if self.expert_gate is None else torch.sigmoid(self.expert_gate(x)) * y

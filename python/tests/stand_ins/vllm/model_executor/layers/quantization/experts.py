"""The methods of experts with codes: they get the parameters of a checkpoint, and reorder them."""
from types import SimpleNamespace

import torch

from vllm.model_executor.layers.fused_moe.experts.triton_moe import _GATES


class ExpertsMethod:
    """Computes in float64 with `dense`, (w13 [experts, 2h, d], w2 [experts, d, h]), which a test gives."""

    topk_indices_dtype = torch.int32
    mk_can_overlap_shared_experts = False
    is_monolithic = False

    def __init__(self, dtype, top_k=2, **attributes):
        self.moe = SimpleNamespace(in_dtype=dtype, experts_per_token=top_k, is_lora_enabled=False,
                                   moe_parallel_config=SimpleNamespace(use_all2all_kernels=False, enable_eplb=False))
        self.calls = 0
        for name, value in attributes.items():
            setattr(self, name, value)

    def process_weights_after_loading(self, layer):
        for name, parameter in layer.named_parameters():
            if "weight" in name or "qweight" in name:
                parameter.data = torch.full_like(parameter.data, 1)  # in an order of its own

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        self.calls += 1
        assert topk_weights.dtype == torch.float32  # as Marlin has it
        w13, w2 = layer.dense
        b13, b2 = layer.biases or (torch.zeros(w13.shape[:2]), torch.zeros(w2.shape[:2]))
        y = torch.zeros(x.shape, dtype=torch.float64)
        for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weights.tolist())):
            for expert, weight in zip(ids, weights):
                here = expert if layer.expert_map is None else int(layer.expert_map[expert])
                if here < 0:
                    continue
                before = weight if layer.apply_router_weight_on_input else 1.0
                both = w13[here] @ (x[token].double() * before) + b13[here].double()
                if layer.activation.value == "swigluoai":
                    gate, up = both[0::2].clamp(max=7), both[1::2].clamp(-7, 7)
                    hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                else:
                    gate, up = both.chunk(2)
                    hidden = _GATES[layer.activation.value](gate) * up
                y[token] += (w2[here] @ hidden + b2[here].double()) * (1.0 if before != 1.0 else weight)
        return y.to(x.dtype)

    def apply_monolithic(self, layer, x, router_logits, input_ids=None):
        best = router_logits.float().topk(self.moe.experts_per_token)
        return type(self).apply(self, layer, x, best.values.softmax(-1), best.indices, None, None)

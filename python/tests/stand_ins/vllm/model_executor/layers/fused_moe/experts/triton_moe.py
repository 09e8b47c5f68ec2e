from enum import Enum

import torch
import torch.nn.functional as F


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWIGLUOAI = "swigluoai"


_GATES = {"silu": F.silu, "gelu": F.gelu, "swigluoai": F.silu,
          "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def dequantised(x, scale, block_rows):
    """x [..., rows, columns] in float64, with a scale for each block of block_rows x 128."""
    if scale is None:
        return x.double()
    wide = scale.double().repeat_interleave(block_rows, -2).repeat_interleave(128, -1)
    return x.double() * wide[..., :x.shape[-2], :x.shape[-1]]


class TritonExperts:
    """Computes in float64. `calls` counts what came to this class itself."""

    def __init__(self, quant_config):
        self.quant_config = quant_config
        self._lora_context = None
        self.calls = 0

    quant_dtype = property(lambda self: self.quant_config.quant_dtype)
    block_shape = property(lambda self: self.quant_config.block_shape)
    w1_scale = property(lambda self: self.quant_config.w1_scale)
    w2_scale = property(lambda self: self.quant_config.w2_scale)
    w1_bias = property(lambda self: self.quant_config.w1_bias)
    w2_bias = property(lambda self: self.quant_config.w2_bias)

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
              global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
              expert_tokens_meta, apply_router_weight_on_input):
        self.calls += 1
        x = dequantised(hidden_states, a1q_scale, 1)
        w1, w2 = (dequantised(w, s, 128) for w, s in ((w1, self.w1_scale), (w2, self.w2_scale)))
        y = torch.zeros(*hidden_states.shape, dtype=torch.float64)
        for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weights.tolist())):
            for expert, weight in zip(ids, weights):
                here = expert if expert_map is None or expert < 0 else int(expert_map[expert])
                if here >= 0:
                    gate, up = (w1[here] @ x[token]).chunk(2)
                    share = 1.0 if apply_router_weight_on_input else weight
                    y[token] += w2[here] @ (_GATES[activation.value](gate) * up) * share
        output.copy_(y)

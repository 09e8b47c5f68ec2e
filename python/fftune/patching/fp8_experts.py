"""transformers' FP8Experts by moe_ffn_fp8, which rounds activations to fp8 as the experts' own kernels do.

Both products round each 128 elements of a token, for weights with scales of 128 x 128 blocks. The weights
stay in the module as they were stored. Experts with one scale each round whole tokens before the second
product, and static ones by a scale that they were given: for these there is no kernel.
"""
import torch
from torch import Tensor, nn

from .. import ops
from .experts_interface import gate_of
from .fp8_linear import expect_scales, has_fp8_products
from .recognise import (Unfit, expect_no_hooks, has_kernels, is_patched, original, parts_of, parts_watched, undoable)
from .trial import Trial, replace_forward

_BLOCK = 128


def is_fp8_experts(module: nn.Module) -> bool:
    return type(module).__name__ == "FP8Experts" and type(module).__module__.startswith("transformers.")


def is_rounded_experts(module: nn.Module | None) -> bool:
    """Whether they are replaced ones, whose weights are still e4m3."""
    return is_patched(module, fp8_experts_forward) and module.down_proj.dtype == torch.float8_e4m3fn \
        and not getattr(module, "_is_expert_parallel", False)


def patch_fp8_experts(module: nn.Module, dtype: torch.dtype | None, known: dict) -> str:
    if "forward" in module.__dict__:
        raise Unfit("its forward was replaced already")
    if module.activation_scheme != "dynamic":
        raise Unfit(f"its activations are rounded by {module.activation_scheme} scales, for which there is no kernel")
    found = gate_of(module)
    if isinstance(found, str):
        raise Unfit(f"FP8Experts {found}")
    both, down = module.gate_up_proj, module.down_proj
    if both.dtype != torch.float8_e4m3fn or down.dtype != torch.float8_e4m3fn:
        raise Unfit("its weights are not float8_e4m3fn")
    block = module.block_size and tuple(module.block_size)
    if block != (_BLOCK, _BLOCK):
        raise Unfit("its tokens are rounded as a whole, for which there is no kernel" if block is None else
                    f"its blocks are {block[0]} by {block[1]}: kernels round activations in blocks of {_BLOCK}")
    count, d, h = down.shape
    if h % _BLOCK:
        raise Unfit(f"a block of {_BLOCK} rows has rows of gate and of up, which have {h}")
    for name, rows, columns in (("gate_up_proj", 2 * h, d), ("down_proj", d, h)):
        scale, shape = getattr(module, f"{name}_scale_inv"), (count, -(-rows // _BLOCK), -(-columns // _BLOCK))
        if tuple(scale.shape) != shape:
            raise Unfit(f"{name}_scale_inv is {[*scale.shape]}, not {[*shape]}")
        expect_scales(scale)
        if any(bool(w.float().isnan().any()) for w in getattr(module, name)):
            raise Unfit("its weights have NaN")
    if not has_fp8_products(down.device):
        raise Unfit("its activations are rounded to fp8, for which kernels are fast on compute capability 9.0 alone")
    expect_no_hooks(*parts_of(module))
    replace_forward(module, fp8_experts_forward, (found[0],), Trial(lambda numbers, like: (
        numbers(2, d), torch.zeros(2, 1, dtype=torch.int64), numbers(2, 1)), dtype=dtype), known)
    return f"FP8Experts by moe-ffn of fp8, with activations rounded by blocks of {_BLOCK} ({found[0]})"


@undoable
def fp8_experts_forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    act, = self._fftune
    wanted = torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad)
    if wanted or self.down_proj.dtype != torch.float8_e4m3fn or getattr(self, "_is_expert_parallel", False) \
            or not has_kernels(hidden_states) or not has_fp8_products(hidden_states.device) \
            or torch.is_autocast_enabled(hidden_states.device.type) or parts_watched(self):
        return original(self, hidden_states, top_k_index, top_k_weights)
    return ops.moe_ffn_fp8(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, None, self.down_proj, None,
                           self.gate_up_proj_scale_inv.float(), None, self.down_proj_scale_inv.float(), act=act)

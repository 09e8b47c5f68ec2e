"""Attention of transformers models: the implementation "fftune", and masks that are left out.

A model that is compiled or captured in a graph cannot look whether its mask is the causal one, so
transformers builds that mask and hands it to attention, which is slow with it. Where a call gives
neither a mask nor positions nor a cache, it is known beforehand. Such a call passes a mask without
elements, which transformers hands through to the attention as it is.
"""
import copy
import inspect

import torch
from torch import Tensor, nn

NAME = "fftune"
_MARK = (1, 1, 0, 0)


def is_available() -> bool:
    """Whether transformers is new enough; registers the implementation."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask
    except ImportError:
        return False

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
                  attention_mask: Tensor | None, **options):
        if attention_mask is not None and attention_mask.shape == _MARK:
            attention_mask = None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return True


def without_mask(device: torch.device) -> Tensor:
    """The mask that says: causal, and nothing else."""
    return torch.empty(_MARK, dtype=torch.bool, device=device)


def makes_causal_mask(module: nn.Module) -> bool:
    """Whether its forward makes the causal mask and nothing but that: no overlays."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or "create_causal_mask" not in code.co_names:
        return False
    words = {word for constant in code.co_consts if isinstance(constant, tuple)
             for word in constant}
    return not words & {"or_mask_function", "and_mask_function", "block_sequence_ids"}


def uses_interface(module: nn.Module) -> bool:
    """Whether its forward calls the attention of that name, with a mask and without a bias."""
    forward = inspect.unwrap(type(module).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return ("ALL_ATTENTION_FUNCTIONS" in names
            and "position_bias" not in inspect.signature(forward).parameters)


def window_of(config) -> int | None:
    """The tokens that a layer with a sliding window sees; None without such layers."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    sliding = "sliding_attention" in types if types else getattr(config, "use_sliding_window", True)
    return window if sliding else None


def choose(model: nn.Module) -> bool:
    """Gives the model configurations of its own that say "fftune" where they said "sdpa". Others
    may share those that it had."""
    own: dict = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) != "sdpa":
            continue
        if id(config) not in own:
            own[id(config)] = copy.deepcopy(config)
            own[id(config)]._attn_implementation = NAME
        module.config = own[id(config)]
    return bool(own)


def restore(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == NAME:
            config._attn_implementation = "sdpa"

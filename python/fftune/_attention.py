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

from . import ops
from ._attention_ops import row_of
from ._library import Error

NAME = "fftune"
SDPA = "fftune_sdpa"  # PyTorch's attention, which patch() chooses where it was that already
_MARK = (1, 1, 0, 0)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def register_attention() -> None:
    """Makes attn_implementation="fftune" known to transformers, 4.53 or newer.

    Then AutoModelForCausalLM.from_pretrained(name, attn_implementation="fftune"), or
    model.set_attn_implementation("fftune"), runs attention by fftune.ops.attention; calls that
    cannot be (dropout, or keys of a cache, which are laid out in another way) run PyTorch's.
    """
    if not is_available():
        raise Error("register_attention: this transformers cannot be told of another attention: "
                    "install 4.53 or newer")


def is_available() -> bool:
    """Whether transformers is new enough; registers the implementations."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask
    except ImportError:
        return False

    def by_pytorch(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
                   attention_mask: Tensor | None, **options):
        if attention_mask is not None and attention_mask.shape == _MARK:
            attention_mask = None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    def by_fftune(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
                  attention_mask: Tensor | None, **options):
        if attention_mask is not None and attention_mask.shape == _MARK:
            attention_mask = None
        if not _serves(query, key, value, attention_mask, **options):
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        swapped = (t.transpose(1, 2) for t in (query, key, value))
        y = ops.attention(*swapped, attention_mask,
                          causal=causal and attention_mask is None and query.shape[2] > 1,
                          scale=options.get("scaling") or 0.0)
        return y, None

    AttentionInterface.register(SDPA, by_pytorch)
    AttentionInterface.register(NAME, by_fftune)
    for name in (SDPA, NAME):
        AttentionMaskInterface.register(name, sdpa_mask)
    return True


def _serves(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float = 0.0,
            position_bias: Tensor | None = None, cache=None, **_) -> bool:
    """Whether ops.attention takes a call as it is, [batch, heads, tokens, features] each."""
    dim = query.shape[-1]
    return (not dropout and position_bias is None and cache is None
            and query.dtype in _DTYPES and key.dtype == value.dtype == query.dtype
            and (query.is_cuda or query.dtype != torch.float16)
            and dim % 8 == 0 and dim <= 256 and value.shape[-1] == dim
            and all(row_of(t.transpose(1, 2)) is not None for t in (key, value))
            and (mask is None or mask.dtype == torch.bool and mask.shape[1] == 1))


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


def choose(model: nn.Module, name: str) -> bool:
    """Gives the model configurations of its own that name this attention where they said "sdpa".
    Others may share those that it had."""
    own: dict = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) != "sdpa":
            continue
        if id(config) not in own:
            own[id(config)] = copy.deepcopy(config)
            own[id(config)]._attn_implementation = name
        module.config = own[id(config)]
    return bool(own)


def restore(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) in (NAME, SDPA):
            config._attn_implementation = "sdpa"

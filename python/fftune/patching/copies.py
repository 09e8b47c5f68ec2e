"""Copies of patched modules.

deepcopy() gives a patched module. Pickles, shallow copies and the replicas of DataParallel have the
module as it was before patch(): its methods are bound to it, and not to the copy that would call them.
"""
import copy
import functools
import weakref

from torch import nn

from .graphs import restore_steps
from .quantised import restore_merged, restore_quantised

_METHODS = ("__deepcopy__", "__reduce_ex__", "_replicate_for_data_parallel")
_OWN = ("_fftune", "_fftune_parts", "_fftune_drops", "_fftune_head", "_fftune_scaled", "_fftune_view", "_fftune_plain",
        "_fftune_reader", "_fftune_readers", "_fftune_settings", "_fftune_causal", *_METHODS)


def keep_copies_right(module: nn.Module) -> None:
    """For a module that patch() changed."""
    if any(name.startswith("_fftune") or hasattr(value, "_fftune")
           for name, value in vars(module).items()):
        for name, function in zip(_METHODS, (_deepcopy, _reduce, _replica)):
            module.__dict__[name] = functools.partial(function, module)


def restore(module: nn.Module) -> None:
    """Takes back what patch() put into the module, but for the order of its weights in memory and its
    configuration."""
    restore_quantised(module)
    for name in ("forward", "generate", "_get_logits_processor", "init_continuous_batching"):
        if hasattr(module.__dict__.get(name), "_fftune"):
            delattr(module, name)
    for name in _OWN:
        module.__dict__.pop(name, None)
    restore_steps(module)


def _deepcopy(module: nn.Module, memo: dict) -> nn.Module:
    kind = type(module)
    if hasattr(kind, "__deepcopy__"):
        return kind.__deepcopy__(module, memo)
    make, arguments, state = kind.__reduce_ex__(module, 4)[:3]
    other = memo[id(module)] = make(*arguments)
    other.__setstate__(copy.deepcopy(state, memo))
    return other


def _reduce(module: nn.Module, protocol: int):
    return type(module).__reduce_ex__(_unpatched(module), protocol)


def _replica(module: nn.Module) -> nn.Module:
    return type(module)._replicate_for_data_parallel(_unpatched(module))


def _unpatched(module: nn.Module) -> nn.Module:
    """An unpatched module with the same parameters and children."""
    other = object.__new__(type(module))
    other.__dict__.update(vars(module))
    for name in ("_parameters", "_buffers", "_modules", "_forward_pre_hooks",
                 "_non_persistent_buffers_set"):
        other.__dict__[name] = copy.copy(vars(module)[name])
    other.__dict__.pop("_fftune_layers", None)
    if hasattr(other.__dict__.get("get_compiled_call"), "_fftune"):
        other.generation_config = copy.deepcopy(module.generation_config)
    restore(other)
    restore_merged(other)
    first, *chosen = other.__dict__.pop("_fftune_attention", (None,))
    if getattr(getattr(other, "config", None), "_attn_implementation", None) in chosen:
        other.config = _as_before(other.config, first)
    return other


# By the configuration of a patched model: modules of a pickle share one.
_configurations: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def _as_before(config, attention: str | None):
    other = _configurations.get(id(config))
    if other is None:
        other = _configurations[id(config)] = object.__new__(type(config))
    other.__dict__.update(copy.deepcopy(vars(config)))
    other._attn_implementation = attention
    return other

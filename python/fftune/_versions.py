"""Names of PyTorch and transformers that are private, or that a supported version lacks.

No other file of the package reads a private name of PyTorch, and what depends on a version is decided
here. Supported are PyTorch 2.6 and transformers 4.57 or newer.
"""
import functools
import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch._functorch.utils import enable_single_level_autograd_function
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.nn.modules import module as _modules
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = ("Dropout", "OpOverload", "SingleLevelFunction", "TorchDispatchMode",
           "enable_single_level_autograd_function", "is_traceable_wrapper_subclass", "pytree")

# The dispatcher.
DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
below_autograd = torch._C._AutoDispatchBelowAutograd
without_keys = torch._C._ExcludeDispatchKeyGuard

# Who sees a call, and what is cast.
dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
functorch_level = torch._C._functorch.peek_interpreter_stack
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
unwrap_if_dead = torch._C._functorch.unwrap_if_dead
tracing_state = torch._C._get_tracing_state
profiler_enabled = torch.autograd._profiler_enabled
# Whether autocast is on for any device, in a quarter of the time.
is_any_autocast_enabled = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def in_forward_mode() -> bool:
    """Whether derivatives are computed beside values: torch.func.jvp() and forward_ad.dual_level()."""
    return forward_ad._current_level >= 0


# Gradients.
def _any_tensor_wants_gradient(*inputs) -> bool:
    return any(isinstance(a, Tensor) and a.requires_grad for a in inputs)


# PyTorch's own, which is faster, is in 2.7 and newer.
any_requires_grad = getattr(torch._C, "_any_requires_grad", _any_tensor_wants_gradient)
# Whether a backward pass leaves the graph for another one.
keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
# The hooks for saved tensors that are on; 2.6 does not tell.
saved_tensors_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: ())

# CUDA, in a fraction of the time of the public functions. PyTorch for a CPU alone lacks them.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream",
                     lambda device: torch.cuda.current_stream(device).cuda_stream)


# Modules.
def _has_global_hooks() -> bool:
    return bool(_modules._global_forward_hooks or _modules._global_forward_pre_hooks
                or _modules._global_backward_hooks or _modules._global_backward_pre_hooks)


# Whether a hook is called for every module.
has_global_hooks = getattr(_modules, "_has_any_global_hook", _has_global_hooks)


# Compilation.
_traces_known = not torch.__version__.startswith("2.6.")


def is_known(condition) -> bool:
    """Whether a condition on sizes holds in every call of what is being compiled, without a guard for it. PyTorch 2.6
    cannot trace its own function: there sizes that may change are not known."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    if not _traces_known:
        return isinstance(condition, bool) and condition
    return torch.fx.experimental.symbolic_shapes.statically_known_true(condition)  # the compiler has loaded it


# transformers.

# Under which modules take a cache of keys and values, which 5.24 renamed; the last one is of states alone.
CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")


@functools.cache
def name_of_cache(forward: Callable) -> str | None:
    """Under which it takes a cache."""
    names = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in names), None)


def as_option(cache, module: nn.Module) -> dict:
    """The cache as an argument of a call of the module."""
    return {name_of_cache(type(module).forward) or "past_key_values": cache}


def cache_of(options: Mapping):
    """The cache that a call is given, or None."""
    for name in CACHE_NAMES:  # PyTorch 2.6 cannot trace next()
        cache = options.get(name)
        if cache is not None:
            return cache
    return None


def updated(cache, k: Tensor, v: Tensor, layer: int, options: dict) -> tuple[Tensor, Tensor]:
    """The keys and values of a cache with new ones, where attention is called with these options."""
    if type(cache).__name__ == "PagedAttentionCache":  # from 5.24 on; it writes into the options
        return cache.update(k, v, layer, kwargs=options)
    place = options.get("cache_position")  # before 5.0 a static cache is told where the tokens stand
    return cache.update(k, v, layer, *(() if place is None else ({"cache_position": place},)))


def take_cache(options: dict):
    """The same; it is among the options no more."""
    cache = cache_of(options)
    for name in CACHE_NAMES:
        options.pop(name, None)
    return cache


def collects_outputs() -> bool:
    """Whether a call of a model is under way that collects what its modules give."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # 4 collects without hooks
        return False
    return bool(_active_collector.get())

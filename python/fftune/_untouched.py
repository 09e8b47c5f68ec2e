"""Measuring and verifying without a trace: tensors, gradients, hooks and state of a module, arguments with
their caches, and random numbers are afterwards as they were before."""
import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ._library import Error


@contextmanager
def same_random_numbers(seed: int | None = None):
    """Who draws random numbers afterwards gets those that he would get without what runs in here, which begins
    from the seed, if one is given."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy:
                numpy.random.set_state(of_numpy)


@contextmanager
def usual_settings():
    """Within it tensors without a type or a device are of float32 on the CPU, and no autocast casts any: whatever
    the caller has set for tensors of his own."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        if dtype is not torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def own(tensor: Tensor) -> Tensor:
    """A leaf with the same values in memory of its own."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def in_double(tensor: Tensor) -> Tensor:
    """The same, of float64 where it has floating point. Codes of 8 bits stay: they stand for other numbers."""
    made = own(tensor)
    return made.detach().double().requires_grad_(made.requires_grad) \
        if made.is_floating_point() and made.element_size() > 1 else made


class _Copies(TorchFunctionMode):
    """Within it copy.deepcopy() makes of each tensor what `change` gives."""

    def __init__(self, change: Callable[[Tensor], Tensor]):
        super().__init__()
        self.change = change

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function is not Tensor.__deepcopy__:
            return function(*arguments, **(options or {}))
        tensor, memo = arguments
        if id(tensor) not in memo:
            memo[id(tensor)] = self.change(tensor)
        return memo[id(tensor)]


def _copied(label: str, value, change: Callable[[Tensor], Tensor], known: dict, advice: str):
    try:
        with _Copies(change):
            return copy.deepcopy(value, known)
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        raise Error(f"{label}: {type(value).__name__} cannot be copied, and a call might change it: {advice} "
                    f"({type(error).__name__}: {line})") from error


def copy_of_arguments(label: str, example, change: Callable[[Tensor], Tensor] = own):
    """The arguments of a call, with the caches among them; each tensor is what `change` gives."""
    values = example.values() if isinstance(example, dict) else example if isinstance(example, (tuple, list)) \
        else (example,)
    known = {id(t): change(t) for t in values if isinstance(t, nn.Parameter)}
    return _copied(label, example, change, known, "give tensors, and caches that copy.deepcopy takes")


# Integers of a buffer with more of them are a packed weight, which no call writes.
_PACKED = 1 << 20
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Hooks of these packages compute what a module gives, as those of weight_norm do.
_LIBRARIES = ("torch", "transformers", "compressed_tensors", "accelerate")


def copy_of_module(label: str, module: nn.Module) -> nn.Module:
    """A module that computes the same from the same weights in memory. It has no hooks of the user, which
    may do anything, and gradients, buffers, caches and counters of its own."""
    known: dict[int, object] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if type(parameter) is nn.Parameter and id(parameter) not in known:
                # An embedding of that kind writes into its weight.
                made = own(parameter) if getattr(part, "max_norm", None) is not None else parameter.detach()
                known[id(parameter)] = nn.Parameter(made.detach(), parameter.requires_grad)
            elif parameter is not None:  # its class knows how it is made
                known.setdefault(id(parameter), parameter)
        is_ours = type(part).__module__.partition(".")[0] == "fftune"
        for name, buffer in part._buffers.items():
            if buffer is not None and (is_ours or name.startswith("_fftune") or not buffer.is_floating_point()
                                       and buffer.numel() > _PACKED):
                known.setdefault(id(buffer), buffer)
        for name in _HOOKS:
            hooks = getattr(part, name)
            known[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items()
                                           if (getattr(hook, "__module__", None) or "").partition(".")[0] in _LIBRARIES)
    return _copied(label, module, own, known, "give a part of it that copy.deepcopy takes")

"""Measuring and verifying without a trace: a module's tensors, gradients, hooks and settings, arguments with
their caches, and random numbers are afterwards what they were before."""
import copy
import random
import sys
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ._library import Error


@contextmanager
def same_random_numbers(seed: int | None = None):
    """Whoever draws random numbers afterwards gets those that he would have got without what runs in here.
    With `seed` it begins from that."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state = numpy and numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(state)


class _Copies(TorchFunctionMode):
    """Within it copy.deepcopy() makes of each tensor what `change` does."""

    def __init__(self, change: Callable[[Tensor], Tensor]):
        super().__init__()
        self.change = change

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function is not Tensor.__deepcopy__:
            return function(*arguments, **(options or {}))
        tensor, memo = arguments
        if id(tensor) not in memo:
            with torch._C.DisableTorchFunction():
                memo[id(tensor)] = self.change(tensor)
        return memo[id(tensor)]


def own(tensor: Tensor) -> Tensor:
    """A leaf with the same values in memory of its own."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def copy_of(value, change: Callable[[Tensor], Tensor] = own):
    """Arguments of a call, with caches and whatever else they hold, each tensor as `change` gives it."""
    with _Copies(change):
        return copy.deepcopy(value, {})

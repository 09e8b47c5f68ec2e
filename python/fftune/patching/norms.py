"""Norms of a model by rmsnorm and layernorm."""
import inspect

import torch
from torch import Tensor, nn

from .. import ops, reference
from .recognise import (Options, Unfit, expect_plain, has_kernels, kind_of, original, probing,
                        random_rows, remembered, replace_forward, undoable)


def _norm_eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def patch_norm(module: nn.Module, known: dict, options: Options) -> str | None:
    if isinstance(module, nn.LayerNorm):
        return _patch_layernorm(module)
    parameters = dict(module.named_parameters())
    if next(module.children(), None) is not None or list(parameters) != ["weight"] \
            or parameters["weight"].dim() != 1 or not hasattr(type(module), "forward"):
        return None
    eps = _norm_eps(module)
    if eps is None:
        return None
    expect_plain(module)
    if len(inspect.signature(type(module).forward).parameters) != 2:
        raise Unfit(f"{type(module).__name__} takes more than hidden states, a gate say")
    key = kind_of(module), module.weight.dtype
    convention = remembered(known, key, lambda: _convention(module, eps))
    replace_forward(module, norm_forward, (convention, eps))
    return f"{type(module).__name__} by rmsnorm ({convention})"


def _convention(module: nn.Module, eps: float) -> str:
    """Of those that compute what the module does, the one that rounds as it does."""
    w = module.weight.detach()
    with probing(module):
        # Weights that are still all alike would hide a rounding.
        odd = random_rows(w.numel(), like=w) * 0.2 + 1
        kept, module.weight.data = module.weight.data, odd
        try:
            x = random_rows(16, w.numel(), like=w) * 3
            theirs = module(x)
        finally:
            module.weight.data = kept
        if isinstance(theirs, Tensor) and theirs.dtype == x.dtype and theirs.shape == x.shape:
            errors = {name: (reference.rmsnorm(x, odd, eps, name).double()
                             - theirs.double()).norm().item()
                      for name in ("llama", "t5", "gemma")}
            best = min(errors, key=errors.get)
            if errors[best] <= 4 * torch.finfo(x.dtype).eps * theirs.double().norm().item():
                return best
    raise Unfit(f"{type(module).__name__} is no root mean square norm that is known")


@undoable
def norm_forward(self, hidden_states: Tensor) -> Tensor:
    # Of two types the result would take the wider one.
    if hidden_states.dtype != self.weight.dtype or not has_kernels(hidden_states):
        return original(self, hidden_states)
    convention, eps = self._fftune
    return ops.rmsnorm(hidden_states, self.weight, eps=eps, convention=convention)


def _patch_layernorm(module: nn.LayerNorm) -> str:
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1 \
            or module.weight is None or module.bias is None:
        raise Unfit("LayerNorm without a weight and a bias of one dimension")
    expect_plain(module)
    replace_forward(module, layernorm_forward, ())
    return "LayerNorm by layernorm, without gradients"


def normalises(norm: nn.LayerNorm, x: Tensor) -> bool:
    """Whether layernorm is run. PyTorch's has the faster backward pass, and a compiler fuses it."""
    return (not torch.is_grad_enabled() and not torch.compiler.is_compiling()
            and x.dtype == norm.weight.dtype == norm.bias.dtype and has_kernels(x)
            and not torch.is_autocast_enabled(x.device.type))


@undoable
def layernorm_forward(self, x: Tensor) -> Tensor:
    if not normalises(self, x):
        return original(self, x)
    return ops.layernorm(x, self.weight, self.bias, eps=self.eps)

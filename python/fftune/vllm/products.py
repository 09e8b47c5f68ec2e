"""Linear layers of vLLM that run one op of fftune: the op of vLLM's traces, and the test of a layer.

A layer serves calls of every number of tokens, so its weight is in memory once. In a trace a layer is one
op, which has the layer's number.
"""
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .logs import log_once, one_line
from .trial import difference

_layers: "dict[str, Callable[[Tensor, Tensor | None], Tensor]]" = {}  # by the number that a trace has
_ROWS = (4, 300)  # for kernels of few tokens, and of many


@torch.library.custom_op("fftune_vllm::linear", mutates_args=())
def _linear(x: Tensor, bias: Tensor | None, key: str, n: int) -> Tensor:
    return _layers[key](x, bias)


@_linear.register_fake
def _(x, bias, key, n):
    return x.new_empty(*x.shape[:-1], n)


def adopt(kernel, apply: Callable, layer: nn.Module, run: Callable, sizes: tuple[int, int], like: Tensor) -> str:
    """Makes `run(x, bias)` the kernel's apply_weights where it computes what `apply(kernel, layer, x, bias)`
    does, for x [rows, sizes[0]] of the type and device of `like`: the reason why not, or ""."""
    k, n = sizes
    try:
        generator = torch.Generator().manual_seed(0)
        for rows in _ROWS:
            x = torch.randn(rows, k, generator=generator).to(like)
            reason = difference("results", run(x, None), apply(kernel, layer, x, None))
            if reason:
                return reason
    except Exception as error:
        return one_line(error)
    key = kernel.__dict__.get("_fftune_key") or str(len(_layers))
    _layers[key], kernel._fftune_key = run, key

    def apply_weights(layer: nn.Module, x: Tensor, bias: Tensor | None = None, **_) -> Tensor:
        return torch.ops.fftune_vllm.linear(x, bias, key, n)

    kernel.apply_weights = apply_weights
    return ""


def give_back(kernel) -> None:
    """Makes the kernel vLLM's again, before it processes other weights."""
    kernel.__dict__.pop("apply_weights", None)


def log_layer(name: str, reason: str, by: str) -> None:
    log_once(f"linear layers by {name} stay vLLM's: {reason}" if reason else
             f"linear layers by {name} run by linear, {by}")


def free(layer: nn.Module, names) -> None:
    """Gives back the memory of parameters that nothing reads any more."""
    for name in names:
        tensor = getattr(layer, name or "", None)
        if isinstance(tensor, Tensor):
            tensor.data = tensor.data.new_empty(0)

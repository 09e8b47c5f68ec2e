"""Linear layers of vLLM that run one op of fftune: the op of vLLM's traces, and the test of a layer.

A layer serves calls of every number of tokens, so its weight is in memory once. In a trace a layer is one
op, which has the layer's number.
"""
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import _run as running
from . import plans
from .logs import log_once, one_line
from .trial import difference

# By the number that a trace has: what runs a layer, and its problems as plans.prepare() takes them.
_layers: "dict[str, tuple[Callable[[Tensor, Tensor | None], Tensor], list[tuple[int, dict]], int]]" = {}
_ROWS = (4, 300)  # for kernels of few tokens, and of many


@torch.library.custom_op("fftune_vllm::linear", mutates_args=())
def _linear(x: Tensor, bias: Tensor | None, key: str, n: int) -> Tensor:
    run, problems, most = _layers[key]
    plans.prepare(x.numel() // x.shape[-1], problems, most)
    return run(x, bias)


@_linear.register_fake
def _(x, bias, key, n):
    return x.new_empty(*x.shape[:-1], n)


def adopt(kernel, apply: Callable, layer: nn.Module, run: Callable, sizes: tuple[int, int], like: Tensor) -> str:
    """Makes `run(x, bias)` the kernel's apply_weights where it computes what `apply(kernel, layer, x, bias)`
    does, for x [rows, sizes[0]] of the type and device of `like`: the reason why not, or ""."""
    k, n = sizes
    problems: dict = {}
    try:
        generator = torch.Generator().manual_seed(0)
        for rows in _ROWS:
            x = torch.randn(rows, k, generator=generator).to(like)
            problems.clear()
            with running.listening(problems):
                y = run(x, None)
            reason = difference("results", y, apply(kernel, layer, x, None))
            if reason:
                return reason
    except Exception as error:
        return one_line(error)
    key = kernel.__dict__.get("_fftune_key") or str(len(_layers))
    _layers[key], kernel._fftune_key = (run, list(problems.values()), plans.most_rows()), key

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

"""graphed(): the forward and backward pass of a model as one CUDA graph.

A small model's step is bound by the host, which launches a thousand kernels and runs autograd's
Python for each op. A graph is one launch. The first call with inputs of some shapes runs as it is, the
second one is captured, and later ones copy their inputs to where the graph reads them and replay it.

A graph repeats what the capture ran, so it serves the same settings of the modules and the same
addresses of the weights alone (ModelState). Random numbers of dropout are new in each replay.
"""
import threading
import warnings
from dataclasses import dataclass, field
from typing import Callable

import torch
from torch import Tensor, nn

from .._checks import expect_module, named
from .._library import Error
from .._versions import pytree
from .graphs import ModelState

_KEPT = 8  # graphs of a model, those used last
_ON_CPU = "on the CPU"


def graphed(model: nn.Module, loss: Callable[..., Tensor] | None = None) -> "TrainingStep":
    """The forward and backward pass of a model in training, replayed as a CUDA graph.

    The result is called as the model is. It returns the loss, without a gradient, and leaves the
    gradients of the parameters in ``.grad``, added to those that are there, as ``backward()`` does::

        step = fftune.graphed(model)
        for batch in batches:
            loss = step(**batch)
            optimizer.step()
            optimizer.zero_grad()

    The first two calls with inputs of the same shapes take as long as usual: one runs as it is, and one
    is captured. Later ones replay the graph. Gradients in ``.grad`` are the graph's own memory, which
    its next replay writes over. With another shape, other settings of the modules, weights at other
    addresses or another dtype of autocast the next call is captured anew; the last 8 graphs are kept.

    Calls run as usual where a graph would leave something out: on the CPU, with hooks of modules or
    parameters, under DistributedDataParallel and FSDP, and with inputs that need gradients. So they do
    where the capture fails, as it does when the model waits for the device. A warning then names the reason
    once.

    Args:
        model: A model of transformers, or any module; `patch` it before or not.
        loss: A function of the model's outputs that returns the loss, a scalar. By default it is
            ``outputs.loss``, or the outputs themselves if they are a tensor.

    Raises:
        fftune.Error: `model` is no ``torch.nn.Module``; in a call, there is no loss.
    """
    expect_module("graphed", model)
    if loss is not None and not callable(loss):
        raise Error(f"graphed: loss is {named(loss)}: give a function of the outputs, or None")
    return TrainingStep(model, loss)


@dataclass
class _Step:
    """A captured step: the memory that it reads and writes. Without inputs, not captured yet."""

    others: list
    inputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    loss: Tensor | None = None
    graph: "_Graph | None" = None


class TrainingStep(ModelState):
    """The result of graphed()."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] | None):
        super().__init__(model)
        self._loss_of = loss
        self._steps: dict[tuple, _Step] = {}
        self._pool = None
        self._told = False
        self._failed = ""

    def __call__(self, *arguments, **options) -> Tensor:
        leaves, tree = pytree.tree_flatten((arguments, options))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.look()
        reason = self._reason(tensors, parameters)
        if reason:
            if not self._told and reason != _ON_CPU:
                self._told = True
                warnings.warn(f"fftune.graphed: steps run as usual: {reason}", stacklevel=2)
            return self._run(arguments, options)
        device = parameters[0].device
        key = (str(tree), self._modules, self._weights(), tuple(map(id, parameters)),
               threading.get_ident(),
               torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
               *((t.shape, t.dtype) for t in tensors))
        step = self._steps.pop(key, None)
        if step is None or step.others != others:
            # It runs as it is, which also makes the plans and buffers that a capture must find.
            self._keep(key, _Step(others))
            return self._run(arguments, options)
        self._keep(key, step)
        if step.graph is None:
            step.inputs = [t.to(device, copy=True) for t in tensors]
            values = iter(step.inputs)
            own = pytree.tree_unflatten(
                [next(values) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)
            if not self._capture(step, own, parameters):
                return self._run(arguments, options)
        else:
            torch._foreach_copy_(step.inputs, tensors, non_blocking=True)
        _replay(step, parameters)
        return step.loss.clone()

    def _reason(self, tensors: list[Tensor], parameters: list[nn.Parameter]) -> str:
        """Why a step cannot be a graph, or nothing."""
        if self._failed:
            return self._failed
        if not parameters:
            return "no parameter needs a gradient"
        if self._modules is None:
            return "hooks of modules, or distributed or quantised parameters"
        if any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
               for p in parameters):
            return "hooks of parameters"
        if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in self.model.modules()):
            return "DistributedDataParallel, which exchanges gradients in hooks of its own"
        if any(t.requires_grad for t in tensors):
            return "inputs that need gradients"
        if len({p.device for p in parameters}) > 1:
            return "parameters on several devices"
        return "" if _is_on_gpu(parameters[0]) else _ON_CPU

    def _run(self, arguments: tuple, options: dict) -> Tensor:
        outputs = self.model(*arguments, **options)
        if self._loss_of is not None:
            loss = self._loss_of(outputs)
        else:
            loss = outputs if isinstance(outputs, Tensor) else getattr(outputs, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise Error("graphed: the model gives no loss, a tensor of one number: call it with labels, or "
                        "give loss=, a function of its outputs")
        loss.backward()
        return loss.detach()

    def _keep(self, key: tuple, step: _Step) -> None:
        self._steps[key] = step
        while len(self._steps) > _KEPT:
            del self._steps[next(iter(self._steps))]

    def _capture(self, step: _Step, own: tuple, parameters: list[nn.Parameter]) -> bool:
        """Captures the step with memory of its own for gradients; those that are there stay."""
        there = [p.grad for p in parameters]
        device = parameters[0].device.type
        dtype = torch.get_autocast_dtype(device)

        def run() -> list[Tensor | None]:
            for p in parameters:
                p.grad = None
            # Casts of weights that are cached outside of the graph would not be part of it.
            with torch.autocast(device, dtype, torch.is_autocast_enabled(device), cache_enabled=False):
                loss = self._run(*own)
            return [loss, *(p.grad for p in parameters)]

        try:
            graph = _Graph()
            step.loss, *step.gradients = graph.capture(run, self._pool)
            step.graph, self._pool = graph, graph.pool
            return True
        except Error:
            raise
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            self._failed = f"the capture failed: {type(error).__name__}: {line}"
            self._steps.clear()
            warnings.warn(f"fftune.graphed: steps run as usual: {self._failed}", stacklevel=3)
            self._told = True
            return False
        finally:
            for p, gradient in zip(parameters, there):
                p.grad = gradient


def _is_on_gpu(parameter: nn.Parameter) -> bool:
    return parameter.is_cuda


class _Graph:
    """A CUDA graph, whose memory later graphs in the same pool use between its replays."""

    def capture(self, run: Callable[[], list], pool) -> list:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            results = run()
        self.pool = self.graph.pool()
        return results

    def replay(self) -> None:
        self.graph.replay()


def _replay(step: _Step, parameters: list[nn.Parameter]) -> None:
    """Runs the step, and adds its gradients to those of the parameters."""
    there = [p.grad for p in parameters]
    # A gradient that an earlier replay left would be written over.
    kept = {i: gradient.clone() for i, gradient in enumerate(there)
            if gradient is not None and gradient is step.gradients[i]}
    step.graph.replay()
    sums, more = [], []
    for i, (parameter, gradient) in enumerate(zip(parameters, step.gradients)):
        if gradient is None:
            continue
        if there[i] is None:
            parameter.grad = gradient
        else:
            sums.append(there[i])
            more.append(kept.get(i, gradient))
    if sums:
        torch._foreach_add_(sums, more)

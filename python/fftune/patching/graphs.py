"""generate() with its steps as CUDA graphs: patch(model, graphs=True).

With a static cache transformers gives every step of generate() after the first to what the model's
get_compiled_call() returns, with inputs of the same shapes. Here that captures a step once and then
replays it, so that the host starts one graph for each token where it started hundreds of kernels.
"""
import types
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .recognise import Unfit, undoable

_KEPT = 4  # graphs of a model, those used last


def patch_steps(model: nn.Module) -> str:
    """Makes generate() run steps as graphs."""
    if not hasattr(type(model), "get_compiled_call"):
        raise Unfit("this transformers does not compile the steps of generate()")
    generation = model.generation_config
    if generation.cache_implementation not in (None, "static"):
        raise Unfit(f"it generates with the cache '{generation.cache_implementation}'")
    runner = Steps(model, generation.cache_implementation)
    generation.cache_implementation = "static"
    method = types.MethodType(_get_compiled_call, runner)
    model.__dict__["get_compiled_call"] = method
    return "steps of generate() as CUDA graphs, with a static cache"


def restore_steps(model: nn.Module) -> None:
    method = model.__dict__.get("get_compiled_call")
    if hasattr(method, "_fftune"):
        model.generation_config.cache_implementation = method.__self__.cache_implementation
        del model.get_compiled_call


@undoable
def _get_compiled_call(runner: "Steps", *_):
    return runner


@dataclass
class _Step:
    """A captured step: what it reads, where its cache is, and what it gives."""

    others: list
    inputs: list[Tensor]
    cache: object
    graph: torch.cuda.CUDAGraph | None
    outputs: object


class Steps:
    """Calls the model, or replays a graph of the call with the same shapes."""

    def __init__(self, model: nn.Module, cache_implementation: str | None):
        self.model = model
        self.cache_implementation = cache_implementation
        self._steps: dict[tuple, _Step] = {}
        self._failed = False

    def __deepcopy__(self, memo):
        return Steps(memo.get(id(self.model), self.model), self.cache_implementation)

    def __call__(self, **options):
        cache = options.pop("past_key_values", None)
        tensors_of_cache = _tensors_of(cache)
        if tensors_of_cache is None or self._failed:
            return self.model(**options, past_key_values=cache)
        leaves, tree = pytree.tree_flatten(options)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        key = str(tree), *((t.shape, t.dtype, t.device) for t in (*tensors, *tensors_of_cache))
        step = self._steps.pop(key, None)
        if step is not None and step.others != others:
            step = None
        if step is None:
            # It runs as it is, which also makes the plans and buffers that a capture must find.
            self._keep(key, _Step(others, [], cache, None, None))
            return self.model(**options, past_key_values=cache)
        self._keep(key, step)
        if step.cache is not cache:  # of another call of generate()
            if not step.inputs:
                step.cache = cache
                return self.model(**options, past_key_values=cache)
            torch._foreach_copy_(_tensors_of(step.cache), tensors_of_cache)
        if not step.inputs:
            step.inputs = [t.clone() for t in tensors]
            values = iter(step.inputs)
            own = pytree.tree_unflatten([next(values) if isinstance(leaf, Tensor) else leaf
                                         for leaf in leaves], tree)
            if not self._capture(step, own):
                return self.model(**options, past_key_values=cache)
        else:
            torch._foreach_copy_(step.inputs, tensors)
        step.graph.replay()
        return step.outputs

    def _keep(self, key: tuple, step: _Step) -> None:
        self._steps[key] = step
        while len(self._steps) > _KEPT:
            del self._steps[next(iter(self._steps))]

    def _capture(self, step: _Step, options: dict) -> bool:
        if not step.inputs[0].is_cuda:  # without a GPU the same steps, run again each time
            step.graph = _Again(self.model, step, options)
            return True
        step.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(step.graph):
                step.outputs = self.model(**options, past_key_values=step.cache)
            return True
        except Exception as error:
            self._failed = True
            self._steps.clear()
            line = (str(error).splitlines() or [""])[0]
            warnings.warn(f"fftune: a step of generate() cannot be captured, and runs as it did: "
                          f"{type(error).__name__}: {line}")
            return False


class _Again:
    """A graph's stand-in where there are none."""

    def __init__(self, model: nn.Module, step: _Step, options: dict):
        self.model, self.step, self.options = model, step, options

    def replay(self) -> None:
        self.step.outputs = self.model(**self.options, past_key_values=self.step.cache)


def _tensors_of(cache) -> list[Tensor] | None:
    """Tensors of a static cache that generate() made; None for others, which a graph cannot use."""
    if cache is None or getattr(cache, "_is_user_defined", False):
        return None
    parts = [getattr(cache, name) for name in ("self_attention_cache", "cross_attention_cache")
             if hasattr(cache, name)] or [cache]
    tensors = []
    for part in parts:
        for layer in getattr(part, "layers", [None]):
            length = getattr(layer, "cumulative_length", None)
            if type(layer).__name__ != "StaticLayer" or not isinstance(length, Tensor) \
                    or not getattr(layer, "is_initialized", False):
                return None
            tensors += [layer.keys, layer.values, length]
    return tensors

"""generate() with its steps as CUDA graphs: patch(model, graphs=True).

With a static cache transformers gives every step of generate() after the first to what the model's
get_compiled_call() returns, with inputs of the same shapes. Here that captures a step once and then
replays it, so that the host starts one graph for each token where it started hundreds of kernels.

A graph repeats what the capture ran: the settings of the modules, where their weights lie, and what
Python chose. So it is replayed only for the same settings and addresses, never where a user's hook has
to be called, and only for models that transformers says can be compiled whole.
"""
import copy
import inspect
import threading
import types
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .._versions import as_option, cache_of, pytree, take_cache
from .attention import count_causal
from .caches import with_growing_cache
from .layer_mixers import STATE_LAYERS, has_known_states
from .recognise import Unfit, are_plain, expect_methods, has_hooks, undoable

_KEPT = 4  # graphs of a model, those used last


def patch_steps(model: nn.Module) -> str:
    """Makes generate() run steps as graphs."""
    if not hasattr(type(model), "get_compiled_call"):
        raise Unfit("this transformers does not compile the steps of generate()")
    if not getattr(type(model), "_can_compile_fullgraph", False):
        raise Unfit("transformers says that this model cannot be compiled whole: its steps may differ "
                    "in more than their tensors")
    if getattr(model.config, "is_causal", True) is not True:
        raise Unfit("it is not causal by its configuration: a static cache would show it empty places")
    expect_methods(model, "generate", "get_compiled_call")
    generation = model.generation_config
    if generation.cache_implementation not in (None, "static"):
        raise Unfit(f"it generates with the cache '{generation.cache_implementation}'")
    runner = Steps(model, generation.cache_implementation)
    generation.cache_implementation = "static"
    model.__dict__["_fftune_causal"] = count_causal(model)
    method = types.MethodType(_get_compiled_call, runner)
    model.__dict__["get_compiled_call"] = method
    inner = getattr(model.__dict__.get("generate"), "__func__", type(model).generate)

    @undoable
    def generate(self, *arguments, **options):
        given = inspect.signature(type(self).generate).bind_partial(self, *arguments, **options).arguments
        if not _needs_another_cache(self, given, options):
            configs = (given.get("generation_config"), runner)
            wanted = options.get("cache_implementation") or next(
                (name for c in configs if (name := getattr(c, "cache_implementation", None))), None)
            outputs = inner(self, *arguments, **options)
            return with_growing_cache(outputs, self.config) if wanted is None else outputs
        config = self.generation_config
        config.cache_implementation = runner.cache_implementation
        try:
            return inner(self, *arguments, **options)
        finally:
            config.cache_implementation = "static"

    model.__dict__["generate"] = types.MethodType(generate, model)
    return "steps of generate() as CUDA graphs, with a static cache"


def _needs_another_cache(model: nn.Module, given: dict, options: dict) -> bool:
    """Whether a call of generate() brings a cache of its own, or is one for which transformers refuses a
    static cache: one with a draft, or one whose keys and values autocast makes of two types. Adapters that put
    a prompt before the ids, and replace the method that prepares a step, take no static cache either. Attention
    that is not causal any more would see its empty places."""
    configs = [c for c in (given.get("generation_config"), model.generation_config) if c is not None]
    wanted = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
    device = model.device.type
    return model.generation_config.cache_implementation == "static" and (
        cache_of(options) is not None or getattr(model.config, "is_causal", True) is not True
        or count_causal(model) < model._fftune_causal or "prepare_inputs_for_generation" in vars(model)
        or given.get("assistant_model") is not None
        or any(options.get(name) or any(getattr(c, name, None) for c in configs) for name in wanted)
        or torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != model.dtype)


def restore_steps(model: nn.Module) -> None:
    method = model.__dict__.get("get_compiled_call")
    if hasattr(method, "_fftune"):
        if model.generation_config.cache_implementation == "static":  # no other one since
            model.generation_config.cache_implementation = method.__self__.cache_implementation
        del model.get_compiled_call


@undoable
def _get_compiled_call(runner: "Steps", *_):
    """Once in a call of generate()."""
    runner.look()
    return runner


@dataclass
class _Step:
    """A captured step: what it reads, where its cache is, and what it gives."""

    others: list
    inputs: list[Tensor]
    cache: object
    graph: "torch.cuda.CUDAGraph | _Again | None" = None
    outputs: object = None
    leaves: list = field(default_factory=list)  # of the outputs, None for what is an input
    tree: object = None

    def results(self, given: list[Tensor]) -> object:
        """Copies of the outputs, which the next step writes over. The cache is the step's own."""
        if self.tree is None:
            self.leaves, self.tree = pytree.tree_flatten(
                self.outputs, is_leaf=lambda value: value is self.cache)
        places = {id(tensor): i for i, tensor in enumerate(self.inputs)}
        return pytree.tree_unflatten(
            [leaf if not isinstance(leaf, Tensor) else given[places[id(leaf)]]
             if id(leaf) in places else leaf.clone() for leaf in self.leaves], self.tree)


# Tensors, modules and hooks are looked at by themselves.
_NO_SETTINGS = {*vars(nn.Module()), "get_compiled_call", "generation_config"} - {"training"}
_PLAIN = (bool, int, float, str, type(None))


def _settings(value):
    """A value that differs where two values of attributes differ."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.data_ptr()
    if isinstance(value, (list, tuple)):
        return tuple(map(_settings, value))
    if isinstance(value, (dict, set)):
        items = value.items() if isinstance(value, dict) else value
        return tuple(map(_settings, items))
    return id(value)


class ModelState:
    """A graph of a model's calls holds this fast: settings of its modules, and where its weights lie."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._modules: int | None = None  # what look() found; None where graphs are unfit
        self._slots: list[tuple[dict, str]] = []  # of parameters and buffers

    def look(self) -> None:
        """At the modules of the model, their settings, and who has to be told of their calls."""
        modules = list(self.model.modules())
        self._slots = [(tensors, name) for module in modules
                       for tensors in (module._parameters, module._buffers) for name in tensors]
        if any(map(has_hooks, modules)) or not are_plain(*(t[name] for t, name in self._slots)):
            self._modules = None
            return
        configs = {id(config): config for module in modules
                   if (config := getattr(module, "config", None)) is not None}
        found: list = []
        for own in (*modules, *configs.values()):
            found += id(own), id(type(own))
            for name, value in vars(own).items():
                if name not in _NO_SETTINGS:
                    found.append(value if type(value) in _PLAIN else _settings(value))
        self._modules = hash(tuple(found))

    def _weights(self) -> int:
        """A hash of their addresses; it takes some 0.1 us for each."""
        return hash(tuple([0 if (tensor := tensors.get(name)) is None else tensor.data_ptr()
                           for tensors, name in self._slots]))


class Steps(ModelState):
    """Calls the model, or replays a graph of the call with the same shapes."""

    def __init__(self, model: nn.Module, cache_implementation: str | None):
        super().__init__(model)
        self.cache_implementation = cache_implementation
        self._steps: dict[tuple, _Step] = {}
        self._failed = False

    def __deepcopy__(self, memo):
        return Steps(memo.get(id(self.model), self.model), self.cache_implementation)

    def __call__(self, **options):
        cache = take_cache(options)
        tensors_of_cache = _tensors_of(cache)
        if tensors_of_cache is not None and _has_convolutions_alone(cache):
            tensors_of_cache = None
        if self._modules is None and not self._slots:
            self.look()
        if tensors_of_cache is None or self._failed or self._modules is None \
                or torch.is_grad_enabled():
            return self.model(**options, **as_option(cache, self.model))
        leaves, tree = pytree.tree_flatten(options)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        device = self.model.device.type
        key = (str(tree), self._modules, self._weights(), threading.get_ident(),
               torch.is_inference_mode_enabled(),
               torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
               *((t.shape, t.dtype, t.device) for t in (*tensors, *tensors_of_cache)))
        step = self._steps.pop(key, None)
        if step is not None and step.others != others:
            step = None
        if step is None:
            # It runs as it is, which also makes the plans and buffers that a capture must find.
            self._keep(key, _Step(others, [], cache))
            return self.model(**options, **as_option(cache, self.model))
        self._keep(key, step)
        if step.cache is not cache:  # of another call of generate()
            if not step.inputs:
                step.cache = cache
                return self.model(**options, **as_option(cache, self.model))
            torch._foreach_copy_(_tensors_of(step.cache), tensors_of_cache)
        if not step.inputs:
            step.inputs = [t.clone() for t in tensors]
            values = iter(step.inputs)
            own = pytree.tree_unflatten([next(values) if isinstance(leaf, Tensor) else leaf
                                         for leaf in leaves], tree)
            if not self._capture(step, own):
                return self.model(**options, **as_option(cache, self.model))
        else:
            torch._foreach_copy_(step.inputs, tensors)
        step.graph.replay()
        return step.results(tensors)

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
                step.outputs = self.model(**options, **as_option(step.cache, self.model))
            return True
        except Exception as error:
            self._failed = True
            self._steps.clear()
            warn_of_capture(error)
            return False


def warn_of_capture(error: Exception) -> None:
    line = (str(error).splitlines() or [""])[0]
    warnings.warn("fftune: a step of generate() cannot be captured, and runs as it did: "
                  f"{type(error).__name__}: {line}")


class _Again:
    """A graph's stand-in where there are none: it too runs the modules of the capture on the memory that
    their weights had then, and writes into the same outputs each time."""

    def __init__(self, model: nn.Module, step: _Step, options: dict):
        memory = {id(t): nn.Parameter(t.detach(), False) if isinstance(t, nn.Parameter) else t.detach()
                  for t in (*model.parameters(), *model.buffers())}
        self.model, self.step, self.options = copy.deepcopy(model, memory), step, options

    def replay(self) -> None:
        outputs = self.model(**self.options, **as_option(self.step.cache, self.model))
        if self.step.outputs is None:
            self.step.outputs = outputs
            return
        is_cache = lambda value: value is self.step.cache
        for own, new in zip(*(pytree.tree_leaves(each, is_leaf=is_cache)
                              for each in (self.step.outputs, outputs)), strict=True):
            if isinstance(own, Tensor) and own is not new:
                own.copy_(new)


def _tensors_of(cache) -> list[Tensor] | None:
    """Tensors of a static cache that generate() made; None for others, which a graph cannot use."""
    if cache is None or getattr(cache, "_is_user_defined", False):
        return None
    parts = [getattr(cache, name) for name in ("self_attention_cache", "cross_attention_cache")
             if hasattr(cache, name)] or [cache]
    tensors = []
    for part in parts:
        for layer in getattr(part, "layers", [None]):
            kind = type(layer).__name__
            if kind == "DummyLayer":  # of a layer without a mixer
                continue
            own = _tensors_of_keys(layer) if kind in ("StaticLayer", "Float8StaticLayer") else \
                _tensors_of_indexed_keys(layer) if kind == "StaticIndexedLayer" else \
                _tensors_of_states(layer) if kind in STATE_LAYERS else None
            if own is None:
                return None
            tensors += own
    return tensors


def _has_convolutions_alone(cache) -> bool:
    """Whether a layer of a cache that _tensors_of() knows has states of convolutions on a GPU and no recurrent ones, as
    in LFM2. On an H200, ids by graphs of such a model's steps in bfloat16 were others than those without graphs. The
    reason is not known. Those of Qwen3-Next, and of steps by layers, were the same."""
    return any(type(layer).__name__ in STATE_LAYERS
               and all(state is None for state in layer.recurrent_states.values())
               and any(state is not None and state.is_cuda for state in layer.conv_states.values())
               for layer in getattr(cache, "layers", ()))


def _tensors_of_keys(layer) -> list[Tensor] | None:
    length, has_scales = getattr(layer, "cumulative_length", None), type(layer).__name__ == "Float8StaticLayer"
    if not isinstance(length, Tensor) or not getattr(layer, "is_initialized", False) \
            or has_scales and not layer.has_scales:
        return None
    return [layer.keys, layer.values, length, *((layer.k_scale, layer.v_scale) if has_scales else ())]


def _tensors_of_indexed_keys(layer) -> list[Tensor] | None:
    """Those of attention to chosen keys, and of an indexer where the layer has its own. On a GPU there are none: what
    attends to them has not been captured there."""
    own = _tensors_of_keys(layer)
    if own is None or layer.keys.is_cuda or layer.indexer_position_ids is not None:
        return None
    return own + ([layer.indexer_keys, layer.indexer_cumulative_length] if layer.is_indexer_initialized else [])


def _tensors_of_states(layer) -> list[Tensor] | None:
    """Those of convolutions and recurrent ones, if a call before has written them: the first one takes another way. A
    layer that records its past replaces them."""
    if not has_known_states(layer) or not all(layer.has_previous_state.values()) or getattr(layer, "record_past", True):
        return None
    states = *layer.conv_states.values(), *layer.recurrent_states.values()
    return [state for state in states if state is not None]

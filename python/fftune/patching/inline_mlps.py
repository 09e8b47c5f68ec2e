"""MLPs of two layers that have no module of their own: a layer calls fc1, an activation and fc2 in its
forward (BART, OPT), or modules of it do (BERT), beside residuals and norms.

A stand-in runs with placeholders for the three parts. They show that the first layer's result goes to
the activation alone, and the activation's to the second layer alone. Then the forward runs on a view of the
module: an object of its class with its attributes, whose first layer computes all three by ffn and
whose other two give back what they are given.
"""
import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .mlps import plain_mlp, required_arguments
from .quantised import has_codes
from .recognise import (Numbers, Options, Unfit, activation_name, are_plain, expect_no_hooks, has_settings,
                        expect_plain_parameters, has_fast_products, is_patched, kind_of,
                        original, remembered,
                        stand_in, state_of, undoable, watched, view_of)
from .trial import Trial, replace_forward


@dataclass(frozen=True)
class _Chain:
    """The paths of the layers and of the activation."""

    first: tuple[str, ...]
    act: tuple[str, ...]
    second: tuple[str, ...]
    name: str  # of the activation
    count: int  # results of the parts beside them

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        return self.first, self.act, self.second


def patch_inline_mlp(module: nn.Module, known: dict, options: Options) -> str | None:
    """For a module that calls both layers, or whose children do."""
    if isinstance(module, nn.ModuleList) or "forward" in module.__dict__:
        return None
    pair = _two_layers(module)
    if pair is None or not inspect.isfunction(inspect.unwrap(type(module).forward)):
        return None
    chain = remembered(known, ("inline", kind_of(module)), lambda: _chain_of(module, *pair, known))
    if chain is None:
        return None
    expect_plain_parameters(module)
    layers = [_at(module, path) for path in chain.paths]
    if layers[0].weight.dtype != layers[2].weight.dtype:
        raise Unfit("its weights are of several types")
    if layers[0].bias is not None and layers[2].bias is None:
        raise Unfit("a first bias without a second, for which there is no kernel")
    expect_no_hooks(*(part for part in layers if isinstance(part, nn.Module)))
    count = min(required_arguments(module), 2)
    replace_forward(module, _inline_forward, (chain, state_of(layers[1])), Trial(
        lambda numbers, like: (numbers(2, 3, layers[0].in_features),) * count,
        parts=_others(module, chain.paths, chain.count)), known)
    return (f"{'.'.join(chain.first)} and {'.'.join(chain.second)} of {type(module).__name__} by ffn "
            f"without a gate ({chain.name}), without gradients")


def chain_of(module: nn.Module) -> _Chain | None:
    """The chain that patch_inline_mlp() found in the module."""
    return module.__dict__["_fftune"][0] if is_patched(module, _inline_forward) else None


def _at(module: nn.Module, path: tuple[str, ...]):
    """The module or function there."""
    for name in path:
        module = getattr(module, name)
    return module


def _two_layers(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The paths of the layers that widen and narrow, both in the module itself or in two of its
    children."""
    linears = [(tuple(name.split(".")), child) for name, child in module.named_modules()
               if name.count(".") < 2 and type(child) is nn.Linear and not has_codes(child)]
    pairs = [(first, second) for first, up in linears for second, down in linears
             if up.out_features > up.in_features and up.weight.shape == down.weight.shape[::-1]
             and (len(first) == len(second) == 1 or first[0] != second[0])]
    return pairs[0] if len(pairs) == 1 else None


def _activations(module: nn.Module, chain: tuple[tuple[str, ...], ...]) -> list[tuple[str, ...]]:
    """The paths of what may be the activation, beside the layers."""
    found = []
    for path in dict.fromkeys(path[:-1] for path in chain):
        holder = _at(module, path)
        for name, value in {**vars(holder), **holder._modules}.items():
            if isinstance(value, nn.Module):
                fits = next(value.parameters(), None) is None and not isinstance(value, nn.Dropout) \
                    and next(value.children(), None) is None
            else:
                fits = callable(value) and "act" in name and not isinstance(value, type)
            if fits:
                found.append((*path, name))
    return found


class _Wrong(Exception):
    """A placeholder was used in another way."""


class _Placeholder(Tensor):
    """A layer's result: it may go through dropout in evaluation, and nowhere else."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        options = options or {}
        training = options.get("training", arguments[2] if len(arguments) > 2 else True)
        if function is nn.functional.dropout and not training:
            return arguments[0] if arguments else options["input"]
        raise _Wrong(str(function))


class _Trace:
    """A run with placeholders: which of the three parts were called, in order."""

    def __init__(self):
        self.calls: list[int] = []
        self.given = [torch.zeros(0).as_subclass(_Placeholder) for _ in range(2)]
        self.shape: torch.Size | None = None


class _Part(nn.Module):
    """Stands in for part `at` of first layer, activation and second layer: takes what the part before
    gave, and gives a placeholder, the last one numbers."""

    def __init__(self, trace: _Trace, at: int):
        super().__init__()
        self.trace, self.at = trace, at

    def forward(self, x: Tensor) -> Tensor:
        self.trace.calls.append(self.at)
        if self.at == 0:
            self.trace.shape = x.shape
        elif x is not self.trace.given[self.at - 1]:
            raise _Wrong("another input")
        return Numbers(1)(*self.trace.shape) if self.at == 2 else self.trace.given[self.at]


class _Other(nn.Module):
    """Stands in for attention: gives hidden states and others beside them."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def forward(self, *arguments, **options):
        x = arguments[0] if arguments else next(v for v in options.values() if torch.is_tensor(v))
        y = x * 0.5
        return y if self.count == 1 else (y, *[None] * (self.count - 1))


def _chain_of(module: nn.Module, first: tuple[str, ...], second: tuple[str, ...], known: dict) -> _Chain | None:
    for act in _activations(module, (first, second)):
        for count in (2, 1, 3):
            if _is_chain(module, (first, act, second), count):
                return _Chain(first, act, second, activation_name(_at(module, act), known), count)
    return None


def _others(module: nn.Module, paths: tuple[tuple[str, ...], ...], count: int) -> dict[str, nn.Module]:
    """Stand-ins of the parts with weights that hold none of these layers."""
    heads = {path[0] for path in paths}
    return {name: _Other(count) for name, child in module._modules.items()
            if child is not None and name not in heads and any(p.dim() > 1 for p in child.parameters())}


def _is_chain(module: nn.Module, paths: tuple[tuple[str, ...], ...], count: int) -> bool:
    trace = _Trace()
    parts = [_Part(trace, at) for at in range(3)]
    own = stand_in(module, parts={**_others(module, paths, count), **{path[0]: part for path, part in zip(paths, parts)
                                               if len(path) == 1 and path[0] in module._modules}})
    for path, part in zip(paths, parts):
        holder = _at(own, path[:-1])
        (holder._modules if path[-1] in holder._modules else vars(holder))[path[-1]] = part
    state = {m: dict(vars(m)) for m in own.modules() if not isinstance(m, (_Part, _Other))}
    x = Numbers(0)(2, 3, _at(module, paths[0]).in_features)
    try:
        with torch.no_grad():
            type(own).forward(own, *[x] * min(required_arguments(own), 2))
    except Exception:  # it is no chain, or needs what is not given here
        return False
    # A forward that stores something would store it in the view.
    return trace.calls == [0, 1, 2] and all(vars(m) == before for m, before in state.items())


# what runs

def _runs(module: nn.Module, layers: list) -> bool:
    first, act, second = layers
    return (not module.training and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
            and type(first) is nn.Linear and type(second) is nn.Linear
            and first.weight.dtype == second.weight.dtype and has_fast_products(first.weight)
            and are_plain(first.weight, second.weight)
            and (first.bias is None or second.bias is not None)
            and not watched(*(part for part in layers if isinstance(part, nn.Module)))
            and not torch.is_autocast_enabled(first.weight.device.type))


@undoable
def _inline_forward(self, *arguments, **options):
    """Compilers fuse bias and activation with the products themselves."""
    chain, state = self._fftune
    first, act, second = layers = [_at(self, path) for path in chain.paths]
    if not _runs(self, layers) or not has_settings(self) or state_of(act) != state:
        return original(self, *arguments, **options)

    results: list[Tensor] = []

    def mlp(x: Tensor) -> Tensor:
        if x.dtype != first.weight.dtype:
            return first(x)
        results.append(plain_mlp((first, second), x, chain.name))
        return results[-1]

    def unless_done(part):
        return lambda x: x if any(x is y for y in results) else part(x)

    view = view_of(self, dict(zip(chain.paths, (mlp, unless_done(act), unless_done(second)))))
    return type(self).forward(view, *arguments, **options)

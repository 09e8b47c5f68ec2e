"""How an op of the library becomes a custom op of PyTorch: its kernels, fake kernels, gradients and
rules of autocast. fftune.ops and what it is made of use it."""
import functools
import hashlib
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Mapping, Sequence

import torch
import torch.compiler.config
from torch import Tensor

from . import _built, _versions, reference  # noqa: F401: generated files are there
from ._checks import Kind, check_tensors, expect_one_device, explain, explain_rest
from ._library import Error
from ._versions import (TorchDispatchMode, any_requires_grad as _any_requires_grad, below_autograd,
                        functorch_level as _functorch_level, in_forward_mode)

_library = torch.library.Library("fftune", "DEF")
fftune_ops = torch.ops.fftune
_DISABLED = os.environ.get("FFTUNE_DISABLE", "0") not in ("", "0")


def is_disabled() -> bool:
    """Whether FFTUNE_DISABLE=1 makes every op run its PyTorch reference."""
    return _DISABLED


def _digest() -> str:
    folder = Path(__file__).parent
    files = *(folder / f"_{name}.py" for name in ("custom", "declare", "derived_form",
                                                  "description", "generated_ops")), *sorted(folder.glob("_ops/*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


# The keys of PyTorch's caches of compiled graphs hold the ops' names, not what their gradients do.
torch.compiler.config.cache_key_tag += f" fftune {_digest()[:16]}"


@dataclass(eq=False)
class Op:
    """torch.ops.fftune.<name>, and what call() runs in its place."""

    overload: _versions.OpOverload
    kernel: Callable
    label: str  # the op of the library, as errors call it
    kinds: Mapping[str, Kind]  # of its tensors by name
    casts: bool  # whether autocast casts its tensors
    types: tuple[frozenset[type], ...]  # of arguments that the kernel takes without the dispatcher
    writes: bool  # to an argument
    # Where tensors are, for types of arguments that were seen and may be.
    places: dict[tuple[type, ...], tuple[int, ...]] = field(default_factory=dict)
    function: type | None = None  # its gradient
    derived: Callable | None = None  # for the dispatcher, the op with it

    @property
    def name(self) -> str:
        return self.overload._opname


class _Ops:
    """Every Op under its name."""


OPS = _Ops()
_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
# Python's types that the dispatcher takes for the types of a schema.
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_TYPES = {"Tensor": _TENSORS, "str": frozenset((str,)), "bool": frozenset((bool,)),
          "int": frozenset((int,)), "float": frozenset((float, int))}


def _types_of(words: str) -> frozenset[type]:
    if words.startswith("Optional["):
        return _types_of(words[len("Optional["):-1]) | {type(None)}
    return frozenset((list,)) if words.startswith("List[") else _TYPES[words]


def define(schema: str, label: str, kinds: Mapping[str, Kind], *, casts: bool = False,
           keeps: tuple[int, ...] = (), rows: tuple[int, ...] = ()):
    """Defines torch.ops.fftune.<name>, run by the decorated function on the CPU and CUDA, or with
    FFTUNE_DISABLE=1 by the function of that name in fftune.reference. `label` is the op of the
    library as errors call it, and `kinds` has those of its tensors by name. `casts`: under autocast its
    tensors of floating point take the type of autocast, but those at the places `keeps`. Those at
    the places `rows` have any leading dimensions, which all results begin with."""
    def decorate(kernel):
        name = schema.split("(", 1)[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        overload = getattr(fftune_ops, name).default
        implementation = _by_reference(name) if _DISABLED else kernel
        declared = overload._schema.arguments
        written = tuple(i for i, argument in enumerate(declared)
                        if argument.alias_info is not None and argument.alias_info.is_write)
        if written:
            implementation = _with_versions(implementation, written)
        op = Op(overload, implementation, label, kinds, casts, tuple(_types_of(str(a.type)) for a in declared),
                bool(written))
        setattr(OPS, name, op)
        for backend in ("CPU", "CUDA"):
            _library.impl(name, implementation, backend)
        _library.impl(name, functools.partial(_autograd, op), "Autograd")
        if casts:
            for device, key in _AUTOCAST_KEYS.items():
                _library.impl(name, _autocast(name, device, key, keeps), key)
        torch.library.register_vmap(f"fftune::{name}", _vmap_rule(op, frozenset(rows)), lib=_library)
        return kernel
    return decorate


def _vmap_rule(op: Op, of_rows: frozenset[int]) -> Callable:
    """How the op runs on tensors with one more dimension, each at a place of its own (None for a
    tensor without): at once where that is one more of the rows', else one call after the other."""
    def rule(info, places, *arguments):
        if op.writes:
            raise Error(f"{op.name}: it writes to its arguments, for which vmap has no rule: call "
                        "it once with all rows")
        batched = [i for i, place in enumerate(places) if _is_batched(place)]
        if of_rows.issuperset(batched) and of_rows:
            folded = list(arguments)
            for i in of_rows:
                if isinstance(folded[i], Tensor):
                    folded[i] = (folded[i].movedim(places[i], 0) if i in batched else
                                 folded[i].expand(info.batch_size, *folded[i].shape))
            results = op.overload(*folded)
            if not isinstance(results, Tensor):  # those that are not there have no rows
                results = type(results)(r if r.shape[:1] == (info.batch_size,) else
                                        r.expand(info.batch_size, *r.shape) for r in results)
        else:
            # A batch of none has the shapes of one of zeros.
            each = [op.overload(*(_taken(a, place, at) for a, place in zip(arguments, places)))
                    for at in range(max(info.batch_size, 1))]
            stacked = lambda samples: torch.stack(samples)[:info.batch_size]
            results = (stacked(each) if isinstance(each[0], Tensor) else
                       type(each[0])(map(stacked, zip(*each))))
        return results, 0 if isinstance(results, Tensor) else type(results)([0] * len(results))
    return rule


def _is_batched(place) -> bool:
    return any(map(_is_batched, place)) if isinstance(place, (list, tuple)) else place is not None


def _taken(argument, place, at: int):
    if isinstance(argument, (list, tuple)) and isinstance(place, (list, tuple)):
        return [_taken(a, p, at) for a, p in zip(argument, place)]
    if place is None or argument.shape[place]:
        return argument if place is None else argument.select(place, at)
    return argument.new_zeros(argument.movedim(place, 0).shape[1:])


def _by_reference(name: str):
    function = getattr(reference, name, None)

    def implementation(*arguments):
        if function is None:
            raise Error(f"{name}: it has no PyTorch reference: unset FFTUNE_DISABLE")
        result = function(*arguments)
        # An op's results are tensors of their own, contiguous ones.
        own = lambda t: t.clone(memory_format=torch.contiguous_format)
        if isinstance(result, tuple):
            return tuple(map(own, result))
        return None if result is None else own(result)
    return implementation


class References(TorchDispatchMode):
    """Within it every op runs its PyTorch reference, in any floating-point type."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == _library.ns:
            function = _by_reference(function._opname)
        return function(*arguments, **options or {})


def _with_versions(kernel: Callable, written: tuple[int, ...]) -> Callable:
    """The kernel, which also counts what it writes in place: otherwise gradients would be computed
    from changed values without a word. Neither the dispatcher nor call() does it for an op of a
    torch.library.Library."""
    def implementation(*arguments):
        result = kernel(*arguments)
        for i in written:
            given = arguments[i]
            for tensor in given if isinstance(given, (list, tuple)) else (given,):
                if tensor is not None and not tensor.is_inference():
                    _increment_version(tensor)
        return result
    return implementation


_increment_version = torch.autograd.graph.increment_version


def _autocast(name: str, device: str, key: str, keeps: tuple[int, ...]):
    below = _versions.DispatchKeySet(getattr(_versions.DispatchKey, key))

    def implementation(*arguments):
        dtype = torch.get_autocast_dtype(device)
        cast = [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() and i not in keeps
                else a for i, a in enumerate(arguments)]
        with _versions.without_keys(below):
            return getattr(fftune_ops, name).default(*cast)
    return implementation


def fake(name: str):
    """Registers the decorated function as the op's fake kernel. The dispatcher takes it where any
    tensor is on meta: of the others it would make memory that nobody writes."""
    def decorate(kernel):
        op = getattr(OPS, name)

        def implementation(*arguments):
            _check_fakes(op, arguments)
            return kernel(*arguments)
        torch.library.register_fake(f"fftune::{name}", implementation, lib=_library)
        return kernel
    return decorate


def _check_fakes(op: Op, arguments: Sequence) -> None:
    """Checks that need no sizes, which may be symbols."""
    named = [(a.name, t) for a, given in zip(op.overload._schema.arguments, arguments)
             for t in (given if isinstance(given, (list, tuple)) else (given,))
             if isinstance(t, Tensor)]
    expect_one_device(op.label, [t for _, t in named])
    if not _DISABLED:  # references take more types
        check_tensors(op.label, op.kinds, named)


class _Function(_versions.SingleLevelFunction):
    """An autograd.Function for the kernel of a dispatch key. The dispatcher brings transforms of
    torch.func to the kernel one level after the other; autograd.Function's own apply() would begin
    them anew."""

    @classmethod
    def run(cls, *arguments):
        if _functorch_level() is None:
            return cls.apply(*arguments)
        with _versions.enable_single_level_autograd_function():
            return cls.apply(*arguments)


class _NoSecond(torch.autograd.Function):
    """Results of a backward pass that hang on all it was computed from, so that to derive them is
    an error whatever it is done for. PyTorch's once_differentiable is none for autograd.grad, which
    does not run what leads to none of its inputs. Backward passes run outside of the dispatcher:
    this is a Function of all levels of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name, count, *results_and_sources):
        return tuple(t.view_as(t) for t in results_and_sources[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx, *gradients):
        name = re.sub("_(gradients|frozen|rows|slice)", "", ctx.name)  # as the user calls it
        raise Error(f"{name}: its gradient has no gradient itself: leave out create_graph, or "
                    "use PyTorch's own ops here")


def _without_gradients(name: str, results: tuple, sources: tuple) -> tuple:
    given = [t for t in results if t is not None]
    there = iter(_NoSecond.apply(name, len(given), *given, *[t for t in sources if t is not None]))
    return tuple(None if t is None else next(there) for t in results)



def _refuse_tangents(name: str, arguments: Sequence) -> None:
    """The ops have no rules of forward mode: their results would be without tangents."""
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            _refuse_tangents(name, argument)
        elif isinstance(argument, Tensor) and torch.autograd.forward_ad.unpack_dual(argument).tangent is not None:
            raise Error(f"{name}: no derivative in forward mode: use the backward pass, or "
                        "PyTorch's own ops here")


def gradient(name: str, setup: Callable, *, twice: bool = False):
    """Gives the op the decorated backward(ctx, *gradients), after setup(ctx, inputs, output). The
    equivalent of torch.library.register_autograd, in a third of the host's time if no gradient is
    requested. With `twice` and create_graph the backward pass consists of differentiable
    operations."""
    def decorate(backward):
        own = getattr(OPS, name)
        op = own.overload

        def forward(ctx, *inputs):
            if _is_plain(inputs, own):
                output = own.kernel(*inputs)
            else:
                # An outer level of torch.func derives what this one computes.
                outer = _functorch_level() is not None
                with torch.set_grad_enabled(outer), below_autograd():
                    output = op(*inputs)
            setup(ctx, inputs, output)
            return output

        def once(ctx, *gradients):
            if not _is_grad_enabled():
                return backward(ctx, *gradients)
            with torch.no_grad():
                results = backward(ctx, *gradients)
            return _without_gradients(name, results, (*gradients, *ctx.saved_tensors))

        function = type(f"{name}_function", (_Function,),
                        {"forward": staticmethod(forward),
                         "backward": staticmethod(backward if twice else once)})
        own.function = function

        def implementation(*inputs):
            if in_forward_mode():
                _refuse_tangents(name, inputs)
            if torch.is_grad_enabled() and _any_requires_grad(*inputs):
                return function.run(*inputs)
            with below_autograd():
                return op(*inputs)

        own.derived = implementation
        return backward
    return decorate


class _Underived(_Function):
    """An op without a gradient: its results want one where an argument does, and to derive them is an
    error. PyTorch would leave the gradient out with a warning."""

    @staticmethod
    def forward(ctx, op, arguments, *sources):
        ctx.label = op.label
        if _dispatch_modes():
            ctx.save_for_backward(*sources)
        with below_autograd():
            results = op.overload(*arguments)
        each = (results,) if isinstance(results, Tensor) else results
        ctx.mark_non_differentiable(*[t for t in each if not t.is_floating_point()])
        return results if isinstance(results, Tensor) else tuple(results)

    @staticmethod
    def backward(ctx, *gradients):
        # A compiler derives what may never be asked for: the error is in the backward graph that it
        # makes, where it is behind the gradients.
        given = [g for g in gradients if g is not None]
        if _dispatch_modes() and given:
            return None, None, *(fftune_ops.no_gradient(given[0], t, ctx.label) if wanted else None
                                 for t, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad[2:]))
        _no_gradient(None, None, ctx.label)


def _no_gradient(gradient: Tensor | None, source: Tensor | None, label: str):
    raise Error(f"{label}: it has no gradient: use torch.no_grad(), or PyTorch's own ops here")


_library.define("no_gradient(Tensor gradient, Tensor source, str label) -> Tensor")
_library.impl("no_gradient", _no_gradient, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fftune::no_gradient", lambda gradient, source, label: torch.empty_like(source), lib=_library)


def _autograd(op: Op, *arguments):
    """The op for the dispatcher where tensors may want gradients."""
    return (op.derived or functools.partial(_underived, op))(*arguments)


def _underived(op: Op, *arguments):
    tensors = [t for a in arguments for t in (a if isinstance(a, (list, tuple)) else (a,))
               if isinstance(t, Tensor)]
    if not torch.is_grad_enabled() or not _any_requires_grad(*tensors):
        with below_autograd():
            return op.overload(*arguments)
    if op.writes:
        raise Error(f"{op.label}: it writes in place and has no gradient: use torch.no_grad()")
    results = _Underived.run(op, arguments, *tensors)
    return list(results) if op.overload._schema.returns[0].type.kind() == "ListType" else results


def call(op: Op, *arguments):
    """The op; where only its kernel and its gradient would run, those, past the dispatcher, which
    costs a host more than all the rest. Arguments that are left out at the end have their defaults."""
    if _is_compiling():
        return op.overload(*arguments)
    if len(arguments) < len(op.types):
        arguments += tuple(argument.default_value
                           for argument in op.overload._schema.arguments[len(arguments):])
    plain = False
    try:
        if in_forward_mode():
            _refuse_tangents(op.name, arguments)
        wanted = _is_grad_enabled() and _any_requires_grad(*arguments)
        plain = _is_plain(arguments, op)
        if plain:
            if not wanted:
                return op.kernel(*arguments)
            if op.function is not None:
                return op.function.apply(*arguments)
        elif op.writes and any(isinstance(a, Tensor) and a.is_neg() for a in arguments):
            raise Error(f"{op.label}: it writes in place, and a tensor is a view of negated memory: clone it")
        if wanted:
            return op.overload(*arguments)
        with below_autograd():
            return op.overload(*arguments)
    except (Error, torch.OutOfMemoryError):
        raise
    except Exception as error:
        alive = tuple(_unwrap_if_dead(a) if isinstance(a, Tensor) else a for a in arguments)
        if any(a is not b for a, b in zip(alive, arguments)):
            # Tensors that a transform of torch.func left behind, as vjp does for its backward pass.
            return call(op, *alive)
        if type(error).__module__ not in ("builtins", "struct"):
            raise  # such as that by which checkpointing ends a recomputation
        schema = op.overload._schema
        found = explain(op.label, op.kinds, schema, arguments)
        if found is None and plain:  # nobody else's code ran
            found = explain_rest(op.label, schema, arguments, error)
        if found is None:
            raise
        raise found from error


def expect_good(op: Op, *arguments) -> None:
    """Where other ops compute what this one would, with its arguments. These check what autocast made of them."""
    if not (_is_compiling() or _DISABLED or op.casts and _is_cast(arguments[0])):  # references take more types
        found = explain(op.label, op.kinds, op.overload._schema, arguments)
        if found is not None:
            raise found


def _is_plain(arguments: tuple, op: Op) -> bool:
    """That there are plain tensors of the CPU or CUDA and values of the schema's types alone,
    nobody else wants to see calls, and nothing is to be cast. The dispatcher copies a tensor whose
    memory has the values with the other sign, such as the imaginary part of a conjugate."""
    if (_dispatch_modes() or _function_modes() or _functorch_level() is not None
            or _tracing_state() is not None or _profiler_enabled()):
        return False
    kinds = tuple(map(type, arguments))
    places = op.places.get(kinds)
    if places is None:
        if not all(kind in types for kind, types in zip(kinds, op.types, strict=True)):
            return False
        places = op.places[kinds] = tuple(i for i, k in enumerate(kinds) if k in _TENSORS)
    for i in places:
        if not (arguments[i].is_cuda or arguments[i].is_cpu) or arguments[i].is_neg():
            return False
    # After them, as other devices may have no autocast to ask for.
    return not (op.casts and _is_cast(arguments[0]))


def _is_cast(first) -> bool:
    return _is_any_autocast_enabled() and isinstance(first, Tensor) and _is_autocast_enabled(first.device.type)


_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled
_is_any_autocast_enabled = _versions.is_any_autocast_enabled
_dispatch_modes = _versions.dispatch_modes
_function_modes = _versions.function_modes
_unwrap_if_dead = _versions.unwrap_if_dead
_tracing_state = _versions.tracing_state
_profiler_enabled = _versions.profiler_enabled


def save_gates(ctx, tensors, output) -> None:
    """For the backward pass of a gated MLP: tensors, and gate and up where the op wrote them."""
    gate = up = None
    if isinstance(output, tuple):
        _, gate, up = output
        ctx.mark_non_differentiable(gate, up)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, gate, up)


def wants_gradient(*tensors: Tensor | None) -> bool:
    # call() refuses values that are no tensors.
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad
                                           for t in tensors)


def rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # -1 is no size where there are no features

"""How an op of the library becomes a custom op of PyTorch: its kernels, fake kernels, gradients and
rules of autocast. fftune.ops and what it is made of use it."""
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Sequence

import torch
import torch.compiler.config
from torch import Tensor

from . import reference
from ._library import Error, on_two_devices

_library = torch.library.Library("fftune", "DEF")
fftune_ops = torch.ops.fftune
_DISABLED = os.environ.get("FFTUNE_DISABLE", "0") not in ("", "0")


def _digest() -> str:
    folder = Path(__file__).parent
    files = folder / "_custom.py", *sorted(folder.glob("*ops.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


# The keys of PyTorch's caches of compiled graphs hold the ops' names, not what their gradients do.
torch.compiler.config.cache_key_tag += f" fftune {_digest()[:16]}"


@dataclass(eq=False)
class Op:
    """torch.ops.fftune.<name>, and what call() runs in its place."""

    overload: torch._ops.OpOverload
    kernel: Callable
    casts: bool  # whether autocast casts its tensors
    function: type[torch.autograd.Function] | None = None  # its gradient


class _Ops:
    """Every Op under its name."""


OPS = _Ops()
_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def define(schema: str, *, casts: bool = False, keeps: tuple[int, ...] = ()):
    """Defines torch.ops.fftune.<name>, run by the decorated function on the CPU and CUDA, or with
    FFTUNE_DISABLE=1 by the function of that name in fftune.reference. `casts`: under autocast its
    tensors of floating point take the type of autocast, but those at the places `keeps`."""
    def decorate(kernel):
        name = schema.split("(", 1)[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        overload = getattr(fftune_ops, name).default
        implementation = _by_reference(name) if _DISABLED else kernel
        written = tuple(i for i, argument in enumerate(overload._schema.arguments)
                        if argument.alias_info is not None and argument.alias_info.is_write)
        if written:
            implementation = _with_versions(implementation, written)
        setattr(OPS, name, Op(overload, implementation, casts))
        for backend in ("CPU", "CUDA"):
            _library.impl(name, implementation, backend)
        if casts:
            for device, key in _AUTOCAST_KEYS.items():
                _library.impl(name, _autocast(name, device, key, keeps), key)
        return kernel
    return decorate


def _by_reference(name: str):
    function = getattr(reference, name)

    def implementation(*arguments):
        result = function(*arguments)
        # An op's results are tensors of their own, contiguous ones.
        own = lambda t: t.clone(memory_format=torch.contiguous_format)
        return tuple(map(own, result)) if isinstance(result, tuple) else own(result)
    return implementation


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
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def implementation(*arguments):
        dtype = torch.get_autocast_dtype(device)
        cast = [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() and i not in keeps
                else a for i, a in enumerate(arguments)]
        with torch._C._ExcludeDispatchKeyGuard(below):
            return getattr(fftune_ops, name).default(*cast)
    return implementation


def fake(name: str):
    """Registers the decorated function as the op's fake kernel. The dispatcher takes it where any
    tensor is on meta: of the others it would make memory that nobody writes."""
    def decorate(kernel):
        def implementation(*arguments):
            _expect_one_device(name, arguments)
            return kernel(*arguments)
        torch.library.register_fake(f"fftune::{name}", implementation, lib=_library)
        return kernel
    return decorate


def _expect_one_device(name: str, arguments: Sequence) -> None:
    devices = list(dict.fromkeys(
        t.device for a in arguments for t in (a if isinstance(a, (list, tuple)) else (a,))
        if isinstance(t, Tensor)))
    if len(devices) > 1:
        raise on_two_devices(name, *devices[:2])


def _any_tensor_wants_gradient(*inputs) -> bool:
    return any(isinstance(a, Tensor) and a.requires_grad for a in inputs)


# PyTorch's own, which is faster, is in 2.7 and newer.
_any_requires_grad = getattr(torch._C, "_any_requires_grad", _any_tensor_wants_gradient)


class _NoSecond(torch.autograd.Function):
    """Results of a backward pass that hang on all it was computed from, so that to derive them is
    an error whatever it is done for. PyTorch's once_differentiable is none for autograd.grad, which
    does not run what leads to none of its inputs."""

    @staticmethod
    def forward(ctx, name, results, *sources):
        ctx.name = name
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients):
        raise Error(f"{ctx.name}: its gradient has no gradient itself: leave out create_graph, or "
                    "use PyTorch's own ops here")


def _without_gradients(name: str, results: tuple, sources: tuple) -> tuple:
    there = _NoSecond.apply(name, [t for t in results if t is not None],
                            *[t for t in sources if t is not None])
    there = iter(there)
    return tuple(None if t is None else next(there) for t in results)


_forward_ad = torch.autograd.forward_ad


def _refuse_tangents(name: str, arguments: Sequence) -> None:
    """The ops have no rules of forward mode: their results would be without tangents."""
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            _refuse_tangents(name, argument)
        elif isinstance(argument, Tensor) and _forward_ad.unpack_dual(argument).tangent is not None:
            raise Error(f"{name}: no derivative in forward mode: use the backward pass, or "
                        "PyTorch's own ops here")


def gradient(name: str, setup: Callable, *, twice: bool = False):
    """Gives the op the decorated backward(ctx, *gradients), after setup(ctx, inputs, output). The
    equivalent of torch.library.register_autograd, in a third of the host's time if no gradient is
    requested. With `twice` and create_graph the backward pass consists of differentiable
    operations."""
    def decorate(backward):
        own = getattr(OPS, name)
        op, kernel, casts = own.overload, own.kernel, own.casts

        def forward(ctx, *inputs):
            if _is_plain(inputs, casts):
                output = kernel(*inputs)
            else:
                with torch._C._AutoDispatchBelowAutograd():
                    output = op(*inputs)
            setup(ctx, inputs, output)
            return output

        def once(ctx, *gradients):
            if not _is_grad_enabled():
                return backward(ctx, *gradients)
            with torch.no_grad():
                results = backward(ctx, *gradients)
            return _without_gradients(name, results, (*gradients, *ctx.saved_tensors))

        function = type(f"{name}_function", (torch.autograd.Function,),
                        {"forward": staticmethod(forward),
                         "backward": staticmethod(backward if twice else once)})
        own.function = function

        def implementation(*inputs):
            if _forward_ad._current_level >= 0:
                _refuse_tangents(name, inputs)
            if torch._C.is_grad_enabled() and _any_requires_grad(*inputs):
                return function.apply(*inputs)
            with torch._C._AutoDispatchBelowAutograd():
                return op(*inputs)

        _library.impl(name, implementation, "Autograd")
        return backward
    return decorate


def expect(op: str, name: str, tensor: Tensor | None, shape: tuple[int, ...],
           dtype: torch.dtype | None = None) -> None:
    """That a tensor has this shape and type: the library sees addresses alone."""
    if tensor is None:
        return
    if tuple(tensor.shape) != tuple(shape):
        raise Error(f"{op}: {name} is {list(tensor.shape)}, not {list(shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise Error(f"{op}: {name} is {tensor.dtype}, not {dtype}")


def expect_dims(op: str, name: str, tensor: Tensor, shape: str) -> None:
    """That a tensor has the dimensions of this shape in words; "..." is any, also none."""
    words = shape.strip("[]").split(", ")
    least = len(words) - ("..." in words)
    if tensor.dim() < least or tensor.dim() > least and "..." not in words:
        raise Error(f"{op}: {name} is {list(tensor.shape)}: give {shape}")


def expect_given(op: str, **arguments) -> None:
    """That none is None, which the library would take for its own default."""
    for name, value in arguments.items():
        if value is None:
            raise Error(f"{op}: {name} is None: give a value")


def int32(op: str, name: str, tensor: Tensor | None) -> Tensor | None:
    """Ids, places or lengths as the kernels take them. A cast would make some of anything."""
    if tensor is None or tensor.dtype is torch.int32:
        return tensor
    if tensor.dtype not in _INTEGERS:
        raise Error(f"{op}: {name} are {tensor.dtype}: give int32 or int64")
    return tensor.to(torch.int32)


_INTEGERS = frozenset((torch.int64, torch.int16, torch.int8, torch.uint8))


def float32(op: str, name: str, tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.dtype is torch.float32:
        return tensor
    if tensor.is_complex():
        raise Error(f"{op}: {name} is {tensor.dtype}: give a floating type")
    return tensor.float()


def empty(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    # In two thirds of torch.empty's time.
    return x.new_empty(shape) if dtype is None else x.new_empty(shape, dtype=dtype)


def yes(tensor: Tensor | None) -> str | None:
    return None if tensor is None else "yes"


def call(op: Op, *arguments):
    """The op; where only its kernel and its gradient would run, those, past the dispatcher, which
    costs a host more than all the rest."""
    if _is_compiling():
        return op.overload(*arguments)
    if _forward_ad._current_level >= 0:
        _refuse_tangents(op.overload._opname, arguments)
    wanted = _is_grad_enabled() and _any_requires_grad(*arguments)
    if _is_plain(arguments, op.casts):
        if not wanted:
            return op.kernel(*arguments)
        if op.function is not None:
            return op.function.apply(*arguments)
    if wanted:
        return op.overload(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return op.overload(*arguments)


def _is_plain(arguments: tuple, casts: bool) -> bool:
    """That there are plain tensors of the CPU or CUDA alone, nobody else wants to see calls, and
    nothing is to be cast."""
    if (_dispatch_modes() or _function_modes() or _functorch_level() is not None
            or _tracing_state() is not None or _profiler_enabled()):
        return False
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor or kind is _Parameter:
            if not (argument.is_cuda or argument.is_cpu):
                return False
        elif kind not in _NO_TENSORS:
            return False
    # After them, as other devices may have no autocast to ask for.
    return not (casts and _is_autocast_enabled(arguments[0].device.type))


_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled
_Parameter = torch.nn.Parameter
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state
_profiler_enabled = torch.autograd._profiler_enabled
_NO_TENSORS = frozenset((float, int, str, bool, list, type(None)))


def save_gates(ctx, tensors, output) -> None:
    """For the backward pass of a gated MLP: tensors, and gate and up where the op wrote them."""
    gate = up = None
    if isinstance(output, tuple):
        _, gate, up = output
        ctx.mark_non_differentiable(gate, up)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, gate, up)


def wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])

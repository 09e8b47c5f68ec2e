"""How patch() recognises a module, and how it replaces the forward of an instance.

A module is recognised by what a stand-in of it computes: a copy with random weights and without hooks,
so that nothing of the user's model runs, and its weights may be zeros or on "meta". `identify` compares
the stand-in with every computation that is known, fftune's and others. One is accepted only where random
inputs told it from all others, and where both are made of the same operations: analytic.py says why they
then agree for inputs that were not tried.
"""
import ctypes
import functools
import inspect
import logging
import math
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import reference
from .._versions import (Dropout, collects_outputs, has_global_hooks, in_forward_mode, is_traceable_wrapper_subclass,
                         is_transformed)
from .analytic import Trace

_CPU_TYPES = (torch.float32, torch.bfloat16)
CUDA_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_TYPES = {"cpu": _CPU_TYPES, "cuda": CUDA_TYPES}


_log = logging.getLogger("fftune")


class Unfit(Exception):
    """Why a module is left alone."""


class Uncertain(Unfit):
    """It agrees where it was tried, and may not elsewhere."""


@dataclass(frozen=True)
class Options:
    """The options of patch()."""

    recompute: bool
    projections: bool | str
    attention: bool
    norms_again: bool = False  # computed again in the backward pass


def reason_of(error: Exception) -> str:
    """A sentence for the report. The error of a module that does not run as it is tried is logged."""
    if isinstance(error, Unfit):
        return str(error)
    _log.debug("patch: a module could not be tried", exc_info=error)
    return "it does not run as such modules do, on random numbers and with stand-ins for its parts"


@contextmanager
def trying(reason: str):
    """Whatever a module raises where it is tried is that reason to leave it alone."""
    try:
        yield
    except Unfit:
        raise
    except Exception as error:
        _log.debug("patch: %s", reason, exc_info=error)
        raise Unfit(reason) from error


def _parts(module: nn.Module) -> list[tuple[str, object]]:
    """Its children, and functions in the place of an activation."""
    return [*module._modules.items(), *((name, value) for name, value in vars(module).items()
                                        if name.startswith("act") and isinstance(
                                            value, (types.FunctionType, types.BuiltinFunctionType)))]


@dataclass(frozen=True)
class CodedLayer:
    """Sizes of a linear layer with codes that was replaced, and the type in which the model computes."""

    n: int
    k: int
    dtype: torch.dtype


def set_forward(module: nn.Module, forward, settings: tuple) -> None:
    """`forward` becomes a method of this instance, of a stand-in say; its settings are module._fftune. Modules of
    users are given it by replace_forward() (trial.py)."""
    module._fftune = settings
    module.__dict__["_fftune_parts"] = tuple((name, type(part)) for name, part in _parts(module))
    module.__dict__["_fftune_settings"] = _settings_of(module)
    module.__dict__["forward"] = method_of(module, forward)


def take_back(module: nn.Module) -> None:
    """Takes back what set_forward() did."""
    if hasattr(module.__dict__.get("forward"), "_fftune"):
        del module.forward
    for name in ("_fftune", "_fftune_parts", "_fftune_settings"):
        module.__dict__.pop(name, None)


# They choose nothing, or are looked at in each call.
_NO_SETTINGS = {"training", "gradient_checkpointing", "layer_idx", "layer_id"}
SETTINGS = (bool, int, float, str, type(None), types.FunctionType, types.BuiltinFunctionType)


def _settings_of(module: nn.Module) -> tuple[tuple[str, frozenset], ...]:
    """Numbers, words and functions of the module itself and of its activation, by which a forward may choose."""
    return tuple((name, state_of(part)) for name, part in (("", module), *module._modules.items())
                 if part is module or part is not None and name.startswith("act"))


def state_of(part) -> frozenset | Callable:
    """The settings of a module, or the function that is in its place."""
    if not isinstance(part, nn.Module):
        return part
    return frozenset((name, value) for name, value in vars(part).items()
                     if isinstance(value, SETTINGS) and name[0] != "_" and name not in _NO_SETTINGS
                     and "dropout" not in name)


def holds(module: nn.Module, settings: frozenset) -> bool:
    """Whether a module still has these settings."""
    own = module.__dict__
    if torch.compiler.is_compiling():
        return all(own.get(name) == value for name, value in settings)
    return settings <= own.items()  # in a fifth of the time


def has_settings(module: nn.Module) -> bool:
    """Whether a replaced module still has the settings with which it was recognised."""
    return all(holds(module._modules[name] if name else module, settings)
               for name, settings in module.__dict__.get("_fftune_settings", ()))


def method_of(module: nn.Module, forward: types.FunctionType) -> types.MethodType:
    """`forward` as a method that has the signature of the class's forward: generate(), Trainer and
    others choose a call's arguments by it."""
    forward = getattr(forward, "_fftune_forward", forward)
    # A copy of the function, as another call in between would take time.
    function = types.FunctionType(forward.__code__, forward.__globals__, forward.__name__,
                                  forward.__defaults__, forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    function.__signature__ = inspect.signature(type(module).forward)
    function._fftune_forward = forward
    return types.MethodType(undoable(function), module)


def undoable(function):
    """Marks what unpatch() takes back; seen through bound methods too."""
    function._fftune = True
    return function


def is_patched(module: nn.Module | None, forward) -> bool:
    function = getattr(getattr(module, "__dict__", {}).get("forward"), "__func__", None)
    return getattr(function, "_fftune_forward", None) is forward


def original(module: nn.Module, *arguments, **options):
    return type(module).forward(module, *arguments, **options)


def has_kernels(x: Tensor) -> bool:
    """Whether ops run on such tensors, and on what autocast makes of them. A model may get another
    type, or go to another device, after patch(). Ops have no derivatives in forward mode."""
    if not (x.is_cuda or x.is_cpu) or in_forward_mode():
        return False
    device = "cuda" if x.is_cuda else "cpu"
    types = _TYPES[device]
    return x.dtype in types and (not torch.is_autocast_enabled(device)
                                 or torch.get_autocast_dtype(device) in types)


def has_fast_products(x: Tensor) -> bool:
    """Whether ops run on such tensors and multiply matrices no slower than PyTorch. Products of float32 have no tensor
    cores on CUDA: fftune's are fallbacks, slower from some hundreds of features on."""
    if not has_kernels(x):
        return False
    dtype = torch.get_autocast_dtype("cuda") if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype
    return not x.is_cuda or dtype != torch.float32 or x.shape[-1] < 256


def address_of(tensor: Tensor) -> int | None:
    """Where it lies in memory; None for a tensor of a transform of torch.func, whose place is another's."""
    return None if is_transformed(tensor) else tensor.data_ptr()


def expect_plain(module: nn.Module) -> None:
    """That its parameters are such as the kernels take, and its forward its class's."""
    expect_plain_parameters(module)
    if "forward" in module.__dict__:
        raise Unfit("its forward was replaced already")


def expect_methods(module: nn.Module, *names: str) -> None:
    """That these methods are its class's: a user's own in their place would not be called."""
    for name in names:
        method = module.__dict__.get(name)
        if method is not None and not hasattr(method, "_fftune"):
            raise Unfit(f"{type(module).__name__} has a {name} of its own, which would not be called")


_STEP_METHODS = ("_sample", "_prefill", "prepare_inputs_for_generation",
                 "_update_model_kwargs_for_generation")


def has_usual_steps(model: nn.Module) -> bool:
    """Whether the steps of generate() are transformers' own. Adapters of prompts and subclasses have others,
    which change what the model is given."""
    methods = (getattr(model, name, None) for name in _STEP_METHODS)
    return all(method is None or (getattr(method, "__module__", None) or "").startswith("transformers.")
               for method in methods)


def expect_plain_parameters(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise Unfit(f"{name} has no values yet: it is on the meta device")
        if type(parameter) is not nn.Parameter:
            raise Unfit(f"{name} is no plain parameter: {type(parameter).__name__}")
        if parameter.dtype not in _TYPES.get(parameter.device.type, ()):
            raise Unfit(f"no kernels for {parameter.dtype} on {parameter.device.type}")


def _is_of_transformers(hook) -> bool:
    """Whether it is one of those that collect hidden states and attentions in calls that ask for it."""
    return getattr(hook, "__module__", "").startswith("transformers.")


def has_hooks(module: nn.Module) -> bool:
    """Whether a user's hooks or a forward of a user's own have to be called."""
    forward = module.__dict__.get("forward")
    return bool(forward is not None and not hasattr(forward, "_fftune")
                or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
                or any(not _is_of_transformers(hook) for hook in module._forward_hooks.values()))


def expect_no_hooks(*modules: nn.Module) -> None:
    for module in modules:
        if has_hooks(module):
            raise Unfit(f"{type(module).__name__} has hooks, which would not be called")


def _collects(modules) -> bool:
    """Whether this call of a model collects what its modules give, by hooks of transformers."""
    return any(module._forward_hooks for module in modules) and collects_outputs()


def watched(*modules: nn.Module) -> bool:
    """Whether somebody has to be told of their calls, or replaced their forward after patch()."""
    return has_global_hooks() or any(map(has_hooks, modules)) or _collects(modules)


def parts_watched(module: nn.Module, but: str | None = None) -> bool:
    """Whether one of the parts that an op computes in its place is watched, or was exchanged since by one
    of another class, or has other settings; `but` that of a name, which is called."""
    called = getattr(module, but) if but else None
    if not has_settings(module):
        return True
    return watched(*(part for part in list(module.modules())[1:] if part is not called)) or any(
        type(getattr(module, name, None)) is not kind
        for name, kind in module.__dict__.get("_fftune_parts", ()) if name != but)


def view_of(module: nn.Module, parts: dict[tuple[str, ...], object]) -> nn.Module:
    """The module with other parts at these paths; all else is its own."""
    view = object.__new__(type(module))
    view.__dict__.update(module.__dict__)
    view.__dict__.pop("__deepcopy__", None)  # that of the module
    view.__dict__["_modules"] = dict(module._modules)
    forward = module.__dict__.get("forward")
    if getattr(forward, "__self__", None) is module:
        view.__dict__["forward"] = types.MethodType(forward.__func__, view)
    for name in dict.fromkeys(path[0] for path in parts):
        inner = {path[1:]: part for path, part in parts.items() if path[0] == name}
        part = inner[()] if () in inner else view_of(module._modules[name], inner)
        (view._modules if name in view._modules else view.__dict__)[name] = part
    return view


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether kernels can read such weights: no quantised or distributed tensor came in their place."""
    return not any(is_traceable_wrapper_subclass(t) for t in tensors if t is not None)


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Its children: those that an op computes in its place are not called."""
    return [child for child in module._modules.values() if child is not None]


# A prime: the numbers of larger weights repeat, and neither rows nor experts begin with the same ones.
_MOST_DRAWN = 4_194_301


class Numbers:
    """Random tensors one after the other, the same each time for a seed."""

    def __init__(self, seed: int):
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, like: Tensor | None = None) -> Tensor:
        """Normally distributed."""
        numbers = torch.randn(shape, generator=self.generator)
        return numbers if like is None else numbers.to(like.device, like.dtype)

    def fill(self, *modules: nn.Module, buffers: Iterable[str] = ()) -> None:
        """New weights: those of norms and biases about 1, matrices such that their products with
        normally distributed rows are so too. The buffers of these names likewise."""
        for module in modules:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if isinstance(tensor, nn.Parameter) or name.rpartition(".")[2] in buffers:
                    own = self(min(tensor.numel(), _MOST_DRAWN))
                    own = own * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else own * 0.3 + 1
                    with torch.no_grad():
                        if own.numel() == tensor.numel():
                            tensor.copy_(own.view(tensor.shape))
                            continue
                        for part in tensor.view(-1).split(own.numel()):
                            part.copy_(own[:part.numel()])


# How far rows of probes are from 0, one after the other: activations are told apart far from 0, where
# some are clamped (limits of 7 to 16 in models of today), and what is added for stability near it.
SCALES = (1.0, 8.0, 0.05, 100.0, 1e-3)


def stand_in(module: nn.Module, sizes: dict[int, int] | None = None,
             dtype: torch.dtype | None = torch.float32, device="cpu",
             parts: dict[str, nn.Module] | None = None) -> nn.Module:
    """A module of the same class and settings that computes what this one does, with parameters of
    its own in the place of the user's, which may be on "meta", and without hooks. It is in
    evaluation mode, needs no gradients, and has zeros for parameters: Numbers.fill() gives others.

    `sizes` maps sizes of parameters and buffers to smaller ones, of attributes that hold these numbers too.
    `parts` come in the place of the children of these names, which are then not copied.
    `dtype` and `device` are those of its parameters; with None they keep their types.
    """
    sizes, made = sizes or {}, {}

    def of_tensor(tensor: Tensor, is_parameter: bool) -> Tensor:
        if id(tensor) not in made:
            wide = dtype if dtype and tensor.is_floating_point() else tensor.dtype
            if is_parameter or tensor.is_meta:
                own = torch.zeros([sizes.get(n, n) for n in tensor.shape], dtype=wide, device=device)
            else:
                own = tensor.detach()[tuple(slice(sizes.get(n, n)) for n in tensor.shape)].to(device, wide, copy=True)
            made[id(tensor)] = nn.Parameter(own, requires_grad=False) if is_parameter else own
        return made[id(tensor)]

    def of_value(value):
        if isinstance(value, nn.Module):
            return of_module(value)
        if isinstance(value, Tensor):
            return of_tensor(value, False)
        if type(value) is int:
            return sizes.get(value, value)
        if type(value) in (list, tuple, set):
            return type(value)(map(of_value, value))
        if type(value) is dict:
            return {key: of_value(own) for key, own in value.items()}
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, of_module(value.__self__))
        return value

    def of_module(original: nn.Module, own_parts: dict | None = None) -> nn.Module:
        if id(original) in made:
            return made[id(original)]
        format = (original.__dict__.get("_fftune") or (None,))[0]
        if isinstance(format, CodedLayer):  # a dense one of its sizes
            n, k = (sizes.get(size, size) for size in (format.n, format.k))
            other = made[id(original)] = nn.Linear(k, n, original.bias is not None, device,
                                                   dtype or format.dtype).eval()
            other.requires_grad_(False)
            for parameter in other.parameters():
                parameter.zero_()
            return other
        other = made[id(original)] = original.__class__.__new__(original.__class__)
        nn.Module.__init__(other)
        bare, own_parts = vars(nn.Module()), own_parts or {}
        for name, value in vars(original).items():
            if name not in bare and name not in ("forward", "_fftune", "_fftune_layers", "_fftune_reader",
                                                 "__deepcopy__"):
                other.__dict__[name] = of_value(value)
        other.__dict__["training"] = False
        for name, parameter in original._parameters.items():
            other._parameters[name] = None if parameter is None else of_tensor(parameter, True)
        for name, buffer in original._buffers.items():
            other._buffers[name] = None if buffer is None else of_tensor(buffer, False)
        other._non_persistent_buffers_set = set(original._non_persistent_buffers_set)
        for name, child in original._modules.items():
            other._modules[name] = own_parts.get(name) or (None if child is None
                                                           else of_module(child))
        return other

    return of_module(module, parts)


def is_close(ours: Tensor, theirs: Tensor, tolerance: float | None = None) -> bool:
    """Within some roundings of the type. A module that gives several tensors is close to none."""
    if not isinstance(theirs, Tensor) or ours.shape != theirs.shape:
        return False
    if tolerance is None:
        tolerance = 8 * torch.finfo(theirs.dtype).eps
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).norm() <= tolerance * theirs.norm())


@functools.cache
def _set_own_threads() -> Callable[[int], object] | None:
    """OpenMP's function, which holds for the calling thread: torch.set_num_threads would hold for threads
    too that begin to run PyTorch in the meantime, and they would keep it. None without OpenMP."""
    return getattr(ctypes.CDLL(None), "omp_set_num_threads", None)


@contextmanager
def on_one_thread():
    """For the small products of stand-ins: PyTorch's threads would wait for each other for longer than they
    compute, on a busy host for seconds. Other threads run PyTorch as before."""
    count, set_own_threads = torch.get_num_threads(), _set_own_threads() or (lambda _: None)
    set_own_threads(1)
    try:
        yield
    finally:
        set_own_threads(count)


@dataclass(frozen=True)
class Foreign:
    """Names a computation that is known, but that fftune has no kernel for."""

    name: str
    form: Hashable = None  # of one that has several


def expect_alike(theirs: Callable, ours: Callable, given, *, subject: str, agrees: Callable = is_close,
                 free: Iterable[str] = (), sizes: Iterable[int] = (), where: str = "", reason: str = "") -> None:
    """That theirs(given) and ours(given) agree, and that theirs has no pieces but those of ours. The operations
    `free` are no pieces; comparisons of these `sizes` are."""
    with Trace(free, sizes) as trace:
        right = theirs(given)
    expect_pieces(trace, lambda: ours(given), subject, where)
    if not agrees(ours(given), right):
        raise Unfit(reason or f"{subject} computes something else{where}")


def expect_pieces(theirs: Trace, ours: Callable | None, subject: str, where: str = "") -> None:
    """That it has no pieces but those of ours(), which is run if there are any."""
    known = Trace(theirs.free)
    if theirs.pieces and ours:
        with known:
            ours()
    if piece := theirs.unlike(known):
        raise Uncertain(f"{subject} uses {piece}{where}: it may compute something else for other inputs")


_MANY = (11, 29)  # sequences and tokens: numbers that no module has
_SIZES = (*_MANY, math.prod(_MANY))


def _enlarged(given):
    """The input for other numbers of sequences and tokens: [sequences, ..., tokens, features]."""
    if isinstance(given, tuple):
        return tuple(map(_enlarged, given))
    if not isinstance(given, Tensor) or given.dim() < 2:
        return given
    for dim, size in zip((0, -2), _MANY):
        if dim or given.dim() > 2 and given.shape[0] > 1:
            given = given.index_select(dim, torch.arange(size) % given.shape[dim])
    return given


def cast(given, dtype: torch.dtype):
    if isinstance(given, tuple):
        return tuple(cast(own, dtype) for own in given)
    return given.to(dtype) if isinstance(given, Tensor) and given.is_floating_point() else given


def _about(ours, right) -> bool:
    """Whether results agree but for roundings of a narrow type in several places."""
    if isinstance(right, tuple):
        return isinstance(ours, tuple) and len(ours) == len(right) and all(map(_about, ours, right))
    return not isinstance(right, Tensor) or is_close(ours, right, 16 * torch.finfo(right.dtype).eps)


@contextmanager
def of_type(module: nn.Module, dtype: torch.dtype):
    """The stand-in with tensors of that type."""
    kept = [(t, t.data) for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    for tensor, _ in kept:
        tensor.data = tensor.data.to(dtype)
    try:
        yield
    finally:
        for tensor, own in kept:
            tensor.data = own


@dataclass(frozen=True)
class Elsewhere:
    """A stand-in, which must compute the same in training and in these types."""

    module: nn.Module
    types: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    training: bool = True
    drops: bool = False  # whether drops() is looked at in each call


@contextmanager
def _in_training(elsewhere: Elsewhere):
    """The stand-in in training, with gradients, where it drops nothing if drops() is looked at in each call."""
    kept = [(m, dict(vars(m))) for m in elsewhere.module.modules()]
    for other, _ in kept:
        other.training = not (elsewhere.drops and isinstance(other, Dropout))
        for name in _rates_of(other) if elsewhere.drops else ():
            setattr(other, name, 0.0)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        for other, state in kept:
            other.__dict__.update(state)


def identify(theirs: Callable, known: dict[Hashable, Callable], draw: Callable[[Numbers], object], *,
             subject: str, agrees: Callable = is_close, canonical: Callable = lambda key: key,
             least: int = len(SCALES), most: int = 64, free: Iterable[str] | None = (),
             elsewhere: Elsewhere | None = None, sizes: bool = True, unknown: str = ""):
    """-> the key of the computation in `known` that `theirs` is. Unfit where it is none of them, could
    still be one of two, is a Foreign one, or may be another for inputs that were not tried.

    `draw(numbers)` gives an input, other ones for each `numbers.seed` from 0 on; theirs(input) and
    known[key](input) a result each, which `agrees` compares. Inputs are drawn until every computation
    but one has differed from `theirs`, `least` in all. Keys of computations that are equal for all
    inputs must have the same canonical(key). Then both are traced (analytic.py), unless `free` is None: on the
    last of the inputs; with other numbers of sequences and tokens, if `sizes`; and `elsewhere`. `unknown` is the
    reason where it computes nothing that is known.
    """
    left, untaken = dict(known), f"{subject} does not take what such modules are given"
    with torch.no_grad(), on_one_thread():
        for seed in range(most):
            given, trace = draw(Numbers(seed)), Trace(free or ())
            with trying(untaken), trace if free is not None and seed + 1 >= least else nullcontext():
                right = theirs(given)
            for key, compute in known.items():
                if key in left and not _gives(compute, given, right, agrees):
                    del left[key]
            if not left:
                raise Unfit(unknown or f"{subject} computes nothing that is known")
            if seed + 1 >= least and len({canonical(key) for key in left}) == 1:
                found = next(iter(left))
                if isinstance(found, Foreign):
                    raise Unfit(f"{subject} computes {found.name}, for which there is no kernel")
                if free is None:
                    return found
                expect = functools.partial(expect_alike, theirs, known[found], subject=subject, free=free)
                with trying(untaken):
                    expect_pieces(trace, lambda: known[found](given), subject)
                    trains = elsewhere is not None and elsewhere.training
                    with _in_training(elsewhere) if trains else nullcontext():
                        if sizes or trains:
                            expect(_enlarged(given) if sizes else given, agrees=agrees, sizes=_SIZES,
                                   where=" in training or for many tokens")
                    for dtype in elsewhere.types if elsewhere else ():
                        with of_type(elsewhere.module, dtype):
                            expect(cast(draw(Numbers(0)), dtype), agrees=_about, where=f" in {str(dtype)[6:]}")
                return found
    names = " or ".join(str(getattr(key, "name", key)) for key in list(left)[:2])
    raise Unfit(f"{subject} may compute {names}: nothing tells them apart")


def _gives(compute: Callable, given, right, agrees: Callable) -> bool:
    try:
        return bool(agrees(compute(given), right))
    except (RuntimeError, ValueError, IndexError):  # sizes that it cannot have
        return False


def configured(module: nn.Module, *names: str):
    """The value that the module or its configuration has under the first of these names; None without
    any."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if value is not None:
                return value
    return None


_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def _told(value):
    """A value that differs where two settings of modules differ: plain values, and which object it is."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_told, value))
    if isinstance(value, dict):
        return tuple((key, _told(own)) for key, own in value.items())
    return type(value) if isinstance(value, (nn.Module, Tensor)) else id(value)


def kind_of(module: nn.Module) -> tuple:
    """A key that modules which compute the same have in common: the classes and settings of the module and of
    its parts, by which a forward may choose, and the shapes of their tensors. Not the number of a
    layer."""
    return tuple(
        (part, type(child), tuple((name, _told(value)) for name, value in sorted(vars(child).items())
                                  if not name.startswith("_") and name not in ("training", "layer_idx",
                                                                               "forward")),
         tuple((name, t.shape, t.dtype, t.device.type)
               for name, t in (*child._parameters.items(), *child._buffers.items())
               if t is not None))
        for part, child in module.named_modules())


def remembered(known: dict, key, find):
    """find()'s result or Unfit, found once for all modules of a kind."""
    if key not in known:
        try:
            with on_one_thread():
                known[key] = find()
        except Unfit as reason:
            known[key] = reason
    if isinstance(known[key], Unfit):
        raise Unfit(str(known[key]))
    return known[key]


# Activations that modules have and kernels have not: what is recognised must differ from all of them.
FOREIGN_ACTIVATIONS = {
    "quick-gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu-clipped": lambda x: F.gelu(x).clamp(-10, 10),
    "silu-clipped": lambda x: F.silu(x).clamp(max=10),
    "silu-of-clipped": lambda x: F.silu(x.clamp(max=7)),
    "relu-squared": lambda x: F.relu(x).square(),
    "relu6": F.relu6, "leaky-relu": F.leaky_relu, "elu": F.elu, "selu": F.selu, "mish": F.mish,
    "softplus": F.softplus, "sqrt-softplus": lambda x: F.softplus(x).sqrt(),
    "hardswish": F.hardswish, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "square": torch.square, "negative": torch.neg,
}
RELU_SQUARED = Foreign("relu-squared")
KNOWN_ACTIVATIONS = {**reference.ACTIVATIONS, **{Foreign(name): function for name, function
                                                 in FOREIGN_ACTIVATIONS.items()}}

_NAMES_OF_ACTIVATIONS = {
    "silu": ("silu", "swish"), "relu": ("relu",), "none": ("linear", "identity"),
    "gelu": ("gelu", "gelu_python"),
    "gelu-tanh": ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh")}


def _points(numbers: Numbers) -> Tensor:
    """Dense near 0, and far away: [1, n, 1], as some activations look at the dimensions."""
    near, far = torch.linspace(-8, 8, 2001), torch.linspace(-300, 300, 1201)
    return torch.cat((near, far, numbers(1000) * SCALES[numbers.seed % len(SCALES)])).view(1, -1, 1)


def activation_name(module, known: dict) -> str:
    """The activation of the kernels that the callable computes."""
    kind = kind_of(module) if isinstance(module, nn.Module) else module
    return remembered(known, ("activation", kind), lambda: _activation_name(module))


def _activation_name(module) -> str:
    name = type(module).__name__ if isinstance(module, nn.Module) else \
        getattr(module, "__name__", type(module).__name__)
    own = module
    if isinstance(module, nn.Module):
        if next(module.parameters(), None) is not None:
            raise Unfit(f"the activation {name} has parameters of its own")
        own = stand_in(module)

    def with_points(function):
        return lambda x: (function(x), x)

    def agrees(ours, theirs):
        # Errors of activations are relative to their arguments. A norm over all points would hide the few
        # at which two differ.
        (own, _), (right, x) = ours, theirs
        return own.shape == right.shape and bool(
            ((own - right) / x.abs().clamp(min=1e-6)).abs().max() <= 2e-6)

    try:
        return identify(with_points(own), {key: with_points(f) for key, f in KNOWN_ACTIVATIONS.items()},
                        _points, subject=f"the activation {name}", agrees=agrees,
                        elsewhere=Elsewhere(own) if own is not module else None)
    except Uncertain as reason:
        raise Unfit(f"there is no kernel for {reason}") from None
    except Exception:
        raise Unfit(f"there is no kernel for the activation {name}") from None


def expect_configured_activation(module: nn.Module, act: str) -> None:
    """That the configuration of a module, where it has one, does not name another activation."""
    config = getattr(module, "config", None)
    names = {value for name in ("hidden_act", "hidden_activation", "activation_function")
             if isinstance(value := getattr(config, name, None), str)}
    if names and not names & set(_NAMES_OF_ACTIVATIONS.get(act, names)):
        raise Unfit(f"{type(module).__name__} computes {act}, where its configuration says "
                    f"{' or '.join(sorted(names))}")


def activation_of(module: nn.Module):
    """The attribute that holds it: a module without parameters, or a function, but no dropout."""
    found = [child for name, child in {**vars(module), **module._modules}.items()
             if callable(child) and not isinstance(child, (nn.Linear, nn.Dropout, type))
             and name.startswith("act")]
    if len(found) != 1:
        raise Unfit(f"{type(module).__name__} has no activation of its own")
    return found[0]


def _calls_dropout(function, kind: type, seen: set) -> bool:
    """Whether its code calls the function dropout, or a function of its module or a method that does.
    Functions of attention are given the rate."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or code in seen:
        return False
    seen.add(code)
    if "dropout" in code.co_names and not isinstance(scope.get("dropout"), type):
        return True
    return any(
        isinstance(other, types.FunctionType) and "attention" not in name.lower()
        and (other.__module__ == function.__module__ or name in vars(kind))
        and _calls_dropout(other, kind, seen)
        for name in code.co_names for other in (scope.get(name), vars(kind).get(name)))


def calls_dropout(module: nn.Module) -> tuple[str, ...] | bool:
    """The attributes that hold the rates of dropout that its forward may call; True where the rate is
    no attribute."""
    if isinstance(module._modules.get("dropout"), nn.Module) \
            or not _calls_dropout(type(module).forward, type(module), set()):
        return False
    return _rates_of(module) or True


def _rates_of(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, value in vars(module).items()
                 if "dropout" in name and isinstance(value, (int, float)))


def drops(module: nn.Module, but: str | None = None) -> bool:
    """Whether a dropout of its own is at work, `but` that of a name."""
    if not module.training:
        return False
    rates = module.__dict__.get("_fftune_drops", ())
    return rates is True or any(getattr(module, rate) for rate in rates) or any(
        isinstance(child, Dropout) and child.p > 0 and name != but
        for name, child in module._modules.items())


@dataclass
class PatchReport:
    """The modules that patch() replaced and those that it left alone: (module's name, words)
    each."""

    replaced: list[tuple[str, str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        for title, entries in (("replaced", self.replaced), ("left alone", self.left)):
            for words, count in Counter(words for _, words in entries).items():
                first = next(name for name, other in entries if other == words)
                others = f" and {count - 1} more" if count > 1 else ""
                lines.append(f"{title}: {first or 'the module itself'}{others}: {words}")
        return "\n".join(lines) or "nothing to replace"


def try_to(report: PatchReport, name: str, recognise) -> None:
    try:
        words = recognise()
        if words:
            report.replaced.append((name, words))
    except Exception as error:
        report.left.append((name, reason_of(error)))


def try_all(report: PatchReport, name: str, recognise: Callable) -> None:
    """Likewise of what writes into the report itself."""
    try_to(report, name, lambda: recognise() and None)

"""How patch() recognises a module: by its parts, and by what it computes on a few random rows. And
how it replaces the forward of an instance, so that it can be taken back."""
import inspect
import types
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.fx.experimental.symbolic_shapes
from torch import Tensor, nn

from .. import reference

_CPU_TYPES = (torch.float32, torch.bfloat16)
_CUDA_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_TYPES = {"cpu": _CPU_TYPES, "cuda": _CUDA_TYPES}


def _is_constant(condition) -> bool:
    return isinstance(condition, bool) and condition


# Whether a condition on sizes holds in every call of what is being compiled, without a guard for it.
# PyTorch 2.6 cannot trace its own function: there sizes that may change are not known.
is_known = (_is_constant if torch.__version__.startswith("2.6.")
            else torch.fx.experimental.symbolic_shapes.statically_known_true)


class Unfit(Exception):
    """Why a module is left alone."""


@dataclass(frozen=True)
class Options:
    """What patch() was asked for."""

    recompute: bool
    projections: bool | str
    attention: bool


def reason_of(error: Exception) -> str:
    if isinstance(error, Unfit):
        return str(error)
    # A module that does not run as it is tried here.
    line = (str(error).splitlines() or [""])[0]
    return f"it could not be tried: {type(error).__name__}: {line}"


def replace_forward(module: nn.Module, forward, settings: tuple) -> None:
    """`forward` becomes a method of this instance; its settings are module._fftune."""
    module._fftune = settings
    method = types.MethodType(forward, module)
    module.__dict__["forward"] = method


def undoable(function):
    """Marks what unpatch() takes back; seen through bound methods too."""
    function._fftune = True
    return function


def is_patched(module: nn.Module | None, forward) -> bool:
    method = getattr(module, "__dict__", {}).get("forward")
    return getattr(method, "__func__", None) is forward


def original(module: nn.Module, *arguments, **options):
    return type(module).forward(module, *arguments, **options)


def has_kernels(x: Tensor) -> bool:
    """Whether ops run on such tensors, and on what autocast makes of them. A model may get another
    type, or go to another device, after patch()."""
    if not (x.is_cuda or x.is_cpu):
        return False
    device = "cuda" if x.is_cuda else "cpu"
    types = _TYPES[device]
    return x.dtype in types and (not torch.is_autocast_enabled(device)
                                 or torch.get_autocast_dtype(device) in types)


def expect_plain(module: nn.Module) -> None:
    """That its parameters are such as the kernels take, and its forward its class's."""
    expect_plain_parameters(module)
    if "forward" in module.__dict__:
        raise Unfit("its forward was replaced already")


def expect_plain_parameters(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            raise Unfit(f"{name} is no plain parameter: {type(parameter).__name__}")
        if parameter.dtype not in _TYPES.get(parameter.device.type, ()):
            raise Unfit(f"no kernels for {parameter.dtype} on {parameter.device.type}")


def expect_no_hooks(*modules: nn.Module) -> None:
    for module in modules:
        forward = module.__dict__.get("forward")
        foreign = forward is not None and not hasattr(forward, "_fftune")
        if foreign or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise Unfit(f"{type(module).__name__} has hooks, which would not be called")


def watched(*modules: nn.Module) -> bool:
    """Whether somebody has to be told of their calls, or replaced their forward after patch()."""
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
               or m._backward_pre_hooks
               or "forward" in m.__dict__ and not hasattr(m.__dict__["forward"], "_fftune")
               for m in modules)


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Its children: those that an op computes in its place are not called."""
    return [child for child in module._modules.values() if child is not None]


@contextmanager
def probing(*modules: nn.Module):
    """Inference without dropout."""
    training = [(m, m.training) for module in modules for m in module.modules()]
    for module, _ in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was in training:
            module.training = was


def random_rows(*shape: int, like: Tensor) -> Tensor:
    """Normally distributed, the same each time, without a trace in the global generators."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def far_rows(rows: Tensor, *weights: Tensor) -> Tensor:
    """The rows, larger: their products with weights [n, k] go beyond what activations are clamped to
    (7 to 16 in models of today), where those with a clamp and without one differ."""
    largest = max((rows @ weight.mT).abs().max() for weight in weights)
    if not largest > 0:
        raise Unfit("its weights are zeros, of which nothing can be told: load them before patch()")
    return rows * (100 / largest)


@contextmanager
def standing_in(tensors: dict[Tensor, Tensor]):
    """Tensors have other values for a moment, in other memory."""
    own = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, other in tensors.items():
            tensor.data = other
        yield
    finally:
        for tensor, data in own:
            tensor.data = data


def is_close(ours: Tensor, theirs: Tensor, tolerance: float | None = None) -> bool:
    """Within some roundings of the type."""
    if ours.shape != theirs.shape:
        return False
    if tolerance is None:
        tolerance = 8 * torch.finfo(theirs.dtype).eps
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).norm() <= tolerance * theirs.norm())


def kind_of(module: nn.Module) -> tuple:
    """What modules that compute the same have in common: the class, and the plain values that it
    and its parts hold, by which a forward may choose. Not the number of a layer."""
    return type(module), tuple(
        (part, name, value) for part, child in module.named_modules()
        for name, value in sorted(vars(child).items())
        if isinstance(value, (bool, int, float, str, type(None)))
        and not name.startswith("_") and name not in ("training", "layer_idx"))


def remembered(known: dict, key, find):
    """find()'s result or Unfit, found once for all modules of a kind."""
    if key not in known:
        try:
            known[key] = find()
        except Unfit as reason:
            known[key] = reason
    if isinstance(known[key], Unfit):
        raise Unfit(str(known[key]))
    return known[key]


def activation_name(module) -> str:
    """Of those that the kernels have, the one that the callable computes."""
    x = torch.linspace(-6, 6, 4001)
    try:
        with torch.no_grad():
            y = module(x)
    except Exception:
        y = None
    if isinstance(y, Tensor):
        for name, function in reference.ACTIVATIONS.items():
            if is_close(function(x), y, 2e-6):
                return name
    raise Unfit(f"there is no kernel for the activation {type(module).__name__}")


def activation_of(module: nn.Module):
    """The attribute that holds it: a module without parameters, or a function, but no dropout."""
    found = [child for name, child in {**vars(module), **module._modules}.items()
             if callable(child) and not isinstance(child, (nn.Linear, nn.Dropout, type))
             and name.startswith("act")]
    if len(found) != 1:
        raise Unfit(f"{type(module).__name__} has no activation of its own")
    return found[0]


def calls_dropout(module: nn.Module) -> bool:
    """Whether its forward may call the function dropout, and not with 0 alone."""
    names = getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ())
    if "dropout" not in names or isinstance(module._modules.get("dropout"), nn.Module):
        return False
    rates = [value for name, value in vars(module).items()
             if "dropout" in name and isinstance(value, (int, float))]
    return not rates or any(rates)


def drops(module: nn.Module, but: str | None = None) -> bool:
    """Whether a dropout of its own is at work, `but` that of a name."""
    if not module.training:
        return False
    return hasattr(module, "_fftune_drops") or any(
        isinstance(child, nn.Dropout) and child.p > 0 and name != but
        for name, child in module._modules.items())


@contextmanager
def parts_standing_in(module: nn.Module, **parts: nn.Module):
    kept = {name: module._modules[name] for name in parts}
    module._modules.update(parts)
    try:
        yield
    finally:
        module._modules.update(kept)


@dataclass
class PatchReport:
    """What patch() replaced and what it left alone: (module's name, words) each."""

    replaced: list[tuple[str, str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        for title, entries in (("replaced", self.replaced), ("left alone", self.left)):
            for words, count in Counter(words for _, words in entries).items():
                first = next(name for name, other in entries if other == words)
                others = f" and {count - 1} more" if count > 1 else ""
                lines.append(f"{title}: {first}{others}: {words}")
        return "\n".join(lines) or "nothing to replace"


def try_to(report: PatchReport, name: str, recognise) -> None:
    try:
        words = recognise()
        if words:
            report.replaced.append((name, words))
    except Exception as error:
        report.left.append((name, reason_of(error)))

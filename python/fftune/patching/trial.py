"""Runs a replacement before it is made.

All replacements pass replace_forward(). It runs the new forward on a stand-in of the module that has its own
sizes, types and weights: in evaluation and in training, without gradients, with them and in inference mode. Whatever
is raised is a reason to leave the module alone, and so is a result other than that of the module's own forward.

The module is as before: parameters of the stand-in are views of the module's, its buffers are copies, it has no
hooks, and random numbers go on where they were. Kernels of a GPU would be compiled for modes that nobody uses: there
one token runs in evaluation, and all modes on the CPU with zeros in the place of weights.
"""
import copy
import logging
import math
import types
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .. import _run as running
from .._library import Error
from .._versions import pytree
from .recognise import CodedLayer, Numbers, Unfit, kind_of, original, remembered, set_forward

_log = logging.getLogger("fftune")


@dataclass(frozen=True)
class Trial:
    """How a module is called where it is tried: given(numbers, like) makes the arguments, or those with names, whose
    tensors of floating point get the module's type. `parts` come in the place of children that need more than hidden
    states. `compares` says whether results are compared too: choices between equal scores may differ. `dtype` is that
    of hidden states where the module's tensors do not say it."""

    given: Callable[[Numbers, Tensor], tuple | dict]
    parts: dict[str, nn.Module] = field(default_factory=dict)
    compares: bool = True
    dtype: torch.dtype | None = None


def tokens_of(width: int, like: Tensor) -> tuple[int, int]:
    """Sequences and tokens of a trial: one of a large module, whose weights are read in every mode, and one on a GPU,
    whose kernels for one token are used in any case."""
    return (1, 1) if width >= 1024 or like.is_cuda else (2, 3)


def hidden(width: int, **options) -> Trial:
    """A call with hidden states of so many features."""
    return Trial(lambda numbers, like: (numbers(*tokens_of(width, like), width),), **options)


def replace_forward(module: nn.Module, forward, settings: tuple, trial: Trial, known: dict) -> None:
    """`forward` becomes a method of this instance; its settings are module._fftune. Unfit where it does not run as
    the module's own does."""
    expect_to_run(module, forward, settings, trial, known)
    set_forward(module, forward, settings)


def expect_to_run(module: nn.Module, forward, settings: tuple, trial: Trial, known: dict) -> None:
    remembered(known, ("runs", getattr(forward, "_fftune_forward", forward), kind_of(module)),
               lambda: _expect_to_run(module, forward, settings, trial))


_MODES = [(training, mode) for training in (False, True)
          for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode)]


def _expect_to_run(module: nn.Module, forward, settings: tuple, trial: Trial) -> bool:
    coded = [s for s in (settings, *(m.__dict__.get("_fftune") or () for m in module.modules()))
             for s in s[:1] if isinstance(s, CodedLayer)]
    tensors = [t for t in (*module.parameters(), *module.buffers())]
    dtype = trial.dtype or (coded[0].dtype if coded else next(
        (t.dtype for t in tensors if t.dtype in (torch.float32, torch.bfloat16, torch.float16)), torch.float32))
    device = tensors[0].device if tensors else torch.device("cpu")
    with running.tried() as problems:
        if device.type == "cuda":
            _try(module, forward, settings, trial, device, dtype, _MODES[:1])
        if device.type in ("cpu", "cuda"):
            on_cpu = torch.bfloat16 if device.type == "cuda" and dtype == torch.float16 else dtype
            _try(module, forward, settings, trial, torch.device("cpu"), on_cpu, _MODES)
    slower = [text for text in (running.slower_fallback(*problem) for problem in problems.values()) if text]
    # Under autocast modules of float32 run by the kernels of bf16; without it the op warns.
    if slower and dtype != torch.float32:
        raise Unfit(f"{type(module).__name__}: {slower[0]}")
    return True


def _try(module: nn.Module, forward, settings: tuple, trial: Trial, device: torch.device, dtype: torch.dtype,
         modes: list) -> None:
    subject, right, ran = type(module).__name__, None, False
    with _plain(device):
        for training, mode in modes:
            own = shadow(module, trial.parts, device)
            own.train(training)
            with mode():
                given = trial.given(Numbers(3), torch.empty(0, dtype=dtype, device=device))
                given = pytree.tree_map_only(Tensor, lambda t: _as_input(t, device, dtype), given)
                arguments, options = ((), given) if isinstance(given, dict) else (given, {})
                if right is None:
                    right = _result_of(own, arguments, options)
                set_forward(own, forward, settings)
                try:
                    ours = own.forward(*arguments, **options)
                    if mode is torch.enable_grad:
                        _derive(own, ours, given)
                except Exception as error:
                    # A mode in which the module itself fails is no fault of the replacement.
                    if not isinstance(error, Error) and _result_of(own, arguments, options, given) is None:
                        continue
                    _log.debug("patch: %s", subject, exc_info=error)
                    words = f": {error}" if isinstance(error, Error) else ""
                    raise Unfit(f"{subject} does not run by kernels {_words(training, mode)}{words}") from error
            _expect_same(subject, ours, right, trial.compares and not training, _words(training, mode))
            ran = True
    if not ran:
        raise Unfit(f"{subject} does not run as such modules do, and cannot be tried")


def _result_of(own: nn.Module, arguments: tuple, options: dict, derived=None):
    """The result of the module's own forward, with its backward pass where `derived` has what that is for; None where
    it raises."""
    try:
        result = original(own, *arguments, **options)
        if derived is not None and torch.is_grad_enabled():
            _derive(own, result, derived)
        return pytree.tree_map_only(Tensor, Tensor.detach, result)
    except Exception:
        return None


def _words(training: bool, mode) -> str:
    how = {torch.no_grad: "without gradients", torch.enable_grad: "with gradients",
           torch.inference_mode: "in inference mode"}[mode]
    return f"{'in training' if training else 'in evaluation'} {how}"


@contextmanager
def _plain(device: torch.device):
    """No autocast and no inference mode of the caller; patch() keeps his random numbers."""
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        yield


def _as_input(t: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if not t.is_floating_point() or hasattr(t, "_fftune_rope"):
        return t.to(device)
    return t.to(device, dtype).requires_grad_(torch.is_grad_enabled())


def _derive(own: nn.Module, ours, given) -> None:
    """A backward pass, whose gradients nobody keeps."""
    results = [t for t in pytree.tree_leaves(ours) if isinstance(t, Tensor) and t.requires_grad]
    sources = [t for t in (*pytree.tree_leaves(given), *own.parameters()) if isinstance(t, Tensor) and t.requires_grad]
    if results and sources:
        torch.autograd.grad(results, sources, [torch.ones_like(t) for t in results], allow_unused=True)


def _expect_same(subject: str, ours, right, compares: bool, words: str) -> None:
    ours, right = ([t for t in pytree.tree_leaves(given) if isinstance(t, Tensor)] for given in (ours, right))
    if not right:
        return
    shapes = [[(t.shape, t.is_floating_point() and t.dtype) for t in given] for given in (ours, right)]
    if shapes[0] != shapes[1]:
        raise Unfit(f"{subject} gives results of other shapes or types by kernels {words}")
    if compares and not all(map(_is_near, ours, right)):
        raise Unfit(f"{subject} computes something else by kernels {words}")


def _is_near(ours: Tensor, right: Tensor) -> bool:
    """Within roundings: a large module has more of them than the stand-ins of recognise.py."""
    if not right.is_floating_point():
        return torch.equal(ours.long(), right.long())
    limit = max(1e-3, 16 * torch.finfo(right.dtype).eps)
    ours, right = ours.detach().float(), right.float()
    size = right.norm().item()
    return not math.isfinite(size) or (ours - right).norm().item() <= limit * size


def _is_for_gradients(t: Tensor) -> bool:
    """Whether views of it may be, which those of what inference mode made are not."""
    try:
        return t._version >= 0
    except RuntimeError:
        return False


_MOST = 1 << 28  # parameters of a module up to which they get gradients: these take as much memory


def shadow(module: nn.Module, parts: dict[str, nn.Module], device: torch.device) -> nn.Module:
    """The module with its own weights, or zeros on another device, from which nothing gets back to it."""
    made: dict[int, object] = {}
    derives = sum(p.numel() for p in module.parameters()) <= _MOST

    def moved(t: Tensor, is_weight: bool) -> Tensor:
        if t.device == device:
            return t.detach() if _is_for_gradients(t) else t.detach().clone()
        dtype = torch.bfloat16 if t.dtype == torch.float16 and device.type == "cpu" else t.dtype
        if not is_weight:
            return t.detach().to(device, dtype)
        # Memory of zeros that nobody writes takes none; another order of dimensions is kept.
        return torch.zeros(t.shape, dtype=dtype, device=device) if t.is_contiguous() else \
            torch.zeros_like(t, dtype=dtype, device=device)

    def of_tensor(t: Tensor) -> Tensor:
        if id(t) not in made:
            own = moved(t, isinstance(t, nn.Parameter))
            if isinstance(t, nn.Parameter):
                own = nn.Parameter(own, requires_grad=t.requires_grad and derives)
            elif own.is_floating_point() or own.numel() < 1 << 16:  # larger ones are codes, which nobody writes
                own = own.clone()
            made[id(t)] = own
        return made[id(t)]

    def of_value(value):
        if isinstance(value, nn.Module):
            return of_module(value)
        if isinstance(value, Tensor):
            return of_tensor(value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, of_module(value.__self__))
        return copy.copy(value) if isinstance(value, (list, dict, set)) else value

    def of_module(original: nn.Module, own_parts: dict | None = None) -> nn.Module:
        if id(original) in made:
            return made[id(original)]
        other = made[id(original)] = object.__new__(type(original))
        nn.Module.__init__(other)
        bare = set(other.__dict__)
        for name, value in original.__dict__.items():
            if name == "_fftune_shared":  # the rows of another's weight
                other.__dict__[name] = (made.get(id(value[0]), value[0]), *value[1:])
            elif name not in bare:
                other.__dict__[name] = value if name.startswith("_fftune") else of_value(value)
        for kind in ("_parameters", "_buffers"):
            other.__dict__[kind] = {name: None if t is None else of_tensor(t)
                                    for name, t in original.__dict__[kind].items()}
        other.__dict__["_modules"] = {
            name: (own_parts or {}).get(name) or (None if child is None else of_module(child))
            for name, child in original._modules.items()}
        return other

    return of_module(module, parts)

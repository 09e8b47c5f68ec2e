"""Norms of a model by rmsnorm and layernorm."""
import inspect

import torch
from torch import Tensor, nn

from .. import ops, reference
from .recognise import (SCALES, Elsewhere, Foreign, Numbers, Options, Unfit, are_plain, expect_plain, has_kernels,
                        has_settings, identify, is_close, kind_of, original, remembered, stand_in, undoable)

from .trial import Trial, hidden, replace_forward, tokens_of


def _name_of_eps(module: nn.Module) -> str | None:
    return next((name for name in ("variance_epsilon", "eps")
                 if isinstance(getattr(module, name, None), float)), None)


def settings_of(norm: nn.Module) -> tuple[str, float]:
    """The convention of a norm that was replaced, and the eps that it has by now."""
    convention, name_of_eps = norm._fftune
    return convention, getattr(norm, name_of_eps)


def patch_norm(module: nn.Module, known: dict, options: Options) -> str | None:
    if isinstance(module, nn.LayerNorm):
        return _patch_layernorm(module, known)
    parameters = dict(module.named_parameters())
    if next(module.children(), None) is not None or list(parameters) != ["weight"] \
            or parameters["weight"].dim() != 1 or not hasattr(type(module), "forward"):
        return None
    name = _name_of_eps(module)
    if name is None:
        return None
    expect_plain(module)
    parameters = list(inspect.signature(type(module).forward).parameters)
    if parameters[2:] == ["gate"]:
        return _patch_gated(module, name, known)
    if len(parameters) != 2:
        raise Unfit(f"{type(module).__name__} takes more than hidden states")
    convention = remembered(known, kind_of(module), lambda: _convention(module, getattr(module, name)))
    replace_forward(module, norm_forward, (convention, name), hidden(module.weight.numel()), known)
    _read_eps_in_each_call(module, name)
    return f"{type(module).__name__} by rmsnorm ({convention})"


def _read_eps_in_each_call(module: nn.Module, name: str) -> None:
    """The eps of a replaced norm may change, and what else its forward chooses by may not."""
    module.__dict__["_fftune_settings"] = tuple(
        (part, frozenset(setting for setting in own if part or setting[0] != name) if isinstance(own, frozenset) else own)
        for part, own in module._fftune_settings)


def _other_norms(eps: float) -> dict:
    """Norms that are known and that the kernels do not compute."""
    def centred(x, w):
        x = x - x.mean(-1, keepdim=True)
        return w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def size(x):
        return x.square().mean(-1, keepdim=True).sqrt()

    others = {
        "a norm that subtracts the mean": centred,
        "eps beside the root": lambda x, w: w * x / (size(x) + eps),
        "the larger of eps and the root": lambda x, w: w * x / size(x).clamp(min=eps),
        "the larger of eps and the square": lambda x, w: w * x / size(x).clamp(min=eps ** 0.5),
        "a norm of the sum of squares": lambda x, w: w * x / (x.square().sum(-1, keepdim=True)
                                                              + eps).sqrt(),
        "a norm without a weight": lambda x, w: reference.rmsnorm(x, torch.ones_like(w), eps, "t5"),
        "the square of the weight": lambda x, w: reference.rmsnorm(x, w * w, eps, "t5"),
        "a sum with the input": lambda x, w: x + reference.rmsnorm(x, w, eps, "t5"),
        "no norm": lambda x, w: x * w,
    }
    others |= {f"eps of {own:g}": lambda x, w, own=own: reference.rmsnorm(x, w, own, "t5")
               for own in (0.0, 1e-8, 1e-6, 1e-5, eps / 10, eps * 10) if own != eps}
    others |= {f"eps of {own:g}, and 1 added to the weight":
               lambda x, w, own=own: reference.rmsnorm(x, w, own, "gemma")
               for own in (0.0, 1e-8, 1e-6, 1e-5, eps / 10, eps * 10) if own != eps}
    return others


def _draw_rows(norm: nn.Module, eps: float, numbers: Numbers) -> Tensor:
    """Rows of several dimensions and sizes, some as small as eps lets tell; with a new weight."""
    numbers.fill(norm)
    shape = ((12,), (2, 6), (2, 3, 2))[numbers.seed % 3]
    scales = (*SCALES, max(eps, 1e-24) ** 0.5)
    return numbers(*shape, norm.weight.numel(), like=norm.weight) * scales[
        numbers.seed % len(scales)] + (0.5 if numbers.seed % 4 == 0 else 0.0)


def _convention(module: nn.Module, eps: float) -> str:
    """How it computes: what it does in float32, and in bf16 how it rounds."""
    subject = type(module).__name__
    size = module.weight.numel()
    sizes = {size: 64} if size > 64 else {}
    own = stand_in(module, sizes)

    def compute(convention):
        return lambda x: reference.rmsnorm(x, own.weight, eps, convention)

    known = {name: compute(name) for name in ("llama", "t5", "gemma")}
    others = {Foreign(words): (lambda x, other=other: other(x, own.weight))
              for words, other in _other_norms(eps).items()}
    offset = identify(own, known | others, lambda numbers: _draw_rows(own, eps, numbers),
                      subject=subject, least=12, elsewhere=Elsewhere(own),
                      # In float32 nothing is rounded between.
                      canonical=lambda name: "llama" if name == "t5" else name) == "gemma"
    x = _draw_rows(own, eps, Numbers(99))
    if not is_close(ops.rmsnorm(x, own.weight, eps=eps, convention="gemma" if offset else "llama"),
                    own(x)):
        raise Unfit(f"{subject} is no norm that rmsnorm computes")
    own = stand_in(module, sizes, torch.bfloat16)

    def of_narrow(x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    if offset:
        roundings = {"gemma": compute("gemma"), Foreign("one that rounds before the weight"):
                     lambda x: reference.rmsnorm(x, 1 + own.weight, eps, "llama"),
                     Foreign("one that rounds 1 + the weight"):
                     lambda x: reference.rmsnorm(x, 1 + own.weight, eps, "t5")}
    else:
        roundings = {"llama": compute("llama"), "t5": compute("t5"),
                     Foreign("one of squares that are rounded"): lambda x: of_narrow(x) * own.weight}
    # Some last bits of float32 differ by the order of operations; they seldom change one of bf16.
    return identify(own, roundings, lambda numbers: _draw_rows(own, eps, numbers),
                    subject=f"the rounding of {subject}",
                    agrees=lambda ours, theirs: ours.dtype == theirs.dtype
                    and ours.shape == theirs.shape and (ours != theirs).float().mean() < 0.03)


@undoable
def norm_forward(self, hidden_states: Tensor) -> Tensor:
    # With two types the result would have the wider one. A compiler fuses a norm with what is around it.
    if torch.compiler.is_compiling() or hidden_states.dtype != self.weight.dtype \
            or not has_settings(self) or not has_kernels(hidden_states) \
            or not are_plain(self.weight, hidden_states):
        return original(self, hidden_states)
    convention, eps = settings_of(self)
    return ops.rmsnorm(hidden_states, self.weight, eps=eps, convention=convention)


def _patch_gated(module: nn.Module, name_of_eps: str, known: dict) -> str:
    size = module.weight.numel()
    group = getattr(module, "group_size", size)
    if not isinstance(group, int) or group < 1 or size % group:
        raise Unfit(f"{type(module).__name__} has groups of another size than parts of its weight")
    rules = remembered(known, ("gated", kind_of(module)),
                       lambda: _gated_rules(module, getattr(module, name_of_eps), size // group))
    width = module.weight.numel()
    trial = Trial(lambda numbers, like: (numbers(*tokens_of(width, like), width), numbers(*tokens_of(width, like), width)))
    replace_forward(module, gated_norm_forward, (rules, name_of_eps), trial, known)
    _read_eps_in_each_call(module, name_of_eps)
    order, gate, convention, _ = rules
    return f"{type(module).__name__} by gated_rmsnorm ({gate} {order} the norm, {convention})"


def _gated_rules(module: nn.Module, eps: float, groups: int) -> tuple[str, str, str, int]:
    """The order, the gate's activation and the convention: what it does in float32, and in bf16 how it rounds."""
    subject = type(module).__name__

    def draw(numbers: Numbers, own: nn.Module) -> tuple[Tensor, Tensor]:
        x = _draw_rows(own, eps, numbers)
        return x, numbers(*x.shape, like=x) * (1.0, 4.0, 0.1)[numbers.seed % 3]

    def compute(own, order, gate, convention, eps=eps, groups=groups, offset=0):
        return lambda given: reference.gated_rmsnorm(*given, own.weight + offset, eps, order, gate, convention, groups)

    own = stand_in(module)
    # In float32 nothing is rounded between.
    known = {(order, gate): compute(own, order, gate, "t5") for order in ("after", "before")
             for gate in ("silu", "sigmoid")}
    for order, gate in list(known):
        for other in (0.0, 1e-8, 1e-6, 1e-5, eps * 10):
            if other != eps:
                known[Foreign(f"eps of {other:g}, {order} {gate}")] = compute(own, order, gate, "t5", eps=other)
        known[Foreign(f"1 added to the weight, {order} {gate}")] = compute(own, order, gate, "t5", offset=1)
        if groups > 1:
            known[Foreign(f"one group, {order} {gate}")] = compute(own, order, gate, "t5", groups=1)
    known[Foreign("a norm that does not look at the gate")] = lambda given: reference.rmsnorm(given[0], own.weight, eps, "t5")
    order, gate = identify(lambda given: own(*given), known, lambda numbers: draw(numbers, own), subject=subject,
                           least=12, elsewhere=Elsewhere(own))
    given = draw(Numbers(99), own)
    if not is_close(ops.gated_rmsnorm(*given, own.weight, eps=eps, order=order, gate=gate, groups=groups), own(*given)):
        raise Unfit(f"{subject} is no norm that gated_rmsnorm computes")
    narrow = stand_in(module, dtype=torch.bfloat16)
    roundings = {convention: compute(narrow, order, gate, convention) for convention in ("llama", "t5")}
    convention = identify(lambda given: narrow(*given), roundings, lambda numbers: draw(numbers, narrow),
                          subject=f"the rounding of {subject}",
                          agrees=lambda ours, theirs: ours.dtype == theirs.dtype and ours.shape == theirs.shape
                          and (ours != theirs).float().mean() < 0.03)
    return order, gate, convention, groups


def gated_settings_of(module: nn.Module) -> tuple[str, str, str, int, float]:
    """Order, activation, convention, groups and eps of a gated norm that was replaced."""
    rules, name_of_eps = module._fftune
    return *rules, getattr(module, name_of_eps)


@undoable
def gated_norm_forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    if torch.compiler.is_compiling() or gate is None or not hidden_states.dtype == gate.dtype == self.weight.dtype \
            or hidden_states.shape != gate.shape or not has_settings(self) or not has_kernels(hidden_states) \
            or not are_plain(self.weight, hidden_states, gate):
        return original(self, hidden_states, gate)
    order, activation, convention, groups, eps = gated_settings_of(self)
    return ops.gated_rmsnorm(hidden_states, gate, self.weight, eps=eps, order=order, gate=activation,
                             convention=convention, groups=groups)


def _patch_layernorm(module: nn.LayerNorm, known: dict) -> str:
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1 \
            or module.weight is None or module.bias is None:
        raise Unfit("LayerNorm without a weight and a bias of one dimension")
    expect_plain(module)
    remembered(known, kind_of(module), lambda: _expect_layernorm(module))
    replace_forward(module, layernorm_forward, (), hidden(module.weight.numel()), known)
    return "LayerNorm by layernorm, without gradients"


def _expect_layernorm(module: nn.LayerNorm) -> bool:
    own = stand_in(module)
    x = _draw_rows(own, module.eps, Numbers(0))
    if not is_close(ops.layernorm(x, own.weight, own.bias, eps=module.eps), own(x)):
        raise Unfit("a LayerNorm that layernorm does not compute")
    return True


def normalises(norm: nn.LayerNorm, x: Tensor) -> bool:
    """Whether layernorm is run. PyTorch's has the faster backward pass, and a compiler fuses it."""
    return (not torch.is_grad_enabled() and not torch.compiler.is_compiling()
            and x.dtype == norm.weight.dtype == norm.bias.dtype and has_kernels(x)
            and are_plain(norm.weight, norm.bias, x)
            and not torch.is_autocast_enabled(x.device.type))


@undoable
def layernorm_forward(self, x: Tensor) -> Tensor:
    if not normalises(self, x):
        return original(self, x)
    return ops.layernorm(x, self.weight, self.bias, eps=self.eps)

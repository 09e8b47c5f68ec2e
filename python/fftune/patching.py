"""patch() and unpatch(): fused ops in the place of what transformers models compute with many.

A module is recognised by its parts and by what it computes: it is run on a few random rows, or with
stand-ins for its parts, and compared with what it is taken for. Only the `forward` of instances is
replaced; parameters, state dicts and classes stay as they are.
"""
import inspect
import types
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from . import _attention, ops, reference
from ._experts import patch_experts, patch_router, restore_experts
from ._graphs import patch_steps, restore_steps
from ._layers import patch_layers, restore_layers
from ._library import Error
from ._recognise import (Options, Unfit, activation_name, activation_of, expect_no_hooks,
                         expect_plain, far_rows, has_kernels, is_close, is_known, is_patched,
                         kind_of, original, parts_of, probing, random_rows, reason_of, remembered,
                         replace_forward, undoable, watched)


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


def expect_module(function: str, model) -> None:
    if not isinstance(model, nn.Module):
        raise Error(f"{function}: {type(model).__name__} is not a torch.nn.Module: give a model")


def patch(model: nn.Module, *, recompute: bool = False,
          projections: bool | str = "auto", attention: bool = False, graphs: bool = False,
          whole_layers: bool = False) -> PatchReport:
    """Replaces what is known in a transformers model with fused ops, in place.

    Norms, gated MLPs, the MLP of a pre-norm layer with its norm and residual, bias and gelu, rotary
    embeddings, causal masks that need not be made, and the blocking of repeated n-grams in
    `generate`. Training works; `recompute` keeps the inputs of MLPs alone for the backward pass.
    `projections`: those of attention by `linear` too, the last with the residual: with "auto" in
    calls of up to 64 tokens without gradients, where it is faster, with True in all. `attention`:
    by fftune.ops.attention where it was PyTorch's; otherwise it stays PyTorch's, without the masks.
    `graphs`: `generate` uses a static cache, and replays each step as a CUDA graph.
    `whole_layers`: with a static cache, calls of a few tokens run all layers by one op.
    A patched model can be saved, compiled, copied and moved; `unpatch` gives the old one back.
    """
    expect_module("patch", model)
    if projections not in (True, False, "auto"):
        raise Error(f"projections is {projections!r}: give True, False or \"auto\"")
    options = Options(recompute, projections, attention)
    unpatch(model)
    report = PatchReport()
    known: dict = {}  # what a module of a kind was found to be, or why it is unfit
    for module in model.modules():
        if _calls_dropout(module):
            module._fftune_drops = True
    for recognise in (_patch_norm, _patch_gated_mlp, _patch_plain_mlp, patch_experts, patch_router,
                      _patch_layer, _patch_block):
        for name, module in model.named_modules():
            _try(report, name, lambda: recognise(module, known, options))
    _patch_rotary(model, report, options)
    _patch_masks(model, report, options)
    if whole_layers:
        _patch_whole_layers(model, report)
    _patch_generation(model, report)
    if graphs:
        _try(report, "generate", lambda: patch_steps(model))
    return report


def unpatch(model: nn.Module) -> nn.Module:
    """Takes back what patch() did. -> the model"""
    for module in model.modules():
        restore_experts(module)
        restore_layers(module)
        for name in ("forward", "_get_logits_processor"):
            if hasattr(module.__dict__.get(name), "_fftune"):
                delattr(module, name)
        module.__dict__.pop("_fftune", None)
        module.__dict__.pop("_fftune_drops", None)
        restore_steps(module)
    _attention.restore(model)
    return model


def _try(report: PatchReport, name: str, recognise) -> None:
    try:
        words = recognise()
        if words:
            report.replaced.append((name, words))
    except Exception as error:
        report.left.append((name, reason_of(error)))


# norms

def _norm_eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _patch_norm(module: nn.Module, known: dict, options: Options) -> str | None:
    if isinstance(module, nn.LayerNorm):
        return _patch_layernorm(module)
    parameters = dict(module.named_parameters())
    if next(module.children(), None) is not None or list(parameters) != ["weight"] \
            or parameters["weight"].dim() != 1 or not hasattr(type(module), "forward"):
        return None
    eps = _norm_eps(module)
    if eps is None:
        return None
    expect_plain(module)
    if len(inspect.signature(type(module).forward).parameters) != 2:
        raise Unfit(f"{type(module).__name__} takes more than hidden states, a gate say")
    key = kind_of(module), module.weight.dtype
    convention = remembered(known, key, lambda: _convention(module, eps))
    replace_forward(module, _norm_forward, (convention, eps))
    return f"{type(module).__name__} by rmsnorm ({convention})"


def _convention(module: nn.Module, eps: float) -> str:
    """Of those that compute what the module does, the one that rounds as it does."""
    w = module.weight.detach()
    with probing(module):
        # Weights that are still all alike would hide a rounding.
        odd = random_rows(w.numel(), like=w) * 0.2 + 1
        kept, module.weight.data = module.weight.data, odd
        try:
            x = random_rows(16, w.numel(), like=w) * 3
            theirs = module(x)
        finally:
            module.weight.data = kept
        if isinstance(theirs, Tensor) and theirs.dtype == x.dtype and theirs.shape == x.shape:
            errors = {name: (reference.rmsnorm(x, odd, eps, name).double()
                             - theirs.double()).norm().item()
                      for name in ("llama", "t5", "gemma")}
            best = min(errors, key=errors.get)
            if errors[best] <= 4 * torch.finfo(x.dtype).eps * theirs.double().norm().item():
                return best
    raise Unfit(f"{type(module).__name__} is no root mean square norm that is known")


@undoable
def _norm_forward(self, hidden_states: Tensor) -> Tensor:
    # Of two types the result would take the wider one.
    if hidden_states.dtype != self.weight.dtype or not has_kernels(hidden_states):
        return original(self, hidden_states)
    convention, eps = self._fftune
    return ops.rmsnorm(hidden_states, self.weight, eps=eps, convention=convention)


def _patch_layernorm(module: nn.LayerNorm) -> str:
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1 \
            or module.weight is None or module.bias is None:
        raise Unfit("LayerNorm without a weight and a bias of one dimension")
    expect_plain(module)
    replace_forward(module, _layernorm_forward, ())
    return "LayerNorm by layernorm, without gradients"


def _normalises(norm: nn.LayerNorm, x: Tensor) -> bool:
    """Whether layernorm is run. PyTorch's has the faster backward pass, and a compiler fuses it."""
    return (not torch.is_grad_enabled() and not torch.compiler.is_compiling()
            and x.dtype == norm.weight.dtype == norm.bias.dtype and has_kernels(x)
            and not torch.is_autocast_enabled(x.device.type))


@undoable
def _layernorm_forward(self, x: Tensor) -> Tensor:
    if not _normalises(self, x):
        return original(self, x)
    return ops.layernorm(x, self.weight, self.bias, eps=self.eps)


# gated MLPs

def _patch_gated_mlp(module: nn.Module, known: dict, options: Options) -> str | None:
    linears = {name: child for name, child in module.named_children()
               if getattr(child, "weight", None) is not None
               and getattr(child.weight, "dim", lambda: 0)() == 2}
    if len(linears) != 3 or sum(1 for _ in module.parameters()) > 6:
        return None
    for name, child in linears.items():
        if type(child) is not nn.Linear:
            raise Unfit(f"{name} is {type(child).__name__}, not Linear")
    down = [name for name, c in linears.items()
            if all(c.in_features == o.out_features and c.out_features == o.in_features
                   for other, o in linears.items() if other != name)]
    if not down:
        return None
    expect_plain(module)
    if len({c.weight.dtype for c in linears.values()}) > 1:
        raise Unfit("its weights are of several types")
    act = activation_name(activation_of(module))
    key = kind_of(module), next(module.parameters()).dtype, act
    names = remembered(known, key, lambda: _gate_up_down(module, linears, down, act))
    if any(linears[name].bias is not None for name in names[:2]):
        raise Unfit("gate and up have biases, for which there is no kernel")
    expect_no_hooks(*parts_of(module))
    replace_forward(module, _gated_mlp_forward, (*names, act, options.recompute))
    return f"{type(module).__name__} by ffn ({act})"


def _gate_up_down(module: nn.Module, linears: dict, down: list[str], act: str):
    """The names in their roles."""
    weight = next(iter(linears.values())).weight
    if any(c.bias is not None for name, c in linears.items() if name not in down):
        raise Unfit("gate and up have biases, for which there is no kernel")
    with probing(module):
        for d in down:
            near = random_rows(4, linears[d].out_features, like=weight)
            others = [name for name in linears if name != d]
            far = far_rows(near, *(linears[name].weight for name in others))
            tried = [(x, module(x)) for x in (near, far)]
            for gate, up in (others, others[::-1]):
                if all(is_close(reference.ffn(x, linears[gate].weight, linears[up].weight,
                                              linears[d].weight, linears[d].bias, None, act), theirs)
                       for x, theirs in tried):
                    return gate, up, d
    raise Unfit(f"{type(module).__name__} is no down(act(gate(x)) * up(x))")


def _calls_dropout(module: nn.Module) -> bool:
    """Whether its forward may call the function dropout, and not with 0 alone."""
    names = getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ())
    if "dropout" not in names or isinstance(module._modules.get("dropout"), nn.Module):
        return False
    rates = [value for name, value in vars(module).items()
             if "dropout" in name and isinstance(value, (int, float))]
    return not rates or any(rates)


def _drops(module: nn.Module, but: str | None = None) -> bool:
    """Whether a dropout of its own is at work, `but` that of a name."""
    if not module.training:
        return False
    return hasattr(module, "_fftune_drops") or any(
        isinstance(child, nn.Dropout) and child.p > 0 and name != but
        for name, child in module._modules.items())


def _linears(mlp: nn.Module) -> list[nn.Module] | None:
    """gate, up and down; None if one of them was exchanged since, by an adapter say, or a part is
    watched."""
    found = [getattr(mlp, name) for name in mlp._fftune[:3]]
    plain = all(type(layer) is nn.Linear for layer in found) and not watched(*parts_of(mlp))
    return found if plain else None


@undoable
def _gated_mlp_forward(self, hidden_states: Tensor) -> Tensor:
    linears = _linears(self)
    if linears is None or _drops(self) or not has_kernels(hidden_states):
        return original(self, hidden_states)
    gate, up, down = linears
    *_, act, recompute = self._fftune
    return ops.ffn(hidden_states, gate.weight, up.weight, down.weight, down.bias, act=act,
                   recompute=recompute)


# MLPs of two layers with an activation between them

def _is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear layer whose weight is transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _patch_plain_mlp(module: nn.Module, known: dict, options: Options) -> str | None:
    layers = [(name, child) for name, child in module.named_children()
              if type(child) is nn.Linear or _is_conv1d(child)]
    others = [child for child in module.children() if all(child is not layer for _, layer in layers)]
    if len(layers) != 2 or any(next(child.parameters(), None) is not None for child in others) \
            or not any(name.startswith("act") for name in {**vars(module), **module._modules}):
        return None
    (first_name, first), (second_name, second) = layers
    act = activation_name(activation_of(module))
    transposed = _is_conv1d(first)
    gelu = act in ("gelu", "gelu-tanh") and first.bias is not None
    # The op has the first bias only beside the second.
    plain = not transposed and (first.bias is None or second.bias is not None)
    width = second.weight.shape[0] if _is_conv1d(second) else second.in_features
    if width != (first.weight.shape[1] if transposed else first.out_features):
        raise Unfit("an MLP of two layers that is gated, or another product stands between them")
    if not gelu and not plain:
        raise Unfit(f"an MLP of two layers with {act}: weights that are transposed, or a first bias "
                    "without a second")
    expect_plain(module)
    expect_no_hooks(*parts_of(module))
    key = kind_of(module), first.weight.dtype, act
    remembered(known, key, lambda: _expect_two_layers(module, first, second, act))
    replace_forward(module, _plain_mlp_forward, (first_name, second_name, transposed, act, gelu))
    name = type(module).__name__
    if not plain:
        return f"bias and gelu of {name} by bias-gelu"
    return (f"{name} by ffn without a gate ({act})"
            + (", with gradients by bias-gelu" if gelu else ", without gradients"))


def _without_bias(layer: nn.Module, x: Tensor, transposed: bool) -> Tensor:
    return x @ layer.weight if transposed else nn.functional.linear(x, layer.weight)


def _expect_two_layers(module, first, second, act) -> bool:
    with probing(module):
        width = first.weight.shape[0] if _is_conv1d(first) else first.in_features
        x = random_rows(1, 4, width, like=first.weight)
        if is_close(second(reference.ACTIVATIONS[act](first(x))), module(x)):
            return True
    raise Unfit(f"{type(module).__name__} is no second({act}(first(x)))")


def _plain_layers(mlp: nn.Module, x: Tensor) -> tuple[nn.Linear, nn.Linear] | None:
    """The layers, if the op without a gate runs them in this call."""
    first, second, transposed, *_ = mlp._fftune
    first, second = getattr(mlp, first), getattr(mlp, second)
    if transposed or torch.is_grad_enabled() or mlp.training \
            or type(first) is not nn.Linear or type(second) is not nn.Linear \
            or watched(*parts_of(mlp)) or first.bias is not None and second.bias is None \
            or not x.dtype == first.weight.dtype == second.weight.dtype or not has_kernels(x):
        return None
    return first, second


@undoable
def _plain_mlp_forward(self, hidden_states: Tensor) -> Tensor:
    layers = _plain_layers(self, hidden_states)
    first, second, transposed, act, gelu = self._fftune
    if layers is not None:
        return _plain(layers, hidden_states, act)
    layer = getattr(self, first)
    if not gelu or type(layer) is not nn.Linear and not _is_conv1d(layer) \
            or watched(*(part for part in parts_of(self) if part is not getattr(self, second))) \
            or _drops(self, but="dropout" if transposed else None) \
            or not has_kernels(hidden_states):
        return original(self, hidden_states)
    hidden = _without_bias(layer, hidden_states, transposed)
    hidden = ops.bias_gelu(hidden, layer.bias,
                           approximate="tanh" if act == "gelu-tanh" else "none")
    hidden = getattr(self, second)(hidden)
    dropout = self._modules.get("dropout")
    return hidden if dropout is None else dropout(hidden)


def _plain(layers: tuple[nn.Linear, nn.Linear], x: Tensor, act: str,
           residual: Tensor | None = None) -> Tensor:
    first, second = layers
    return ops.mlp(x, first.weight, second.weight, first.bias, second.bias, residual, act=act)


# layers: the MLP with its norm and residual

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_FEED_FORWARD = {"DenseReluDense", "layer_norm", "dropout"}


class _Times(nn.Module):
    """Stands in for a part while the order of a layer's parts is found out."""

    def __init__(self, factor: float, returns_pair: bool = False):
        super().__init__()
        self.factor = factor
        self.returns_pair = returns_pair

    def forward(self, hidden_states, *_, **__):
        y = hidden_states * self.factor
        return (y, None) if self.returns_pair else y


@contextmanager
def _standing_in(module: nn.Module, **parts: nn.Module):
    kept = {name: module._modules[name] for name in parts}
    module._modules.update(parts)
    try:
        yield
    finally:
        module._modules.update(kept)


def _patch_layer(module: nn.Module, known: dict, options: Options) -> str | None:
    children = {name for name, _ in module.named_children()}
    if children == _LAYER:
        norm, mlp, forward = module.post_attention_layernorm, module.mlp, _layer_forward
    elif children == _FEED_FORWARD:
        norm, mlp, forward = module.layer_norm, module.DenseReluDense, _feed_forward
    else:
        return None
    if not is_patched(norm, _norm_forward):
        return None
    expect_no_hooks(norm, mlp)
    if not is_patched(mlp, _gated_mlp_forward):
        if forward is _feed_forward:
            if not is_patched(mlp, _plain_mlp_forward) or mlp._fftune[2]:
                return None
            remembered(known, kind_of(module), lambda: _expect_feed_forward(module))
            replace_forward(module, _plain_feed_forward, ())
            return f"MLP and residual of {type(module).__name__} by ffn without a gate"
        pair = remembered(known, kind_of(module), lambda: _expect_layer(module))
        replace_forward(module, _layer_around_forward, (pair,))
        return f"residual and norm before the MLP of {type(module).__name__} by rmsnorm"
    *_, down, act, _ = mlp._fftune
    if getattr(mlp, down).bias is not None:
        raise Unfit("down has a bias, with which the norm is not fused")
    if norm.weight.dtype != getattr(mlp, down).weight.dtype:
        raise Unfit("the norm's weight and the MLP's differ in type")
    expect_plain(module)
    find = _expect_layer if forward is _layer_forward else _expect_feed_forward
    remembered(known, kind_of(module), lambda: find(module))
    replace_forward(module, forward, ())
    return f"norm, MLP and residual of {type(module).__name__} by ffn with a norm"


def _expect_layer(module: nn.Module) -> bool:
    """That it is the pre-norm layer; whether its MLP gives a pair, of which the first counts."""
    x = torch.ones(1, 2, 3)
    for pair in (False, True):
        with probing(module), _standing_in(module, input_layernorm=_Times(2),
                                           self_attn=_Times(3, returns_pair=True),
                                           post_attention_layernorm=_Times(5),
                                           mlp=_Times(7, returns_pair=pair)):
            try:
                y = type(module).forward(module, x)
            except Exception as error:
                if not pair:
                    continue
                raise Unfit(f"{type(module).__name__} does not run with a hidden state alone: "
                            f"{error}") from None
        # s = x + 3 * 2 x, and s + 7 * 5 s.
        if isinstance(y, Tensor) and torch.equal(y, x * 7 * 36):
            return pair
        break
    raise Unfit(f"{type(module).__name__} is no x + attention(norm(x)), then x + mlp(norm(x))")


def _expect_feed_forward(module: nn.Module) -> bool:
    x = torch.ones(1, 2, 3)
    with probing(module), _standing_in(module, layer_norm=_Times(5), DenseReluDense=_Times(7)):
        y = type(module).forward(module, x)
    if isinstance(y, Tensor) and torch.equal(y, x * 36):
        return True
    raise Unfit(f"{type(module).__name__} is no x + mlp(norm(x))")


def _block(norm: nn.Module, mlp: nn.Module, x: Tensor, residual: Tensor | None) -> Tensor:
    convention, eps = norm._fftune
    gate, up, down = _linears(mlp)
    *_, act, recompute = mlp._fftune
    return ops.ffn_block(x, residual, norm.weight, gate.weight, up.weight, down.weight, act=act,
                         convention=convention, eps=eps, recompute=recompute)


def _is_as_patched(norm: nn.Module, mlp: nn.Module, hidden_states: Tensor) -> bool:
    """Whether one op can still run the block: autocast gives its inputs several types."""
    return (is_patched(norm, _norm_forward) and is_patched(mlp, _gated_mlp_forward)
            and not watched(norm, mlp) and _linears(mlp) is not None
            and hidden_states.dtype == norm.weight.dtype and has_kernels(hidden_states)
            and not torch.is_autocast_enabled(hidden_states.device.type))


@undoable
def _layer_forward(self, hidden_states: Tensor, *arguments, **options) -> Tensor:
    norm, mlp = self.post_attention_layernorm, self.mlp
    checkpoints = self.training and getattr(self, "gradient_checkpointing", False)
    if arguments or checkpoints or _drops(self) or _drops(mlp) \
            or not _is_as_patched(norm, mlp, hidden_states):
        return original(self, hidden_states, *arguments, **options)
    options.setdefault("attention_mask", None)  # transformers 4 has no default for it
    normed = self.input_layernorm(hidden_states)
    if _projects(self.self_attn, normed):
        return _block(norm, mlp, _attend(self.self_attn, normed, hidden_states, **options), None)
    attention = self.self_attn(hidden_states=normed, **options)[0]
    return _block(norm, mlp, attention, hidden_states)


@undoable
def _layer_around_forward(self, hidden_states: Tensor, *arguments, **options) -> Tensor:
    """The layer whose MLP is a module of its own, a mixture of experts say."""
    norm = self.post_attention_layernorm
    checkpoints = self.training and getattr(self, "gradient_checkpointing", False)
    if (arguments or checkpoints or _drops(self) or not is_patched(norm, _norm_forward)
            or watched(norm)
            or hidden_states.dtype != norm.weight.dtype or not has_kernels(hidden_states)
            or torch.is_autocast_enabled(hidden_states.device.type)):
        return original(self, hidden_states, *arguments, **options)
    options.setdefault("attention_mask", None)
    pair, = self._fftune
    convention, eps = norm._fftune
    normed = self.input_layernorm(hidden_states)
    if _projects(self.self_attn, normed):
        total = _attend(self.self_attn, normed, hidden_states, **options)
        normed = norm(total)
    else:
        attention = self.self_attn(hidden_states=normed, **options)[0]
        normed, total = ops.add_rmsnorm(attention, hidden_states, norm.weight, eps=eps,
                                        convention=convention)
    y = self.mlp(normed)
    return total + (y[0] if pair else y)


@undoable
def _feed_forward(self, hidden_states: Tensor) -> Tensor:
    norm, mlp = self.layer_norm, self.DenseReluDense
    if _drops(self) or _drops(mlp) or not _is_as_patched(norm, mlp, hidden_states):
        return original(self, hidden_states)
    return _block(norm, mlp, hidden_states, None)


@undoable
def _plain_feed_forward(self, hidden_states: Tensor) -> Tensor:
    mlp = self.DenseReluDense
    layers = _plain_layers(mlp, hidden_states) if is_patched(mlp, _plain_mlp_forward) else None
    if layers is None or _drops(self) or watched(mlp) \
            or torch.is_autocast_enabled(hidden_states.device.type):
        return original(self, hidden_states)
    return _plain(layers, self.layer_norm(hidden_states), mlp._fftune[3], hidden_states)


_BLOCK = {"ln_1", "attn", "ln_2", "mlp"}


def _patch_block(module: nn.Module, known: dict, options: Options) -> str | None:
    """A layer as GPT-2 has it."""
    if {name for name, _ in module.named_children()} != _BLOCK \
            or not is_patched(module.ln_2, _layernorm_forward):
        return None
    expect_no_hooks(module.ln_2, module.mlp)
    expect_plain(module)
    remembered(known, kind_of(module), lambda: _expect_block(module))
    # Blocks differ in the order of what they are given beside hidden states.
    names = tuple(inspect.signature(type(module).forward).parameters)[2:]
    replace_forward(module, _block_forward, (names,))
    return f"residual and norm before the MLP of {type(module).__name__} by layernorm"


def _expect_block(module: nn.Module) -> bool:
    x = torch.ones(1, 2, 3)
    with probing(module), _standing_in(module, ln_1=_Times(2), attn=_Times(3, returns_pair=True),
                                       ln_2=_Times(5), mlp=_Times(7)):
        y = type(module).forward(module, x)
    if isinstance(y, Tensor) and torch.equal(y, x * 7 * 36):
        return True
    raise Unfit(f"{type(module).__name__} is no x + attention(norm(x)), then x + mlp(norm(x))")


@undoable
def _block_forward(self, hidden_states: Tensor, *arguments, **options) -> Tensor:
    norm, (names,) = self.ln_2, self._fftune
    given = {**dict(zip(names, arguments)), **options}
    encoder = given.pop("encoder_hidden_states", None), given.pop("encoder_attention_mask", None)
    if encoder[0] is not None or not is_patched(norm, _layernorm_forward) \
            or watched(norm) or not _normalises(norm, hidden_states) or _drops(self):
        return original(self, hidden_states, *arguments, **options)
    attended = self.attn(self.ln_1(hidden_states), **given)[0]
    normed, total = ops.add_layernorm(attended, hidden_states, norm.weight, norm.bias, eps=norm.eps)
    return total + self.mlp(normed)


# rotary embeddings

_STATIC_ROPES = ("default", "linear", "llama3", "yarn")


def _patch_rotary(model: nn.Module, report: PatchReport, options: Options) -> None:
    """The rotary module gives angles in the place of cosines and sines, and the attentions' own
    apply_rotary_pos_emb takes them: so all of them are replaced, or none."""
    rotaries = [(name, m) for name, m in model.named_modules()
                if hasattr(m, "inv_freq") and hasattr(m, "attention_scaling")]
    if not rotaries:
        return
    name, rotary = rotaries[0]
    try:
        if len(rotaries) > 1:
            raise Unfit("several rotary embeddings, each for some layers")
        if getattr(rotary, "rope_type", None) not in _STATIC_ROPES:
            raise Unfit(f"its frequencies change with the length: {rotary.rope_type}")
        if "forward" in rotary.__dict__:
            raise Unfit("its forward was replaced already")
        attentions = [(n, m) for n, m in model.named_modules() if _applies_rotary(m)]
        users = [n for n, m in model.named_modules()
                 if "position_embeddings" in inspect.signature(type(m).forward).parameters
                 and all(m is not other for _, other in attentions)
                 and (_rotates_itself(m) or not any(
                     child is other for child in m.modules() for _, other in attentions))]
        if not attentions or users:
            raise Unfit(f"{users[0] if users else 'nothing'} uses it in a way that is not known")
        functions = {type(m): _attention_function(m, rotary) for _, m in attentions}
        _expect_rotary(rotary)
        scale = float(rotary.attention_scaling)
        for _, module in attentions:
            replace_forward(module, functions[type(module)], (scale, False))
        replace_forward(rotary, _rotary_forward, ())
        report.replaced.append((name, f"{type(rotary).__name__} by rope"))
        if options.projections:
            for other, module in attentions:
                _try(report, other, lambda: _patch_projections(module, options))
    except Unfit as reason:
        report.left.append((name, str(reason)))


def _applies_rotary(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "apply_rotary_pos_emb" in code.co_names


def _rotates_itself(module: nn.Module) -> bool:
    """Whether its forward takes cosines and sines apart, or rotates in another way."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is None or bool({"cos", "sin"} & {*code.co_varnames, *code.co_names}) or any(
        name.startswith("apply_rotary") for name in code.co_names)


def _attention_function(module: nn.Module, rotary: nn.Module):
    """The class's forward, with another apply_rotary_pos_emb among its globals."""
    forward = inspect.unwrap(type(module).forward)
    if "forward" in module.__dict__:
        raise Unfit(f"the forward of {type(module).__name__} was replaced already")
    others = [name for name in forward.__code__.co_names
              if name.startswith("apply_rotary") and name != "apply_rotary_pos_emb"]
    if others:
        raise Unfit(f"{type(module).__name__} rotates by {others[0]} too, which is not known")
    if any("unsqueeze_dim" in words for words in forward.__code__.co_consts
           if isinstance(words, tuple)):
        raise Unfit(f"{type(module).__name__} rotates heads that lie in another order")
    theirs = forward.__globals__["apply_rotary_pos_emb"]
    with torch.no_grad():
        like = torch.zeros(())
        q, k = random_rows(2, 3, 5, 8, like=like), random_rows(2, 1, 5, 8, like=like)
        swap = lambda t: t.transpose(1, 2)
        for rotary_dim in (8, 4):
            angles = random_rows(1, 5, rotary_dim // 2, like=like).repeat(1, 1, 2)
            try:
                results = theirs(q, k, angles.cos(), angles.sin())
            except Exception as error:
                if rotary_dim < 8:  # it is given no more than it rotates
                    continue
                raise Unfit(f"its apply_rotary_pos_emb is not known: {error}") from None
            ours = reference.rope_qk(swap(q), swap(k), angles[0], None, None, "halves", rotary_dim,
                                     "table", [1.0] * 8)
            if not all(is_close(swap(mine), other) for mine, other in zip(ours, results)):
                raise Unfit("its apply_rotary_pos_emb does not rotate halves")
    scale = float(rotary.attention_scaling)

    def apply_rotary_pos_emb(q, k, cos, sin, *_, **__):
        return _rotate(q, k, cos, scale)

    # Without a name of the module torch.compile looks globals up here, not in the module.
    scope = {name: value for name, value in forward.__globals__.items() if name != "__name__"}
    scope["apply_rotary_pos_emb"] = apply_rotary_pos_emb
    function = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__,
                                  forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    return undoable(function)


def _expect_rotary(rotary: nn.Module) -> None:
    """That it gives the cosines and sines of what _angles gives."""
    with probing(rotary):
        position_ids = torch.tensor([[0, 3, 50]], device=rotary.inv_freq.device)
        x = torch.zeros(1, device=rotary.inv_freq.device)
        cosines, sines = type(rotary).forward(rotary, x, position_ids)
        angles, scale = _angles(rotary, position_ids), rotary.attention_scaling
        if not is_close(angles.cos() * scale, cosines) or not is_close(angles.sin() * scale, sines):
            raise Unfit(f"{type(rotary).__name__} computes its angles in a way that is not known")


def _angles(rotary: nn.Module, position_ids: Tensor) -> Tensor:
    frequencies = rotary.inv_freq.to(device=position_ids.device, dtype=torch.float)
    pairs = position_ids[..., None].float() * frequencies
    return torch.cat((pairs, pairs), -1)


@undoable
def _rotary_forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Angles [1 or batch, tokens, features], and each token's row of them, [batch, tokens]."""
    with torch.no_grad():
        angles = _angles(self, position_ids)
        rows = torch.arange(angles.shape[:-1].numel(), dtype=torch.int32, device=angles.device)
        return angles, rows.view(angles.shape[:-1]).expand(x.shape[0], -1).contiguous()


def _rotate(q: Tensor, k: Tensor, angles: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q, k [batch, heads, tokens, features], angles [1 or batch, tokens, features]."""
    if not has_kernels(q):
        return tuple(_rotate_plainly(t, angles, scale) for t in (q, k))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    batch, rotary = q.shape[0], angles.shape[-1]  # features behind those stay as they are
    if angles.shape[0] == 1:
        q, k = ops.rope(q, k, angles=angles[0], rotary=rotary, scale=scale)
    else:  # every token has a position of its own: a sequence of them all
        flat = lambda t: t.flatten(0, 1).unsqueeze(0)
        q, k = ops.rope(flat(q), flat(k), angles=angles.flatten(0, 1), rotary=rotary,
                        scale=scale)
        q, k = (t.squeeze(0).unflatten(0, (batch, -1)) for t in (q, k))
    return q.transpose(1, 2), k.transpose(1, 2)


def _rotate_plainly(x: Tensor, angles: Tensor, scale: float) -> Tensor:
    """As transformers does."""
    cosines, sines = ((t * scale).to(x.dtype).unsqueeze(1) for t in (angles.cos(), angles.sin()))
    rotary = angles.shape[-1]
    first, second = x[..., :rotary].chunk(2, -1)
    y = x[..., :rotary] * cosines + torch.cat((-second, first), -1) * sines
    return torch.cat((y, x[..., rotary:]), -1)


# projections of attention

_FEW_TOKENS = 64  # up to which linear's kernels for few tokens are taken by "auto"


def _patch_projections(module: nn.Module, options: Options) -> str | None:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        layer = getattr(module, name, None)
        if type(layer) is not nn.Linear:
            raise Unfit(f"projections: {name} is no Linear")
        expect_plain(layer)
        expect_no_hooks(layer)
    expect_no_hooks(module)
    scale, _ = module._fftune
    # Each by itself: which layers rotate may follow from their numbers.
    _expect_attention(module)
    module._fftune = scale, options.projections
    return f"projections of {type(module).__name__} by linear" + (
        f" up to {_FEW_TOKENS} tokens" if options.projections == "auto" else "")


def _expect_attention(module: nn.Module) -> None:
    """That _attend computes what it does, from the heads that _heads gives."""
    scope = module.forward.__func__.__globals__
    rotate, rotated = scope["apply_rotary_pos_emb"], []

    def recorded(*arguments, **options):
        rotated.append(rotate(*arguments, **options))
        return rotated[-1]

    with probing(module):
        like = module.q_proj.weight
        x = random_rows(2, 3, module.q_proj.in_features, like=like)
        residual = random_rows(2, 3, module.o_proj.out_features, like=like)
        angles = random_rows(1, 3, module.head_dim // 2, like=like).float().repeat(1, 1, 2)
        rows = torch.arange(3, dtype=torch.int32, device=x.device).repeat(2, 1)
        scope["apply_rotary_pos_emb"] = recorded
        try:
            theirs = module(hidden_states=x, position_embeddings=(angles, rows),
                            attention_mask=None)[0]
        finally:
            scope["apply_rotary_pos_emb"] = rotate
        # Small weights hide in the result which heads were rotated.
        if len(rotated) != 1:
            raise Unfit(f"projections: this {type(module).__name__} does not rotate")
        heads = _heads(module, x, angles, rows)
        ours = _attend(module, x, residual, (angles, rows))
        if all(map(is_close, heads, rotated[0])) and is_close(ours, theirs + residual):
            return
    raise Unfit(f"projections: {type(module).__name__} does not compute what is known")


def _projects(attention: nn.Module, x: Tensor) -> bool:
    """Whether its projections are to be run by linear. A number of tokens that is not known while
    the model is compiled is taken for many."""
    settings = getattr(attention, "_fftune", None)
    if settings is None or not settings[1] or _drops(attention):
        return False
    layers = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    return (all(type(layer) is nn.Linear for layer in layers) and not watched(attention, *layers)
            and attention.config._attn_implementation in ("sdpa", *_attention.OURS)
            and (settings[1] is True or not torch.is_grad_enabled()
                 and is_known(x.shape[0] * x.shape[1] <= _FEW_TOKENS)))


def _head_norms(attention: nn.Module) -> tuple[tuple[Tensor, Tensor] | None, float] | None:
    """Weights and eps of the norms of heads that the op qkv has; None if it has not."""
    norms = [attention._modules.get(name) for name in ("q_norm", "k_norm")]
    if "v_norm" in attention._modules:
        return None
    if norms == [None, None]:
        return None, 1e-6
    if not all(is_patched(norm, _norm_forward) for norm in norms):
        return None
    (convention, eps), other = (norm._fftune for norm in norms)
    weights = tuple(norm.weight for norm in norms)
    if (convention, eps) != other or convention == "gemma" or any(
            w.shape != (attention.head_dim,) or w.dtype != attention.q_proj.weight.dtype
            for w in weights):
        return None
    return weights, eps


def _heads(attention: nn.Module, x: Tensor, angles: Tensor, rows: Tensor
           ) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [batch, heads, tokens, features], normalised and rotated."""
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    scale, _ = attention._fftune
    norms = _head_norms(attention)
    biases = [layer.bias for layer in layers]
    if norms is not None and not torch.is_grad_enabled() and rows.dtype == torch.int32 \
            and len({b is None for b in biases}) == 1:
        weights, eps = norms
        heads, kv_heads = (layer.out_features // attention.head_dim for layer in layers[:2])
        parts = ops.qkv(x, tuple(layer.weight for layer in layers), heads, kv_heads,
                        bias=None if biases[0] is None else tuple(biases), norms=weights, eps=eps,
                        positions=rows, angles=angles.flatten(0, 1), rotary=angles.shape[-1],
                        scale=scale)
        return tuple(t.transpose(1, 2) for t in parts)

    def project(layer: nn.Linear, norm: str) -> Tensor:
        heads = ops.linear(x, layer.weight, layer.bias).unflatten(-1, (-1, attention.head_dim))
        return attention._modules[norm](heads) if norm in attention._modules else heads

    q, k, v = (project(layer, f"{name}_norm").transpose(1, 2)
               for name, layer in zip("qkv", layers))
    return *_rotate(q, k, angles, scale), v


def _attend(self: nn.Module, hidden_states: Tensor, residual: Tensor,
            position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None = None,
            past_key_values=None, **options) -> Tensor:
    """o_proj(attention) + residual."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    q, k, v = _heads(self, hidden_states, *position_embeddings)
    if past_key_values is not None:
        # Before 5.0 a static cache is told where the tokens stand.
        place = options.get("cache_position")
        k, v = past_key_values.update(k, v, self.layer_idx,
                                      *(() if place is None else ({"cache_position": place},)))
    attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    y, _ = attention(self, q, k, v, attention_mask, scaling=self.scaling,
                     dropout=self.attention_dropout if self.training else 0.0,
                     sliding_window=getattr(self, "sliding_window", None), **options)
    return ops.linear(y.reshape(*hidden_states.shape[:-1], -1), self.o_proj.weight,
                      self.o_proj.bias, residual)


# masks

def _patch_masks(model: nn.Module, report: PatchReport, options: Options) -> None:
    """Leaves the causal mask out where nothing but the order of the tokens masks any."""
    decoders = [(name, m) for name, m in model.named_modules()
                if _attention.makes_causal_mask(m)
                and getattr(m.config, "_attn_implementation", None) == "sdpa"]
    if not decoders:
        return
    name, first = decoders[0]
    try:
        if not _attention.is_available():
            raise Unfit("attention: this transformers cannot be told of another one")
        if any(not _attention.uses_interface(m) for _, decoder in decoders
               for m in decoder.modules() if hasattr(m, "is_causal")):
            raise Unfit(f"the attention of {type(first).__name__} is not known")
        if any("forward" in decoder.__dict__ for _, decoder in decoders):
            raise Unfit(f"the forward of {type(first).__name__} was replaced already")
        _attention.choose(model, _attention.NAME if options.attention else _attention.SDPA)
        for _, decoder in decoders:
            _expect_mask_to_be_left_out(decoder)
        for name, decoder in decoders:
            replace_forward(decoder, _decoder_forward, (_attention.window_of(decoder.config),))
            report.replaced.append((name, f"{type(decoder).__name__} without the causal mask"))
            if options.attention:
                words = f"attention of {type(decoder).__name__} by attention"
                report.replaced.append((name, words))
    except Exception as error:
        _attention.restore(model)
        report.left.append((name, reason_of(error)))


def _expect_mask_to_be_left_out(decoder: nn.Module) -> None:
    """That it computes the same from one layer without the mask as with it."""
    name, layers = next(((name, child) for name, child in decoder.named_children()
                         if isinstance(child, nn.ModuleList) and len(child)), (None, None))
    if layers is None:
        raise Unfit(f"{type(decoder).__name__} has no list of layers")
    like = next(layers.parameters())
    width = decoder.get_input_embeddings().weight.shape[-1]
    with probing(decoder), _standing_in(decoder, **{name: nn.ModuleList([layers[0]])}):
        x = random_rows(2, 3, width, like=like)
        depth = decoder.config.num_hidden_layers
        decoder.config.num_hidden_layers = 1
        try:
            theirs, ours = (type(decoder).forward(decoder, inputs_embeds=x, use_cache=False,
                                                  attention_mask=mask)[0]
                            for mask in (None, _attention.without_mask(like.device)))
        finally:
            decoder.config.num_hidden_layers = depth
    if not is_close(ours, theirs):
        raise Unfit(f"{type(decoder).__name__} uses its mask in a way that is not known")


@undoable
def _decoder_forward(self, input_ids: Tensor | None = None, *arguments, **options):
    given = input_ids if input_ids is not None else options.get("inputs_embeds")
    window, = self._fftune
    plain = (not arguments and given is not None
             and all(options.get(name) is None
                     for name in ("attention_mask", "position_ids", "past_key_values"))
             and options.get("is_causal") in (None, True)
             and getattr(self.config, "is_causal", True)
             and self.config._attn_implementation in _attention.OURS
             and (window is None or given.shape[1] <= window))
    if plain:
        options["attention_mask"] = _attention.without_mask(given.device)
    return original(self, input_ids, *arguments, **options)


# whole layers

def _patch_whole_layers(model: nn.Module, report: PatchReport) -> None:
    decoders = [(name, m) for name, m in model.named_modules() if _attention.makes_causal_mask(m)]
    if not decoders:
        report.left.append(("", "layers: there is no decoder that is known"))
    if not decoders or not _attention.is_available():
        return
    before = {m: m.config for m in model.modules() if hasattr(m, "config")}
    _attention.choose_lengths(model)
    known: dict = {}
    failed, served = [], set()
    for name, decoder in decoders:
        replaced = len(report.replaced)
        _try(report, name, lambda: patch_layers(decoder, known, _norm_forward,
                                                (_gated_mlp_forward, _plain_mlp_forward),
                                                _rotary_forward))
        if len(report.replaced) == replaced:
            failed.append(decoder)
        else:
            served.update(decoder.modules())
    # Lengths in the place of masks are for the attention of layers that were recognised.
    parts = {m for decoder in failed for m in decoder.modules()}
    theirs = {id(before[decoder]) for decoder in failed}
    for module, config in before.items():
        if not served or module not in served and (module in parts or id(config) in theirs):
            module.config = config


# generation

def _patch_generation(model: nn.Module, report: PatchReport) -> None:
    if not hasattr(type(model), "_get_logits_processor"):
        return
    model.__dict__["_get_logits_processor"] = types.MethodType(_logits_processor, model)
    report.replaced.append(("generate", "no_repeat_ngram_size by ngram-block"))


@undoable
def _logits_processor(self, *arguments, **options):
    from transformers import NoRepeatNGramLogitsProcessor

    processors = type(self)._get_logits_processor(self, *arguments, **options)
    for i, processor in enumerate(processors):
        if type(processor) is NoRepeatNGramLogitsProcessor:
            processors[i] = _NgramBlocking(processor.ngram_size)
    return processors


_LENGTHS = 64  # lengths of texts are rounded up to a multiple of it


class _NgramBlocking:
    def __init__(self, ngram_size: int):
        self.ngram_size = ngram_size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[-1] < self.ngram_size:
            return scores
        scores = scores.clone(memory_format=torch.contiguous_format)
        # A plan for every length would cost more than ids in front that match nothing.
        missing = -input_ids.shape[-1] % _LENGTHS
        if missing:
            input_ids = nn.functional.pad(input_ids, (missing, 0), value=-1)
        ops.ngram_block(input_ids, scores, self.ngram_size)
        return scores

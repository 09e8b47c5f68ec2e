"""Layers: the MLP together with its norm and residual."""
import inspect

import torch
from torch import Tensor, nn

from .. import ops
from .memory import norm_again
from .mlps import gated_of, gated_weights, plain_layers, plain_mlp, plain_mlp_forward
from .norms import layernorm_forward, norm_forward, normalises, settings_of
from .recognise import (Elsewhere, Options, Uncertain, Unfit, drops, expect_no_hooks, expect_plain, has_fast_products,
                        has_kernels, has_settings, identify, is_patched, kind_of, original, remembered, stand_in,
                        trying, undoable, watched)
from .rotary import attend, fuses_projections, projects
from .trial import hidden, replace_forward


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


def patch_layer(module: nn.Module, known: dict, options: Options) -> str | None:
    children = {name for name, _ in module.named_children()}
    if children == _LAYER:
        norm, mlp, forward = module.post_attention_layernorm, module.mlp, _layer_forward
    elif children == _FEED_FORWARD:
        norm, mlp, forward = module.layer_norm, module.DenseReluDense, _feed_forward
    else:
        return None
    if not is_patched(norm, norm_forward):
        return None
    expect_no_hooks(norm, mlp)
    if gated_of(mlp) is None:
        if forward is _feed_forward:
            if not is_patched(mlp, plain_mlp_forward) or mlp._fftune[2]:
                return None
            remembered(known, kind_of(module), lambda: _expect_feed_forward(module))
            replace_forward(module, _plain_feed_forward, (), hidden(norm.weight.numel()), known)
            return f"MLP and residual of {type(module).__name__} by ffn without a gate"
        pair = remembered(known, kind_of(module), lambda: _expect_layer(module))
        replace_forward(module, _layer_around_forward, (pair, options.norms_again), hidden(
            norm.weight.numel(), parts=dict(self_attn=_Times(3, True), mlp=_Times(7, pair))), known)
        return f"residual and norm before the MLP of {type(module).__name__} by rmsnorm"
    _, _, down, bias = gated_weights(mlp)
    if bias is not None:
        raise Unfit("down has a bias, with which the norm is not fused")
    if norm.weight.dtype != down.dtype:
        raise Unfit("the norm's weight and the MLP's differ in type")
    expect_plain(module)
    find = _expect_layer if forward is _layer_forward else _expect_feed_forward
    remembered(known, kind_of(module), lambda: find(module))
    parts = dict(self_attn=_Times(3, True)) if forward is _layer_forward else {}
    replace_forward(module, forward, (options.norms_again,), hidden(norm.weight.numel(), parts=parts), known)
    return f"norm, MLP and residual of {type(module).__name__} by ffn with a norm"


def _expect_layer(module: nn.Module) -> bool:
    """Checks that it is the pre-norm layer; returns whether its MLP gives a pair, whose first
    element counts."""
    reasons = []
    for pair in (False, True):
        parts = dict(input_layernorm=_Times(2), self_attn=_Times(3, returns_pair=True),
                     post_attention_layernorm=_Times(5), mlp=_Times(7, returns_pair=pair))
        try:
            # s = x + 3 * 2 x, and s + 7 * 5 s.
            _expect_product(module, parts, 7 * 36, "x + attention(norm(x)), then x + mlp(norm(x))")
            return pair
        except Uncertain:
            raise
        except Unfit as reason:
            reasons.append(reason)
    # With the MLP's other kind of result it does not run at all.
    raise next((reason for reason in reasons if reason.__cause__ is None), reasons[-1])


def _expect_feed_forward(module: nn.Module) -> bool:
    return _expect_product(module, dict(layer_norm=_Times(5), DenseReluDense=_Times(7)), 36, "x + mlp(norm(x))")


def _expect_product(module: nn.Module, parts: dict[str, nn.Module], factor: int, form: str) -> bool:
    """That with these parts the module multiplies by the factor, as one of that form does."""
    own, subject = stand_in(module, parts=parts), type(module).__name__
    with torch.no_grad(), trying(f"{subject} does not run with a hidden state alone"):
        own(torch.ones(1, 2, 3))
    identify(own, {form: lambda x: x * factor}, lambda numbers: numbers(2, 3, 4), subject=subject,
             unknown=f"{subject} is no {form}", elsewhere=Elsewhere(own, drops=True))
    return True


def _block(norm: nn.Module, mlp: nn.Module, x: Tensor, residual: Tensor | None,
           norms_again: bool) -> Tensor:
    convention, eps = settings_of(norm)
    form, weights = gated_of(mlp), gated_weights(mlp)
    if norms_again and torch.is_grad_enabled():
        if residual is None:
            normed = norm(x)
        else:
            normed, x = ops.add_rmsnorm(x, residual, norm.weight, eps=eps, convention=convention)
        with norm_again(True, norm, x, normed):
            return ops.ffn(normed, *weights[:3], residual=x, act=form.act, recompute=form.recompute)
    return ops.ffn_block(x, residual, norm.weight, *weights[:3], act=form.act,
                         convention=convention, eps=eps, recompute=form.recompute)


def _is_as_patched(norm: nn.Module, mlp: nn.Module, hidden_states: Tensor) -> bool:
    """Whether one op can still run the block: autocast gives its inputs several types."""
    return (is_patched(norm, norm_forward) and gated_of(mlp) is not None
            and not watched(norm, mlp) and (weights := gated_weights(mlp)) is not None
            and weights[3] is None
            and hidden_states.dtype == norm.weight.dtype and has_fast_products(hidden_states)
            and not torch.is_autocast_enabled(hidden_states.device.type))


@undoable
@fuses_projections
def _layer_forward(self, hidden_states: Tensor, *arguments, **options) -> Tensor:
    norm, mlp = self.post_attention_layernorm, self.mlp
    checkpoints = self.training and getattr(self, "gradient_checkpointing", False)
    if arguments or checkpoints or not has_settings(self) or drops(self) or drops(mlp) \
            or not _is_as_patched(norm, mlp, hidden_states):
        return original(self, hidden_states, *arguments, **options)
    options.setdefault("attention_mask", None)  # transformers 4 has no default for it
    again, = self._fftune
    normed = self.input_layernorm(hidden_states)
    with norm_again(again, self.input_layernorm, hidden_states, normed):
        if projects(self.self_attn, normed, options):
            total, residual = attend(self.self_attn, normed, hidden_states, **options), None
        else:
            total, residual = self.self_attn(hidden_states=normed, **options)[0], hidden_states
    return _block(norm, mlp, total, residual, again)


@undoable
@fuses_projections
def _layer_around_forward(self, hidden_states: Tensor, *arguments, **options) -> Tensor:
    """The layer whose MLP is a module of its own, a mixture of experts say."""
    norm = self.post_attention_layernorm
    checkpoints = self.training and getattr(self, "gradient_checkpointing", False)
    if (arguments or checkpoints or not has_settings(self) or drops(self) or not is_patched(norm, norm_forward)
            or watched(norm) or torch.compiler.is_compiling()
            or hidden_states.dtype != norm.weight.dtype or not has_kernels(hidden_states)
            or torch.is_autocast_enabled(hidden_states.device.type)):
        return original(self, hidden_states, *arguments, **options)
    options.setdefault("attention_mask", None)
    pair, again = self._fftune
    convention, eps = settings_of(norm)
    normed = self.input_layernorm(hidden_states)
    with norm_again(again, self.input_layernorm, hidden_states, normed):
        if projects(self.self_attn, normed, options):
            total = attend(self.self_attn, normed, hidden_states, **options)
            normed = norm(total)
        else:
            attention = self.self_attn(hidden_states=normed, **options)[0]
            normed, total = ops.add_rmsnorm(attention, hidden_states, norm.weight, eps=eps,
                                            convention=convention)
    with norm_again(again, norm, total, normed):
        y = self.mlp(normed)
    return total + (y[0] if pair else y)


@undoable
def _feed_forward(self, hidden_states: Tensor) -> Tensor:
    norm, mlp = self.layer_norm, self.DenseReluDense
    if not has_settings(self) or drops(self) or drops(mlp) or not _is_as_patched(norm, mlp, hidden_states):
        return original(self, hidden_states)
    return _block(norm, mlp, hidden_states, None, self._fftune[0])


@undoable
def _plain_feed_forward(self, hidden_states: Tensor) -> Tensor:
    mlp = self.DenseReluDense
    layers = plain_layers(mlp, hidden_states) if is_patched(mlp, plain_mlp_forward) else None
    if layers is None or not has_settings(self) or drops(self) or watched(mlp) \
            or torch.is_autocast_enabled(hidden_states.device.type):
        return original(self, hidden_states)
    return plain_mlp(layers, self.layer_norm(hidden_states), mlp._fftune[3], hidden_states)


_BLOCK = {"ln_1", "attn", "ln_2", "mlp"}


def patch_block(module: nn.Module, known: dict, options: Options) -> str | None:
    """A layer as GPT-2 has it."""
    if {name for name, _ in module.named_children()} != _BLOCK \
            or not is_patched(module.ln_2, layernorm_forward):
        return None
    expect_no_hooks(module.ln_2, module.mlp)
    expect_plain(module)
    remembered(known, kind_of(module), lambda: _expect_block(module))
    # Blocks differ in the order of what they are given beside hidden states.
    names = tuple(inspect.signature(type(module).forward).parameters)[2:]
    replace_forward(module, _block_forward, (names,),
                    hidden(module.ln_2.weight.numel(), parts=dict(attn=_Times(3, True))), known)
    return f"residual and norm before the MLP of {type(module).__name__} by layernorm"


def _expect_block(module: nn.Module) -> bool:
    parts = dict(ln_1=_Times(2), attn=_Times(3, returns_pair=True), ln_2=_Times(5), mlp=_Times(7))
    return _expect_product(module, parts, 7 * 36, "x + attention(norm(x)), then x + mlp(norm(x))")


@undoable
def _block_forward(self, hidden_states: Tensor, *arguments, **options) -> Tensor:
    norm, (names,) = self.ln_2, self._fftune
    given = {**dict(zip(names, arguments)), **options}
    encoder = given.pop("encoder_hidden_states", None), given.pop("encoder_attention_mask", None)
    if encoder[0] is not None or not is_patched(norm, layernorm_forward) \
            or watched(norm) or not has_settings(self) or not normalises(norm, hidden_states) or drops(self):
        return original(self, hidden_states, *arguments, **options)
    attended = self.attn(self.ln_1(hidden_states), **given)[0]
    normed, total = ops.add_layernorm(attended, hidden_states, norm.weight, norm.bias, eps=norm.eps)
    return total + self.mlp(normed)

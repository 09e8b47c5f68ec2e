"""Experts that are modules of their own with packed weights, as GPTQModel keeps a mixture's: one moe-ffn.

Each expert is a gated MLP that patch_coded_mlp() replaced. The module around them is called with hidden
states, choices and their weights; a stand-in of it with dense experts is compared with what moe-ffn
computes. Its experts then share three packed weights, and give their own back on their own.
"""
import inspect

import torch
from torch import Tensor, nn

from .. import ops
from .analytic import INTEGERS
from .experts import of_experts, smaller_sizes
from .mlps import packed_mlp_forward
from .quantised import fits, merge, merged_of, take_apart
from .recognise import (SCALES, Elsewhere, Numbers, Options, Unfit, expect_no_hooks, has_kernels, identify, is_patched,
                        kind_of, original, parts_watched, remembered, stand_in, undoable)
from .trial import replace_forward

_PARTS = ("gate", "up", "down")


def patch_packed_experts(module: nn.Module, known: dict, options: Options) -> str | None:
    experts = [child for child in module.children() if is_patched(child, packed_mlp_forward)]
    others = [child for child in module.children() if not is_patched(child, packed_mlp_forward)]
    inside = {part for child in experts for part in child.modules()}
    if len(experts) < 2 or any(next(child.parameters(), None) is not None for child in others) \
            or any(tensor is not None for part in module.modules() if part not in inside
                   for tensor in (*part._parameters.values(), *part._buffers.values())) \
            or _required(module) != 3:
        return None
    if "forward" in module.__dict__:
        raise Unfit("its forward was replaced already")
    forms = {child._fftune[0] for child in experts}
    sizes = {tuple(_layer(child, part)._fftune[0].k for part in ("up", "down")) for child in experts}
    if len(forms) > 1 or len(sizes) > 1:
        raise Unfit("its experts have different layers, activations or sizes")
    if any(_layer(child, "down").bias is not None for child in experts):
        raise Unfit("its experts have biases, for which there is no kernel")
    if any(_layer(child, "gate")._fftune_order is not None for child in experts):
        raise Unfit("its experts have act-order, each one of its own")
    (d, h), = sizes
    weigh = remembered(known, ("packed experts", kind_of(module)), lambda: _weighing_of(module, experts, d, h))
    expect_no_hooks(*list(module.modules())[1:])
    layers = {part: [_layer(child, part) for child in experts] for part in _PARTS}
    names = tuple(name for name, child in module.named_children() if is_patched(child, packed_mlp_forward))
    try:
        with torch.no_grad():
            for part, own in layers.items():
                merge(module, own, part)
        replace_forward(module, packed_experts_forward, (names, weigh), of_experts(len(experts), d), known)
    except Unfit:
        take_apart(module, [layer for own in layers.values() for layer in own])
        raise
    return f"{len(experts)} experts of {type(module).__name__} by moe-ffn with packed weights ({forms.pop().act})"


def _required(module: nn.Module) -> int:
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return 0
    return len(parameters) if all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters) else 0


def _layer(expert: nn.Module, part: str) -> nn.Module:
    return expert.get_submodule(getattr(expert._fftune[0], part))


def _weighing_of(module: nn.Module, experts: list[nn.Module], d: int, h: int) -> str:
    """Whether weights are multiplied with the results of experts, "after" them, or with their inputs."""
    own = stand_in(module, smaller_sizes(len(experts), d, h))
    names = [name for name, child in module.named_children() if child in experts]
    parts = [own._modules[name] for name in names]
    width = parts[0].get_submodule(experts[0]._fftune[0].gate).in_features
    count = len(parts)

    def draw(numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
        numbers.fill(own)
        choices = min(2, count)
        ids = torch.stack([torch.randperm(count, generator=numbers.generator)[:choices] for _ in range(5)])
        like = next(own.parameters())
        return (numbers(5, width, like=like) * SCALES[numbers.seed % len(SCALES)], ids,
                numbers(5, choices, like=like).abs() + 0.1)

    def computed(weigh: str):
        def compute(given):
            x, ids, shares = given
            y = torch.zeros_like(x)
            for expert in ids.unique().tolist():
                tokens, choices = torch.where(ids == expert)
                share = shares[tokens, choices, None]
                out = parts[expert](x[tokens] * share if weigh == "before" else x[tokens])
                y.index_add_(0, tokens, out * share if weigh == "after" else out)
            return y
        return compute

    subject = type(module).__name__
    return identify(lambda given: own(*given), {weigh: computed(weigh) for weigh in ("after", "before")}, draw,
                    subject=subject, free=(INTEGERS,), elsewhere=Elsewhere(own))


@undoable
def packed_experts_forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    names, weigh = self._fftune
    experts = [self._modules.get(name) for name in names]
    wanted = torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad)
    if wanted or not has_kernels(hidden_states) or torch.is_autocast_enabled(hidden_states.device.type) \
            or not all(is_patched(expert, packed_mlp_forward) for expert in experts) or parts_watched(self):
        return original(self, hidden_states, top_k_index, top_k_weights)
    merged = [merged_of(self, [_layer(expert, part) for expert in experts], part) for part in _PARTS]
    if any(own is None or not fits(own[0], hidden_states) for own in merged):
        return original(self, hidden_states, top_k_index, top_k_weights)
    act = experts[0]._fftune[0].act
    return ops.moe_ffn(hidden_states, top_k_index, top_k_weights, *(w for w, _ in merged), act=act, weigh=weigh)

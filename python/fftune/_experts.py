"""patch() on mixtures of experts: the experts of a layer, their router, and the layer around them.

The experts of transformers 5 are one module with the weights of all of them, gate_up_proj and
down_proj, and a forward(hidden_states, ids, weights). The router beside them gives (logits,
weights, ids).
"""
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from . import ops, reference
from ._recognise import (Options, Unfit, activation_name, activation_of, expect_no_hooks,
                         expect_plain, is_close, is_patched, original, probing, random_rows,
                         remembered, replace_forward, undoable)


@dataclass(frozen=True)
class _Experts:
    """What the experts of a module compute."""

    act: str
    packing: str
    transposed: bool  # weights are [experts, in, out]
    biased: bool
    recompute: bool


def patch_experts(module: nn.Module, known: dict, options: Options) -> str | None:
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in (gate_up, down)):
        return None
    expect_plain(module)
    if getattr(module, "has_post_expert_norm", False):
        raise Unfit("experts with a norm of their own")
    found = remembered(known, (type(module), gate_up.dtype, tuple(gate_up.shape)),
                       lambda: _experts_of(module, options))
    if found.transposed:
        for weight in (module.gate_up_proj, module.down_proj):
            # The kernels read rows of outputs: the same numbers, the last two dimensions the other
            # way round in memory.
            weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
    replace_forward(module, _experts_forward, (found,))
    details = found.act, found.packing, *(["biases"] if found.biased else [])
    return f"{type(module).__name__} by moe-ffn ({', '.join(details)})"


def _weights_of(module: nn.Module, transposed: bool) -> tuple[Tensor, Tensor]:
    """[experts, 2h, d] and [experts, d, h]"""
    weights = module.gate_up_proj, module.down_proj
    return tuple(w.transpose(1, 2) for w in weights) if transposed else weights


def _biases_of(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    return tuple(getattr(module, name, None) for name in ("gate_up_proj_bias", "down_proj_bias"))


def _experts_of(module: nn.Module, options: Options) -> _Experts:
    biases = _biases_of(module)
    names = {name for name, _ in module.named_parameters()}
    extra = names - {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}
    if extra or (biases[0] is None) != (biases[1] is None):
        raise Unfit(f"experts with parameters that are not known: {', '.join(sorted(names))}")
    try:
        acts = [activation_name(activation_of(module))]
    except Unfit:
        acts = ["swiglu-oai"]
    experts, choices = module.gate_up_proj.shape[0], min(2, module.gate_up_proj.shape[0])
    with probing(module):
        for transposed in (False, True):
            gate_up, down = _weights_of(module, transposed)
            d, h = down.shape[1:]
            if gate_up.shape != (experts, 2 * h, d):
                continue
            x = random_rows(3, d, like=down)
            ids = torch.arange(3 * choices, device=x.device).view(3, choices) % experts
            weights = random_rows(3, choices, like=down).abs()
            theirs = module(x, ids, weights)
            for act, packing in product(acts, ("halves", "interleaved")):
                ours = reference.moe_ffn(x, ids, weights, gate_up, None, down, *biases, act,
                                         packing, "after", 0, "")
                if is_close(ours, theirs):
                    return _Experts(act, packing, transposed, biases[0] is not None,
                                    options.recompute)
    raise Unfit(f"{type(module).__name__} is no weighted sum of down(act(gate(x)) * up(x))")


@undoable
def _experts_forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
                     ) -> Tensor:
    found, = self._fftune
    if getattr(self, "_is_expert_parallel", False):
        return original(self, hidden_states, top_k_index.long(), top_k_weights)
    gate_up, down = _weights_of(self, found.transposed)
    return ops.moe_ffn(hidden_states, top_k_index, top_k_weights, gate_up, None, down,
                       biases=_biases_of(self) if found.biased else None, act=found.act,
                       packing=found.packing, recompute=found.recompute)


def experts_of(module: nn.Module) -> _Experts | None:
    """What patch_experts() found the module to be."""
    return module._fftune[0] if is_patched(module, _experts_forward) else None


def restore_experts(module: nn.Module) -> None:
    """Takes back how transposed weights were laid out."""
    settings = module.__dict__.get("_fftune")
    if settings and isinstance(settings[0], _Experts) and settings[0].transposed:
        for weight in (module.gate_up_proj, module.down_proj):
            weight.data = weight.data.contiguous()


# routers

@dataclass(frozen=True)
class _Router:
    """Options of ops.moe_route, and the type that the logits are computed in."""

    score: str
    order: str
    renormalise: bool
    groups: int
    top_groups: int
    group_score: str
    scale: float
    wide: bool
    bias: str | None  # the name of what is added for the choice alone


def patch_router(module: nn.Module, known: dict, options: Options) -> str | None:
    """Of a block whose experts are patched."""
    children = dict(module.named_children())
    if not is_patched(children.get("experts"), _experts_forward):
        return None
    routers = [child for name, child in children.items() if _looks_like_router(child)]
    if len(routers) != 1:
        return None
    router, = routers
    expect_plain(router)
    expect_no_hooks(router)
    key = type(router), router.weight.dtype
    found = remembered(known, key, lambda: _router_of(router))
    replace_forward(router, _router_forward, (found,))
    return (f"{type(router).__name__} by moe-route "
            f"({found.score}{', after the choice' if found.order == 'after' else ''})")


def _looks_like_router(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (isinstance(weight, nn.Parameter) and weight.dim() == 2
            and isinstance(getattr(module, "top_k", None), int)
            and type(module) is not nn.Linear and next(module.children(), None) is None)


def _logits(router: nn.Module, x: Tensor, wide: bool) -> Tensor:
    weight, bias = router.weight, getattr(router, "bias", None)
    if wide:
        x, weight, bias = (None if t is None else t.float() for t in (x, weight, bias))
    return nn.functional.linear(x, weight, bias)


def _router_of(router: nn.Module) -> _Router:
    """Of all that moe-route computes, what the router does."""
    experts, d = router.weight.shape
    bias = next((name for name, t in router.named_buffers() if t.shape == (experts,)), None)
    groups, top_groups = (next((getattr(router, name) for name in names
                                if isinstance(getattr(router, name, None), int)), 0)
                          for names in (("num_group", "n_group"), ("topk_group",)))
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    with probing(router):
        x = random_rows(64, d, like=router.weight)
        theirs = router(x)
        if not isinstance(theirs, tuple) or len(theirs) != 3:
            raise Unfit(f"{type(router).__name__} does not give logits, weights and ids")
        logits, weights, ids = theirs
        for wide in (False, True):
            own = _logits(router, x, wide)
            if own.dtype == logits.dtype and is_close(own, logits):
                break
        else:
            raise Unfit(f"{type(router).__name__} computes its logits in a way that is not known")
        dense = torch.zeros(64, experts, device=x.device)
        right = dense.scatter(1, ids.long(), weights.float())
        for (score, order), renormalise, group, own_scale in product(
                (("softmax", "before"), ("softmax", "after"), ("sigmoid", "before")),
                (False, True), (("max", 0, 0), ("max", groups, top_groups),
                                ("top2", groups, top_groups)), (1.0, scale)):
            found = _Router(score, order, renormalise, *group[1:], group[0], own_scale, wide, bias)
            mine, chosen = reference.moe_route(
                own, getattr(router, bias) if bias else None, router.top_k, score, order,
                found.groups, found.top_groups, found.group_score, renormalise, own_scale)
            if is_close(dense.scatter(1, chosen.long(), mine.float()), right,
                        8 * torch.finfo(weights.dtype).eps):
                return found
    raise Unfit(f"{type(router).__name__} chooses in a way that is not known")


def router_of(module: nn.Module) -> _Router | None:
    """What patch_router() found the module to be."""
    return module._fftune[0] if is_patched(module, _router_forward) else None


@undoable
def _router_forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found, = self._fftune
    logits = _logits(self, hidden_states.reshape(-1, self.weight.shape[1]), found.wide)
    ids, weights = ops.moe_route(
        logits, self.top_k, bias=getattr(self, found.bias) if found.bias else None,
        score=found.score, order=found.order, groups=found.groups, top_groups=found.top_groups,
        group_score=found.group_score, renormalise=found.renormalise, scale=found.scale)
    return logits, weights, ids

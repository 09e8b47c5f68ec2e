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
from ._moe_ops import gate_and_up
from ._recognise import (Options, Unfit, activation_name, activation_of, expect_no_hooks,
                         expect_plain, is_close, is_patched, original, probing, random_rows,
                         remembered, replace_forward, undoable)


@dataclass(frozen=True)
class _Experts:
    """What the experts of a module compute."""

    act: str
    packing: str
    recompute: bool


def patch_experts(module: nn.Module, known: dict, options: Options) -> str | None:
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in (gate_up, down)):
        return None
    expect_plain(module)
    biases = [name for name, _ in module.named_parameters() if "bias" in name]
    if biases:
        raise Unfit("experts with biases, for which there is no kernel")
    experts, d, h = down.shape
    if gate_up.shape != (experts, 2 * h, d):
        raise Unfit(f"experts whose weights are {list(gate_up.shape)} and {list(down.shape)}: "
                    "transposed, for which there is no kernel")
    if getattr(module, "has_post_expert_norm", False):
        raise Unfit("experts with a norm of their own")
    act = activation_name(activation_of(module))
    key = type(module), gate_up.dtype, act
    packing = remembered(known, key, lambda: _packing_of(module, act))
    replace_forward(module, _experts_forward, (_Experts(act, packing, options.recompute),))
    return f"{type(module).__name__} by moe-ffn ({act}, {packing})"


def _packing_of(module: nn.Module, act: str) -> str:
    experts, d, _ = module.down_proj.shape
    choices = min(2, experts)
    with probing(module):
        x = random_rows(3, d, like=module.down_proj)
        ids = torch.arange(3 * choices, device=x.device).view(3, choices) % experts
        weights = random_rows(3, choices, like=module.down_proj).abs()
        theirs = module(x, ids, weights)
        for packing in ("halves", "interleaved"):
            gate, up = gate_and_up(module.gate_up_proj, packing)
            ours = reference.moe_ffn(x, ids, weights, gate, up, module.down_proj, act, "")
            if is_close(ours, theirs):
                return packing
    raise Unfit(f"{type(module).__name__} is no weighted sum of down(act(gate(x)) * up(x))")


@undoable
def _experts_forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
                     ) -> Tensor:
    if getattr(self, "_is_expert_parallel", False):
        return original(self, hidden_states, top_k_index.long(), top_k_weights)
    found, = self._fftune
    return ops.moe_ffn(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, None,
                       self.down_proj, act=found.act, packing=found.packing,
                       recompute=found.recompute)


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


@undoable
def _router_forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found, = self._fftune
    logits = _logits(self, hidden_states.reshape(-1, self.weight.shape[1]), found.wide)
    ids, weights = ops.moe_route(
        logits, self.top_k, bias=getattr(self, found.bias) if found.bias else None,
        score=found.score, order=found.order, groups=found.groups, top_groups=found.top_groups,
        group_score=found.group_score, renormalise=found.renormalise, scale=found.scale)
    return logits, weights, ids

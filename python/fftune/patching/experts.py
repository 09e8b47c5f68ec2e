"""patch() on mixtures of experts: the experts of a layer, their router, and the layer around them.

The experts of transformers 5 are one module with the weights of all of them, gate_up_proj and
down_proj, and a forward(hidden_states, ids, weights). The router beside them gives (logits,
weights, ids).
"""
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from .. import ops, reference
from .recognise import (Options, Unfit, activation_name, activation_of, expect_no_hooks,
                         expect_plain, far_rows, has_kernels, is_close, is_patched, kind_of,
                         original, parts_of, probing, random_rows, remembered, replace_forward,
                         standing_in, undoable, watched)


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
    expect_no_hooks(*parts_of(module))
    try:
        act = activation_name(activation_of(module))
    except Unfit:
        act = "swiglu-oai"
    key = kind_of(module), gate_up.dtype, tuple(gate_up.shape), act
    found = remembered(known, key, lambda: _experts_of(module, act, options))
    if found.transposed:
        # The kernels read rows of outputs: the same numbers, the last two dimensions the other way
        # round in memory. Under inference_mode parameters would become unfit for gradients.
        with torch.inference_mode(False):
            for weight in (module.gate_up_proj, module.down_proj):
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


def _experts_of(module: nn.Module, act: str, options: Options) -> _Experts:
    biases = _biases_of(module)
    names = {name for name, _ in module.named_parameters()}
    extra = names - {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}
    if extra or (biases[0] is None) != (biases[1] is None):
        raise Unfit(f"experts with parameters that are not known: {', '.join(sorted(names))}")
    experts, choices = module.down_proj.shape[0], min(2, module.down_proj.shape[0])
    with probing(module):
        for transposed in (False, True):
            gate_up, down = _weights_of(module, transposed)
            d, h = down.shape[1:]
            if gate_up.shape != (experts, 2 * h, d):
                continue
            near = random_rows(3, d, like=down)
            ids = torch.arange(3 * choices, device=down.device).view(3, choices) % experts
            weights = random_rows(3, choices, like=down).abs()
            tried = [(x, module(x, ids, weights)) for x in (near, far_rows(near, gate_up[0]))]
            for packing in ("halves", "interleaved"):
                if all(is_close(reference.moe_ffn(x, ids, weights, gate_up, None, down, *biases, act,
                                                  packing, "after", 0, ""), theirs)
                       for x, theirs in tried):
                    return _Experts(act, packing, transposed, biases[0] is not None,
                                    options.recompute)
    raise Unfit(f"{type(module).__name__} is no weighted sum of down(act(gate(x)) * up(x))")


@undoable
def _experts_forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
                     ) -> Tensor:
    found, = self._fftune
    if getattr(self, "_is_expert_parallel", False) or not has_kernels(hidden_states) \
            or watched(*parts_of(self)):
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
        with torch.inference_mode(False):
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
    uncast: bool  # under autocast too
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
    key = kind_of(router), router.weight.dtype, router.weight.shape
    found = remembered(known, key, lambda: _router_of(router))
    replace_forward(router, _router_forward, (found,))
    return (f"{type(router).__name__} by moe-route "
            f"({found.score}{', after the choice' if found.order == 'after' else ''})")


def _looks_like_router(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (isinstance(weight, nn.Parameter) and weight.dim() == 2
            and isinstance(getattr(module, "top_k", None), int)
            and type(module) is not nn.Linear and next(module.children(), None) is None)


def _logits(router: nn.Module, x: Tensor, wide: bool, uncast: bool = False) -> Tensor:
    weight, bias = router.weight, getattr(router, "bias", None)
    if wide:
        x, weight, bias = (None if t is None else t.float() for t in (x, weight, bias))
    with torch.autocast(x.device.type, enabled=False) if uncast else nullcontext():
        return nn.functional.linear(x, weight, bias)


def _router_of(router: nn.Module) -> _Router:
    """Of all that moe-route computes, what the router does."""
    experts, d = router.weight.shape
    others = {name: t for name, t in (*router.named_parameters(), *router.named_buffers())
              if name not in ("weight", "bias")}
    bias = next((name for name, t in others.items()
                 if t.shape == (experts,) and t.is_floating_point()), None)
    groups, top_groups = (next((getattr(router, name) for name in names
                                if isinstance(getattr(router, name, None), int)), 0)
                          for names in (("num_group", "n_group"), ("topk_group",)))
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    # Weights and biases may still be zeros, which tell nothing of what is made of them. A bias below
    # every score shows whether groups that are left out count as 0 or as less than all others.
    values = {router.weight: random_rows(experts, d, like=router.weight) * d ** -0.5}
    if getattr(router, "bias", None) is not None:
        values[router.bias] = random_rows(experts, like=router.bias)
    if bias:
        values[others[bias]] = random_rows(experts, like=others[bias]) - 4
    with probing(router), standing_in(values):
        x = random_rows(64, d, like=router.weight)
        x[32:] *= 3
        theirs = router(x)
        if not isinstance(theirs, tuple) or len(theirs) != 3:
            raise Unfit(f"{type(router).__name__} does not give logits, weights and ids")
        logits, weights, ids = theirs
        wide = next((wide for wide in (False, True) for own in (_logits(router, x, wide),)
                     if own.dtype == logits.dtype and is_close(own, logits)), None)
        if wide is None:
            raise Unfit(f"{type(router).__name__} computes its logits in a way that is not known")
        with torch.autocast(x.device.type, torch.bfloat16):
            uncast = router(x)[0].dtype is torch.float32
        right = _by_logits(logits, weights, ids)
        for (score, order), renormalise, group, own_scale in product(
                (("softmax", "before"), ("softmax", "after"), ("sigmoid", "before")),
                (False, True), (("max", 0, 0), ("max", groups, top_groups),
                                ("top2", groups, top_groups)), (1.0, scale)):
            found = _Router(score, order, renormalise, *group[1:], group[0], own_scale,
                            wide or uncast, uncast, bias)
            mine = _by_logits(logits, *reference.moe_route(
                logits, others[bias] if bias else None, router.top_k, score, order, found.groups,
                found.top_groups, found.group_score, renormalise, own_scale))
            if torch.equal(mine[0], right[0]) and is_close(
                    mine[1], right[1], 8 * torch.finfo(weights.dtype).eps):
                return found
    raise Unfit(f"{type(router).__name__} chooses in a way that is not known")


def _by_logits(logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of the experts chosen, the largest first, and their weights: which of two experts
    with the same logit is chosen makes no difference."""
    chosen, order = logits.gather(1, ids.long()).sort(dim=1, descending=True)
    return chosen, weights.float().gather(1, order)


def router_of(module: nn.Module) -> _Router | None:
    """What patch_router() found the module to be."""
    return module._fftune[0] if is_patched(module, _router_forward) else None


@undoable
def _router_forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not has_kernels(hidden_states):
        return original(self, hidden_states)
    found, = self._fftune
    logits = _logits(self, hidden_states.reshape(-1, self.weight.shape[1]), found.wide,
                     found.uncast)
    ids, weights = ops.moe_route(
        logits, self.top_k, bias=getattr(self, found.bias) if found.bias else None,
        score=found.score, order=found.order, groups=found.groups, top_groups=found.top_groups,
        group_score=found.group_score, renormalise=found.renormalise, scale=found.scale)
    return logits, weights, ids

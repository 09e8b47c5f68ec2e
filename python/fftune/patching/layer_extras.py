"""Parts of layers beside norms, attention and MLP. Gemma 4 has experts beside the MLP with norms of their own, inputs
of each layer for each token, and layers without keys of their own. Mistral has queries with factors by position."""
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import reference
from .analytic import CHOICES
from .recognise import Foreign, Numbers, Unfit, expect_no_hooks, identify, stand_in

# As transformers calls them.
_INPUT = ("per_layer_input_gate", "act_fn", "per_layer_projection", "post_per_layer_input_norm")
INPUT_ARGUMENT = "per_layer_input"
_EXPERTS = ("router", "experts")
_EXPERT_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
STATES_ARGUMENT = "shared_kv_states"


@dataclass(frozen=True)
class Extras:
    """Names of parts: a gate, an activation, a projection and a norm of the layer's own input; a router and experts;
    and the norms behind the MLP beside them, in front of the experts, and behind these."""

    input: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        return {*self.input, *self.experts, *self.norms}


def extras_of(layer: nn.Module) -> Extras:
    """Whether the layer has such parts; what it computes is compared later."""
    own, parameters = layer._modules, inspect.signature(type(layer).forward).parameters
    has_input = {*_INPUT} <= {*own} and INPUT_ARGUMENT in parameters
    has_experts = {*_EXPERTS, *_EXPERT_NORMS} <= {*own}
    return Extras(_INPUT if has_input else (), *((_EXPERTS, _EXPERT_NORMS) if has_experts else ((), ())))


class AffineRouter(nn.Module):
    """Stands in for a router: gives an affine function of what it takes for weights, and another for ids."""

    def __init__(self):
        super().__init__()
        self.register_buffer("line", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[None, Tensor, Tensor]:
        return None, x * self.line[0] + self.line[1], x * self.line[1] - self.line[0]


class AffineExperts(nn.Module):
    """Stands in for experts: an affine function of all that they take."""

    def __init__(self):
        super().__init__()
        self.register_buffer("line", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return x * self.line[0] + ids * self.line[1] + weights * self.line[2] + self.line[3]


def with_experts(layer: nn.Module, extras: Extras, mid: Tensor, mlp: Tensor) -> Tensor:
    """The tensor that the layer adds to mid by its norm, in the place of the MLP's result."""
    own = layer._modules
    (router, experts), (behind_mlp, before, behind) = extras.experts, extras.norms
    flat = mid.reshape(-1, mid.shape[-1])
    _, weights, ids = own[router](flat)
    return own[behind_mlp](mlp) + own[behind](own[experts](own[before](flat), ids, weights).view(mid.shape))


def with_input(layer: nn.Module, extras: Extras, y: Tensor, given: Tensor) -> Tensor:
    gate, act, projection, norm = (layer._modules[name] for name in extras.input)
    return y + norm(projection(act(gate(y)) * given))


def expect_router(router: nn.Module) -> tuple[float, int]:
    """The eps of the norm in front of a router that has such a norm, a factor of each feature, and one of each expert
    for the weights, and how many experts a token chooses."""
    subject = f"layers: {type(router).__name__}"
    parameters = {name for name, _ in router.named_parameters()}
    top_k = getattr(getattr(router, "config", None), "top_k_experts", None)
    if parameters != {"proj.weight", "scale", "per_expert_scale"} or next(router.buffers(), None) is not None \
            or type(router._modules["proj"]) is not nn.Linear or not isinstance(top_k, int):
        raise Unfit(f"{subject} is no router that is known")
    for module in router.modules():
        expect_no_hooks(module)
    experts, width = router.proj.weight.shape
    own = stand_in(router, {} if experts == width else {width: 24} if experts != 24 else {width: 20})
    eps = getattr(router, "eps", None)
    if not isinstance(eps, float):
        raise Unfit(f"{subject} has no eps")

    def compute(own_eps: float, root: bool, scaled: bool) -> Callable:
        def of(x: Tensor) -> Tensor:
            # stand-ins keep the factor of the number of features that the router has
            factor = own.scale * router.scalar_root_size if root else own.scale
            scores = (reference.rmsnorm(x, factor, own_eps, "t5") @ own.proj.weight.mT).softmax(-1)
            weights, ids = scores.topk(top_k, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            return _by_expert(weights * own.per_expert_scale[ids] if scaled else weights, ids, experts)
        return of

    if getattr(router, "scalar_root_size", None) != width ** -0.5:
        raise Unfit(f"{subject} has another factor than one by its features")
    known = {eps: compute(eps, True, True), Foreign("no factor of features"): compute(eps, False, True),
             Foreign("no factors of experts"): compute(eps, True, False)}
    known |= {Foreign(f"eps of {other}"): compute(other, True, True) for other in (0.0, eps * 10) if other != eps}

    def draw(numbers: Numbers) -> Tensor:
        numbers.fill(own)
        own.proj.weight.mul_(3 * width ** 0.5)
        scales = (1.0, 8.0, 0.05, eps ** 0.5)
        return numbers(6, own.proj.weight.shape[1]) * scales[numbers.seed % 4]

    def theirs(x: Tensor) -> Tensor:
        _, weights, ids = own(x)
        return _by_expert(weights, ids, experts)

    return identify(theirs, known, draw, subject=subject, free=CHOICES | {"pow"}, sizes=False), top_k


def _by_expert(weights: Tensor, ids: Tensor, experts: int) -> Tensor:
    return weights.new_zeros(len(weights), experts).scatter(1, ids, weights)


# keys of another layer

@dataclass(frozen=True)
class KeySharing:
    """How a layer gives its keys and values to others, or takes those of another, by a key."""

    key: str
    takes: bool


def sharing_of(attention: nn.Module) -> KeySharing | None:
    key = getattr(attention, "layer_type", None)
    takes, gives = (getattr(attention, name, False) for name in ("is_kv_shared_layer", "store_full_length_kv"))
    if STATES_ARGUMENT not in inspect.signature(type(attention).forward).parameters or not (takes or gives):
        return None
    if not isinstance(key, str) or takes and gives:
        raise Unfit(f"layers: {type(attention).__name__} shares keys in a way that is not known")
    return KeySharing(key, bool(takes))


def source_of(attention: nn.Module, layers: nn.ModuleList, name: str) -> int:
    """The number of the layer whose keys and values an attention takes: the last one before it that gives them by the
    same key."""
    wanted = sharing_of(attention)
    for layer in [*layers][:attention.layer_idx][::-1]:
        other = layer._modules.get(name)
        if other is not None and (found := sharing_of(other)) == KeySharing(wanted.key, False):
            return other.layer_idx
    raise Unfit(f"layers: {type(attention).__name__} takes keys that no layer before it gives")


class SharedStates(dict):
    """The keys and values that layers share, in a call of a layer alone: those of its cache."""

    def __init__(self, sharing: KeySharing | None, keys: Tensor, values: Tensor):
        super().__init__({sharing.key: (keys, values)} if sharing is not None and sharing.takes else {})
        self.sharing, self.pair, self.given = sharing, (keys, values), {}

    def __setitem__(self, key, pair) -> None:
        self.given[key] = pair

    def expect_as_known(self, subject: str) -> None:
        """That the layer gave others its keys and values, if it does, and nothing else."""
        gives = self.sharing is not None and not self.sharing.takes
        if {*self.given} != ({self.sharing.key} if gives else set()) or any(
                one is not other for pair in self.given.values() for one, other in zip(pair, self.pair)):
            raise Unfit(f"layers: {subject} shares keys in a way that is not known")


# factors of queries

@dataclass(frozen=True)
class QueryFactors:
    """1 + beta log(1 + floor(position / context))."""

    beta: float
    context: int

    def of(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Those of positions, rounded as the model does."""
        return (1 + self.beta * torch.log(1 + torch.floor(positions / self.context))).to(dtype).float()


def query_factors_of(config) -> QueryFactors | None:
    given = getattr(config, "rope_parameters", None)
    if not isinstance(given, Mapping):
        return None
    beta, context = (given.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    if not isinstance(beta, float) or beta == 0 or not math.isfinite(beta) or not isinstance(context, int) \
            or context < 1:
        return None
    return QueryFactors(beta, context)

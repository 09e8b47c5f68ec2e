"""patch() on mixtures of experts: the experts of a layer, their router, and the layer around them.

The experts of transformers 5 are one module with the weights of all of them, gate_up_proj and
down_proj, and a forward(hidden_states, ids, weights). The router beside them gives (logits,
weights, ids).
"""
import functools
import inspect
import math
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops, reference
from .analytic import CHOICES, INTEGERS
from .recognise import (SCALES, KNOWN_ACTIVATIONS, RELU_SQUARED, Elsewhere, Foreign, Numbers, Options, Unfit, are_plain,
                        configured, expect_configured_activation, expect_no_hooks, expect_plain, has_kernels,
                        has_settings, identify, is_close, is_patched, kind_of, original, parts_of, parts_watched, remembered,
                        stand_in, undoable, view_of, watched)
from .trial import Trial, replace_forward, tokens_of


@dataclass(frozen=True)
class ExpertsFound:
    """The computation of a module's experts."""

    act: str
    packing: str
    transposed: bool  # weights are [experts, in, out]
    biased: bool
    recompute: bool = False


def patch_experts(module: nn.Module, known: dict, options: Options) -> str | None:
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in (gate_up, down)):
        return None
    expect_plain(module)
    if getattr(module, "has_post_expert_norm", False):
        raise Unfit("experts with a norm of their own")
    expect_no_hooks(*parts_of(module))
    found = replace(remembered(known, kind_of(module), lambda: _experts_of(module)),
                    recompute=options.recompute)
    if found.transposed:
        lay_out(module)
    count, *sizes = module.down_proj.shape
    try:
        replace_forward(module, experts_forward, (found,), of_experts(count, sizes[-found.transposed]), known)
    except Unfit:
        if found.transposed:
            _lay_back(module)
        raise
    details = found.act, found.packing, *(["biases"] if found.biased else [])
    return f"{type(module).__name__} by moe-ffn ({', '.join(details)})"


def lay_out(module: nn.Module) -> None:
    """Transposed weights become what the kernels read, rows of outputs: the same numbers, the last
    two dimensions the other way round in memory."""
    # Under inference_mode parameters would become unfit for gradients.
    with torch.inference_mode(False):
        for weight in (module.gate_up_proj, module.down_proj):
            weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)


def _lay_back(module: nn.Module) -> None:
    with torch.inference_mode(False):
        for weight in (module.gate_up_proj, module.down_proj):
            weight.data = weight.data.contiguous()


def of_experts(experts: int, width: int, **options) -> Trial:
    """A call with hidden states, choices and their weights."""
    def given(numbers: Numbers, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = math.prod(tokens_of(width, like))
        ids = torch.stack([torch.randperm(experts, generator=numbers.generator)[:2] for _ in range(rows)])
        return numbers(rows, width), ids, numbers(*ids.shape).abs()
    return Trial(given, **options)


def _weights_of(module: nn.Module, transposed: bool) -> tuple[Tensor, Tensor]:
    """[experts, 2h, d] and [experts, d, h]"""
    weights = module.gate_up_proj, module.down_proj
    return tuple(w.transpose(1, 2) for w in weights) if transposed else weights


def _biases_of(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    return tuple(getattr(module, name, None) for name in ("gate_up_proj_bias", "down_proj_bias"))


_FULL_SIZE = 1 << 22  # elements of a module up to which its stand-in has all of them


def _smaller(module: nn.Module, transposed: bool) -> dict[int, int]:
    """Sizes of a stand-in for experts that are large."""
    experts, d, h = module.down_proj.shape
    return smaller_sizes(experts, *((h, d) if transposed else (d, h)))


def smaller_sizes(experts: int, d: int, h: int) -> dict[int, int]:
    if experts * d * h <= _FULL_SIZE:
        return {}
    small_h = 32
    small_d = {h: small_h, 2 * h: 2 * small_h}.get(d, 64)
    return {experts: min(experts, 6), h: small_h, 2 * h: 2 * small_h, d: small_d}


def _limited(act: str, limit: float, clamps_up: bool):
    def compute(gate, up):
        up = up.clamp(-limit, limit) if clamps_up else up
        return KNOWN_ACTIVATIONS[act](gate.clamp(max=limit)) * up
    return compute


def _oai(limit: float, alpha: float, added: float):
    def compute(gate, up):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + added) * gate * torch.sigmoid(alpha * gate)
    return compute


# Activations of gate and up that experts are known to have. The first ones are the kernels'.
GATED = {act: (lambda gate, up, act=act: KNOWN_ACTIVATIONS[act](gate) * up)
          for act in KNOWN_ACTIVATIONS}
GATED["swiglu-oai"] = _oai(7.0, 1.702, 1.0)
GATED |= {Foreign(f"{act} within {limit}{', up too' if up else ''}"): _limited(act, limit, up)
           for act in ("silu", "gelu", "gelu-tanh") for limit in (7.0, 10.0, 16.0)
           for up in (False, True)}
GATED |= {Foreign(f"swiglu-oai with {numbers}"): _oai(*numbers) for numbers in (
    (7.0, 1.0, 1.0), (7.0, 1.702, 0.0), (7.0, 1.0, 0.0), (10.0, 1.702, 1.0),
    (float("inf"), 1.702, 1.0))}


def _experts_of(module: nn.Module) -> ExpertsFound:
    biases = _biases_of(module)
    names = {name for name, _ in module.named_parameters()}
    extra = names - {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}
    if extra or (biases[0] is None) != (biases[1] is None):
        raise Unfit(f"experts with parameters that are not known: {', '.join(sorted(names))}")
    forms = [transposed for transposed in (False, True) for gate_up, down in
             (_weights_of(module, transposed),)
             if gate_up.shape == (len(down), 2 * down.shape[2], down.shape[1])]
    if not forms:
        raise Unfit(f"{type(module).__name__} is no weighted sum of down(act(gate(x)) * up(x)): its "
                    "weights have other shapes")
    subject = type(module).__name__
    own = stand_in(module, _smaller(module, forms[0]))
    known = {}
    for act, *form in product(GATED, ("halves", "interleaved"), forms):
        known[known_by(act, *form)] = _experts_computed(own, act, *form, "after")
        known[Foreign(f"{act} weighed before", (act, *form))] = _experts_computed(own, act, *form, "before")
    act, packing, transposed = identify(
        lambda given: own(*given), known, lambda numbers: _draw(own, forms[0], numbers), subject=subject,
        free=(INTEGERS,), elsewhere=Elsewhere(own))
    if act != "swiglu-oai":
        expect_configured_activation(module, act)
    result = ExpertsFound(act, packing, transposed, biases[0] is not None)
    for dtype in {torch.float32, module.down_proj.dtype}:
        own = stand_in(module, _smaller(module, transposed), dtype)
        given = _draw(own, transposed, Numbers(99))
        if has_kernels(given[0]):
            mine = _run_experts(own, result, *given)
        else:
            gate_up, down = _weights_of(own, transposed)
            mine = reference.moe_ffn(*given, gate_up, None, down, *_biases_of(own), act, packing,
                                     "after", 0, "")
        if not is_close(mine, own(*given)):
            raise Unfit(f"{subject} computes something else in {dtype}")
    return result


def known_by(act: str | Foreign, *form: Hashable) -> tuple | Foreign:
    """The key of an activation in a form; it is a Foreign one if the activation is."""
    return replace(act, form=form) if isinstance(act, Foreign) else (act, *form)


def _draw(own: nn.Module, transposed: bool, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """New weights for the stand-in; hidden states, choices and their weights."""
    numbers.fill(own)
    _, down = _weights_of(own, transposed)
    experts, d, h = down.shape
    if transposed:  # its inputs are another dimension
        own.gate_up_proj.mul_((2 * h / d) ** 0.5)
        own.down_proj.mul_((d / h) ** 0.5)
    choices = min(2, experts)
    x = numbers(5, d, like=down) * SCALES[numbers.seed % len(SCALES)]
    ids = torch.stack([torch.randperm(experts, generator=numbers.generator)[:choices]
                       for _ in range(5)])
    return x, ids, numbers(5, choices, like=down).abs() + 0.1


def _chosen(rows: Tensor, ids: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
    """The products of rows [tokens, choices, features] with the weights of the experts that they chose."""
    y = (rows[..., None, :] @ weights[ids].mT)[..., 0, :]
    return y if biases is None else y + biases[ids]


def _experts_computed(own: nn.Module, act, packing: str, transposed: bool, weigh: str):
    """A computation of (hidden states, choices, their weights) with the weights of the stand-in."""
    def compute(given):
        x, ids, weights = given
        gate_up, down = _weights_of(own, transposed)
        b_gate_up, b_down = _biases_of(own)
        share = weights[..., None]  # [tokens, choices, 1]
        rows = x[:, None].expand(*ids.shape, -1)
        both = _chosen(rows if weigh == "after" else rows * share, ids, gate_up, b_gate_up)
        gate, up = both.chunk(2, -1) if packing == "halves" else (both[..., 0::2], both[..., 1::2])
        out = _chosen(GATED[act](gate, up), ids, down, b_down)
        return (out * share if weigh == "after" else out).sum(1)
    return compute


def _run_experts(module: nn.Module, found: ExpertsFound, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    gate_up, down = _weights_of(module, found.transposed)
    return ops.moe_ffn(x, ids, weights, gate_up, None, down,
                       biases=_biases_of(module) if found.biased else None, act=found.act,
                       packing=found.packing, recompute=found.recompute)


def _serves(experts: nn.Module, x: Tensor) -> bool:
    return not (getattr(experts, "_is_expert_parallel", False) or not has_kernels(x) or parts_watched(experts)
                or not are_plain(*experts._parameters.values()))


@undoable
def experts_forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
                     ) -> Tensor:
    found, = self._fftune
    if not _serves(self, hidden_states):
        return original(self, hidden_states, top_k_index, top_k_weights)
    return _run_experts(self, found, hidden_states, top_k_index, top_k_weights)


def experts_of(module: nn.Module) -> ExpertsFound | None:
    """The properties that patch_experts() recognised in the module."""
    return module._fftune[0] if is_patched(module, experts_forward) else None


def is_squared_experts(module: nn.Module, known: dict) -> bool:
    """Whether these are experts without gates and with relu(x)². They are the model's but in whole layers."""
    up, down = (getattr(module, name, None) for name in ("up_proj", "down_proj"))
    if not all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in (up, down)) \
            or {name for name, _ in module.named_parameters()} != {"up_proj", "down_proj"} \
            or up.shape != (len(down), *down.shape[:0:-1]) or "forward" in module.__dict__:
        return False
    expect_no_hooks(*module.modules())
    try:
        return remembered(known, ("squares", kind_of(module)), lambda: _expect_squares(module))
    except Unfit:
        return False


def _expect_squares(module: nn.Module) -> bool:
    own = stand_in(module, smaller_sizes(*module.down_proj.shape))

    def computed(act, weigh: str):
        def compute(given):
            x, ids, weights = given
            share, rows = weights[..., None], x[:, None].expand(*ids.shape, -1)
            hidden = act(_chosen(rows if weigh == "after" else rows * share, ids, own.up_proj, None))
            out = _chosen(hidden, ids, own.down_proj, None)
            return (out * share if weigh == "after" else out).sum(1)
        return compute

    def draw(numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
        numbers.fill(own)
        experts, d, _ = own.down_proj.shape
        choices = min(2, experts)
        ids = torch.stack([torch.randperm(experts, generator=numbers.generator)[:choices] for _ in range(5)])
        return numbers(5, d) * SCALES[numbers.seed % len(SCALES)], ids, numbers(5, choices).abs() + 0.1

    known = {}
    for name, act in KNOWN_ACTIVATIONS.items():
        known[True if name == RELU_SQUARED else known_by(name)] = computed(act, "after")
        known[Foreign(f"{name} weighed before", (name,))] = computed(act, "before")
    return identify(lambda given: own(*given), known, draw, subject=type(module).__name__, free=(INTEGERS,),
                    elsewhere=Elsewhere(own)) is True


def recognised_router(router: nn.Module, block: nn.Module, known: dict) -> "RouterFound | None":
    """Recognises the router of a block whose experts stay the model's, so that patch_router() did not look at it; None
    of other modules."""
    if not _looks_like_router(router) or "forward" in router.__dict__:
        return None
    expect_no_hooks(router)
    whole = _with_bias_of(router, block)
    return replace(remembered(known, kind_of(whole), lambda: _router_of(whole)), given=whole is not router)


def restore_experts(module: nn.Module) -> None:
    """Takes back how transposed weights were laid out."""
    settings = module.__dict__.get("_fftune")
    if settings and isinstance(settings[0], ExpertsFound) and settings[0].transposed:
        _lay_back(module)


# routers

@dataclass(frozen=True)
class RouterFound:
    """Options of ops.moe_route, and the type that the logits are computed in."""

    score: str
    order: str
    renormalise: bool
    groups: int
    top_groups: int
    group_score: str
    scale: float
    bias: str | None  # the name of what is added for the choice alone
    added: float | None = None  # to the sum by which weights are divided after the op, if they are
    wide: bool = False
    widened: bool = False  # the logits, once they are computed
    uncast: bool = False  # under autocast too
    given: bool = False  # its block has the bias, and hands it to the router

    @property
    def is_simple(self) -> bool:
        """Whether it is all in score, order and renormalise."""
        return self == RouterFound(self.score, self.order, self.renormalise, 0, 0, "max", 1.0, None)


def patch_router(module: nn.Module, known: dict, options: Options) -> str | None:
    """Patches the router of a block whose experts are patched."""
    children = dict(module.named_children())
    if not hasattr(getattr(children.get("experts"), "__dict__", {}).get("forward"), "_fftune"):
        return None
    routers = [child for name, child in children.items() if _looks_like_router(child)]
    if len(routers) != 1:
        return None
    router, = routers
    expect_plain(router)
    expect_no_hooks(router)
    whole = _with_bias_of(router, module)
    found = remembered(known, kind_of(whole), lambda: _router_of(whole))
    found = replace(found, given=whole is not router)
    narrow, flattens = remembered(known, ("results", kind_of(whole)), lambda: _results_of(whole))
    (experts, width), first = router.weight.shape, 0 if flattens else 1

    def draw(numbers: Numbers, like: Tensor) -> tuple:
        x = numbers(*tokens_of(width, like)[first:], width)
        return (x, numbers(experts) if found.bias else None) if found.given else (x,)

    replace_forward(router, router_forward, (found, narrow, flattens), Trial(draw, compares=False), known)
    router.__dict__["_fftune_reader"] = children["experts"]
    return (f"{type(router).__name__} by moe-route "
            f"({found.score}{', after the choice' if found.order == 'after' else ''})")


def _with_bias_of(router: nn.Module, block: nn.Module) -> nn.Module:
    """The router itself; or if its block hands it a bias that the block has, as in LFM2-MoE, a view of the router that
    has this bias."""
    parameters = list(inspect.signature(type(router).forward).parameters.values())
    if len(parameters) != 3 or parameters[2].default is not None:
        return router
    biases = {name: t for name, t in block._buffers.items() if t is not None}
    experts = router.weight.shape[:1]
    if len(biases) > 1 or any(t.shape != experts or hasattr(router, name) for name, t in biases.items()):
        return router
    view = view_of(router, {})
    view.__dict__["_buffers"] = {**router._buffers, **biases}
    view.__class__ = _kind_with_bias(type(router), next(iter(biases), ""))
    return view


@functools.cache
def _kind_with_bias(kind: type, bias: str) -> type:
    """The class of such views: its forward takes hidden states alone."""
    def forward(self, hidden_states: Tensor):
        return kind.forward(self, hidden_states, getattr(self, bias) if bias else None)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _results_of(router: nn.Module) -> tuple[bool, bool]:
    """Whether its weights have the type of bf16 hidden states, and whether it makes rows of tokens of sequences."""
    own = stand_in(router, dtype=torch.bfloat16)
    x = own.weight.new_zeros(2, 3, own.weight.shape[1])
    with torch.no_grad():
        narrow = own(x[0])[1].dtype == torch.bfloat16
        try:
            return narrow, own(x)[0].dim() == 2
        except Exception:  # it takes rows
            return narrow, False


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
        return F.linear(x, weight, bias)


# A choice is by scores, which are `select` of the logits, with a bias or without; of the groups of
# experts that are kept, if there are groups; and the rest has the score `masked`.

@dataclass(frozen=True)
class _Choice:
    select: str
    biased: bool
    group: str | None
    groups: int
    top_groups: int
    masked: float

    def canonical(self, experts: int, top_k: int) -> "_Choice":
        """One form of those that choose the same for all logits, but for scores that underflow."""
        size = experts // max(self.groups, 1)
        group = self.group
        if group in ("two", "sum") and size == 1:
            group = "max"
        if group == "sum" and size == 2:
            group = "two"
        if top_k == experts:
            return _Choice("logits", False, None, 0, 0, 0.0)
        # Without a bias scores are positive, and in the order of the logits.
        masked = self.masked if self.biased or self.select == "logits" else float("-inf")
        # The best k experts are in at most k groups, those of the k largest maxima.
        if group is None or self.top_groups >= self.groups \
                or group == "max" and top_k <= self.top_groups and masked < 0:
            return _Choice(self.select if self.biased else "logits", self.biased, None, 0, 0, 0.0)
        select = "logits" if not self.biased and group == "max" and masked < 0 else self.select
        return _Choice(select, self.biased, group, self.groups, self.top_groups, masked)

    def ids(self, logits: Tensor, bias: Tensor | None, top_k: int) -> Tensor:
        by = _SCORES[self.select](logits)
        if self.biased:
            by = by + bias
        if self.group:
            grouped = by.unflatten(-1, (self.groups, -1))
            of_groups = grouped.topk(_COUNTED[self.group] or grouped.shape[-1], -1)[0].sum(-1)
            kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter(
                -1, of_groups.topk(self.top_groups, -1)[1], True)
            by = grouped.masked_fill(~kept[..., None], self.masked).flatten(-2)
        return by.topk(top_k, -1)[1]


_SCORES = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "logits": lambda x: x,
           "softplus": F.softplus, "sqrt-softplus": lambda x: F.softplus(x).sqrt()}
_COUNTED = {"max": 1, "two": 2, "sum": 0}  # scores of a group that are added; all for 0


@dataclass(frozen=True)
class _Weighing:
    """Weights are `score` of the chosen logits, with the bias or without it; divided by their sum and
    `added`, unless that is None; times `scale`."""

    score: str
    biased: bool
    added: float | None
    scale: float

    def canonical(self, experts: int, top_k: int) -> "_Weighing":
        """One form of those that weigh the same for all logits, but for scores that underflow."""
        usual = _Weighing("softmax", False, 0.0, self.scale)
        if top_k == 1 and (self.added == 0.0 or self.score == "sqrt-softplus" and self.added is not None
                           and self.added < 1e-9):
            return usual
        if top_k == 1 and self.score == "softplus" and not self.biased and self.added is not None \
                and self.added < 1e-9:  # of scores as small, where a sigmoid is the same
            return replace(self, score="sigmoid")
        if self.biased or self.score not in ("softmax", "chosen"):
            return self
        if top_k == experts and self.added is None:
            return usual
        # A softmax over the chosen is one over all, divided by its sum, which is at least k / experts.
        least = 1.0 if self.score == "chosen" else top_k / experts
        counts = self.added is not None and self.added > 4e-6 * least
        if self.score == "chosen" or self.added is not None:
            return self if counts else usual
        return self

    def weights(self, logits: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
        if self.score == "chosen":
            weights = logits.gather(-1, ids).softmax(-1)
        else:
            scores = _SCORES[self.score](logits)
            weights = (scores + bias if self.biased else scores).gather(-1, ids)
        if self.added is not None:
            weights = weights / (weights.sum(-1, keepdim=True) + self.added)
        return weights * self.scale


_ADDED = (None, 0.0, 1e-20, 1e-15, 1e-12, 1e-9, 1e-6)
_ROWS = 48


def _bias_of(router: nn.Module, experts: int) -> str | None:
    """The name of what may be added to scores."""
    names = [name for name, t in (*router.named_parameters(), *router.named_buffers())
             if name not in ("weight", "bias")]
    fit = [name for name in names if getattr(router, name).shape == (experts,)
           and getattr(router, name).is_floating_point()]
    if fit != names or len(names) > 1:
        raise Unfit(f"{type(router).__name__} has tensors that are not known: {', '.join(names)}")
    return names[0] if names else None


def _router_of(router: nn.Module) -> RouterFound:
    """Finds the options with which moe-route does as the router."""
    subject = type(router).__name__
    if len(inspect.signature(type(router).forward).parameters) != 2:
        raise Unfit(f"{subject} takes more than hidden states")
    experts, d = router.weight.shape
    bias = _bias_of(router, experts)
    wide, widened = _logits_of(router, subject)
    # With the unit matrix as weight hidden states are the logits: any logits can be tried.
    own = stand_in(router, {} if experts == d else {d: experts})
    if own.weight.shape != (experts, experts):
        raise Unfit(f"{subject} has sizes that cannot be told apart")
    with torch.no_grad():
        own.weight.copy_(torch.eye(experts))
    choice = _choice_of(own, router, bias, subject)
    weighing = _weighing_of(own, router, bias, subject)
    x = Numbers(0)(4, experts)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logits = own(x)[0]
    uncast = logits.dtype is torch.float32 and is_close(_plus(own, x), logits)
    found = replace(_as_op(choice, weighing, bias, experts, router.top_k, subject),
                    wide=wide or uncast, widened=widened, uncast=uncast)
    says = configured(router, "norm_topk_prob")
    divides = weighing.canonical(experts, router.top_k).added is not None
    if isinstance(says, bool) and says != divides and 1 < router.top_k < experts:
        raise Unfit(f"{subject} says norm_topk_prob = {says}, and does not do so")
    for dtype in {torch.float32, router.weight.dtype} - {torch.float16}:
        _expect_same_route(stand_in(own, dtype=dtype), found, subject)
    return found


def _logits_of(router: nn.Module, subject: str) -> tuple[bool, bool]:
    """Whether they are computed in float32 from bf16, and whether they are turned into it."""
    experts, d = router.weight.shape
    sizes = {d: 64} if experts * d > _FULL_SIZE and experts != d else {}
    forms = [(False, False), (True, False), (False, True)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        own = stand_in(router, sizes, dtype)

        def draw(numbers):
            numbers.fill(own)
            return numbers(6, own.weight.shape[1], like=own.weight) * SCALES[
                numbers.seed % len(SCALES)]

        def theirs(x):
            result = own(x)
            if not isinstance(result, tuple) or len(result) != 3:
                raise Unfit(f"{subject} does not give logits, weights and ids")
            return result[0]

        def computed(wide, widened):
            return lambda x: _logits(own, x, wide).float() if widened else _logits(own, x, wide)

        exact = dtype == torch.float32
        try:
            found = identify(
                theirs, {form: computed(*form) for form in forms}, draw, subject=subject,
                # In float32 all of them are one.
                canonical=(lambda form: exact or form),
                agrees=lambda ours, right: ours.dtype == right.dtype and is_close(ours, right), free=CHOICES)
        except Unfit as reason:
            raise Unfit(f"{subject} computes its logits in a way that is not known: {reason}") from None
    return found


def _draw_logits(own: nn.Module, bias: str | None, numbers: Numbers) -> Tensor:
    """Rows of logits by which every choice and every weighing that is known differs from the others,
    for a router whose weight is the unit matrix; with a new bias."""
    experts, seed, like = len(own.weight), numbers.seed, own.weight
    if getattr(own, "bias", None) is not None:
        own.bias.copy_(numbers(experts) * 0.5)
    spread = (1.5, 0.3, 3.0)[seed % 3]
    rows = numbers(_ROWS, experts) * spread
    if seed % 2:
        # Groups of one size: in each row one has the best expert, and its others are the worst.
        sizes = [n for n in range(1, experts + 1) if experts % n == 0]
        for row, size in enumerate(sizes * (1 + _ROWS // len(sizes))):
            if row == _ROWS:
                break
            first = int(torch.randint(experts // size, (), generator=numbers.generator)) * size
            rows[row] = numbers(experts) * 0.1
            rows[row, first:first + size] -= 5
            best = int(torch.randint(size, (), generator=numbers.generator))
            rows[row, first + best] = 0.45 + 0.05 * rows[row, first + best].abs().clamp(max=1)
    # Sigmoids may be so small that what is added to their sum counts.
    rows = rows + (0.0, 0.0, -1.0, -20.0, -47.0, -30.0)[seed % 6]
    if bias:
        # Below every score it tells what is left out from what has the score 0; a small one decides
        # little.
        own_bias = numbers(experts) * (1.0, 1e-3)[seed // 2 % 2] - (4.0 if seed % 4 == 0 else 0.0)
        getattr(own, bias).copy_(own_bias)
    return rows.to(like.dtype)


def _plus(own: nn.Module, x: Tensor) -> Tensor:
    own_bias = getattr(own, "bias", None)
    return x if own_bias is None else x + own_bias


def _choice_of(own: nn.Module, router: nn.Module, bias: str | None, subject: str) -> _Choice:
    experts, top_k = len(own.weight), router.top_k
    groups, top_groups = (configured(router, *names) or 0 for names in (
        ("num_group", "n_group", "num_groups"), ("topk_group", "top_groups")))
    kinds = [(None, 0, 0)]
    if 1 <= top_groups <= groups and experts % groups == 0:
        kinds += [(kind, groups, top_groups) for kind in _COUNTED
                  if kind != "two" or experts // groups > 1]
    choices = [_Choice(select, biased, *group, masked) for select, biased, group, masked in product(
        _SCORES, {bias is not None, False}, kinds, (float("-inf"), 0.0))
        if group[0] or masked < 0]

    def by_logits(x, ids):
        return _plus(own, x).gather(1, ids.long()).sort(dim=1, descending=True)[0]

    found = identify(
        lambda x: by_logits(x, own(x)[2]),
        {choice: (lambda x, choice=choice: by_logits(x, choice.ids(
            _plus(own, x), getattr(own, bias) if bias else None, top_k))) for choice in choices},
        lambda numbers: _draw_logits(own, bias, numbers), subject=f"the choice of {subject}",
        canonical=lambda choice: choice.canonical(experts, top_k), agrees=torch.equal, least=12, free=CHOICES,
        elsewhere=Elsewhere(own, types=()))
    if found.group and top_k > found.top_groups * (experts // found.groups):
        raise Unfit(f"{subject} chooses more experts than the groups have that it keeps")
    choice = found.canonical(experts, top_k)
    if choice.select == "logits" and not choice.group and not choice.biased:
        # Scores that underflow are told apart by the logits alone.
        x = torch.stack([torch.randperm(experts, generator=Numbers(seed).generator)
                         for seed in range(8)]).to(own.weight) * 120
        with torch.no_grad():
            if not torch.equal(by_logits(x, own(x)[2]), by_logits(x, choice.ids(_plus(own, x), None, top_k))):
                return replace(choice, select="scores")
    return choice


def _weighing_of(own: nn.Module, router: nn.Module, bias: str | None, subject: str) -> _Weighing:
    scales = {float(value) for value in (
        1.0, *(configured(router, name) or 1.0 for name in (
            "routed_scaling_factor", "route_scale", "router_scaling_factor")), 1 / router.top_k)}
    known = [_Weighing(*key) for key in product(("chosen", *_SCORES), {False, bias is not None}, _ADDED,
                                                sorted(scales))
             if not (key[0] == "chosen" and key[1] or key[0] == "logits" and key[2] is not None)]

    def draw(numbers):
        x = _draw_logits(own, bias, numbers)
        return (x, *own(x)[1:])

    return identify(
        lambda given: given[1].float(),
        {key: (lambda given, key=key: key.weights(
            _plus(own, given[0]), getattr(own, bias) if bias else None, given[2].long()))
         for key in known},
        draw, subject=f"the weights of {subject}", least=12, free=CHOICES, sizes=False,
        canonical=lambda weighing: weighing.canonical(len(own.weight), router.top_k),
        agrees=lambda ours, right: bool(
            ((ours - right).abs() <= 2e-6 * right.abs().amax(1, keepdim=True)).all()))


def _as_op(choice: _Choice, weighing: _Weighing, bias: str | None, experts: int, top_k: int,
           subject: str) -> RouterFound:
    """Options of the op, and what is left to do after it."""
    weighing = weighing.canonical(experts, top_k)
    if weighing.score not in ("softmax", "sigmoid") or weighing.biased:
        raise Unfit(f"{subject} weighs by {weighing.score}, for which there is no kernel")
    # One choice has the weight 1, whatever its score.
    scores = ("softmax", "sigmoid") if top_k == 1 and weighing.added == 0.0 else (weighing.score,)
    by_scores, choice = choice.select == "scores", choice.canonical(experts, top_k)
    score = next((score for score in scores if choice == replace(
        choice, select=score).canonical(experts, top_k)), None)

    after = (weighing.score == "softmax" and weighing.added == 0.0 and not choice.biased
             and choice.group is None and score == "softmax" and not by_scores)
    if score is None or choice.group == "sum" or choice.group and choice.masked == 0.0:
        raise Unfit(f"{subject} chooses by {choice.select}, or of groups, in a way for which there is "
                    "no kernel")
    usual = 1e-20 if score == "sigmoid" else 0.0  # what the op adds to the sum
    divides = weighing.added is not None
    return RouterFound(score, "after" if after else "before", divides and weighing.added == usual
                   and not after, choice.groups, choice.top_groups,
                   "top2" if choice.group == "two" else "max", weighing.scale,
                   bias if choice.biased else None,
                   added=weighing.added if divides and weighing.added != usual else None)


def _expect_same_route(own: nn.Module, found: RouterFound, subject: str) -> None:
    """That the op gives what the stand-in does."""
    with torch.no_grad():
        for seed in range(3):
            numbers = Numbers(seed)
            numbers.fill(own, buffers=[found.bias] if found.bias else [])
            x = numbers(_ROWS, own.weight.shape[1], like=own.weight)
            logits, *mine = _route(own, found, x)
            own_logits, weights, ids = own(x)
            mine, right = (_by_logits(logits, *each) for each in (mine, (weights, ids)))
            if own_logits.dtype != logits.dtype or not is_close(*(t[0] for t in (mine, right)), 1e-5) \
                    or not is_close(mine[1], right[1], 8 * torch.finfo(weights.dtype).eps):
                raise Unfit(f"{subject} chooses in a way that is not known in {own.weight.dtype}")


def _by_logits(logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of the experts chosen, the largest first, and their weights: which of two experts
    with the same logit is chosen makes no difference."""
    chosen, order = logits.gather(1, ids.long()).sort(dim=1, descending=True)
    return chosen, weights.float().gather(1, order)


def _route(router: nn.Module, found: RouterFound, hidden_states: Tensor, bias: Tensor | None = None
           ) -> tuple[Tensor, Tensor, Tensor]:
    logits = _logits(router, hidden_states.reshape(-1, router.weight.shape[1]), found.wide,
                     found.uncast)
    if found.widened:
        logits = logits.float()
    scale = found.scale if found.added is None else 1.0
    if found.bias and bias is None:
        bias = getattr(router, found.bias)
    ids, weights = ops.moe_route(
        logits, router.top_k, bias=bias,
        score=found.score, order=found.order, groups=found.groups, top_groups=found.top_groups,
        group_score=found.group_score, renormalise=found.renormalise, scale=scale)
    if found.added is not None:
        weights = weights / (weights.sum(-1, keepdim=True) + found.added) * found.scale
    return logits, weights, ids


def router_of(module: nn.Module) -> RouterFound | None:
    """The properties that patch_router() recognised in the module."""
    return module._fftune[0] if is_patched(module, router_forward) else None


@undoable
def router_forward(self, hidden_states: Tensor, *arguments, **options
                    ) -> tuple[Tensor, Tensor, Tensor]:
    found, narrow, flattens = self._fftune
    bias = arguments[0] if found.given and len(arguments) == 1 else None
    is_known = len(arguments) == found.given and isinstance(bias, Tensor) == bool(found.given and found.bias)
    if not is_known or options or hidden_states.dim() != 2 and not flattens or not has_settings(self) \
            or not has_kernels(hidden_states) or hidden_states.dtype != self.weight.dtype and not found.wide \
            or not are_plain(*self._parameters.values()):
        return original(self, hidden_states, *arguments, **options)
    logits, weights, ids = _route(self, found, hidden_states, bias)
    reader = self.__dict__.get("_fftune_reader")
    if is_patched(reader, experts_forward) and not watched(self, reader) and _serves(reader, hidden_states):
        return logits, weights, ids
    # Who is not known to take those of the op gets the types that the router has.
    return logits, weights.to(hidden_states.dtype) if narrow else weights, ids.long()

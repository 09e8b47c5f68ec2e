"""A decoder's layers as arguments of the op `layer`: found by their parts, accepted by their results.

The order of norms, attention, MLP and residuals is seen where a stand-in of the layer runs with affine
functions in the place of its parts: only one order explains what it gives. The whole
layer, as a stand-in with weights of its own, is then compared with the op in every form that its parts
allow. Forms differ in the rotation, the scale of scores, the rows of a packed weight, and the order of
rotation and norms of heads.
"""
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from .. import reference
from .._layer_form import (FLOAT32, PACKED, ROUNDED, Choice, Latent, constant, form_of, packed_experts_form,
                           packed_form, parse, rounded_form)
from .._custom import OPS, call
from .._ops.layer import expect_runs
from .._ops.packed import packed_word
from .._library import Error
from .._versions import as_option
from . import attention as attentions
from .analytic import INTEGERS, PATCHED, ROOTS, Trace
from .experts import ExpertsFound, experts_of, is_squared_experts, recognised_router, router_of
from .inline_mlps import chain_of
from .fp8_experts import is_rounded_experts
from .layer_extras import (INPUT_ARGUMENT, STATES_ARGUMENT, AffineExperts, AffineRouter, Extras, KeySharing,
                           QueryFactors, SharedStates, expect_router, extras_of, query_factors_of, sharing_of, source_of,
                           with_experts, with_input)
from .layer_mixers import (DeltaNet, ShortConv, StateSpace, delta_net_of, expect_not_on_gpu,
                           has_cache, heads_of, kimi_delta_of, limits_of, new_cache_layer, short_conv_of, slots_of,
                           state_space_of, states_of)
from .fp8_linear import MERGED, expect_scales_of_op, is_rounded_fp8, merge_fp8
from .mxfp4 import LAYER_WEIGHTS, DenseExperts, DenseMixture, is_packed_mixture
from .mlps import (GatedMLP, fp8_mlp_forward, gated_mlp_forward, gated_of, packed_mlp_forward, plain_mlp_forward,
                   scaled_mlp_of, squared_mlp_of)
from .norms import gated_norm_forward, gated_settings_of, norm_forward, settings_of
from .quantised import is_quantised, merge, numbers_of, packed_of
from .recognise import (CUDA_TYPES, SCALES, SETTINGS, Elsewhere, Numbers, Uncertain, Unfit, cast, expect_no_hooks,
                        expect_pieces, expect_plain_parameters, holds, identify, is_close, is_patched, kind_of, of_type,
                        remembered, set_forward, stand_in, trying, view_of)
from .rotary import angles_of, frequencies, is_complex_rotary, layout_of, rotation_of, scaling

STATIC_ROPES = ("default", "linear", "llama3", "yarn", "proportional")


@dataclass(frozen=True)
class Weight:
    """A tensor of a layer: a parameter of the module at the path, or some rows of it."""

    path: tuple[str, ...]
    name: str
    rows: tuple[int, int] | None = None
    transposed: bool = False  # the module has [in, out]
    zeros: int = 0  # this number of zeros, in the place of a bias that the module does not have
    flat: bool = False  # the module has a dimension more
    taps: bool = False  # of a convolution of each channel by itself, which has a dimension more
    factor: float = 1.0  # of its elements
    value: float | None = None  # of all elements of a vector as long as the module's weight has rows, in its place
    wide: bool = False  # whether its product with that is float32
    given: tuple[int, ...] | None = None  # of a call's tokens: the shape of one; here zeros or ones in the place of it

    def of(self, layer: nn.Module) -> Tensor:
        module = layer
        if self.given is not None:
            like = next(layer.parameters())
            dtype = torch.float32 if self.name in FLOAT32 else like.dtype
            return torch.ones(1, 1, *self.given, dtype=dtype, device=like.device)
        for name in self.path:
            module = module._modules[name]
        if self.zeros:
            like = module._parameters["weight"]
            return constant(0.0, self.zeros, like.dtype, like.device)
        if self.value is not None:
            like = module._parameters["weight"]
            return constant(self.value, like.shape[0], torch.float32, like.device)
        tensor = module._parameters.get(self.name)
        tensor = module._buffers[self.name] if tensor is None else tensor
        if self.transposed and tensor.dim() > 1:
            tensor = tensor.mT
        if self.flat:
            tensor = tensor.reshape(-1)
        if self.taps:
            tensor = tensor.squeeze(1)
        if self.factor != 1:
            tensor = (tensor.detach().float() if self.wide else tensor.detach()) * self.factor
        return tensor if self.rows is None else tensor[self.rows[0]:self.rows[1]]


@dataclass(frozen=True)
class Angles:
    """A rotary embedding of the decoder, and the type of layer where its angles depend on it."""

    path: str
    kind: str | None


# Settings of modules that change no result without gradients.
_OF_TRAINING = {"training", "gradient_checkpointing"}


def _is_setting(value) -> bool:
    """A number, a word or a function, or several, such as limits."""
    return isinstance(value, SETTINGS) or isinstance(value, tuple) and all(isinstance(own, SETTINGS) for own in value)


@dataclass(frozen=True)
class Part:
    """A module of a layer, as it was recognised."""

    path: tuple[str, ...]
    kind: type
    parameters: frozenset[str]  # those that are not None
    settings: frozenset[tuple[str, object]]  # numbers, words and functions, such as eps, and tuples of them

    @classmethod
    def of(cls, path: tuple[str, ...], module: nn.Module) -> "Part":
        settings = ((name, value) for name, value in vars(module).items()
                    if _is_setting(value) and name[0] != "_" and name not in _OF_TRAINING)
        parameters = (name for name, value in module._parameters.items() if value is not None)
        # A part that drops features, or adds noise to scores, does so in training alone.
        random = isinstance(module, nn.Dropout) or any(
            word in name for name in vars(module) for word in ("dropout", "jitter", "noise"))
        mode = [("training", False)] if random else []
        return cls(path, type(module), frozenset(parameters), frozenset((*settings, *mode)))

    def is_as_recognised(self, module: nn.Module | None) -> bool:
        if type(module) is not self.kind:
            return False
        count = 0
        for name, value in module._parameters.items():
            if value is not None:
                # A weight of another class may stand for other numbers.
                if type(value) is not nn.Parameter or name not in self.parameters:
                    return False
                count += 1
        return count == len(self.parameters) and holds(module, self.settings)


@dataclass(frozen=True)
class Spec:
    """A layer as the op sees it."""

    form: str
    heads: tuple[int, int]  # of keys, and their features; or with latent attention those of latents and rotated keys
    rotation: str | None
    weights: tuple[Weight, ...]  # in the form's order
    parts: tuple[Part, ...]  # the layer and the modules in it
    index: int | None  # of its keys and values in a cache; None without a mixer
    window: int | None  # keys that a query sees at most
    angles: Angles | None
    is_told: bool = True  # whether its decoder tells it the positions of the angles
    packed: frozenset[tuple[str, ...]] = frozenset()  # modules that have weights of 4 bits
    rounded: frozenset[tuple[str, ...]] = frozenset()  # modules that round activations to fp8
    is_latent: bool = False  # whether its keys and values in a cache are latents and rotated keys
    states: tuple[tuple[int, ...], ...] = ()  # shapes of a sequence's, where the mixer is no attention
    sharing: KeySharing | None = None  # of its keys and values with other layers
    factors: QueryFactors | None = None
    prompt_form: str = ""  # with the limits of steps that a model has in all calls but those of a token behind a state
    wide: bool = False  # whether the layer adds in float32, as the op does where x is that alone
    has_both: bool = False  # whether it has keys and values, and states of a mixer beside attention

    @property
    def takes_keys(self) -> bool:
        """Whether its keys and values are those of the layer with its index."""
        return self.sharing is not None and self.sharing.takes

    @property
    def given(self) -> tuple[str, ...]:
        """Tensors in the places of weights that a call gives."""
        return tuple(weight.name for weight in self.weights if weight.given is not None)

    def form_in(self, tokens: int, begins: bool) -> str:
        """The form for a call of `tokens` tokens of each sequence; `begins`: its first, without states."""
        return self.prompt_form if self.prompt_form and (tokens > 1 or begins) else self.form

    @property
    def mixes(self) -> bool:
        """Whether it has a mixer, and so a layer of the cache."""
        return self.index is not None

    @property
    def attends(self) -> bool:
        """Whether it has keys and values, or latents, in a cache."""
        return self.mixes and (not self.states or self.has_both)


# the order of its parts

class _Affine(nn.Module):
    """Stands in for a part. Functions of this kind do not commute."""

    def __init__(self, count: int = 1):
        super().__init__()
        self.count = count
        self.register_buffer("line", torch.zeros(2, dtype=torch.float64))

    @property
    def weight(self) -> Tensor:
        """As layers read it for its type."""
        return self.line

    def forward(self, *arguments, **options):
        x = arguments[0] if arguments else next(t for t in options.values() if torch.is_tensor(t))
        y = x * self.line[0] + self.line[1]
        return y if self.count == 1 else (y, *[None] * (self.count - 1))


class _Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class _Order:
    """How a layer computes: `kind` is one of _ORDERS, with the names of its norms in their roles. Its attention or its
    MLP is "" where it has none, and INLINE."""

    kind: str
    norms: tuple[str, ...]
    attention: str
    mlp: str
    factor: float = 1.0  # of what is added to a residual
    beside: str = ""  # another MLP, whose result is added to the first one's
    scalar: str = ""  # a buffer of one number, which multiplies the layer's output
    extras: Extras = Extras()
    mixer: str = ""  # another one on the same input, whose result is added to attention's
    factors: tuple[float, float] = (1.0, 1.0)  # of attention's result, and of that
    of_input: float = 1.0  # of attention's input


# The roles of norms; and y of x by the norms n, attention, MLP, and what adds to a residual.
_ORDERS: dict[str, tuple[tuple[str, ...], Callable]] = {
    "sequential": (("attn_norm", "ffn_norm"), lambda x, n, attention, mlp, add: _then(
        add(x, attention(n[0](x))), lambda s: add(s, mlp(n[1](s))))),
    "sandwich": (("attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm"),
                 lambda x, n, attention, mlp, add: _then(
                     add(x, n[1](attention(n[0](x)))), lambda s: add(s, n[3](mlp(n[2](s)))))),
    "post": (("attn_post_norm", "ffn_post_norm"), lambda x, n, attention, mlp, add: _then(
        add(x, n[0](attention(x))), lambda s: add(s, n[1](mlp(s))))),
    "parallel": (("attn_norm",), lambda x, n, attention, mlp, add: _then(
        n[0](x), lambda y: add(add(x, attention(y)), mlp(y)))),
    "parallel-norms": (("attn_norm", "ffn_norm"), lambda x, n, attention, mlp, add: add(
        add(x, attention(n[0](x))), mlp(n[1](x)))),
}
# Those of layers that are attention alone, or an MLP.
_HALVES: dict[str, tuple[tuple[str, ...], Callable]] = {
    "attention": (("attn_norm",), lambda x, n, attention, mlp, add: add(x, attention(n[0](x)))),
    "mlp": (("ffn_norm",), lambda x, n, attention, mlp, add: add(x, mlp(n[0](x)))),
}
NONE = "none"  # the name of an attention or an MLP that a layer has not


def _then(x, function):
    return function(x)


def _has_matrices(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not _has_matrices(module)


_WIDE = "residual_in_fp32"  # by this setting a layer adds in float32
INLINE = ""  # the name of an MLP that is no module


def _order_of(layer: nn.Module) -> _Order:
    """Unfit where no order, or more than one, explains what the layer computes."""
    scalars = [name for name, tensor in layer._buffers.items() if tensor is not None and tensor.shape == (1,)
               and tensor.is_floating_point()]
    own_tensors = [*layer._parameters, *(name for name in layer._buffers if name not in scalars)]
    if own_tensors:
        raise Unfit(f"layers: {type(layer).__name__} has tensors of its own: {', '.join(own_tensors)}")
    children = {name: child for name, child in layer.named_children()}
    chain = chain_of(layer)
    inline = {path[0] for path in chain.paths} if chain else set()
    if chain and any(len(path) > 1 for path in chain.paths):
        raise Unfit(f"layers: the MLP of {type(layer).__name__} is in two modules")
    extras = extras_of(layer)
    norms = [name for name, child in children.items() if _is_norm(child) and name not in extras.names]
    large = [name for name, child in children.items()
             if _has_matrices(child) and name not in inline and name not in extras.names]
    attentions_ = [name for name in large if has_cache(children[name])]
    mlps = [INLINE] if chain else [name for name in large if name not in attentions_]
    described = ", ".join(sorted(n for n in children if next(children[n].parameters(), None) is not None))
    kinds = ", ".join(f"{name} is {type(children[name]).__name__}" for name in sorted(large))
    if not attentions_ and (len(mlps) != 1 or not large):
        raise Unfit(f"layers: {type(layer).__name__} has no attention over a cache of keys and values: {kinds}")
    orders = {k: order for k, order in _HALVES.items() if (k == "mlp") != bool(attentions_)} \
        if not mlps or not attentions_ else _ORDERS
    factors = dict.fromkeys((1.0, *(v for v in vars(layer).values() if isinstance(v, float) and v)))
    spaces = [name for name in attentions_ if len(attentions_) == 2 and state_space_of(children[name])]
    parameters = list(inspect.signature(type(layer).forward).parameters.values())[2:]
    given = [None for p in parameters if p.default is p.empty
             and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for count, pair in itertools.product((2, 1, 3), (1, 2)):
        stubs: dict[str, nn.Module] = {name: _Affine() for name in norms}
        stubs |= {name: _Affine(1 if name in spaces else count if name in attentions_ else pair) for name in large}
        stubs |= {INLINE: _Affine()} if chain else {}
        stubs |= {name: _Affine() for name in (*extras.norms, *extras.input[:1], *extras.input[2:])}
        stubs |= dict(zip(extras.experts, (AffineRouter(), AffineExperts())))
        own = stand_in(layer, dtype=torch.float64, parts={
            **{name: stub for name, stub in stubs.items() if name},
            **{path[0]: _Same() for path in (chain.paths if chain else ())
               if path[0] in layer._modules}})
        if getattr(own, _WIDE, False):
            setattr(own, _WIDE, False)  # where layers may have it, _forms_of() looks at
        if chain:
            for path, part in zip(chain.paths, (stubs[INLINE], _Same(), _Same())):
                (own._modules if path[0] in own._modules else vars(own))[path[0]] = part

        def draw(numbers: Numbers) -> tuple[Tensor, ...]:
            for stub in stubs.values():
                stub.line.copy_(numbers(len(stub.line)))
            for name in scalars:
                own._buffers[name].copy_(numbers(1))
            return tuple(numbers(1, 2, 3).double() for _ in range(2 if extras.input else 1))

        def theirs(inputs: tuple[Tensor, ...]) -> Tensor:
            x, *of_layer = inputs
            y = own(x, *given, **{INPUT_ARGUMENT: own_input for own_input in of_layer})
            return y[0] if isinstance(y, tuple) else y

        def beside(chosen: tuple, attention: str, mixer: str, mlp: str, own: tuple[float, ...]):
            n, before, behind, of_mixer = [stubs[name] for name in chosen], *own

            def of(inputs: tuple[Tensor, ...]) -> Tensor:
                x, = inputs
                t = n[0](x)
                mid = x + _first(stubs[attention](t * before)) * behind + stubs[mixer](t) * of_mixer
                return mid + _first(stubs[mlp](n[1](mid)))
            return of

        def whole(kind: str, compute: Callable, chosen: tuple, attention: str, mlps: tuple, c: float, by: str):
            n = [stubs[name] for name in chosen]

            def of(inputs: tuple[Tensor, ...]) -> Tensor:
                x, *of_layer = inputs

                def attended(t: Tensor) -> Tensor:
                    return _first(stubs[attention](t))

                def network(t: Tensor) -> Tensor:
                    return sum(_first(stubs[name](t)) for name in mlps)

                if extras.experts and kind == "sandwich":
                    mid = x + c * n[1](attended(n[0](x)))
                    y = mid + c * n[3](with_experts(own, extras, mid, network(n[2](mid))))
                else:
                    y = compute(x, n, attended, network, lambda s, t: s + t * c)
                for own_input in of_layer:
                    y = with_input(own, extras, y, own_input)
                return y * (own._buffers[by] if by else 1.0)
            return of

        try:
            with torch.no_grad():
                y = theirs(draw(Numbers(0)))
        except Exception:
            continue
        if not isinstance(y, Tensor):
            continue
        known = {}
        if len(spaces) == 1 and len(norms) == 2 and len(mlps) == 1 and not extras.names and not scalars:
            (mixer,), (attention,) = spaces, {*attentions_} - {*spaces}
            for chosen, *own_factors in itertools.product(itertools.permutations(norms), factors, factors, factors):
                order = _Order("sequential", chosen, attention, mlps[0], mixer=mixer, factors=tuple(own_factors[1:]),
                               of_input=own_factors[0])
                known[order] = beside(chosen, attention, mixer, mlps[0], tuple(own_factors))
        for kind, (roles, compute) in orders.items() if not known else ():
            for chosen in itertools.permutations(norms, len(roles)):
                for attention, own_mlps, factor, scalar in itertools.product(
                        attentions_ or [NONE], [(mlp,) for mlp in mlps or [NONE]] + [*itertools.combinations(mlps, 2)],
                        factors, ("", *scalars)):
                    order = _Order(kind, chosen, attention, own_mlps[0], factor, *(own_mlps[1:] or ("",)), scalar,
                                   extras)
                    known[order] = whole(kind, compute, chosen, attention, own_mlps, factor, scalar)
        try:
            return identify(theirs, known, draw, subject=f"layers: {type(layer).__name__}",
                            agrees=lambda ours, right: is_close(ours, right, 1e-11),
                            elsewhere=Elsewhere(own, training=False))
        except Uncertain:
            raise
        except Unfit:
            continue
    raise Unfit(f"layers: {type(layer).__name__} has norms, attention and MLP in an order that is not "
                f"known: {described}")


def _first(y):
    return y[0] if isinstance(y, tuple) else y


# its norms

@dataclass(frozen=True)
class _Norm:
    kind: str  # "rms" or "layer"
    convention: str
    eps: float


def _norm_of(module: nn.Module, known: dict) -> _Norm:
    expect_no_hooks(module)
    if type(module) is nn.LayerNorm and module.elementwise_affine:
        if len(module.normalized_shape) != 1:
            raise Unfit("layers: a LayerNorm over several dimensions")
        return _Norm("layer", "llama", module.eps)
    if is_patched(module, norm_forward):
        return _Norm("rms", *settings_of(module))
    return remembered(known, ("layers' norm", kind_of(module)), lambda: _norm_by_values(module))


def _norm_by_values(module: nn.Module) -> _Norm:
    """For a norm without a weight or a bias, or of a class of its own."""
    subject = f"layers: {type(module).__name__}"
    names = {name for name, _ in module.named_parameters()}
    if not names <= {"weight", "bias"} or next(module.buffers(), None) is not None:
        raise Unfit(f"{subject} is no norm that is known")
    own = stand_in(module)
    weight, bias = (own._parameters.get(name) for name in ("weight", "bias"))
    shape = getattr(module, "normalized_shape", None)
    width = weight.numel() if weight is not None else shape[0] if isinstance(shape, tuple) else 24
    if weight is not None and weight.dim() != 1:
        raise Unfit(f"{subject} has a weight for each head")

    def computed(kind: str, eps: float):
        def compute(x):
            w = torch.ones(width) if weight is None else weight
            b = torch.zeros(width) if bias is None else bias
            return reference.layernorm(x, w, b, eps) if kind == "layer" else \
                reference.rmsnorm(x, w, eps, "llama") + b
        return compute

    def draw(numbers: Numbers) -> Tensor:
        numbers.fill(own)
        return numbers(4, width) * SCALES[numbers.seed % len(SCALES)]

    own_eps = [value for value in vars(module).values() if isinstance(value, float)]
    known = {_Norm(kind, "llama", eps): computed(kind, eps) for kind in ("layer", "rms")
             for eps in dict.fromkeys((*own_eps, 1e-5, 1e-6, 1e-8, 1e-12,
                                       torch.finfo(torch.float32).eps))
             if bias is None or kind == "layer"}
    return identify(own, known, draw, subject=subject, elsewhere=Elsewhere(own))


# its parts

_OUTPUTS = ("o_proj", "dense", "out_proj", "c_proj", "wo")
_OUTPUT_GATES = ("gate_proj", "g_proj", "gate", "o_gate")
_NORMS_OF_HEADS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"),
                   ("query_layernorm", "key_layernorm"))


def _is_transposed(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


@dataclass
class _Parts:
    """The tensors of a layer by their names in the op."""

    layer: nn.Module
    weights: dict[str, Weight] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)
    norms: set[_Norm] = field(default_factory=set)

    def module(self, path: tuple[str, ...]) -> nn.Module:
        module = self.layer.get_submodule(".".join(path))
        expect_no_hooks(module)
        return module

    def linear(self, path: tuple[str, ...], names: tuple[str, ...], rows: list[int] | None = None
               ) -> nn.Module:
        """A linear layer, whose rows are one weight or several."""
        module = self.module(path)
        while not hasattr(module, "weight") and not module._parameters and len(module._modules) == 1:
            path = (*path, *module._modules)  # a wrapper that only calls it
            module = self.module(path)
        transposed = _is_transposed(module)
        if type(module) is not nn.Linear and not transposed:
            raise Unfit(f"layers: {path[-1]} is {type(module).__name__}, not Linear")
        ends = list(itertools.accumulate(rows)) if rows else [None]
        starts = [0, *ends[:-1]]
        for name, start, end in zip(names, starts, ends):
            part = None if end is None else (start, end)
            self.weights[f"w_{name}"] = Weight(path, "weight", part, transposed)
            if module.bias is not None:
                self.weights[f"b_{name}"] = Weight(path, "bias", part, transposed)
        return module

    def norm(self, path: tuple[str, ...], name: str, known: dict) -> None:
        module = self.module(path)
        found = _norm_of(module, known)
        self.norms.add(found)
        for own, parameter in ((name, "weight"), (f"{name}_bias", "bias")):
            if module._parameters.get(parameter) is not None:
                self.weights[own] = Weight(path, parameter)
            elif parameter == "weight" or found.kind == "layer":
                self.constants.append(own)


_LARGE_NETWORK = 1 << 20  # elements of its last product
_OF_MLP = ("w_down", "w_gate", "w_up", "w_gate_up", "b_up", "b_gate", "b_gate_up")


def _shrunk(spec: Spec, networks: dict[str, dict[int, int]]) -> Spec:
    """The spec for a stand-in with these sizes in its children: gate and up may be rows of one weight."""
    def of(weight: Weight) -> Weight:
        smaller = networks.get(weight.path[0] if weight.path else "", {})
        return replace(weight, rows=weight.rows and tuple(smaller.get(row, row) for row in weight.rows),
                       zeros=smaller.get(weight.zeros, weight.zeros))

    return replace(spec, weights=tuple(map(of, spec.weights)))


def _small_networks(layer: nn.Module, spec: Spec) -> dict[str, dict[int, int]]:
    """The layer's children with large networks or experts, and the sizes that stand-ins of them have in the place of
    others: fewer features in the middle, and fewer experts."""
    form = parse(spec.form)
    weights = dict(zip(form.weights, spec.weights))
    downs: dict[str, list[Tensor]] = {}
    for name in ("w_down", "w_shared_down"):
        if name in weights:
            downs.setdefault(weights[name].path[0], []).append(weights[name].of(layer))
    found = {}
    for child, own in downs.items():
        if sum(down.numel() for down in own) < _LARGE_NETWORK:
            continue
        d, widths = own[0].shape[-2], [down.shape[-1] for down in own]
        unit = math.gcd(*widths)
        features = [n for width in widths for n in (width, 2 * width)]
        least = 64 if form.get("experts") in features else 32
        sizes = {n: n * least // unit for n in features} if unit >= 4 * least and d not in features else {}
        if (experts := form.get("experts")) and own[0].dim() == 3:
            groups = form.get("groups") or 1
            fewer = math.ceil(max(4 * form.get("top-k"), 16) / groups) * groups
            with_router = weights["w_router"].path[0] == child
            if experts in sizes and (not with_router or sizes[experts] < fewer or sizes[experts] % groups):
                sizes = {}
            elif with_router and fewer < experts and experts not in (d, *features):
                sizes[experts] = fewer
        if sizes:
            found[child] = sizes
    # The products of a network may be children of the layer, as in OPT.
    alone = weights.get("w_down")
    if alone is not None and alone.path[0] in found and len(alone.path) == 1 and alone.name == "weight":
        found |= {weights[name].path[0]: found[alone.path[0]] for name in _OF_MLP if name in weights}
    return found


def _dense_view(layer: nn.Module, quantised: dict[tuple[str, ...], nn.Module]) -> nn.Module:
    """The layer with dense layers, which have shapes and no numbers, in the place of those with weights
    of 4 bits, or that round activations to fp8."""
    def dense(module: nn.Module) -> nn.Module:
        if is_rounded_experts(module):
            like = next(p for p in layer.parameters() if p.dim() == 1)
            return DenseExperts(module.down_proj.shape, like, ExpertsFound(module._fftune[0], "halves", False, False))
        format = module._fftune[0]
        like = module.weight.new_empty(0, dtype=format.dtype) if is_rounded_fp8(module) else numbers_of(module)
        if module.bias is not None and module.bias.dtype != like.dtype:
            raise Unfit("layers: weights of several types")
        linear = nn.Linear(format.k, format.n, module.bias is not None, device="meta")
        number = like.new_zeros(())
        for name, shape in (("weight", (format.n, format.k)), ("bias", (format.n,))):
            if getattr(linear, name) is not None:
                setattr(linear, name, nn.Parameter(number.expand(shape), requires_grad=False))
        return linear

    view = view_of(layer, {path: dense(module) for path, module in quantised.items()})
    for module in view.modules():
        if any(name.startswith("_fftune") for name in module._buffers):  # q, k and v in one
            module.__dict__["_buffers"] = {name: tensor for name, tensor in module._buffers.items()
                                           if not name.startswith("_fftune")}
        if is_patched(module, packed_mlp_forward) or is_patched(module, fp8_mlp_forward):
            set_forward(module, gated_mlp_forward, module._fftune)
    return view


# how a decoder calls its layers

def _parts_of(layer: nn.Module) -> tuple[Part, ...]:
    """The layer and all its modules, activations too: the op computes them in their place."""
    return tuple(Part.of(tuple(name.split(".")) if name else (), module)
                 for name, module in layer.named_modules())


class _Recorder(nn.Module):
    """Stands in for a layer: has its attributes, keeps what it is given, and gives a tensor of its
    own."""

    def __init__(self, layer: nn.Module, pair: bool):
        super().__init__()
        self.__dict__["layer"], self.pair = layer, pair
        self.__dict__["names"] = list(inspect.signature(type(layer).forward).parameters)[1:]
        self.__dict__["calls"] = []

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def forward(self, *arguments, **options):
        given = {**dict(zip(self.names, arguments)), **options}
        x = given[self.names[0]]
        y = x * 0.5
        self.calls.append((x, y, given))
        return (y, None) if self.pair else y


@dataclass(frozen=True)
class _RotaryCall:
    """A call of a rotary embedding."""

    angles: Angles
    position_ids: Tensor
    result: tuple[Tensor, Tensor] | Tensor


def _record_rotary_calls(rotary: nn.Module, path: str, rotary_calls: list[_RotaryCall]) -> None:
    """Makes a stand-in of a rotary embedding keep its calls."""
    forward = type(rotary).forward

    def recorded(x, position_ids, layer_type=None):
        result = forward(rotary, x, position_ids, *(() if layer_type is None else (layer_type,)))
        rotary_calls.append(_RotaryCall(Angles(path, layer_type), position_ids, result))
        return result

    rotary.__dict__["forward"] = recorded


def _is_same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether it is the other tensor, or all of it by another object: a slice without ends."""
    return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape
                            and one.stride() == other.stride() and one.dtype == other.dtype)


def calls_of_layers(decoder: nn.Module, name: str, rotaries: Iterable[str], filled: bool = False, **options
                    ) -> tuple[list[dict], list[_RotaryCall], bool]:
    """The arguments that a decoder gives each of its layers in a call with these options, the calls of its
    rotary embeddings at these paths, and whether it takes a pair from its layers. Its own parameters are zeros, or
    random numbers if `filled`. Unfit where it does anything between layers, or calls one twice or not at all."""
    layers, embedding = decoder._modules[name], decoder.get_input_embeddings()
    width = embedding.weight.shape[-1]
    reason = ""
    inputs = "per_layer_inputs" in inspect.signature(type(decoder).forward).parameters and \
        getattr(decoder, "hidden_size_per_layer_input", 0)
    if inputs:  # those by ids cannot be told from embeddings
        options["per_layer_inputs"] = Numbers(1)(2, 3, len(layers), inputs)
    for pair in (False, True):
        recorders = nn.ModuleList(_Recorder(layer, pair) for layer in layers)
        parts = {part: nn.Embedding(8, child.weight.shape[-1]) for part, child in decoder.named_children()
                 if child is embedding or inputs and isinstance(child, nn.Embedding)}
        own, rotary_calls = stand_in(decoder, parts={name: recorders, **parts}), []
        for path in rotaries:
            _record_rotary_calls(own.get_submodule(path), path, rotary_calls)
        if filled:
            Numbers(8).fill(own)
        try:
            with torch.no_grad():
                own(inputs_embeds=Numbers(0)(2, 3, width), use_cache=False, **options)
        except Exception:
            reason = "it does not run with embeddings of tokens alone"
            continue
        calls = [recorder.calls for recorder in recorders]
        if all(len(own_calls) == 1 for own_calls in calls) and all(
                _is_same_tensor(after[0][0], before[0][1]) for before, after in itertools.pairwise(calls)):
            return [given for ((_, _, given),) in calls], rotary_calls, pair
        reason = "it does something between its layers"
    raise Unfit(f"layers: {type(decoder).__name__} calls its layers in a way that is not known: {reason}")


class Recogniser:
    """Finds the specs of a decoder's layers."""

    def __init__(self, decoder: nn.Module, name: str, known: dict):
        self.decoder, self.known, self.layers = decoder, known, decoder._modules[name]
        self.dtype = decoder.get_input_embeddings().weight.dtype
        self.rotaries = {path: m for path, m in decoder.named_modules() if hasattr(m, "rope_type")}
        self.calls, rotary_calls, self.takes_pairs = calls_of_layers(decoder, name, self.rotaries)
        found = [self._rotary_call_of(given, rotary_calls) for given in self.calls]
        self.angles = [call and call.angles for call in found]
        if any(call and given.get("position_ids") is not None and given["position_ids"] is not call.position_ids
               for given, call in zip(self.calls, found)):
            self._expect_equal_positions(name)

    def _rotary_call_of(self, given: dict, rotary_calls: list[_RotaryCall]) -> _RotaryCall | None:
        """The call of a rotary embedding whose result a layer is given."""
        embeddings = given.get("position_embeddings")
        if embeddings is None:
            return None
        for call in rotary_calls:
            if isinstance(embeddings, Tensor) and embeddings is call.result:
                return call  # cosines and sines are complex numbers
            if isinstance(embeddings, tuple) and len(embeddings) == 2 and isinstance(call.result, tuple) and all(
                    map(_is_same_tensor, embeddings, call.result)):
                return call
        raise Unfit(f"layers: {type(self.decoder).__name__} gives its layers angles of no rotary embedding "
                    "that is known")

    def _expect_equal_positions(self, name: str) -> None:
        """That layers are given the positions of their angles where these are other tensors: those of axes, say."""
        far = torch.tensor([[0, 7, 900], [5000, 131072, 2**24 - 1]])
        calls, rotary_calls, _ = calls_of_layers(self.decoder, name, self.rotaries, position_ids=far)
        if any((call := self._rotary_call_of(given, rotary_calls))
               and not bool((call.position_ids == given["position_ids"]).all()) for given in calls):
            raise Unfit(f"layers: {type(self.decoder).__name__} gives its layers other positions than its rotary "
                        "embedding")

    def _rotary_of(self, angles: Angles | None) -> nn.Module | None:
        return None if angles is None else self.rotaries[angles.path]

    def spec_of(self, layer: nn.Module, at: int) -> Spec:
        """The spec of the layer at a place."""
        modules = {tuple(name.split(".")): module for name, module in layer.named_modules()}
        quantised = {path: module for path, module in modules.items() if is_quantised(module)}
        rounded = {path: module for path, module in modules.items()
                   if is_rounded_fp8(module) or is_rounded_experts(module)}
        if rounded and quantised:
            raise Unfit("layers: some of its linear layers round activations to fp8, and some do not")
        if rounded:
            return self._rounded(layer, rounded, self._spec_of(_dense_view(layer, rounded), at, runs=False))
        mixtures = {path: module for path, module in modules.items() if is_packed_mixture(module)}
        if mixtures and not quantised and len(mixtures) == 1:
            view = view_of(layer, {path: DenseMixture(module) for path, module in mixtures.items()})
            return self._packed_mixture(layer, next(iter(mixtures)), self._spec_of(view, at, runs=False))
        if not quantised:
            return self._spec_of(layer, at)
        view = _dense_view(layer, quantised)
        return self._packed(layer, quantised, self._spec_of(view, at, runs=False))

    def _packed(self, layer: nn.Module, quantised: dict, dense: Spec) -> Spec:
        """The spec of a layer with packed weights, from that of its dense view."""
        weights = dict(zip(parse(dense.form).weights, dense.weights))
        paths = {name: weights[name].path for name in ("w_q", "w_k", "w_v", *PACKED[1:])
                 if name in weights}
        if {*paths.values()} != {*quantised} or len(paths) != 7:
            raise Unfit("layers: some of its weights have 4 bits, and some have more, or they are no "
                        "q, k, v, o, gate, up and down")
        own = [quantised[path] for path in paths.values()]
        formats = {(m._fftune[0].code, m._fftune[0].group, m._fftune_zero is None) for m in own}
        if len(formats) > 1 or any(m._fftune_order is not None for m in own):
            raise Unfit("layers: its packed weights have different formats, or act-order")
        (_, _, is_symmetric), = formats
        attention = paths["w_q"][:-1]
        try:
            merge(layer.get_submodule(".".join(attention)), own[:3])
        except Unfit as reason:
            raise Unfit(f"layers: {reason}") from None
        form = packed_form(dense.form, packed_word("layer", packed_of(own[0])), not is_symmetric,
                           quantised[paths["w_gate"]]._fftune[0].n)
        weights["b_qkv"] = Weight(attention, "_fftune_qkv_bias")
        for part in ("w", "scale", "zero"):
            end = "" if part == "w" else f"_{part}"
            weights[f"w_qkv{end}"] = Weight(attention, f"_fftune_qkv_{part}")
            for name in PACKED[1:]:
                weights[f"{name}{end}"] = Weight(paths[name], f"_fftune_{part}")
        spec = replace(dense, form=form, packed=frozenset(quantised), parts=_parts_of(layer),
                       weights=tuple(weights[name] for name in parse(form).weights))
        remembered(self.known, ("runs", form, kind_of(layer)), lambda: _expect_runs(layer, spec, self.dtype))
        return spec

    def _rounded(self, layer: nn.Module, rounded: dict, dense: Spec) -> Spec:
        """The spec of a layer whose linear layers round activations to fp8, from that of its dense view."""
        weights = dict(zip(parse(dense.form).weights, dense.weights))
        paths = {name: weights[name].path for name in ("w_q", "w_k", "w_v", *ROUNDED[1:])
                 if name in weights and weights[name].path in rounded}
        network = {name for name in ROUNDED[2:] if name in weights}
        linear = {path: module for path, module in rounded.items() if is_rounded_fp8(module)}
        experts = {path: module for path, module in rounded.items() if path not in linear}
        attention = "w_q" in paths
        if {*paths.values()} != {*rounded} or not network <= {*paths} or any(weights[name].rows for name in paths) \
                or len(paths) != len(network) + 4 * attention or len(linear) != len(paths) - len(experts) * 2:
            raise Unfit("layers: some of its linear layers round activations to fp8, and some do not, or they are "
                        "no q, k, v, o, gate, up and down")
        by_token = {module._fftune[0].by_token for module in linear.values()} | {False for _ in experts}
        if len(by_token) > 1:
            raise Unfit("layers: its linear layers round activations in different ways")
        try:
            if attention:
                owner = paths["w_q"][:-1]
                merge_fp8(layer.get_submodule(".".join(owner)), [linear[paths[f"w_{name}"]] for name in "qkv"])
                weights |= {name: Weight(owner, buffer) for name, buffer in
                            zip(("w_qkv", "w_qkv_scale", "b_qkv"), MERGED)}
            form = rounded_form(dense.form, "token" if True in by_token else "block", attention)
            for name, path in paths.items():
                if path in experts:
                    weights[f"{name}_scale"] = Weight(path, f"{weights[name].name}_scale_inv")
                elif name not in ("w_q", "w_k", "w_v"):
                    weights[f"{name}_scale"] = Weight(path, linear[path]._fftune[0].scale, flat=True in by_token)
            expect_scales_of_op(*(weights[f"{name}_scale"].of(layer) for name in paths if name not in ("w_q", "w_k", "w_v")))
        except (Unfit, Error) as reason:
            raise Unfit(f"layers: {str(reason).removeprefix('layer: ')}") from None
        spec = replace(dense, form=form, rounded=frozenset(rounded), parts=_parts_of(layer),
                       weights=tuple(weights[name] for name in parse(form).weights))
        remembered(self.known, ("runs", form, kind_of(layer)), lambda: _expect_runs(layer, spec, self.dtype))
        return spec

    def _packed_mixture(self, layer: nn.Module, path: tuple[str, ...], dense: Spec) -> Spec:
        """The spec of a layer with packed experts, from that of its dense view."""
        experts = layer.get_submodule(".".join(path)).experts
        form = packed_experts_form(dense.form, "mxfp4-128", experts.intermediate_size)
        weights = dict(zip(parse(dense.form).weights, dense.weights))
        weights |= {name: Weight((*path, "experts"), own) for name, own in LAYER_WEIGHTS.items()}
        spec = replace(dense, form=form, packed=frozenset({path}), parts=_parts_of(layer),
                       weights=tuple(weights[name] for name in parse(form).weights))
        remembered(self.known, ("runs", form, kind_of(layer)), lambda: _expect_runs(layer, spec, self.dtype))
        return spec

    def _spec_of(self, layer: nn.Module, at: int, runs: bool = True) -> Spec:
        expect_plain_parameters(layer)
        order = remembered(self.known, ("order", kind_of(layer)), lambda: _order_of(layer))
        candidates = self._candidates(layer, order, at)
        found = remembered(self.known, (kind_of(layer), order, tuple(candidates), self.angles[at]),
                           lambda: self._identify(layer, order, candidates))
        if runs:
            remembered(self.known, ("runs", candidates[found].form, kind_of(layer)),
                       lambda: _expect_runs(layer, candidates[found], self.dtype))
        return candidates[found]

    def _candidates(self, layer: nn.Module, order: _Order, at: int) -> dict[tuple, Spec]:
        """The forms that the layer may have, by rotation, scale of scores, rows of a packed weight, and
        the order of rotation and norms of heads."""
        found = {}
        if order.attention == NONE:
            return {(): self._network_form(layer, order)}
        attention = layer._modules[order.attention]
        if order.mixer:
            return self._candidates_of_both(layer, attention, order, at)
        conv, space = short_conv_of(attention), state_space_of(attention)
        delta = delta_net_of(attention) or kimi_delta_of(attention)
        for grouped in (False, True) if conv is delta is space is None else (False,):
            parts = self._norms(layer, order)
            # Another attention of the layer, to an encoder's states, has none to read.
            if any(getattr(m, "is_causal", True) is not True for m in attention.modules()):
                raise Unfit(f"layers: {type(attention).__name__} is not causal")
            heads = (self._convolution(parts, order.attention, attention, conv) if conv is not None else
                     self._delta_net(parts, order.attention, attention, delta) if delta is not None else
                     self._state_space(parts, order.attention, attention, space) if space is not None else
                     self._attention(parts, order.attention, attention, grouped))
            if heads is None:
                continue
            ffn = self._network(parts, layer, order)
            parts.module((order.attention,))
            for key, spec in self._forms(parts, attention, order, at, heads, ffn).items():
                found[key, grouped] = spec
        return found

    def _candidates_of_both(self, layer: nn.Module, attention: nn.Module, order: _Order, at: int) -> dict[tuple, Spec]:
        """The forms of a layer that has attention and a state space on the same input."""
        mixer = layer._modules[order.mixer]
        expect_not_on_gpu(layer, f"{type(mixer).__name__} beside attention")
        if order.of_input != 1:
            raise Unfit(f"layers: {type(layer).__name__} has a factor in front of its attention, for which there is no "
                        "kernel")
        parts = self._norms(layer, order)
        if any(getattr(m, "is_causal", True) is not True for m in attention.modules()):
            raise Unfit(f"layers: {type(attention).__name__} is not causal")
        space = self._state_space(parts, order.mixer, mixer, state_space_of(mixer), beside=True)
        heads = self._attention(parts, order.attention, attention, False)
        if heads is None or "latent" in heads or {"w_g", "sinks", "b_o", "b_ssm_out"} & {*parts.weights} \
                or heads["gated_rows"] or len(space["limits"]) > 1:
            raise Unfit(f"layers: {type(layer).__name__} has attention, biases or limits of steps that the op has not "
                        f"beside {type(mixer).__name__}")
        ffn = self._network(parts, layer, order)
        scales = dict(zip(("o", "ssm_out", "down"), (*order.factors, ffn.pop("factor", 1.0))))
        if {*scales.values()} != {1.0}:
            for (own, value), name in zip(scales.items(), ("out_scale", "ssm_scale", "ffn_scale")):
                parts.weights[name] = replace(parts.weights[f"w_{own}"], value=value)
        parts.module((order.attention,)), parts.module((order.mixer,))
        found, sizes = {}, {name: own for name, own in space.items() if name not in ("limits", "factors")}
        for factor in space["factors"]:
            if factor != 1:
                parts.weights["in_scale"] = replace(parts.weights["in_scale"], factor=factor)
            for key, spec in self._forms(parts, attention, order, at, {**heads, "beside": sizes}, ffn).items():
                found[key, factor] = spec
        return found

    def _norms(self, layer: nn.Module, order: _Order) -> _Parts:
        """The tensors of the layer that are in no attention and MLP of it."""
        parts = _Parts(layer)
        for name, role in zip(order.norms, (_ORDERS | _HALVES)[order.kind][0]):
            parts.norm((name,), role, self.known)
        if order.scalar:
            parts.weights["layer_scalar"] = Weight((), order.scalar)
        if order.extras.input:
            self._layer_input(parts, layer, order.extras)
        return parts

    def _network(self, parts: _Parts, layer: nn.Module, order: _Order) -> dict:
        """The MLP or the mixture of the layer, the last of its parts."""
        ffn = dict(network=False, act="silu") if order.mlp == NONE else \
            self._inline(parts) if order.mlp == INLINE else \
            self._normed_experts(parts, layer, order) if order.extras.experts else \
            self._mixture_beside(parts, layer, order) if order.beside else \
            self._mlp(parts, (order.mlp,), layer._modules[order.mlp], bool(order.mixer))
        if len(parts.norms) > 1:
            raise Unfit("layers: norms that differ in their eps, or in how they round")
        dtypes = {weight.of(layer).dtype for name, weight in parts.weights.items()
                  if name not in ("sinks", "choice_bias", "A_log", "dt_bias", "D", "layer_scalar", "q_factors",
                                  "in_scale", "gate_scale")}
        if len(dtypes) > 1:
            raise Unfit("layers: weights of several types")
        if getattr(layer, _WIDE, False) and self.dtype != torch.float32:
            raise Unfit(f"layers: {type(layer).__name__} adds in float32, as the op does in models of float32 alone")
        for name in filter(None, (order.mlp, order.beside)):
            if name != NONE:
                parts.module((name,))
        return ffn

    def _network_form(self, layer: nn.Module, order: _Order) -> Spec:
        """The one form of a layer that is an MLP alone."""
        parts = self._norms(layer, order)
        ffn = self._network(parts, layer, order)
        norm, = parts.norms
        form = form_of(tuple(parts.weights), heads=0, kv_heads=0, dim=0, convention=norm.convention, eps=norm.eps,
                       rotary=0, rotates=False, softcap=0.0, scale=0.0, rope_scale=0.0,
                       constants=tuple(parts.constants), multiplier=order.factor, mixer="none", **ffn)
        weights = tuple(parts.weights[name] for name in parse(form).weights)
        return Spec(form, (0, 0), None, weights, _parts_of(layer), None, None, None,
                    wide=getattr(layer, _WIDE, False))

    def _forms(self, parts: _Parts, attention: nn.Module, order: _Order, at: int, heads: dict,
               ffn: dict) -> dict[tuple, Spec]:
        norm, = parts.norms
        beside = dict(heads.pop("beside", {}))
        states = beside.pop("states", ())
        if "latent" in heads:
            return self._latent_forms(parts, attention, order, at, heads, ffn)
        if "mixer" in heads:
            return self._states_form(parts, attention, order, heads, ffn)
        window = getattr(attention, "sliding_window", None)
        if window is None and not hasattr(attention, "layer_type"):
            window = attentions.window_of(self.decoder.config)
        index = getattr(attention, "layer_idx", None)
        if not isinstance(index, int):
            raise Unfit(f"layers: {type(attention).__name__} has no number")
        sharing = sharing_of(attention)
        if sharing is not None:
            self._expect_shared_states(attention)
            index = source_of(attention, self.layers, order.attention) if sharing.takes else index
        factors = self._query_factors(parts, at)
        angles, dim = self.angles[at], heads["dim"]
        rotary = 0 if angles is None else self._rotary_features(angles)
        scales = {0.0: None}  # of scores: the usual one first
        for name in ("scaling", "scale", "scale_attn", "attention_multiplier", "inv_norm_factor"):
            value = getattr(attention, name, None)
            if isinstance(value, float) and abs(value * dim ** 0.5 - 1) > 1e-9:
                scales[value] = None
        if dim > 1:
            scales[1.0] = None
        rotations = ("halves", "interleaved", None) if rotary else (None,)
        if rotary and self.calls[at].get("position_ids") is None:
            # A patched one gives angles in the place of cosines and sines, and needs no positions.
            rotations = (rotation_of(self._rotary_of(angles)), None)
            if rotations[0] is None:
                raise Unfit(f"layers: {type(self.decoder).__name__} does not tell its layers the "
                            "positions")
        # A rotation of halves and one of neighbours are one where there is one pair.
        if rotary == 2:
            rotations = (rotations[0], None)
        # Without weights the root mean square of a head is the same before and behind a rotation.
        orders = (False, True) if rotary and "q_norm" in parts.weights and not heads["norm_rows"] \
            else (False,)
        # One of keys is that of both in RoPE, and its inverse that of scores.
        factor = getattr(attention, "key_multiplier", 1.0)
        if factor != 1 and (not isinstance(factor, float) or factor <= 0 or rotary != dim):
            raise Unfit(f"layers: {type(attention).__name__} has a factor of keys, {factor}, and does not rotate all "
                        "of their features, or it is not positive")
        found = {}
        for rotation, scale, last in itertools.product(rotations, scales, orders):
            if last and rotation is None:
                continue
            of_rope = self._rope_scale(angles) if rotation else 0.0
            of_scores = scale
            if factor != 1 and rotation:
                of_rope, of_scores = (of_rope or 1.0) * factor, (scale or dim ** -0.5) / factor
            form = form_of(tuple(parts.weights), convention=norm.convention, eps=norm.eps,
                           rotary=rotary, rotates=rotation is not None, rotation=rotation or "halves",
                           softcap=self._softcap(attention), scale=of_scores, rope_scale=of_rope,
                           constants=tuple(parts.constants), norm_last=last, multiplier=order.factor,
                           parallel=order.kind.startswith("parallel"), **heads, **beside, **ffn)
            weights = tuple(parts.weights[name] for name in parse(form).weights)
            found[rotation, scale, last] = Spec(form, (heads["kv_heads"], dim), rotation, weights,
                                                _parts_of(parts.layer), index, window, angles,
                                                not rotary or self.calls[at].get("position_ids") is not None,
                                                sharing=sharing, factors=factors, states=states,
                                                has_both=bool(states))
        return found

    def _query_factors(self, parts: _Parts, at: int) -> QueryFactors | None:
        """Those of the queries, by their positions, where the configuration has them."""
        factors = query_factors_of(self.decoder.config)
        if factors is None:
            return None
        if self.calls[at].get("position_ids") is None:
            raise Unfit(f"layers: {type(self.decoder).__name__} does not tell its layers the positions of their "
                        "factors")
        parts.weights["q_factors"] = Weight((), "q_factors", given=())
        return factors

    def _expect_shared_states(self, attention: nn.Module) -> None:
        given = [call.get(STATES_ARGUMENT) for call in self.calls]
        if given[0] is None or any(one is not given[0] for one in given):
            raise Unfit(f"layers: {type(self.decoder).__name__} does not hand what {type(attention).__name__} shares "
                        "from layer to layer")

    def _layer_input(self, parts: _Parts, layer: nn.Module, extras: Extras) -> None:
        """The layer's own input for each token: a gate of it, a projection and a norm."""
        gate, act, projection, norm = extras.input
        features = parts.linear((gate,), ("input_gate",)).out_features
        parts.linear((projection,), ("input_out",))
        parts.module((act,))
        parts.norm((norm,), "input_norm", self.known)
        if {"b_input_gate", "b_input_out"} & {*parts.weights} or "input_norm" in parts.constants:
            raise Unfit(f"layers: {type(layer).__name__} has an input of its own with biases, or a norm without "
                        "weights")
        parts.weights["layer_input"] = Weight((), "layer_input", given=(features,))

    def _normed_experts(self, parts: _Parts, layer: nn.Module, order: _Order) -> dict:
        """Experts beside an MLP, with norms of their own, and a router with a norm in front of it."""
        (at, own), (behind_mlp, before, behind) = order.extras.experts, order.extras.norms
        for name, role in ((behind_mlp, "shared_post_norm"), (before, "experts_norm"), (behind, "experts_post_norm")):
            parts.norm((name,), role, self.known)
        router, found = parts.module((at,)), experts_of(parts.module((own,)))
        shared = layer._modules[order.mlp]
        gated = gated_of(shared)
        if found is None or gated is None or gated.act != found.act or order.beside:
            raise Unfit(f"layers: {type(layer).__name__} has experts or an MLP that were not replaced, or of different "
                        "activations")
        eps, top_k = remembered(self.known, ("router with a norm", kind_of(router)), lambda: expect_router(router))
        if {eps} != {norm.eps for norm in parts.norms}:
            raise Unfit(f"layers: {type(router).__name__} has a norm with another eps than the layer's")
        parts.weights["w_router"] = Weight((at, "proj"), "weight")
        parts.weights["router_norm"] = Weight((at,), "scale", factor=router.scalar_root_size)
        parts.weights["expert_scale"] = Weight((at,), "per_expert_scale")
        parts.weights["w_gate_up"] = Weight((own,), "gate_up_proj", None, found.transposed)
        parts.weights["w_down"] = Weight((own,), "down_proj", None, found.transposed)
        if found.biased or {"shared_post_norm", "experts_norm", "experts_post_norm"} & {*parts.constants}:
            raise Unfit(f"layers: {type(layer).__name__} has experts with biases, or norms without weights")
        self._gated(parts, (order.mlp,), shared, gated, "shared_")
        return dict(act=found.act, choice=Choice(router.proj.weight.shape[0], top_k, renormalise=True,
                                                 packing=found.packing))

    def _latent_forms(self, parts: _Parts, attention: nn.Module, order: _Order, at: int, heads: dict,
                      ffn: dict) -> dict[tuple, Spec]:
        """Those of latent attention: by rotation, order of rotated features, and scale of scores."""
        norm, = parts.norms
        latent, name = heads["latent"], type(attention).__name__
        index, angles = getattr(attention, "layer_idx", None), self.angles[at]
        if not isinstance(index, int):
            raise Unfit(f"layers: {name} has no number")
        if getattr(attention, "sliding_window", None) is not None:
            raise Unfit(f"layers: {name} has latent keys and a window, for which the op has no kernel")
        rotary = 0 if angles is None else self._rotary_features(angles)
        if rotary not in (0, latent.rope):
            raise Unfit(f"layers: {name} rotates {rotary} features, and has {latent.rope} behind its latents")
        if rotary and self.calls[at].get("position_ids") is None:
            raise Unfit(f"layers: {type(self.decoder).__name__} does not tell its layers the positions")
        factors = self._query_factors(parts, at)
        usual = (latent.nope + latent.rope) ** -0.5
        scales = dict.fromkeys((0.0, *(value for own in ("scaling", "scale", "softmax_scale") if isinstance(
            value := getattr(attention, own, None), float) and abs(value / usual - 1) > 1e-9)))
        turns = [(None, "same")]
        turns += [("halves", "same")] if rotary else []
        # With one pair all of these are one.
        turns += [("interleaved", "same"), ("interleaved", "halves")] if rotary > 2 else []
        found = {}
        for (rotation, stored), scale in itertools.product(turns, scales):
            form = form_of(tuple(parts.weights), convention=norm.convention, eps=norm.eps, heads=heads["heads"],
                           kv_heads=0, dim=0, rotary=rotary, rotates=rotation is not None,
                           rotation=rotation or "halves", softcap=0.0, scale=scale,
                           rope_scale=self._rope_scale(angles) if rotation else 0.0, constants=tuple(parts.constants),
                           multiplier=order.factor, parallel=order.kind.startswith("parallel"), mixer="mla",
                           head_gates=heads["head_gates"], latent=replace(latent, order=stored), **ffn)
            weights = tuple(parts.weights[own] for own in parse(form).weights)
            found[rotation, stored, scale] = Spec(form, (latent.rank, latent.rope), rotation, weights,
                                                  _parts_of(parts.layer), index, None, angles, is_latent=True,
                                                  factors=factors)
        return found

    def _latent_attention(self, parts: _Parts, at: str, attention: nn.Module, children: set[str], output: str | None,
                          latent: str) -> dict:
        """Sizes of attention over a cache of latents, whose projection has that name."""
        name = type(attention).__name__
        by_latent = {"q_a_proj", "q_a_layernorm", "q_b_proj"}
        gate = next((own for own in sorted(children) if own in _OUTPUT_GATES), None)
        inputs = children - {output, latent, "kv_a_layernorm", "kv_b_proj", gate}
        if output is None or not {"kv_a_layernorm", "kv_b_proj"} <= children or inputs not in ({"q_proj"}, by_latent):
            raise Unfit(f"layers: {name} has other parts than latent attention: {', '.join(sorted(children))}")
        if others := {*attention._parameters, *attention._buffers}:
            raise Unfit(f"layers: {name} has tensors of its own: {', '.join(sorted(others))}")
        of_layer, parts.norms = parts.norms, set()
        if inputs == by_latent:
            parts.linear((at, "q_a_proj"), ("q_a",))
            parts.norm((at, "q_a_layernorm"), "q_a_norm", self.known)
            parts.linear((at, "q_b_proj"), ("q_b",))
        else:
            parts.linear((at, "q_proj"), ("q",))
        parts.linear((at, latent), ("kv_a",))
        parts.norm((at, "kv_a_layernorm"), "kv_a_norm", self.known)
        parts.linear((at, "kv_b_proj"), ("kv_b",))
        norms, parts.norms = parts.norms, of_layer
        parts.linear((at, output), ("o",))
        if biased := sorted(own for own in parts.weights if own.startswith(("b_q", "b_kv"))):
            raise Unfit(f"layers: {name} has a bias in front of its latents, {biased[0]}, for which there is no kernel")
        if len({norm.eps for norm in norms}) > 1 or {(norm.kind, norm.convention) for norm in norms} != {
                ("rms", norm.convention) for norm in of_layer} or "kv_a_norm" in parts.constants:
            raise Unfit(f"layers: norms of {name} that differ from the layer's, or from each other")
        own = {weight: own.of(parts.layer) for weight, own in parts.weights.items()}
        # There are heads * (nope + rope) rows of q, heads * (nope + v) of kv_b, and heads * v columns of the output.
        rope = own["w_kv_a"].shape[0] - own["kv_a_norm"].shape[0]
        of_nope = own["w_kv_b"].shape[0] - own["w_o"].shape[1]
        of_rope = own["w_q_b" if inputs == by_latent else "w_q"].shape[0] - of_nope
        if rope < 1 or of_nope < 1 or of_rope < 1 or of_rope % rope or of_nope % (of_rope // rope):
            raise Unfit(f"layers: {name} has heads of sizes that are not known")
        heads = of_rope // rope
        head_gates = gate is not None and self._output_gate(parts, (at, gate), attention, heads,
                                                            own["w_o"].shape[1] // heads)
        return dict(heads=heads, latent=Latent.of(own, heads, next(iter(norms)).eps), head_gates=head_gates)

    def _states_form(self, parts: _Parts, mixer: nn.Module, order: _Order, heads: dict, ffn: dict
                     ) -> dict[tuple, Spec]:
        """The one form of a layer whose mixer has states in the place of keys and values."""
        norm, = parts.norms
        index = getattr(mixer, "layer_idx", None)
        if not isinstance(index, int):
            raise Unfit(f"layers: {type(mixer).__name__} has no number")
        states, numbers = heads.pop("states"), heads.pop("numbers", [{}])
        limits = heads.pop("limits", [({}, {})])
        found = {}
        for own, of_call in itertools.product(numbers, limits):
            forms = [form_of(tuple(parts.weights), convention=norm.convention, eps=norm.eps, rotary=0, rotates=False,
                             softcap=0.0, scale=0.0, rope_scale=0.0, constants=tuple(parts.constants),
                             multiplier=order.factor, parallel=order.kind.startswith("parallel"), **own, **more,
                             **heads, **ffn) for more in of_call]
            weights = tuple(parts.weights[name] for name in parse(forms[0]).weights)
            found[(*own.values(), *(tuple(more.values()) for more in of_call))] = Spec(
                forms[0], (heads["heads"], heads["dim"]), None, weights, _parts_of(parts.layer), index, None, None,
                states=states, prompt_form=forms[1] if forms[1] != forms[0] else "",
                wide=getattr(parts.layer, _WIDE, False))
        return found

    def _delta_net(self, parts: _Parts, at: str, mixer: nn.Module, net: DeltaNet) -> dict:
        if net.of_features or net.grouped:
            expect_not_on_gpu(parts.layer, type(mixer).__name__)
        if mixer._buffers:
            raise Unfit(f"layers: {type(mixer).__name__} has tensors of its own: {', '.join(sorted(mixer._buffers))}")
        for name, weight in net.products():
            parts.linear((at, *name.split(".")), (weight,))
        if any(name.startswith("b_") for name in parts.weights):
            raise Unfit(f"layers: {type(mixer).__name__} has biases of its projections")
        of_gate = (at, *filter(None, (net.gate,)))
        gate = parts.module(of_gate)
        parts.module((at, net.conv))
        ends = list(itertools.accumulate(net.rows))
        whole = {"": None} if {"w_qkv", "w_qkvz"} & {*parts.weights} else {
            f"_{own}": rows for own, rows in zip("qkv", zip([0, *ends], ends))}
        for own, rows in whole.items():
            parts.weights[f"w_conv{own}"] = Weight((at, net.conv), "weight", rows, taps=True)
        for name in ("A_log", "dt_bias"):
            parts.weights[name] = Weight(of_gate, name, flat=True)
        norm = parts.module((at, net.norm))
        parts.weights["mixer_norm"] = Weight((at, net.norm), "weight")
        sizes = dict(mixer=net.mixer, heads=net.heads, kv_heads=net.heads, dim=net.dim, width=net.width,
                     v_heads=net.v_heads, v_dim=net.v_dim,
                     states=((2 * net.keys + net.values, net.width), (net.v_heads, net.dim, net.v_dim)))
        if net.of_features:
            if not is_patched(norm, gated_norm_forward) or gated_settings_of(norm)[:2] != ("after", "sigmoid"):
                raise Unfit(f"layers: {type(norm).__name__} was not replaced, or has another gate than a sigmoid")
            bounds = [value for value in vars(gate).values() if isinstance(value, float) and value < 0]
            return sizes | dict(gate_rank=net.rank, mixer_eps=gated_settings_of(norm)[-1],
                                numbers=[dict(gate_bound=bound) for bound in dict.fromkeys((0.0, *bounds))])
        own_eps = [value for value in vars(norm).values() if isinstance(value, float)]
        numbers = [dict(beta_scale=beta, mixer_eps=eps) for beta in (1.0, 2.0)
                   for eps in dict.fromkeys((*own_eps, 1e-5, 1e-6))]
        return sizes | dict(numbers=numbers)

    def _state_space(self, parts: _Parts, at: str, mixer: nn.Module, space: StateSpace, beside: bool = False) -> dict:
        limits = [tuple(dict(dt_limit=own) for own in both) for both in limits_of(mixer)]
        columns = sum(space.rows.values())
        scales = [name for name, own in mixer._buffers.items() if own.numel() == own.shape[-1] == columns]
        if mixer._buffers and not (beside and len(scales) == len(mixer._buffers) == 1):
            raise Unfit(f"layers: {type(mixer).__name__} has tensors of its own: {', '.join(sorted(mixer._buffers))}")
        parts.linear((at, space.inner), ("in",))
        if "b_in" in parts.weights:
            raise Unfit(f"layers: {type(mixer).__name__} has a bias of its projection, for which there is no kernel")
        parts.linear((at, space.outer), ("ssm_out" if beside else "o",))
        module = parts.module((at, space.conv))
        parts.weights["w_conv"] = Weight((at, space.conv), "weight", taps=True)
        if module.bias is not None:
            parts.weights["b_conv"] = Weight((at, space.conv), "bias")
        for name in ("A_log", "dt_bias", "D"):
            parts.weights[name] = Weight((at,), name)
        for name in scales:
            parts.weights["in_scale"] = Weight((at,), name, flat=True, wide=True)
        sizes = dict(width=space.width, state_dim=space.state_dim, state_groups=space.groups, limits=limits,
                     states=((sum(space.channels.values()), space.width), (space.heads, space.dim, space.state_dim)))
        sizes |= dict(mixer="attention-ssd", state_heads=(space.heads, space.dim), factors=dict.fromkeys(
            (1.0, *(v for v in vars(mixer).values() if scales and isinstance(v, float) and v)))) if beside else dict(
                mixer="ssd", heads=space.heads, kv_heads=space.heads, dim=space.dim)
        if not space.norm:
            if not beside:
                raise Unfit(f"layers: {type(mixer).__name__} has no norm")
            parts.module((at, "norm"))
            return sizes
        norm = parts.module((at, space.norm))
        parts.weights["mixer_norm"] = Weight((at, space.norm), "weight")
        if not is_patched(norm, gated_norm_forward):
            raise Unfit(f"layers: {type(norm).__name__} was not replaced")
        # No input that is tried need tell one small eps from another.
        order, gate, _, groups, eps = gated_settings_of(norm)
        if (order, gate, groups) != ("before", "silu", space.groups):
            raise Unfit(f"layers: {type(norm).__name__} is no norm of {space.groups} groups behind a gate with SiLU")
        return sizes | dict(mixer_eps=eps)

    def _convolution(self, parts: _Parts, at: str, mixer: nn.Module, conv: ShortConv) -> dict:
        if mixer._buffers:
            raise Unfit(f"layers: {type(mixer).__name__} has tensors of its own: {', '.join(sorted(mixer._buffers))}")
        parts.linear((at, conv.inner), ("in",))
        parts.linear((at, conv.outer), ("o",))
        module = parts.module((at, conv.conv))
        parts.weights["w_conv"] = Weight((at, conv.conv), "weight", taps=True)
        if module.bias is not None:
            parts.weights["b_conv"] = Weight((at, conv.conv), "bias")
        if ("b_in" in parts.weights) != ("b_conv" in parts.weights):
            raise Unfit(f"layers: {type(mixer).__name__} has a bias of its projection or of its convolution alone")
        heads, dim = heads_of(conv.channels)
        return dict(mixer="conv", heads=heads, kv_heads=heads, dim=dim, width=conv.width,
                    states=((conv.channels, conv.width),))

    def _attention(self, parts: _Parts, at: str, attention: nn.Module, grouped: bool) -> dict | None:
        """Its heads; None where no weight has the rows of groups of heads together."""
        children = {n for n, child in attention.named_children()
                    if next(child.parameters(), None) is not None or _is_norm(child)}
        output = next((n for n in _OUTPUTS if n in children), None)
        dim = next((getattr(attention, name) for name in ("head_dim", "head_size")
                    if isinstance(getattr(attention, name, None), int)), None)
        if latent := next((name for name in sorted(children) if name.startswith("kv_a_proj")), None):
            return None if grouped else self._latent_attention(parts, at, attention, children, output, latent)
        if output is None or dim is None:
            raise Unfit(f"layers: {type(attention).__name__} has no {'output' if output is None else 'head_dim'} that "
                        f"is known: {', '.join(sorted(children))}")
        norms = next((pair for pair in _NORMS_OF_HEADS if set(pair) <= children), ())
        inputs = children - {output, *norms}
        gate = next((name for name in sorted(inputs) if name in _OUTPUT_GATES), None)
        v_norm = "v_norm" in inputs
        sharing = sharing_of(attention)
        takes = sharing is not None and sharing.takes
        if takes and "q_norm" in inputs:  # which has no k_norm beside it
            norms = ("q_norm",)
        inputs -= {gate, "v_norm", *norms}
        if v_norm:
            self._norm_of_values(parts, (at, "v_norm"), attention)
        parts.linear((at, output), ("o",))
        heads = parts.weights["w_o"].of(parts.layer).shape[1] // dim
        head_gates = gate is not None and self._output_gate(parts, (at, gate), attention, heads, dim)
        gated_rows = False
        if takes:
            groups = getattr(attention, "num_key_value_groups", None)
            if grouped:
                return None
            if inputs != {"q_proj"} or not isinstance(groups, int) or groups < 1 or heads % groups:
                raise Unfit(f"layers: {type(attention).__name__} takes keys of another layer, and has other parts than q "
                            f"and an output: {', '.join(sorted(inputs))}")
            parts.linear((at, "q_proj"), ("q",))
            kv_heads = heads // groups
        elif inputs in ({"q_proj", "k_proj", "v_proj"}, {"q_proj", "k_proj"}):
            if grouped:
                return None
            for name in "qkv":  # without v_proj, values are keys before their norm and RoPE
                parts.linear((at, f"{name if f'{name}_proj' in inputs else 'k'}_proj"), (name,))
            own = parts.weights["w_q"]
            if own.of(parts.layer).shape[0] == 2 * heads * dim:
                if "b_q" in parts.weights or own.transposed or "w_g" in parts.weights:
                    raise Unfit(f"layers: {type(attention).__name__} has an output gate, rows of q_proj, with a bias")
                gated_rows = True
            kv_heads = parts.weights["w_k"].of(parts.layer).shape[0] // dim
        elif len(inputs) == 1:
            name, = inputs
            module = attention._modules[name]
            if type(module) is not nn.Linear and not _is_transposed(module):
                raise Unfit(f"layers: {name} is {type(module).__name__}, not Linear")
            rows = module.nf if _is_transposed(module) else module.out_features
            kv_heads = (rows // dim - heads) // 2
            if (heads + 2 * kv_heads) * dim != rows:
                raise Unfit(f"layers: {name} does not give heads of {dim} features")
            if not grouped:
                parts.linear((at, name), ("q", "k", "v"), [heads * dim] + [kv_heads * dim] * 2)
            elif kv_heads == 1 or heads % kv_heads:  # the same rows, or none
                return None
            else:
                parts.linear((at, name), ("qkv",))
        else:
            others = inputs - {"q_proj", "k_proj", "v_proj"}
            raise Unfit(f"layers: {type(attention).__name__} has other parts than q, k, v and an "
                        f"output: {', '.join(sorted(others or inputs))}")
        if any(f"b_{name}" in parts.weights for name in "qkv") and not takes:
            for name in "qkv":
                weight = parts.weights[f"w_{name}"]
                parts.weights.setdefault(f"b_{name}", Weight(
                    weight.path, "bias", zeros=weight.of(parts.layer).shape[0]))
        sizes = []
        for name, ours in zip(norms, ("q_norm", "k_norm")):
            parts.norm((at, name), ours, self.known)
            weight = attention._modules[name]._parameters.get("weight")
            sizes.append(dim if weight is None else weight.numel())
        norm_rows = bool(sizes) and sizes[0] != dim
        if sizes and sizes != ([heads * dim, kv_heads * dim] if norm_rows else [dim, dim])[:len(sizes)]:
            raise Unfit("layers: norms of q and k that are neither of heads nor of all of them together")
        others = set(attention._parameters) | set(attention._buffers)
        if others == {"sinks"}:
            parts.weights["sinks"] = Weight((at,), "sinks")
        elif others:
            raise Unfit(f"layers: {type(attention).__name__} has tensors of its own: "
                        f"{', '.join(sorted(others))}")
        return dict(heads=heads, kv_heads=kv_heads, dim=dim, norm_rows=norm_rows, grouped=grouped,
                    head_gates=head_gates, gated_rows=gated_rows, v_norm=v_norm)

    def _norm_of_values(self, parts: _Parts, path: tuple[str, ...], attention: nn.Module) -> None:
        """Expects a norm of heads of v as the op has it."""
        module = parts.module(path)
        found = _norm_of(module, self.known)
        # Without weights all conventions are one.
        if found.kind != "rms" or next(module.parameters(), None) is not None \
                or {found.eps} != {norm.eps for norm in parts.norms}:
            raise Unfit(f"layers: {type(attention).__name__} has a norm of values with weights, or with another eps, "
                        "for which the op has no kernel")

    def _output_gate(self, parts: _Parts, path: tuple[str, ...], attention: nn.Module, heads: int, dim: int) -> bool:
        """Whether the gate that multiplies the output is one of each head, and not of their features."""
        expect_not_on_gpu(parts.layer, f"the output gate of {type(attention).__name__}")
        parts.linear(path, ("g",))
        rows = parts.weights["w_g"].of(parts.layer).shape[0]
        if "b_g" in parts.weights or rows not in (heads, heads * dim):
            raise Unfit(f"layers: {type(attention).__name__} has an output gate, {path[-1]}, with a bias or of other "
                        "features, for which the op has no kernel")
        return rows == heads != heads * dim

    def _softcap(self, attention: nn.Module) -> float:
        """PyTorch's own attention, "sdpa", leaves it out."""
        softcap = getattr(attention, "attn_logit_softcapping", None)
        by_module = self.decoder.config._attn_implementation == attentions.EAGER
        return float(softcap) if softcap and by_module else 0.0

    def _inline(self, parts: _Parts) -> dict:
        chain = chain_of(parts.layer)
        parts.linear(chain.first, ("up",))
        parts.linear(chain.second, ("down",))
        act = parts.layer._modules.get(chain.act[0])
        if act is not None:
            parts.module(chain.act)
        return dict(act=chain.name)

    def _gated(self, parts: _Parts, at: tuple[str, ...], mlp: nn.Module, gated: GatedMLP,
               prefix: str = "") -> dict:
        paths = [None if path is None else (*at, *path.split("."))
                 for path in (gated.gate, gated.up, gated.down)]
        names = [f"{prefix}{name}" for name in ("gate", "up", "down")]
        if gated.up is None:
            h = mlp.get_submodule(gated.down).in_features
            order = names[1::-1] if gated.up_first else names[:2]
            parts.linear(paths[0], tuple(order), [h, h])
        else:
            parts.linear(paths[0], (names[0],))
            parts.linear(paths[1], (names[1],))
        parts.linear(paths[2], (names[2],))
        return dict(act=gated.act)

    def _mlp(self, parts: _Parts, at: tuple[str, ...], mlp: nn.Module, of_factors: bool = False) -> dict:
        if (gated := gated_of(mlp)) is not None:
            return self._gated(parts, at, mlp, gated)
        if is_patched(mlp, plain_mlp_forward):
            first, second, _, act, _ = mlp.__dict__["_fftune"]
            parts.linear((*at, first), ("up",))
            parts.linear((*at, second), ("down",))
            return dict(act=act)
        if "experts" in mlp._modules:
            return self._mixture(parts, at, mlp)
        if (squared := squared_mlp_of(mlp, self.known)) is not None:
            return self._squared(parts, at, squared)
        if of_factors and (scaled := scaled_mlp_of(mlp, self.known)) is not None:
            for name in ("gate", "up", "down"):
                parts.linear((*at, getattr(scaled, name)), (name,))
            if scaled.factor != 1:
                parts.weights["gate_scale"] = replace(parts.weights["w_gate"], value=scaled.factor)
            return dict(act=scaled.act, factor=scaled.factor_of_result)
        raise Unfit(f"layers: {type(mlp).__name__} is no MLP that was replaced")

    def _squared(self, parts: _Parts, at: tuple[str, ...], layers: tuple[str, str], prefix: str = "") -> dict:
        """An MLP without a gate whose activation is relu(x)²: kernels of networks with gates compute it."""
        for name, own in zip(layers, ("up", "down")):
            parts.linear((*at, name), (f"{prefix}{own}",))
        return dict(act="relu2")

    def _mixture_beside(self, parts: _Parts, layer: nn.Module, order: _Order) -> dict:
        """A mixture of experts, and an MLP of the layer for every token."""
        mixtures = [name for name in (order.mlp, order.beside) if "experts" in layer._modules[name]._modules]
        if len(mixtures) != 1:
            raise Unfit(f"layers: {type(layer).__name__} has two MLPs, {order.mlp} and {order.beside}")
        shared = order.beside if mixtures == [order.mlp] else order.mlp
        return self._mixture(parts, (mixtures[0],), layer._modules[mixtures[0]], {(shared,): layer._modules[shared]})

    def _mixture(self, parts: _Parts, at: tuple[str, ...], mlp: nn.Module, beside: dict | None = None) -> dict:
        """A router and experts, both patched, and a shared expert among them or `beside` them, by its path."""
        children = {n: child for n, child in mlp.named_children()
                    if next(child.parameters(), None) is not None}
        squares = "experts" in children and is_squared_experts(children["experts"], self.known)
        routers = {name: router for name, child in children.items()
                   if (router := router_of(child) or (recognised_router(child, mlp, self.known) if squares else None))}
        shared = {(*at, name): child for name, child in children.items()
                  if gated_of(child) is not None
                  or squares and name not in routers and squared_mlp_of(child, self.known)}
        own_shared = {path[-1] for path in shared}
        shared |= beside or {}
        gates = [name for name, child in children.items()
                 if type(child) is nn.Linear and child.out_features == 1 and child.bias is None]
        experts = ExpertsFound("relu2", "halves", False, False) if squares else \
            experts_of(children["experts"]) if "experts" in children else None
        described = f"layers: a mixture of {', '.join(sorted(children))}"
        if experts is None or not routers:
            raise Unfit(f"{described} has {'experts that were' if experts is None else 'a router that was'} not replaced")
        if len(routers) > 1 or len(shared) > 1 or len(gates) > len(shared) \
                or {"experts", *routers, *own_shared, *gates} != set(children) \
                or mlp._parameters:
            raise Unfit(f"{described} is not known")
        (router_name, router), = routers.items()
        gate, of_router = children[router_name], (*at, router_name)
        of_bias = at if router.given else of_router
        if {*mlp._buffers} - ({router.bias} if router.given else set()):
            raise Unfit(f"{described} has tensors of its own: {', '.join(mlp._buffers)}")
        if router.added not in (None, 1e-6):
            raise Unfit(f"{described} weighs by a sum with {router.added} added, for which there is no "
                        "kernel")
        own = (*at, "experts")
        for path in (own, of_router):
            parts.module(path)
        parts.weights["w_router"] = Weight(of_router, "weight")
        if gate._parameters.get("bias") is not None:
            parts.weights["b_router"] = Weight(of_router, "bias")
        if router.bias:
            parts.weights["choice_bias"] = Weight(of_bias, router.bias)
        if squares:
            expect_not_on_gpu(parts.layer, "experts with relu(x)²")
            parts.weights["w_up"] = Weight(own, "up_proj")
        else:
            parts.weights["w_gate_up"] = Weight(own, "gate_up_proj", None, experts.transposed)
        parts.weights["w_down"] = Weight(own, "down_proj", None, experts.transposed)
        if experts.biased:
            parts.weights["b_gate_up"] = Weight(own, "gate_up_proj_bias")
            parts.weights["b_down"] = Weight(own, "down_proj_bias")
        for path, child in shared.items():
            if squares and (squared := squared_mlp_of(child, self.known)) is not None:
                parts.module(path)
                self._squared(parts, path, squared, "shared_")
                continue
            found = gated_of(child)
            if found is None or found.act != experts.act:
                other = "an MLP that was not replaced" if found is None else "another activation"
                raise Unfit(f"{described} has {other} in {path[-1]}")
            parts.module(path)
            self._gated(parts, path, child, found, "shared_")
        for name in gates:
            parts.linear((*at, name), ("shared_router",))
        return dict(act=experts.act,
                    choice=Choice(gate.weight.shape[0], gate.top_k, router.score, router.order,
                                  router.renormalise or router.added is not None, experts.packing, router.groups,
                                  router.top_groups, router.group_score, router.scale, router.wide,
                                  router.added or 0.0))

    def _rotary_features(self, angles: Angles) -> int:
        """How many features of a head are rotated."""
        rotary = self._rotary_of(angles)
        rope_type = rotary.rope_type if angles.kind is None else rotary.rope_type.get(angles.kind)
        if rope_type not in STATIC_ROPES:
            raise Unfit("layers: its frequencies change with the length")
        if not rotation_of(rotary):
            with trying("layers: its rotary embedding gives no cosines and sines that are known"):
                remembered(self.known, (angles, kind_of(rotary)),
                           lambda: is_complex_rotary(rotary, angles.kind) or layout_of(rotary, angles.kind))
        return 2 * frequencies(rotary, angles.kind).numel()

    def _rope_scale(self, angles: Angles) -> float:
        scale = scaling(self._rotary_of(angles), angles.kind)
        return 0.0 if scale == 1.0 else scale

    # what it computes

    def _identify(self, layer: nn.Module, order: _Order, candidates: dict[tuple, Spec]) -> tuple:
        """The key of the candidate that the layer computes."""
        spec = next(iter(candidates.values()))
        networks = _small_networks(layer, spec)
        if networks:
            try:
                return self._compared(layer, order, candidates, networks)
            except Exception:  # some modules have their sizes in a configuration too
                pass
        return self._compared(layer, order, candidates, {})

    def _compared(self, layer: nn.Module, order: _Order, candidates: dict[tuple, Spec],
                  networks: dict[str, dict[int, int]]) -> tuple:
        """Two tokens of two sequences behind three others, in every form that is possible, by a stand-in with these
        sizes in its children `networks`."""
        candidates = {key: _shrunk(spec, networks) for key, spec in candidates.items()}
        spec = next(iter(candidates.values()))
        own = stand_in(layer, parts={name: stand_in(layer._modules[name], sizes) for name, sizes in networks.items()})
        rotary = None if spec.angles is None else stand_in(self._rotary_of(spec.angles))
        config, of_call = self.decoder.config, {}
        # Some models scale the queries of far positions. Others have tables of so many positions.
        most = 100_000 if spec.is_latent else max(0, (getattr(config, "max_position_embeddings", 0) or 0) - _PLACES)

        def draw(numbers: Numbers) -> tuple:
            numbers.fill(own, buffers=[w.name for w in spec.weights if w.name not in own._parameters])
            if len(candidates) > 1 and "dt_bias" in (names := parse(spec.form).weights):
                bias = spec.weights[names.index("dt_bias")].of(own)
                bias.copy_((bias - 1) * 10 - 4)  # some steps are shorter than 0.001, and some longer than 1
            like = spec.weights[0].of(own)
            of_call["layer_input"] = [numbers(2, 2, *w.given) for w in spec.weights if w.name == "layer_input"]
            if not spec.mixes:
                return numbers(2, 1 + numbers.seed % 2, like.shape[-1]), None
            if spec.has_both:
                x = numbers(2, 1 + numbers.seed % 2, like.shape[-1])
                first = (0, most, most // 9)[numbers.seed % 3]
                return x, (*(numbers(2, _PLACES, *spec.heads) for _ in range(2)), *(
                    numbers(2, *shape) for shape in spec.states), first)
            if spec.states:  # one token or two, in every other pair for sequences without a state
                x = numbers(2, 1 + numbers.seed % 2, like.shape[-1])
                past = [numbers(2, *shape) * (numbers.seed % 4 > 1) for shape in spec.states]
                return x, past if numbers.seed % 4 > 1 else None
            x = numbers(2, 2, like.shape[-1])
            shapes = [(1, width) for width in spec.heads] if spec.is_latent else [spec.heads] * 2
            first = (0, most, most // 9)[numbers.seed % 3]
            return x, (*(numbers(2, _PLACES, *shape) for shape in shapes), first)

        def agrees(ours, theirs):
            *right, x = theirs
            return all(map(_is_near, ours, right, (x, *[None] * (len(right) - 1))))

        run = lambda given: _run_layer(own, rotary, spec, config, of_call["layer_input"], *given)
        # All but its attention was traced before.
        found = identify(run, {key: _run_reference(own, rotary, other, of_call) for key, other in candidates.items()},
                         draw, subject=f"layers: {type(layer).__name__}", agrees=agrees, free=None)
        for dtype in CUDA_TYPES if spec.mixes else ():
            with of_type(own, dtype):
                for name in filter(None, (order.attention, order.mixer)):
                    _expect_analytic(own._modules[name], dtype, lambda: run(cast(draw(Numbers(0)), dtype)),
                                     () if spec.factors is None else ("floor", "log"))
        return found


@torch.no_grad()
def _expect_analytic(attention: nn.Module, dtype: torch.dtype, run: Callable, of_positions: tuple[str, ...] = ()
                     ) -> None:
    """That all that the attention uses in run() is analytic, but its masks, the roots of its norms, and the maximum
    that a softmax with sinks subtracts."""
    of_rule = ("linalg_solve_triangular",) if delta_net_of(attention) else ()
    trace = Trace({INTEGERS, PATCHED, *of_rule, *of_positions,
                   *(ROOTS if any(map(_is_norm, attention.children())) else ()),
                   # Gemma's norms without weights, which were compared by themselves, have powers for roots.
                   *(("pow",) if "v_norm" in attention._modules or sharing_of(attention) else ()),
                   *(("max",) if "sinks" in attention._parameters else ())})

    def forward(*arguments, **options):
        with trace:
            return type(attention).forward(attention, *arguments, **options)

    attention.__dict__["forward"] = forward
    try:
        run()
    finally:
        del attention.__dict__["forward"]
    scores, limits = torch.zeros(1), getattr(attention, "time_step_limit", (0.0, None))
    # Those of masked keys are infinite; and steps, which softplus gives, are positive.
    # Kimi's softplus is what it is given above 20.
    known = (lambda: scores.clamp(*limits)) if state_space_of(attention) else \
        (lambda: scores > 20.0) if kimi_delta_of(attention) else lambda: scores.clamp(min=torch.finfo(dtype).min)
    expect_pieces(trace, known, f"layers: {type(attention).__name__}")


def _expect_runs(layer: nn.Module, spec: Spec, dtype: torch.dtype) -> bool:
    """That the op runs the layer with its own weights, one token on the CPU. On a GPU its plan is made, which compiles
    its kernels."""
    weights = [w.of(layer) for w in spec.weights]
    try:
        for form in filter(None, (spec.form, spec.prompt_form)):
            expect_runs(form, weights, weights[0].get_device() if weights[0].is_cuda else -1)
        if not weights[0].is_cuda:
            _run_token(spec, weights, dtype)
    except Error as reason:
        raise Unfit(f"layers: {reason}") from None
    return True


@torch.no_grad()
def _run_token(spec: Spec, weights: list[Tensor], dtype: torch.dtype) -> None:
    form = parse(spec.form)
    own = dict(zip(form.weights, weights))
    norm = next((own[name] for name in ("attn_norm", "attn_post_norm", "ffn_norm") if name in own), None)
    like = own["w_o" if spec.mixes else "w_down"] if norm is None else norm
    x = torch.zeros(1, 1, like.shape[-2 if norm is None else -1], dtype=dtype)
    heads, dim = spec.heads
    if not spec.mixes:
        call(OPS.network, x, weights, spec.form)
        return
    states = [torch.zeros(1, *shape, dtype=torch.float32 if at else dtype) for at, shape in enumerate(spec.states)]
    if spec.states and not spec.has_both:
        call(OPS.layer, x, None, None, slots_of(spec, 1, x.device), None, None, weights, states, spec.form, None, None)
        return
    caches = [torch.zeros(1, 8, heads + dim, dtype=dtype)] if spec.is_latent else \
        [torch.zeros(1, 8, heads, dim, dtype=dtype).transpose(1, 2) for _ in range(2)]
    place = torch.zeros(1, 1, dtype=torch.int32)
    rows, angles = (None, None) if spec.rotation is None else (place, torch.zeros(1, form.rotary))
    slots = None if spec.takes_keys else place
    call(OPS.layer, x, rows, angles, slots, place[0] + 1, None, weights, caches + states, spec.form, None, None)


_PLACES, _BEFORE = 8, 3


def _is_near(ours: Tensor, theirs: Tensor, x: Tensor | None) -> bool:
    """Errors are relative to what the layer adds to x."""
    if ours.shape != theirs.shape:
        return False
    change = (theirs.double() - (0 if x is None else x.double())).norm()
    error = (ours.double() - theirs.double()).norm()
    return bool(error <= torch.finfo(torch.float32).eps * (64 * change + 2 * theirs.double().norm()))


def _run_layer(own: nn.Module, rotary: nn.Module | None, spec: Spec, config, layer_input: list[Tensor], x: Tensor,
               past: tuple | list[Tensor] | None) -> tuple[Tensor, ...]:
    """(y, keys, values, x) of the layer itself over a static cache; or its states in the place of keys and values."""
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    batch, s = x.shape[:2]
    if not spec.mixes:
        options = {"attention_mask": None, "use_cache": True, "position_embeddings": None}
        return _first(own(x, **_accepted(own, options))), x
    if spec.states and not spec.has_both:
        cache = StaticCache(config=config, max_cache_len=_PLACES)
        kv = cache.layers[spec.index] = new_cache_layer(spec, past, _PLACES)
        options = {"attention_mask": None, "use_cache": True, "position_embeddings": None, **as_option(cache, own)}
        y = _first(own(x, **_accepted(own, options)))
        return y, *states_of(kv, spec, batch, x), x
    kv = new_cache_layer(spec, past[2:-1], _PLACES) if spec.has_both else StaticLayer(_PLACES)
    if not hasattr(kv, "cumulative_length"):
        raise Unfit("the static cache of this transformers does not count its tokens: whole layers need "
                    "version 5")
    *past, first = past  # the position of the cache's first row
    keys, values = (t.clone().transpose(1, 2) for t in past[:2])
    kv.lazy_initialization(keys, values)
    kv.keys, kv.values = keys, values
    kv.cumulative_length.fill_(_BEFORE)
    cache = StaticCache(config=config, max_cache_len=_PLACES)
    cache.layers[spec.index] = kv
    places = torch.arange(_BEFORE, _BEFORE + s)[None]
    position_ids = places + first
    mask = torch.arange(_PLACES) <= places[0][:, None]
    mask = mask.expand(batch, 1, s, _PLACES)
    if config._attn_implementation == attentions.EAGER:
        mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)
    options = {"attention_mask": mask, "use_cache": True, "position_ids": position_ids, **as_option(cache, own)}
    states = SharedStates(spec.sharing, kv.keys, kv.values)
    if STATES_ARGUMENT in inspect.signature(type(own).forward).parameters:
        options[STATES_ARGUMENT] = states
    if layer_input:
        options[INPUT_ARGUMENT] = layer_input[0].to(x.dtype)
    if rotary is not None:
        options["position_embeddings"] = rotary(
            x, position_ids, *(() if spec.angles.kind is None else (spec.angles.kind,)))
    y = _first(own(x, **_accepted(own, options)))
    states.expect_as_known(type(own).__name__)
    return y, kv.keys, kv.values, *(states_of(kv, spec, batch, x) if spec.has_both else ()), x


def _accepted(own: nn.Module, options: dict) -> dict:
    """The options that a layer's forward takes."""
    parameters = inspect.signature(type(own).forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def _run_reference(own: nn.Module, rotary: nn.Module | None, spec: Spec, of_call: dict):
    def compute(given) -> tuple[Tensor, ...]:
        x, past = given
        batch, s = x.shape[:2]
        if not spec.mixes:
            return (reference.layer(x, None, None, None, None, None, [w.of(own) for w in spec.weights], [], spec.form),)
        if spec.states and not spec.has_both:
            states = [x.new_zeros(batch, *shape) for shape in spec.states] if past is None else \
                [t.clone() for t in past]
            y = reference.layer(x, None, None, slots_of(spec, batch, x.device), None, None,
                                [w.of(own) for w in spec.weights], states, spec.form_in(s, past is None))
            return y, *states
        *past, first = past
        states = [t.clone() for t in past[2:]]
        caches = [torch.cat([t[:, :, 0] for t in past], -1)] if spec.is_latent else \
            [*(t.clone().transpose(1, 2) for t in past[:2]), *states]
        places = torch.arange(_BEFORE, _BEFORE + s, dtype=torch.int32)
        rows = angles = None
        if spec.rotation is not None:
            pairs = (places + first)[:, None].float() * frequencies(rotary, spec.angles.kind)
            angles = angles_of(pairs, spec.rotation)
            rows = torch.arange(s, dtype=torch.int32).expand(batch, -1)
        slots = places + torch.arange(batch, dtype=torch.int32)[:, None] * _PLACES
        lengths = torch.full((batch,), _BEFORE + s, dtype=torch.int32)
        given = {"layer_input": of_call["layer_input"][0]} if of_call["layer_input"] else {}
        if spec.factors is not None:
            given["q_factors"] = spec.factors.of((places + first).expand(batch, -1), x.dtype)
        weights = [given[w.name] if w.given is not None else w.of(own) for w in spec.weights]
        y = reference.layer(x, rows, angles, slots, lengths, None, weights, caches, spec.form)
        return y, *([t[:, None] for t in caches[0].split(spec.heads, -1)] if spec.is_latent else caches)
    return compute

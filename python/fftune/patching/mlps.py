"""MLPs by ffn: with a gate, and of two layers with an activation between them."""
import inspect
import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import ops
from .._ops.packed import format_of
from .fp8_linear import has_bias_for, is_rounded_fp8, rounds_alike, scales_of, serves
from .quantised import fits, has_codes, is_quantised, ordered, packed_of
from .recognise import (KNOWN_ACTIVATIONS, RELU_SQUARED, SCALES, Elsewhere, Foreign, Numbers, Options, Unfit,
                        activation_name, activation_of, are_plain, calls_dropout, drops, expect_configured_activation,
                        expect_no_hooks, expect_plain, has_fast_products, has_kernels, identify, is_patched, kind_of,
                        original, parts_watched, remembered, stand_in, undoable, view_of)
from .trial import hidden, replace_forward


def takes_one_argument(module: nn.Module) -> bool:
    """Whether its forward can be given no more than one."""
    return len(inspect.signature(type(module).forward).parameters) == 2


def required_arguments(module: nn.Module) -> int:
    """How many arguments its forward has to be given."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
               for p in parameters)


def _small_sizes(d: int, h: int) -> dict[int, int]:
    """Sizes of stand-ins for large MLPs. Small numbers may be settings."""
    return {h: 16, 2 * h: 32, d: {h: 16, 2 * h: 32}.get(d, 24)} if min(d, h) > 64 else {}


def _expect_activation_of_its_own(module: nn.Module, act: str, known: dict) -> None:
    """That an attribute that holds an activation says the same as what it computes."""
    try:
        holder = activation_of(module)
    except Unfit:  # it calls a function
        return
    if activation_name(holder, known) != act:
        raise Unfit(f"{type(module).__name__} has {type(holder).__name__}, and computes {act}")


def _draw(own: nn.Module, width: int):
    def draw(numbers: Numbers) -> Tensor:
        numbers.fill(own)
        return numbers(2, 3, width) * SCALES[numbers.seed % len(SCALES)]
    return draw


def _elsewhere(own: nn.Module) -> Elsewhere:
    """A dropout is looked at in each call."""
    return Elsewhere(own, training=calls_dropout(own) is not True, drops=True)


# with a gate

@dataclass(frozen=True)
class GatedMLP:
    """A module as ffn sees it: the paths of its layers, or in `gate` that of gate and up together."""

    gate: str
    up: str | None
    down: str
    act: str
    up_first: bool = False  # of gate and up together
    recompute: bool = False


def gated_of(mlp: nn.Module) -> GatedMLP | None:
    """The form that patch_gated_mlp() found."""
    return mlp.__dict__["_fftune"][0] if is_patched(mlp, gated_mlp_forward) else None


def patch_gated_mlp(module: nn.Module, known: dict, options: Options) -> str | None:
    linears = {name: child for name, child in module.named_modules() if name.count(".") < 2
               and getattr(child, "weight", None) is not None
               and getattr(child.weight, "dim", lambda: 0)() == 2}
    direct = [name for name in linears if "." not in name]
    others = {p for linear in linears.values() for p in linear.parameters()}
    if len(linears) not in (2, 3) or not direct or len(linears) == 2 and len(direct) < 2 \
            or any(isinstance(child, nn.Embedding) for child in linears.values()) \
            or any(p not in others and p.dim() != 1 for p in module.parameters()) \
            or len(others) > 6 or required_arguments(module) != 1 \
            or any(map(is_rounded_fp8, linears.values())):
        return None
    roles = _roles(linears)
    if roles and len(linears) == 3 or roles and not _holds_two_layers(linears):
        for name, child in linears.items():
            if type(child) is not nn.Linear:
                raise Unfit(f"{name} is {type(child).__name__}, not Linear")
    else:
        return None
    expect_plain(module)
    if len({c.weight.dtype for c in linears.values()}) > 1:
        raise Unfit("its weights are of several types")
    try:
        activation_name(activation_of(module), known)
    except Unfit as reason:
        if "no kernel" in str(reason):
            raise
    if any(child.bias is not None for name, child in linears.items()
           if all(name != down for _, _, down in roles)):
        raise Unfit("gate and up have biases, for which there is no kernel")
    form = replace(remembered(known, kind_of(module), lambda: _gated_form(module, linears, roles, known)),
                   recompute=options.recompute)
    if linears[form.gate].bias is not None or form.up and linears[form.up].bias is not None:
        raise Unfit("gate and up have biases, for which there is no kernel")
    expect_no_hooks(*list(module.modules())[1:])
    replace_forward(module, gated_mlp_forward, (form,), hidden(linears[form.gate].in_features), known)
    return f"{type(module).__name__} by ffn ({form.act})"


def _roles(linears: dict[str, nn.Module]) -> list[tuple[str, str | None, str]]:
    """(gate, up, down) that the shapes allow, or (gate and up, None, down)."""
    shapes = {name: tuple(child.weight.shape) for name, child in linears.items()}
    if len(linears) == 2:
        return [(both, None, down) for both, down in (tuple(shapes), tuple(shapes)[::-1])
                if shapes[both] == (2 * shapes[down][1], shapes[down][0])]
    return [(gate, up, down) for down in shapes for gate in shapes for up in shapes
            if len({gate, up, down}) == 3 and shapes[gate] == shapes[up] == shapes[down][::-1]]


def _holds_two_layers(linears: dict[str, nn.Module]) -> bool:
    first, second = (tuple(child.weight.shape) for child in linears.values())
    return first == second[::-1]


def _gated_form(module: nn.Module, linears: dict, roles: list, known: dict) -> GatedMLP:
    d, h = linears[roles[0][2]].weight.shape
    own = stand_in(module, _small_sizes(d, h))
    at = own.get_submodule
    width = at(roles[0][0]).in_features

    def gated(gate, up, down, act, up_first):
        def compute(x):
            first, second = (at(gate)(x), at(up)(x)) if up else at(gate)(x).chunk(2, -1)
            if up_first:
                first, second = second, first
            return at(down)(act(first) * second)
        return compute

    forms = {}
    for role in roles:
        for up_first in ((False, True) if role[1] is None else (False,)):
            for name, act in KNOWN_ACTIVATIONS.items():
                form = GatedMLP(*role, name, up_first)
                key = Foreign(f"an MLP with {name.name}", form) if isinstance(name, Foreign) else form
                forms[key] = gated(*role, act, up_first)
    found = identify(own, forms, _draw(own, width), subject=type(module).__name__, elsewhere=_elsewhere(own),
                     canonical=lambda key: (key.act, key.down) if isinstance(key, GatedMLP) and key.act == "none"
                     else key)
    _expect_activation_of_its_own(module, found.act, known)
    expect_configured_activation(module, found.act)
    return found


def gated_weights(mlp: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """The weights of gate, up and down, and the bias of down; None if a layer was exchanged since, by an
    adapter say, or a part is watched."""
    form = mlp.__dict__["_fftune"][0]
    layers = [mlp.get_submodule(path) for path in (form.gate, form.up, form.down) if path]
    *inner, down = layers
    if any(type(layer) is not nn.Linear for layer in layers) or parts_watched(mlp) \
            or any(layer.bias is not None for layer in inner) \
            or not are_plain(*(layer.weight for layer in layers)):
        return None
    if form.up is None:
        first, second = inner[0].weight.chunk(2)
        inner = (second, first) if form.up_first else (first, second)
    else:
        inner = [layer.weight for layer in inner]
    return *inner, down.weight, down.bias


@undoable
def gated_mlp_forward(self, *arguments, **options) -> Tensor:
    weights = gated_weights(self)
    if weights is None or len(arguments) != 1 or options or drops(self) \
            or not has_fast_products(arguments[0]):
        return original(self, *arguments, **options)
    form = self._fftune[0]
    return ops.ffn(arguments[0], *weights, act=form.act, recompute=form.recompute)


# with a gate, and weights with codes

def patch_coded_mlp(module: nn.Module, known: dict, options: Options) -> str | None:
    """A gated MLP whose three layers were replaced: recognised with dense ones in their place."""
    layers = {name: child for name, child in module.named_modules() if name.count(".") < 2
              and (is_quantised(child) or is_rounded_fp8(child))}
    own = {id(t) for child in layers.values() for t in (*child.parameters(), *child.buffers())}
    if len(layers) != 3 or not any("." not in name for name in layers) \
            or any(id(t) not in own for t in (*module.parameters(), *module.buffers())) \
            or required_arguments(module) != 1:
        return None
    dense = {name: nn.Linear(child._fftune[0].k, child._fftune[0].n, child.bias is not None,
                             device="meta") for name, child in layers.items()}
    roles = _roles(dense)
    if not roles:
        return None
    if "forward" in module.__dict__:
        raise Unfit("its forward was replaced already")
    activation_name(activation_of(module), known)
    view = view_of(module, {tuple(name.split(".")): linear for name, linear in dense.items()})
    form = replace(remembered(known, ("packed", kind_of(module)), lambda: _gated_form(view, dense, roles, known)),
                   recompute=options.recompute)
    gate, up, down = (layers[name] for name in (form.gate, form.up, form.down))
    if gate.bias is not None or up.bias is not None:
        raise Unfit("gate and up have biases, for which there is no kernel")
    rounded = rounds_alike(gate, up, down)
    if not rounded:
        _expect_one_format(gate, up, down)
    expect_no_hooks(*list(module.modules())[1:])
    replace_forward(module, fp8_mlp_forward if rounded else packed_mlp_forward, (form,),
                    hidden(gate._fftune[0].k), known)
    return (f"{type(module).__name__} by ffn of fp8, with rounded activations ({form.act})" if rounded else
            f"{type(module).__name__} by ffn with packed weights ({form.act})")


def _expect_one_format(gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
    layers = gate, up, down
    if not all(map(is_quantised, layers)):
        raise Unfit("its layers round activations in different ways")
    if len({(*format_of(w), w.scale.dtype) for w in map(packed_of, layers)}) > 1:
        raise Unfit("its packed weights have different formats")
    orders = [layer._fftune_order for layer in layers]
    if orders[2] is not None or (orders[0] is None) != (orders[1] is None) \
            or orders[0] is not None and not torch.equal(*orders[:2]):
        raise Unfit("the groups of its layers have different orders")


def _layers_of(mlp: nn.Module) -> list[nn.Module]:
    form, = mlp._fftune
    return [mlp.get_submodule(path) for path in (form.gate, form.up, form.down)]


@undoable
def fp8_mlp_forward(self, *arguments, **options) -> Tensor:
    layers = _layers_of(self)
    if len(arguments) != 1 or options or not rounds_alike(*layers) or parts_watched(self) or drops(self) \
            or not all(serves(layer, arguments[0]) for layer in layers) \
            or torch.is_autocast_enabled(arguments[0].device.type) \
            or any(layer.bias is not None for layer in layers[:2]) or not has_bias_for(layers[2], arguments[0]):
        return original(self, *arguments, **options)
    return ops.ffn_fp8(arguments[0], *(layer.weight for layer in layers), None, *map(scales_of, layers),
                       bias=layers[2].bias, act=self._fftune[0].act)


def packed_layers(mlp: nn.Module, x: Tensor) -> list[nn.Module] | None:
    """Gate, up and down of a packed MLP that the op can run; None if one was exchanged since, or a part
    is watched."""
    layers = _layers_of(mlp)
    if not all(map(is_quantised, layers)) or parts_watched(mlp) or drops(mlp) or not has_kernels(x) \
            or torch.is_autocast_enabled(x.device.type) or any(
                not fits(packed_of(layer), x) or layer.bias is not None
                and layer.bias.dtype != x.dtype for layer in layers):
        return None
    return layers


@undoable
def packed_mlp_forward(self, *arguments, **options) -> Tensor:
    layers = packed_layers(self, arguments[0]) if len(arguments) == 1 and not options else None
    if layers is None:
        return original(self, *arguments, **options)
    return ops.ffn(ordered(layers[0], arguments[0]), *map(packed_of, layers), layers[2].bias,
                   act=self._fftune[0].act)


# of two layers with an activation between them

def is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear layer whose weight is transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def patch_plain_mlp(module: nn.Module, known: dict, options: Options) -> str | None:
    layers = [(name, child) for name, child in module.named_children()
              if type(child) is nn.Linear and not has_codes(child) or is_conv1d(child)]
    others = [child for child in module.children() if all(child is not layer for _, layer in layers)]
    if len(layers) != 2 or any(next(child.parameters(), None) is not None for child in others) \
            or not any(name.startswith("act") for name in {**vars(module), **module._modules}) \
            or "forward" in module.__dict__ or required_arguments(module) != 1:
        return None
    (first_name, first), (second_name, second) = layers
    act = activation_name(activation_of(module), known)
    transposed = is_conv1d(first)
    gelu = act in ("gelu", "gelu-tanh") and first.bias is not None
    # The op has the first bias only beside the second, and as many results as inputs.
    plain = type(first) is type(second) is nn.Linear and (first.bias is None or second.bias is not None) \
        and first.in_features == second.out_features
    width = second.weight.shape[0] if is_conv1d(second) else second.in_features
    if width != (first.weight.shape[1] if transposed else first.out_features):
        raise Unfit("an MLP of two layers that is gated, or another product stands between them")
    if not gelu and not plain:
        raise Unfit(f"an MLP of two layers with {act}: weights that are transposed, a first bias "
                    "without a second, or another number of results than of inputs")
    expect_plain(module)
    expect_no_hooks(*list(module.modules())[1:])
    remembered(known, kind_of(module),
               lambda: _expect_two_layers(module, first_name, second_name, act))
    replace_forward(module, plain_mlp_forward, (first_name, second_name, transposed, act, gelu),
                    hidden(_width(first)), known)
    name = type(module).__name__
    if not plain:
        return f"bias and gelu of {name} by bias-gelu"
    return (f"{name} by ffn without a gate ({act})"
            + (", with gradients by bias-gelu" if gelu else ", without gradients"))


def _width(layer: nn.Module) -> int:
    """The number of its inputs."""
    return layer.weight.shape[0 if is_conv1d(layer) else 1]


def _without_bias(layer: nn.Module, x: Tensor, transposed: bool) -> Tensor:
    return x @ layer.weight if transposed else nn.functional.linear(x, layer.weight)


def _expect_two_layers(module, first: str, second: str, act: str) -> bool:
    d, h = (tuple(module._modules[second].weight.shape)[::1 - 2 * is_conv1d(module._modules[second])])
    own = stand_in(module, _small_sizes(d, h))
    layers = own._modules[first], own._modules[second]
    known = {name: lambda x, act=function: layers[1](act(layers[0](x)))
             for name, function in KNOWN_ACTIVATIONS.items()}
    found = identify(own, known, _draw(own, _width(layers[0])), subject=type(module).__name__, elsewhere=_elsewhere(own))
    if found != act:
        raise Unfit(f"{type(module).__name__} computes {found}, and its activation {act}")
    expect_configured_activation(module, act)
    return True


def squared_mlp_of(module: nn.Module, known: dict) -> tuple[str, str] | None:
    """The names of the layers of an MLP of two, without biases and with relu(x)² between them; None of others. No
    module is replaced by it, as `ffn` has that activation by a second product alone."""
    layers = {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}
    if len(layers) != 2 or any(type(child) is not nn.Linear or child.bias is not None for child in layers.values()) \
            or next(iter(module._parameters), None) or "forward" in module.__dict__ or required_arguments(module) != 1:
        return None
    (first, up), (second, down) = layers.items()
    if up.weight.shape != down.weight.shape[::-1]:
        return None
    expect_no_hooks(*module.modules())
    try:
        found = remembered(known, ("squares", kind_of(module)), lambda: _activation_between(module, first, second))
    except Unfit:
        return None
    return (first, second) if found == SQUARES else None


SQUARES = "relu2"


@dataclass(frozen=True)
class ScaledMLP:
    """The layers of an MLP with a gate, and the factors in front of its activation and of its result."""

    gate: str
    up: str
    down: str
    act: str
    factor: float
    factor_of_result: float


def scaled_mlp_of(module: nn.Module, known: dict) -> ScaledMLP | None:
    """An MLP with a gate and such factors; None of others. No module is replaced by it: `ffn` has no factors."""
    linears = {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}
    if len(linears) != 3 or any(type(child) is not nn.Linear or child.bias is not None for child in linears.values()) \
            or next(iter(module._parameters), None) or "forward" in module.__dict__ or required_arguments(module) != 1:
        return None
    if not (roles := _roles(linears)):
        return None
    expect_no_hooks(*module.modules())
    try:
        return remembered(known, ("factors", kind_of(module)), lambda: _scaled_form(module, linears, roles))
    except Unfit:
        return None


def _scaled_form(module: nn.Module, linears: dict, roles: list) -> ScaledMLP:
    own = stand_in(module, _small_sizes(*linears[roles[0][2]].weight.shape))
    layers = own._modules

    def computed(gate, up, down, act, factor, factor_of_result):
        return lambda x: layers[down](layers[up](x) * act(layers[gate](x) * factor)) * factor_of_result

    factors = dict.fromkeys((1.0, *(v for v in vars(module).values() if isinstance(v, float) and v)))
    known = {}
    for role, (name, act), *both in itertools.product(roles, KNOWN_ACTIVATIONS.items(), factors, factors):
        form = ScaledMLP(*role, name, *both)
        known[Foreign(f"an MLP with {name.name}", form) if isinstance(name, Foreign) else form] = computed(
            *role, act, *both)
    return identify(own, known, _draw(own, layers[roles[0][0]].in_features), subject=type(module).__name__,
                    elsewhere=_elsewhere(own))


def _activation_between(module: nn.Module, first: str, second: str) -> str:
    own = stand_in(module, _small_sizes(*module._modules[second].weight.shape))
    layers = own._modules[first], own._modules[second]
    known = {SQUARES if name == RELU_SQUARED else name:
             lambda x, act=function: layers[1](act(layers[0](x))) for name, function in KNOWN_ACTIVATIONS.items()}
    return identify(own, known, _draw(own, _width(layers[0])), subject=type(module).__name__,
                    elsewhere=_elsewhere(own))


def plain_layers(mlp: nn.Module, x: Tensor) -> tuple[nn.Linear, nn.Linear] | None:
    """The layers, if the op without a gate runs them in this call."""
    first, second, transposed, *_ = mlp._fftune
    first, second = getattr(mlp, first), getattr(mlp, second)
    if transposed or torch.is_grad_enabled() or mlp.training \
            or type(first) is not nn.Linear or type(second) is not nn.Linear \
            or parts_watched(mlp) or first.bias is not None and second.bias is None \
            or first.in_features != second.out_features \
            or not x.dtype == first.weight.dtype == second.weight.dtype or not has_fast_products(x):
        return None
    return first, second


@undoable
def plain_mlp_forward(self, hidden_states: Tensor) -> Tensor:
    layers = plain_layers(self, hidden_states)
    first, second, transposed, act, gelu = self._fftune
    if layers is not None:
        return plain_mlp(layers, hidden_states, act)
    layer = getattr(self, first)
    if not gelu or type(layer) is not nn.Linear and not is_conv1d(layer) \
            or parts_watched(self, but=second) \
            or drops(self, but="dropout" if transposed else None) \
            or not has_kernels(hidden_states):
        return original(self, hidden_states)
    hidden = _without_bias(layer, hidden_states, transposed)
    hidden = ops.bias_gelu(hidden, layer.bias,
                           approximate="tanh" if act == "gelu-tanh" else "none")
    hidden = getattr(self, second)(hidden)
    dropout = self._modules.get("dropout")
    return hidden if dropout is None else dropout(hidden)


def plain_mlp(layers: tuple[nn.Linear, nn.Linear], x: Tensor, act: str,
           residual: Tensor | None = None) -> Tensor:
    first, second = layers
    return ops.mlp(x, first.weight, second.weight, first.bias, second.bias, residual, act=act)

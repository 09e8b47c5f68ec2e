"""MLPs by ffn: with a gate, and of two layers with an activation between them."""
import torch
from torch import Tensor, nn

from .. import ops, reference
from .recognise import (Options, Unfit, activation_name, activation_of, drops, expect_no_hooks,
                        expect_plain, far_rows, has_kernels, is_close, kind_of, original, parts_of,
                        probing, random_rows, remembered, replace_forward, undoable, watched)


# with a gate

def patch_gated_mlp(module: nn.Module, known: dict, options: Options) -> str | None:
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
    replace_forward(module, gated_mlp_forward, (*names, act, options.recompute))
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


def linears_of(mlp: nn.Module) -> list[nn.Module] | None:
    """gate, up and down; None if one of them was exchanged since, by an adapter say, or a part is
    watched."""
    found = [getattr(mlp, name) for name in mlp._fftune[:3]]
    plain = all(type(layer) is nn.Linear for layer in found) and not watched(*parts_of(mlp))
    return found if plain else None


@undoable
def gated_mlp_forward(self, hidden_states: Tensor) -> Tensor:
    linears = linears_of(self)
    if linears is None or drops(self) or not has_kernels(hidden_states):
        return original(self, hidden_states)
    gate, up, down = linears
    *_, act, recompute = self._fftune
    return ops.ffn(hidden_states, gate.weight, up.weight, down.weight, down.bias, act=act,
                   recompute=recompute)


# of two layers with an activation between them

def is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear layer whose weight is transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def patch_plain_mlp(module: nn.Module, known: dict, options: Options) -> str | None:
    layers = [(name, child) for name, child in module.named_children()
              if type(child) is nn.Linear or is_conv1d(child)]
    others = [child for child in module.children() if all(child is not layer for _, layer in layers)]
    if len(layers) != 2 or any(next(child.parameters(), None) is not None for child in others) \
            or not any(name.startswith("act") for name in {**vars(module), **module._modules}):
        return None
    (first_name, first), (second_name, second) = layers
    act = activation_name(activation_of(module))
    transposed = is_conv1d(first)
    gelu = act in ("gelu", "gelu-tanh") and first.bias is not None
    # The op has the first bias only beside the second.
    plain = not transposed and (first.bias is None or second.bias is not None)
    width = second.weight.shape[0] if is_conv1d(second) else second.in_features
    if width != (first.weight.shape[1] if transposed else first.out_features):
        raise Unfit("an MLP of two layers that is gated, or another product stands between them")
    if not gelu and not plain:
        raise Unfit(f"an MLP of two layers with {act}: weights that are transposed, or a first bias "
                    "without a second")
    expect_plain(module)
    expect_no_hooks(*parts_of(module))
    key = kind_of(module), first.weight.dtype, act
    remembered(known, key, lambda: _expect_two_layers(module, first, second, act))
    replace_forward(module, plain_mlp_forward, (first_name, second_name, transposed, act, gelu))
    name = type(module).__name__
    if not plain:
        return f"bias and gelu of {name} by bias-gelu"
    return (f"{name} by ffn without a gate ({act})"
            + (", with gradients by bias-gelu" if gelu else ", without gradients"))


def _without_bias(layer: nn.Module, x: Tensor, transposed: bool) -> Tensor:
    return x @ layer.weight if transposed else nn.functional.linear(x, layer.weight)


def _expect_two_layers(module, first, second, act) -> bool:
    with probing(module):
        width = first.weight.shape[0] if is_conv1d(first) else first.in_features
        x = random_rows(1, 4, width, like=first.weight)
        if is_close(second(reference.ACTIVATIONS[act](first(x))), module(x)):
            return True
    raise Unfit(f"{type(module).__name__} is no second({act}(first(x)))")


def plain_layers(mlp: nn.Module, x: Tensor) -> tuple[nn.Linear, nn.Linear] | None:
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
def plain_mlp_forward(self, hidden_states: Tensor) -> Tensor:
    layers = plain_layers(self, hidden_states)
    first, second, transposed, act, gelu = self._fftune
    if layers is not None:
        return plain_mlp(layers, hidden_states, act)
    layer = getattr(self, first)
    if not gelu or type(layer) is not nn.Linear and not is_conv1d(layer) \
            or watched(*(part for part in parts_of(self) if part is not getattr(self, second))) \
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

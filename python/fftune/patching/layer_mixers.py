"""Layers whose token mixer is no attention: its tensors, its state in a cache of transformers, and how it is run to
be compared with the op `layer`."""
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._versions import name_of_cache
from .attention import BOTH_LAYERS
from .recognise import Unfit

STATE_LAYERS = ("LinearAttentionLayer",)  # of transformers' caches
_STATES = ("has_previous_state", "conv_states", "recurrent_states")  # of such a layer, by their numbers
_INPUTS, _OUTPUTS = ("in_proj",), ("out_proj",)


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution, as in LFM2: the names of its parts."""

    inner: str
    conv: str
    outer: str
    channels: int
    width: int


def short_conv_of(module: nn.Module) -> ShortConv | None:
    """Whether the module has the parts of one; what it computes is compared later."""
    children = {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}
    convs = [name for name, child in children.items() if isinstance(child, nn.Conv1d)]
    inner, outer = (next((n for n in names if n in children), None) for names in (_INPUTS, _OUTPUTS))
    if len(convs) != 1 or inner is None or outer is None or len(children) != 3 or module._parameters:
        return None
    conv = children[convs[0]]
    channels, = conv.weight.shape[:1]
    if conv.groups != channels or conv.weight.shape[1] != 1 or conv.stride != (1,) or conv.dilation != (1,) \
            or getattr(children[inner], "out_features", None) != 3 * channels:
        return None
    return ShortConv(inner, convs[0], outer, channels, conv.weight.shape[2])


def heads_of(channels: int) -> tuple[int, int]:
    """Heads and their features for a number of channels: the op has at most 1024 of the ones and 512 of the others."""
    dims = (64, 128, 256, 512, 32, 16, 8, 4, 2, 1)
    dim = next((d for d in dims if channels % d == 0 and channels // d <= 1024), None)
    if dim is None:
        raise Unfit(f"layers: a convolution of {channels} channels")
    return channels // dim, dim


def expect_not_on_gpu(layer: nn.Module, kind: str) -> None:
    if any(p.is_cuda for p in layer.parameters()):
        raise Unfit(f"layers: {kind} stays the model's on a GPU: layers of it have not been timed there")


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta rule behind short convolutions: the names of its parts, and its sizes."""

    conv: str
    norm: str
    outer: str
    inputs: tuple[tuple[str, str], ...]  # layers, and what their rows are: a letter each, or those of weights together
    heads: int
    v_heads: int
    dim: int
    v_dim: int
    width: int
    gate: str = ""  # the module with the decays' parameters, if that is another
    rank: int = 0  # of what is between two layers for decays, and for gates: A and Z are the first of them
    of_features: bool = False  # whether decays are

    @property
    def keys(self) -> int:
        return self.heads * self.dim

    @property
    def values(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def rows(self) -> list[int]:
        return [self.keys, self.keys, self.values]

    @property
    def grouped(self) -> bool:
        """Whether a weight has for each head of k all its rows together, as in Qwen3-Next."""
        return any(letters == "qkvz" for _, letters in self.inputs)

    @property
    def mixer(self) -> str:
        return "kda" if self.of_features else "gated-delta-rule"

    def products(self) -> Iterator[tuple[str, str]]:
        """The linear layers, and the weight that each is."""
        for name, letters in self.inputs:
            yield name, {"A": "a_low", "Z": "z_low"}.get(letters, letters)
        yield self.outer, "o"


# Its linear layers and their rows, in the models of transformers.
_INPUTS_OF_DELTA = (
    (("in_proj_qkv", "qkv"), ("in_proj_z", "z"), ("in_proj_b", "b"), ("in_proj_a", "a")),
    (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("g_proj", "z"), ("b_proj", "b"), ("a_proj", "a")),
    (("in_proj_qkvz", "qkvz"), ("in_proj_ba", "ba")))
_PARTS_OF_DELTA = (("norm", "o_norm"), ("out_proj", "o_proj"))
# Kimi Delta Attention, whose decays another module computes.
_INPUTS_OF_KIMI = (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("b_proj", "b"))
_GATES_OF_KIMI = (
    (("forget_gate.f_a_proj", "A"), ("forget_gate.f_b_proj", "a"), ("g_a_proj", "Z"), ("g_b_proj", "z")),
    (("forget_gate.f_proj", "a"), ("g_proj", "z")))


def delta_net_of(module: nn.Module) -> DeltaNet | None:
    """Whether the module has the parts of one; what it computes is compared later."""
    children = {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}
    convs = [name for name, child in children.items() if isinstance(child, nn.Conv1d)]
    inputs = next((own for own in _INPUTS_OF_DELTA if {name for name, _ in own} <= set(children)), None)
    others = [next((n for n in names if n in children), None) for names in _PARTS_OF_DELTA]
    if len(convs) != 1 or inputs is None or None in others or {*module._parameters} != {"A_log", "dt_bias"} \
            or {*children} != {*convs, *others, *(name for name, _ in inputs)}:
        return None
    conv, norm = children[convs[0]], children[others[0]]
    heads, v_heads, v_dim = getattr(module, "num_k_heads", 0), module.A_log.numel(), norm.weight.numel()
    keys = (conv.weight.shape[0] - v_heads * v_dim) // 2
    if not isinstance(heads, int) or heads < 1 or keys < 1 or keys % heads or v_heads % heads or conv.bias is not None \
            or conv.groups != conv.weight.shape[0] or conv.stride != (1,) or conv.dilation != (1,):
        return None
    return DeltaNet(convs[0], *others, inputs, heads, v_heads, keys // heads, v_dim, conv.weight.shape[2])


def kimi_delta_of(module: nn.Module) -> DeltaNet | None:
    """Whether the module has the parts of Kimi Delta Attention."""
    linear = {name for name, child in module.named_modules() if isinstance(child, nn.Linear)} - {"o_proj"}
    inputs = next((own for own in ((*_INPUTS_OF_KIMI, *gates) for gates in _GATES_OF_KIMI)
                   if {name for name, _ in own} == linear), None)
    gate = module._modules.get("forget_gate")
    convs = [name for name, child in module.named_children() if isinstance(child, nn.Conv1d)]
    norm, heads = module._modules.get("o_norm"), getattr(module, "num_heads", 0)
    if inputs is None or len(convs) != 1 or gate is None or norm is None or module._parameters \
            or {*gate._parameters} != {"A_log", "dt_bias"} or not isinstance(heads, int) \
            or gate.A_log.numel() != heads or gate.dt_bias.numel() % heads:
        return None
    conv, dim, v_dim = module._modules[convs[0]], gate.dt_bias.numel() // heads, norm.weight.numel()
    if conv.weight.shape[0] != heads * (2 * dim + v_dim) or conv.bias is not None or conv.stride != (1,) \
            or conv.groups != conv.weight.shape[0] or conv.dilation != (1,):
        return None
    rank = module.get_submodule("g_a_proj").out_features if "g_a_proj" in linear else 0
    return DeltaNet(convs[0], "o_norm", "o_proj", inputs, heads, heads, dim, v_dim,
                    conv.weight.shape[2], "forget_gate", rank, True)


@dataclass(frozen=True)
class StateSpace:
    """State space duality behind short convolutions, as in Mamba-2: the names of its parts, and its sizes."""

    inner: str
    conv: str
    norm: str  # "" without one
    outer: str
    heads: int
    dim: int
    groups: int
    state_dim: int
    width: int

    @property
    def rows(self) -> dict[str, int]:
        """Those of the projection, in their order."""
        features, shared = self.heads * self.dim, self.groups * self.state_dim
        return dict(z=features, x=features, B=shared, C=shared, dt=self.heads)

    @property
    def channels(self) -> dict[str, int]:
        """Those of the convolution, in their order."""
        return {name: count for name, count in self.rows.items() if name in ("x", "B", "C")}


_NO_LIMIT = (0.0, float("inf"))


def state_space_of(module: nn.Module) -> StateSpace | None:
    """Whether the module has the parts of one; what it computes is compared later."""
    children = {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}
    convs = [name for name, child in children.items() if isinstance(child, nn.Conv1d)]
    if len(convs) != 1 or {*children} | {"norm"} != {*convs, "in_proj", "norm", "out_proj"} \
            or {*module._parameters} != {"A_log", "dt_bias", "D"}:
        return None
    conv, norm = children[convs[0]], children.get("norm")
    heads, groups = module.A_log.numel(), getattr(module, "n_groups", 0)
    weight = getattr(norm, "weight", None)
    features = getattr(children["out_proj"], "in_features", 0) if norm is None else \
        weight.numel() if isinstance(weight, Tensor) else 0
    shared = conv.weight.shape[0] - features
    if not isinstance(groups, int) or groups < 1 or features < 1 or features % heads or heads % groups or shared < 1 \
            or shared % (2 * groups) or conv.groups != conv.weight.shape[0] or conv.weight.shape[1] != 1 \
            or conv.stride != (1,) or conv.dilation != (1,):
        return None
    found = StateSpace("in_proj", convs[0], "" if norm is None else "norm", "out_proj", heads, features // heads,
                       groups, shared // (2 * groups), conv.weight.shape[2])
    return found if getattr(children["in_proj"], "out_features", None) == sum(found.rows.values()) else None


def limits_of(module: nn.Module) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The limits that steps may have, those of a token behind a state and those of all other calls: transformers has
    them in prompts alone."""
    limits = getattr(module, "time_step_limit", _NO_LIMIT)
    if not isinstance(limits, (list, tuple)) or len(limits) != 2 or not 0 <= limits[0] <= limits[1] > 0:
        raise Unfit(f"layers: {type(module).__name__} limits its steps to {limits}, for which the op has no option")
    limits = tuple(map(float, limits))
    return [(_NO_LIMIT, _NO_LIMIT)] if limits == _NO_LIMIT else [
        (_NO_LIMIT, limits), (limits, limits), (_NO_LIMIT, _NO_LIMIT)]


def has_cache(module: nn.Module) -> bool:
    """Whether a part of a layer is told of a cache: attention, or what stands in its place."""
    return name_of_cache(type(module).forward) is not None


def _raw_states(kv, spec) -> list[Tensor]:
    return [kv.conv_states[0], kv.recurrent_states[0]][:len(spec.states)]


def states_of(kv, spec, batch: int, like: Tensor) -> list[Tensor]:
    """The states of a cache's layer, made if this is its first call."""
    if not kv.is_conv_states_initialized[0]:
        kv.lazy_initialization(conv_states=like.new_empty(batch, *spec.states[0]))
    if len(spec.states) > 1 and not kv.is_recurrent_states_initialized[0]:
        kv.lazy_initialization(recurrent_states=like.new_empty(batch, *spec.states[1], dtype=torch.float32))
    return _raw_states(kv, spec)


def slots_of(spec, batch: int, device: torch.device) -> Tensor | None:
    """Which state each sequence has, where the op asks for it."""
    return None if len(spec.states) == 1 else torch.arange(batch, dtype=torch.int32, device=device)


def mark_as_written(kv) -> None:
    """Marks the states of the cache's layer as written, as a call that renews them does."""
    kv.has_previous_state[0] = True


def has_known_states(kv) -> bool:
    """Whether a layer of a cache has its states by their numbers. In another transformers it may have one of each."""
    return all(isinstance(getattr(kv, name, None), dict) for name in _STATES)


def can_write(kv, spec, batch: int, like: Tensor) -> bool:
    """Whether the op can read and write the states of a cache's layer: those that it has, and those of a new one."""
    known = BOTH_LAYERS if spec.has_both else STATE_LAYERS
    if type(kv).__name__ not in known or kv.number_of_states != 1 or kv.record_past:
        return False
    made = [kv.is_conv_states_initialized[0], kv.is_recurrent_states_initialized[0]]
    types = (like.dtype, torch.float32)
    return all(t is None or t.shape == (batch, *shape) and t.dtype == dtype and t.device == like.device
               and t.is_contiguous() for t, shape, dtype in zip(_raw_states(kv, spec), spec.states, types)) \
        and len({*made[:len(spec.states)]}) == 1


def new_cache_layer(spec, states: list[Tensor] | None, places: int):
    """A layer of a cache with these states, or a new one, and with room for so many tokens."""
    from transformers import cache_utils

    name = BOTH_LAYERS[0] if spec.has_both else STATE_LAYERS[0]
    kind = getattr(cache_utils, name, None)
    if kind is None:
        raise Unfit("layers: this transformers has no cache of states: install 5.23 or newer")
    kv = kind(*((places,) if spec.has_both else ()))
    if states is not None:
        for own, given in zip(states_of(kv, spec, len(states[0]), states[0]), states):
            own.copy_(given)
        mark_as_written(kv)
    return kv

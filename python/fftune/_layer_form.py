"""The form of transformer layers, one string for the op `layer`: the tensors that they have, and
their options."""
import functools
from dataclasses import dataclass
from typing import Mapping, Sequence

import torch
from torch import Tensor

from ._library import Error

# The tensors of one layer in the order of the op's buffers; those that a layer has not are left out.
_BEFORE_CACHES = ("attn_norm", "attn_norm_bias", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "w_qkv",
                  "w_qkv_scale", "w_qkv_zero", "b_qkv", "q_norm", "k_norm", "q_norm_bias", "k_norm_bias",
                  "w_in", "in_scale", "b_in", "w_q_a", "q_a_norm", "w_q_b", "w_kv_a", "kv_a_norm", "w_kv_b",
                  "w_qkvz", "w_ba", "w_z_low", "w_z", "w_b", "w_a_low", "w_a", "w_conv", "b_conv", "w_conv_q", "w_conv_k",
                  "w_conv_v", "A_log", "dt_bias", "D", "mixer_norm")
_BEHIND_CACHES = ("k_scale", "v_scale", "sinks", "q_factors", "w_g", "residual_scale", "w_o", "w_o_scale", "w_o_zero",
                  "b_o", "attn_post_norm", "ffn_norm",
                  "ffn_norm_bias", "w_router", "b_router", "choice_bias", "expert_scale", "router_norm",
                  "experts_norm", "w_gate", "w_up",
                  "w_gate_up", "w_down", "w_gate_scale", "w_gate_zero", "w_up_scale", "w_up_zero",
                  "w_gate_up_scale", "w_down_scale", "w_down_zero", "b_gate", "b_up", "b_gate_up", "b_down",
                  "w_shared_router", "w_shared_gate", "w_shared_up", "w_shared_down",
                  "shared_post_norm", "experts_post_norm", "ffn_post_norm", "w_input_gate", "out_scale", "ssm_scale",
                  "gate_scale", "ffn_scale", "w_ssm_out", "layer_input",
                  "w_input_out", "input_norm", "layer_scalar")
WEIGHTS = _BEFORE_CACHES + _BEHIND_CACHES
# Mixers: attention, and others, which have other tensors in the place of caches. The weights that a mixer needs
# beside w_o, and those that it may have.
_OF_ATTENTION = ("w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "w_qkv", "w_qkv_scale", "w_qkv_zero", "b_qkv", "q_norm",
                 "k_norm", "q_norm_bias", "k_norm_bias", "k_scale", "v_scale", "sinks", "q_factors", "w_g")
# Those of q, k and v that a layer has which reads another one's keys and values, and those that it has not.
_OF_QUERIES = ("w_q", "b_q", "q_norm", "q_norm_bias")
_OF_KEYS = ("w_k", "w_v", "b_k", "b_v", "w_qkv", "b_qkv", "k_norm", "k_norm_bias", "k_scale", "v_scale")
# Weights of a layer's own input for each token; and norms of experts beside a network.
OF_INPUT = ("w_input_gate", "layer_input", "w_input_out", "input_norm")
_OF_EXPERT_NORMS = ("router_norm", "experts_norm", "shared_post_norm", "experts_post_norm")
# Tensors in the places of weights that a call gives for its tokens.
GIVEN = ("q_factors", "layer_input")
_OF_LATENT = ("w_q_a", "q_a_norm", "w_q_b")  # of queries that have a latent too, in the place of w_q
_OF_DELTA = ("A_log", "dt_bias", "mixer_norm")
# Weights of q, k and v together, or of each, beside those of gates; or of all of them by heads of k.
_GATES_OF_DELTA = ("w_z", "w_b", "w_a")
_PACKED_DELTA = ("w_qkv", "w_conv", *_GATES_OF_DELTA)
_SEPARATE_DELTA = ("w_q", "w_k", "w_v", "w_conv_q", "w_conv_k", "w_conv_v", *_GATES_OF_DELTA)
_GROUPED_DELTA = ("w_qkvz", "w_ba", "w_conv")
# Attention and ssd on the same input: the weights that it needs.
BOTH = "attention-ssd"
_OF_HEADS = ("w_q", "w_k", "w_v")
_OF_BOTH = ("w_in", "w_conv", "A_log", "dt_bias", "D", "w_ssm_out")
_OF_MIXERS = {"conv": (("w_in", "w_conv"), ("b_in", "b_conv")),
              "mla": (("w_kv_a", "kv_a_norm", "w_kv_b"), ("w_q", "w_g", "q_factors", *_OF_LATENT)),
              "gated-delta-rule": (_OF_DELTA, (*_PACKED_DELTA, *_SEPARATE_DELTA, *_GROUPED_DELTA)),
              "kda": (_OF_DELTA, ("w_z_low", "w_a_low", *_PACKED_DELTA, *_SEPARATE_DELTA)),
              "ssd": (("w_in", "w_conv", "A_log", "dt_bias", "D", "mixer_norm"), ("in_scale", "b_conv")),
              BOTH: ((*_OF_HEADS, *_OF_BOTH), ("in_scale", "b_conv", "mixer_norm", "b_q", "b_k", "b_v", "ssm_scale")),
              "none": ((), ())}
# Mixers with a state of each head, in float32, beside those of convolutions.
_DELTA = ("gated-delta-rule", "kda")
_SSD = ("ssd", BOTH)
_RECURRENT = (*_DELTA, *_SSD)
# Options that attention alone has, and those that latent attention has too.
_ATTENTION_OPTIONS = ("kv-heads", "qkv-weights", "qkv-bias", "qk-norm", "qk-norm-order", "sinks", "softcap", "window",
                      "rotary", "cache-format", "cache-scales", "v-norm", "keys")
_CACHE_OPTIONS = ("scale", "rotation", "angles", "rope-scale", "query-scale")
# Formats of packed weights with codes of 8 bits and float32 scales.
WIDE_SCALES = ("fp8", "int8")
# Those that may be packed, all or none, or those of the network alone; and what then stands beside them.
PACKED = ("w_qkv", "w_o", "w_gate", "w_up", "w_down")
PACKED_NETWORK = PACKED[2:]
_BESIDE_PACKED = tuple(f"{name}{part}" for name in PACKED for part in ("_scale", "_zero"))
# Weights that may be float8_e4m3fn, whose tokens the layers then quantise, and their scales: all that a layer
# has, or those of the network alone.
ROUNDED = ("w_qkv", "w_o", "w_gate", "w_up", "w_gate_up", "w_down")
ROUNDED_NETWORK = ROUNDED[2:]
_SCALES = tuple(f"{name}_scale" for name in ROUNDED)
_OF_NETWORK = ("ffn_norm", "ffn_norm_bias", "ffn_post_norm", "w_router", "b_router", "choice_bias", "w_gate", "w_up",
               "w_gate_up", "w_down", "b_gate", "b_up", "b_gate_up", "b_down", "w_shared_router", "w_shared_gate",
               "w_shared_up", "w_shared_down")
# Weights and biases that norms have if a model's do not: 1 and 0.
_CONSTANTS = ("attn_norm", "attn_norm_bias", "q_norm", "k_norm", "attn_post_norm", "ffn_norm",
              "ffn_norm_bias", "ffn_post_norm")
# As the kernels read them.
FLOAT32 = ("k_scale", "v_scale", "sinks", "choice_bias", "residual_scale", "A_log", "dt_bias", "D", "layer_scalar",
           "expert_scale", "q_factors", "in_scale", "out_scale", "ssm_scale", "gate_scale", "ffn_scale")


@dataclass(frozen=True)
class Choice:
    """How a token chooses experts, as in ops.moe_route, and how w_gate_up has gate and up."""

    experts: int
    top_k: int
    score: str = "softmax"
    order: str = "before"
    renormalise: bool = False
    packing: str = "halves"
    groups: int = 0
    top_groups: int = 0
    group_score: str = "max"
    scale: float = 1.0
    wide: bool = False  # logits are float32
    sum_eps: float = 0.0  # of renormalise: 1e-6, or what the op adds by itself
    experts_of_rank: int = 0  # whole ones, where it has not some features of all


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention: features of a head that RoPE leaves and turns, those of its values, and of the
    latents of keys and values, and of queries (0: none)."""

    nope: int
    rope: int
    v: int
    rank: int
    q_rank: int = 0
    eps: float = 1e-6  # of the latents' norms
    order: str = "same"  # of rotated features, as in ops.mla_rope

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], heads: int, eps: float) -> "Latent":
        """Those of a layer's weights."""
        by_latent = "w_q_b" in weights
        rank = weights["kv_a_norm"].shape[0]
        rope = weights["w_kv_a"].shape[0] - rank
        nope = weights["w_q_b" if by_latent else "w_q"].shape[0] // heads - rope
        return cls(nope, rope, weights["w_kv_b"].shape[0] // heads - nope, rank,
                   weights["w_q_b"].shape[1] if by_latent else 0, eps)


@dataclass(frozen=True)
class LayerForm:
    """The parsed string `form` of the op: the tensors that a layer has, those that are constants,
    and its options."""

    before: tuple[str, ...]
    behind: tuple[str, ...]
    constants: tuple[str, ...]
    options: dict

    @property
    def weights(self) -> tuple[str, ...]:
        """Those that the op is given: all but the constants."""
        return tuple(n for n in self.before + self.behind if n not in self.constants)

    def get(self, name: str, otherwise=None):
        return self.options.get(name, otherwise)

    @property
    def mixer(self) -> str:
        return self.get("mixer", "attention")

    @property
    def is_latent(self) -> bool:
        """Whether it attends to a cache of latents and rotated keys, [batch, cache, rank + rope]."""
        return self.mixer == "mla"

    @property
    def shares_keys(self) -> bool:
        """Whether it reads the keys and values of another layer, and has none of its own."""
        return self.get("keys") == "shared"

    @property
    def attends(self) -> bool:
        """Whether its tokens have places in a cache."""
        return self.mixer in ("attention", "mla", BOTH)

    @property
    def has_both(self) -> bool:
        """Whether it has keys and values, and states behind them."""
        return self.mixer == BOTH

    @property
    def rotates(self) -> bool:
        return self.attends and self.get("rotation") != "none"

    @property
    def rotary(self) -> int:
        """Features of a head that are rotated."""
        return self.get("rope") if self.is_latent else self.get("rotary", self.get("dim"))

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type of the caches, or states, of layers whose x has this one."""
        return torch.float8_e4m3fn if self.get("cache-format") == "e4m3" else dtype

    @property
    def mixes(self) -> bool:
        """Whether it has a mixer: others are a feed-forward network alone."""
        return self.mixer != "none"

    @property
    def states(self) -> int:
        """How many tensors each layer writes in place: keys and values, latents with rotated keys, or states."""
        if not self.mixes:
            return 0
        return 4 if self.has_both else 2 if self.mixer == "attention" or self.is_recurrent else 1

    @property
    def is_recurrent(self) -> bool:
        """Whether it has a state of each head, in float32, which a sequence finds by its slot."""
        return self.mixer in _RECURRENT

    @property
    def state_heads(self) -> tuple[int, int]:
        """The heads of a mixer with states, and their features."""
        names = ("ssm-heads", "ssm-dim") if self.has_both else ("heads", "dim")
        return self.get(names[0], 0), self.get(names[1], 0)

    @property
    def features(self) -> tuple[int, int]:
        """The features of all heads of q, and of all heads of v."""
        heads, dim = self.state_heads
        return heads * dim, self.get("v-heads", heads) * self.get("v-dim", dim)

    @property
    def is_split(self) -> bool:
        """Whether q, k and v of a mixer with states have products and convolutions of their own."""
        return self.mixer in _DELTA and self.get("qkv-weights") is None

    @property
    def convolved(self) -> tuple[int, ...]:
        """Channels of the convolution of a mixer with states: of q, k and v, or of x, B and C."""
        keys, values = self.features
        if self.mixer in _SSD:
            shared = self.get("state-groups") * self.get("state-dim")
            return keys, shared, shared
        return (keys, keys, values) if self.is_recurrent else (keys,)

    @property
    def states_are_indexed(self) -> bool:
        """Whether sequences find the states of convolutions by index too: caches of states may be parts of pages."""
        return self.get("conv-indices") == "yes"

    def state_shapes(self, batch: int) -> list[tuple[int, ...]]:
        """Those of a mixer's states; nothing for caches, which have any size."""
        if self.attends and not self.has_both or not self.mixes:
            return []
        shapes = [(batch, sum(self.convolved), self.get("width"))]
        if self.mixer in _DELTA:
            shapes.append((batch, self.get("v-heads"), self.get("dim"), self.get("v-dim")))
        if self.mixer in _SSD:
            shapes.append((batch, *self.state_heads, self.get("state-dim")))
        return shapes

    def library_states(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Those of a layer as the library has them: several convolutions have channels of one tensor."""
        return [*states[0].split(self.convolved, 1), states[1]] if self.is_split else list(states)

    @property
    def library_state_count(self) -> int:
        return len(self.convolved) + 1 if self.is_split else self.states


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@functools.lru_cache(256)
def parse(form: str) -> LayerForm:
    found: dict = dict(entry.split("=") for entry in form.split(" "))
    names = found.pop("weights").split(",")
    constants = tuple(n for n in found.pop("constants", "").split(",") if n)
    found = {name: _value(text) for name, text in found.items()}
    return LayerForm(tuple(n for n in _BEFORE_CACHES if n in names),
                     tuple(n for n in _BEHIND_CACHES if n in names), constants, found)


def shares_keys(names: Sequence[str] | set[str], mixer: str = "attention") -> bool:
    """Whether a layer with weights of these names has no keys and values of its own."""
    return mixer == "attention" and not {"w_k", "w_v", "w_qkv"} & {*names}


def _expect_names(names: set[str], choice: Choice | None, parallel: bool, mixer: str, network: bool,
                  squares: bool) -> None:
    """That a layer has these tensors, and no others."""
    packed = "w_gate_up" in names
    shares = shares_keys(names, mixer)
    of_mixer, may_have = _OF_MIXERS.get(mixer, ((("w_qkv",) if "w_qkv" in names else ("w_q",) if shares else
                                                 ("w_q", "w_k", "w_v")), ()))
    others = {name for groups in _OF_MIXERS.values() for group in groups for name in group} | {*_OF_ATTENTION}
    others -= {*of_mixer, *may_have} if mixer in _OF_MIXERS else {*_OF_ATTENTION} - {*(_OF_KEYS if shares else ())}
    if mixer in _DELTA and names & {"b_q", "b_k", "b_v"}:
        raise Error(f"layer: {mixer} has no biases of q, k and v")
    unknown = sorted(names - set(WEIGHTS) | names & others)
    needed = {*of_mixer, *(("w_o",) if mixer != "none" else ()),
              *(("w_gate_up" if packed else "w_up", "w_down") if network else ())} - names
    unknown += sorted(names & {*(_OF_NETWORK if not network else ("w_o", "b_o", "attn_norm", "attn_norm_bias",
                                                                    "attn_post_norm") if mixer == "none" else ())})
    if mixer in _DELTA:
        own = {*(_GROUPED_DELTA if "w_qkvz" in names else _PACKED_DELTA if "w_qkv" in names else _SEPARATE_DELTA)}
        needed |= own - names
        unknown += sorted(names & {*_GROUPED_DELTA, *_PACKED_DELTA, *_SEPARATE_DELTA} - own)
    if mixer == "mla":
        by_latent = bool(names & {*_OF_LATENT})
        needed |= {*(_OF_LATENT if by_latent else ("w_q",))} - names
        unknown += ["w_q"] if by_latent and "w_q" in names else []
    if mixer == "none":
        needed |= {"ffn_norm"} - names if "ffn_post_norm" not in names else set()
    elif parallel or "ffn_norm" in names or "attn_post_norm" not in names:
        needed |= {"attn_norm"} - names
    if needed:
        raise Error(f"layer: a layer has no {sorted(needed)[0]}: give it among its weights")
    if unknown:
        raise Error(f"layer: a layer has {unknown[0]}: help(fftune.ops.layer) has the names of its weights")
    others = sorted(names & ({"w_q", "w_k", "w_v", "b_q", "b_k", "b_v"} if "w_qkv" in names
                             else {"b_qkv"}))
    if others:
        raise Error(f"layer: {others[0]} does not go with {'w_qkv' if 'w_qkv' in names else 'w_q'}: "
                    "give q, k and v packed, or each")
    of_heads = () if shares else (("b_q", "b_k", "b_v"), ("q_norm", "k_norm"), ("q_norm_bias", "k_norm_bias"))
    for group in (*of_heads, ("k_scale", "v_scale"), OF_INPUT, _OF_EXPERT_NORMS,
                  *((("attn_post_norm", "ffn_post_norm"),) if network and mixer != "none" else ()),
                  ("w_z_low", "w_a_low"),
                  (*(() if squares else ("w_shared_gate",)), "w_shared_up", "w_shared_down")):
        if 0 < sum(name in names for name in group) < len(group):
            raise Error(f"layer: give all of {', '.join(group)}, or none")
    if "gate_scale" in names and ("w_gate" not in names or choice or names & {"b_up", "b_gate", "b_down"}):
        raise Error("layer: gate_scale is of a network with a gate and without biases: give w_gate and w_up")
    of_each = names & {"out_scale", "ssm_scale", "ffn_scale"}
    if of_each and (choice or not network or mixer == "none" or of_each != {
            "out_scale", "ffn_scale", *(("ssm_scale",) if mixer == BOTH else ())}):
        raise Error("layer: each product that adds to the residual has a factor, or none: give out_scale, ffn_scale "
                    "and with attention-ssd ssm_scale, in layers with a mixer and a network without experts")
    if "q_norm_bias" in names and "q_norm" not in names:
        raise Error("layer: q_norm_bias without q_norm: give the norm's weights too")
    gated = "w_gate" in names or packed
    if packed and ("w_gate" in names or "w_up" in names):
        raise Error("layer: w_gate_up is both w_gate and w_up: give it, or those")
    if ("w_router" in names) != (choice is not None) or packed and choice is None:
        raise Error("layer: a mixture of experts has w_router and top_k: give both"
                    + (", or w_gate and w_up in the place of w_gate_up" if packed else ""))
    if choice and not gated and not squares:
        raise Error("layer: experts have gates: give w_gate too")
    if squares and names & {"w_gate", "w_gate_up", "w_shared_gate", "b_up", "b_down", "w_shared_router", *OF_INPUT,
                            *_OF_EXPERT_NORMS}:
        raise Error("layer: relu2 is of networks without gates and biases: give w_up and w_down alone")
    of_experts = sorted(names & {"b_router", "choice_bias", "w_shared_gate", "w_shared_up", "w_shared_router",
                                 "expert_scale", "router_norm"})
    if of_experts and not choice:
        raise Error(f"layer: {of_experts[0]} is of a mixture of experts: there is no w_router")
    if "w_shared_router" in names and "w_shared_gate" not in names:
        raise Error("layer: w_shared_router without w_shared_gate: give the network that it weighs")
    if "router_norm" in names and ("w_shared_gate" not in names or "w_shared_router" in names
                                   or not {"attn_post_norm", "ffn_norm"} <= names):
        raise Error("layer: router_norm is of experts beside w_shared_gate, without w_shared_router, in layers with "
                    "norms before and behind")
    if {"ffn_norm", "attn_norm"} <= names and ("ffn_norm_bias" in names) != ("attn_norm_bias" in names):
        raise Error("layer: give biases of both norms, or of none")
    if choice:
        needed = {"b_down", *(("b_gate_up",) if packed else ("b_gate", "b_up"))}
        biases = names & {"b_gate", "b_up", "b_gate_up", "b_down"}
        if biases and biases != needed:
            raise Error(f"layer: experts have all of {', '.join(sorted(needed))}, or none")
    elif names & {"b_gate", "b_gate_up"} or ("b_up" in names) != ("b_down" in names and not gated):
        raise Error("layer: b_up is of a feed-forward network without a gate, beside b_down")


def form_of(names: Sequence[str], *, heads: int, kv_heads: int, dim: int, act: str, eps: float,
            convention: str, rotary: int, softcap: float, scale: float, rope_scale: float,
            rotates: bool, choice: Choice | None = None, constants: Sequence[str] = (),
            parallel: bool = False, rotation: str = "halves", grouped: bool = False,
            norm_rows: bool = False, norm_last: bool = False, multiplier: float = 1.0,
            packed: str = "", h: int = 0, quantise: str = "", ranks: int = 0,
            link: str = "peers", window: int = 0, mixer: str = "attention", width: int = 0,
            head_gates: bool = False, latent: Latent | None = None, head_scales: bool = False, v_heads: int = 0,
            v_dim: int = 0, beta_scale: float = 1.0, mixer_eps: float = 1e-6, state_dim: int = 0,
            state_groups: int = 1, gate_rank: int = 0, gate_bound: float = 0.0,
            gated_rows: bool = False, v_norm: bool = False, network: bool = True,
            dt_limit: tuple[float, float] = (0.0, float("inf")), state_heads: tuple[int, int] = (0, 0),
            of_states: Mapping[str, int | str] = {}) -> str:
    """The form of layers with weights of these names: "name=value", with spaces between. `grouped`
    is of w_qkv, `norm_rows` and `norm_last` are of q_norm and k_norm; see layer(). `packed`: format and
    groups of packed weights, "int4-128", and then `h`, which their shapes do not tell. `quantise`: "token" or
    "block", of weights of float8_e4m3fn. `ranks` and `link`: of the group whose rank has a slice of the
    layers. `mixer`: what is in the place of attention, with the `width` of its convolution.
    `head_gates`: w_g has a row for each head, not for each of their features. `latent`: sizes of latent attention,
    which has no kv_heads and no dim. `head_scales`: k_scale and v_scale have a number for each head of k and v.
    `v_heads` to `mixer_eps` are of gated-delta-rule, and `mixer_eps` to `state_groups` of ssd.
    kda has `gate_rank` and `gate_bound`, and no beta_scale. `gated_rows`: behind the rows of each head of w_q are
    those of its gates, in the place of w_g. `v_norm`: heads of v have a norm without
    weights. Without `network` layers
    are their mixer alone, and with mixer="none" they are their network. `dt_limit`: of the steps of ssd. `state_heads`:
    with mixer="attention-ssd" heads of ssd and their features, beside those of attention. `of_states`: options of
    states that are found by index."""
    if multiplier != 1:
        if "residual_scale" in names:
            raise Error("layer: residual_scale and a multiplier: give one of them")
        constants = (*constants, "residual_scale")
    others = sorted(set(constants) - {*_CONSTANTS, "residual_scale"} | set(constants) & set(names))
    if others:
        raise Error(f"layer: {others[0]} is no constant: it is a weight"
                    if others[0] in names else
                    f"layer: {others[0]} is no constant: use {', '.join(_CONSTANTS)}")
    names = {*names, *constants}
    if grouped and "w_qkv" not in names:
        raise Error("layer: grouped is of w_qkv: give that in the place of w_q, w_k and w_v")
    beside = _BESIDE_PACKED if packed else _SCALES if quantise else ()
    _expect_names(names - set(beside), choice, parallel, mixer, network, act == "relu2")
    packs_attention = "w_qkv_scale" in names
    if "w_g" in names and packs_attention:
        raise Error("layer: w_g beside attention's weights that are packed or float8_e4m3fn: a gate's layer is dense")
    if mixer != "attention" and (packed or quantise or ranks):
        raise Error(f"layer: {mixer} with weights that are packed or float8_e4m3fn, or a group: its layers are dense, "
                    "and of one device")
    if quantise:
        rounded = {f"{name}_scale" for name in (ROUNDED if packs_attention else ROUNDED_NETWORK) if name in names}
        others = sorted(rounded ^ (names & set(_SCALES)))
        if others or packs_attention and "w_qkv" not in names:
            raise Error(f"layer: {others[0] if others else 'w_qkv'} is missing, or of another weight: those of "
                        f"float8_e4m3fn, {', '.join(ROUNDED)}, have scales, all of a layer or the network's")
        if choice and "b_down" in names:
            raise Error("layer: b_down beside experts of float8_e4m3fn: there is no kernel for their biases")
    if packed and not set(PACKED if packs_attention else PACKED_NETWORK) <= names:
        raise Error(f"layer: packed weights are of {', '.join(PACKED)} together: give all of them "
                    "packed, or none")
    if (packed or quantise) and "w_shared_gate" in names:
        raise Error("layer: w_shared_gate beside packed weights or float8_e4m3fn: a network beside experts is dense")
    gated = "w_gate" in names or "w_gate_up" in names
    norms = [name for name in ("attn_norm", "ffn_norm") if name in names]
    options = {"weights": ",".join([n for n in WEIGHTS if n in names]), "heads": heads,
               "kv-heads": kv_heads, "dim": dim, "act": act, "eps": float(eps)}
    if constants:
        options["constants"] = ",".join([n for n in WEIGHTS if n in constants])
    if {"attn_norm_bias", "ffn_norm_bias"} & names:
        options["norm"] = "layer"
    else:
        options["convention"] = convention
    post_norms = bool({"attn_post_norm", "ffn_post_norm"} & names)
    if len(norms) == 1 and not post_norms and network and mixer != "none":
        parallel = True
    for name, holds, value in (
            ("post-norms", post_norms, "yes" if norms else "only"),
            ("block", parallel, "parallel" if len(norms) == 1 else "parallel-norms"),
            ("ffn", choice or not gated, "moe" if choice else "plain" if network else "none"),
            ("qkv-weights", "w_qkv" in names and (grouped or not packs_attention),
             "grouped" if grouped else "packed"),
            ("packed", packed, packed), ("h", packed, h),
            ("quantise", quantise, quantise),
            ("attn-weights", (packed or quantise) and not packs_attention, "dense"),
            ("zeros", packed and "w_gate_zero" in names, "yes"),
            ("ranks", ranks, ranks), ("link", ranks, link),
            ("qkv-bias", bool({"b_q", "b_qkv"} & names), "yes"),
            ("qk-norm", "q_norm" in names,
             "rows" if norm_rows else "layer" if "q_norm_bias" in names else "yes"),
            ("keys", shares_keys(names, mixer), "shared"), ("query-scale", "q_factors" in names, "rows"),
            ("qk-norm-order", norm_last, "after"), ("v-norm", v_norm, "yes"),
            ("layer-scalar", "layer_scalar" in names, "yes"),
            ("residual-scale", {"residual_scale", "ffn_scale"} & names,
             "yes" if "residual_scale" in names else "each"),
            ("gate-scale", "gate_scale" in names, "yes"), ("in-scale", "in_scale" in names, "yes"),
            ("multiplier", multiplier != 1, float(multiplier)),
            ("sinks", "sinks" in names, "yes"), ("out-bias", "b_o" in names, "yes"),
            ("ffn-bias", "b_down" in names, "yes"),
            ("softcap", softcap, float(softcap)), ("scale", scale, float(scale)), ("window", window, window),
            ("rotation", not rotates or rotation != "halves", rotation if rotates else "none"),
            ("angles", rotates, "table"),
            ("rope-scale", rotates and rope_scale, float(rope_scale)),
            ("rotary", rotates and rotary != dim, rotary),
            ("output-gate", "w_g" in names or gated_rows,
             "q-rows" if gated_rows else "heads" if head_gates else "features"),
            ("cache-format", "k_scale" in names, "e4m3"), ("cache-scales", "k_scale" in names and head_scales, "head")):
        if holds:
            options[name] = value
    if choice:
        options |= {"experts": choice.experts, "top-k": choice.top_k, "score": choice.score,
                    "order": choice.order, "renormalise": "yes" if choice.renormalise else "no"}
        for name, holds, value in (
                ("gate-up", "w_gate_up" in names, choice.packing),
                ("groups", choice.groups, choice.groups),
                ("top-groups", choice.groups and choice.top_groups, choice.top_groups),
                ("group-score", choice.groups, choice.group_score),
                ("choice-bias", "choice_bias" in names, "yes"),
                ("expert-norms", "router_norm" in names, "yes"), ("expert-scale", "expert_scale" in names, "yes"),
                ("router-bias", "b_router" in names, "yes"),
                ("route-scale", choice.scale * multiplier != 1, float(choice.scale * multiplier)),
                ("sum-eps", choice.sum_eps, choice.sum_eps), ("logits", choice.wide, "f32"),
                ("own-experts", choice.experts_of_rank, choice.experts_of_rank),
                ("shared-gate", "w_shared_router" in names, "yes")):
            if holds:
                options[name] = value
    if not network:
        options.pop("act")
    if mixer == BOTH:
        options |= dict(zip(("ssm-heads", "ssm-dim"), state_heads)) | {"mixer": mixer}
    elif mixer != "attention":
        others = (*_ATTENTION_OPTIONS, *(("dim",) if latent else _CACHE_OPTIONS),
                  *(("heads", "dim") if mixer == "none" else ()))
        options = {name: value for name, value in options.items() if name not in others} | {"mixer": mixer}
    if mixer == "conv":
        options |= {"width": width} | ({"conv-bias": "yes"} if "b_conv" in names else {})
    if mixer in _DELTA:
        options |= {"width": width, "v-heads": v_heads, "v-dim": v_dim, "mixer-eps": float(mixer_eps)}
        of_mixer = {"beta-scale": float(beta_scale)} if mixer != "kda" else {"gate-rank": gate_rank,
                                                                            "gate-bound": float(gate_bound)}
        of_mixer |= {"qkv-weights": "grouped" if "w_qkvz" in names else "packed" if "w_qkv" in names else ""}
        options |= {name: value for name, value in of_mixer.items() if value}
    if mixer in _SSD:
        options |= {"width": width, "state-dim": state_dim, "state-groups": state_groups}
        options |= {"mixer-eps": float(mixer_eps)} if "mixer_norm" in names else {"mixer-norm": "none"}
        options |= {"conv-bias": "yes"} if "b_conv" in names else {}
        least, most = map(float, dt_limit)
        options |= ({"dt-min": least} if least else {}) | ({"dt-max": most} if most != float("inf") else {})
    options |= of_states
    if latent:
        options |= {"nope": latent.nope, "rope": latent.rope, "v-dim": latent.v, "rank": latent.rank,
                    "latent-eps": float(latent.eps)}
        options |= {name: value for name, value, usual in (("q-rank", latent.q_rank, 0),
                                                           ("rope-order", latent.order, "same")) if value != usual}
    return " ".join([f"{name}={value}" for name, value in options.items()])


def float8_form(form: str, scales: str) -> tuple[str, int]:
    """The form of layers whose caches are float8_e4m3fn with scales of a "tensor" or of each "head", and where among
    a layer's weights k_scale and v_scale then stand."""
    found = dict(entry.split("=") for entry in form.split(" "))
    form = _as_packed(found, {*found["weights"].split(","), "k_scale", "v_scale"}, {
        "cache-format": "e4m3", **({"cache-scales": "head"} if scales == "head" else {})})
    return form, parse(form).weights.index("k_scale")


def packed_form(form: str, packed: str, zeros: bool, h: int) -> str:
    """The form of layers with w_q, w_k, w_v, w_o, w_gate, w_up and w_down if those are packed."""
    found = dict(entry.split("=") for entry in form.split(" "))
    names = found["weights"].split(",")
    if "qkv-weights" in found or not {"w_q", "w_k", "w_v", *PACKED[1:]} <= {*names} or "output-gate" in found:
        raise Error("layer: packed weights are of layers with q, k and v, and an MLP with a gate, without an output "
                    "gate")
    if "b_q" in names:
        names.append("b_qkv")
    parts = ("", "_scale", "_zero") if zeros else ("", "_scale")
    names += [f"{name}{part}" for name in PACKED for part in parts]
    one = {"w_q", "w_k", "w_v", "b_q", "b_k", "b_v"}
    return _as_packed(found, {*names} - one, {"packed": packed, "h": str(h)} | ({"zeros": "yes"} if zeros else {}))


def rounded_form(form: str, quantise: str, attention: bool) -> str:
    """The form of dense layers if the weights of the network, and of `attention`, are float8_e4m3fn."""
    found = dict(entry.split("=") for entry in form.split(" "))
    names, rounded = {*found["weights"].split(",")}, {*ROUNDED_NETWORK}
    if "w_shared_gate" in names or "b_gate_up" in names:
        raise Error("layer: experts of float8_e4m3fn have no biases, and no network beside them")
    if attention:
        if "qkv-weights" in found or not {"w_q", "w_k", "w_v", "w_o"} <= names or "output-gate" in found:
            raise Error("layer: weights of float8_e4m3fn are of layers with q, k and v, without an output gate")
        names |= {"w_qkv"} | ({"b_qkv"} if "b_q" in names else set())
        names -= {"w_q", "w_k", "w_v", "b_q", "b_k", "b_v"}
        rounded |= {*ROUNDED}
    return _as_packed(found, names | {f"{name}_scale" for name in rounded & names}, {
        "quantise": quantise, **({} if attention else {"attn-weights": "dense"})})


def packed_experts_form(form: str, packed: str, h: int) -> str:
    """The form of layers with w_gate_up of all experts if gate, up and down are packed, and no others."""
    found = dict(entry.split("=") for entry in form.split(" "))
    names = {*found["weights"].split(",")} - {"w_gate_up"}
    if "b_gate_up" in names:
        names = names - {"b_gate_up"} | {"b_gate", "b_up"}
    names |= {f"{name}{part}" for name in PACKED_NETWORK for part in ("", "_scale")}
    found.pop("gate-up", None)
    return _as_packed(found, names, {"packed": packed, "h": str(h), "attn-weights": "dense"})


def _as_packed(found: dict[str, str], names: set[str], options: dict[str, str]) -> str:
    found["weights"] = ",".join([n for n in WEIGHTS if n in names])
    return " ".join([f"{name}={value}" for name, value in (found | options).items()])


@functools.cache  # for good, as constant() below
def first_expert(first: int, device: torch.device) -> Tensor:
    """The input that says which experts a rank with whole ones begins with."""
    return torch.full((1,), first, dtype=torch.int32, device=device)


@functools.cache  # for good: captured graphs read them
def constant(value: float, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((elements,), value, dtype=dtype, device=device)


def with_constants(form: LayerForm, tensors: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """The tensors of a layer by name, with those that the form has as constants."""
    filled, dim = dict(tensors), form.get("dim")
    heads = {"q_norm": form.get("heads"), "k_norm": form.get("kv-heads")}
    for name in form.constants:
        value = form.get("multiplier") if name == "residual_scale" else float(
            not name.endswith("_bias"))
        elements = like.shape[-1] if name not in heads else dim * heads[name] if form.get("qk-norm") == "rows" else dim
        filled[name] = constant(value, elements, torch.float32 if name in FLOAT32 else like.dtype, like.device)
    return filled

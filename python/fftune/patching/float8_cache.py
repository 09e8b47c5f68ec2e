"""Float8StaticCache: a static cache of transformers with keys and values of 8 bits.

A layer of it keeps codes of float8_e4m3fn and two float32 scales, and gives attention what they stand for, so any
model can use it. Whole layers and `decode` read and write the codes themselves.
"""
import math
from typing import Sequence

import torch
from torch import Tensor

from .._checks import named
from .._library import Error

try:
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer
except ImportError:  # Float8StaticCache() says so
    StaticCache = StaticLayer = StaticSlidingWindowLayer = object

E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(E4M3).max
_ROOM = 2  # later keys and values may be this many times as large as the first before they are cut
_OF = ("tensor", "head")


def _scale_of(x: Tensor, per_head: bool) -> Tensor:
    """The scales [1], or [heads], of keys or values [batch, heads, tokens, features]: powers of two, with which
    codes become bfloat16 without a rounding."""
    sizes = x.detach().float().abs()
    sizes = sizes.masked_fill(~sizes.isfinite(), 0).amax((0, 2, 3) if per_head else (0, 1, 2, 3)).reshape(-1)
    least = torch.finfo(torch.float32).tiny
    scale = torch.exp2(torch.ceil(torch.log2((sizes * (_ROOM / _LARGEST)).clamp(min=least))))
    return torch.where(sizes > 0, scale, 1.0)


def _of_heads(scale: Tensor) -> Tensor:
    return scale.view(-1, 1, 1)


def _coded(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / _of_heads(scale)).clamp(-_LARGEST, _LARGEST).to(E4M3)


class _Float8Layer:
    """Adds scales to a layer of transformers' cache, and codes in the place of keys and values.

    `keys` and `values` are float8_e4m3fn [batch, heads, tokens, features], in memory as [batch, tokens, heads,
    features]. `k_scale` and `v_scale` are float32 [1] or [heads]: None before the first call. `has_scales` is
    whether they were given, or computed from keys and values.
    """

    k_scale: Tensor | None
    v_scale: Tensor | None

    def _begin(self, scales: str | tuple[Tensor, Tensor]) -> None:
        self.cache_scales = scales if isinstance(scales, str) else "head" if scales[0].numel() > 1 else "tensor"
        self.k_scale, self.v_scale = (None, None) if isinstance(scales, str) else scales
        self.has_scales = self.has_given_scales = not isinstance(scales, str)

    @property
    def is_compileable(self) -> bool:
        """Whether a compiled step can use it: Triton converts e4m3 from compute capability 8.9 on."""
        return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        heads, device = key_states.shape[1], key_states.device
        if self.has_given_scales and self.k_scale.numel() not in (1, heads):
            raise Error(f"Float8StaticCache: scales of {self.k_scale.numel()} heads, and keys of {heads}: give one for "
                        "each")
        super().lazy_initialization(*(torch.empty(t.shape, dtype=E4M3, device=device)
                                      for t in (key_states, value_states)))
        self.keys, self.values = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (self.keys, self.values))
        for name in ("k_scale", "v_scale"):
            given = getattr(self, name)
            setattr(self, name, torch.ones(heads if self.cache_scales == "head" else 1, device=device)
                    if given is None else given.to(device))
        if not torch.compiler.is_compiling():
            for tensor in (self.keys, self.values, self.k_scale, self.v_scale):
                torch._dynamo.mark_static_address(tensor)

    def update(self, key_states: Tensor, value_states: Tensor, *arguments, **options) -> tuple[Tensor, Tensor]:
        """Writes new keys and values [batch, heads, tokens, features].

        Returns:
            All keys and values of the cache in the type of the new ones: code · scale, rounded from float32.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise Error("Float8StaticCache: keys and values of float8_e4m3fn have no gradients: use torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self.has_scales and key_states.numel():
            for own, states in ((self.k_scale, key_states), (self.v_scale, value_states)):
                own.copy_(_scale_of(states, self.cache_scales == "head"))
            self.has_scales = True
        codes = super().update(_coded(key_states, self.k_scale), _coded(value_states, self.v_scale), *arguments,
                               **options)
        return tuple((code.float() * _of_heads(scale)).to(states.dtype) for code, scale, states in zip(
            codes, (self.k_scale, self.v_scale), (key_states, value_states)))

    def reset(self) -> None:
        """Empties it. Scales that were computed are computed anew from the next keys and values."""
        super().reset()
        self.has_scales = self.has_given_scales


class Float8StaticLayer(_Float8Layer, StaticLayer):
    """A layer of Float8StaticCache that keeps all tokens."""

    def __init__(self, max_cache_len: int, scales: str | tuple[Tensor, Tensor] = "tensor"):
        super().__init__(max_cache_len=max_cache_len)
        self._begin(scales)


class Float8StaticSlidingWindowLayer(_Float8Layer, StaticSlidingWindowLayer):
    """A layer of Float8StaticCache that keeps those of a window."""

    def __init__(self, max_cache_len: int, sliding_window: int, scales: str | tuple[Tensor, Tensor] = "tensor"):
        super().__init__(max_cache_len=max_cache_len, sliding_window=sliding_window)
        self._begin(scales)


class Float8StaticCache(StaticCache):
    """A static cache of transformers whose keys and values are float8_e4m3fn: half the memory of bfloat16.

    ``model.generate(ids, past_key_values=cache)`` and ``model(ids, past_key_values=cache)`` take it, of patched and
    unpatched models; `fftune.generate` takes it as `cache`. Attention reads ``code · scale``, also within the call that
    writes the keys, so one call gives what several give. A key is stored as ``e4m3(key / scale)``, with magnitudes
    above 448 · scale cut to that. e4m3 rounds by at most 1/16 of a number, and numbers below scale / 64 more.

    Computed scales are powers of two, with which the largest finite key or value of the first call lies between 112
    and 224: later ones may be twice as large before they are cut. They are those of all sequences of that call,
    padding included, so a sequence's results depend on the others of its batch.

    Args:
        config: The model's configuration.
        max_cache_len: Most tokens of a sequence.
        scales: "tensor" computes a scale for the keys and one for the values of each layer, from those of the first
            call; "head" computes them for each head. Or a (k_scale, v_scale) for each layer, both numbers or float32
            [1], or float32 [heads of keys]: what `scales` of another cache gives.

    Raises:
        fftune.Error: wrong arguments; a model whose layers keep something else than keys and values, or the states of
            linear attention, which stay as they are; gradients for keys or values; transformers older than 5.17.
    """

    def __init__(self, config, max_cache_len: int, scales: str | Sequence = "tensor"):
        if StaticCache is object or not hasattr(StaticLayer(1), "cumulative_length"):
            raise Error("Float8StaticCache: it needs static caches of transformers 5.17 or newer: install that")
        if not hasattr(config, "get_text_config"):
            raise Error(f"Float8StaticCache: config is {named(config)}: give model.config")
        if not isinstance(max_cache_len, int) or isinstance(max_cache_len, bool) or not 1 <= max_cache_len < 2**31:
            raise Error(f"Float8StaticCache: max_cache_len is {named(max_cache_len)}: give 1 or more tokens")
        super().__init__(config=config, max_cache_len=max_cache_len)
        given = _given(scales, len(self.layers))
        for at, (layer, own) in enumerate(zip(self.layers, given)):
            if type(layer) is StaticLayer:
                self.layers[at] = Float8StaticLayer(layer.max_cache_len, own)
            elif type(layer) is StaticSlidingWindowLayer:
                self.layers[at] = Float8StaticSlidingWindowLayer(max_cache_len, layer.max_cache_len, own)
            elif isinstance(layer, StaticLayer):
                raise Error(f"Float8StaticCache: layer {at} keeps a {type(layer).__name__}, which has no form of "
                            "float8_e4m3fn: use StaticCache")

    @property
    def scales(self) -> list[tuple[Tensor, Tensor] | None]:
        """(k_scale, v_scale) of each layer, float32 [1] or [heads]; None for a layer that has none, or none yet."""
        return [(layer.k_scale, layer.v_scale) if getattr(layer, "has_scales", False) else None
                for layer in self.layers]


def _given(scales, layers: int) -> list:
    """For each layer the word, or both scales as tensors."""
    if isinstance(scales, str) and scales in _OF:
        return [scales] * layers
    if not isinstance(scales, (list, tuple)):
        raise Error(f"Float8StaticCache: scales is {named(scales)}: give 'tensor', 'head', or (k_scale, v_scale) for "
                    "each layer")
    if len(scales) != layers:
        raise Error(f"Float8StaticCache: scales of {len(scales)} layers: the model has {layers}")
    return [_pair(at, pair) for at, pair in enumerate(scales)]


def _pair(at: int, pair):
    if pair is None:  # of a layer without keys and values
        return "tensor"
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise Error(f"Float8StaticCache: scales of layer {at} are {named(pair)}: give (k_scale, v_scale)")
    tensors = []
    for name, scale in zip(("k_scale", "v_scale"), pair):
        if isinstance(scale, (int, float)) and not isinstance(scale, bool):
            scale = torch.tensor([scale], dtype=torch.float32) if abs(scale) < 3e38 else None
        good = isinstance(scale, Tensor) and type(scale) in (Tensor, torch.nn.Parameter) and not scale.is_nested \
            and scale.layout is torch.strided and scale.dtype == torch.float32 and scale.dim() <= 1 and scale.numel()
        if not good or scale.is_meta or not bool(((scale > 0) & (scale < math.inf)).all()):
            raise Error(f"Float8StaticCache: {name} of layer {at} is {named(pair[len(tensors)])}: give a positive "
                        "number, or float32 [1] or [heads]")
        tensors.append(scale.detach().reshape(-1).clone())
    if tensors[0].shape != tensors[1].shape:
        raise Error(f"Float8StaticCache: layer {at} has {tensors[0].numel()} scales of keys and {tensors[1].numel()} "
                    "of values: give as many of each")
    return tuple(tensors)

"""Growing caches in the place of static ones among the outputs of generate().

A static cache that fftune chose has places for the tokens of one call alone, and later calls write into that
of a graph.
"""
import torch

from .._versions import CACHE_NAMES, cache_of
from .attention import STATIC_LAYERS
from .layer_mixers import STATE_LAYERS, has_known_states

_ALIKE = (*STATE_LAYERS, "DummyLayer")  # in static and in growing caches


def with_growing_cache(outputs, config):
    """The outputs of generate(), from whose cache another call can go on."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    cache = cache_of(outputs)
    for name in CACHE_NAMES:
        if cache is not None and outputs.get(name) is cache:
            outputs[name] = _growing(cache, config)
    return outputs


def _growing(cache, config):
    """The same cache where it has layers of other kinds, or states that are not known."""
    from transformers import DynamicCache, EncoderDecoderCache

    if isinstance(cache, EncoderDecoderCache):
        return EncoderDecoderCache(_growing(cache.self_attention_cache, config),
                                   _growing(cache.cross_attention_cache, config))
    own = DynamicCache(config=config.get_text_config(decoder=True))
    if len(own.layers) != len(cache.layers) or not all(
            _kind_of(layer) == _kind_of(static) if _kind_of(static) in _ALIKE else _kind_of(static) in STATIC_LAYERS
            and _kind_of(layer) in ("DynamicLayer", "DynamicSlidingWindowLayer")
            for layer, static in zip(own.layers, cache.layers)) \
            or not all(has_known_states(static) for static in cache.layers if _kind_of(static) in STATE_LAYERS):
        return cache
    for layer, static in zip(own.layers, cache.layers):
        if _kind_of(static) in _ALIKE:
            if _kind_of(static) in STATE_LAYERS:
                _copy_states(layer, static)
            continue
        length = int(static.get_seq_length())
        kept = min(length, static.keys.shape[2])  # of a full window the last, in their order
        layer.update(static.keys[:, :, :kept].clone(), static.values[:, :, :kept].clone())
        if kept < length:
            layer.cumulative_length = length
    return own


def _copy_states(layer, static) -> None:
    for name in ("conv_states", "recurrent_states"):
        for at, state in getattr(static, name).items():
            if state is not None:
                layer.lazy_initialization(**{name: state}, state_idx=at)
                getattr(layer, name)[at].copy_(state)
                layer.has_previous_state[at] = static.has_previous_state[at]


def _kind_of(layer) -> str:
    return type(layer).__name__

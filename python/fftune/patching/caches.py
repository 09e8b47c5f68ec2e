"""Growing caches in the place of static ones among the outputs of generate().

A static cache that fftune chose has places for the tokens of one call alone, and later calls write into that
of a graph.
"""
import torch

from .._versions import CACHE_NAMES, cache_of
from .attention import STATIC_LAYERS


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
    """The same cache where it has layers of other kinds."""
    from transformers import DynamicCache, EncoderDecoderCache

    if isinstance(cache, EncoderDecoderCache):
        return EncoderDecoderCache(_growing(cache.self_attention_cache, config),
                                   _growing(cache.cross_attention_cache, config))
    own = DynamicCache(config=config.get_text_config(decoder=True))
    if len(own.layers) != len(cache.layers) or not {_kind_of(layer) for layer in cache.layers} <= {*STATIC_LAYERS} \
            or not {_kind_of(layer) for layer in own.layers} <= {"DynamicLayer", "DynamicSlidingWindowLayer"}:
        return cache
    for layer, static in zip(own.layers, cache.layers):
        length = int(static.get_seq_length())
        kept = min(length, static.keys.shape[2])  # of a full window the last, in their order
        layer.update(static.keys[:, :, :kept].clone(), static.values[:, :, :kept].clone())
        if kept < length:
            layer.cumulative_length = length
    return own


def _kind_of(layer) -> str:
    return type(layer).__name__

"""The choice of keys of sparse attention."""
import torch
from torch import Tensor

from .._checks import has_sizes
from .._custom import OPS, call
from .._declare import declare
from .._library import Error
from .._run import ready


def _laid(k: Tensor) -> tuple[Tensor, int | None]:
    """Keys, or scales, whose pages or sequences may be apart, and the stride where they are."""
    own = k[0].numel() if len(k) else 0
    block = k.stride(0) if len(k) > 1 else own
    good = k.numel() == 0 or k[0].is_contiguous() and block >= own
    if not good or k.is_cuda and (k.data_ptr() | block * k.element_size()) & 15:
        return ready(k.contiguous()), None
    return k, None if block == own else block


def _check(q, weights, k, top, pages, **_):
    if q.dim() != 4 or weights.shape != q.shape[:3]:
        raise Error(f"indexer: q is {list(q.shape)}, weights {list(weights.shape)}: give [batch, queries, heads, "
                    "features] and [batch, queries, heads]")
    if k.dim() != 3 or pages is None and k.shape[0] != q.shape[0] or k.shape[2] != q.shape[3]:
        raise Error(f"indexer: k is {list(k.shape)}: give [batch, keys, {q.shape[3]}], or with pages "
                    f"[pages, page_size, {q.shape[3]}]")
    if q.numel() and not k.numel():
        raise Error(f"indexer: k is {list(k.shape)}: give one key or more")
    if q.numel() and pages is not None and not pages.shape[-1]:
        raise Error(f"indexer: pages is {list(pages.shape)}: give one page or more of each sequence")
    if isinstance(top, int) and top < 1:
        raise Error(f"indexer: top is {top}: give 1 or more")


def _fill(fields, k, pages, **_):
    """The table of pages does not tell how many keys a sequence has at most."""
    if pages is not None:
        fields |= {"kv": pages.shape[1] * k.shape[1]}


_SHAPES = {"q": "[batch, queries, heads, features]", "weights": "[batch, queries, heads]",
           "k": "[batch or pages, keys, features]", "pages": "[batch, pages]", "lengths": "[batch]",
           "ids": "[batch, queries, top]"}
declare("indexer", "indexer", "q, weights:floats, k, pages:ints?, lengths:ints?, top", "ids", check=_check, fill=_fill,
        shapes=_SHAPES, lays={"k": (_laid, ["k-block"])})
declare("indexer_e4m3", "indexer", "q, weights:floats, k, k_scale:floats, pages:ints?, lengths:ints?, top", "ids",
        check=_check, fill=_fill, fixed={"k-format": "e4m3"}, label="indexer",
        shapes={**_SHAPES, "k_scale": "[batch or pages, keys]"},
        lays={"k": (_laid, ["k-block"]), "k_scale": (_laid, ["scale-block"])})


def indexer(q: Tensor, weights: Tensor, k: Tensor, *, top: int = 2048, pages: Tensor | None = None,
            lengths: Tensor | None = None, k_scale: Tensor | None = None) -> Tensor:
    """The keys that each query of sparse attention sees, as the lightning indexer of DeepSeek-V3.2 and GLM-5
    chooses them: those with the `top` highest scores::

        scores = einsum("bqh,bqhk->bqk", weights, relu(einsum("bqhd,bkd->bqhk", q, k)))

    The queries of a sequence are its last ones, and see no key behind their own position. Products and sums
    are float32. Positive factors of the scores change no choice and may be left out. NaN and infinities of
    keys behind a length have no effect; a NaN score is above every number, as in ``torch.topk``.

    Args:
        q: Queries after RoPE, [batch, queries, heads, features].
        weights: Weights of the heads, float32 [batch, queries, heads].
        k: Keys after norm and RoPE, which all heads share, [batch, keys, features]; with `pages` [pages, page_size,
            features] of any page size. Pages or sequences may be apart, as in a view of a larger cache.
        top: Number of keys of a query.
        pages: Ids of the pages of each sequence, int32 [batch, pages per sequence]. A page id out of range stands
            for a page of zeros.
        lengths: Number of keys of each sequence, int32 [batch]; all if None. Later ones are not read.
        k_scale: With k of float8_e4m3fn, what each key is multiplied by, float32 [batch, keys] or [pages,
            page_size], not negative. In vLLM's cache of the indexer, whose pages have the keys and then the scales,
            both are views.

    Returns:
        int32 [batch, queries, top], in ascending order; -1 behind them where a query sees fewer keys. The
        first of equal scores is chosen. `mla` takes it as `chosen`. There are no gradients.
    """
    if k_scale is not None or has_sizes(k) and k.dtype == torch.float8_e4m3fn:
        if k_scale is None:
            raise Error(f"indexer: k is {k.dtype}: give k_scale, a factor of each key")
        return call(OPS.indexer_e4m3, q, weights, k, k_scale, pages, lengths, top)
    return call(OPS.indexer, q, weights, k, pages, lengths, top)

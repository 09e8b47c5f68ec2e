"""Latent attention in its absorbed form, and what a layer computes around it."""
from torch import Tensor

from .._checks import flag
from .._custom import OPS, call, wants_gradient
from .._declare import declare
from .._library import Error
from .._run import ready
from .rope import NUMBERS, RULE, expect_rule, leave_out_unused

_HEADS = "[batch, queries, heads, features]"
_SHAPES = {**dict.fromkeys(("q_latent", "q_rope", "out"), _HEADS), "cache": "[batch or pages, keys, features]",
           "pages": "[batch, pages]", "lengths": "[batch]", "chosen": "[batch, queries, keys]",
           "lse": "[batch, heads, queries]"}


def _laid_cache(cache: Tensor) -> tuple[Tensor, int | None, int | None]:
    """A cache whose rows, and pages or sequences, may be apart, and both strides where they are."""
    count, keys, width = cache.shape
    row = cache.stride(1) if keys > 1 else width
    block = cache.stride(0) if count > 1 else keys * row
    good = (width == 1 or cache.stride(2) == 1) and row >= width and block >= (keys - 1) * row + width
    if not good or cache.is_cuda and (cache.data_ptr() | row * cache.element_size()
                                      | block * cache.element_size()) & 15:
        return ready(cache.contiguous()), None, None
    return cache, None if row == width else row, None if block == keys * row else block


def _check(q_latent, q_rope, cache, pages, **_):
    if q_latent.dim() != 4:
        raise Error(f"mla: q_latent is {list(q_latent.shape)}: give [batch, queries, heads, features]")
    if q_rope is not None and (q_rope.dim() != 4 or q_rope.shape[:3] != q_latent.shape[:3]):
        raise Error(f"mla: q_rope is {list(q_rope.shape)}, q_latent {list(q_latent.shape)}: give as "
                    "many queries and heads")
    width = q_latent.shape[3] + (0 if q_rope is None else q_rope.shape[3])
    if cache.dim() != 3 or cache.shape[2] != width:
        raise Error(f"mla: cache is {list(cache.shape)}: give [batch, keys, {width}], or with pages "
                    f"[pages, page_size, {width}]")
    if q_latent.numel() and not cache.shape[1]:
        raise Error(f"mla: cache is {list(cache.shape)}: give one key or more")
    if q_latent.numel() and pages is not None and not pages.shape[-1]:
        raise Error(f"mla: pages is {list(pages.shape)}: give one page or more of each sequence")


def _fill(fields, cache, pages, **_):
    """The table of pages does not tell how many keys a sequence has at most."""
    if pages is not None:
        fields |= {"kv": pages.shape[1] * cache.shape[1]}


declare("mla", "mla", "q_latent, q_rope?, cache, pages:ints?, lengths:ints?, chosen:ints?, scale, lse:bool",
        "out, lse?lse", shapes=_SHAPES, check=_check, fill=_fill,
        lays={"cache": (_laid_cache, ["kv-row", "kv-block"])})


def mla(q_latent: Tensor, q_rope: Tensor | None, cache: Tensor, *, pages: Tensor | None = None,
        lengths: Tensor | None = None, chosen: Tensor | None = None, scale: float = 0.0, return_lse: bool = False
        ) -> Tensor | tuple[Tensor, Tensor]:
    """Latent attention of DeepSeek-V2 and its successors in the absorbed form, for decoding: all heads
    attend to one cache, whose rows are keys and values at once::

        softmax(scale · [q_latent, q_rope] cacheᵀ) cache[..., :rank]

    With ``kv_b_proj``'s rows [heads, nope + v, rank] as W_UK and W_UV, a layer computes ``q_latent =
    einsum("bqhn,hnr->bqhr", q_nope, W_UK)`` before it, and ``einsum("bqhr,hvr->bqhv", out, W_UV)`` behind
    it. The queries of a sequence are its last ones, and see no key behind their own position. One without
    a key gives zeros. NaN and infinities of keys that no query sees have no effect.

    Args:
        q_latent: [batch, queries, heads, rank].
        q_rope: The rotated part of the queries, [batch, queries, heads, rope]; None if the model has none.
        cache: Rows of the normed latent and the rotated key, [batch, keys, rank + rope]; with `pages`
            [pages, page_size, rank + rope] of any page size. Rows, and pages or sequences, may be apart, as
            in a view of a larger cache. q_rope and the cache have the same order of rotated features.
        pages: Ids of the pages of each sequence, int32 [batch, pages per sequence]. A page id out of range
            stands for a page of zeros.
        lengths: Number of keys of each sequence, int32 [batch]; all if None. Later ones are not read.
        chosen: The keys that each query sees, as `indexer` returns them, int32 [batch, queries, keys]; all if
            None. Entries that are no key which the query would see without it, such as -1, count as none, and a
            key that occurs twice counts twice.
        scale: Factor of the scores, not negative; 0 for ``1 / sqrt(rank + rope)``. A model has ``1 /
            sqrt(nope + rope)``, with yarn times the square of ``0.1 · mscale_all_dim · ln(factor) + 1``.
        return_lse: Return the log-sum-exp of the scores too.

    Returns:
        A tensor like q_latent; with `return_lse` also float32 [batch, heads, queries], -inf where a query
        sees no key. There are no gradients: a layer that is trained expands keys and values.
    """
    if wants_gradient(q_latent, q_rope, cache):
        raise Error("mla: there are no gradients: use attention with expanded keys and values, or "
                    "torch.no_grad()")
    out, lse = call(OPS.mla, q_latent, q_rope, cache, pages, lengths, chosen, scale,
                    flag("mla", "return_lse", return_lse))
    return (out, lse) if return_lse else out


def _check_rope(q, kv, norm, positions, angles, cache, rotation, rule, **_):
    if kv.shape[-1] <= norm.shape[0] or q.shape[-1] <= kv.shape[-1] - norm.shape[0]:
        raise Error(f"mla_rope: q has {q.shape[-1]} features of a head, kv {kv.shape[-1]} and norm "
                    f"{norm.shape[0]}: give [..., heads, nope + rope], [..., rank + rope] and [rank]")
    if (rotation == "none") != (positions is None):
        raise Error("mla_rope: positions are given with a rotation, and only with it")
    if positions is None and angles is not None:
        raise Error("mla_rope: angles without positions")
    if positions is not None:
        expect_rule("mla_rope", rule, angles)


def _fill_rope(fields, positions, rule, rope_order, **_):
    if rope_order == "same":
        fields["rope-order"] = None
    if positions is None:
        fields |= dict.fromkeys(("angles", *NUMBERS))
    else:
        leave_out_unused(fields, rule)


declare("mla_rope", "mla-rope", "q, kv, norm, positions:ints?, angles?, cache!, slots:ints, rotation, "
        f"rope_order=rope-order, eps, {RULE}", "q_rope", check=_check_rope, fill=_fill_rope,
        sizes={"rope": lambda kv, norm: kv.shape[-1] - norm.shape[0],
               "nope": lambda q, kv, norm: q.shape[-1] - kv.shape[-1] + norm.shape[0]},
        shapes={"q": "[..., heads, features]", "kv": "[..., features]", "norm": "[rank]",
                "angles": "[positions, rope]", "cache": "[rows, rank + rope]"})


def mla_rope(q: Tensor, kv: Tensor, norm: Tensor, cache: Tensor, slots: Tensor, *,
             positions: Tensor | None = None, angles: Tensor | None = None, rotation: str = "halves",
             rope_order: str = "same", eps: float = 1e-6, rule: str | None = None, base: float = 10000.0,
             factor: float = 1.0, context: float = 8192.0, low: float = 1.0, high: float = 4.0,
             beta_fast: float = 32.0, beta_slow: float = 1.0, scale: float = 0.0) -> Tensor:
    """What a layer with latent attention computes between its products and the cache: RoPE of the last
    features of the queries and of the key that all heads share, the norm of the latent, and the row of
    the cache that `mla` reads.

    Args:
        q: Queries of all heads, [..., heads, nope + rope].
        kv: Results of ``kv_a_proj``, [..., rank + rope].
        norm: Weight of the latent's RMSNorm, [rank].
        cache: Rows of the normed latent and the rotated key, [rows, rank + rope], written in place.
        slots: The row of each token, int32 or int64 [...]. One that is no row of the cache writes nothing.
        positions: Position of each token, int32 or int64 [...]; None with ``rotation="none"``.
        angles: Looked up by position, float32 [rows, rope], the same for both features of a pair.
        rotation: "halves" pairs feature i with i + rope / 2, "interleaved" pairs neighbours.
        rope_order: With "halves" the first features of rotated neighbours are stored before the second, as
            transformers' DeepSeek-V3 does; "same" leaves them where they were.
        eps: Epsilon of the norm.
        rule, base, factor, context, low, high, beta_fast, beta_slow, scale: As in `rope`.

    Returns:
        The rotated features of q, [..., heads, rope]. There are no gradients.
    """
    if wants_gradient(q, kv, norm):
        raise Error("mla_rope: writing to a cache has no gradient: use torch.no_grad()")
    if rule is None:
        rule = "base" if angles is None else "table"
    return call(OPS.mla_rope, q, kv, norm, positions, angles, cache, slots, rotation, rope_order, eps, rule,
                [base, factor, context, low, high, beta_fast, beta_slow, scale])


def _laid_heads(x: Tensor) -> tuple[Tensor, int | None]:
    """Heads whose features may be the first of more, and the stride between heads where they are."""
    head = x.stride(-2) if x.shape[-2] > 1 else x.shape[-1]
    rows = x.shape[-2] * head
    strides = [1, head]
    for size in reversed(x.shape[1:-2]):
        strides.append(rows)
        rows *= size
    if x.dim() > 2:
        strides.append(rows)
    good = head >= x.shape[-1] and all(size == 1 or own == stride for size, own, stride in
                                       zip(reversed(x.shape), reversed(x.stride()), strides))
    if not good or x.is_cuda and x.data_ptr() & 15:
        return ready(x.contiguous()), None
    return x, None if head == x.shape[-1] else head


def _laid_weight(w: Tensor) -> tuple[Tensor, int | None]:
    """Some rows of each head's weight, and the number of all of them."""
    count, rows, columns = w.shape
    head = w.stride(0) if count > 1 else rows * columns
    good = (columns == 1 or w.stride(2) == 1) and (rows == 1 or w.stride(1) == columns)
    if not good or head < rows * columns or head % columns or w.is_cuda and w.data_ptr() & 15:
        return ready(w.contiguous()), None
    return w, None if head == rows * columns else head // columns


def _check_heads(x, w, **_):
    if x.dim() < 2 or w.dim() != 3 or w.shape[0] != x.shape[-2]:
        raise Error(f"head_linear: x is {list(x.shape)}, w {list(w.shape)}: give [..., heads, k] and [heads, n, k], or "
                    "[heads, k, n] with transposed")


def _fill_heads(fields, **_):
    fields["w-skip"] = None  # a view begins behind them


for _name, _layout in (("head_linear", "nk"), ("head_linear_transposed", "kn")):
    declare(_name, "head-linear", "x, w", "y", by_row=True, check=_check_heads, fill=_fill_heads,
            fixed={"layout": _layout}, shapes={"x": "[..., heads, k]", "w": "[heads, rows, columns]"},
            lays={"x": (_laid_heads, ["x-head"]), "w": (_laid_weight, ["w-rows"])})


def head_linear(x: Tensor, w: Tensor, *, transposed: bool = False) -> Tensor:
    """A product for each head: ``einsum("...hk,hnk->...hn", x, w)``, as in front of `mla` and behind it.

    Args:
        x: [..., heads, k]; the features may be the first of more, as in a view ``q[..., :nope]``.
        w: [heads, n, k]; some of more rows, as in a view ``kv_b[:, nope:]`` of ``kv_b_proj``'s weight [heads,
            nope + v, rank].
        transposed: w is [heads, k, n].

    Returns:
        [..., heads, n]. There are no gradients.
    """
    if wants_gradient(x, w):
        raise Error("head_linear: there are no gradients: use torch.einsum, or torch.no_grad()")
    return call(OPS.head_linear_transposed if flag("head_linear", "transposed", transposed) else OPS.head_linear, x, w)

"""qkv: the product in front of attention, queries, keys and values of all heads in one op."""
from torch import Tensor

import torch

from .. import reference
from .._checks import expect, int32, several
from .._custom import OPS, call, empty, expect_good, fake, wants_gradient, yes
from .._declare import define
from .._library import Error
from .._run import Form, ready, run
from .attention import head_stride
from .linear import linear
from .rmsnorm import rmsnorm
from .rope import NUMBERS, USED, expect_rule, rope

_TENSORS = ("x, w_q, w_k?, w_v?, b_q?, b_k?, b_v?, q_norm?, k_norm?, positions:ints?, angles:f32?")
_OPTIONS = "heads, kv_heads, eps, rotation, rotary, rule:str, numbers:float[]"
_SHAPES = {**dict.fromkeys(("w_q", "w_k", "w_v"), "[rows, d]"),
           **dict.fromkeys(("b_q", "b_k", "b_v"), "[rows]"),
           **dict.fromkeys(("q_norm", "k_norm"), "[features]"),
           **dict.fromkeys(("k_cache", "v_cache"), "[..., kv_heads, features]"),
           "angles": "[positions, rotary]"}


def _dim(w_q: Tensor, w_k: Tensor | None, heads: int, kv_heads: int) -> int:
    """Features of a head."""
    count = heads if w_k is not None else heads + 2 * kv_heads
    if heads < 1 or kv_heads < 1:
        raise Error(f"qkv: {heads} heads of q, {kv_heads} of k and v: give 1 or more of each")
    if w_q.dim() != 2 or w_q.shape[0] % count:
        raise Error(f"qkv: {'w_q' if w_k is not None else 'w'} is {list(w_q.shape)}: give rows of "
                    f"{count} heads")
    return w_q.shape[0] // count


def _values(options, x, w_q, w_k, w_v, b_q, b_k, b_v, q_norm, k_norm, positions, angles,
            k_cache=None, v_cache=None, slots=None):
    heads, kv_heads, eps, rotation, rotary, rule, numbers, *apart = options
    d, m = x.shape[-1], x.shape[:-1].numel()
    dim = _dim(w_q, w_k, heads, kv_heads)
    packed = w_k is None
    expect("qkv", "x", x, (*x.shape[:-1], w_q.shape[1]))
    for name, tensor in (("w_k", w_k), ("w_v", w_v)):
        expect("qkv", name, tensor, (kv_heads * dim, d))
    expect("qkv", "the bias of q", b_q, (w_q.shape[0],))
    for name, tensor in (("k", b_k), ("v", b_v)):
        expect("qkv", f"the bias of {name}", tensor, (kv_heads * dim,))
    if (w_k is None) != (w_v is None) or not packed and len(
            {t is None for t in (b_q, b_k, b_v)}) > 1 or (q_norm is None) != (k_norm is None):
        raise Error("qkv: give weights, biases and norms of all parts, or of none")
    for name, tensor in (("q_norm", q_norm), ("k_norm", k_norm)):
        expect("qkv", name, tensor, (dim,))
    rotates = positions is not None
    if angles is not None and not rotates:
        raise Error("qkv: angles without positions")
    if rotates:
        expect("qkv", "positions", positions, x.shape[:-1])
        expect_rule("qkv", rule, angles)
    if angles is not None:
        expect("qkv", "angles", angles, (angles.shape[0], rotary or dim))
    rows = None
    if k_cache is not None:
        rows = k_cache.shape[:-2].numel()
        for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
            expect("qkv", name, tensor, (*k_cache.shape[:-2], kv_heads, dim))
        expect("qkv", "slots", slots, x.shape[:-1])
    if not m:
        return None
    return (m, d, heads, dim, kv_heads, rotary if rotates and rotary not in (0, dim) else None,
            None if angles is None else angles.shape[0], rows, *(apart or (None,)), "packed" if packed else "separate",
            yes(b_q), yes(q_norm), float(eps) if q_norm is not None else None,
            rotation if rotates else None, rule if rotates else None,
            *(n if rotates and i in USED[rule] else None for i, n in enumerate(numbers)),
            yes(slots), None if slots is None else "i64" if slots.dtype == torch.int64 else "i32")


def _heads(x: Tensor, count: int, dim: int) -> Tensor:
    return empty(x, *x.shape[:-1], count, dim)


@define("qkv", "qkv", f"{_TENSORS}, {_OPTIONS}", "(Tensor, Tensor, Tensor)", shapes=_SHAPES,
        casts=True, keeps=("angles",), by_row=True)
def _(*arguments):
    x, w_q, w_k, *others, positions, angles = arguments[:11]
    heads, kv_heads, *options, numbers = arguments[11:]
    dim = _dim(w_q, w_k, heads, kv_heads)
    results = [_heads(x, count, dim) for count in (heads, kv_heads, kv_heads)]
    positions = int32("qkv", "positions", positions)
    run(_QKV, (heads, kv_heads, *options, tuple(numbers)),
        (x, w_q, w_k, *others, positions, angles), results)
    return tuple(results)


@define("qkv_cached", "qkv", f"{_TENSORS}, k_cache!, v_cache!, slots:index, {_OPTIONS}", "Tensor",
        shapes=_SHAPES)
def _(*arguments):
    x, w_q, w_k, *others, positions, angles, k_cache, v_cache, slots = arguments[:14]
    heads, kv_heads, *options, numbers = arguments[14:]
    stride = head_stride(k_cache)
    for cache in (k_cache, v_cache):
        if not stride or head_stride(cache) != stride or cache.is_cuda and cache.data_ptr() & 15:
            raise Error("qkv: rows of a cache do not follow each other, or do not begin at an address "
                        "of 16 bytes")
    dim = _dim(w_q, w_k, heads, kv_heads)
    q = _heads(x, heads, dim)
    positions = int32("qkv", "positions", positions)
    given = [t if t is None else ready(t) for t in (x, w_q, w_k, *others, positions, angles)]
    apart = None if stride == dim else stride
    run(_QKV_CACHED, (heads, kv_heads, *options, tuple(numbers), apart),
        (*given, k_cache, v_cache, ready(slots)), (q,))
    return q


_QKV, _QKV_CACHED = (
    Form("qkv", False, OPS.qkv_cached.kinds,
         ("m", "d", "heads", "dim", "kv-heads", "rotary", "positions", "cache-slots", "cache-head",
          "weights", "bias", "norm", "eps", "rotation", "angles", *NUMBERS, "cache", "slots"),
         _values, strided=strided) for strided in (False, True))


@fake("qkv")
def _(*arguments):
    x, w_q, w_k, (heads, kv_heads) = *arguments[:3], arguments[11:13]
    dim = w_q.shape[0] // (heads if w_k is not None else heads + 2 * kv_heads)
    return tuple(x.new_empty(*x.shape[:-1], count, dim) for count in (heads, kv_heads, kv_heads))


@fake("qkv_cached")
def _(*arguments):
    x, w_q, w_k, (heads, kv_heads) = *arguments[:3], arguments[14:16]
    dim = w_q.shape[0] // (heads if w_k is not None else heads + 2 * kv_heads)
    return x.new_empty(*x.shape[:-1], heads, dim)


def qkv(x: Tensor, w: Tensor | tuple[Tensor, Tensor, Tensor], heads: int,
        kv_heads: int | None = None, *, bias: Tensor | tuple[Tensor, Tensor, Tensor] | None = None,
        norms: tuple[Tensor, Tensor] | None = None, eps: float = 1e-6,
        positions: Tensor | None = None, angles: Tensor | None = None, rotation: str = "halves",
        rotary: int = 0, rule: str | None = None, base: float = 10000.0, factor: float = 1.0,
        context: float = 8192.0, low: float = 1.0, high: float = 4.0, beta_fast: float = 32.0,
        beta_slow: float = 1.0, scale: float = 0.0, caches: tuple[Tensor, Tensor] | None = None,
        slots: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor] | Tensor:
    """Queries, keys and values of attention: x wᵀ (+ bias), heads of q, k normalised and rotated.

    `x` [..., d]; `w` [(heads + 2 kv_heads) * dim, d], all of q, of k and of v, or the three
    weights; `bias` the same without d. `norms`: weights [dim] of the RMS norms of the heads of q
    and of k. `positions` [...] of integers: the position of each token, for the rotation, whose
    options are those of `rope`. `angles` [rows, rotary], the same for both of a pair, are found by
    position. Returns q [..., heads, dim] and k, v [..., kv_heads, dim], as `attention` takes them.

    `caches`: k and v [..., kv_heads, dim] with any leading dimensions, contiguous, or parts of one
    contiguous tensor [..., kv_heads, 2 dim] that has each head's keys and values side by side. Keys and values
    are written to them in place, those of a token to row slots [...] of all rows, or nowhere if
    that is negative. The result is then q alone. With gradients it is `linear`, `rmsnorm` and
    `rope`; writing to caches has none.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    words = "those of q, k and v, or one of all"
    weights = (w, None, None) if isinstance(w, Tensor) else several("qkv", "w", w, 3, words)
    biases = ((bias, None, None) if bias is None or isinstance(bias, Tensor) else
              several("qkv", "bias", bias, 3, words))
    q_norm, k_norm = (None, None) if norms is None else several(
        "qkv", "norms", norms, 2, "the weights of the norms of q and of k")
    if rule is None:
        rule = "base" if angles is None else "table"
    numbers = [base, factor, context, low, high, beta_fast, beta_slow, scale]
    options = heads, kv_heads, eps, rotation, rotary, rule, numbers
    tensors = x, *weights, *biases, q_norm, k_norm, positions, angles
    wanted = wants_gradient(*tensors)
    if caches is not None:
        if wanted:
            raise Error("qkv: writing to caches has no gradient: use torch.no_grad()")
        if slots is None:
            raise Error("qkv: caches without slots: give the row of each token")
        caches = several("qkv", "caches", caches, 2, "those of k and of v")
        return call(OPS.qkv_cached, *tensors, *caches, slots, *options)
    if wanted:
        expect_good(OPS.qkv, *tensors, *options)
        return _by_parts(*tensors, *options)
    return call(OPS.qkv, *tensors, *options)


def _by_parts(x, w_q, w_k, w_v, b_q, b_k, b_v, q_norm, k_norm, positions, angles, heads, kv_heads,
              eps, rotation, rotary, rule, numbers) -> tuple[Tensor, Tensor, Tensor]:
    """The same by ops that have gradients."""
    dim = _dim(w_q, w_k, heads, kv_heads)
    if w_k is None:
        parts = linear(x, w_q, b_q).split([n * dim for n in (heads, kv_heads, kv_heads)], -1)
    else:
        parts = (linear(x, w, b) for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in parts)
    if q_norm is not None:
        q, k = (rmsnorm(t, w, eps=eps, convention="t5") for t, w in ((q, q_norm), (k, k_norm)))
    if positions is not None:
        # A sequence of all tokens, each with its row of angles.
        places = int32("qkv", "positions", positions).flatten()
        angle, factor = reference.angles_at(places, angles, rotation, rotary or dim, rule, numbers)
        flat = (t.reshape(1, -1, *t.shape[-2:]) for t in (q, k))
        q, k = (t.view(*x.shape[:-1], -1, dim) for t in rope(
            *flat, angles=angle, rotation=rotation, rotary=rotary, scale=factor))
    return q, k, v

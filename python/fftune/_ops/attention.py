"""attention, and pack_mask for its masks."""
import torch
from torch import Tensor

from .._checks import flag, has_sizes, one_scale, several, spread
from .._custom import OPS, call, gradient, wants_gradient
from .._declare import declare
from .._library import Error
from .._run import ready
from .masked_softmax import CAUSAL

# Attention's tensors are [batch, tokens, heads, features], or, for packed sequences that begin at
# offsets, [tokens, heads, features].
_RULES = ("mask:mask?, bits=mask_bits?, flags=mask_flags?, bias?, offsets:ints?, kv_offsets:ints?, "
          "lengths:ints?, sinks:floats?, causal=mask:bool, window, softcap, scale")
_HEADS = "[..., tokens, heads, features]"
_SHAPES = {**dict.fromkeys(("q", "k", "v", "y", "dy"), _HEADS), "pages": "[batch, pages]",
           "mask": "[batch, 1 or heads, queries, keys]",
           "bits": "[batch, 1 or heads, queries, words]",
           "flags": "[batch, 1 or heads, tiles, tiles]",
           "bias": "[1 or batch, 1 or heads, queries, keys]", "lengths": "[batch]",
           **dict.fromkeys(("offsets", "kv_offsets"), "[sequences + 1]"), "lse": "[..., tokens]"}


def row_of(x: Tensor) -> int | None:
    """Elements from a token's features to the next one's, of queries, keys or values that may be
    parts of a wider row; None if they are laid out in another way."""
    *lead, tokens, heads, dim = x.shape
    batch = lead[0] if x.dim() > 3 else 1  # torch.compile has no "not lead"
    row = x.stride(-3) if tokens > 1 or x.dim() == 3 else x.stride(-4)
    good = ((dim == 1 or x.stride(-1) == 1) and (heads == 1 or x.stride(-2) == dim)
            and row >= heads * dim
            and (batch == 1 or x.stride(-4) == tokens * row))
    return row if good else None


def _rowed(x: Tensor) -> tuple[Tensor, int | None]:
    """The tensor as the kernels read it, and its row where that is more than its own features."""
    own = x.shape[-2] * x.shape[-1]
    row = own if x.is_contiguous() else row_of(x)
    if row is None or x.is_cuda and (x.data_ptr() | row * x.element_size()) & 15:
        return ready(x.contiguous()), None
    return x, None if row == own else row


def head_stride(x: Tensor) -> int:
    """Elements from a head to the next one, of a cache whose heads may be side by side with others';
    0 if it is laid out in another way."""
    *lead, heads, dim = x.shape
    stride = x.stride(-2) if heads > 1 or not lead else x.stride(-3)
    row = heads * stride
    for count, own in zip(reversed(lead), reversed(x.stride()[:-2])):
        if count > 1 and own != row:
            return 0
        row *= count
    return stride if x.stride(-1) == 1 and stride % dim == 0 else 0


def _laid_keys(k: Tensor, v: Tensor, pages: Tensor | None) -> tuple[Tensor, int | None, int | None]:
    """Keys as the kernels read them, their row and, in pages, the elements between heads of keys and
    of values where those are apart in both."""
    if pages is None:
        return *_rowed(k), None
    stride = head_stride(k)
    if (stride in (0, k.shape[-1]) or head_stride(v) != stride or v.shape[-1] != k.shape[-1]
            or k.is_cuda and (k.data_ptr() | v.data_ptr()) & 15):
        return ready(k), None, None
    return k, None, stride


def _laid_values(v: Tensor, pages: Tensor | None, k_1: int | None) -> tuple[Tensor, int | None]:
    """Values and their row; `k_1` is the second stride of the keys, above."""
    if pages is None:
        return _rowed(v)
    return ready(v) if k_1 is None else v, None


def _keys(k: Tensor, pages: Tensor | None) -> int:
    return k.shape[-3] if pages is None else pages.shape[1] * k.shape[1]


def _check(q, k, mask, bits, bias, offsets, kv_offsets, causal, pages=None, **_):
    packed = offsets is not None
    if q.dim() != (3 if packed else 4):
        raise Error(f"attention: q is {list(q.shape)}: give [batch, tokens, heads, features], or "
                    "[tokens, heads, features] with offsets")
    if kv_offsets is not None and not packed:
        raise Error("attention: kv_offsets without offsets: give both")
    if k.dim() != (4 if pages is not None else q.dim()) or k.shape[-1] != q.shape[-1]:
        raise Error(f"attention: k is {list(k.shape)}, q {list(q.shape)}: give keys of as many "
                    "features, laid out as q, or with pages as [pages, tokens, heads, features]")
    keys, s, heads = _keys(k, pages), q.shape[-3], q.shape[-2]
    if q.numel() and not keys:
        raise Error(f"attention: k is {list(k.shape)}: give one key or more")
    if packed and pages is None and (keys != s) > (kv_offsets is not None):
        raise Error(f"attention: {keys} keys of {s} queries: give kv_offsets")
    given = mask if bits is None else bits
    if given is not None and causal:
        raise Error("attention: causal and a mask: give a mask that is causal itself")
    if given is not None and (given.dim() != 4 or given.shape[1] not in (1, heads)):
        raise Error(f"attention: the mask is {list(given.shape)}: give [batch, 1 or heads, "
                    "queries, keys], or what pack_mask made of that")
    if bias is not None and (bias.dim() != 4 or bias.shape[1] not in (1, heads)
                             or bias.shape[0] not in (1, q.shape[0])):
        raise Error(f"attention: bias is {list(bias.shape)}: give [1 or batch, 1 or heads, "
                    "queries, keys]")


def _fill(fields, q, k, v, kv_offsets, pages=None, **_):
    """The library has kv where the keys are not as many as the queries, or not in the same ranges, and
    v-dim where values have other features than keys."""
    keys = _keys(k, pages)
    own = keys != q.shape[-3] or kv_offsets is not None or pages is not None
    fields |= {"kv": keys if own else None, "pages": None if pages is None else k.shape[0],
               "v-dim": None if v.shape[-1] == k.shape[-1] else v.shape[-1]}


_COMMON = dict(shapes=_SHAPES, words=CAUSAL, check=_check, fill=_fill)
declare("attention", "attention", f"q, k, v, pages:ints?, {_RULES}, lse:bool", "y=out, lse?lse",
        lays={"q": (_rowed, ["q-row"]), "k": (_laid_keys, ["k-row", "kv-head"]),
              "v": (_laid_values, ["v-row"])}, **_COMMON)
for _scales, _suffix in (("tensor", ""), ("head", "_heads")):
    declare(f"attention_e4m3{_suffix}", "attention", f"q, k, v, k_scale, v_scale, pages:ints?, {_RULES}, lse:bool",
            "y=out, lse?lse", fixed={"cache-format": "e4m3", "cache-scales": _scales}, label="attention",
            lays={"q": (_rowed, ["q-row"]), "k": (_laid_keys, ["k-row", "kv-head"]),
                  "v": (_laid_values, ["v-row"])}, **{**_COMMON, "shapes": {**_SHAPES, "k_scale": "[scales]",
                                                                          "v_scale": "[scales]"}})
declare("attention_backward", "attention", f"dy=d_out, q, k, v, y=out, lse, {_RULES}, "
        "deterministic:bool", "dq, dk, dv, d_sinks?sinks", back=True,
        fixed={"page": "", "pages": "", "kv-head": ""},
        lays={t: (_rowed, [f"{t}-row"]) for t in "qkv"}, **_COMMON)
declare("pack_mask", "pack-mask", "mask:mask", "bits=mask_bits, flags=mask_flags", shapes=_SHAPES)


def _save_attention(ctx, inputs, output):
    q, k, v, pages, *rules = inputs[:12]
    if pages is not None:
        raise Error("attention: keys in pages have no gradients")
    y, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.options, ctx.has_lse = inputs[12:16], inputs[16]
    ctx.save_for_backward(q, k, v, y, lse, *rules)


@gradient("attention", _save_attention)
def _(ctx, dy, *_unused):
    if dy is None:
        return (None,) * 17
    q, k, v, y, lse, *rules = ctx.saved_tensors
    if not ctx.has_lse:
        y, lse = call(OPS.attention, q, k, v, None, *rules, *ctx.options, True)
    *rules, sinks = rules
    if not ctx.needs_input_grad[11]:
        sinks = None  # lse has their part
    dq, dk, dv, d_sinks = call(
        OPS.attention_backward, dy, q, k, v, y, lse, *rules, sinks, *ctx.options,
        torch.are_deterministic_algorithms_enabled())
    own = d_sinks.to(sinks.dtype) if sinks is not None else None
    return dq, dk, dv, *(None,) * 8, own, *(None,) * 5


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | tuple[Tensor, Tensor] | None = None, *,
              causal: bool = False, window: int = 0, bias: Tensor | None = None,
              offsets: Tensor | None = None, kv_offsets: Tensor | None = None,
              lengths: Tensor | None = None, sinks: Tensor | None = None,
              pages: Tensor | None = None, softcap: float = 0.0, scale: float = 0.0,
              return_lse: bool = False, k_scale: Tensor | None = None,
              v_scale: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention: ``softmax(scale · q kᵀ + bias) v`` over the visible keys of each query.

    Heads share keys and values as in grouped-query attention: `heads` is a multiple of `kv_heads`. The
    last query of a sequence is aligned with its last key. A query without a visible key gives zeros.
    Masked pairs do not exist: NaN and infinities of keys that no query sees have no effect. Heads have an
    even number of features up to 512.

    Args:
        q: Queries, [batch, tokens, heads, features]; with `offsets` [tokens, heads, features], all
            sequences one after the other. q, k and v may be views of one packed row, as a joint
            projection makes them.
        k, v: Keys and values, [batch, keys, kv_heads, features]; with `offsets` [keys, kv_heads,
            features]; with `pages` [pages, page_size, kv_heads, features]. Those of a head may be
            neighbours in one tensor [..., 2 · features]. Values may have another even number of features
            than keys, as in DeepSeek's models. A page has 16, 32, 64, 128 or 256 tokens.
        mask: True where a query sees a key, bool [batch, 1 or heads, tokens, keys], or a mask that PyTorch
            broadcasts to that; or the result of `pack_mask` for a mask of these four dimensions.
        causal: A query sees no key behind its own position.
        window: A query sees this many keys up to its own position, its own included; 0 for all.
        bias: Added to the scores, [1 or batch, 1 or heads, tokens, keys] or what PyTorch broadcasts to
            that; it has no gradient.
        offsets: Where each sequence begins among the tokens, int32 [sequences + 1].
        kv_offsets: The same for keys, if they differ.
        lengths: Number of keys of each sequence, int32 [batch].
        sinks: A logit per head that joins each softmax without a value, as in gpt-oss, [heads].
        pages: Ids of the pages of a cache without gradients, int32 [batch, pages per sequence]. A page id
            out of range stands for a page of zeros. No key outside of `lengths` and `offsets` is read.
        softcap: If not 0, a score becomes ``softcap · tanh(score / softcap)`` before bias is added.
        scale: Factor of the scores, not negative; 0 for ``1 / sqrt(features)``.
        return_lse: Return the log-sum-exp of the scores too.
        k_scale, v_scale: With k and v of float8_e4m3fn, what they are multiplied by, without gradients:
            float32 [1], or [kv_heads] both. On CUDA, heads of a multiple of 4 features up to 256 have
            kernels of mma.sync in bfloat16 and float16; others have the fallback, which is slow.

    Returns:
        A tensor like q, with the features of v; with `return_lse` also float32 [batch, heads, tokens], or with `offsets` [heads,
        tokens], which has no gradient. Gradients of q, k, v and sinks have the same bits in every run under
        ``torch.use_deterministic_algorithms(True)``.
    """
    if bias is not None and wants_gradient(bias):
        raise Error("attention: bias has no gradient: detach it")
    bits = flags = None
    if isinstance(mask, tuple):
        bits, flags = several("attention", "mask", mask, 2, "what pack_mask gave")
        mask = None
    tensors = (q, k) if pages is None else (q, k, pages)
    if all(map(has_sizes, tensors)) and [t.dim() for t in tensors] in ([4, 4], [4, 4, 2]):
        queries, keys = q.shape[1], _keys(k, pages)
        mask, bias = spread(mask, q.shape[0], queries, keys), spread(bias, 1, queries, keys)
    if k_scale is not None or v_scale is not None or has_sizes(k) and k.dtype == torch.float8_e4m3fn:
        return _with_scales(q, k, v, k_scale, v_scale, (
            pages, mask, bits, flags, bias, offsets, kv_offsets, lengths, sinks, causal, window, softcap, scale),
            return_lse)
    wanted = flag("attention", "return_lse", return_lse) or wants_gradient(q, k, v, sinks)
    y, lse = call(OPS.attention, q, k, v, pages, mask, bits, flags, bias, offsets,
                  kv_offsets, lengths, sinks, causal, window, softcap, scale, wanted)
    return (y, lse) if return_lse else y


def _with_scales(q, k, v, k_scale, v_scale, rules, return_lse):
    """Attention over keys and values of float8_e4m3fn."""
    if wants_gradient(q, rules[8]):
        raise Error("attention: keys and values of float8_e4m3fn have no gradients: use torch.no_grad()")
    of_heads, scales = one_scale("attention", k_scale, v_scale)
    y, lse = call(OPS.attention_e4m3_heads if of_heads else OPS.attention_e4m3, q, k, v, *scales, *rules,
                  flag("attention", "return_lse", return_lse))
    return (y, lse) if return_lse else y


def pack_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Packs a boolean mask into the form that `attention` reads fastest, once for many layers.

    Args:
        mask: bool [batch, 1 or heads, queries, keys].

    Returns:
        (bits, flags): the mask with 32 pairs per int32, and in uint8 which tiles of 64 × 64 pairs
        are empty, full or mixed.
    """
    return call(OPS.pack_mask, mask)

"""attention, and pack_mask for its masks."""
import torch
from torch import Tensor

from .._checks import expect, flag, float32, int32, several
from .._custom import OPS, call, empty, fake, gradient, wants_gradient, yes
from .._declare import define
from .._library import Error
from .._run import Form, ready, run

# Attention's tensors are [batch, tokens, heads, features], or, for packed sequences that begin at
# offsets, [tokens, heads, features].
_RULES = ("mask:mask?, bits:i32?, flags:u8?, bias?, offsets:ints?, kv_offsets:ints?, lengths:ints?, "
          "sinks:floats?, causal:bool, window, softcap, scale")
_HEADS = "[..., tokens, heads, features]"
_SHAPES = {**dict.fromkeys(("q", "k", "v", "y", "dy"), _HEADS), "pages": "[batch, pages]",
           "mask": "[batch, 1 or heads, queries, keys]",
           "bits": "[batch, 1 or heads, queries, words]",
           "flags": "[batch, 1 or heads, tiles, tiles]",
           "bias": "[1 or batch, 1 or heads, queries, keys]", "lengths": "[batch]",
           **dict.fromkeys(("offsets", "kv_offsets"), "[sequences + 1]"), "lse": "[..., tokens]"}
_TILE = 64  # queries and keys of a tile, for which a packed mask has a flag


def _words(keys: int) -> int:
    """Number of 32-bit words in a row of a packed mask, which takes a multiple of 16 bytes."""
    return -(-keys // 128) * 4


def _tiles(extent: int) -> int:
    return -(-extent // _TILE)


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


def _paged(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int | None]:
    """Pages as the kernels read them, and the elements between heads where those are apart."""
    stride = head_stride(k)
    if stride == 0 or head_stride(v) != stride or k.is_cuda and (k.data_ptr() | v.data_ptr()) & 15:
        return ready(k.contiguous()), ready(v.contiguous()), None
    return k, v, None if stride == k.shape[-1] else stride


def _attention_values(options, q, k, v, mask, bits, flags, bias, offsets, kv_offsets, lengths,
                      sinks, pages=None):
    strides, causal, window, softcap, scale, *others = options
    packed = offsets is not None
    if q.dim() != (3 if packed else 4):
        raise Error(f"attention: q is {list(q.shape)}: give [batch, tokens, heads, features], or "
                    "[tokens, heads, features] with offsets")
    if kv_offsets is not None and not packed:
        raise Error("attention: kv_offsets without offsets: give both")
    *lead, s, heads, dim = q.shape
    b = offsets.numel() - 1 if packed else lead[0]
    if k.dim() != (4 if pages is not None else q.dim()) or k.shape[-1] != dim:
        raise Error(f"attention: k is {list(k.shape)}, q {list(q.shape)}: give keys of as many "
                    "features, laid out as q, or with pages as [pages, tokens, heads, features]")
    expect("attention", "v", v, k.shape, q.dtype)
    expect("attention", "k", k, k.shape, q.dtype)
    page = None
    if pages is not None:
        expect("attention", "pages", pages, (b, pages.shape[-1]))
        page = k.shape[1]
        keys = pages.shape[1] * page
    elif packed:
        keys = k.shape[0]
    else:
        expect("attention", "k", k, (b, *k.shape[1:]))
        keys = k.shape[1]
    if packed and pages is None and (keys != s) > (kv_offsets is not None):
        raise Error(f"attention: {keys} keys of {s} queries: give kv_offsets")
    kind, mask_heads = "causal" if causal else None, None
    if mask is not None or bits is not None:
        if causal:
            raise Error("attention: causal and a mask: give a mask that is causal itself")
        kind = "bool" if bits is None else "packed"
        given = mask if bits is None else bits
        if given.dim() != 4 or given.shape[1] not in (1, heads):
            raise Error(f"attention: the mask is {list(given.shape)}: give [batch, 1 or heads, "
                        "queries, keys], or what pack_mask made of that")
        mask_heads = "each" if given.shape[1] > 1 else None
        lead_shape = (b, given.shape[1])
        expect("attention", "mask", mask, (*lead_shape, s, keys))
        expect("attention", "bits", bits, (*lead_shape, s, _words(keys)), torch.int32)
        expect("attention", "flags", flags, (*lead_shape, _tiles(s), _tiles(keys)), torch.uint8)
    bias_heads = bias_sequences = None
    if bias is not None:
        if bias.dim() != 4 or bias.shape[0] not in (1, b) or bias.shape[1] not in (1, heads):
            raise Error(f"attention: bias is {list(bias.shape)}: give [1 or batch, 1 or heads, "
                        "queries, keys]")
        expect("attention", "bias", bias, (*bias.shape[:2], s, keys), q.dtype)
        bias_heads = "one" if bias.shape[1] == 1 and heads > 1 else None
        bias_sequences = "each" if bias.shape[0] > 1 else None
    expect("attention", "kv_offsets", kv_offsets, (b + 1,))
    expect("attention", "lengths", lengths, (b,))
    expect("attention", "sinks", sinks, (heads,))
    if not q.numel():
        return None
    # The library has kv where the keys are not as many as the queries, or not in the same ranges.
    own_keys = keys != s or kv_offsets is not None or pages is not None
    return (s, b, heads, dim, keys if own_keys else None, k.shape[-2], window or None, page,
            None if page is None else k.shape[0], *strides, "thd" if packed else "bshd", kind,
            mask_heads, yes(bias), bias_heads, bias_sequences, yes(lengths), yes(sinks),
            float(softcap) or None, float(scale) or None, *others)


_NAMES = ("s", "b", "heads", "dim", "kv", "kv-heads", "window", "page", "pages", "q-row", "k-row",
          "v-row", "kv-head", "layout", "mask", "mask-heads", "bias", "bias-heads", "bias-sequences", "lengths",
          "sinks", "softcap", "scale")


def _attention_inputs(options, q, k, v, pages, mask, bits, flags, bias, offsets, kv_offsets,
                      lengths, sinks):
    return _attention_values(options, q, k, v, mask, bits, flags, bias, offsets, kv_offsets,
                             lengths, sinks, pages)


def _attention_backward_inputs(options, dy, q, k, v, y, lse, mask, bits, flags, bias, offsets,
                               kv_offsets, lengths, sinks):
    expect("attention", "dy", dy, q.shape)
    expect("attention", "y", y, q.shape)
    expect("attention", "lse", lse, _lse_shape(q, offsets))
    return _attention_values(options, q, k, v, mask, bits, flags, bias, offsets, kv_offsets,
                             lengths, sinks)


def _lse_shape(q: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    if offsets is not None:
        return q.shape[1], q.shape[0]
    return q.shape[0], q.shape[2], q.shape[1]


def _rules(mask, bits, flags, bias, offsets, kv_offsets, lengths, sinks) -> tuple:
    """The tensors that say what is seen, as the kernels read them."""
    numbers = [None if t is None else ready(int32("attention", name, t)) for name, t in (
        ("offsets", offsets), ("kv_offsets", kv_offsets), ("lengths", lengths))]
    plain = [None if t is None else ready(t) for t in (mask, bits, flags, bias)]
    return *plain, *numbers, None if sinks is None else ready(float32("attention", "sinks", sinks))


@define("attention", "attention", f"q, k, v, pages:ints?, {_RULES}, lse:bool", "(Tensor, Tensor)",
        shapes=_SHAPES)
def _(q, k, v, pages, mask, bits, flags, bias, offsets, kv_offsets, lengths, sinks, causal, window,
      softcap, scale, lse):
    y = empty(q, *q.shape)
    own = empty(q, *(_lse_shape(q, offsets) if lse else (0,)), dtype=torch.float32)
    q, q_row = _rowed(q)
    k_row = v_row = kv_head = None
    if pages is None:
        (k, k_row), (v, v_row) = _rowed(k), _rowed(v)
    else:
        k, v, kv_head = _paged(k, v)
        pages = ready(int32("attention", "pages", pages))
    run(_ATTENTION, ((q_row, k_row, v_row, kv_head), causal, window, softcap, scale, "yes" if lse else None),
        (q, k, v, pages, *_rules(mask, bits, flags, bias, offsets, kv_offsets, lengths, sinks)),
        (y, own) if lse else (y,))
    return y, own


@define("attention_backward", "attention", f"dy=d_out, q, k, v, y=out, lse, {_RULES}, "
        "deterministic:bool", "(Tensor, Tensor, Tensor, Tensor)", back=True, shapes=_SHAPES)
def _(dy, q, k, v, y, lse, mask, bits, flags, bias, offsets, kv_offsets, lengths, sinks, causal,
      window, softcap, scale, deterministic):
    results = [empty(t, *t.shape) for t in (q, k, v)]
    d_sinks = empty(q, 0 if sinks is None else sinks.numel(), dtype=torch.float32)
    (q, q_row), (k, k_row), (v, v_row) = map(_rowed, (q, k, v))
    run(_ATTENTION_BACKWARD,
        ((q_row, k_row, v_row, None), causal, window, softcap, scale,
         "yes" if deterministic else None),
        (ready(dy), q, k, v, ready(y), ready(lse),
         *_rules(mask, bits, flags, bias, offsets, kv_offsets, lengths, sinks)),
        results if sinks is None else (*results, d_sinks))
    return *results, d_sinks


_ATTENTION = Form("attention", False, OPS.attention.kinds, (*_NAMES, "lse"), _attention_inputs,
                  strided=True)
_ATTENTION_BACKWARD = Form("attention", True, OPS.attention_backward.kinds,
                           (*_NAMES, "deterministic"), _attention_backward_inputs, strided=True)


@fake("attention")
def _(q, k, v, pages, mask, bits, flags, bias, offsets, *others):
    lse = _lse_shape(q, offsets) if others[-1] else (0,)
    return q.new_empty(q.shape), q.new_empty(lse, dtype=torch.float32)


@fake("attention_backward")
def _(dy, q, k, v, y, lse, mask, bits, flags, bias, offsets, kv_offsets, lengths, sinks, *others):
    d_sinks = 0 if sinks is None else sinks.shape
    return (*(t.new_empty(t.shape) for t in (q, k, v)), q.new_empty(d_sinks, dtype=torch.float32))


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
    dq, dk, dv, d_sinks = call(
        OPS.attention_backward, dy, q, k, v, y, lse, *rules, *ctx.options,
        torch.are_deterministic_algorithms_enabled())
    sinks = rules[-1]
    own = d_sinks.to(sinks.dtype) if sinks is not None else None
    return dq, dk, dv, *(None,) * 8, own, *(None,) * 5


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | tuple[Tensor, Tensor] | None = None, *,
              causal: bool = False, window: int = 0, bias: Tensor | None = None,
              offsets: Tensor | None = None, kv_offsets: Tensor | None = None,
              lengths: Tensor | None = None, sinks: Tensor | None = None,
              pages: Tensor | None = None, softcap: float = 0.0, scale: float = 0.0,
              return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q kᵀ + bias) v over the keys that each query may see.

    q [batch, tokens, heads, features]; k, v [batch, keys, kv heads, features], kv heads a divisor
    of heads; or all [tokens, heads, features] of sequences that begin at `offsets` [sequences + 1],
    their keys at `kv_offsets` if those are others. They may be parts of one row, as of a product
    that makes all three. -> as q; with return_lse also the logarithm of the sum of exponentials,
    float32 [batch, heads, tokens].

    The last query stands at the last key. `causal`: a query sees no key after its own place.
    `window`: it sees that many keys to the left, its own included. `mask` [batch, 1 or heads,
    tokens, keys] of bool, or the result of pack_mask for it: it sees the keys that are set.
    `lengths` [batch]: how many keys of each sequence count. `bias` [1 or batch, 1 or heads, tokens,
    keys] has no gradient. `softcap`: scores become softcap * tanh(score / softcap) before bias is
    added. `sinks` [heads]: a logit that joins each softmax without a value. `pages` [batch, pages
    of a sequence]: k, v [pages, tokens of a page, kv heads, features] are a paged cache; without
    gradients. A page that is not in the cache is one of zeros. Whatever lengths and offsets say, no
    other keys are read. Keys and values of a head may be side by side there, parts of one tensor [..., 2
    features]. `scale`: 0 for 1 / sqrt(features). A query that sees no key gives zeros.
    Gradients have the same bits in each run under torch.use_deterministic_algorithms.
    """
    if bias is not None and wants_gradient(bias):
        raise Error("attention: bias has no gradient: detach it")
    bits = flags = None
    if isinstance(mask, tuple):
        bits, flags = several("attention", "mask", mask, 2, "what pack_mask gave")
        mask = None
    wanted = flag("attention", "return_lse", return_lse) or wants_gradient(q, k, v, sinks)
    y, lse = call(OPS.attention, q, k, v, pages, mask, bits, flags, bias, offsets,
                  kv_offsets, lengths, sinks, causal, window, softcap, scale, wanted)
    return (y, lse) if return_lse else y


# pack-mask

def _pack_values(options, mask):
    b, heads, s, keys = mask.shape
    return (s, b, keys, heads) if mask.numel() else None


def _packed_shapes(mask: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    b, heads, s, keys = mask.shape
    return (b, heads, s, _words(keys)), (b, heads, _tiles(s), _tiles(keys))


@define("pack_mask", "pack-mask", "mask:mask", "(Tensor, Tensor)", shapes=_SHAPES)
def _(mask):
    bits, flags = _packed_shapes(mask)
    results = empty(mask, *bits, dtype=torch.int32), empty(mask, *flags, dtype=torch.uint8)
    run(_PACK, (), (mask,), results)
    return results


_PACK = Form("pack-mask", False, OPS.pack_mask.kinds, ("s", "b", "kv", "heads"), _pack_values,
             typed_by=None)


@fake("pack_mask")
def _(mask):
    bits, flags = _packed_shapes(mask)
    return mask.new_empty(bits, dtype=torch.int32), mask.new_empty(flags, dtype=torch.uint8)


def pack_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """A mask [batch, 1 or heads, queries, keys] of bool as `attention` reads it fastest, made once
    for many layers: (bits, flags), of 32 pairs an int32, and of tiles of 64 x 64 pairs."""
    return call(OPS.pack_mask, mask)

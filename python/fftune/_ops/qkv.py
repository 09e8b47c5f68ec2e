"""qkv: the product in front of attention, queries, keys and values of all heads in one op."""
from torch import Tensor

from .. import reference
from .._checks import count_of, expect, expect_one_of, has_sizes, int32, one_scale, several
from .._custom import OPS, call, expect_good, wants_gradient
from .._declare import declare
from .._library import Error
from .attention import head_stride
from .linear import linear
from .packed import FORMATS, PackedWeight, autocasts, group_word, has_zeros, parts_of, suffix
from .rmsnorm import rmsnorm
from .rope import NUMBERS, RULE, USED, expect_rule, leave_out_unused, rope

_TENSORS = ("x, w_q=w_q|w, w_k?, w_v?, b_q=b_q|bias?, b_k?, b_v?, q_norm?, k_norm?, "
            "positions:ints?, angles?")
_OPTIONS = f"heads, kv_heads, eps, rotation, rotary, {RULE}"


def _dim(w_q: Tensor, w_k: Tensor | None, heads: int, kv_heads: int) -> int:
    """Features of a head."""
    count = heads if w_k is not None else heads + 2 * kv_heads
    if heads < 1 or kv_heads < 1:
        raise Error(f"qkv: {heads} heads of q, {kv_heads} of k and v: give 1 or more of each")
    if w_q.dim() != 2 or w_q.shape[0] % count:
        raise Error(f"qkv: {'w_q' if w_k is not None else 'w'} is {list(w_q.shape)}: give rows of "
                    f"{count} heads")
    return w_q.shape[0] // count


def _check(w_k, w_v, b_q, b_k, b_v, **others):
    if (w_k is None) != (w_v is None) or w_k is not None and len(
            {t is None for t in (b_q, b_k, b_v)}) > 1 or w_k is None and b_k is not None:
        raise Error("qkv: give weights, biases and norms of all parts, or of none")
    _check_others(**others)


def _check_others(q_norm, k_norm, positions, angles, rule, **_):
    if (q_norm is None) != (k_norm is None):
        raise Error("qkv: give weights, biases and norms of all parts, or of none")
    if angles is not None and positions is None:
        raise Error("qkv: angles without positions")
    if positions is not None:
        expect_rule("qkv", rule, angles)


def _fill(fields, w_q, w_k, heads, kv_heads, **others):
    _fill_others(fields, dim=_dim(w_q, w_k, heads, kv_heads), **others)


def _fill_others(fields, q_norm, positions, dim, rotary, rule, **_):
    fields["norm"] = None if q_norm is None else "yes"
    if q_norm is None:
        fields["eps"] = None
    if positions is None:
        fields |= dict.fromkeys(("rotation", "rotary", "angles", *NUMBERS))
    else:
        leave_out_unused(fields, rule)
        if rotary == dim:
            fields["rotary"] = None


def _in_place(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, int | None]:
    """The cache of keys, and the elements between heads of both caches where those are apart."""
    stride = head_stride(k_cache)
    for cache in (k_cache, v_cache):
        if not stride or head_stride(cache) != stride or cache.is_cuda and cache.data_ptr() & 15:
            raise Error("qkv: rows of a cache do not follow each other, or do not begin at an address "
                        "of 16 bytes")
    return k_cache, None if stride == k_cache.shape[-1] else stride


def _as_it_is(v_cache: Tensor) -> tuple[Tensor]:
    return v_cache,


_RULES = dict(check=_check, fill=_fill, sizes={"dim": _dim},
              names={f"b_{t}": f"the bias of {t}" for t in "qkv"},
              shapes={**dict.fromkeys(("w_q", "w_k", "w_v"), "[rows, d]"),
                      **dict.fromkeys(("b_q", "b_k", "b_v"), "[rows]"),
                      **dict.fromkeys(("q_norm", "k_norm"), "[features]"),
                      **dict.fromkeys(("k_cache", "v_cache"), "[..., kv_heads, features]"),
                      "angles": "[positions, rotary]"})
declare("qkv", "qkv", f"{_TENSORS}, {_OPTIONS}", "q, k, v", casts=True, keeps=("angles",),
        by_row=True, **_RULES)
_LAYS = {"k_cache": (_in_place, ["cache-head"]), "v_cache": (_as_it_is, [])}
declare("qkv_cached", "qkv", f"{_TENSORS}, k_cache!, v_cache!, slots:index, {_OPTIONS}", "q",
        lays=_LAYS, **_RULES)
_SCALED = "k_cache!, v_cache!, slots:index, k_scale, v_scale"
_OF_SCALES = {"": "tensor", "_heads": "head"}
_SCALE_SHAPES = dict.fromkeys(("k_scale", "v_scale"), "[scales]")
for _suffix, _scales in _OF_SCALES.items():
    declare(f"qkv_cached_e4m3{_suffix}", "qkv", f"{_TENSORS}, {_SCALED}, {_OPTIONS}", "q", lays=_LAYS,
            fixed={"cache-format": "e4m3", "cache-scales": _scales}, label="qkv",
            **{**_RULES, "shapes": {**_RULES["shapes"], **_SCALE_SHAPES}})

_OPTIONS = f"heads, kv_heads, dim, group, eps, rotation, rotary, {RULE}"
_SHAPES = {name: shape for name, shape in _RULES["shapes"].items() if not name.startswith("w_")}
for _format in FORMATS:
    _packed = (f"x, w, scale=w_scale, {'zero=w_zero?, ' if has_zeros(_format) else ''}bias?, q_norm?, "
               "k_norm?, positions:ints?, angles?")
    _rules = dict(check=_check_others, fill=_fill_others, fixed={"weights": _format}, label="qkv",
                  shapes=_SHAPES)
    declare(f"qkv_packed{suffix(_format)}", "qkv", f"{_packed}, {_OPTIONS}", "q, k, v", by_row=True,
            **autocasts(_format, "scale", keeps=("angles",)), **_rules)
    declare(f"qkv_packed_cached{suffix(_format)}", "qkv",
            f"{_packed}, k_cache!, v_cache!, slots:index, {_OPTIONS}", "q", lays=_LAYS, **_rules)
for _scales in ("token", "block"):
    declare(f"qkv_fp8_{_scales}", "qkv", "x, w, w_scale, bias?, q_norm?, k_norm?, positions:ints?, angles?, "
            f"{_OPTIONS.replace('group, ', '')}", "q, k, v", keeps=("angles",), by_row=True, check=_check_others,
            fill=_fill_others, fixed={"weights": "packed", "quantise": _scales}, label="qkv", shapes=_SHAPES)


def qkv(x: Tensor, w: Tensor | tuple[Tensor, Tensor, Tensor] | PackedWeight, heads: int,
        kv_heads: int | None = None, *, bias: Tensor | tuple[Tensor, Tensor, Tensor] | None = None,
        norms: tuple[Tensor, Tensor] | None = None, eps: float = 1e-6,
        positions: Tensor | None = None, angles: Tensor | None = None, rotation: str = "halves",
        rotary: int = 0, rule: str | None = None, base: float = 10000.0, factor: float = 1.0,
        context: float = 8192.0, low: float = 1.0, high: float = 4.0, beta_fast: float = 32.0,
        beta_slow: float = 1.0, scale: float = 0.0, caches: tuple[Tensor, Tensor] | None = None,
        slots: Tensor | None = None, w_scale: Tensor | None = None, k_scale: Tensor | None = None,
        v_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor] | Tensor:
    """Queries, keys and values of attention: ``x wᵀ + bias``, head norms and RoPE in one kernel.

    With gradients the call runs `linear`, `rmsnorm` and `rope`; writing to caches has no gradients.

    Args:
        x: Input, [..., d].
        w: Weight [(heads + 2 · kv_heads) · dim, d] with the rows of q, then k, then v; dense or a
            ``PackedWeight``. Or a tuple of three dense weights.
        heads, kv_heads: Numbers of heads of q, and of k and v; kv_heads is heads by default.
        bias: Added to the product, [(heads + 2 · kv_heads) · dim], or a tuple of three.
        norms: Weights (q_norm, k_norm), [dim] each, of an RMSNorm over each head of q and k.
        eps: Epsilon of these norms.
        positions: Position of each token, int32 or int64 [...]. Without it there is no RoPE.
        angles: Looked up by position, float32 [rows, rotary], the same for both features of a pair.
            Without it angles are computed.
        rotation, rotary, rule, base, factor, context, low, high, beta_fast, beta_slow, scale: As in
            `rope`.
        caches: Tensors (k_cache, v_cache) that k and v are written to in place, [..., kv_heads, dim] with
            any leading dimensions, contiguous, or both views of one contiguous [..., kv_heads, 2 · dim].
        slots: With caches, the row of all leading dimensions that a token's k and v are written to,
            int32 or int64 [...]. A slot out of range writes nothing.
        k_scale, v_scale: float32 [1], or [kv_heads] both, for caches of float8_e4m3fn, which get
            ``k / k_scale`` and ``v / v_scale`` to nearest even. Magnitudes beyond 448, ∞ too, become 448,
            and NaN stays NaN; PyTorch's own cast makes NaN from 464 on.
        w_scale: float32, scales of one w of float8_e4m3fn, for which the op quantises the tokens as
            `linear_fp8` does. Without gradients and caches.

    Returns:
        (q, k, v), q [..., heads, dim] and k, v [..., kv_heads, dim], as `attention` takes them; with
        caches q alone.
    """
    heads = count_of("qkv", "heads", heads)
    kv_heads = heads if kv_heads is None else count_of("qkv", "kv_heads", kv_heads)
    words = "those of q, k and v, or one of all"
    packed, of_heads = isinstance(w, PackedWeight), (heads, kv_heads)
    if rule is None:
        rule = "base" if angles is None else "table"
    numbers = [base, factor, context, low, high, beta_fast, beta_slow, scale]
    if w_scale is not None:
        if not has_sizes(w) or not (bias is None or isinstance(bias, Tensor)) or caches is not None:
            raise Error("qkv: w_scale goes with one dense w, one bias, and no caches")
        q_norm, k_norm = _two_norms(norms)
        by_row = isinstance(w_scale, Tensor) and w_scale.dim() == 1
        return call(OPS.qkv_fp8_token if by_row else OPS.qkv_fp8_block, x, w, w_scale, bias, q_norm, k_norm,
                    positions, angles, heads, kv_heads, _dim(w, None, heads, kv_heads), eps, rotation, rotary, rule,
                    numbers)
    if packed:
        if heads < 1 or kv_heads < 1 or w.n % (heads + 2 * kv_heads):
            raise Error(f"qkv: w is a packed weight [{w.n}, {w.k}]: give rows of "
                        f"{heads + 2 * kv_heads} heads")
        if not (bias is None or isinstance(bias, Tensor)):
            raise Error("qkv: bias is of several parts: give one of all, as w is")
        weights, biases = parts_of(w), (bias,)
        of_heads += w.n // (heads + 2 * kv_heads), group_word("qkv", w.group, w.format)
    else:
        weights = (w, None, None) if isinstance(w, Tensor) else several("qkv", "w", w, 3, words)
        biases = ((bias, None, None) if bias is None or isinstance(bias, Tensor) else
                  several("qkv", "bias", bias, 3, words))
    q_norm, k_norm = _two_norms(norms)
    options = *of_heads, eps, rotation, rotary, rule, numbers
    names = [f"qkv_packed{part}{suffix(w.format)}" for part in ("", "_cached")] if packed else [
        "qkv", "qkv_cached"]
    plain, cached = (getattr(OPS, name) for name in names)
    tensors = x, *weights, *biases, q_norm, k_norm, positions, angles
    wanted = wants_gradient(*tensors)
    if caches is not None:
        if wanted:
            raise Error("qkv: writing to caches has no gradient: use torch.no_grad()")
        if slots is None:
            raise Error("qkv: caches without slots: give the row of each token")
        caches = several("qkv", "caches", caches, 2, "those of k and of v")
        if k_scale is not None or v_scale is not None:
            of_heads, scales = one_scale("qkv", k_scale, v_scale)
            if packed:
                raise Error("qkv: caches of float8_e4m3fn with a packed weight: layer has them together")
            return call(OPS.qkv_cached_e4m3_heads if of_heads else OPS.qkv_cached_e4m3, *tensors, *caches, slots,
                        *scales, *options)
        return call(cached, *tensors, *caches, slots, *options)
    if k_scale is not None or v_scale is not None:
        raise Error("qkv: k_scale or v_scale without caches: they are of caches of float8_e4m3fn")
    if wanted:
        expect_good(plain, *tensors, *options)
        if packed:
            return _by_parts(x, w, None, None, bias, None, None, q_norm, k_norm, positions, angles,
                             heads, kv_heads, *options[len(of_heads):])
        return _by_parts(*tensors, *options)
    return call(plain, *tensors, *options)


def _two_norms(norms) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norms is None else several(
        "qkv", "norms", norms, 2, "the weights of the norms of q and of k")


def _by_parts(x, w_q, w_k, w_v, b_q, b_k, b_v, q_norm, k_norm, positions, angles, heads, kv_heads,
              eps, rotation, rotary, rule, numbers) -> tuple[Tensor, Tensor, Tensor]:
    """The same by ops that have gradients. They do not see what the parts have in common."""
    dim = (w_q.n // (heads + 2 * kv_heads) if isinstance(w_q, PackedWeight) else
           _dim(w_q, w_k, heads, kv_heads))
    expect_one_of("qkv: rotation", rotation, ("none", "halves", "interleaved"))
    expect_one_of("qkv: rule", rule, USED)
    _check(w_k, w_v, b_q, b_k, b_v, q_norm=q_norm, k_norm=k_norm, positions=positions, angles=angles, rule=rule)
    expect("qkv", "positions", positions, x.shape[:-1])
    if angles is not None:
        expect("qkv", "angles", angles, (angles.shape[0], rotary or dim))
    if w_k is None:
        parts = linear(x, w_q, b_q).split([n * dim for n in (heads, kv_heads, kv_heads)], -1)
    else:
        parts = (linear(x, w, b) for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    q, k, v = (part.unflatten(-1, (-1, dim)).contiguous() for part in parts)
    if q_norm is not None:
        q, k = (rmsnorm(t, w, eps=eps, convention="t5") for t, w in ((q, q_norm), (k, k_norm)))
    if positions is not None:
        # A sequence of all tokens, each with its row of angles.
        places = int32("qkv", "positions", positions).flatten()
        angle, factor = reference.angles_at(places, angles, rotation, rotary or dim, rule, numbers)
        flat = (t.reshape(1, -1, *t.shape[-2:]) for t in (q, k))
        q, k = (t.view(*x.shape[:-1], *t.shape[-2:]) for t in rope(
            *flat, angles=angle, rotation=rotation, rotary=rotary, scale=factor))
    return q, k, v

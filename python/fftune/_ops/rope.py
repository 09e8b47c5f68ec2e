"""rope: rotary position embedding of queries and keys, wherever they lie."""
import torch
from torch import Tensor

from .._checks import expect, int32
from .._custom import OPS, call, empty, fake, gradient, yes
from .._declare import define
from .._library import Error
from .._run import Form, ready, run

NUMBERS = ("base", "factor", "context", "low", "high", "beta-fast", "beta-slow", "scale")
# The numbers of each rule by which angles come about.
USED = {"table": (7,), "base": (0, 1, 7), "llama3": (0, 1, 2, 3, 4, 7), "yarn": (0, 1, 2, 5, 6, 7)}
_SIZES = ("s", "b", "heads", "dim", "kv-heads", "rotary", "positions", "q-row", "q-outer", "q-head",
          "k-row", "k-outer", "k-head", "layout", "rotation", "angles", "starts")
_ARGUMENTS = ("angles:f32?, starts:ints?, offsets:ints?, rotation, rotary, rule:str, numbers:float[]")
_SHAPES = {**dict.fromkeys(("q", "k", "dq", "dk"), "[..., tokens, heads, features]"),
           "angles": "[positions, rotary]", "starts": "[batch]", "offsets": "[sequences + 1]"}


def expect_rule(op: str, rule: str, angles: Tensor | None) -> None:
    if rule not in USED:
        raise Error(f"{op}: there is no rule '{rule}': give {', '.join(USED)}")
    if (rule == "table") != (angles is not None):
        raise Error(f"{op}: angles are given with rule='table', and only with it")


def _strided(x: Tensor) -> Tensor:
    """Queries or keys as the kernels read them: features next to each other, rows that do not
    overlap, and on a GPU all at addresses of 16 bytes."""
    step = 16 // x.element_size() if x.is_cuda else 1
    strides = x.stride()
    good = (strides[-1] == 1 and all(s >= x.shape[-1] and s % step == 0 for s in strides[:-1])
            and (not x.is_cuda or x.data_ptr() % 16 == 0))
    return x if good else x.clone(memory_format=torch.contiguous_format)


def _stride_values(x: Tensor, packed: bool) -> tuple:
    """(row, outer, head) of q or k; None where they are what the library takes for granted."""
    if x.is_contiguous():
        return None, None, None
    if packed:
        return x.stride(0), None, x.stride(1)
    return x.stride(1), x.stride(0), x.stride(2)


def _values(options, q, k, angles, offsets, starts):
    strides, rotation, rotary, rule, numbers = options
    packed = offsets is not None
    if q.dim() != (3 if packed else 4):
        raise Error(f"rope: q is {list(q.shape)}: give [batch, tokens, heads, features], or "
                    "[tokens, heads, features] with offsets")
    *lead, heads, dim = q.shape
    if k is not None:
        expect("rope", "k", k, (*lead, k.shape[-2], dim))
    expect_rule("rope", rule, angles)
    b, s = (offsets.numel() - 1, lead[0]) if packed else lead
    if angles is not None:
        expect("rope", "angles", angles, (angles.shape[0], rotary or dim))
    expect("rope", "starts", starts, (b,))
    if not q.numel():
        return None
    return (s, b, heads, dim, None if k is None else k.shape[-2], rotary or None,
            None if angles is None else angles.shape[0], *strides, "thd" if packed else "bshd",
            rotation, rule, yes(starts),
            *(number if i in USED[rule] else None for i, number in enumerate(numbers)))


def _run(form, q, k, angles, starts, offsets, rotation, rotary, rule, numbers):
    results = [empty(t, *t.shape) for t in (q, k) if t is not None]
    q = _strided(q)
    packed = offsets is not None
    strides = _stride_values(q, packed)
    if k is None:
        strides += None, None, None
    else:
        k = _strided(k)
        strides += _stride_values(k, packed)
    offsets, starts = (None if t is None else ready(int32("rope", name, t))
                       for name, t in (("offsets", offsets), ("starts", starts)))
    run(form, (strides, rotation, rotary, rule, tuple(numbers)),
        (q, k, None if angles is None else ready(angles), offsets, starts), results)
    return results


def _define(name: str, of_two: bool, back: bool) -> None:
    tensors = ", ".join(f"{'d' * back}{t}:data" for t in ("q", "k")[:1 + of_two])
    returns = "(Tensor, Tensor)" if of_two else "Tensor"

    @define(name, "rope", f"{tensors}, {_ARGUMENTS}", returns, back=back, shapes=_SHAPES)
    def _(q, *arguments):
        k, *arguments = arguments if of_two else (None, *arguments)
        results = _run(form, q, k, *arguments)
        return tuple(results) if of_two else results[0]

    kinds = getattr(OPS, name).kinds
    own = {t: kinds.get("d" * back + t) for t in ("q", "k")}
    form = Form("rope", back, {**kinds, **own}, _SIZES + NUMBERS, _values, strided=True)

    @fake(name)
    def _(q, k, *arguments):
        return (q.new_empty(q.shape), k.new_empty(k.shape)) if of_two else q.new_empty(q.shape)


for _back in (False, True):
    _define("rope_backward" if _back else "rope", False, _back)
    _define("rope_qk_backward" if _back else "rope_qk", True, _back)


def _save_rope(ctx, inputs, output):
    *_, angles, starts, offsets, rotation, rotary, rule, numbers = inputs
    ctx.save_for_backward(angles, starts, offsets)
    ctx.others = rotation, rotary, rule, list(numbers)


@gradient("rope", _save_rope)
def _(ctx, dq):
    return call(OPS.rope_backward, dq, *ctx.saved_tensors, *ctx.others), *(None,) * 7


@gradient("rope_qk", _save_rope)
def _(ctx, dq, dk):
    return *call(OPS.rope_qk_backward, dq, dk, *ctx.saved_tensors, *ctx.others), *(None,) * 7


def rope(q: Tensor, k: Tensor | None = None, *, angles: Tensor | None = None,
         starts: Tensor | None = None, offsets: Tensor | None = None, rotation: str = "halves",
         rotary: int = 0, rule: str | None = None, base: float = 10000.0, factor: float = 1.0,
         context: float = 8192.0, low: float = 1.0, high: float = 4.0, beta_fast: float = 32.0,
         beta_slow: float = 1.0, scale: float = 0.0) -> Tensor | tuple[Tensor, Tensor]:
    """Rotary position embedding: x cos f + rotated(x) sin f, of q, or of q and k at once.

    q [batch, tokens, heads, features], k the same with its own number of heads; or both [tokens,
    heads, features] of sequences that begin at `offsets` [sequences + 1]. They may be views: the
    kernels take their strides. Results are contiguous.

    angles [positions, rotary] of float32: f of every token's position in its sequence. Without it,
    f is position times a frequency, by rule "base" (the default), "llama3" or "yarn". `starts`
    [batch]: the position of each sequence's first token. `rotary`: features to rotate, 0 for all.
    `rotation`: "halves" (Llama) or "interleaved" (GPT-J). `scale`: factor of sines and cosines, 0
    for the rule's own.
    """
    if rule is None:
        rule = "base" if angles is None else "table"
    arguments = (angles, starts, offsets, rotation, rotary, rule,
                 [base, factor, context, low, high, beta_fast, beta_slow, scale])
    if k is None:
        return call(OPS.rope, q, *arguments)
    return call(OPS.rope_qk, q, k, *arguments)

"""rope: rotary position embedding of queries and keys, wherever they lie."""
import torch
from torch import Tensor

from .._custom import OPS, call
from .._declare import declare
from .._library import Error

NUMBERS = ("base", "factor", "context", "low", "high", "beta-fast", "beta-slow", "scale")
# The numbers of each rule by which angles come about.
USED = {"table": (7,), "base": (0, 1, 7), "llama3": (0, 1, 2, 3, 4, 7), "yarn": (0, 1, 2, 5, 6, 7)}
RULE = f"rule=angles:str, numbers={'|'.join(NUMBERS)}:float[]"
_SHAPES = {**dict.fromkeys(("q", "k", "dq", "dk"), "[..., tokens, heads, features]"),
           "angles": "[positions, rotary]", "starts": "[batch]", "offsets": "[sequences + 1]"}


def expect_rule(op: str, rule: str, angles: Tensor | None) -> None:
    if rule not in USED:
        raise Error(f"{op}: there is no rule '{rule}': give {', '.join(USED)}")
    if (rule == "table") != (angles is not None):
        raise Error(f"{op}: angles are given with rule='table', and only with it")


def leave_out_unused(fields: dict, rule: str) -> None:
    for i, name in enumerate(NUMBERS):
        if i not in USED[rule]:
            fields[name] = None


def _laid(x: Tensor, offsets: Tensor | None) -> tuple:
    """Queries or keys as the kernels read them: features next to each other, rows that do not
    overlap, and on a GPU all at addresses of 16 bytes. Their strides (row, outer, head) are None
    where they are what the library takes for granted."""
    if x.is_contiguous() and not (x.is_cuda and x.data_ptr() & 15):
        return x, None, None, None
    step = 16 // x.element_size() if x.is_cuda else 1
    strides = x.stride()
    if strides[-1] != 1 or any(s < x.shape[-1] or s % step for s in strides[:-1]) or (
            x.is_cuda and x.data_ptr() & 15):
        return x.clone(memory_format=torch.contiguous_format), None, None, None
    return x, strides[-3], None if offsets is not None else strides[0], strides[-2]


def _check(rule, angles, offsets, **given):
    q = given.get("dq", given.get("q"))
    if q.dim() != (3 if offsets is not None else 4):
        raise Error(f"rope: q is {list(q.shape)}: give [batch, tokens, heads, features], or "
                    "[tokens, heads, features] with offsets")
    expect_rule("rope", rule, angles)


def _fill(fields, rule, offsets, **_):
    fields["layout"] = "bshd" if offsets is None else "thd"
    leave_out_unused(fields, rule)


for _name, _of in (("rope", "q"), ("rope_qk", "qk")):
    for _back in (False, True):
        _own = ["d" * _back + t for t in _of]
        declare(_name + "_backward" * _back, "rope",
                ", ".join([f"{t}={t}_out" if _back else t for t in _own])
                + f", angles?, starts:ints?, offsets:ints?, rotation, rotary, {RULE}",
                ", ".join([t if _back else f"{t}={t}_out" for t in _own]), back=_back, shapes=_SHAPES,
                gradient="" if _back else _name + "_backward", check=_check, fill=_fill,
                lays={t: (_laid, [f"{t[-1]}-{s}" for s in ("row", "outer", "head")]) for t in _own})


def rope(q: Tensor, k: Tensor | None = None, *, angles: Tensor | None = None,
         starts: Tensor | None = None, offsets: Tensor | None = None, rotation: str = "halves",
         rotary: int = 0, rule: str | None = None, base: float = 10000.0, factor: float = 1.0,
         context: float = 8192.0, low: float = 1.0, high: float = 4.0, beta_fast: float = 32.0,
         beta_slow: float = 1.0, scale: float = 0.0) -> Tensor | tuple[Tensor, Tensor]:
    """Rotary position embedding: ``x cos f + rotated(x) sin f``.

    Su et al., `RoFormer <https://arxiv.org/abs/2104.09864>`_. Strides are taken as they are: q and k
    may be views. Results are contiguous.

    Args:
        q: Queries, [batch, tokens, heads, features]; with `offsets` [tokens, heads, features], all
            sequences one after the other.
        k: The same with its own number of heads.
        angles: Angle f of each position and feature in radians, float32 [positions, rotary]. Without it f
            is position × frequency, with frequencies by `rule`.
        starts: Position of each sequence's first token, int32 [batch]; 0 by default.
        offsets: Where each sequence begins among the tokens, int32 [sequences + 1].
        rotation: "halves" pairs feature i with i + rotary / 2 (Llama); "interleaved" pairs neighbours
            (GPT-J).
        rotary: Number of features to rotate, the first ones; 0 for all.
        rule: "base" for frequencies ``base^(-2i / rotary)``, "llama3" for those of Llama 3.1, "yarn" for
            `YaRN <https://arxiv.org/abs/2309.00071>`_.
        base: Base of the frequencies.
        factor, context: For "llama3" and "yarn": the factor by which the context is extended, and the
            context length before.
        low, high: For "llama3": its low and high frequency factors.
        beta_fast, beta_slow: For "yarn".
        scale: Factor of sines and cosines; 0 for the rule's own.

    Returns:
        q rotated, or (q, k) with k.
    """
    if rule is None:
        rule = "base" if angles is None else "table"
    arguments = (angles, starts, offsets, rotation, rotary, rule,
                 [base, factor, context, low, high, beta_fast, beta_slow, scale])
    if k is None:
        return call(OPS.rope, q, *arguments)
    return call(OPS.rope_qk, q, k, *arguments)

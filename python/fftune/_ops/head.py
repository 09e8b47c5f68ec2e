"""head and sample: the next ids, from hidden states and from logits."""
import torch
from torch import Tensor

from .._checks import has_sizes, named
from .._custom import OPS, call
from .._declare import declare
from .._library import Error
from .packed import FORMATS, PackedWeight, group_word, has_zeros, parts_of, suffix

_DRAW = "temperature:floats?, seeds:i64?, steps:ints?, top_k:ints?, top_p:floats?, min_p:floats?"

_RESULTS = "ids, logit, logprob?logprobs, best_ids?best, best_logprobs?best"

declare("sample", "sample", f"logits, {_DRAW}, softcap, logprobs:bool, best", _RESULTS, by_row=True)

def _expect_norm(w_norm, b_norm, **_):
    if b_norm is not None and w_norm is None:
        raise Error("head: norm_bias without norm: give both")


declare("head", "head", f"x, w_norm?, b_norm?, w, bias?, {_DRAW}, eps, convention, softcap, logits, "
        "logprobs:bool, best", _RESULTS, check=_expect_norm)
declare("head_logits", "head", "x, w_norm?, b_norm?, w, bias?, eps, convention, logits", "y=logits",
        fixed={"choose": "none"}, check=_expect_norm)
for _format in FORMATS:
    _weight = f"w_norm?, b_norm?, w, scale=w_scale, {'zero=w_zero?, ' if has_zeros(_format) else ''}bias?"
    declare(f"head_packed{suffix(_format)}", "head", f"x, {_weight}, {_DRAW}, vocab, group, eps, convention, "
            "softcap, logits, logprobs:bool, best", _RESULTS, fixed={"weights": _format}, label="head",
            check=_expect_norm)
    declare(f"head_logits_packed{suffix(_format)}", "head", f"x, {_weight}, vocab, group, eps, convention, "
            "logits", "y=logits", fixed={"choose": "none", "weights": _format}, label="head", check=_expect_norm)


def _per_row(label: str, name: str, value, like: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Error(f"{label}: {name} is {value!r}: give a number, or a tensor of one for each row")
    if not isinstance(like, Tensor):
        raise Error(f"{label}: the rows are {named(like)}: give a tensor [..., features]")
    try:
        return torch.full(like.shape[:-1], value, dtype=dtype, device=like.device)
    except (OverflowError, RuntimeError):
        raise Error(f"{label}: {name} is {value}: give a number of {dtype}, or a tensor of one for "
                    "each row") from None


def _draw(label: str, rows: Tensor, temperature, seeds, steps, top_k, top_p, min_p) -> tuple:
    filters = top_k, top_p, min_p
    if temperature is None:
        for name, value in zip(("seeds", "steps", "top_k", "top_p", "min_p"), (seeds, steps, *filters)):
            if value is not None:
                raise Error(f"{label}: {name} without temperature: give temperature, 1.0 for example")
        return (None,) * 6
    draw = [_per_row(label, "temperature", temperature, rows, torch.float32),
            _per_row(label, "seeds", 0 if seeds is None else seeds, rows, torch.int64),
            _per_row(label, "steps", 0 if steps is None else steps, rows, torch.int32)]
    if all(value is None for value in filters):
        return *draw, None, None, None
    return (*draw, _per_row(label, "top_k", 0 if top_k is None else top_k, rows, torch.int32),
            _per_row(label, "top_p", 1.0 if top_p is None else top_p, rows, torch.float32),
            _per_row(label, "min_p", 0.0 if min_p is None else min_p, rows, torch.float32))


def _given(logprobs: bool, best: int, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results that were asked for."""
    ids, logit, logprob, *of_best = results
    return (ids, logit, *((logprob,) if logprobs else ()), *(of_best if best else ()))


def sample(logits: Tensor, temperature: Tensor | float | None = None, *,
           seeds: Tensor | int | None = None, steps: Tensor | int | None = None,
           top_k: Tensor | int | None = None, top_p: Tensor | float | None = None,
           min_p: Tensor | float | None = None, softcap: float = 0.0, logprobs: bool = False,
           best: int = 0) -> tuple[Tensor, ...]:
    """Next id of each row of logits: the best, or a sample of ``softmax(logits / temperature)``.

    The same logits, seeds and steps give the same ids in every run and on every device. A sequence has
    one seed and counts its steps. `temperature`, `top_k`, `top_p`, `min_p`, `seeds` and `steps` are
    numbers for all rows, or tensors [...].

    Args:
        logits: [..., vocab].
        temperature: None, or 0 and less in a row, for the id of the largest logit, the first of equal
            ones.
        seeds: int64.
        steps: int32, the number of ids drawn with a seed before.
        top_k: Keep the ids of the k largest logits. The filters are applied in the order top_k, top_p,
            min_p, as in transformers, but ids of equal logits are kept or dropped together.
        top_p: Keep the most probable ids whose probabilities add up to this (`nucleus sampling
            <https://arxiv.org/abs/1904.09751>`_).
        min_p: Keep ids with at least this share of the best id's probability
            (`min-p <https://arxiv.org/abs/2407.01082>`_).
        softcap: If not 0, logits become ``softcap · tanh(logits / softcap)``.
        logprobs: Also return log-probabilities.
        best: Also return as many ids with the largest logits, at most 64, and their log-probabilities.

    Returns:
        (ids, logit), int32 and float32 [...]; with `logprobs` also the log-probability of the id by
        ``log_softmax(logits)``, float32 [...]; with `best` also the best ids in descending order,
        int32 [..., best], and their log-probabilities, float32 [..., best].
    """
    return _given(logprobs, best, call(
        OPS.sample, logits, *_draw("sample", logits, temperature, seeds, steps, top_k, top_p, min_p),
        softcap, logprobs, best))


def head(x: Tensor, w: Tensor, norm: Tensor | None = None, *, norm_bias: Tensor | None = None,
         bias: Tensor | None = None, eps: float = 1e-6, convention: str = "llama",
         temperature: Tensor | float | None = None, seeds: Tensor | int | None = None,
         steps: Tensor | int | None = None, top_k: Tensor | int | None = None,
         top_p: Tensor | float | None = None, min_p: Tensor | float | None = None,
         softcap: float = 0.0, logits: str = "same", logprobs: bool = False, best: int = 0
         ) -> tuple[Tensor, ...]:
    """Next ids of hidden states: final norm, logits ``norm(x) wᵀ + bias``, and their choice by `sample`.

    For up to 16 tokens without top_k, top_p, min_p and best no logits are written to memory.

    Args:
        x: Hidden states, [..., d].
        w: Weight of the head, [vocab, d], or a ``PackedWeight``.
        norm: Weight of a final RMSNorm, [d]; with `norm_bias` of a layer normalisation. None: no norm.
        norm_bias: [d].
        bias: [vocab].
        eps, convention: Settings of the norm, as in `rmsnorm`.
        temperature, seeds, steps, top_k, top_p, min_p, softcap, logprobs, best: As in `sample`.
        logits: "same" rounds logits to x's element type before the choice, "f32" does not.

    Returns:
        As `sample`.
    """
    name, weight, sizes = _weight_of("head", x, w)
    return _given(logprobs, best, call(
        getattr(OPS, name), x, norm, norm_bias, *weight, bias,
        *_draw("head", x, temperature, seeds, steps, top_k, top_p, min_p), *sizes,
        *_norm_options(norm, eps, convention), softcap, logits, logprobs, best))


def head_logits(x: Tensor, w: Tensor, norm: Tensor | None = None, *, norm_bias: Tensor | None = None,
                bias: Tensor | None = None, eps: float = 1e-6, convention: str = "llama",
                logits: str = "same") -> Tensor:
    """The logits of `head`.

    Args:
        x, w, norm, norm_bias, bias, eps, convention: As in `head`.
        logits: "same" for logits of x's element type, "f32" for float32.

    Returns:
        [..., vocab].
    """
    name, weight, sizes = _weight_of("head_logits", x, w)
    return call(getattr(OPS, name), x, norm, norm_bias, *weight, bias, *sizes,
                *_norm_options(norm, eps, convention), logits)


def _weight_of(name: str, x: Tensor, w: Tensor | PackedWeight) -> tuple[str, tuple, tuple]:
    """The op, the tensors of the weight, and what a packed one has beside them."""
    if not isinstance(w, PackedWeight):
        return name, (w,), ()
    if has_sizes(x) and x.dim() and x.shape[-1] != w.k:
        raise Error(f"head: w is a packed weight [{w.n}, {w.k}]: give one of [vocab, {x.shape[-1]}]")
    return f"{name}_packed{suffix(w.format)}", parts_of(w), (w.n, group_word("head", w.group, w.format))


def _norm_options(norm, eps, convention) -> tuple[float, str]:
    # Without a norm the library takes no options of one.
    return (eps, convention) if norm is not None else (1e-6, "llama")

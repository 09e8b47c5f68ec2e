"""head and sample: the next ids, from hidden states and from logits."""
import torch
from torch import Tensor

from .._checks import named
from .._custom import OPS, call
from .._declare import declare
from .._library import Error

_DRAW = "temperature:floats?, seeds:i64?, steps:ints?, top_k:ints?, top_p:floats?, min_p:floats?"

declare("sample", "sample", f"logits, {_DRAW}, softcap, logprobs:bool",
        "ids, logit, logprob?logprobs", by_row=True)
declare("head", "head", f"x, w_norm?, b_norm?, w, bias?, {_DRAW}, eps, convention, softcap, logits, "
        "logprobs:bool", "ids, logit, logprob?logprobs")
declare("head_logits", "head", "x, w_norm?, b_norm?, w, bias?, eps, convention, logits", "y=logits",
        fixed={"choose": "none"})


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


def sample(logits: Tensor, temperature: Tensor | float | None = None, *,
           seeds: Tensor | int | None = None, steps: Tensor | int | None = None,
           top_k: Tensor | int | None = None, top_p: Tensor | float | None = None,
           min_p: Tensor | float | None = None, softcap: float = 0.0, logprobs: bool = False
           ) -> tuple[Tensor, ...]:
    """(ids, logit), or (ids, logit, logprob) with `logprobs`: the next id of each row of `logits`
    [..., vocab], its logit, and the log-probability that log_softmax gives it.

    Without `temperature`, the id of the largest logit; of equal ones the first. With it, a sample of
    softmax(logits / temperature), or the best id in rows where it is not above 0. `top_k`,
    `top_p` and `min_p` filter the ids first, as transformers' processors do in that order, but ids of
    equal logits stay together. All of these are numbers, or tensors [...].

    The same `seeds` (int64) and `steps` (int32) draw the same ids in every run and on every device.
    A sequence has one seed and counts its steps. `softcap`: logits are softcap · tanh(logits /
    softcap). Returns int32 and float32 [...].
    """
    ids, logit, logprob = call(
        OPS.sample, logits, *_draw("sample", logits, temperature, seeds, steps, top_k, top_p, min_p),
        softcap, logprobs)
    return (ids, logit, logprob) if logprobs else (ids, logit)


def head(x: Tensor, w: Tensor, norm: Tensor | None = None, *, norm_bias: Tensor | None = None,
         bias: Tensor | None = None, eps: float = 1e-6, convention: str = "llama",
         temperature: Tensor | float | None = None, seeds: Tensor | int | None = None,
         steps: Tensor | int | None = None, top_k: Tensor | int | None = None,
         top_p: Tensor | float | None = None, min_p: Tensor | float | None = None,
         softcap: float = 0.0, logits: str = "same", logprobs: bool = False) -> tuple[Tensor, ...]:
    """The next ids of hidden states x [..., d]: `sample` of the logits norm(x)·wᵀ (+ bias), with its
    arguments and results.

    `w` [vocab, d]; `norm` [d]: the weights of a final RMSNorm with `eps` and `convention`, as
    `rmsnorm` has them; with `norm_bias` [d] of a layer normalisation; without `norm` there is none.
    Logits are rounded to x's type before ids are chosen, or with logits="f32" not. For up to 16
    tokens without top_k, top_p and min_p no logit reaches memory.
    """
    ids, logit, logprob = call(
        OPS.head, x, norm, norm_bias, w, bias,
        *_draw("head", x, temperature, seeds, steps, top_k, top_p, min_p),
        *_norm_options(norm, eps, convention), softcap, logits, logprobs)
    return (ids, logit, logprob) if logprobs else (ids, logit)


def head_logits(x: Tensor, w: Tensor, norm: Tensor | None = None, *, norm_bias: Tensor | None = None,
                bias: Tensor | None = None, eps: float = 1e-6, convention: str = "llama",
                logits: str = "same") -> Tensor:
    """The logits of `head`, [..., vocab], of x's type or with logits="f32" in float32."""
    return call(OPS.head_logits, x, norm, norm_bias, w, bias, *_norm_options(norm, eps, convention),
                logits)


def _norm_options(norm, eps, convention) -> tuple[float, str]:
    # Without a norm the library takes no options of one.
    return (eps, convention) if norm is not None else (1e-6, "llama")

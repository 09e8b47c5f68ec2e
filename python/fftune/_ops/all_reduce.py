"""all-reduce: the sum over the ranks of a group, the residual and RMSNorm behind it."""
from torch import Tensor

from .._checks import named
from .._custom import OPS, call, wants_gradient
from .._declare import declare
from .._library import Error
from ..distributed import Group

# The group's memory counts collectives, but is not declared as written: where a compiler copied what
# an op writes to, the kernels would find the group's own by the table in it (base[rank]). As in
# PyTorch's functional collectives, compilers may merge equal calls: all ranks do.
declare("all_reduce", "all-reduce", "x, residual?, memory=group, ranks, link", "y",
        fixed={"norm": "none"})
declare("all_argmax", "all-argmax", "ids, logit, memory=group, vocab, ranks", "best_ids, best_logit",
        fixed={"link": "peers"})
declare("all_reduce_norm", "all-reduce", "x, residual?, w, memory=group, ranks, link, eps, convention=norm",
        "y, sum?residual")
declare("all_reduce_norm_fp8", "all-reduce",
        "x, residual?, w, memory=group, ranks, link, eps, convention=norm", "y, scale, sum?residual",
        fixed={"output": "fp8"})
declare("all_reduce_norm_static", "all-reduce",
        "x, residual?, w, scale=y_scale, memory=group, ranks, link, eps, convention=norm",
        "y, sum?residual", fixed={"output": "fp8-static"})


def memory_of(op: str, group: Group, x: Tensor, elements: int) -> tuple[Tensor, str]:
    """The group's memory, and its link for that many elements of x's type."""
    if not isinstance(group, Group):
        raise Error(f"{op}: group is {named(group)}: give a fftune.distributed.Group")
    group.expect_open()
    link = group.link(op, elements * x.element_size())
    return group.memory.to("meta") if x.is_meta else group.memory, link


def _memory_of(group: Group, x: Tensor, *others: Tensor | None) -> tuple[Tensor, str]:
    if not isinstance(x, Tensor):
        raise Error(f"all-reduce: x is {named(x)}: give a tensor [..., d]")
    memory, link = memory_of("all-reduce", group, x, x.numel())
    if wants_gradient(x, *others):
        raise Error("all-reduce: it has no gradient: call it under torch.no_grad() or "
                    "torch.inference_mode(), or use torch.distributed.nn")
    return memory, link


def _check_convention(convention: str) -> None:
    if not isinstance(convention, str) or convention not in ("llama", "gemma", "t5"):
        raise Error(f"all-reduce: convention is {named(convention)}: use 'llama', 'gemma' or 't5'")


def all_reduce(x: Tensor, *, group: Group, residual: Tensor | None = None) -> Tensor:
    """The sum of x over the ranks of a group, plus the residual.

    Args:
        x: This rank's summand, [..., d].
        group: A `fftune.distributed.Group`.
        residual: [..., d], the same on all ranks.

    Returns:
        [..., d], the same bits on all ranks.
    """
    memory, link = _memory_of(group, x, residual)
    return call(OPS.all_reduce, x, residual, memory, group.ranks, link)


def all_reduce_norm(x: Tensor, w: Tensor, *, group: Group, residual: Tensor | None = None,
                    eps: float = 1e-6, convention: str = "llama") -> tuple[Tensor, Tensor] | Tensor:
    """The sum of x over the ranks of a group, plus the residual, and its RMSNorm, in one kernel.

    Args:
        x, group, residual: As in `all_reduce`.
        w: The norm's weight, [d].
        eps, convention: As in `rmsnorm`.

    Returns:
        (the norm, the sum), [..., d] each; the norm alone without a residual.
    """
    _check_convention(convention)
    memory, link = _memory_of(group, x, residual, w)
    y, total = call(OPS.all_reduce_norm, x, residual, w, memory, group.ranks, link, eps, convention)
    return y if residual is None else (y, total)


def all_reduce_norm_quantised(x: Tensor, w: Tensor, *, group: Group, residual: Tensor | None = None,
                              scale: Tensor | None = None, eps: float = 1e-6,
                              convention: str = "llama"
                              ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """`all_reduce_norm` whose result is quantised to fp8 (e4m3).

    Args:
        x, w, group, residual, eps, convention: As in `all_reduce_norm`.
        scale: float32 [1], of all rows and the same on all ranks; None: each row has its own, which
            maps the row's largest magnitude to 448.

    Returns:
        (q, scale), or (q, scale, sum) with a residual. The norm is ``q * scale``; scale is the given
        one, or float32 [...].
    """
    _check_convention(convention)
    memory, link = _memory_of(group, x, residual, w)
    if scale is None:
        results = call(OPS.all_reduce_norm_fp8, x, residual, w, memory, group.ranks, link, eps, convention)
    else:
        q, total = call(OPS.all_reduce_norm_static, x, residual, w, scale, memory, group.ranks, link, eps,
                        convention)
        results = (q, scale, total)
    return results[:2] if residual is None else results


def all_argmax(ids: Tensor, logit: Tensor, vocab: int, *, group: Group) -> tuple[Tensor, Tensor]:
    """The best of the ids that the ranks of a group chose, each from its slice of the vocabulary.

    Args:
        ids: int32 [batch], this rank's choice within its slice.
        logit: float32 [batch], the logit of each.
        vocab: Number of ids of a rank's slice, the same on all ranks.
        group: A `fftune.distributed.Group`.

    Returns:
        (ids, logit): ids of the whole vocabulary, ``rank * vocab + ids``, and their logits. The
        lowest rank's is the best of equal logits.
    """
    if not isinstance(logit, Tensor):
        raise Error(f"all-argmax: logit is {named(logit)}: give a tensor [batch]")
    memory, link = memory_of("all-argmax", group, logit, 2 * logit.numel())
    if link != "peers":
        raise Error("all-argmax: the group's ranks do not reach each other's memory for this: choose "
                    "from whole logits")
    return call(OPS.all_argmax, ids, logit, memory, vocab, group.ranks)

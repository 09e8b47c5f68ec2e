"""cross_entropy, of logits, and linear_cross_entropy, of hidden states and the head's weights."""
import torch
from torch import Tensor

from .._checks import expect_one_device, expect_tensor, expect_tensors, flag, has_sizes, named
from .._custom import OPS, _dispatch_modes, _functorch_level, call, gradient, rows, wants_gradient
from .._declare import declare
from .._library import Error
from .._versions import is_transformed, keeps_graph
from .elementwise import scale_

_LABELS = "labels, class_weights?, items"
_ROW_LABELS = "labels, class_weights?"
_RULES = "ignore_index, label_smoothing, z_loss, softcap"
_EXTRAS = "logprobs:bool, entropies=entropy:bool"
_RESULTS = "loss, lse, logprob?logprobs, entropy?entropies"
_MEAN, _NONE = {"reduction": "mean"}, {"reduction": "none"}

for _end, _labels, _fixed, _slice in (("", _LABELS, _MEAN, ""), ("_rows", _ROW_LABELS, _NONE, ""),
                                      ("_slice", "labels", _NONE, ", slice_of")):
    _rules = _RULES + _slice
    declare(f"cross_entropy{_end}", "cross-entropy",
            f"logits, {_labels}, {_rules}, {_EXTRAS}", _RESULTS, fixed=_fixed,
            gradient="" if _slice else f"cross_entropy{_end}_backward")
    declare(f"cross_entropy{_end}_backward", "cross-entropy",
            f"dloss, logits, {_labels}, lse, {_rules}", "dlogits", back=True, fixed=_fixed)

    _given = f"x, w, bias?, {_labels}, {_rules}, workspace"
    _back = f"dloss, x, w, bias?, {_labels}, lse, {_rules}, workspace"
    declare(f"linear_cross_entropy{_end}", "linear-cross-entropy", f"{_given}, {_EXTRAS}", _RESULTS,
            fixed=_fixed, casts=not _slice, keeps=() if _slice else ("class_weights", "items"))
    declare(f"linear_cross_entropy{_end}_backward", "linear-cross-entropy", _back,
            "dx, dw, dbias?bias", back=True, fixed=_fixed)
    declare(f"linear_cross_entropy{_end}_frozen_backward", "linear-cross-entropy", _back, "dx",
            back=True, fixed={**_fixed, "frozen": "yes"})


_GIVEN = f"x, w, bias?, {_LABELS}, {_RULES}, workspace, {_EXTRAS}"
declare("linear_cross_entropy_gradients", "linear-cross-entropy", _GIVEN,
        f"{_RESULTS}, dx, dw, dbias?bias", fixed={**_MEAN, "gradients": "yes"}, casts=True,
        keeps=("class_weights", "items"))
declare("linear_cross_entropy_gradients_frozen", "linear-cross-entropy", _GIVEN,
        f"{_RESULTS}, dx", fixed={**_MEAN, "gradients": "yes", "frozen": "yes"}, casts=True,
        keeps=("class_weights", "items"))


def _differentiate_again(end: str, count: int) -> None:
    """The gradient of the op that keeps the log-sum-exp; `count` tensors begin its arguments."""
    def save(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:count], output[1])
        ctx.rules = inputs[count:count + 5]

    @gradient(f"linear_cross_entropy{end}", save)
    def _(ctx, dloss, *_):
        x, *tensors, lse = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rest = (None,) * (len(needs) - 3)
        if dloss is None:
            return None, None, None, *rest
        name, arguments = f"linear_cross_entropy{end}", (dloss, x, *tensors, lse, *ctx.rules)
        if not needs[1] and not needs[2]:
            return call(getattr(OPS, f"{name}_frozen_backward"), *arguments), None, None, *rest
        dx, dw, dbias = call(getattr(OPS, f"{name}_backward"), *arguments)
        return dx, dw, dbias if needs[2] else None, *rest


_differentiate_again("", 6)
_differentiate_again("_rows", 5)


def _differentiate_scaled(name: str) -> None:
    """The gradient of an op that has computed gradients for a loss whose own is 1."""
    def save(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.count = len(output) - 4
        # The inputs too, so that a second derivative is seen to be one.
        ctx.save_for_backward(*output[4:], *inputs[:3])

    @gradient(name, save)
    def _(ctx, dloss, *_):
        needs = ctx.needs_input_grad
        if dloss is None:
            return (None,) * len(needs)
        # In place where nobody comes again, as that of w is as large as w, and without a pass over it
        # where dloss is 1. In float32 before the one rounding: dloss is no scalar, which would be
        # rounded first.
        saved = ctx.saved_tensors[:ctx.count]
        keeps = (keeps_graph() or _dispatch_modes() or _functorch_level() is not None
                 or any(map(is_transformed, saved)))
        made = [None if not needs[i] else (g * dloss).to(g.dtype) if keeps else scale_(g, dloss)
                for i, g in enumerate(saved)]
        return *made, *(None,) * (len(needs) - len(made))


class _Into(torch.autograd.Function):
    """A weight whose gradient is added to a tensor, instead of going on to the weight."""

    @staticmethod
    def forward(ctx, w, into):
        ctx.into = into
        return w.view_as(w)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dw):
        ctx.into.add_(dw)  # in the wider of both types
        return None, None


def _accumulated(label: str, w: Tensor, into: Tensor | None) -> Tensor:
    if into is None:
        return w
    plain = all(has_sizes(t) and t.layout is torch.strided for t in (into, w))
    if not plain or into.shape != w.shape or into.dtype not in (w.dtype, torch.float32) \
            or into.device != w.device or into.requires_grad:
        raise Error(f"{label}: into is {named(into)}: give a tensor like w, or float32, without a gradient")
    return _Into.apply(w, into) if wants_gradient(w) else w


_differentiate_scaled("linear_cross_entropy_gradients")
_differentiate_scaled("linear_cross_entropy_gradients_frozen")


def _ids_of(given: tuple) -> int:
    """The number of ids, from logits or from hidden states, weights and bias."""
    return given[1].shape[0] if len(given) > 1 else given[0].shape[-1]


class _OfSlices(torch.autograd.Function):
    """Losses of rows from the slices of the vocabulary that the ranks of a group have, and the results
    lse, logprob and entropy. `given` are a slice's logits, or hidden states, weights and bias."""

    @staticmethod
    def forward(ctx, name, labels, vocab_slice, group, smoothing, z_loss, softcap, workspace, *given):
        whole = vocab_slice[1]
        rules = -100, smoothing, z_loss, softcap, float(whole), *workspace
        loss, lse, logprob, entropy = call(getattr(OPS, f"{name}_slice"), *given, labels, -100, smoothing, 0.0,
                                           *rules[3:], True, True)
        ids = _ids_of(given)
        here = (labels >= 0) & (labels < ids)
        # The term of smoothing without the log-sum-exp, which all slices together have once.
        smooth = loss + (1 - smoothing) * logprob - smoothing * ids / whole * lse if smoothing else loss
        own = torch.stack((lse, logprob, here.float(), smooth, entropy))
        count = torch.distributed.get_world_size(group)
        parts = own.new_empty(count, *own.shape)
        torch.distributed.all_gather(list(parts), own, group=group)
        each_lse, each_logprob, each_here, each_smooth, each_entropy = parts.unbind(1)
        counts = labels != -100
        zero = lse.new_zeros(())
        lse = torch.where(counts, each_lse.logsumexp(0), zero)
        # Slices of -infinity alone have no share, and the difference of two of these is none.
        share = (each_lse - lse).exp()
        logprob = torch.where(each_here > 0, each_logprob + (each_lse - lse), zero).sum(0)
        entropy = lse - torch.where(share > 0, share * (each_lse - each_entropy), zero).sum(0)
        loss = -(1 - smoothing) * logprob + z_loss * lse * lse
        if smoothing:
            loss = loss + smoothing * lse + each_smooth.sum(0)
        results = [torch.where(counts, t, zero) for t in (loss, lse, logprob, entropy)]
        ctx.name, ctx.group, ctx.rules = name, group, rules
        ctx.save_for_backward(*given, labels, results[1])
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss, *_):
        nothing = (None,) * 8
        *given, labels, lse = ctx.saved_tensors
        if dloss is None:
            return *nothing, *(None for _ in given)
        needs = ctx.needs_input_grad[8:]
        frozen = len(given) > 1 and not needs[1] and not needs[2]
        op = getattr(OPS, f"{ctx.name}_slice{'_frozen' if frozen else ''}_backward")
        made = call(op, dloss.float().contiguous(), *given, labels, lse, *ctx.rules)
        made = [made] if isinstance(made, Tensor) else list(made)
        if len(given) > 1 and needs[0]:  # each slice has its part of the gradient of x
            torch.distributed.all_reduce(made[0], group=ctx.group)
        made += [None] * (len(given) - len(made))
        return *nothing, *(g if need else None for g, need in zip(made, needs))


def _of_slices(name: str, label: str, given: tuple, labels: Tensor, vocab_slice, group, reduction, items,
               class_weights, ignore_index, smoothing, z_loss, softcap, workspace=()):
    """The results of the op for a vocabulary whose slices the ranks of a group have."""
    ids = _ids_of(given)
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise Error(f"{label}: vocab_slice without processes: call torch.distributed.init_process_group")
    whole_numbers = isinstance(vocab_slice, (tuple, list)) and len(vocab_slice) == 2 and all(
        isinstance(n, int) and not isinstance(n, bool) for n in vocab_slice)
    if not whole_numbers or not 0 <= vocab_slice[0] <= vocab_slice[1] - ids:
        raise Error(f"{label}: vocab_slice is {vocab_slice!r} and the slice has {ids} ids: give its first "
                    "id, and the number of ids of the vocabulary")
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        raise Error(f"{label}: labels is {named(labels)}: give a tensor of int64")
    first, whole = vocab_slice
    _expect_class_weights(label, class_weights)
    if class_weights is not None and (smoothing or z_loss):
        raise Error(f"{label}: vocab_slice with class_weights, and label_smoothing or z_loss: leave one out")
    ignored = labels == ignore_index
    inside = (labels >= first) & (labels < first + ids)
    of_slice = torch.where(inside, labels - first, ids).masked_fill(ignored, -100)
    device = given[0].device.type
    if len(given) > 1 and torch.is_autocast_enabled(device):
        given = tuple(None if t is None else t.to(torch.get_autocast_dtype(device)) for t in given)
    loss, *more = _OfSlices.apply(name, of_slice, tuple(vocab_slice), group, float(smoothing),
                                  float(z_loss), float(softcap), workspace, *given)
    known = (labels >= 0) & (labels < whole)
    if class_weights is not None:
        loss = loss * class_weights[labels.masked_fill(~known, 0)]
    factor = torch.where(known | ignored, 1.0, torch.nan)
    loss, *more = (t * factor for t in (loss, *more))
    if reduction == "none":
        return loss, *more
    divisor = _items(label, items, labels, class_weights, ignore_index, reduction)
    return loss.sum() / divisor, *more


def _expect_class_weights(label: str, class_weights) -> None:
    """Error where they are none that the op takes; those of float64 are the references'."""
    if not isinstance(class_weights, Tensor) or class_weights.dtype is not torch.float64:
        expect_tensors(label, OPS.cross_entropy.kinds, class_weights=class_weights)


def _items(label: str, items, labels, class_weights, ignore_index, reduction) -> Tensor:
    """The divisor of the sum of the losses, as a tensor of one number."""
    expect_tensor(label, "labels", labels)
    if isinstance(items, Tensor):
        expect_tensor(label, "items", items)
        if items.numel() != 1 or items.is_complex() or items.dtype is torch.bool:
            raise Error(f"{label}: items is {named(items)}: give one number")
        return items.to(labels.device, torch.float32).reshape(1)
    if items is None and reduction == "sum":
        items = 1.0
    if items is not None:
        if isinstance(items, bool) or not isinstance(items, (int, float)):
            raise Error(f"{label}: items is {named(items)}: give a number, or a tensor of one")
        return torch.full((1,), float(items), device=labels.device)
    counts = labels != ignore_index
    if class_weights is None:
        return counts.sum().to(torch.float32).reshape(1)
    _expect_class_weights(label, class_weights)
    if class_weights.dim() != 1 or not class_weights.numel() \
            or class_weights.device != labels.device or labels.dtype != torch.int64:
        return torch.ones(1, device=labels.device)  # the op says what is wrong
    ids = labels.clamp(0, class_weights.numel() - 1).flatten()
    return torch.where(counts.flatten(), class_weights.index_select(0, ids), 0.0).float().sum(
        ).reshape(1)


def _of_any(labels: Tensor, divisor: Tensor, results: tuple) -> tuple:
    """The results; the loss of no rows is 0 / items, which the op, as it has no work, does not divide."""
    if labels.numel():
        return results
    return results[0] + (0.0 / divisor).reshape(()), *results[1:]


def _expect_rows(label: str, x: Tensor, labels: Tensor) -> None:
    """That each row of x has a label, before those that are ignored are left out."""
    expect_tensor(label, "x", x)
    expect_tensor(label, "labels", labels)
    expect_one_device(label, (x, labels))
    if not x.dim() or labels.dtype != torch.int64 or labels.shape != x.shape[:-1]:
        raise Error(f"{label}: x is {list(x.shape)}, labels {named(labels)}: give [..., d], and int64 [...]")


def _expect_rules(label: str, reduction, items, class_weights, ignore_index, **flags) -> None:
    for name, tensor in ("class_weights", class_weights), ("items", items):
        if wants_gradient(tensor):
            raise Error(f"{label}: {name} has no gradient: detach it")
    for name, value in flags.items():
        flag(label, name, value)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, float)) or not (
            abs(ignore_index) <= 2**30):
        raise Error(f"{label}: ignore_index is {named(ignore_index)}: give a number of at most 2**30")
    if not isinstance(reduction, str) or reduction not in ("none", "sum", "mean"):
        raise Error(f"{label}: reduction is {named(reduction)}: give none, sum or mean")
    if items is not None and reduction != "mean":
        raise Error(f"{label}: items with reduction={reduction!r}: the loss is divided by items with "
                    "reduction=\"mean\"")


def _selected(results, reduction: str, lse: bool, logprobs: bool, entropy: bool):
    loss, *more = results[:4]
    loss = loss if reduction == "none" else loss.reshape(())
    extras = [t for t, wanted in zip(more, (lse, logprobs, entropy)) if wanted]
    return (loss, *extras) if extras else loss


def cross_entropy(logits: Tensor, labels: Tensor, *, reduction: str = "mean",
                  items: Tensor | float | None = None, class_weights: Tensor | None = None,
                  ignore_index: int | float = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
                  softcap: float = 0.0, lse: bool = False, logprobs: bool = False,
                  entropy: bool = False, vocab_slice: tuple[int, int] | None = None,
                  group: "torch.distributed.ProcessGroup | None" = None) -> Tensor | tuple[Tensor, ...]:
    """Cross-entropy of logits and labels, as ``torch.nn.functional.cross_entropy``, in float32.

    Args:
        logits: [..., vocab].
        labels: int64 [...]. A label outside of the vocabulary makes its row's loss NaN.
        reduction: "none" for a loss per row, "sum" for their sum, "mean" for the sum divided by `items`.
        items: Divisor of "mean". By default the number of rows that count, or the sum of their class
            weights.
        class_weights: float32 [vocab].
        ignore_index: Rows with this label have loss 0 and no gradient.
        label_smoothing: Share of the uniform distribution in the target, in [0, 1].
        z_loss: Factor of the squared log-sum-exp that is added to each row's loss (`PaLM
            <https://arxiv.org/abs/2204.02311>`_).
        softcap: If not 0, logits become ``softcap · tanh(logits / softcap)``.
        lse: Also return the log-sum-exp of each row.
        logprobs: Also return the log-probability of each row's label.
        entropy: Also return the entropy of each row's distribution.
        vocab_slice: The logits are those of a slice of the vocabulary, and the ranks of `group` have the
            other slices: (first id of the slice, ids of the vocabulary). All ranks have the same labels
            and get the same loss; each computes the gradient of its own logits.
        group: A process group of torch.distributed; all processes by default.

    Returns:
        The loss, float32, a scalar or [...]; with `lse`, `logprobs` or `entropy` a tuple of the loss and
        these, float32 [...] each, in this order and without gradients. The gradient of a log-probability
        is the negative one of a loss with ``reduction="none"``.
    """
    _expect_rules("cross-entropy", reduction, items, class_weights, ignore_index, lse=lse, logprobs=logprobs,
                  entropy=entropy)
    rules = ignore_index, label_smoothing, z_loss, softcap, logprobs, entropy
    if vocab_slice is not None:
        results = _of_slices("cross_entropy", "cross-entropy", (logits,), labels, vocab_slice, group,
                             reduction, items, class_weights, *rules[:4])
    elif reduction == "none":
        results = call(OPS.cross_entropy_rows, logits, labels, class_weights, *rules)
    else:
        divisor = _items("cross-entropy", items, labels, class_weights, ignore_index, reduction)
        results = _of_any(labels, divisor, call(OPS.cross_entropy, logits, labels, class_weights, divisor,
                                                *rules))
    return _selected(results, reduction, lse, logprobs, entropy)


def linear_cross_entropy(x: Tensor, w: Tensor, labels: Tensor, bias: Tensor | None = None, *,
                         reduction: str = "mean", items: Tensor | float | None = None,
                         class_weights: Tensor | None = None, ignore_index: int | float = -100,
                         label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
                         lse: bool = False, logprobs: bool = False, entropy: bool = False,
                         workspace: float = 512, recompute: bool = False,
                         skip_ignored: bool = False, into: Tensor | None = None,
                         vocab_slice: tuple[int, int] | None = None,
                         group: "torch.distributed.ProcessGroup | None" = None) -> Tensor | tuple[Tensor, ...]:
    """`cross_entropy` of the logits ``x wᵀ + bias``, without all logits in memory.

    Rows are computed in chunks. Logits are rounded to x's element type, as those of a linear layer are.
    The forward pass computes the gradients of x, w and bias too, and the backward pass multiplies them
    by the gradient of the loss. With `recompute`, and with ``reduction="none"``, the backward pass
    computes the logits again instead, from the log-sum-exp: a third more work, and no gradients in memory
    in between.

    Args:
        x: Hidden states, [..., d].
        w: Weight of the head, [vocab, d].
        labels: int64 [...].
        bias: [vocab].
        reduction, items, class_weights, ignore_index, label_smoothing, z_loss, softcap, lse, logprobs,
            entropy: as in `cross_entropy`.
        workspace: Most MiB that a chunk's logits take.
        recompute: Compute the logits again in the backward pass.
        skip_ignored: Leave out rows whose label is `ignore_index`. The host waits for their number.
        into: A tensor like w, of w's element type or float32, that the backward pass adds the gradient of
            w to, in place. w itself then gets none from here: float32 keeps what many small batches add.
        vocab_slice, group: As in `cross_entropy`; w and bias are those of the slice. All ranks have the same
            x. The backward pass computes the logits again, and sums the gradient of x over the ranks.

    Returns:
        As `cross_entropy`.
    """
    label = "linear-cross-entropy"
    _expect_rules(label, reduction, items, class_weights, ignore_index, lse=lse, logprobs=logprobs, entropy=entropy,
                  recompute=recompute)
    if flag(label, "skip_ignored", skip_ignored):
        if reduction == "none" or lse or logprobs or entropy:
            raise Error(f"{label}: skip_ignored with results for each row: leave it out, or give "
                        "reduction=\"mean\" or \"sum\" alone")
        _expect_rows(label, x, labels)
        index = (labels.reshape(-1) != ignore_index).nonzero().flatten()
        labels = labels.reshape(-1).index_select(0, index)
        x = rows(x).index_select(0, index)
    w = _accumulated(label, w, into)
    rules = ignore_index, label_smoothing, z_loss, softcap, workspace, logprobs, entropy
    if vocab_slice is not None:
        results = _of_slices("linear_cross_entropy", label, (x, w, bias), labels, vocab_slice, group,
                             reduction, items, class_weights, *rules[:4], (workspace,))
    elif reduction == "none":
        results = call(OPS.linear_cross_entropy_rows, x, w, bias, labels, class_weights, *rules)
    else:
        divisor = _items(label, items, labels, class_weights, ignore_index, reduction)
        if recompute or not wants_gradient(x, w, bias):
            op = OPS.linear_cross_entropy
        elif wants_gradient(w, bias):
            op = OPS.linear_cross_entropy_gradients
        else:
            op = OPS.linear_cross_entropy_gradients_frozen
        results = _of_any(labels, divisor, call(op, x, w, bias, labels, class_weights, divisor, *rules))
    return _selected(results, reduction, lse, logprobs, entropy)

"""cross_entropy."""
import math

import torch
import torch.nn.functional as F

from .common import _rows


def _capped(logits, softcap):
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    return softcap * torch.tanh(wide / softcap) if softcap else wide


def _loss_parts(logits, labels, class_weights, ignore_index, softcap):
    z = _capped(logits, softcap)
    counts = labels != ignore_index
    known = counts & (labels >= 0) & (labels < z.shape[-1])
    weights = z.new_ones(z.shape[-1]) if class_weights is None else class_weights.to(z.dtype)
    other = torch.where(counts, math.nan, 0.0).to(z.dtype)  # a label that is no id, or is ignored
    return z, torch.where(known, labels, 0)[..., None], known, weights, other


def cross_entropy_rows(logits, labels, class_weights, ignore_index, label_smoothing, z_loss, softcap,
                       logprobs, entropies, whole=0):
    """`whole`: ids of the vocabulary that the logits are a slice of, or 0."""
    z, ids, known, weights, other = _loss_parts(logits, labels, class_weights, ignore_index, softcap)
    most = z.detach().amax(-1, keepdim=True)
    most = most.masked_fill(most == -math.inf, 0.0)
    lse = (z - most).exp().sum(-1).log() + most[..., 0]
    logprob = z.gather(-1, ids)[..., 0] - lse
    if whole:  # labels in other slices
        logprob, known = torch.where(known, logprob, 0.0), labels != ignore_index
    loss = -(1 - label_smoothing) * weights[ids[..., 0]] * logprob
    if label_smoothing:
        loss = loss + label_smoothing / (whole or z.shape[-1]) * (weights * (lse[..., None] - z)).sum(-1)
    if z_loss:
        loss = loss + z_loss * lse * lse
    p = (z - lse[..., None]).exp()
    entropy = lse - torch.where(p == 0, 0.0, p * z).sum(-1)
    none = loss.new_empty(0)
    return (torch.where(known, loss, other), torch.where(known, lse, other),
            torch.where(known, logprob, other) if logprobs else none,
            torch.where(known, entropy, other) if entropies else none)


def cross_entropy(logits, labels, class_weights, items, *rules):
    loss, *more = cross_entropy_rows(logits, labels, class_weights, *rules)
    return (loss.sum() / items).reshape(1), *more


def cross_entropy_rows_backward(dloss, logits, labels, class_weights, lse, ignore_index,
                                label_smoothing, z_loss, softcap, whole=0):
    z, ids, known, weights, other = _loss_parts(logits, labels, class_weights, ignore_index, softcap)
    p = (z - lse[..., None]).exp()
    of_label = ((1 - label_smoothing) * weights[ids[..., 0]])[..., None]
    value = of_label * (p - torch.zeros_like(p).scatter(-1, ids, known.to(p.dtype)[..., None]))
    if whole:
        known = labels != ignore_index
    if label_smoothing:
        value = value + label_smoothing / (whole or z.shape[-1]) * ((whole or weights.sum()) * p - weights)
    if z_loss:
        value = value + 2 * z_loss * lse[..., None] * p
    if softcap:
        value = value * (1 - (z / softcap)**2)
    return torch.where(known[..., None], dloss[..., None] * value, other[..., None]).to(logits.dtype)


def cross_entropy_backward(dloss, logits, labels, class_weights, items, lse, *rules):
    of_rows = (dloss / items).reshape(()).expand(labels.shape)
    return cross_entropy_rows_backward(of_rows, logits, labels, class_weights, lse, *rules)


def cross_entropy_slice(logits, labels, ignore_index, label_smoothing, z_loss, softcap, slice_of,
                        logprobs, entropies):
    return cross_entropy_rows(logits, labels, None, ignore_index, label_smoothing, z_loss, softcap,
                              logprobs, entropies, int(slice_of))


def cross_entropy_slice_backward(dloss, logits, labels, lse, *rules):
    *rules, slice_of = rules
    return cross_entropy_rows_backward(dloss, logits, labels, None, lse, *rules, int(slice_of))


def linear_cross_entropy_slice(x, w, bias, labels, ignore_index, label_smoothing, z_loss, softcap,
                               slice_of, workspace, logprobs, entropies):
    return cross_entropy_slice(F.linear(x, w, bias), labels, ignore_index, label_smoothing, z_loss,
                               softcap, slice_of, logprobs, entropies)


def linear_cross_entropy(x, w, bias, labels, class_weights, items, ignore_index, label_smoothing,
                         z_loss, softcap, workspace, logprobs, entropies):
    return cross_entropy(F.linear(x, w, bias), labels, class_weights, items, ignore_index,
                         label_smoothing, z_loss, softcap, logprobs, entropies)


def linear_cross_entropy_rows(x, w, bias, labels, class_weights, ignore_index, label_smoothing, z_loss,
                              softcap, workspace, logprobs, entropies):
    return cross_entropy_rows(F.linear(x, w, bias), labels, class_weights, ignore_index,
                              label_smoothing, z_loss, softcap, logprobs, entropies)


def _linear_gradients(x, w, bias, dlogits):
    rows = _rows(dlogits)
    return dlogits @ w, rows.T @ _rows(x), x.new_empty(0) if bias is None else rows.sum(0)


def linear_cross_entropy_backward(dloss, x, w, bias, *arguments):
    *rest, _ = arguments  # without the workspace
    return _linear_gradients(x, w, bias, cross_entropy_backward(dloss, F.linear(x, w, bias), *rest))


def linear_cross_entropy_rows_backward(dloss, x, w, bias, *arguments):
    *rest, _ = arguments
    return _linear_gradients(x, w, bias,
                             cross_entropy_rows_backward(dloss, F.linear(x, w, bias), *rest))


def linear_cross_entropy_slice_backward(dloss, x, w, bias, *arguments):
    *rest, _ = arguments
    return _linear_gradients(x, w, bias,
                             cross_entropy_slice_backward(dloss, F.linear(x, w, bias), *rest))


def linear_cross_entropy_slice_frozen_backward(*arguments):
    return linear_cross_entropy_slice_backward(*arguments)[0]


def linear_cross_entropy_frozen_backward(*arguments):
    return linear_cross_entropy_backward(*arguments)[0]


def linear_cross_entropy_rows_frozen_backward(*arguments):
    return linear_cross_entropy_rows_backward(*arguments)[0]


def linear_cross_entropy_gradients(x, w, bias, labels, class_weights, items, *rest):
    results = linear_cross_entropy(x, w, bias, labels, class_weights, items, *rest)
    with torch.no_grad():
        *rules, _, _ = rest
        gradients = linear_cross_entropy_backward(torch.ones_like(results[0]), x, w, bias, labels,
                                                  class_weights, items, results[1], *rules)
    return *results, *gradients


def linear_cross_entropy_gradients_frozen(*arguments):
    return linear_cross_entropy_gradients(*arguments)[:5]

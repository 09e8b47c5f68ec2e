"""causal_conv1d and its states."""
import torch
import torch.nn.functional as F
from torch import Tensor


def _spans(x: Tensor, offsets: Tensor | None) -> tuple[Tensor, list[tuple[int, int]]]:
    """All tokens in rows, and where each sequence is among them."""
    rows = x.reshape(-1, x.shape[-1])
    if offsets is None:
        return rows, [(i * x.shape[1], (i + 1) * x.shape[1]) for i in range(x.shape[0])]
    ends = offsets.clamp(0, len(rows)).tolist()
    return rows, [(begin, max(begin, end)) for begin, end in zip(ends, ends[1:])]


def _entries(state: Tensor, order: str) -> Tensor:
    return state if order == "entries" else state.transpose(-1, -2)


def _sum(inputs: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of the taps [tokens, channels] of the inputs [width - 1 + tokens, channels]."""
    width = w.shape[-1]
    count = inputs.shape[0] - width + 1
    total = sum(inputs[j:j + count] * w[:, j] for j in range(width))
    return total if bias is None else total + bias


def _wide(x: Tensor, *others: Tensor | None) -> list:
    wide = torch.promote_types(x.dtype, torch.float32)
    return [t if t is None else t.to(wide) for t in others]


def causal_conv1d(x, w, bias, offsets, act):
    rows, spans = _spans(x, offsets)
    wide, w, bias = _wide(x, rows, w, bias)
    y = torch.zeros_like(wide)
    for begin, end in spans:
        total = _sum(F.pad(wide[begin:end], (0, 0, w.shape[-1] - 1, 0)), w, bias)
        y[begin:end] = F.silu(total) if act == "silu" else total
    return y.reshape(x.shape).to(x.dtype)


def _backward(dy, dfinal, x, w, bias, offsets, initial, act, order):
    rows, spans = _spans(x, offsets)
    before = w.shape[-1] - 1
    wide, gradients, taps, added = _wide(x, rows, dy.reshape(rows.shape), w, bias)
    dx, dw = torch.zeros_like(wide), torch.zeros_like(taps)
    dbias = wide.new_zeros(x.shape[-1])
    states = None if initial is None else _entries(initial, order).to(wide.dtype)
    older = None if initial is None else torch.zeros_like(states)
    for i, (begin, end) in enumerate(spans):
        history = wide.new_zeros(before, x.shape[-1]) if states is None else states[i, states.shape[1] - before:]
        inputs = torch.cat((history, wide[begin:end]))
        total = _sum(inputs, taps, added)
        g = gradients[begin:end]
        if act == "silu":
            s = torch.sigmoid(total)
            g = g * (s + total * s * (1 - s))
        dbias += g.sum(0)
        dinputs = torch.zeros_like(inputs)
        for j in range(before + 1):
            dw[:, j] += (g * inputs[j:j + end - begin]).sum(0)
            dinputs[j:j + end - begin] += g * taps[:, j]
        if states is not None:
            every = torch.cat((wide.new_zeros(states.shape[1] - before, x.shape[-1]), dinputs))
            every[end - begin:] += _entries(dfinal, order)[i].to(wide.dtype)
            older[i], dinputs = every[:states.shape[1]], every[states.shape[1] - before:]
        dx[begin:end] = dinputs[before:]
    none = dbias.new_empty(0)
    return (dx.reshape(x.shape).to(x.dtype), dw.to(w.dtype), none.to(x.dtype) if bias is None else dbias.to(bias.dtype),
            None if older is None else _entries(older, order).to(initial.dtype))


def causal_conv1d_backward(dy, x, w, bias, offsets, act):
    return _backward(dy, None, x, w, bias, offsets, None, act, "entries")[:3]


def causal_conv1d_frozen_backward(*arguments):
    return causal_conv1d_backward(*arguments)[0]


def causal_conv1d_states(x, w, bias, offsets, initial, act, state_order):
    state = initial.clone()
    return causal_conv1d_update(x, w, bias, offsets, None, None, None, state, act, state_order, 0), state


def causal_conv1d_states_backward(dy, dfinal, x, w, bias, offsets, initial, act, state_order):
    return _backward(dy, dfinal, x, w, bias, offsets, initial, act, state_order)


def causal_conv1d_states_frozen_backward(*arguments):
    dx, _, _, dinitial = causal_conv1d_states_backward(*arguments)
    return dx, dinitial


def causal_conv1d_update(x, w, bias, offsets, indices, has_state, accepted, state, act, state_order, first_slot):
    rows, spans = _spans(x, offsets)
    before = w.shape[-1] - 1
    taps, added = _wide(x, w, bias)
    states = _entries(state, state_order)
    y = torch.zeros_like(rows)
    slots = range(len(spans)) if indices is None else indices.tolist()
    for i, ((begin, end), slot) in enumerate(zip(spans, slots)):
        if not first_slot <= slot < len(states) or begin == end:
            continue
        old = states[slot].clone()
        if has_state is not None and not has_state[i]:
            old.zero_()
        first = old.shape[0] - before
        if accepted is not None:
            first = min(max(int(accepted[i]) - 1, 0), first)
        every = torch.cat((old[first:first + before], rows[begin:end]))
        total = _sum(every.to(taps.dtype), taps, added)
        y[begin:end] = (F.silu(total) if act == "silu" else total).to(y.dtype)
        if accepted is None:
            states[slot] = torch.cat((old, rows[begin:end]))[end - begin:]
        else:
            kept = every[1:old.shape[0] + 1]
            states[slot, :kept.shape[0]] = kept
    return y.reshape(x.shape)

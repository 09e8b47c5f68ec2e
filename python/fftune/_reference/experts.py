"""Mixtures of experts and their router."""
import math

import torch
import torch.nn.functional as F

from .common import ACTIVATIONS, _dequantised, _rows, activation_backward, quantise
from .linear import _rounded_blocks, _rounded_tokens


def _rows_by_expert(ids, experts):
    """Yields every chosen expert: its number, the tokens, and which choice of theirs it is."""
    for expert in range(experts):
        tokens, choices = torch.where(ids == expert)
        if tokens.numel():
            yield expert, tokens, choices


def _gate_and_up(both, packing):
    return both.chunk(2, 0) if packing == "halves" else (both[0::2], both[1::2])


def _swiglu_oai(gate, up):
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _activated(act, gate, up):
    return _swiglu_oai(gate, up) if act == "swiglu-oai" else ACTIVATIONS[act](gate) * up


def _with_shared(ids, weights, experts, shared):
    """Choices of every token beside its own: the last experts, with weight 1."""
    more = torch.arange(experts - shared, experts, device=ids.device, dtype=ids.dtype)
    more = more.expand(*ids.shape[:-1], shared)
    return (torch.cat((torch.where(ids < experts - shared, ids, -1), more), -1),
            torch.cat((weights, torch.ones_like(more, dtype=weights.dtype)), -1))


def _of_expert(expert, given, w_gate, w_up, b_gate_up, packing):
    """gate and up of its tokens."""
    if w_up is not None:
        return tuple(F.linear(given, w[expert]) for w in (w_gate, w_up))
    weights = _gate_and_up(w_gate[expert], packing)
    biases = (None, None) if b_gate_up is None else _gate_and_up(b_gate_up[expert], packing)
    return tuple(F.linear(given, w, b) for w, b in zip(weights, biases))


def moe_ffn_preact(x, ids, weights, w_gate, w_up, w_down, b_gate_up, b_down, act, packing, weigh,
                   shared, routing):
    ids, weights = _with_shared(ids, weights, w_gate.shape[0], shared)
    rows, ids, shares = _rows(x), _rows(ids), _rows(weights)
    y = torch.zeros(rows.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    gates, ups = [], []
    for expert, tokens, choices in _rows_by_expert(ids, w_gate.shape[0]):
        share = shares[tokens, choices, None]
        given = rows[tokens] if weigh == "after" else (rows[tokens] * share).to(x.dtype)
        gate, up = _of_expert(expert, given, w_gate, w_up, b_gate_up, packing)
        bias = None if b_down is None else b_down[expert]
        out = F.linear(_activated(act, gate, up), w_down[expert], bias).to(y.dtype)
        y = y.index_add(0, tokens, out * share.to(y.dtype) if weigh == "after" else out)
        gates.append(gate)
        ups.append(up)
    missing = x.new_zeros(ids.numel() - sum(map(len, gates)), w_down.shape[2])
    return y.to(x.dtype).view(x.shape), torch.cat((*gates, missing)), torch.cat((*ups, missing))


def moe_ffn(*arguments):
    return moe_ffn_preact(*arguments)[0]


def moe_ffn_slice(x, ids, first_expert, weights, w_gate, w_up, w_down, b_gate_up, b_down, experts, act,
                  packing, weigh, routing):
    own = ids.long() - first_expert
    own = torch.where((own < 0) | (own >= w_down.shape[0]), -1, own)
    return moe_ffn(x, own, weights, w_gate, w_up, w_down, b_gate_up, b_down, act, packing, weigh, 0, routing)


def _expert_of_fp8(w, scale):
    """Weights [experts, n, k] times their scales, of each expert, of rows or of blocks."""
    if scale.dim() == 3:
        return _dequantised(w, scale, 128)
    rows = scale.view(len(w), -1, 1)
    return w.float() * rows.repeat_interleave(w.shape[1] // rows.shape[1], 1)


def moe_ffn_fp8(x, ids, weights, w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale,
                hidden_scale, w_down_scale, act, packing, shared, routing):
    by_token = w_gate_scale.dim() == 2 and hidden_scale is None
    rows = _rows(x).float() * (x_scale if hidden_scale is not None else
                               _rows(x_scale).repeat_interleave(x.shape[-1] if by_token else 128, -1)
                               [:, :x.shape[-1]])
    if hidden_scale is not None:
        round_hidden = lambda hidden: _dequantised(*quantise(hidden, hidden_scale), 1)
    else:
        round_hidden = _rounded_tokens if by_token else _rounded_blocks
    y = _experts_fp8(rows.view(x.shape), round_hidden, ids, weights, w_gate, w_up, w_down, w_gate_scale, w_up_scale,
                     w_down_scale, act, packing, shared)
    return y.bfloat16()


def moe_ffn_fp8_token(x, *arguments):
    return _experts_fp8(_rounded_tokens(x), _rounded_blocks, *arguments[:-1]).to(x.dtype)


def moe_ffn_fp8_block(x, *arguments):
    return _experts_fp8(_rounded_blocks(x), _rounded_blocks, *arguments[:-1]).to(x.dtype)


def _experts_fp8(x, round_hidden, ids, weights, w_gate, w_up, w_down, w_gate_scale, w_up_scale, w_down_scale, act,
                 packing, shared):
    ids, weights = _with_shared(ids, weights, w_gate.shape[0], shared)
    rows, ids, shares = (_rows(t) for t in (x, ids, weights))
    both = _expert_of_fp8(w_gate, w_gate_scale)
    gate, up = both.chunk(2, 1) if w_up is None else (both, _expert_of_fp8(w_up, w_up_scale))
    if w_up is None and packing == "interleaved":
        gate, up = both[:, 0::2], both[:, 1::2]
    down = _expert_of_fp8(w_down, w_down_scale)
    y = torch.zeros_like(rows)
    for expert, tokens, choices in _rows_by_expert(ids, len(down)):
        own = rows[tokens]
        hidden = round_hidden(ACTIVATIONS[act](F.linear(own, gate[expert])) * F.linear(own, up[expert]))
        y = y.index_add(0, tokens, shares[tokens, choices, None] * F.linear(hidden, down[expert]))
    return y.view(x.shape)


def _activated_backward(act, d_hidden, gate, up):
    """The gradients by gate and by up."""
    if act != "swiglu-oai":
        return activation_backward(act, d_hidden * up, gate), d_hidden * ACTIVATIONS[act](gate)
    near, share = gate.clamp(max=7.0), torch.sigmoid(1.702 * gate.clamp(max=7.0))
    d_gate = d_hidden * (up.clamp(-7.0, 7.0) + 1) * (share + 1.702 * near * share * (1 - share))
    # As the gradient of clamp, which is 0 at NaN.
    return (torch.where(gate <= 7, d_gate, 0.0),
            torch.where(up.abs() <= 7, d_hidden * near * share, 0.0))


def moe_ffn_backward(dy, x, ids, weights, gate, up, w_gate, w_up, w_down, b_gate_up, b_down, act,
                     packing, weigh, shared, routing):
    wide, k = torch.promote_types(x.dtype, torch.float32), ids.shape[-1]
    ids, every = _with_shared(ids, weights, w_gate.shape[0], shared)
    rows, grads, ids, shares = (_rows(t) for t in (x, dy, ids, every))
    dx, d_shares = torch.zeros_like(rows, dtype=wide), torch.zeros_like(shares, dtype=wide)
    d_experts = [None if t is None else torch.zeros_like(t)
                 for t in (w_gate, w_up, w_down, b_gate_up, b_down)]
    dw_gate, dw_up, dw_down, db_gate_up, db_down = d_experts
    for expert, tokens, choices in _rows_by_expert(ids, w_gate.shape[0]):
        own, grad, share = rows[tokens], grads[tokens], shares[tokens, choices, None].to(x.dtype)
        given, grad_out = (own, grad * share) if weigh == "after" else (own * share, grad)
        gate, up = _of_expert(expert, given, w_gate, w_up, b_gate_up, packing)
        hidden = _activated(act, gate, up)
        d_gates = _activated_backward(act, grad_out @ w_down[expert], gate, up)
        matrices = ((w_gate[expert], w_up[expert]) if w_up is not None
                    else _gate_and_up(w_gate[expert], packing))
        d_given = sum(d @ w for d, w in zip(d_gates, matrices))
        dx.index_add_(0, tokens, (d_given if weigh == "after" else d_given * share).to(wide))
        if weigh == "after":
            out = F.linear(hidden, w_down[expert], None if b_down is None else b_down[expert])
            d_share = (grad * out).sum(-1)
        else:
            d_share = (own * d_given).sum(-1)
        d_shares[tokens, choices] = d_share.to(wide)
        into = ((dw_gate[expert], dw_up[expert]) if w_up is not None
                else _gate_and_up(dw_gate[expert], packing))
        for total, d in zip(into, d_gates):
            total.copy_(d.T @ given)
        dw_down[expert] = grad_out.T @ hidden
        if b_down is not None:
            for total, d in zip(_gate_and_up(db_gate_up[expert], packing), d_gates):
                total.copy_(d.sum(0))
            db_down[expert] = grad_out.sum(0)
    return (dx.to(x.dtype).view(x.shape), d_shares.view(every.shape)[..., :k].contiguous(),
            *(t for t in d_experts if t is not None))


def moe_ffn_frozen_backward(*arguments):
    return moe_ffn_backward(*arguments)[:2]


def moe_ffn_backward_into(dy, x, ids, weights, gate, up, *others):
    experts, into, (act, routing) = others[:3], others[3:6], others[6:]
    dx, d_weights, *grads = moe_ffn_backward(dy, x, ids, weights, gate, up, *experts, None, None,
                                             act, "halves", "after", 0, routing)
    for total, own in zip(into, grads):
        total += own
    return dx, d_weights


def _router_scores(logits, score):
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide)
    return logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)


def _router_weights(logits, ids, score, order, renormalise, scale):
    """Weights of the chosen experts."""
    if order == "after":
        wide = torch.promote_types(logits.dtype, torch.float32)
        return scale * logits.to(wide).gather(-1, ids).softmax(-1)
    weights = _router_scores(logits, score).gather(-1, ids)
    if renormalise:
        # Sigmoids may all underflow: as transformers' DeepSeek-V3.
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if score == "sigmoid" else 0))
    return scale * weights


def moe_route(logits, bias, top_k, score, order, groups, top_groups, group_score, renormalise,
              scale):
    # Softmax and sigmoid keep the order of the logits, which differ also where all scores are NaN.
    by_logits = bias is None and not (groups and group_score == "top2")
    by = logits.detach()
    if not by_logits and order != "after":
        by = _router_scores(by, score)
    if bias is not None:
        by = by + bias
    if groups:
        grouped = by.unflatten(-1, (groups, -1))
        counted = min(2 if group_score == "top2" else 1, grouped.shape[-1])
        best = grouped.topk(counted, -1)[0].sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(
            -1, best.topk(top_groups or groups, -1)[1], True)
        by = grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)
    ids = by.sort(stable=True, dim=-1, descending=True)[1][..., :top_k]
    return _router_weights(logits, ids, score, order, renormalise, scale), ids.to(torch.int32)


def moe_route_backward(d_weights, logits, ids, score, order, renormalise, scale):
    ids = ids.long()
    if order == "after":
        weights = _router_weights(logits, ids, score, order, renormalise, scale)
        d_chosen = weights * (d_weights - (d_weights * weights / scale).sum(-1, keepdim=True))
        return torch.zeros_like(d_chosen[..., :1]).expand(logits.shape).scatter(
            -1, ids, d_chosen).to(logits.dtype)
    scores = _router_scores(logits, score)
    chosen = scores.gather(-1, ids)
    d_chosen = scale * d_weights.to(scores.dtype)
    if renormalise:
        total = chosen.sum(-1, keepdim=True)
        d_chosen = (d_chosen - (d_chosen * chosen / total).sum(-1, keepdim=True)) / total
    d_scores = torch.zeros_like(scores).scatter(-1, ids, d_chosen)
    if score == "sigmoid":
        return (d_scores * scores * (1 - scores)).to(logits.dtype)
    return (scores * (d_scores - (d_scores * scores).sum(-1, keepdim=True))).to(logits.dtype)

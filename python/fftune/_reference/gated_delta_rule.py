"""The gated delta rule, token by token, and its gradients."""
import functools

import torch

from .common import _wide


def _decay_of(g, a, A_log, dt_bias, gate, gate_bound, channels):
    """The logs of decays [..., value heads, 1 or features], of `channels` or None."""
    if a is None:
        return _wide(g) if channels else _wide(g)[..., None]
    a = _wide(a) if channels else _wide(a)[..., None]
    rate, x = _wide(A_log).exp()[:, None], a + _wide(dt_bias).view(a.shape[-2], -1)
    if gate == "softplus":
        return -rate * torch.nn.functional.softplus(x, threshold=1e9)
    return gate_bound * torch.sigmoid(rate * x)


def _normed(x, qk_norm):
    """x, and what its norm multiplied it by."""
    if qk_norm == "none":
        return x, None
    factor = (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return x * factor, factor


class _StateCall:
    """A call of an op with a state for each head. A subclass has `values`, whose shape `out` has, with
    all tokens in one row and in a wide type, and the methods zeros() and run()."""

    def _set_ranges(self, x, offsets):
        """The first token and the end of each sequence, of batches x or of packed tokens."""
        if offsets is None:
            self.ranges = [(i * x.shape[1], (i + 1) * x.shape[1]) for i in range(x.shape[0])]
        else:
            ends = offsets.clamp(0, len(x)).tolist()
            self.ranges = [(first, max(first, end)) for first, end in zip(ends, ends[1:])]

    def taken(self, state):
        return _wide(state)

    def given(self, state):
        return state

    def forward(self, shape, dtype, initial_state, has_state, state_dtype, keep):
        """`out` and the last states, if they are kept."""
        out, states = torch.zeros_like(self.values), []
        for i, (first, end) in enumerate(self.ranges):
            begins = initial_state is not None and (has_state is None or bool(has_state[i]))
            state = self.taken(initial_state[i]) if begins else self.zeros()
            states.append(self.given(self.run(first, end, state.to(out.dtype), out)))
        out = out.reshape(shape).to(dtype)
        if not keep:
            return out, out.new_empty(0, dtype=torch.float32)
        # One more, so that there is a shape if there are no sequences.
        final = torch.stack([*states, self.given(self.zeros())])[:-1].contiguous()
        wide = final.dtype is torch.float64
        return out, final if wide else final.to(torch.bfloat16 if state_dtype == "bf16" else torch.float32)

    def update(self, shape, dtype, states, state_indices, has_state, null_index, accepted=None):
        """`out`, with the states updated in their cache: those behind all tokens of each sequence or, with
        `accepted`, behind each of them."""
        out = torch.zeros_like(self.values)
        is_entry = lambda entry: null_index < entry < len(states)
        for i, (first, end) in enumerate(self.ranges):
            slots = state_indices[i].reshape(-1).tolist()
            entry = slots[0 if accepted is None else min(max(int(accepted[i]), 1), len(slots)) - 1]
            if not is_entry(entry):
                continue
            begins = has_state is None or bool(has_state[i])
            state = (self.taken(states[entry]) if begins else self.zeros()).to(out.dtype)
            if accepted is None:
                states[entry] = self.given(self.run(first, end, state, out))
                continue
            for t in range(first, end):
                state = self.run(t, t + 1, state, out)
                if t - first < len(slots) and is_entry(slots[t - first]):
                    states[slots[t - first]] = self.given(state)
        return out.reshape(shape).to(dtype)


class _Call(_StateCall):
    """Arguments with all tokens in one row, in wide types, and the ranges of sequences."""

    def __init__(self, q, k, v, g, a, A_log, dt_bias, beta, beta_logits, offsets, gate, decay, qk_norm,
                 scale, beta_scale, gate_bound, layout):
        flat = (lambda t: t) if offsets is not None else (
            lambda t: None if t is None else t.flatten(0, 1))
        self.group = v.shape[-2] // q.shape[-2]
        self.q, self.q_factor = _normed(_wide(flat(q)).repeat_interleave(self.group, 1), qk_norm)
        self.k, self.k_factor = _normed(_wide(flat(k)).repeat_interleave(self.group, 1), qk_norm)
        self.v = self.values = _wide(flat(v))
        self.g = _decay_of(flat(g), flat(a), A_log, dt_bias, gate, gate_bound, decay == "channel")
        self.beta = (_wide(flat(beta)) if beta is not None
                     else beta_scale * torch.sigmoid(_wide(flat(beta_logits))))
        self.scale = scale or q.shape[-1] ** -0.5
        self.key_major = layout == "kv"
        self._set_ranges(q, offsets)

    def zeros(self):
        return self.v.new_zeros(self.v.shape[1], self.v.shape[2], self.q.shape[2])

    def taken(self, state):
        return _wide(state.transpose(-1, -2) if self.key_major else state)

    def given(self, state):
        return state.transpose(-1, -2) if self.key_major else state

    def step(self, t, state):
        """The decayed state, what it got wrong of v, and the state behind token t."""
        decayed = state * self.g[t].exp()[:, None]
        error = self.v[t] - (decayed * self.k[t][:, None]).sum(-1)
        return decayed, error, decayed + (self.beta[t][:, None] * error)[..., None] * self.k[t][:, None]

    def run(self, first, end, state, out):
        for t in range(first, end):
            state = self.step(t, state)[2]
            out[t] = self.scale * (state * self.q[t][:, None]).sum(-1)
        return state


def gated_delta_rule(q, k, v, g, a, A_log, dt_bias, beta, beta_logits, initial_state, has_state, offsets,
                     gate, decay, qk_norm, scale, beta_scale, gate_bound, state_dtype, keep, *, layout="vk"):
    one = _Call(q, k, v, g, a, A_log, dt_bias, beta, beta_logits, offsets, gate, decay, qk_norm, scale,
                beta_scale, gate_bound, layout)
    return one.forward(v.shape, q.dtype, initial_state, has_state, state_dtype, keep)


def gated_delta_rule_update(q, k, v, g, a, A_log, dt_bias, beta, beta_logits, states, state_indices,
                            has_state, offsets, gate, decay, qk_norm, scale, beta_scale, gate_bound,
                            null_index, accepted=None, *, layout="vk"):
    one = _Call(q, k, v, g, a, A_log, dt_bias, beta, beta_logits, offsets, gate, decay, qk_norm, scale,
                beta_scale, gate_bound, layout)
    return one.update(v.shape, q.dtype, states, state_indices, has_state, null_index, accepted)


def gated_delta_rule_backward(d_out, d_final_state, q, k, v, g, a, A_log, dt_bias, beta, beta_logits,
                              initial_state, offsets, gate, decay, qk_norm, scale, beta_scale, gate_bound, *,
                              layout="vk"):
    one = _Call(q, k, v, g, a, A_log, dt_bias, beta, beta_logits, offsets, gate, decay, qk_norm, scale,
                beta_scale, gate_bound, layout)
    dy = one.scale * _wide(d_out).reshape(one.v.shape)
    dq, dk, dv, dg, dbeta = (torch.zeros_like(t) for t in (one.q, one.k, one.v, one.g, one.beta))
    states = []
    for i, (first, end) in enumerate(one.ranges):
        state = one.zeros() if initial_state is None else one.taken(initial_state[i]).to(dy.dtype)
        steps = []
        for t in range(first, end):
            steps.append(one.step(t, state))
            state = steps[-1][2]
        d_state = one.zeros() if d_final_state is None else one.taken(d_final_state[i]).to(dy.dtype)
        for t in range(end - 1, first - 1, -1):
            decayed, error, after = steps[t - first]
            key, factor = one.k[t][:, None], one.beta[t][:, None]
            dq[t] = (dy[t][..., None] * after).sum(1)
            d_state = d_state + dy[t][..., None] * one.q[t][:, None]
            d_delta = (d_state * key).sum(-1)
            dk[t] = (d_state * (factor * error)[..., None]).sum(1)
            dbeta[t] = (d_delta * error).sum(-1)
            dv[t] = factor * d_delta
            d_state = d_state - dv[t][..., None] * key
            dk[t] -= (decayed * dv[t][..., None]).sum(1)
            of_channels = (d_state * decayed).sum(1)
            dg[t] = of_channels if decay == "channel" else of_channels.sum(-1, keepdim=True)
            d_state = d_state * one.g[t].exp()[:, None]
        states.append(one.given(d_state))

    def behind_norm(d, normed, factor, like):
        if factor is not None:
            d = factor * (d - normed * (d * normed).sum(-1, keepdim=True))
        return d.unflatten(1, (-1, one.group)).sum(2).reshape(like.shape).to(like.dtype)

    none = one.v.new_empty(0)
    narrow = (lambda t: t) if none.dtype is torch.float64 else (lambda t: t.float())
    results = [behind_norm(dq, one.q, one.q_factor, q), behind_norm(dk, one.k, one.k_factor, k),
               dv.reshape(v.shape).to(v.dtype)]
    if a is None:
        results += [narrow(dg.reshape(g.shape)), *(none.to(v.dtype),), *(narrow(none),) * 2]
    else:
        wide_a = _wide(a).reshape(one.g.shape)
        rate, x = _wide(A_log).exp()[:, None], wide_a + _wide(dt_bias).view(one.v.shape[1], -1)
        if gate == "softplus":
            of_input, of_log = -rate * torch.sigmoid(x), one.g
        else:
            share = torch.sigmoid(rate * x)
            slope = gate_bound * share * (1 - share)
            of_input, of_log = slope * rate, slope * rate * x
        da = dg * of_input
        results += [narrow(none), da.reshape(a.shape).to(a.dtype), narrow((dg * of_log).sum((0, 2))),
                    narrow(da.sum(0).flatten())]
    if beta_logits is None:
        results += [narrow(dbeta.reshape(beta.shape)), none.to(v.dtype)]
    else:
        share = torch.sigmoid(_wide(beta_logits).reshape(one.beta.shape))
        d = (beta_scale * dbeta * share * (1 - share)).reshape(beta_logits.shape)
        results += [narrow(none), d.to(beta_logits.dtype)]
    results.append(narrow(none) if initial_state is None else narrow(torch.stack(states).contiguous()))
    return tuple(results)


gated_delta_rule_kv = functools.partial(gated_delta_rule, layout="kv")
gated_delta_rule_update_kv = functools.partial(gated_delta_rule_update, layout="kv")
gated_delta_rule_kv_backward = functools.partial(gated_delta_rule_backward, layout="kv")

"""State space duality, token by token, and its gradients."""
import torch

from .common import _wide
from .gated_delta_rule import _StateCall


def _number(x):
    """Infinities of results are NaN: the recurrence and chunks differ in which they have."""
    return x + 0 * x


class _Call(_StateCall):
    """Arguments with all tokens in one row, in wide types, and the ranges of sequences."""

    def __init__(self, x, dt, A, A_log, B, C, D, dt_bias, offsets, softplus, dt_min, dt_max):
        flat = (lambda t: t) if offsets is not None else (lambda t: t.flatten(0, 1))
        self.x = self.values = _wide(flat(x))
        self.group = x.shape[-2] // B.shape[-2]
        self.B, self.C = (_wide(flat(t)).repeat_interleave(self.group, 1) for t in (B, C))
        self.A = _wide(A) if A is not None else -_wide(A_log).exp()
        self.D = None if D is None else _wide(D)
        self.input = _wide(flat(dt)) + (0 if dt_bias is None else _wide(dt_bias))
        free = torch.nn.functional.softplus(self.input, threshold=1e9) if softplus else self.input
        most = dt_max or float("inf")
        self.dt = _number(free.clamp(dt_min, most))
        self.free, self.limits, self.softplus = free, (dt_min, most), softplus
        self.decay = (self.dt * self.A).exp()
        # By head, what is NaN or infinite in what a chunk's products multiply by 0.
        self.odd = ~(self.x.isfinite().all(-1) & (self.dt + self.decay).isfinite())
        self._set_ranges(x, offsets)

    def slope(self):
        """The derivative of steps by their inputs."""
        slope = torch.sigmoid(self.input) if self.softplus else torch.ones_like(self.input)
        return torch.where((self.free < self.limits[0]) | (self.free > self.limits[1]), 0, slope)

    def zeros(self):
        return self.x.new_zeros(*self.x.shape[1:], self.B.shape[-1])

    def step(self, t, state):
        """The state behind token t."""
        written = (self.dt[t][:, None] * self.x[t])[..., None] * self.B[t][:, None]
        return self.decay[t][:, None, None] * state + written

    def run(self, first, end, state, out):
        for t in range(first, end):
            state = self.step(t, state)
            out[t] = _number((state * self.C[t][:, None]).sum(-1))
            if self.D is not None:
                out[t] += self.D[:, None] * self.x[t]
            # Kernels multiply all pairs of a chunk's tokens: those of a later token by 0.
            out[first:t, self.odd[t]] = float("nan")
        return _number(state)


def ssd(x, dt, A, A_log, B, C, D, dt_bias, initial_state, has_state, offsets, softplus, dt_min, dt_max,
        state_dtype, keep):
    one = _Call(x, dt, A, A_log, B, C, D, dt_bias, offsets, softplus, dt_min, dt_max)
    return one.forward(x.shape, x.dtype, initial_state, has_state, state_dtype, keep)


def ssd_update(x, dt, A, A_log, B, C, D, dt_bias, states, state_indices, has_state, offsets, softplus, dt_min,
               dt_max, null_index, accepted=None):
    one = _Call(x, dt, A, A_log, B, C, D, dt_bias, offsets, softplus, dt_min, dt_max)
    return one.update(x.shape, x.dtype, states, state_indices, has_state, null_index, accepted)


def ssd_backward(d_out, d_final_state, x, dt, A, A_log, B, C, D, dt_bias, initial_state, offsets, softplus,
                 dt_min, dt_max):
    one = _Call(x, dt, A, A_log, B, C, D, dt_bias, offsets, softplus, dt_min, dt_max)
    dy = _wide(d_out).reshape(one.x.shape)
    dx, dB, dC, of_step, of_decay = (torch.zeros_like(t) for t in (one.x, one.B, one.C, one.dt, one.dt))
    d_states = []
    for i, (first, end) in enumerate(one.ranges):
        states = [one.zeros() if initial_state is None else _wide(initial_state[i]).to(dy.dtype)]
        for t in range(first, end):
            states.append(one.step(t, states[-1]))
        d_state = one.zeros() if d_final_state is None else _wide(d_final_state[i]).to(dy.dtype)
        finite = states[0].isfinite() & d_state.isfinite()
        odd = one.odd[first:end].any(0) | ~finite.flatten(1).all(1)
        for given in (one.B, one.C, dy):
            odd |= ~given[first:end].isfinite().all(-1).all(0)
        for t in range(end - 1, first - 1, -1):
            dC[t] = (dy[t][..., None] * states[t - first + 1]).sum(1)
            d_state = d_state + dy[t][..., None] * one.C[t][:, None]
            written = (d_state * one.B[t][:, None]).sum(-1)
            dB[t] = (d_state * (one.dt[t][:, None] * one.x[t])[..., None]).sum(1)
            dx[t] = one.dt[t][:, None] * written
            of_step[t] = (written * one.x[t]).sum(-1)
            d_state = d_state * one.decay[t][:, None, None]
            of_decay[t] = (d_state * states[t - first]).sum((1, 2))
        # In which gradients of a head a chunk has numbers is left to the kernel.
        for d in (dx, dB, dC, of_step, of_decay):
            d[first:end, odd] = float("nan")
        d_states.append(_number(d_state))

    none = one.x.new_empty(0)
    narrow = (lambda t: t) if none.dtype is torch.float64 else (lambda t: t.float())
    if one.D is not None:
        dx = dx + one.D[:, None] * dy
    of_input = (of_step + of_decay * one.A) * one.slope()
    dA = (of_decay * one.dt).sum(0)
    summed = [d.unflatten(1, (-1, one.group)).sum(2).reshape(B.shape).to(B.dtype) for d in (dB, dC)]
    return (dx.reshape(x.shape).to(x.dtype), of_input.reshape(dt.shape).to(dt.dtype),
            narrow(none if A is None else dA), narrow(none if A is not None else dA * one.A), *summed,
            narrow(none if D is None else (dy * one.x).sum((0, 2))),
            narrow(none if dt_bias is None else of_input.sum(0)),
            narrow(none if initial_state is None else torch.stack(d_states)))

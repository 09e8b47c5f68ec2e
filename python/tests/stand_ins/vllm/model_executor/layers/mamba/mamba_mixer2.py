"""Mixers of Mamba-2. The core is plain PyTorch, token by token in float32."""
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from vllm.forward_context import get_forward_context


@dataclass
class Mamba2AttentionMetadata:
    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    has_initial_states_p: torch.Tensor | None = None
    query_start_loc_p: torch.Tensor | None = None
    state_indices_tensor_p: torch.Tensor | None = None
    state_indices_tensor_d: torch.Tensor | None = None
    query_start_loc_d: torch.Tensor | None = None
    num_accepted_tokens: torch.Tensor | None = None
    checkpoint_chunk_idx: torch.Tensor | None = None


class MambaMixer2(nn.Module):
    def __init__(self, prefix="layers.0.mixer", heads=4, groups=2, dim=8, state_dim=16, width=4):
        super().__init__()
        self.prefix, self.activation = prefix, "silu"
        self.tp_size, self.num_heads, self.n_groups = 1, heads, groups
        self.head_dim, self.ssm_state_size = dim, state_dim
        self.tped_intermediate_size, self.tped_dt_size = heads * dim, heads
        channels = self.tped_conv_size = heads * dim + 2 * groups * state_dim
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.randn(channels, 1, width).mul_(0.5).bfloat16(), requires_grad=False)
        self.conv1d.bias = nn.Parameter(torch.randn(channels).bfloat16(), requires_grad=False)
        self.A = nn.Parameter(-torch.rand(heads) - 0.1, requires_grad=False)
        self.D, self.dt_bias = (nn.Parameter(torch.randn(heads).bfloat16(), requires_grad=False) for _ in range(2))
        self.use_replayssm, self.mamba_config = False, SimpleNamespace(enable_stochastic_rounding=False)
        self.kv_cache = (torch.tensor([]), torch.tensor([]))
        self.calls = 0

    def conv_ssm_forward(self, projected_states, output):
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or metadata.get(self.prefix) is None:
            return
        metadata = metadata[self.prefix]
        self.calls += 1
        first = metadata.num_decode_tokens
        if metadata.num_accepted_tokens is not None and not metadata.num_prefills:
            for i, blocks in enumerate(metadata.state_indices_tensor_d[:metadata.num_decodes].tolist()):
                begin, end = metadata.query_start_loc_d[i:i + 2].tolist()
                self._drafts(projected_states, output, range(begin, end), blocks, int(metadata.num_accepted_tokens[i]))
            return
        for i in range(first):
            block = int(metadata.state_indices_tensor_d[i, 0])
            self._sequence(projected_states, output, range(i, i + 1), block, True, True)
        for i in range(metadata.num_prefills):
            begin, end = (metadata.query_start_loc_p[i:i + 2] + first).tolist()
            self._sequence(projected_states, output, range(begin, end), int(metadata.state_indices_tensor_p[i]),
                           bool(metadata.has_initial_states_p[i]), False)

    def _sequence(self, projected, output, rows, block, known, writes):
        heads, dim, channels = self.num_heads, self.head_dim, self.tped_conv_size
        if block <= 0:
            output[rows.start:rows.stop] = 0
            return
        states, history = self.kv_cache[1], self._history(block)
        entries = self.conv1d.weight.shape[2] - 1
        before = history[:entries].float() if known else torch.zeros(entries, channels)
        state = states[block].float() if known else torch.zeros(states.shape[1:])
        every = torch.cat([before, projected[rows.start:rows.stop, heads * dim:][:, :channels].float()])
        for state in self._states(projected, output, rows, every, state, writes):
            pass
        states[block] = state.to(states.dtype)
        history[:entries] = every[len(rows):].to(history.dtype)

    def _history(self, block):
        """A view of the inputs in a block, [entries, channels]."""
        inputs = self.kv_cache[0]
        return inputs[block] if inputs.shape[2] == self.tped_conv_size else inputs[block].T

    def _drafts(self, projected, output, rows, blocks, accepted):
        """The state behind each token goes to a block of its own."""
        states, first = self.kv_cache[1], blocks[accepted - 1]
        if first <= 0:
            return
        entries, history = self.conv1d.weight.shape[2] - 1, self._history(blocks[0])
        before = history[accepted - 1:accepted - 1 + entries].float()
        of_x = slice(self.tped_intermediate_size, self.tped_intermediate_size + self.tped_conv_size)
        every = torch.cat([before, projected[rows.start:rows.stop, of_x].float()])
        for block, state in zip(blocks, self._states(projected, output, rows, every, states[first].float(), True)):
            states[block] = state.to(states.dtype)
        history[:len(every) - 1] = every[1:].to(history.dtype)

    def _states(self, projected, output, rows, every, state, writes):
        """The states behind the tokens."""
        heads, dim, state_dim = self.num_heads, self.head_dim, self.ssm_state_size
        taps = self.conv1d.weight[:, 0].float()
        entries = taps.shape[1] - 1
        x, dt = projected[:, heads * dim:].split([self.tped_conv_size, heads], -1)
        for place, row in enumerate(rows):
            mixed = F.silu((every[place:place + entries + 1].T * taps).sum(1) + self.conv1d.bias.float()).bfloat16()
            if writes:
                x[row] = mixed  # in the place of its input
            value, B, C = mixed.float().split([heads * dim] + [self.n_groups * state_dim] * 2)
            value = value.view(heads, dim)
            B, C = (one.view(-1, state_dim).repeat_interleave(heads // self.n_groups, 0) for one in (B, C))
            step = F.softplus(dt[row].float() + self.dt_bias.float())
            state = state * torch.exp(step * self.A)[:, None, None] + (step[:, None] * value)[:, :, None] * B[:, None]
            y = (state * C[:, None]).sum(-1) + self.D.float()[:, None] * value
            output[row] = y.flatten().to(output.dtype)
            yield state

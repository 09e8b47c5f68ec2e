"""Layers with the gated delta rule. The core is plain PyTorch, token by token in float32."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import parts


@dataclass
class GDNAttentionMetadata:
    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    num_spec_decode_tokens: int
    num_actual_tokens: int
    checkpoint: object | None = None
    flashinfer_checkpoint_plan: object | None = None
    has_initial_state: torch.Tensor | None = None
    non_spec_query_start_loc: torch.Tensor | None = None
    non_spec_state_indices_tensor: torch.Tensor | None = None
    spec_sequence_masks: torch.Tensor | None = None
    spec_query_start_loc: torch.Tensor | None = None
    spec_state_indices_tensor: torch.Tensor | None = None
    num_accepted_tokens: torch.Tensor | None = None
    prefill_query_start_loc: torch.Tensor | None = None
    prefill_state_indices: torch.Tensor | None = None
    prefill_has_initial_state: torch.Tensor | None = None


class QwenGatedDeltaNetAttention(nn.Module):
    def __init__(self, prefix="layers.0.linear_attn", k_heads=2, v_heads=4, k_dim=16, v_dim=8, width=4, d=0,
                 gqa_interleaved_layout=False):
        super().__init__()
        self.prefix, self.activation = prefix, "silu"
        self.tp_size, self.num_k_heads, self.num_v_heads = 1, k_heads, v_heads
        self.head_k_dim, self.head_v_dim = k_dim, v_dim
        channels = 2 * k_heads * k_dim + v_heads * v_dim
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.randn(channels, 1, width).mul_(0.5).bfloat16(), requires_grad=False)
        self.conv1d.bias = None
        self.dt_bias = nn.Parameter(torch.randn(v_heads).bfloat16(), requires_grad=False)
        self.A_log = nn.Parameter(torch.randn(v_heads), requires_grad=False)
        self.gdn_prefill_backend, self.enable_packed_recurrent_decode = "triton", True
        self.kv_cache = (torch.tensor([]), torch.tensor([]))
        self.calls = 0
        if not d:
            return
        self.gqa_interleaved_layout = gqa_interleaved_layout
        self.in_proj_qkvz = parts.MergedColumnParallelLinear(channels + v_heads * v_dim, d)
        self.in_proj_ba = parts.MergedColumnParallelLinear(2 * v_heads, d)
        self.norm = parts.RMSNormGated(v_dim)
        self.out_proj = parts.RowParallelLinear(d, v_heads * v_dim)

    def _projected(self, x):
        qkvz, ba = self.in_proj_qkvz(x), self.in_proj_ba(x)
        keys, values = self.num_k_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        if not self.gqa_interleaved_layout:
            return *qkvz.split([2 * keys + values, values], -1), *ba.chunk(2, -1)

        def parts_of(rows, *sizes):
            of_heads = rows.unflatten(-1, (self.num_k_heads, -1))
            return [part.flatten(1) for part in of_heads.split([size // self.num_k_heads for size in sizes], -1)]

        q, k, v, z = parts_of(qkvz, keys, keys, values, values)
        return torch.cat([q, k, v], -1), z, *parts_of(ba, self.num_v_heads, self.num_v_heads)

    def forward(self, hidden_states):
        qkv, z, b, a = self._projected(hidden_states)
        out = qkv.new_zeros(len(qkv), self.num_v_heads, self.head_v_dim)
        self._forward_core(qkv, b, a, out)
        return self.out_proj(self.norm(out, z.unflatten(-1, (-1, self.head_v_dim))).flatten(1))

    def _forward_core(self, mixed_qkv, b, a, core_attn_out):
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or metadata.get(self.prefix) is None:
            return
        metadata = metadata[self.prefix]
        self.calls += 1
        rows = metadata.num_actual_tokens
        if metadata.spec_sequence_masks is not None and not metadata.num_prefills:
            for i, blocks in enumerate(metadata.spec_state_indices_tensor[:metadata.num_spec_decodes].tolist()):
                begin, end = metadata.spec_query_start_loc[i:i + 2].tolist()
                accepted = int(metadata.num_accepted_tokens[i])
                self._drafts(mixed_qkv, b, a, core_attn_out, range(begin, end), blocks, accepted)
            return
        indices, starts = metadata.non_spec_state_indices_tensor, metadata.non_spec_query_start_loc
        decoding = metadata.num_prefills == 0
        for i, block in enumerate(indices.tolist()):
            begin, end = (i, i + 1) if decoding else starts[i:i + 2].tolist()
            if end > rows or block <= 0:
                core_attn_out[begin:min(end, rows)] = 0
                continue
            known = decoding or bool(metadata.has_initial_state[i])
            self._sequence(mixed_qkv, b, a, core_attn_out, range(begin, end), block, known, decoding)

    def _history(self, block):
        """A view of the inputs in a block, [entries, channels]."""
        inputs = self.kv_cache[0]
        return inputs[block] if inputs.shape[2] == len(self.conv1d.weight) else inputs[block].T

    def _sequence(self, qkv, b, a, out, rows, block, known, writes):
        states, history = self.kv_cache[1], self._history(block)
        entries, channels = self.conv1d.weight.shape[2] - 1, len(self.conv1d.weight)
        before = history[:entries].float() if known else torch.zeros(entries, channels)
        state = states[block].float() if known else torch.zeros(states.shape[1:])
        every = torch.cat([before, qkv[rows.start:rows.stop].float()])
        for state in self._states(qkv, b, a, out, rows, every, state, writes):
            pass
        states[block] = state.to(states.dtype)
        history[:entries] = every[len(rows):].to(history.dtype)

    def _drafts(self, qkv, b, a, out, rows, blocks, accepted):
        """The state behind each token goes to a block of its own."""
        states, first = self.kv_cache[1], blocks[accepted - 1]
        if first <= 0:
            return
        entries, history = self.conv1d.weight.shape[2] - 1, self._history(blocks[0])
        before = history[accepted - 1:accepted - 1 + entries].float()
        every = torch.cat([before, qkv[rows.start:rows.stop].float()])
        for block, state in zip(blocks, self._states(qkv, b, a, out, rows, every, states[first].float(), True)):
            states[block] = state.to(states.dtype)
        history[:len(every) - 1] = every[1:].to(history.dtype)

    def _states(self, qkv, b, a, out, rows, every, state, writes):
        """The states behind the tokens."""
        taps = self.conv1d.weight[:, 0].float()
        keys, dim, values, v_dim = self.num_k_heads, self.head_k_dim, self.num_v_heads, self.head_v_dim
        for place, row in enumerate(rows):
            mixed = F.silu((every[place:place + taps.shape[1]].T * taps).sum(1)).to(qkv.dtype)
            if writes:
                qkv[row] = mixed  # in the place of its input
            q, k, v = mixed.float().split([keys * dim] * 2 + [values * v_dim])
            q, k = (one.view(keys, dim) for one in (q, k))
            q, k = ((one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(values // keys, 0)
                    for one in (q, k))
            decay = torch.exp(-torch.exp(self.A_log) * F.softplus(a[row].float() + self.dt_bias.float()))
            state = state * decay[:, None, None]
            error = (v.view(values, v_dim) - (state * k[:, None]).sum(-1)) * torch.sigmoid(b[row].float())[:, None]
            state = state + error[:, :, None] * k[:, None]
            out[row] = ((state * q[:, None]).sum(-1) * dim**-0.5).to(out.dtype)
            yield state

#!/usr/bin/env python3
"""The plugin's cores of linear attention beside vLLM's own, without an engine.

usage: vllm_linear_cores.py [delta] [drafts] [mamba] [mamba-drafts] [--quick]

vLLM 0.33 and fftune have to be installed. vLLM's classes get random parameters, and caches in pages as vLLM lays
them out. For each batch a line has the relative differences of the output, the states and the inputs of
convolutions; a line that ends with WRONG is an error. Behind them are the times of both in microseconds, vLLM's
first, as the plugin measured them.
"""

import os
import sys
import tempfile
import traceback
from types import SimpleNamespace

os.environ.update(FFTUNE_VLLM="linear-attention", VLLM_LOGGING_LEVEL="INFO", FFTUNE_CACHE=tempfile.mkdtemp())
import torch
import fftune.vllm

fftune.vllm.register()

import vllm.forward_context as context
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

dev, bf = "cuda", torch.bfloat16
QUICK = "--quick" in sys.argv
WRONG = []
CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_seqs=64),
    compilation_config=SimpleNamespace(cudagraph_mode=1, max_cudagraph_capture_size=64),
)
int32 = lambda values: torch.tensor(values, dtype=torch.int32, device=dev)


def pages(layer, channels, width, state, dtype, blocks=300, drafts=0):
    width += drafts
    begin = 2 * (width - 1) * channels
    size = dtype.itemsize
    page = begin + state[0] * state[1] * state[2] * size + 4096
    memory = torch.zeros(blocks * page, dtype=torch.uint8, device=dev)
    conv = memory.view(bf).as_strided((blocks, width - 1, channels), (page // 2, channels, 1))
    ssm = memory.view(dtype).as_strided(
        (blocks, *state), (page // size, state[1] * state[2], state[2], 1), begin // size
    )
    conv.normal_(0, 0.5)
    ssm.normal_(0, 0.5)
    layer.kv_cache = (conv, ssm)


def parameter(values):
    return torch.nn.Parameter(values, requires_grad=False)


def convolution(channels, width):
    made = torch.nn.Module()
    made.bias = None
    made.weight = parameter(torch.randn(channels, 1, width, device=dev).mul(0.5).to(bf))
    return made


def drafts_of(blocks, drafts):
    """The blocks of each sequence, one behind each of its tokens, and the tokens of its last step that were kept."""
    t = drafts + 1
    table = [[(b - 1) * t + 1 + i if b else 0 for i in range(t)] for b in blocks]
    return int32(table), int32([1 + i % t if b else 1 for i, b in enumerate(blocks)])


def delta(dtype, heads=16, v_heads=32, dim=128, width=4, drafts=0):
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as home
    from vllm.third_party.flash_linear_attention.ops.index import prepare_chunk_indices, prepare_chunk_offsets

    layer = object.__new__(home.QwenGatedDeltaNetAttention)
    torch.nn.Module.__init__(layer)
    channels = 2 * heads * dim + v_heads * dim
    conv1d = convolution(channels, width)
    for name, value in dict(
        prefix="layer",
        activation="silu",
        tp_size=1,
        num_k_heads=heads,
        num_v_heads=v_heads,
        head_k_dim=dim,
        head_v_dim=dim,
        key_dim=heads * dim,
        value_dim=v_heads * dim,
        enable_packed_recurrent_decode=True,
        gdn_prefill_backend="triton",
        conv1d=conv1d,
        A_log=parameter(torch.rand(v_heads, device=dev) * 2 - 1),
        dt_bias=parameter((torch.rand(v_heads, device=dev) * 2 - 1).to(bf)),
        chunk_gated_delta_rule=lambda aiter_prefill_metadata=None, **k: home.fla_chunk_gated_delta_rule(**k),
    ).items():
        setattr(layer, name, value)
    pages(layer, channels, width, (v_heads, dim, dim), dtype, drafts=drafts)

    def decoding(blocks):
        n = len(blocks)
        return home.GDNAttentionMetadata(
            0,
            0,
            n,
            n,
            0,
            0,
            n,
            non_spec_query_start_loc=int32(range(n + 1)),
            non_spec_state_indices_tensor=int32(blocks),
        )

    def prompts(lengths, blocks, known, first=0):
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        host = torch.tensor([s - first for s in starts[first:]], dtype=torch.int32)
        nums, batch, offsets = compute_causal_conv1d_metadata(
            torch.tensor(starts, dtype=torch.int32), device=torch.device(dev)
        )
        known, indices = torch.tensor(known, device=dev), int32(blocks)
        return home.GDNAttentionMetadata(
            len(lengths) - first,
            sum(lengths[first:]),
            first,
            first,
            0,
            0,
            sum(lengths),
            has_initial_state=known,
            non_spec_query_start_loc=int32(starts),
            non_spec_state_indices_tensor=indices,
            chunk_indices=prepare_chunk_indices(host, 64).to(dev),
            chunk_offsets=prepare_chunk_offsets(host, 64).to(dev),
            prefill_query_start_loc=host.to(dev),
            prefill_state_indices=indices[first:],
            prefill_has_initial_state=known[first:],
            nums_dict=nums,
            batch_ptr=batch,
            token_chunk_offset_ptr=offsets,
        )

    def arguments(rows):
        r = lambda *s: torch.randn(*s, device=dev).to(bf)
        wide = r(rows, channels + v_heads * dim)
        return dict(
            mixed_qkv=wide[:, :channels],
            b=r(rows, v_heads),
            a=r(rows, v_heads),
            core_attn_out=torch.zeros(rows, v_heads, dim, device=dev, dtype=bf),
        )

    if drafts:  # each sequence verifies them, and keeps some of the last step

        def decoding(blocks):
            n, t = len(blocks), drafts + 1
            table, accepted = drafts_of(blocks, drafts)
            return home.GDNAttentionMetadata(
                0,
                0,
                0,
                0,
                n,
                n * t,
                n * t,
                spec_query_start_loc=int32(range(0, n * t + 1, t)),
                spec_state_indices_tensor=table,
                spec_sequence_masks=torch.ones(n, dtype=torch.bool, device=dev),
                num_accepted_tokens=accepted,
            )

    return layer, "_forward_core", "core_attn_out", decoding, prompts, arguments


def mamba(dtype, heads=128, groups=8, dim=64, state=128, width=4, drafts=0):
    from vllm.config.mamba import MambaConfig
    from vllm.model_executor.layers.mamba import mamba_mixer2 as home
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata
    from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder as Builder

    layer = object.__new__(home.MambaMixer2)
    torch.nn.Module.__init__(layer)
    inner, channels = heads * dim, heads * dim + 2 * groups * state
    conv1d = convolution(channels, width)
    conv1d.bias = parameter(torch.randn(channels, device=dev).to(bf))
    for name, value in dict(
        prefix="layer",
        activation="silu",
        tp_size=1,
        num_heads=heads,
        n_groups=groups,
        head_dim=dim,
        ssm_state_size=state,
        tped_intermediate_size=inner,
        tped_conv_size=channels,
        tped_dt_size=heads,
        use_replayssm=False,
        num_spec=drafts,
        cache_config=SimpleNamespace(),
        mamba_config=MambaConfig(),
        is_blackwell=False,
        conv_kernel_size=width,
        conv1d=conv1d,
        conv_weights=conv1d.weight.view(channels, width),
        A=parameter(-torch.rand(heads, device=dev) - 0.1),
        D=parameter(torch.randn(heads, device=dev).to(bf)),
        dt_bias=parameter(torch.randn(heads, device=dev).to(bf)),
        split_hidden_states_B_C_fn=lambda t: torch.split(t, [inner, groups * state, groups * state], -1),
    ).items():
        setattr(layer, name, value)
    pages(layer, channels, width, (heads, dim, state), dtype, drafts=drafts)
    if hasattr(ssu_dispatch, "TritonSSUBackend"):
        for name in vars(ssu_dispatch):
            if name.startswith("_mamba_ssu_backend"):
                setattr(ssu_dispatch, name, ssu_dispatch.TritonSSUBackend(MambaConfig()))
    none = dict.fromkeys(
        (
            "has_initial_states_p",
            "query_start_loc_p",
            "state_indices_tensor_p",
            "state_indices_tensor_d",
            "query_start_loc_d",
            "num_accepted_tokens",
            "seq_lens",
        )
    )

    def decoding(blocks):
        n = len(blocks)
        if not drafts:
            return Mamba2AttentionMetadata(0, 0, n, n, n, **none | dict(state_indices_tensor_d=int32(blocks)[:, None]))
        table, accepted = drafts_of(blocks, drafts)
        verified = dict(
            state_indices_tensor_d=table,
            num_accepted_tokens=accepted,
            query_start_loc_d=int32(range(0, table.numel() + 1, drafts + 1)),
        )
        return Mamba2AttentionMetadata(0, 0, n, table.numel(), n, **none | verified)

    def prompts(lengths, blocks, known, first=0):
        starts = [sum(lengths[first:i]) for i in range(first, len(lengths) + 1)]
        host = torch.tensor(starts, dtype=torch.int32)
        nums, batch, offsets = compute_causal_conv1d_metadata(host, device=torch.device(dev))
        chunks, seq, last, _ = Builder._compute_chunk_metadata(
            256, len(lengths) - first, torch.zeros(len(lengths), dtype=torch.int32), host
        )
        return Mamba2AttentionMetadata(
            len(lengths) - first,
            sum(lengths[first:]),
            first,
            first,
            len(lengths),
            **none
            | dict(
                has_initial_states_p=torch.tensor(known[first:], device=dev),
                query_start_loc_p=host.to(dev),
                state_indices_tensor_p=int32(blocks[first:]),
                state_indices_tensor_d=int32(blocks[:first])[:, None],
            ),
            cu_chunk_seqlen_p=int32(chunks),
            last_chunk_indices_p=int32(last),
            seq_idx_p=int32(seq),
            chunk_size=256,
            prep_initial_states=any(known[first:]),
            nums_dict=nums,
            batch_ptr=batch,
            token_chunk_offset_ptr=offsets,
        )

    def arguments(rows):
        return dict(
            projected_states=torch.randn(rows, inner + channels + heads, device=dev).to(bf),
            output=torch.zeros(rows, inner, device=dev, dtype=bf),
        )

    return layer, "conv_ssm_forward", "output", decoding, prompts, arguments


def compare(name, made):
    import fftune.vllm.linear_attention as linear

    layer, method, written, decoding, prompts, arguments = made
    linear._configs[layer] = CONFIG
    own = getattr(type(layer), method)._fftune_original

    def apart(mine, right):
        return ((mine.float() - right.float()).norm() / right.float().norm().clamp(min=1e-9)).item()

    def alike(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=dev).copy_(value)

    def both(label, metadata, rows, graph=False, real=None):
        context._forward_context = SimpleNamespace(attn_metadata={"layer": metadata})
        given = arguments(rows)
        right = {key: alike(value) for key, value in given.items()}
        before = [cache.clone() for cache in layer.kv_cache]
        restore = lambda: [cache.copy_(old) for cache, old in zip(layer.kv_cache, before)]
        own(layer, **right)
        expected = [cache.clone() for cache in layer.kv_cache]
        restore()
        if graph:  # as vLLM: a warm-up, then a capture, then a replay
            spare = {key: alike(value) for key, value in given.items()}
            getattr(layer, method)(**spare)
            restore()
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                getattr(layer, method)(**given)
            restore()
            g.replay()
        else:
            getattr(layer, method)(**given)
        torch.cuda.synchronize()
        found = [
            apart(given[written][:real], right[written][:real]),
            *(apart(a, b) for a, b in zip(layer.kv_cache[::-1], expected[::-1])),
        ]
        right = max(found) < 2e-2
        if not right:
            WRONG.append(label)
        print(
            f"{name} {label}: differences {' '.join(f'{value:.1e}' for value in found)}",
            "OK" if right else "WRONG",
            flush=True,
        )
        restore()

    b = lambda n, first=1: list(range(first, first + n))
    if "drafts" in name:
        for n in (4, 1, 16):
            both(f"verification by {n}", decoding(b(n, 40)), 3 * n, graph=n != 4)
        both("verification with padding in a graph", decoding([5, 9, 0, 0]), 12, graph=True, real=6)
        return ends(linear)
    both("decoding 4", decoding(b(4)), 4)
    for n in (1, 7, 64):
        both(f"decoding {n} in a graph", decoding(b(n, 40)), n, graph=True)
    both("decoding with padding in a graph", decoding([5, 9, 0, 0]), 4, graph=True, real=2)
    both("prompt 100", prompts([100], [3], [False]), 100)
    both("prompt 100 again", prompts([100], [3], [True]), 100)
    both("mixed", prompts([1, 1, 1, 300, 65, 1], [4, 5, 6, 7, 8, 9], [True] * 4 + [False, True], first=3), 369)
    sizes = [([2048], 1), ([8192], 1), ([2048] * 4, 4)] if not QUICK else [([2048], 1)]
    for lengths, n in sizes:
        both(f"prompts {lengths}", prompts(lengths, b(n, 100), [False] * n), sum(lengths))
    ends(linear)


def ends(linear):
    for kind in linear._kinds.values():
        for choice in [*kind.steps.values(), *kind.prompts.values()]:
            if choice:
                print(
                    " ",
                    kind.words,
                    {rows: tuple(round(t * 1e3, 1) for t in times) for rows, times in sorted(choice.times.items())},
                    "us",
                )
        print("  left to vLLM:", kind.reasons or "nothing", flush=True)
    linear._kinds.clear()


def main():
    makes = {
        "delta": delta,
        "drafts": lambda dtype: delta(dtype, drafts=2),
        "mamba": mamba,
        "mamba-drafts": lambda dtype: mamba(dtype, drafts=2),
    }
    for name in [name for name in sys.argv[1:] if not name.startswith("-")] or makes:
        for dtype in (bf, torch.float32) if name == "delta" else (torch.float32,):
            try:
                compare(f"{name} {str(dtype)[6:]}", makes[name](dtype))
            except Exception:  # of another version of vLLM; the other cores are compared
                traceback.print_exc()
    return 1 if WRONG else 0


if __name__ == "__main__":
    sys.exit(main())

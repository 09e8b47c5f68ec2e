"""The contenders of off_grid.py's problems of linear attention, of latent attention, and of heads whose
values are narrower than their keys."""
import inspect
import json
import types

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import contenders
from contenders import random, sets_of
from off_grid_timing import planned, timed
from peers_attention import heads_first, repeated

aten = torch.ops.aten
TYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}
SSD_CHUNK = 256  # tokens, as Mamba-2's models set it
KEYS_OF_A_SPLIT = 512  # of vLLM's Triton kernel for latent attention


def ints(values):
    return torch.tensor(values, device=contenders.DEVICE, dtype=torch.int32)


def uniform(low, high):
    return lambda shape: torch.rand(shape, device=contenders.DEVICE) * (high - low) + low


def entries(shape):
    """Indices of a cache whose entry 0 is nobody's."""
    return torch.randperm(shape[0], device=contenders.DEVICE) + 1


def described(library, problem):
    plan = library.plan(problem)
    buffers = json.loads(library.lib.fftune_plan_describe(plan))["buffers"]
    library.destroy(plan)
    return buffers


def sets_for(library, problem, draws, more=lambda tensors: {}):
    """Sets of the problem's tensors by name: those of `draws`, by shape, and others from a normal
    distribution. more(tensors) adds what peers need in another form."""
    buffers = described(library, problem)

    def make():
        tensors = {}
        for buffer in buffers:
            dtype, draw = TYPES[buffer["dtype"]], draws.get(buffer["name"])
            value = draw(buffer["shape"]) if draw else torch.randn(buffer["shape"], device=contenders.DEVICE)
            tensors[buffer["name"]] = value.to(dtype)
        return {**tensors, **more(tensors)}

    return sets_of(make, sum(buffer["bytes"] for buffer in buffers), 64), [buffer["name"] for buffer in buffers]


def measured(library, problem, row, sets, names, result, peers):
    """Times the plan beside the peers, by name what makes each, and compares the rows of `result`."""
    plan, run = planned(library, problem, lambda s, i: [s[name] for name in names])

    def own(s, i):
        run(s, i)
        return s[result].flatten(0, -2)

    calls = {}
    for name, make in peers.items():
        try:
            calls[name] = make()
        except Exception as error:  # not installed, or not for these sizes
            row.setdefault("left_out", {})[name] = repr(error)[:120]
    timed(row, sets, {**calls, "fftune": own})
    library.destroy(plan)


# The gated delta rule.

def vllm_delta_rule():
    try:
        from vllm.third_party.flash_linear_attention import ops
    except ImportError:  # of older versions
        from vllm.model_executor.layers.fla import ops
    return ops


def import_fla():
    from fla.ops import gated_delta_rule

    return gated_delta_rule


def gates(a, A_log, dt_bias, logits):
    return -A_log.exp() * F.softplus(a.float() + dt_bias), logits.float().sigmoid()


def measure_delta_rule(library, problem, row):
    heads, v_heads, dim, v_dim = (problem["heads"], problem.get("v-heads", problem["heads"]), problem["dim"],
                                  problem["v-dim"])
    b, group, decodes = problem["b"], v_heads // heads, "indices" in problem

    def more(t):
        if not decodes:
            return {}
        tokens = [t[name].flatten(0, 1).flatten(1) for name in "qkv"]
        own = t["states"][t["state_indices"].long()]
        return {"packed": torch.cat(tokens, -1), "by_keys": own.transpose(-1, -2).contiguous()}

    sets, names = sets_for(library, problem, {
        "A_log": lambda shape: uniform(1, 16)(shape).log(), "dt_bias": uniform(-7, -2),
        "states": lambda shape: 0.3 * torch.randn(shape, device=contenders.DEVICE), "state_indices": entries}, more)
    gates_of = torch.compile(gates, dynamic=False)

    def widened(a, A_log, dt_bias, logits, q, k):
        """The gates, and q and k for each head of v: the package takes as many."""
        return *gates(a, A_log, dt_bias, logits), q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)

    widened_of = torch.compile(widened, dynamic=False)

    def of_package():
        ops = import_fla()

        def call(t, _):
            g, beta, q, k = widened_of(t["a"], t["A_log"], t["dt_bias"], t["beta_logits"], t["q"], t["k"])
            if decodes:
                return ops.fused_recurrent_gated_delta_rule(
                    q, k, t["v"], g=g, beta=beta, initial_state=t["by_keys"], output_final_state=True,
                    use_qk_l2norm_in_kernel=True)[0].flatten(0, -2)
            return ops.chunk_gated_delta_rule(q, k, t["v"], g=g, beta=beta, output_final_state=True,
                                              use_qk_l2norm_in_kernel=True)[0].flatten(0, -2)

        return call

    def of_vllm():
        ops = vllm_delta_rule()
        starts = ints([problem["s"] * i for i in range(b + 1)])
        if decodes:
            out = random(b, 1, v_heads, v_dim)

            def decode(t, _):
                ops.fused_recurrent_gated_delta_rule_packed_decode(
                    t["packed"], t["a"].flatten(0, 1), t["beta_logits"].flatten(0, 1), t["A_log"], t["dt_bias"],
                    dim**-0.5, t["states"], out, t["state_indices"], use_qk_l2norm_in_kernel=True)
                return out.flatten(0, -2)

            return decode

        def prompt(t, _):
            g, beta = gates_of(t["a"], t["A_log"], t["dt_bias"], t["beta_logits"])
            q, k, v, g, beta = (x.flatten(0, 1).unsqueeze(0) for x in (t["q"], t["k"], t["v"], g, beta))
            return ops.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, output_final_state=True, cu_seqlens=starts,
                                              use_qk_l2norm_in_kernel=True)[0].flatten(0, -2)

        return prompt

    def step(q, k, v, a, A_log, dt_bias, logits, states, indices):
        g, beta = (x[:, 0] for x in gates(a, A_log, dt_bias, logits))
        q, k = (x[:, 0].float().repeat_interleave(group, 1) for x in (q, k))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        own = states[indices] * g.exp()[..., None, None]
        error = beta[..., None] * (v[:, 0].float() - (own @ k[..., None]).squeeze(-1))
        own = own + error[..., None] * k[:, :, None]
        states[indices] = own
        return (dim**-0.5 * (own @ q[..., None]).squeeze(-1)).to(torch.bfloat16).flatten(0, -2)

    def compiled():
        if not decodes:
            raise ValueError("token by token")
        call = torch.compile(step, dynamic=False)
        return lambda t, _: call(*(t[name] for name in ("q", "k", "v", "a", "A_log", "dt_bias", "beta_logits",
                                                        "states", "state_indices")))

    measured(library, problem, row, sets, names, "out", {"FLA": of_package, "vLLM": of_vllm, "compile": compiled})


# State space duality.

def import_mamba_ssm():
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined, selective_state_update


def import_vllm_ssd():
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    return mamba_chunk_scan_combined_varlen, selective_state_update


def chunks_of(sequences, tokens):
    """Where vLLM's chunks begin, the last one of each sequence, and the sequence of each."""
    each = -(-tokens // SSD_CHUNK)
    starts = [i * tokens + j * SSD_CHUNK for i in range(sequences) for j in range(each)] + [sequences * tokens]
    return (ints(starts), ints([(i + 1) * each - 1 for i in range(sequences)]),
            ints([i for i in range(sequences) for _ in range(each)]))


def measure_ssd(library, problem, row):
    heads, dim, state_dim = problem["heads"], problem["dim"], problem["state-dim"]
    b, s, decodes = problem["b"], problem["s"], "indices" in problem

    sets, names = sets_for(library, problem, {
        "A_log": lambda shape: uniform(1, 16)(shape).log(), "dt_bias": uniform(-7, -2),
        "states": lambda shape: 0.3 * torch.randn(shape, device=contenders.DEVICE), "state_indices": entries},
                           lambda t: {"A": -t["A_log"].exp()})

    def step(x, dt, A, B, C, D, dt_bias, states, indices):
        x, dt = x[:, 0].float(), F.softplus(dt[:, 0].float() + dt_bias)
        B, C = (y[:, 0].float().repeat_interleave(heads // y.shape[2], 1) for y in (B, C))
        own = states[indices] * (dt * A).exp()[..., None, None] + (dt[..., None] * x)[..., None] * B[:, :, None]
        states[indices] = own
        return ((own @ C[..., None]).squeeze(-1) + D[:, None] * x).to(torch.bfloat16).flatten(0, -2)

    def compiled():
        if not decodes:
            raise ValueError("token by token")
        call = torch.compile(step, dynamic=False)
        return lambda t, _: call(*(t[name] for name in ("x", "dt", "A", "B", "C", "D", "dt_bias", "states",
                                                        "state_indices")))

    def update(kernel):
        out = random(b, heads, dim)
        more = {"out": out} if "out" in inspect.signature(kernel).parameters else {}

        def call(t, _):
            # A head's features share A, D, dt and its bias: a stride of 0 tells the kernels.
            found = kernel(t["states"], t["x"][:, 0], t["dt"][:, 0, :, None].expand(b, heads, dim),
                           t["A"][:, None, None].expand(heads, dim, state_dim), t["B"][:, 0], t["C"][:, 0],
                           D=t["D"][:, None].expand(heads, dim), dt_bias=t["dt_bias"][:, None].expand(heads, dim),
                           dt_softplus=True, state_batch_indices=t["state_indices"], **more)
            return (out if found is None else found).flatten(0, -2)

        return call

    def of_vllm():
        scan, one_token = import_vllm_ssd()
        if decodes:
            return update(one_token)
        chunks, last, owners = chunks_of(b, s)
        starts, out = ints([s * i for i in range(b + 1)]), random(b * s, heads, dim)

        def call(t, _):
            scan(*(t[name].flatten(0, 1) for name in ("x", "dt")), t["A"],
                 *(t[name].flatten(0, 1) for name in "BC"), SSD_CHUNK, cu_seqlens=starts, cu_chunk_seqlens=chunks,
                 last_chunk_indices=last, seq_idx=owners, out=out, D=t["D"], dt_bias=t["dt_bias"], dt_softplus=True,
                 state_dtype=torch.float32)
            return out.flatten(0, -2)

        return call

    def of_mamba():
        scan, one_token = import_mamba_ssm()
        if decodes:
            return update(one_token)
        return lambda t, _: scan(t["x"], t["dt"], t["A"], t["B"], t["C"], SSD_CHUNK, D=t["D"], dt_bias=t["dt_bias"],
                                 dt_softplus=True, return_final_states=True)[0].flatten(0, -2)

    measured(library, problem, row, sets, names, "out", {"vLLM": of_vllm, "mamba_ssm": of_mamba, "compile": compiled})


# Causal convolutions.

def import_vllm_convolution():
    from vllm.model_executor.layers.mamba.ops import causal_conv1d

    return causal_conv1d


def import_causal_conv1d():
    import causal_conv1d

    return causal_conv1d


def measure_convolution(library, problem, row):
    b, s, channels, width = (problem[name] for name in ("b", "s", "channels", "width"))
    act, decodes = "silu" if problem["act"] == "silu" else None, "state" in problem
    sets, names = sets_for(library, problem, {
        "w": lambda shape: width**-0.5 * torch.randn(shape, device=contenders.DEVICE), "indices": entries})

    def activated(y):
        return F.silu(y) if act else y

    def prompt(x, w, bias):
        y = F.conv1d(x.transpose(1, 2), w[:, None], bias, padding=width - 1, groups=channels)[..., :s]
        return activated(y).transpose(1, 2)

    def step(x, w, bias, state, indices):
        seen = torch.cat((state[indices], x), 1)
        state[indices] = seen[:, 1:]
        y = (seen.float() * w.float().t()).sum(1)
        return activated(y if bias is None else y + bias.float()).to(x.dtype)

    def compiled():
        call = torch.compile(step if decodes else prompt, dynamic=False)
        more = ("state", "indices") if decodes else ()
        return lambda t, _: call(t["x"], t["w"], t.get("bias"), *(t[name] for name in more)).flatten(0, -2)

    def of_vllm():
        kernels = import_vllm_convolution()
        if decodes:
            # It may write over x.
            return lambda t, _: kernels.causal_conv1d_update(
                t["x"][:, 0], t["state"].transpose(1, 2), t["w"], t.get("bias"), act, conv_state_indices=t["indices"])
        from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

        starts = torch.arange(b + 1, dtype=torch.int32) * s
        numbers, sequences, places = compute_causal_conv1d_metadata(starts, device=torch.device(contenders.DEVICE))
        metadata = types.SimpleNamespace(nums_dict=numbers, batch_ptr=sequences, token_chunk_offset_ptr=places)
        state, on_device = random(b + 1, width - 1, channels).transpose(1, 2), starts.to(contenders.DEVICE)
        indices, begins = ints(range(1, b + 1)), torch.zeros(b, dtype=torch.bool, device=contenders.DEVICE)
        return lambda t, _: kernels.causal_conv1d_fn(
            t["x"].flatten(0, 1).t(), t["w"], t.get("bias"), state, on_device, cache_indices=indices,
            has_initial_state=begins, activation=act, metadata=metadata).t()

    def of_package():
        kernels = import_causal_conv1d()
        if decodes:
            return lambda t, _: kernels.causal_conv1d_update(
                t["x"][:, 0], t["state"].transpose(1, 2), t["w"], t.get("bias"), act, conv_state_indices=t["indices"])
        return lambda t, _: kernels.causal_conv1d_fn(
            t["x"].transpose(1, 2), t["w"], t.get("bias"), activation=act).transpose(1, 2).flatten(0, -2)

    measured(library, problem, row, sets, names, "y", {"compile": compiled, "vLLM": of_vllm,
                                                       "causal_conv1d": of_package})


# Gated norms.

def import_vllm_norm():
    from vllm.model_executor.layers.mamba.ops.layernorm_gated import rms_norm_gated

    return rms_norm_gated


def import_fla_norm():
    from fla.modules.fused_norm_gate import rms_norm_gated

    return rms_norm_gated


def measure_gated_norm(library, problem, row):
    m, d, groups = problem["m"], problem["d"], problem.get("groups", 1)
    before, silu = problem["order"] == "before", problem["gate"] == "silu"
    sets, names = sets_for(library, problem, {})

    def norm(x, z, w):
        x, z = x.float(), z.float()
        gate = F.silu(z) if silu else z.sigmoid()
        y = (x * gate if before else x).view(m, groups, d)
        y = (y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).view(m, -1) * w.float()
        return (y if before else y * gate).to(torch.bfloat16)

    def compiled():
        call = torch.compile(norm, dynamic=False)
        return lambda t, _: call(t["x"], t["z"], t["w"])

    def of_vllm():
        kernel = import_vllm_norm()
        if not silu:
            raise ValueError("its gate is silu")
        return lambda t, _: kernel(t["x"], t["w"], None, z=t["z"], eps=1e-6, group_size=d, norm_before_gate=not before)

    def of_fla():
        kernel = import_fla_norm()
        if before:
            raise ValueError("its gate is behind the norm")
        return lambda t, _: kernel(t["x"], t["z"], t["w"], None, activation="swish" if silu else "sigmoid", eps=1e-6)

    measured(library, problem, row, sets, names, "y", {"compile": compiled, "vLLM": of_vllm, "FLA": of_fla})


# Latent attention.

def import_flash_mla():
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata, is_flashmla_dense_supported

    supported, why = is_flashmla_dense_supported()
    if not supported:
        raise ImportError(why)
    return flash_mla_with_kvcache, get_mla_metadata


def import_vllm_flash3():
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


def import_triton_latent():
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    return decode_attention_fwd


def measure_latent(library, problem, row):
    b, s, kv, heads, rank, page = (problem[name] for name in ("b", "s", "kv", "heads", "rank", "page"))
    width, rows = rank + problem["rope"], b * s
    scale = width**-0.5

    def more(t):
        keys = t["cache"][t["pages"].long()].flatten(1, 2)[:, :kv]
        return {"q": torch.cat((t["q_latent"], t["q_rope"]), -1), "keys": keys.contiguous()}

    sets, names = sets_for(library, problem, {
        "pages": lambda shape: torch.randperm(shape[0] * shape[1], device=contenders.DEVICE).view(shape)}, more)
    lengths = torch.full((b,), kv, device=contenders.DEVICE, dtype=torch.int32)
    seen = torch.ones(s, kv, device=contenders.DEVICE, dtype=torch.bool).tril(kv - s)

    def attend(q, keys):
        scores = torch.einsum("bshw,bkw->bhsk", q, keys).float() * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(q.dtype)
        return torch.einsum("bhsk,bkr->bshr", weights, keys[..., :rank])

    def compiled():
        call = torch.compile(attend, dynamic=False)
        return lambda t, _: call(t["q"], t["keys"]).flatten(0, -2)

    def of_flash_mla():
        kernel, plan = import_flash_mla()
        plans, _ = plan()
        return lambda t, _: kernel(
            q=t["q"], k_cache=t["cache"].unsqueeze(-2), block_table=t["pages"], cache_seqlens=lengths, head_dim_v=rank,
            tile_scheduler_metadata=plans, softmax_scale=scale, causal=True)[0].flatten(0, -2)

    def of_flash3():
        kernel, starts = import_vllm_flash3(), ints([s * i for i in range(b + 1)])
        return lambda t, _: kernel(
            q=t["q_rope"].flatten(0, 1), k=t["cache"][..., rank:].unsqueeze(-2), v=t["cache"][..., :rank].unsqueeze(-2),
            q_v=t["q_latent"].flatten(0, 1), max_seqlen_q=s, cu_seqlens_q=starts, max_seqlen_k=kv, seqused_k=lengths,
            block_table=t["pages"], softmax_scale=scale, causal=True, fa_version=3).flatten(0, -2)

    def of_triton():
        kernel = import_triton_latent()
        splits = 1 << max(0, (kv // KEYS_OF_A_SPLIT - 1).bit_length())
        out, logsums = random(rows, heads, rank), random(rows, heads)
        parts = torch.empty(rows, heads, splits, rank + 1, device=contenders.DEVICE)
        # A row for each query, with the keys that it sees.
        each = (lengths[:, None] + torch.arange(1 - s, 1, device=contenders.DEVICE, dtype=torch.int32)).flatten()
        one = torch.ones((), device=contenders.DEVICE)
        tables = [t["pages"].repeat_interleave(s, 0) for t in sets]

        def call(t, i):
            cache = t["cache"].unsqueeze(2)
            kernel(t["q"].flatten(0, 1), cache, cache[..., :rank], out, logsums, tables[i], each, parts, splits, scale,
                   page, k_scale=one, v_scale=one, is_mla=True)
            return out.flatten(0, -2)

        return call

    measured(library, problem, row, sets, names, "out", {"compile": compiled, "FlashMLA": of_flash_mla,
                                                         "FA3": of_flash3, "Triton": of_triton})


# Heads whose values are narrower than their keys.

def import_flash3():
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        return import_vllm_flash3()
    return flash_attn_func


def flash3(b, s, kv, causal):
    """FlashAttention 3 by one of the packages that have it: a call of a set with q, k and v."""
    kernel = import_flash3()
    if kernel.__name__ == "flash_attn_func":
        return lambda t, _: kernel(t["q"], t["k"], t["v"], causal=causal)
    starts = [ints([length * i for i in range(b + 1)]) for length in (s, kv)]
    return lambda t, _: kernel(t["q"].flatten(0, 1), t["k"].flatten(0, 1), t["v"].flatten(0, 1), s, starts[0], kv,
                               starts[1], causal=causal, fa_version=3).view(*t["q"].shape[:3], -1)


def measure_value_dims(library, problem, row):
    b, s, heads, dim, v_dim = (problem[name] for name in ("b", "s", "heads", "dim", "v-dim"))
    causal, backward = problem["mask"] == "causal", problem.get("pass") == "bwd"
    grouped = "kv-heads" in problem

    def views(t):
        """Heads first, and keys and values once for each head of the queries."""
        return heads_first(t["q"]), repeated(t["k"], heads), repeated(t["v"], heads)

    def more(t):
        """The gradients begin with what a forward pass of each peer found."""
        if not backward:
            return {}
        out, sums, *seeds = aten._scaled_dot_product_efficient_attention(*views(t), None, True, 0.0, causal)
        t["out"].copy_(heads_first(out))
        t["lse"].copy_(sums[..., :s])
        return {"efficient_sums": sums, **{f"seed{i}": seed for i, seed in enumerate(seeds)}}

    sets, names = sets_for(library, problem, {}, more)

    def by(backend):
        def call(t, _):
            with sdpa_kernel(backend):
                return heads_first(F.scaled_dot_product_attention(
                    heads_first(t["q"]), *((heads_first(t["k"]), heads_first(t["v"])) if backend ==
                                           SDPBackend.CUDNN_ATTENTION else views(t)[1:]), is_causal=causal,
                    enable_gqa=grouped and backend == SDPBackend.CUDNN_ATTENTION)).flatten(0, -2)

        return lambda: call

    def padded():
        def call(t, _):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = F.scaled_dot_product_attention(
                    heads_first(t["q"]), heads_first(t["k"]), heads_first(F.pad(t["v"], (0, dim - v_dim))),
                    is_causal=causal, enable_gqa=grouped)
            return heads_first(out)[..., :v_dim].flatten(0, -2)

        return call

    def efficient_backward():
        def call(t, _):
            found = aten._scaled_dot_product_efficient_attention_backward(
                heads_first(t["d_out"]), *views(t), None, heads_first(t["out"]), t["efficient_sums"], t["seed0"],
                t["seed1"], 0.0, [True, True, True, False], causal)
            return heads_first(found[0]).flatten(0, -2)

        return call

    def cudnn_backward():
        kept = [aten._scaled_dot_product_cudnn_attention(*views(t), None, True, 0.0, causal) for t in sets]

        def call(t, i):
            out, sums, starts, kv_starts, most, kv_most, seed, offset, _ = kept[i]
            found = aten._scaled_dot_product_cudnn_attention_backward(
                heads_first(t["d_out"]), *views(t), out, sums, seed, offset, None, starts, kv_starts, most, kv_most,
                0.0, causal)
            return heads_first(found[0]).flatten(0, -2)

        return call

    def of_flash3():
        call = flash3(b, s, s, causal)
        return lambda t, i: call(t, i).flatten(0, -2)

    peers = {"efficient": efficient_backward, "cuDNN": cudnn_backward} if backward else {
        "efficient": by(SDPBackend.EFFICIENT_ATTENTION), "cuDNN": by(SDPBackend.CUDNN_ATTENTION),
        "flash-2": padded, "FA3": of_flash3}
    measured(library, problem, row, sets, names, "dq" if backward else "out", peers)


MEASURES = {"mla": measure_latent, "gated-delta-rule": measure_delta_rule, "ssd": measure_ssd,
            "causal-conv1d": measure_convolution, "gated-rmsnorm": measure_gated_norm}
# By op, the peers that do not come with PyTorch, and what imports them.
PEERS = {"attention-v-dim": {"FA3": import_flash3},
         "mla": {"FlashMLA": import_flash_mla, "FA3": import_vllm_flash3, "Triton": import_triton_latent},
         "gated-delta-rule": {"FLA": import_fla, "vLLM": vllm_delta_rule},
         "ssd": {"vLLM": import_vllm_ssd, "mamba_ssm": import_mamba_ssm},
         "causal-conv1d": {"vLLM": import_vllm_convolution, "causal_conv1d": import_causal_conv1d},
         "gated-rmsnorm": {"vLLM": import_vllm_norm, "FLA": import_fla_norm}}

"""The contender triton of peers_moe.py: a kernel tiled as that of vLLM and SGLang, both products and
what is between them, and the choice among a few configurations."""
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from contenders import graph_of, seconds

FP8 = torch.float8_e4m3fn

# By whether it is fp8 and below how many rows of an expert: at most six configurations of the kind
# that published tables for Hopper GPUs have. In fp8 a block of K is one of the scales.
NAMES = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "num_warps", "num_stages")
CONFIGS = {
    False: {2: [(16, 64, 64, 1, 4, 5), (16, 64, 128, 1, 4, 4), (16, 64, 256, 1, 4, 2),
                (16, 128, 64, 1, 4, 5), (16, 128, 128, 16, 4, 5)],
            8: [(16, 64, 128, 1, 4, 4), (16, 128, 128, 16, 4, 5), (16, 128, 128, 1, 4, 3),
                (16, 256, 128, 1, 8, 2), (32, 128, 128, 1, 4, 3)],
            32: [(16, 128, 128, 1, 4, 3), (32, 128, 128, 1, 4, 4), (32, 128, 128, 1, 4, 3),
                 (32, 256, 128, 16, 4, 2), (64, 128, 64, 1, 4, 3)],
            128: [(64, 128, 64, 1, 4, 3), (64, 128, 128, 1, 8, 4), (64, 256, 64, 16, 8, 4),
                  (128, 128, 64, 16, 8, 4), (128, 256, 64, 16, 8, 4), (128, 256, 64, 1, 8, 4)],
            float("inf"): [(64, 256, 64, 16, 8, 4), (128, 128, 64, 16, 8, 4),
                           (128, 256, 64, 1, 8, 4), (128, 256, 64, 16, 8, 4),
                           (128, 256, 64, 16, 8, 3), (128, 256, 64, 64, 8, 4)]},
    True: {12: [(16, 64, 128, 1, 4, 5), (16, 128, 128, 1, 4, 5), (16, 128, 128, 16, 4, 3),
                (16, 128, 128, 16, 4, 4), (64, 64, 128, 1, 4, 3)],
           float("inf"): [(16, 128, 128, 16, 4, 3), (64, 128, 128, 1, 4, 4),
                          (64, 128, 128, 16, 4, 4), (64, 128, 128, 32, 4, 3),
                          (128, 128, 128, 16, 8, 3), (128, 64, 128, 16, 4, 4)]}}


@triton.jit
def expert_product(a, w, out, a_scale, w_scale, weights, rows, experts, n, k, choices_of_row,
                   WEIGHTED: tl.constexpr, SCALED: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    """out[c] = a[c // choices_of_row] w[expert]^T for each choice c, times its weight or not.

    a is [., k], w [experts of all, n, k], n and k multiples of the tiles; accumulated in fp32.
    `rows` are the choices, sorted by expert; an expert's last block of BLOCK_M is filled up with -1.
    `experts` has the expert of each block. Programs walk along GROUP_M blocks of rows first, then
    along n, so that those which run together share tiles of w and rows of a in L2.
    """
    blocks_n = n // BLOCK_N
    blocks_m = tl.num_programs(0) // blocks_n
    group = tl.program_id(0) // (GROUP_M * blocks_n)
    place = tl.program_id(0) % (GROUP_M * blocks_n)
    height = min(blocks_m - group * GROUP_M, GROUP_M)
    block_m = group * GROUP_M + place % height
    block_n = place // height

    choice = tl.load(rows + block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    lives = choice >= 0
    row = choice // choices_of_row
    expert = tl.load(experts + block_m).to(tl.int64)
    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_at = a + row[:, None] * k + inner[None, :]
    w_at = w + expert * n * k + column[None, :] * k + inner[:, None]
    if SCALED:  # BLOCK_K is 128, and BLOCK_N at most
        a_scale_at = a_scale + row * (k // 128)
        w_scale_at = w_scale + (expert * (n // 128) + block_n * BLOCK_N // 128) * (k // 128)

    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, k // BLOCK_K):
        a_tile = tl.load(a_at, mask=lives[:, None], other=0.0)
        w_tile = tl.load(w_at)
        if SCALED:
            scale = tl.load(a_scale_at + step, mask=lives, other=0.0) * tl.load(w_scale_at + step)
            sums += tl.dot(a_tile, w_tile) * scale[:, None]
        else:
            sums = tl.dot(a_tile, w_tile, sums)
        a_at += BLOCK_K
        w_at += BLOCK_K
    if WEIGHTED:
        sums *= tl.load(weights + choice, mask=lives, other=0.0)[:, None]
    tl.store(out + choice[:, None] * n + column[None, :], sums.to(out.dtype.element_ty),
             mask=lives[:, None])


def silu_mul(both):
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def sum_of_choices(out):
    return out.sum(1)


def quantised(x):
    """fp8 elements [rows, k] and their scales [rows, k / 128]."""
    blocks = x.unflatten(-1, (-1, 128)).to(torch.promote_types(x.dtype, torch.float32))
    scale = blocks.abs().amax(-1) / 448
    scale = torch.where(scale > 0, scale, 1.0)
    return (blocks / scale[..., None]).flatten(-2).float().to(FP8), scale.float()


def sorted_by_expert(ids, experts):
    """The choices in the order of their experts, and how many each expert has."""
    flat = ids.flatten().long()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=experts)


def blocks_of_experts(ids, experts, height):
    """`rows` and `experts` of expert_product. Their number is known here, so that no program is
    without rows, which spares the peer some."""
    order, counts = sorted_by_expert(ids, experts)
    blocks = (counts + height - 1) // height
    # How far an expert's rows move behind the padding of those before it.
    shift = (blocks * height - counts).cumsum(0) - (blocks * height - counts)
    rows = torch.full((int(blocks.sum()) * height,), -1, device=ids.device, dtype=torch.int32)
    places = torch.arange(len(order), device=ids.device) + shift.repeat_interleave(counts)
    rows[places] = order.int()
    return rows, torch.arange(experts, device=ids.device).repeat_interleave(blocks).int()


def product(a, a_scale, w, w_scale, t, route, config, choices_of_row):
    """out [choices, n] of expert_product; the rows of choices, not of tokens, are weighted."""
    rows, experts = route
    n, k = w.shape[1:]
    out = torch.empty(t["ids"].numel(), n, device=a.device, dtype=torch.bfloat16)
    grid = (len(experts) * (n // config["BLOCK_N"]),)
    expert_product[grid](a, w, out, a_scale, w_scale, t["weights"], rows, experts, n, k,
                         choices_of_row, WEIGHTED=choices_of_row == 1, SCALED=a_scale is not None,
                         **config)
    return out


def triton_call(model, sets, config, act, total):
    routes = [blocks_of_experts(t["ids"], model.experts, config["BLOCK_M"]) for t in sets]

    def call(t, i):
        both = product(t["x"], t.get("x_scale"), t["w_gate_up"], t.get("w_gate_up_scale"), t,
                       routes[i], config, model.choices)
        hidden, scale = act(both), None
        if model.fp8:
            # Once, before anything is timed: every later pass finds its hidden quantised already.
            if "hidden" not in t:
                t["hidden"], t["hidden_scale"] = quantised(hidden)
            hidden, scale = t["hidden"], t["hidden_scale"]
        out = product(hidden, scale, t["w_down"], t.get("w_down_scale"), t, routes[i], config, 1)
        return total(out.view(-1, model.choices, model.d))

    return call


def triton_contender(model, sets, on_failure):
    """call(set, index) of the fastest configuration, that configuration as text, and µs by
    configuration. on_failure(configuration, error) hears of those that fail."""
    act, total = (torch.compile(f, dynamic=False) for f in (silu_mul, sum_of_choices))
    rows_of_expert = sets[0]["ids"].numel() / model.experts
    limit = min(limit for limit in CONFIGS[model.fp8] if rows_of_expert < limit)
    times, calls = {}, {}
    for values in CONFIGS[model.fp8][limit]:
        config = ",".join(str(value) for value in values)
        call = triton_call(model, sets, dict(zip(NAMES, values)), act, total)
        try:
            for i, t in enumerate(sets):
                call(t, i)
            graph = graph_of([lambda t=t, i=i, call=call: call(t, i) for i, t in enumerate(sets)])
            seconds(graph, 1)
            times[config], calls[config] = seconds(graph, 5) / len(sets) * 1e6, call
        except Exception as error:  # too much shared memory, say
            on_failure(config, error)
    best = min(times, key=times.get)
    return calls[best], best, times

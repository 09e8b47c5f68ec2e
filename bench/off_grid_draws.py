"""The problems that off_grid.py draws at random: sizes that models have, and sizes beside them."""
import itertools
import math
import random

MOST_BYTES = 3e9  # of a problem's tensors
MOST_FLOPS = 2e13

FEATURES = (576, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048, 2304, 2560, 2880, 3072, 3584, 3840,
            4096, 4608, 5120, 5376, 6144, 7168, 8192)
HIDDEN = (512, 768, 1408, 1536, 2048, 2880, 4864, 5632, 6144, 8192, 8960, 9216, 9728, 10240, 11008, 13824,
          14336, 18944, 21504, 25600, 27648, 28672)
EXPERTS = ((8, 2), (16, 1), (16, 2), (32, 4), (60, 4), (64, 6), (64, 8), (72, 6), (128, 1), (128, 4), (128, 8),
           (160, 6), (256, 8), (384, 8), (512, 10))
DELTA_HEADS = ((16, 32), (16, 48), (16, 64), (16, 16), (8, 16), (4, 8), (2, 8), (32, 32))  # of k, of v
# heads, features of one, those of a group of B and C, and groups
MAMBA = ((128, 64, 128, 8), (64, 64, 128, 8), (128, 80, 128, 8), (128, 64, 128, 1), (48, 64, 256, 1), (24, 64, 128, 1))
LATENT = ((512, 64), (512, 64), (512, 64), (256, 64))  # features of a key that are its value, and the rotated ones
LATENT_HEADS = (8, 16, 16, 20, 32, 64, 128, 128)
VALUE_DIMS = ((192, 128), (192, 128), (192, 128), (96, 64), (128, 64), (256, 128))  # of keys, of values


def between(draw, low, high):
    """A whole number, each octave as often."""
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def prime_from(number):
    """The first prime from a number on."""
    return next(n for n in itertools.count(max(number, 2)) if all(n % i for i in range(2, math.isqrt(n) + 1)))


def size(draw, models, low, high, primes=True):
    """Features as models have them, and beside those."""
    kind = draw.choices(("model", "power", 64, 16, 8, "prime"), (6, 2, 6, 3, 2, 1 if primes else 0))[0]
    if kind == "model":
        return draw.choice([n for n in models if low <= n <= high])
    if kind == "power":
        return 2 ** draw.randint(math.ceil(math.log2(low)), math.floor(math.log2(high)))
    number = between(draw, low, high)
    if kind == "prime":
        return prime_from(number)
    return max(kind, number // kind * kind)


def tokens(draw, most=8192):
    low, high = draw.choices(((1, 16), (17, 512), (513, most)), (3, 5, 3))[0]
    return between(draw, low, high)


def draw_linear(draw):
    int4 = draw.random() < 0.5
    problem = {"op": "linear", "dtype": "bf16", "m": tokens(draw, 4096 if int4 else 8192),
               "k": size(draw, FEATURES + HIDDEN, 512, 28672, not int4),
               "n": size(draw, FEATURES + HIDDEN, 512, 28672, not int4)}
    if int4:
        problem["k"] = max(problem["k"] // 128, 4) * 128
        problem.update(weights="int4", group=draw.choice(("128", "128", "64", "32")))
    return problem


def draw_ffn(draw):
    return {"op": "ffn", "dtype": "bf16", "m": tokens(draw), "d": size(draw, FEATURES, 512, 8192),
            "h": size(draw, HIDDEN, 512, 28672)}


def draw_experts(draw):
    experts, choices = draw.choice(EXPERTS) if draw.random() < 0.7 else (between(draw, 4, 512), between(draw, 1, 10))
    return {"op": "moe-ffn", "dtype": "bf16", "m": tokens(draw), "d": size(draw, FEATURES, 512, 7168, False),
            "h": size(draw, HIDDEN, 256, 8192, False), "experts": experts, "top-k": min(choices, experts)}


def draw_attention(draw):
    kind = draw.choices(("fwd", "bwd", "decode"), (4, 3, 3))[0]
    kv_heads = draw.choice((1, 2, 3, 4, 5, 8, 16))
    heads = kv_heads * draw.choice((1, 1, 2, 3, 4, 5, 6, 7, 8))
    dim = draw.choice((64, 80, 96, 128, 128, 192, 256)) if draw.random() < 0.5 else 2 * draw.randint(16, 128)
    if kind == "bwd":
        dim = -(-dim // 8) * 8  # other gradients no peer has
    problem = {"op": "attention", "pass": "bwd" if kind == "bwd" else "fwd", "dtype": "bf16",
               "b": between(draw, 1, 64 if kind == "decode" else 8), "heads": heads, "dim": dim, "mask": "none"}
    if kv_heads != heads:
        problem["kv-heads"] = kv_heads
    if kind == "decode":
        problem.update(s=1, kv=between(draw, 64, 32768))
    else:
        problem.update(s=between(draw, 128, 8192), mask=draw.choice(("causal", "causal", "none")))
    return problem


def draw_rows(op, d="d"):
    def draw_of(draw):
        return {"op": op, "dtype": "bf16", "m": tokens(draw, 32768), d: size(draw, FEATURES, 128, 16384)}

    return draw_of


def draw_value_dims(draw):
    """Heads whose values have fewer features than their keys, as latent attention expands them."""
    dim, v_dim = draw.choice(VALUE_DIMS) if draw.random() < 0.6 else (8 * draw.randint(8, 32), 0)
    kv_heads = draw.choice((4, 8, 16, 20, 32))
    heads = kv_heads * draw.choice((1, 1, 1, 2, 4))
    problem = {"op": "attention", "pass": draw.choice(("fwd", "fwd", "bwd")), "dtype": "bf16", "b": between(draw, 1, 8),
               "s": between(draw, 128, 8192), "heads": heads, "dim": dim,
               "v-dim": v_dim or 8 * draw.randint(4, dim // 8 - 1), "mask": draw.choice(("causal", "causal", "none"))}
    if kv_heads != heads:
        problem["kv-heads"] = kv_heads
    return problem


def draw_latent(draw):
    rank, rope = draw.choice(LATENT)
    return {"op": "mla", "dtype": "bf16", "b": between(draw, 1, 128), "s": draw.choice((1, 1, 1, 2, 4)),
            "kv": between(draw, 64, 65536), "heads": draw.choice(LATENT_HEADS), "rank": rank, "rope": rope, "page": 64}


def with_sequences(draw, problem):
    """Adds prompts without a state before them, or sequences of one token with states in a cache."""
    if draw.random() < 0.5:
        problem.update(s=between(draw, 32, 16384), b=between(draw, 1, 8))
        problem["final-state"] = "yes"
    else:
        problem.update(s=1, b=between(draw, 1, 256), indices="yes")
    return problem


def draw_delta_rule(draw):
    heads, v_heads = draw.choice(DELTA_HEADS)
    dim = v_dim = 128
    if draw.random() < 0.3:
        dim, v_dim = (draw.choice((64, 96, 128, 192, 256)) for _ in range(2))
    problem = {"op": "gated-delta-rule", "dtype": "bf16", "heads": heads, "dim": dim, "v-dim": v_dim,
               "gate": "softplus", "beta": "sigmoid", "qk-norm": "l2"}
    if v_heads != heads:
        problem["v-heads"] = v_heads
    return with_sequences(draw, problem)


def draw_ssd(draw):
    heads, dim, state_dim, groups = draw.choice(MAMBA)
    if draw.random() < 0.3:
        groups = draw.choice((1, 2, 4, 8))
        heads, dim, state_dim = groups * draw.randint(2, 16), draw.choice((32, 64, 80, 96, 128)), draw.choice(
            (16, 64, 96, 128, 256))
    problem = {"op": "ssd", "dtype": "bf16", "heads": heads, "dim": dim, "state-dim": state_dim, "skip": "yes",
               "dt-bias": "yes"}
    if groups != 1:
        problem["groups"] = groups
    return with_sequences(draw, problem)


def draw_convolution(draw):
    problem = {"op": "causal-conv1d", "dtype": "bf16", "channels": size(draw, FEATURES, 256, 16384, False),
               "width": draw.choice((4, 4, 4, 4, 3, 2)), "act": draw.choice(("silu", "silu", "silu", "none")),
               "bias": draw.choice(("yes", "no"))}
    if draw.random() < 0.5:
        problem.update(s=between(draw, 32, 16384), b=between(draw, 1, 8))
    else:
        problem.update(s=1, b=between(draw, 1, 256), state="update", entries=problem["width"] - 1)
        problem["slots"] = problem["b"] + 1
    return problem


def draw_gated_norm(draw):
    if draw.random() < 0.5:  # heads of linear attention, a row each
        return {"op": "gated-rmsnorm", "dtype": "bf16", "m": tokens(draw, 8192) * draw.choice((8, 16, 32, 48)),
                "d": draw.choice((64, 96, 128, 128, 128, 192, 256)), "order": "after",
                "gate": draw.choice(("silu", "silu", "sigmoid"))}
    groups = draw.choice((1, 1, 2, 4, 8))
    problem = {"op": "gated-rmsnorm", "dtype": "bf16", "m": tokens(draw, 16384),
               "d": 8 * (size(draw, FEATURES, 1024, 16384, False) // (8 * groups)), "order": "before", "gate": "silu"}
    if groups != 1:
        problem["groups"] = groups
    return problem


DRAWS = {"linear": draw_linear, "ffn": draw_ffn, "moe-ffn": draw_experts, "attention": draw_attention,
         "attention-v-dim": draw_value_dims, "mla": draw_latent, "gated-delta-rule": draw_delta_rule,
         "ssd": draw_ssd, "causal-conv1d": draw_convolution, "gated-rmsnorm": draw_gated_norm,
         "rmsnorm": draw_rows("rmsnorm"), "layernorm": draw_rows("layernorm"), "act-mul": draw_rows("act-mul", "h"),
         "bias-gelu": draw_rows("bias-gelu", "h")}


def work_of_states(problem):
    """Those of token by token: chunks have more FLOPs. States are f32: those of a cache are read and
    written, those behind a prompt are written."""
    heads, dim, tokens_of = problem["heads"], problem["dim"], problem["b"] * problem["s"]
    if problem["op"] == "ssd":
        state = heads * dim * problem["state-dim"]
        elements, each = heads * (2 * dim + 1) + 2 * problem.get("groups", 1) * problem["state-dim"], 4
    else:
        v_heads = problem.get("v-heads", heads)
        state = v_heads * problem["v-dim"] * dim
        elements, each = 2 * heads * dim + v_heads * (2 * problem["v-dim"] + 2), 6
    return (each * tokens_of * state,
            2 * tokens_of * elements + 4 * problem["b"] * state * (2 if "indices" in problem else 1))


def work_of(problem):
    """(FLOPs, bytes) of a problem: each tensor is read or written once, and of experts those that
    tokens are expected to choose."""
    size_of = problem.get
    m = size_of("m", 1)
    if problem["op"] == "linear":
        k, n = problem["k"], problem["n"]
        bits = 4 + 16 / int(problem["group"]) if "group" in problem else 16
        return 2 * m * k * n, k * n * bits / 8 + 2 * m * (k + n)
    if problem["op"] == "ffn":
        d, h = problem["d"], problem["h"]
        return 6 * m * d * h, 2 * (3 * d * h + 2 * m * d)
    if problem["op"] == "moe-ffn":
        d, h, experts, choices = (problem[name] for name in ("d", "h", "experts", "top-k"))
        touched = experts * (1 - (1 - choices / experts) ** m)
        return 6 * m * choices * d * h, 2 * (3 * touched * d * h + 2 * m * d)
    if problem["op"] == "attention":
        b, s, heads, dim = (problem[name] for name in ("b", "s", "heads", "dim"))
        kv, kv_heads, back = size_of("kv", s), size_of("kv-heads", heads), size_of("pass") == "bwd"
        pairs, v_dim = s * kv if problem["mask"] == "none" else s * (s + 1) / 2, size_of("v-dim", dim)
        return ((6 * dim + 4 * v_dim if back else 2 * dim + 2 * v_dim) * b * heads * pairs,
                2 * b * (dim + v_dim) * (s * heads + kv * kv_heads) * (2 if back else 1))
    if problem["op"] == "mla":
        b, s, kv, heads, rank, rope = (problem[name] for name in ("b", "s", "kv", "heads", "rank", "rope"))
        pairs = s * kv - s * (s - 1) / 2
        return (2 * b * heads * pairs * (2 * rank + rope),
                2 * b * (kv * (rank + rope) + s * heads * (2 * rank + rope)))
    if problem["op"] in ("gated-delta-rule", "ssd"):
        return work_of_states(problem)
    if problem["op"] == "causal-conv1d":
        elements = problem["b"] * problem["s"] * problem["channels"]
        states = 2 * problem["b"] * problem["entries"] * problem["channels"] if "entries" in problem else 0
        return 2 * elements * problem["width"], 2 * (2 * elements + states)
    if problem["op"] == "gated-rmsnorm":
        return 0, 2 * 3 * m * problem["d"] * size_of("groups", 1)
    elements = m * (size_of("d") or size_of("h"))
    return 0, 2 * elements * (3 if problem["op"] == "act-mul" else 2)


def floor_of(problem, limits):
    """Microseconds; limits are FLOPs and bytes a second, and seconds of an empty kernel."""
    flops, moved = work_of(problem)
    return 1e6 * max(flops / limits[0], moved / limits[1], limits[2])


def problems(ops, seed):
    """An endless stream, the ops in turn; the same for the same seed. A problem is as likely as any
    other of its op, whatever other ops there are."""
    draws = {op: random.Random(f"{op} {seed}") for op in ops}
    for op in itertools.cycle(ops):
        problem = DRAWS[op](draws[op])
        while weight_bytes(problem) > MOST_BYTES or work_of(problem)[0] > MOST_FLOPS:
            problem = DRAWS[op](draws[op])
        yield problem


def weight_bytes(problem):
    """Bytes of all tensors, with the experts that no token chooses."""
    if problem["op"] == "moe-ffn":
        return 6 * problem["experts"] * problem["d"] * problem["h"]
    return work_of(problem)[1]


def text_of(problem):
    rest = " ".join(f"{name}={value}" for name, value in problem.items() if name not in ("op", "pass", "dtype"))
    return f"{problem['op']}/{problem.get('pass', 'fwd')} {problem['dtype']} {rest}"

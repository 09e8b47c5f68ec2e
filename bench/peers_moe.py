#!/usr/bin/env python3
"""Times a mixture of experts through fftune's C API beside what a PyTorch user would call, in one
process.

usage: peers_moe.py LIBFFTUNE.so PRESETS [MODEL[,M[:TOUCHED]...]]... [--json OUT]
                    [--without CONTENDER]

A MODEL is one of `MODELS`, M a number of tokens, TOUCHED how many experts these choose: routings are
drawn until as many are. Without numbers of tokens a model has those of `CASES`. Contenders:

grouped  torch._grouped_mm (bf16 only), gate and up as one product; the gather of the tokens,
         silu * mul and the weighted sum of a token's choices are compiled
triton   a Triton kernel tiled as that of vLLM and SGLang: blocks of rows of one expert, the rows
         gathered by index (triton_moe.py). The fastest of up to six configurations, timed first
fftune   moe-ffn, routing included

The peers get the tokens sorted by expert, and in fp8 (scales of blocks of 128) activations that are
quantised already: neither is in their time. Each contender is a CUDA graph that goes through enough
sets of inputs to overflow the L2 three times, counting the bytes that are read of each, in up to 16
GB. The graphs are replayed round-robin, and the median of the rounds is the time of a pass. Errors
are those of up to 64 tokens against float64 (in fp8 with the same quantisation of hidden); a
contender that fails, or whose error is above `TOLERANCE`, is left out.

The floor is the larger of two times: that of the FLOPs, and that of the bytes of the touched
experts' weights, x and y. The rates are those of a bf16 product of 8192^3 (fp8: twice that) and of
a copy of 1 GiB here. The column "tuned-by-ratio", on an H200 alone, is vLLM's kernel with its table
for that GPU: grouped's time here by the ratio of the two in `PUBLISHED`. A target is met if fftune
is that much faster than the fastest peer, tuned-by-ratio counted.
"""
import gc
import json
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from contenders import (Fftune, arguments_of, graph_of, microseconds, random, seconds,
                        sets_of)
from triton_moe import FP8, quantised, silu_mul, sorted_by_expert, triton_contender

TOLERANCE = {False: 0.01, True: 0.05}  # by whether it is fp8
MOST_BYTES = 16e9  # of weights in all sets


@dataclass(frozen=True)
class Model:
    experts: int
    choices: int
    d: int
    h: int
    fp8: bool = False

    @property
    def expert_bytes(self):
        return 3 * self.d * self.h * (1 if self.fp8 else 2)


MODELS = {"qwen3": Model(128, 8, 2048, 768),
          "mixtral": Model(8, 2, 4096, 7168),  # half of h
          "qwen3-fp8": Model(128, 8, 2048, 768, True),
          "deepseek-fp8": Model(256, 8, 7168, 256, True)}  # an eighth of h
CASES = ["qwen3,1,16:84,64:124,256,1024,4096,16384", "mixtral,1,16,64,256,1024,4096,16384",
         "qwen3-fp8,1,16,64,256,1024,4096", "deepseek-fp8,1,16,64,256,1024,4096"]

# By model and tokens: µs of vLLM's tuned kernel and of grouped in one earlier run on an H200, and
# how many times faster than the best peer fftune is to be.
PUBLISHED = {
    "qwen3": {1: (28.8, 57.1, 1.25), 16: (195.9, 309, 1.0), 64: (289.0, 417, 1.0),
              256: (325.4, 447, 1.05), 1024: (403.6, 508, 1.25), 4096: (903.9, 1097, 1.7),
              16384: (3011, 3534, 1.6)},
    "mixtral": {1: (97.9, 178, 1.08), 16: (339, 539, 1.0), 64: (352, 535, 1.03),
                256: (413, 520, 1.15), 1024: (927, 1048, 1.6), 4096: (2882, 2545, 1.25),
                16384: (11906, 10168, 1.25)},
    "qwen3-fp8": {1: (21.8, None, 1.5), 16: (107.5, None, 1.05), 64: (155.8, None, 1.05),
                  256: (188.3, None, 1.1), 1024: (265, None, 1.4), 4096: (717, None, 2.0)},
    "deepseek-fp8": {1: (33.7, None, 1.5), 16: (152, None, 1.05), 64: (328, None, 1.05),
                     256: (385, None, 1.1), 1024: (536, None, 1.4), 4096: (1151, None, 2.0)}}


def ceilings():
    """FLOP/s of a bf16 product and bytes/s of a copy, the fastest of a few."""
    a, b = random(8192, 8192), random(8192, 8192)
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    # A kernel copies faster than the driver's copy within the device.
    product, copy = graph_of([lambda: a @ b]), graph_of([lambda: torch.neg(source, out=target)])
    return (2 * 8192**3 / min(seconds(product, 2) for _ in range(5)),
            2 * 4 * source.numel() / min(seconds(copy, 4) for _ in range(5)))


def gather(x, tokens):
    return x[tokens]


def combine(out, places, weights):
    return (out[places].float() * weights[..., None]).sum(1).to(out.dtype)


def numbers(q, scale, rows):
    """The values of quantised elements, in float64; a scale covers `rows` x 128 of them."""
    values = q.float().double()
    if scale is None:
        return values
    return values * scale.double().repeat_interleave(rows, 0).repeat_interleave(128, 1)


def routing(model, m, touched, seeds):
    """ids and weights [m, choices] of random logits, of the next seed whose tokens choose `touched`
    experts (None: any number)."""
    for seed in seeds:
        generator = torch.Generator("cuda").manual_seed(seed)
        logits = torch.randn(m, model.experts, device="cuda", generator=generator)
        weights, ids = logits.softmax(-1).topk(model.choices)
        if touched is None or len(ids.unique()) == touched:
            return ids.int(), weights / weights.sum(-1, keepdim=True)
    raise ValueError(f"{m} tokens never chose {touched} experts")


def tensors_of(model, m, touched, seeds):
    """By fftune's names, and w_gate_up of the peers."""
    experts, d, h = model.experts, model.d, model.h

    def elements(*shape, scale):
        if model.fp8:  # well above subnormals, and below 448
            return (torch.randn(shape, device="cuda") * 16).to(FP8)
        return random(*shape, scale=scale)

    def scales(*shape, mean):
        return torch.randn(shape, device="cuda") * (mean / 160) + mean / 16

    ids, weights = routing(model, m, touched, seeds)
    t = {"x": elements(m, d, scale=1), "ids": ids, "weights": weights,
         "w_gate_up": elements(experts, 2 * h, d, scale=d**-0.5),
         "w_down": elements(experts, d, h, scale=h**-0.5),
         "y": torch.empty(m, d, device="cuda", dtype=torch.bfloat16)}
    if model.fp8:
        t["x_scale"] = scales(m, d // 128, mean=1)
        t["w_gate_up_scale"] = scales(experts, 2 * h // 128, d // 128, mean=d**-0.5)
        t["w_down_scale"] = scales(experts, d // 128, h // 128, mean=h**-0.5)
    for suffix in ("", "_scale") if model.fp8 else ("",):
        t["w_gate" + suffix], t["w_up" + suffix] = (
            half.contiguous() for half in t["w_gate_up" + suffix].chunk(2, dim=1))
    return t


def exact(model, t, tokens):
    """y of some tokens in float64."""
    x = numbers(t["x"], t.get("x_scale"), 1)[tokens]
    ids, weights = t["ids"][tokens].long(), t["weights"][tokens].double()
    y = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        gate, up, down = (
            numbers(t[name][expert], t[name + "_scale"][expert] if model.fp8 else None, 128)
            for name in ("w_gate", "w_up", "w_down"))
        token, choice = (ids == expert).nonzero(as_tuple=True)
        hidden = F.silu(x[token] @ gate.t()) * (x[token] @ up.t())
        if model.fp8:
            hidden = numbers(*quantised(hidden), 1)
        y.index_add_(0, token, hidden @ down.t() * weights[token, choice, None])
    return y


def grouped_contender(model, sets):
    gathered, act, combined = (torch.compile(f, dynamic=False) for f in (gather, silu_mul, combine))
    routes = []
    for t in sets:
        order, counts = sorted_by_expert(t["ids"], model.experts)
        routes.append((order // model.choices, order.argsort().view(-1, model.choices),
                       counts.cumsum(0).int()))

    def call(t, i):
        tokens, places, ends = routes[i]
        both = torch._grouped_mm(gathered(t["x"], tokens), t["w_gate_up"].transpose(1, 2), offs=ends)
        out = torch._grouped_mm(act(both), t["w_down"].transpose(1, 2), offs=ends)
        return combined(out, places, t["weights"])

    return call


def best_triton(model, sets, row):
    """The fastest configuration's call; the row notes which it is, and what each took."""
    call, row["config"], row["configs"] = triton_contender(
        model, sets, lambda config, error: complain(row, f"triton with {config}", error))
    return call


def fftune_contender(library, plan):
    described = json.loads(library.lib.fftune_plan_describe(plan))
    names = [buffer["name"] for buffer in described["buffers"]]
    workspace = library.workspace(plan)

    def call(t, _):
        library.run(plan, [t[name] for name in names], workspace)
        return t["y"]

    return call


def complain(row, what, error):
    lines = str(error).strip().splitlines() or [""]
    print(f"{row['model']} {row['m']}: {what} is left out: {type(error).__name__}: {lines[0][:200]}",
          file=sys.stderr, flush=True)


def checked(model, sets, makers, row):
    """The contenders that run in a graph and are right, by name; errors are noted in the row."""
    tokens = torch.linspace(0, row["m"] - 1, min(row["m"], 64), device="cuda").round().long()
    right = exact(model, sets[0], tokens)
    calls = {}
    for name, make in makers.items():
        try:
            call = make()
            got = call(sets[0], 0)
            torch.cuda.synchronize()
            error = float((got[tokens].double() - right).norm() / right.norm())
            row["errors"][name] = error
            if not error <= TOLERANCE[model.fp8]:
                raise ValueError(f"its error is {error:.1e}")
            graph_of([lambda i=i, t=t: call(t, i) for i, t in enumerate(sets)])
            torch.cuda.synchronize()
            calls[name] = call
        except (Exception, SystemExit) as error:  # Fftune exits where the library fails
            complain(row, name, error)
    return calls


def judge(row):
    """Adds the ratios and whether the target is met, where fftune and a peer were timed."""
    peers = dict(row["us"])
    own = peers.pop("fftune", None)
    tuned, grouped, row["target"] = PUBLISHED[row["model"]].get(row["m"], (None, None, None))
    if not own or not peers:
        return
    row["best"] = min(peers, key=peers.get)
    row["ratio"] = peers[row["best"]] / own
    # The ratio is of products that the memory's rate does not bound alike on other cards.
    if grouped and "grouped" in peers and "H200" in torch.cuda.get_device_name():
        peers["tuned"] = row["tuned_by_ratio"] = peers["grouped"] * tuned / grouped
    if row["target"]:
        row["met"] = min(peers.values()) / own >= row["target"]


def line_of(row):
    words = [f"{row['model']:12} {row['m']:5}  {row['touched']:5.1f} experts",
             f"floor {row['floor']:7.1f}"]
    words += [f"{name} {us:8.1f}" for name, us in row["us"].items()]
    if "ratio" in row:
        words.append(f"| {row['ratio']:.2f} x {row['best']}")
    if "tuned_by_ratio" in row:
        words.append(f"| tuned-by-ratio {row['tuned_by_ratio']:.1f}, "
                     f"{row['tuned_by_ratio'] / row['us']['fftune']:.2f} x")
    if "met" in row:
        words.append(f"| target {row['target']:.2f} {'met' if row['met'] else 'MISSED'}")
    words.append("| errors " + " ".join(f"{error:.1e}" for error in row["errors"].values()))
    if "config" in row:
        words.append("| triton " + row["config"])
    return "  ".join(words)


def run(library, limits, without, name, m, touched):
    model = MODELS[name]
    row = {"model": name, "m": m, "errors": {}}
    seeds = iter(range(10000))
    expected = touched or model.experts * (1 - (1 - model.choices / model.experts)**m)
    # A set has gate and up twice, for fftune and for the peers.
    most = int(MOST_BYTES // (model.experts * model.expert_bytes * 5 / 3))
    sets = sets_of(lambda: tensors_of(model, m, touched, seeds),
                   int(expected * model.expert_bytes), most)
    row["sets"] = len(sets)
    row["touched"] = sum(len(t["ids"].unique()) for t in sets) / len(sets)
    flops = 6 * m * model.choices * model.d * model.h
    moved = row["touched"] * model.expert_bytes + m * model.d * ((1 if model.fp8 else 2) + 2)
    row["floor"] = 1e6 * max(flops / (limits[0] * (2 if model.fp8 else 1)), moved / limits[1])

    torch._dynamo.reset()
    problem = {"op": "moe-ffn", "dtype": "fp8" if model.fp8 else "bf16", "m": m, "d": model.d,
               "h": model.h, "experts": model.experts, "top-k": model.choices}
    if model.fp8:
        problem["scales"] = "block"
    plan = None

    def fftune():
        nonlocal plan
        plan = library.plan(problem)
        return fftune_contender(library, plan)

    makers = {"grouped": lambda: grouped_contender(model, sets),
              "triton": lambda: best_triton(model, sets, row), "fftune": fftune}
    for name in without + (["grouped"] if model.fp8 else []):
        makers.pop(name, None)
    row["us"] = microseconds(checked(model, sets, makers, row), sets)
    if plan:
        library.destroy(plan)
    judge(row)
    print(line_of(row), flush=True)
    return row


def cases_of(words):
    """(model, tokens, experts that they touch or None) of each word; CASES without words."""
    def parsed(word):
        name, *sizes = word.split(",")
        if name not in MODELS:
            sys.exit(f"there is no model '{name}': give one of {', '.join(MODELS)}")
        for size in sizes:
            m, _, touched = size.partition(":")
            yield name, int(m), int(touched) if touched else None

    listed = [case for word in CASES for case in parsed(word)]
    if not words:
        return listed
    cases = []
    for word in words:
        asked = list(parsed(word)) or [case for case in listed if case[0] == word]
        known = {(name, m): touched for name, m, touched in listed}
        cases += [(name, m, touched or known.get((name, m))) for name, m, touched in asked]
    return cases


def main(words):
    without = []
    if "--without" in words:
        place = words.index("--without")
        without = words[place + 1:place + 2]
        words = words[:place] + words[place + 2:]
    words, out = arguments_of(words, __doc__, 2)
    cases = cases_of(words[2:])
    torch.manual_seed(1)
    limits = ceilings()
    print(f"{torch.cuda.get_device_name()}: a product of 8192^3 {limits[0] / 1e12:.0f} TFLOP/s, "
          f"a copy {limits[1] / 1e12:.2f} TB/s", flush=True)
    library = Fftune(*words[:2])
    rows = []
    for case in cases:
        try:
            rows.append(run(library, limits, without, *case))
        except Exception as error:
            print(f"{case}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr, flush=True)
        gc.collect()  # a case's sets are gigabytes, and compiled functions refer to each other
        torch.cuda.empty_cache()
        if out:
            with open(out, "w") as file:
                json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])

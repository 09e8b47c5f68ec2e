"""The contenders of off_grid.py's problems: sets of inputs, fftune's untuned plan, and its peers."""
import concurrent.futures
import contextlib
import gc
import io
import json
import math
import os
import re

import torch
import torch.nn.functional as F

import peers_attention
import peers_moe
import off_grid_states
from contenders import Fftune, graph_of, random, seconds, sets_of
from off_grid_timing import ERROR_ROWS, TOLERANCE, planned, timed
from peers import eager, silu_mul
from peers_memory import bias_gelu, rmsnorm

AHEAD = 8  # problems whose kernels are compiled while others run
NO_LIMITS = math.inf, math.inf  # of peers_moe's floor: off_grid.py has its own


class Bench:
    def __init__(self, presets):
        torch.manual_seed(1)
        self.library = Fftune(os.environ["FFTUNE_LIBRARY"], presets)
        word = torch.zeros(1, device="cuda")
        empty = graph_of([lambda: word.add_(1) for _ in range(100)])
        self.limits = (*peers_moe.ceilings(), min(seconds(empty, 20) for _ in range(5)) / 100)
        self.name = torch.cuda.get_device_name()
        peers_moe.PUBLISHED["drawn"] = {}

    def title(self):
        flops, moved, launch = self.limits
        return (f"{self.name}: a product of 8192^3 {flops / 1e12:.0f} TFLOP/s, a copy "
                f"{moved / 1e12:.2f} TB/s, an empty kernel {1e6 * launch:.2f} µs")

    def compiled_ahead(self, problems):
        """The problems, whose kernels are in the cache by then."""
        def compile_it(problem):
            with contextlib.suppress(SystemExit):  # the row tells
                self.library.destroy(self.library.plan(problem))
            return problem

        with concurrent.futures.ThreadPoolExecutor(min(AHEAD, os.cpu_count() or 1)) as pool:
            waiting = []
            try:
                for problem in problems:
                    waiting.append(pool.submit(compile_it, problem))
                    if len(waiting) > AHEAD:
                        yield waiting.pop(0).result()
                while waiting:
                    yield waiting.pop(0).result()
            finally:
                for future in waiting:
                    future.cancel()

    def row(self, problem):
        row = {"problem": problem, "us": {}}
        torch._dynamo.reset()
        try:
            plan = self.library.plan(problem)
            row["variants"] = [v["id"] for v in json.loads(self.library.lib.fftune_plan_describe(plan))["variants"]]
            self.library.destroy(plan)
            measure_of(problem)(self.library, problem, row)
        except (Exception, SystemExit) as error:  # Fftune exits where the library fails
            lines = str(error).strip().splitlines() or [""]
            row["failed"] = f"{type(error).__name__}: {lines[0][:200]}"
        gc.collect()  # compiled functions refer to each other
        torch.cuda.empty_cache()
        return row


def quantised_weights(n, k, group):
    """Codes of int4, their scales, and the weight that they stand for."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = ((torch.rand(n, k // group, device="cuda") + 1) * 0.2 * k**-0.5).bfloat16()
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1).to(scale.dtype) - 8
    return codes, scale, numbers * scale.repeat_interleave(group, 1)


def machete_contender(weights, group):
    import vllm._custom_ops as kernels
    from vllm.scalar_type import scalar_types

    kind, dtype = scalar_types.uint4b8, torch.bfloat16
    ready = [(kernels.machete_prepack_B(codes.view(torch.int32).t(), dtype, kind, dtype), scale.t().contiguous())
             for codes, scale, _ in weights]
    return lambda s, i: kernels.machete_mm(a=s[0], b_q=ready[i][0], b_type=kind, b_group_scales=ready[i][1],
                                           b_group_size=group)


def humming_contender(weights, group):
    from humming.layer import HummingLayer

    layers = []
    for _, _, dense in weights:  # it quantises by its own rule: only its time counts
        layer = HummingLayer(shape_n=dense.shape[0], shape_k=dense.shape[1], torch_dtype=torch.bfloat16,
                             weight_config={"dtype": "uint4", "group_size": group}).cuda()
        layer.load_from_unquantized(dense)
        layer.transform()
        layers.append(layer)
    return lambda s, i: layers[i](s[0])


def measure_linear(library, problem, row):
    m, k, n = (problem[name] for name in "mkn")
    if "weights" not in problem:
        sets = sets_of(lambda: (random(m, k), random(n, k, scale=k**-0.5), torch.empty(m, n, device="cuda",
                                                                                    dtype=torch.bfloat16)),
                       2 * (n * k + m * (n + k)), 64)
        plan, own = planned(library, problem, lambda s, i: list(s))
        timed(row, sets, {"cuBLASLt": lambda s, i: F.linear(s[0], s[1]), "fftune": own}, ERROR_ROWS)
        library.destroy(plan)
        return
    import fftune

    group = int(problem["group"])
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    count = max(2, min(24, 3 * l2 // (n * k // 2) + 1))
    weights = [quantised_weights(n, k, group) for _ in range(count)]
    packed = [fftune.ops.pack_weight(codes, scale, group=group) for codes, scale, _ in weights]
    sets = [(random(m, k),) for _ in weights]
    calls = {"cuBLASLt": lambda s, i: F.linear(s[0], weights[i][2]),
             "fftune": lambda s, i: fftune.ops.linear(s[0], packed[i])}
    for name, make in {"Machete": machete_contender, "Humming": humming_contender}.items():
        try:
            calls[name] = make(weights, group)
        except Exception as error:  # not installed, or not for these sizes
            row.setdefault("left_out", {})[name] = repr(error)[:120]
    timed(row, sets, calls, ERROR_ROWS)


def measure_ffn(library, problem, row):
    m, d, h = (problem[name] for name in "mdh")
    sets = sets_of(lambda: (random(m, d), random(h, d, scale=d**-0.5), random(h, d, scale=d**-0.5),
                            random(d, h, scale=h**-0.5), random(m, d)), 2 * (3 * d * h + m * (2 * d + h)), 64)
    merged = [torch.cat(s[1:3]) for s in sets]
    act = torch.compile(silu_mul, dynamic=False)
    plan, own = planned(library, problem, lambda s, i: list(s))
    timed(row, sets, {"eager": lambda s, i: eager(*s[:4]),
                      "merged": lambda s, i: F.linear(act(F.linear(s[0], merged[i])), s[3]), "fftune": own},
          ERROR_ROWS)
    library.destroy(plan)


def measure_experts(library, problem, row):
    model = peers_moe.Model(problem["experts"], problem["top-k"], problem["d"], problem["h"])
    peers_moe.MODELS["drawn"] = model
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as complaints:
        result = peers_moe.run(library, NO_LIMITS, [], "drawn", problem["m"], None)
    row.update(us=result["us"], errors=result["errors"], touched=result["touched"])
    if "fftune" not in result["us"]:
        row["failed"] = next((line for line in complaints.getvalue().splitlines() if "fftune" in line), "fftune")[:200]


def flash3_contender(case):
    """FlashAttention 3 by one of the packages that have it."""
    return off_grid_states.flash3(case["shape"][0], case["shape"][3], case["shape"][4], case["causal"])


def measure_attention(library, problem, row):
    case = peers_attention.attention(problem["b"], problem["heads"], problem["s"], problem["dim"], problem["mask"],
                                     problem.get("kv-heads"), problem.get("kv"), problem["pass"] == "bwd")
    with contextlib.redirect_stderr(io.StringIO()) as complaints:
        more = {}
        if not case["backward"]:
            try:
                more["FA3"] = flash3_contender(case)
            except Exception as error:
                row.setdefault("left_out", {})["FA3"] = repr(error)[:120]
        result = peers_attention.measure(library, case, more)
    row.update(us=result["us"], difference=result.get("difference"))
    for line in complaints.getvalue().splitlines():
        if found := re.search(r": (\S+) is left out: (.*)", line):
            row.setdefault("left_out", {})[found[1]] = found[2]
    if "fftune" not in row["us"]:
        row["failed"] = "fftune: " + complaints.getvalue()[-200:]
    elif row["difference"] is not None and not row["difference"] <= TOLERANCE:
        row["failed"] = f"its result differs from cuDNN's by {row['difference']:.1e}"


def measure_rows(call, inputs):
    """A memory-bound op: call(x, ...) is eager, inputs(m, d) its tensors."""
    def measure(library, problem, row):
        m, d = problem["m"], problem.get("d") or problem["h"]
        sets = sets_of(lambda: (*inputs(m, d), random(m, d)), 4 * m * d, 256)
        compiled = torch.compile(call, dynamic=False)
        plan, own = planned(library, problem, lambda s, i: list(s))
        timed(row, sets, {"compile": lambda s, i: compiled(*s[:-1]), "fftune": own}, ERROR_ROWS)
        library.destroy(plan)

    return measure


def layernorm(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b, 1e-5)


def act_mul(gate, up):
    return F.silu(gate) * up


MEASURES = {"linear": measure_linear, "ffn": measure_ffn, "moe-ffn": measure_experts,
            "attention": measure_attention,
            "rmsnorm": measure_rows(rmsnorm, lambda m, d: (random(m, d), random(d))),
            "layernorm": measure_rows(layernorm, lambda m, d: (random(m, d), random(d), random(d))),
            "act-mul": measure_rows(act_mul, lambda m, d: (random(m, d), random(m, d))),
            "bias-gelu": measure_rows(bias_gelu, lambda m, d: (random(m, d), random(d))),
            **off_grid_states.MEASURES}


def measure_of(problem):
    narrow = problem["op"] == "attention" and "v-dim" in problem
    return off_grid_states.measure_value_dims if narrow else MEASURES[problem["op"]]


def import_machete():
    import vllm._custom_ops as kernels

    return kernels.machete_mm


def import_humming():
    from humming.layer import HummingLayer

    return HummingLayer


# By op, the peers that do not come with PyTorch, and what imports them.
PEERS = {"linear": {"Machete": import_machete, "Humming": import_humming},
         "attention": {"FA3": off_grid_states.import_flash3}, **off_grid_states.PEERS}


def missing(ops):
    """The peers of the ops that cannot be imported: their op, name, and why."""
    found = []
    for op in ops:
        for name, load in PEERS.get(op, {}).items():
            try:
                load()
            except Exception as error:  # some fail in their own ways
                why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                found.append({"op": op, "name": name, "why": why[:120]})
    return found

"""bench/off_grid.py without a GPU: the problems that it draws, their floors, and what it prints."""
import contextlib
import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))  # behind the tests, whose modules have some of its names

import contenders  # noqa: E402
import off_grid  # noqa: E402
import off_grid_draws  # noqa: E402
import off_grid_peers  # noqa: E402
import off_grid_states  # noqa: E402
import off_grid_timing  # noqa: E402

from fftune._description import _TABLE as TABLE  # noqa: E402
from fftune._library import library_path  # noqa: E402

LIMITS = 800e12, 4e12, 2e-6


def drawn(op, count=400, seed=0):
    return list(itertools.islice(off_grid_draws.problems([op], seed), count))


@pytest.mark.parametrize("op", off_grid.DRAWS)
def test_problems_are_of_the_op(op):
    """Every field is a size of the op or one of an option's choices, and every problem fits a GPU."""
    of_plan = "attention" if op == "attention-v-dim" else op
    options = {name: choices for name, passes, choices in TABLE[of_plan]["options"]}
    for problem in drawn(op):
        assert problem["op"] == of_plan and off_grid.op_of({"problem": problem}) == op
        assert off_grid_draws.weight_bytes(problem) <= off_grid_draws.MOST_BYTES
        for name, value in problem.items():
            if name in ("op", "dtype", "pass"):
                continue
            if name in options:
                assert value in options[name]
            else:
                assert name in TABLE[of_plan]["sizes"]
                assert isinstance(value, int) and value > 0
        assert set(off_grid.parsed([op]).ops) == {op}


def test_a_seed_draws_the_same_problems():
    assert drawn("linear", 20) == drawn("linear", 20)
    assert drawn("linear", 20) != drawn("linear", 20, seed=1)
    # Whatever other ops are asked for.
    both = list(itertools.islice(off_grid_draws.problems(["ffn", "linear"], 0), 40))
    assert [problem for problem in both if problem["op"] == "linear"] == drawn("linear", 20)


def test_sizes_are_beside_those_of_models():
    widths = [problem["d"] for problem in drawn("rmsnorm", 2000)]
    for kind in (8, 16, 64):
        assert any(width % kind == 0 and width % (2 * kind) for width in widths)
    assert any(width % 2 and off_grid_draws.prime_from(width) == width for width in widths)
    assert {128, 1024, 16384} <= set(widths)
    few = [problem["m"] for problem in drawn("ffn", 2000)]
    assert set(range(1, 17)) <= set(few)
    assert any(m > 4096 for m in few)
    assert len({m for m in few if 17 <= m <= 512}) > 250


def test_heads_and_experts_are_those_of_models_and_others():
    heads = drawn("attention", 2000)
    assert {problem["dim"] for problem in heads} >= set(range(32, 257, 2))
    assert {problem["pass"] for problem in heads} == {"fwd", "bwd"}
    assert all(problem["heads"] % problem.get("kv-heads", problem["heads"]) == 0 for problem in heads)
    assert any(problem["s"] == 1 and problem["kv"] > 1000 for problem in heads)
    experts = drawn("moe-ffn", 2000)
    assert all(problem["top-k"] <= problem["experts"] for problem in experts)
    assert {(problem["experts"], problem["top-k"]) for problem in experts} > set(off_grid_draws.EXPERTS)


def test_primes():
    assert [off_grid_draws.prime_from(n) for n in (0, 2, 3, 4, 24, 90)] == [2, 2, 3, 5, 29, 97]


def test_floors():
    dense = {"op": "linear", "dtype": "bf16", "m": 4096, "k": 8192, "n": 8192}
    assert off_grid_draws.floor_of(dense, LIMITS) == pytest.approx(2 * 4096 * 8192**2 / 800e6)
    int4 = {"op": "linear", "dtype": "bf16", "m": 1, "k": 8192, "n": 8192, "weights": "int4", "group": "128"}
    assert off_grid_draws.floor_of(int4, LIMITS) == pytest.approx((8192**2 * 4.125 / 8 + 4 * 8192) / 4e6)
    # One token reads the weights of its own experts alone.
    experts = {"op": "moe-ffn", "dtype": "bf16", "m": 1, "d": 2048, "h": 512, "experts": 512, "top-k": 10}
    assert off_grid_draws.floor_of(experts, LIMITS) == pytest.approx((10 * 6 * 2048 * 512 + 4 * 2048) / 4e6)
    rows = {"op": "rmsnorm", "dtype": "bf16", "m": 1, "d": 128}
    assert off_grid_draws.floor_of(rows, LIMITS) == pytest.approx(2)
    causal = {"op": "attention", "pass": "fwd", "dtype": "bf16", "b": 2, "s": 4096, "heads": 16, "dim": 128,
              "mask": "causal"}
    assert off_grid_draws.floor_of(causal, LIMITS) == pytest.approx(4 * 2 * 16 * 4096 * 4097 / 2 * 128 / 800e6)


def row(us, m=1):
    problem = {"op": "linear", "dtype": "bf16", "m": m, "k": 4096, "n": 4096}
    return off_grid.judged({"problem": problem, "us": us, "variants": ["product_decode/rows=8"]}, LIMITS)


def test_rows_are_judged_by_the_fastest_peer():
    judged = row({"cuBLASLt": 12.0, "other": 11.0, "fftune": 10.0})
    assert (judged["peer"], judged["ratio"]) == ("other", pytest.approx(1.1))
    assert judged["of_floor"] == pytest.approx(10 / judged["floor"])
    assert "ratio" not in row({"fftune": 10.0}) and "ratio" not in row({"cuBLASLt": 10.0})


def test_the_report_has_slow_rows_worst_first():
    rows = [row({"cuBLASLt": 9.5, "fftune": 10.0}, m=1), row({"cuBLASLt": 9.0, "fftune": 10.0}, m=2),
            row({"cuBLASLt": 40.0, "fftune": 20.0}, m=3), row({"fftune": 30.0}, m=4),
            {**row({}, m=5), "failed": "Error: no kernel"}]
    lines = off_grid.report(rows)
    mean = math.exp((math.log(0.95) + math.log(0.9) + math.log(2)) / 3)
    assert lines[0] == (f"5 rows, 3 of them beside a peer: geometric mean {mean:.3f}, worst 0.90, "
                        "2 below 1.00, 2 below 0.98, 1 below 0.93")
    slow = lines.index("slower than a peer, worst first: 2")
    far = lines.index("above 1.5 times the floor, worst first: 2")
    failed = lines.index("failed or wrong: 1")

    def tokens(part):
        return [int(found[1]) for line in part if (found := re.search(r" m=(\d+)", line))]

    assert tokens(lines[slow:far]) == [2, 1]
    assert tokens(lines[far:failed]) == [4, 3]
    assert lines[failed + 1].endswith("Error: no kernel") and tokens(lines[failed:]) == [5]
    assert " 0.90 x cuBLASLt" in lines[slow + 2] and lines[slow + 2].endswith("product_decode/rows=8")


def test_problems_are_listed_without_a_gpu():
    run = subprocess.run([sys.executable, ROOT / "bench" / "off_grid.py", "linear", "ffn", "--list", "--rows", "6"],
                         capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert len(lines) == 6 and lines[0].startswith("linear/fwd bf16 m=") and lines[1].startswith("ffn/fwd bf16 m=")
    wrong = subprocess.run([sys.executable, ROOT / "bench" / "off_grid.py", "liner"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "liner" in wrong.stderr


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    return contenders.Fftune(str(library_path()), str(tmp_path_factory.mktemp("presets")), -1)


@pytest.mark.parametrize("op", off_grid.DRAWS)
def test_the_library_takes_the_problems(cpu, op):
    """No size contradicts another: a plan ends the program where one does."""
    for problem in drawn(op, 40):
        cpu.destroy(cpu.plan(problem))
    assert problem["op"] in off_grid_peers.MEASURES


def test_sequences_are_prompts_and_single_tokens():
    for op in ("gated-delta-rule", "ssd"):
        states = drawn(op, 1000)
        assert {problem["s"] == 1 for problem in states} == {True, False}
        assert all(("indices" in problem) == (problem["s"] == 1) for problem in states)
    assert any(problem["dim"] != problem["v-dim"] for problem in drawn("gated-delta-rule"))
    assert {problem["pass"] for problem in drawn("attention-v-dim")} == {"fwd", "bwd"}
    assert all(problem["v-dim"] < problem["dim"] for problem in drawn("attention-v-dim", 2000))
    assert {problem["order"] for problem in drawn("gated-rmsnorm")} == {"before", "after"}


def test_floors_of_states():
    delta = {"op": "gated-delta-rule", "dtype": "bf16", "heads": 16, "v-heads": 32, "dim": 128, "v-dim": 128, "s": 1,
             "b": 64, "indices": "yes"}
    # Each state is read and written.
    state, token = 4 * 32 * 128 * 128, 2 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32)
    assert off_grid_draws.floor_of(delta, LIMITS) == pytest.approx(64 * (2 * state + token) / 4e6)
    latent = {"op": "mla", "dtype": "bf16", "b": 64, "s": 1, "kv": 4096, "heads": 16, "rank": 512, "rope": 64,
              "page": 64}
    # All heads read a key once.
    assert off_grid_draws.floor_of(latent, LIMITS) == pytest.approx(2 * 64 * (4096 * 576 + 16 * 1088) / 4e6)
    narrow = {"op": "attention", "pass": "bwd", "dtype": "bf16", "b": 2, "s": 4096, "heads": 16, "dim": 192,
              "v-dim": 128, "mask": "none"}
    assert off_grid_draws.floor_of(narrow, LIMITS) == pytest.approx(2 * 16 * 4096**2 * (6 * 192 + 4 * 128) / 800e6)


CACHED = {"s": 1, "b": 3, "indices": "yes"}
DELTA = {"op": "gated-delta-rule", "dtype": "bf16", "heads": 2, "v-heads": 4, "dim": 16, "v-dim": 8,
         "gate": "softplus", "beta": "sigmoid", "qk-norm": "l2"}
SSD = {"op": "ssd", "dtype": "bf16", "heads": 4, "groups": 2, "dim": 8, "state-dim": 16, "skip": "yes",
       "dt-bias": "yes"}
CONVOLUTION = {"op": "causal-conv1d", "dtype": "bf16", "channels": 24, "width": 4, "bias": "yes"}
NARROW = {"op": "attention", "dtype": "bf16", "b": 2, "s": 9, "heads": 4, "kv-heads": 2, "dim": 16, "v-dim": 8}


@pytest.mark.parametrize("problem, peers", [
    ({**DELTA, **CACHED}, ["compile"]), ({**DELTA, "s": 7, "b": 2, "final-state": "yes"}, ["FLA"]),
    ({**SSD, **CACHED}, ["compile"]), ({**SSD, "s": 7, "b": 2, "final-state": "yes"}, ["mamba_ssm"]),
    ({**CONVOLUTION, "s": 7, "b": 2, "act": "silu"}, ["compile"]),
    ({**CONVOLUTION, "s": 7, "b": 2, "act": "none", "bias": "no"}, ["compile"]),
    ({**CONVOLUTION, "s": 1, "b": 3, "act": "silu", "state": "update", "entries": 3, "slots": 4}, ["compile"]),
    ({"op": "gated-rmsnorm", "dtype": "bf16", "m": 5, "d": 16, "order": "after", "gate": "sigmoid"}, ["compile"]),
    ({"op": "gated-rmsnorm", "dtype": "bf16", "m": 5, "d": 16, "order": "before", "gate": "silu", "groups": 2},
     ["compile"]),
    ({"op": "mla", "dtype": "bf16", "b": 2, "s": 2, "kv": 70, "heads": 4, "rank": 16, "rope": 8, "page": 64},
     ["compile"]),
    ({**NARROW, "pass": "fwd", "mask": "causal"}, ["plain"]), ({**NARROW, "pass": "fwd", "mask": "none"}, ["plain"])])
def test_peers_compute_the_same(cpu, monkeypatch, problem, peers):
    """On a CPU, with stand-ins for packages: tensors are in the form that a peer takes, and its result is
    compared row by row."""
    monkeypatch.setattr(contenders, "DEVICE", "cpu")
    monkeypatch.setattr(off_grid_states, "sets_of", lambda make, *_: [make(), make()])
    monkeypatch.setattr(off_grid_timing, "microseconds", lambda calls, sets, _: dict.fromkeys(calls, 1.0))
    monkeypatch.setattr(off_grid_states.torch, "compile", lambda call, **_: call)
    monkeypatch.setattr(off_grid_states, "import_fla", lambda: types.SimpleNamespace(
        chunk_gated_delta_rule=delta_rule_by_tokens))
    monkeypatch.setattr(off_grid_states, "import_mamba_ssm", lambda: (scan_by_tokens, None))
    # The kernels by name are a GPU's.
    monkeypatch.setattr(off_grid_states, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    row = {}
    off_grid_peers.measure_of(problem)(cpu, problem, row)
    if peers == ["plain"]:
        peers = ["efficient", "cuDNN", "flash-2"]
    assert set(row["us"]) >= {*peers, "fftune"}
    assert "failed" not in row and row["difference"] < off_grid_timing.TOLERANCE
    # Names of the peers that are not there.
    left = {"FLA", "vLLM", "mamba_ssm", "causal_conv1d", "FlashMLA", "FA3", "Triton"} & set(row.get("left_out", {}))
    assert left or problem["op"] == "gated-rmsnorm"


def test_a_contender_that_cannot_be_captured_is_left_out(monkeypatch):
    """It alone is: the others have their times, and a result that is compared."""
    def graph_of(passes):
        for run in passes:
            run()
        return object()

    def uncapturable(tensors, _):
        if len(calls) > 4:  # it ran once by itself, as did the others
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        calls.append(tensors)
        return tensors[0]

    calls = [0] * 4
    monkeypatch.setattr(contenders, "graph_of", graph_of)
    monkeypatch.setattr(contenders, "seconds", lambda graph, repeats: 1e-3)
    monkeypatch.setattr(contenders, "DEVICE", "cpu")
    monkeypatch.setattr(off_grid_timing.contenders, "DEVICE", "cpu")
    sets = [(torch.ones(2, 3),), (torch.ones(2, 3),)]
    row = {}
    off_grid_timing.timed(row, sets, {"peer": uncapturable, "other": lambda t, _: t[0], "fftune": lambda t, _: t[0]})
    assert row["left_out"] == {"peer": "its capture failed: operation not permitted when stream is capturing"}
    assert set(row["us"]) == {"other", "fftune"} and row["difference"] == 0 and "failed" not in row


def delta_rule_by_tokens(q, k, v, g, beta, output_final_state, use_qk_l2norm_in_kernel):
    assert output_final_state and use_qk_l2norm_in_kernel
    q, k = (x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    b, s, heads, dim = q.shape
    state, out = torch.zeros(b, heads, dim, v.shape[-1]), torch.empty(v.shape)
    for i in range(s):
        state = state * g[:, i, :, None, None].exp()
        error = beta[:, i, :, None] * (v[:, i].float() - torch.einsum("bhkv,bhk->bhv", state, k[:, i]))
        state = state + k[:, i][..., None] * error[:, :, None]
        out[:, i] = torch.einsum("bhkv,bhk->bhv", state, q[:, i]) * dim**-0.5
    return out, state


def scan_by_tokens(x, dt, A, B, C, chunk, *, D, dt_bias, dt_softplus, return_final_states):
    assert chunk == 256 and dt_softplus and return_final_states
    b, s, heads, dim = x.shape
    B, C = (y.float().repeat_interleave(heads // y.shape[2], 2) for y in (B, C))
    dt = torch.nn.functional.softplus(dt.float() + dt_bias)
    state, out = torch.zeros(b, heads, dim, B.shape[-1]), torch.empty(x.shape)
    for i in range(s):
        step = dt[:, i, :, None] * x[:, i].float()
        state = state * (dt[:, i] * A).exp()[..., None, None] + step[..., None] * B[:, i, :, None]
        out[:, i] = (state * C[:, i, :, None]).sum(-1) + D[:, None] * x[:, i]
    return out, state


def test_a_wrong_result_is_a_failed_row(cpu, monkeypatch):
    monkeypatch.setattr(contenders, "DEVICE", "cpu")
    monkeypatch.setattr(off_grid_timing, "microseconds", lambda calls, sets, _: dict.fromkeys(calls, 1.0))
    row, tensors = {}, [{"x": torch.ones(4, 8)}]
    calls = {"peer": lambda t, _: t["x"].mul_(2), "fftune": lambda t, _: t["x"] * 2}
    off_grid_timing.timed(row, tensors, calls)  # the peer's result is in place
    assert "failed" not in row and tensors[0]["x"].eq(1).all()
    off_grid_timing.timed(row, tensors, {**calls, "fftune": lambda t, _: t["x"] * 3})
    assert "differs from the peer's by 5.0e-01" in row["failed"]


def test_chunks_of_sequences_begin_and_end_with_them():
    contenders_device, contenders.DEVICE = contenders.DEVICE, "cpu"
    try:
        starts, last, owners = off_grid_states.chunks_of(2, 300)
    finally:
        contenders.DEVICE = contenders_device
    assert starts.tolist() == [0, 256, 300, 556, 600]
    assert last.tolist() == [1, 3] and owners.tolist() == [0, 0, 1, 1]


def test_missing_peers_are_named():
    found = {(peer["op"], peer["name"]): peer["why"] for peer in off_grid_peers.missing(["linear", "mla"])}
    for op, name in (("linear", "Humming"), ("linear", "Machete"), ("mla", "FlashMLA")):
        package = "humming" if name == "Humming" else "vllm"
        if importlib.util.find_spec(package) is None:
            assert found[op, name].startswith("ModuleNotFoundError") and package in found[op, name]
    assert not off_grid_peers.missing(["rmsnorm"])


def a_run(seed, ratios, missing=(), op="linear"):
    rows = [row({"cuBLASLt": 10 * ratio, "fftune": 10.0}, m=seed * 100 + i) for i, ratio in enumerate(ratios)]
    return {"seed": seed, "day": "2026-11-30", "device": "a GPU", "missing": list(missing), "rows": rows}


def test_tables_have_seeds_ops_and_slow_rows_worst_first():
    why = "ModuleNotFoundError: No module named 'vllm'"
    runs = [a_run(1, (0.95, 2.0), [{"op": "linear", "name": "Machete", "why": why}]), a_run(2, (0.5, 0.99, 1.0))]
    runs[1]["rows"][0]["left_out"] = {"Machete": why, "Humming": "not for these sizes"}
    lines = off_grid.tables(runs)
    mean = math.exp(sum(map(math.log, (0.95, 2, 0.5, 0.99, 1))) / 5)
    assert f"| all |  | 5 | 5 | {mean:.3f} | 3 (60%) | 2 (40%) | 1 (20%) | 0.50 |" in lines
    assert any(line.startswith("| 2026-11-30, 2 | a GPU | 3 | 3 |") for line in lines)
    assert any(line.startswith(f"| `linear` | 5 | 5 | {mean:.3f} |") for line in lines)
    slow = lines[lines.index("Rows below 1.0, worst first:") + 4:]
    assert [float(line.split("|")[1]) for line in slow[:3]] == [0.5, 0.95, 0.99] and not slow[3].startswith("|")
    assert f"Not there ({why}): Machete for `linear`." in lines
    # Machete is missing, and is not counted again.
    assert "Humming did not run 1 rows of `linear`." in lines and not any("Machete did not" in line for line in lines)


def test_tables_of_files(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps([a_run(1, (0.9,))]))
    (tmp_path / "b.json").write_text(json.dumps([a_run(2, (1.5,))]))
    assert off_grid.main(["--table", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "| all |  | 2 | 2 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        off_grid.main(["linear", "--table", str(tmp_path / "a.json")])


A_SEED = """
import json, os, sys, time
words = sys.argv[1:]
seed = int(words[words.index("--seed") + 1])
if seed == 13:
    sys.exit("no such GPU")
if seed == 14:
    time.sleep(600)
time.sleep(0.5)
run = {"seed": seed, "gpu": os.environ["CUDA_VISIBLE_DEVICES"], "words": words, "day": "", "device": "", "missing": [],
       "rows": []}
json.dump([run], open(words[words.index("--json") + 1], "w"))
"""


def test_seeds_run_on_all_gpus_at_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "seed.py").write_text(A_SEED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    options = off_grid.parsed(["linear", "ssd", "--seeds", "5", "--seed", "10", "--minutes", "0.01"])
    monkeypatch.setattr(off_grid, "LEFT", 0.5)
    wait = subprocess.Popen.wait  # however long the others take on a busy machine
    monkeypatch.setattr(subprocess.Popen, "wait",
                        lambda self, timeout=None: wait(self, timeout if "14" in self.args else None))
    runs, complaints = off_grid.run_seeds(options, [sys.executable, str(tmp_path / "seed.py")])
    assert [run["seed"] for run in runs] == [10, 11, 12]
    assert {run["gpu"] for run in runs} == {"2", "5"}
    assert all(run["words"][:4] == ["linear", "ssd", "--minutes", "0.01"] for run in runs)
    assert len(complaints) == 2
    assert complaints[0] == "seed 13: exit code 1: no such GPU" and complaints[1].startswith("seed 14: ended after")
    assert "seed 13, GPU" in capsys.readouterr().out


def test_gpus_are_those_that_the_driver_lists(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-a)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-b)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert off_grid.gpus() == ["0", "1"]
    monkeypatch.setenv("PATH", "")
    assert off_grid.gpus() == ["0"]

#!/usr/bin/env python3
"""Draws problems at random, runs the untuned plans beside the strongest peers, and prints where
fftune is slow: sizes beside those that documents name.

usage: off_grid.py OP [OP...] [--minutes N] [--rows N] [--seed S] [--seeds N] [--json OUT] [--list]
       off_grid.py --table FILE [FILE...]

An OP is one of `DRAWS` (off_grid_draws.py), or `all`, which takes them in turn. Sizes are those that
models have: multiples of 8, 16 and 64, powers of two and primes. Tokens, head dims and routings are
any. --list prints the problems that a seed draws, and needs no GPU. Otherwise the environment names
the library (FFTUNE_LIBRARY, and PYTHONPATH for packed weights). No preset serves.

Several seeds are several runs of that many minutes, each in a process of its own on one GPU, on all
visible GPUs at once. At the end come the tables of docs/measurements: a line for each seed and each
op, and the rows below 1.0, worst first. --table makes them from the files of earlier runs.

Each contender is a CUDA graph, the graphs are replayed in turn, and the median of the rounds counts.
A ratio is the fastest peer's time divided by fftune's. The floor is the largest of three times: that
of the FLOPs, that of the bytes, and that of one empty kernel. A peer that cannot be imported is named.

op                peers
linear            cuBLASLt by torch.nn.functional.linear; Machete and Humming for int4
ffn               gate and up as one product, and the eager form
moe-ffn           torch._grouped_mm, and a Triton kernel tiled as vLLM's
attention         cuDNN and flash-2 by PyTorch; FlashAttention 3
attention-v-dim   cuDNN, the memory-efficient kernel, and flash-2 with padded values, by PyTorch; FlashAttention 3
mla               FlashMLA, FlashAttention 3 and vLLM's Triton kernel; torch.compile
gated-delta-rule  flash-linear-attention, and vLLM's copy of it; torch.compile for one token
ssd               vLLM's Triton kernels, and mamba_ssm's; torch.compile for one token
causal-conv1d     vLLM's Triton kernels, and the package causal_conv1d; torch.compile
gated-rmsnorm     flash-linear-attention's kernel and vLLM's; torch.compile
others            torch.compile
"""
import argparse
import collections
import concurrent.futures
import datetime
import itertools
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from off_grid_draws import DRAWS, floor_of, problems, text_of

SLOW, FAR = 1.0, 1.5  # below this ratio, and above this many times the floor, a row is printed
LIMITS = 1.0, 0.98, 0.93  # of the ratios that are counted
LEFT = 900  # seconds beyond its minutes, after which a run is ended: it compiles, and ends its last row


def judged(row, limits):
    """Adds the floor, and the ratio to the fastest peer where there is one."""
    row["floor"] = floor_of(row["problem"], limits)
    own, peers = row["us"].get("fftune"), {name: us for name, us in row["us"].items() if name != "fftune"}
    if own:
        row["of_floor"] = own / row["floor"]
        if peers:
            row["peer"] = min(peers, key=peers.get)
            row["ratio"] = peers[row["peer"]] / own
    return row


def line_of(row):
    us = row["us"]
    ratio = f"{row['ratio']:5.2f} x {row['peer']:<9}" if "ratio" in row else f"{'-':>5}   {'':9}"
    best = f"{us[row['peer']]:9.2f}" if "ratio" in row else f"{'-':>9}"
    own = f"{us['fftune']:9.2f} {best} {row['floor']:9.2f} {row['of_floor']:5.2f}" if "fftune" in us else \
        f"{'-':>9} {best} {row['floor']:9.2f} {'-':>5}"
    return f"{ratio} {own}  {text_of(row['problem'])}  {' + '.join(row.get('variants', []))}".rstrip()


HEADER = f"{'ratio':>5}   {'peer':9} {'fftune':>9} {'its µs':>9} {'floor':>9} {'times':>5}  problem and variants"


def report(rows):
    """The lines of a run's end."""
    timed = [row for row in rows if "ratio" in row]
    failed = [row for row in rows if row.get("failed")]
    lines = [f"{len(rows)} rows, {len(timed)} of them beside a peer"]
    if timed:
        ratios = [row["ratio"] for row in timed]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines[0] += f": geometric mean {mean:.3f}, worst {min(ratios):.2f}, " + ", ".join(
            f"{sum(ratio < limit for ratio in ratios)} below {limit:.2f}" for limit in LIMITS)
    slow = sorted((row for row in timed if row["ratio"] < SLOW), key=lambda row: row["ratio"])
    far = sorted((row for row in rows if row.get("of_floor", 0) > FAR), key=lambda row: -row["of_floor"])
    for title, chosen in ((f"slower than a peer, worst first: {len(slow)}", slow),
                          (f"above {FAR} times the floor, worst first: {len(far)}", far)):
        lines += ["", title] + ([HEADER] + [line_of(row) for row in chosen] if chosen else [])
    if failed:
        lines += ["", f"failed or wrong: {len(failed)}"]
        lines += [f"{text_of(row['problem'])}: {row['failed']}" for row in failed]
    return lines


def summary_of(rows):
    """The cells that lines of a table have in common: rows, their geometric mean and shares."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if not ratios:
        return [str(len(rows)), "0", *["–"] * (2 + len(LIMITS))]
    below = [sum(ratio < limit for ratio in ratios) for limit in LIMITS]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return [str(len(rows)), str(len(ratios)), f"{mean:.3f}",
            *[f"{count} ({count / len(ratios):.0%})" for count in below], f"{min(ratios):.2f}"]


def table(header, lines):
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines)]


def op_of(row):
    return "attention-v-dim" if "v-dim" in row["problem"] and row["problem"]["op"] == "attention" \
        else row["problem"]["op"]


def missing_lines(missing):
    """Why peers were not there, by (op, name)."""
    by_reason = {}
    for (op, name), why in missing.items():
        by_reason.setdefault(why, {}).setdefault(name, []).append(f"`{op}`")
    return ["Not there (" + why + "): " + "; ".join(f"{name} for {', '.join(ops)}" for name, ops in names.items()) + "."
            for why, names in by_reason.items()]


def tables(runs):
    """The lines of docs/measurements/off-grid.md for runs, of one seed each."""
    rows = [row for run in runs for row in run["rows"]]
    counted = ["rows", "beside a peer", "geometric mean", *[f"below {limit}" for limit in LIMITS], "worst"]
    lines = table(["day, seed", "device", *counted],
                  [[f"{run['day']}, {run['seed']}", run["device"], *summary_of(run["rows"])] for run in runs]
                  + [["all", "", *summary_of(rows)]])
    ops = list(dict.fromkeys(op_of(row) for row in rows))
    lines += ["", *table(["op", *counted], [[f"`{op}`", *summary_of([row for row in rows if op_of(row) == op])]
                                            for op in ops])]
    slow = sorted((row for row in rows if row.get("ratio", SLOW) < SLOW), key=lambda row: row["ratio"])
    lines += ["", f"Rows below {SLOW}, worst first:", "", *table(
        ["ratio", "problem", "fftune, µs", "peer, µs", "times the floor", "variants"],
        [[f"{row['ratio']:.2f}", f"`{text_of(row['problem'])}`", f"{row['us']['fftune']:.4g}",
          f"{row['us'][row['peer']]:.4g}, {row['peer']}", f"{row['of_floor']:.2f}",
          f"`{' + '.join(row.get('variants', []))}`"] for row in slow])]
    failed = [row for row in rows if row.get("failed")]
    if failed:
        lines += ["", "Failed or wrong:", "", *[f"* `{text_of(row['problem'])}`: {row['failed']}" for row in failed]]
    missing = {(peer["op"], peer["name"]): peer["why"] for run in runs for peer in run["missing"]}
    lines += ["", *(missing_lines(missing) or ["No peer was missing."])]
    left_out = collections.Counter((op_of(row), name) for row in rows for name in row.get("left_out", {})
                                   if (op_of(row), name) not in missing)
    lines += [f"{name} did not run {count} rows of `{op}`." for (op, name), count in sorted(left_out.items())]
    return lines


def parsed(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="OP", help=", ".join([*DRAWS, "all"]))
    parser.add_argument("--minutes", type=float, default=10, help="stop a seed after that time (default: 10)")
    parser.add_argument("--rows", type=int, default=10**9, help="stop a seed after so many problems")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (default: 0)")
    parser.add_argument("--seeds", type=int, default=1, help="so many seeds, from --seed on (default: 1)")
    parser.add_argument("--json", metavar="OUT", help="write all rows")
    parser.add_argument("--list", action="store_true", help="print the problems (20, or --rows), and run nothing")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print the tables of runs that --json wrote")
    options = parser.parse_args(words)
    if bool(options.ops) == bool(options.table):
        parser.error("give OPs, or --table with files")
    for op in options.ops:
        if op not in DRAWS and op != "all":
            parser.error(f"{op}: there is no such op: give some of {', '.join([*DRAWS, 'all'])}")
    if options.seeds < 1:
        parser.error("--seeds: give 1 or more")
    options.ops = list(DRAWS) if "all" in options.ops else list(dict.fromkeys(options.ops))
    return options


def written(path, runs):
    if path:
        with open(path, "w") as file:
            json.dump(runs, file, indent=1)


def run_seed(options):
    """The run of one seed, in this process."""
    end = time.monotonic() + 60 * options.minutes
    drawn = problems(options.ops, options.seed)
    with tempfile.TemporaryDirectory() as empty:
        os.environ.update(FFTUNE_PRESETS=empty, XDG_DATA_HOME=empty)
        import off_grid_peers  # with torch

        bench = off_grid_peers.Bench(empty)
        run = {"seed": options.seed, "ops": options.ops, "day": datetime.date.today().isoformat(),
               "device": bench.name, "title": bench.title(), "missing": off_grid_peers.missing(options.ops), "rows": []}
        print(f"{run['title']}; {' '.join(options.ops)}, seed {options.seed}", flush=True)
        print("\n".join([*missing_lines({(peer["op"], peer["name"]): peer["why"] for peer in run["missing"]}), HEADER]),
              flush=True)
        written(options.json, [run])
        for problem in bench.compiled_ahead(itertools.islice(drawn, options.rows)):
            if time.monotonic() > end:
                break
            run["rows"].append(judged(bench.row(problem), bench.limits))
            print(line_of(run["rows"][-1]), flush=True)
            written(options.json, [run])
    return run


def gpus():
    """The visible GPUs, by what CUDA_VISIBLE_DEVICES takes."""
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except OSError:
        listed = ""
    return [str(i) for i, line in enumerate(listed.splitlines()) if line.startswith("GPU")] or ["0"]


def run_seeds(options, command=None):
    """The runs of all seeds, one at a time on each GPU, and why seeds have none or end early."""
    command = command or [sys.executable, __file__]
    free = queue.SimpleQueue()
    for gpu in gpus():
        free.put(gpu)

    def run_one(seed, folder):
        gpu = free.get()
        out = Path(folder) / f"{seed}.json"
        words = [*command, *options.ops, "--minutes", str(options.minutes), "--rows", str(options.rows),
                 "--seed", str(seed), "--json", str(out)]
        complaint, limit = "", 60 * options.minutes + LEFT
        with open(out.with_suffix(".log"), "w+") as log:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT,
                                       env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu})
            try:
                status = process.wait(limit)
                if status:
                    complaint = f"exit code {status}"
            except subprocess.TimeoutExpired:
                complaint = f"ended after {limit:.0f} s"
            finally:
                process.kill()
                process.wait()
            log.seek(0)
            lines = log.read().splitlines()
        free.put(gpu)
        print("\n".join([f"seed {seed}, GPU {gpu}{': ' + complaint if complaint else ''}", *lines, ""]), flush=True)
        if complaint:
            complaint = f"seed {seed}: {complaint}: {(lines or [''])[-1][:200]}"
        try:
            return json.loads(out.read_text()), complaint
        except (OSError, ValueError):
            return [], complaint or f"seed {seed}: it wrote no rows"

    with tempfile.TemporaryDirectory() as folder, \
            concurrent.futures.ThreadPoolExecutor(free.qsize()) as pool:
        seeds = range(options.seed, options.seed + options.seeds)
        found = list(pool.map(run_one, seeds, itertools.repeat(folder)))
    return [run for runs, _ in found for run in runs], [complaint for _, complaint in found if complaint]


def main(words):
    options = parsed(words)
    if options.table:
        print("\n".join(tables([run for path in options.table for run in json.loads(Path(path).read_text())])))
        return 0
    if options.list:
        for seed in range(options.seed, options.seed + options.seeds):
            count = min(options.rows, 10**6) if options.rows < 10**9 else 20
            for problem in itertools.islice(problems(options.ops, seed), count):
                print(text_of(problem))
        return 0
    if options.seeds == 1:
        print("\n".join(["", *report(run_seed(options)["rows"])]))
        return 0
    runs, complaints = run_seeds(options)
    written(options.json, runs)
    print("\n".join([*tables(runs), *complaints]))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

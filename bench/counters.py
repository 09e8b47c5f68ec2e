#!/usr/bin/env python3
"""Reads hardware counters of ffn's kernels: what each waits for, in single launches. ncu flushes
the caches before each replay.

usage: counters.py LIBFFTUNE.so PRESETS [D,H,M]... [--raw OUT.csv]    (ncu on the path)

Runs itself below ncu, which replays each kernel of a plan once for every group of counters, and
prints a Markdown table; --raw keeps all that ncu said. Clocks are not fixed, so that the chip
behaves as in the other measurements.
"""
import csv
import io
import re
import subprocess
import sys

CASES = ["4096,14336,4096", "1024,2048,256", "4096,14336,16"]
SECTIONS = ["SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats"]
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
SCALE = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3}


def passes(library, presets, cases):
    """The work below ncu: each case's plan, first to load it, then once between the profiler's marks."""
    import torch
    from contenders import Fftune, random

    fftune = Fftune(library, presets)
    for case in cases:
        d, h, m = map(int, case.split(","))
        plan = fftune.plan({"op": "ffn", "dtype": "bf16", "m": m, "d": d, "h": h})
        tensors = [random(m, d), random(h, d, scale=d**-0.5), random(h, d, scale=d**-0.5),
                   random(d, h, scale=h**-0.5), random(m, d)]
        workspace = fftune.workspace(plan)
        for _ in range(3):
            fftune.run(plan, tensors, workspace)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        fftune.run(plan, tensors, workspace)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        fftune.destroy(plan)


def number(row, name):
    try:
        return float(row[name].replace(",", ""))
    except (KeyError, ValueError):
        return None


def percent(row, *patterns):
    """The first counter that one of the patterns names and that has a value."""
    for pattern in patterns:
        for name in row:
            if re.fullmatch(pattern, name) and number(row, name) is not None:
                return "%.0f%%" % number(row, name)
    return ""


def table(text):
    lines = text[text.index('"ID"'):]
    rows = list(csv.DictReader(io.StringIO(lines)))
    units, kernels = rows[0], rows[1:]
    print("| kernel | µs | tensor pipe | L2 | memory | a warp's cycles an instruction, "
          "and the most of them |\n| --- | --- | --- | --- | --- | --- |")
    for row in kernels:
        time = number(row, "gpu__time_duration.sum") * SCALE[units["gpu__time_duration.sum"]]
        stalls = sorted(((number(row, name) or 0, STALL.fullmatch(name).group(1))
                         for name in row if STALL.fullmatch(name)), reverse=True)
        name = row["Kernel Name"].split("<")[0].split("::")[-1].split()[-1]
        print("| %s | %.4g | %s | %s | %s | %.3g: %s |" % (
            name, time,
            percent(row, r"sm__pipe_tensor_cycles_active\.avg\.pct_of_peak_sustained_active",
                    r"sm__pipe_tensor.*cycles_active\.avg\.pct.*"),
            percent(row, r"lts__t_sectors\.avg\.pct.*", r"lts__throughput.*pct.*"),
            percent(row, r"gpu__dram_throughput.*pct.*", r"dram__throughput.*pct.*"),
            sum(value for value, _ in stalls),
            ", ".join("%s %.2g" % (reason.replace("_", " "), value)
                      for value, reason in stalls[:3])))


def main(words):
    if words[:1] == ["--passes"]:
        return passes(words[1], words[2], words[3:])
    raw = None
    if "--raw" in words:
        place = words.index("--raw")
        raw = words[place + 1]
        words = words[:place] + words[place + 2:]
    if len(words) < 2:
        sys.exit(__doc__.split("\n\n")[1])
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--page", "raw",
               "--csv"]
    for section in SECTIONS:
        command += ["--section", section]
    command += [sys.executable, __file__, "--passes", *words[:2], *(words[2:] or CASES)]
    done = subprocess.run(command, capture_output=True, text=True)
    if raw:
        open(raw, "w").write(done.stdout + done.stderr)
    if done.returncode != 0 or '"ID"' not in done.stdout:
        sys.exit("counters.py: ncu failed: " + (done.stderr or done.stdout)[-400:])
    table(done.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])

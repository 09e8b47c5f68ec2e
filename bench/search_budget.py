#!/usr/bin/env python3
"""How long a search of one model's shape over 18 numbers of tokens takes from an empty cache, and how
far what it finds is from what a much longer search finds.

usage: search_budget.py [--model qwen3-30b-a3b] [--budget 110s] [--long 60s] [--check 16,1024,4096]
                        [--quick-presets DIR] [--long-presets DIR]

--check: numbers of tokens that are searched for --long each, in one search whose kernels all of them
share, with a least gain of 0.1%; the records of both searches are then timed in turns. An empty
--check tells the time alone. --quick-presets and --long-presets: folders that such searches wrote
before, which are not done again. Needs fftune on the PATH or --tool.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOKENS = "1,2,4,8,16,24,32,48,64,96,128,256,512,1024,1536,2048,3072,4096"
ROUNDS = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--tool", default="fftune")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--budget", default="110s")
    parser.add_argument("--long", default="60s")
    parser.add_argument("--check", default="16,1024,4096")
    parser.add_argument("--quick-presets", type=Path)
    parser.add_argument("--long-presets", type=Path)
    own, more = parser.parse_known_args()  # the rest is for fftune: --tp 8 --dtype fp8

    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FFTUNE_CACHE": folder + "/cache",
                       "XDG_STATE_HOME": folder + "/state"}

        def fftune(*arguments):
            done = subprocess.run([own.tool, *arguments], env=environment, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
            if done.returncode not in (0, 1):
                sys.exit(f"fftune {' '.join(arguments)}: {done.stderr.strip()[-600:]}")
            return done.stdout

        def search(name, tokens, budget, *options):
            began = time.monotonic()
            fftune("moe-ffn", "--model", own.model, "--m", tokens, "--strategy", "guided", "--budget",
                   budget, "--progress", "none", "--out", f"{folder}/{name}", *options, *more)
            return time.monotonic() - began

        def medians_us(presets):
            printed = fftune("bench", "moe-ffn", "--model", own.model, "--m", own.check, "--presets",
                             str(presets), "--json", "--progress", "none", "--budget", "1s", *more)
            return {problem["problem"]["m"]: entry["median_us"]
                    for problem in json.loads(printed)["problems"]
                    for entry in problem["entries"] if entry["name"] == "fftune"}

        quick = own.quick_presets or Path(folder, "quick")
        if not own.quick_presets:
            seconds = search("quick", TOKENS, own.budget)
            found = sorted(record["problem"]["m"] for path in quick.glob("*/moe-ffn.json")
                           for record in json.loads(path.read_text())["records"])
            print(f"{own.model}: {len(found)} of {len(TOKENS.split(','))} numbers of tokens in "
                  f"{seconds:.1f} s from an empty cache (asked: 120)", flush=True)
        if not own.check:
            return
        long = own.long_presets or Path(folder, "long")
        if not own.long_presets:
            seconds = float(own.long.removesuffix("s")) * len(own.check.split(","))
            search("long", own.check, f"{seconds:g}s", "--min-gain", "0.1%")
        rounds = [(medians_us(quick), medians_us(long)) for _ in range(ROUNDS)]
        for tokens in rounds[0][0]:
            first, best = (statistics.median(of[which][tokens] for of in rounds) for which in (0, 1))
            print(f"m={tokens}: {first:.1f} µs, the longer search {best:.1f}: "
                  f"{100 * (first / best - 1):+.1f}% (asked: 2%)")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How long a search of one model's shape over 18 numbers of tokens takes from an empty cache, and how
far what it finds is from what a much longer search finds.

usage: search_budget.py [--model qwen3-30b-a3b] [--budget 110s] [--long 60s] [--check 16,1024,4096]

--check: numbers of tokens that are searched for --long each, with a least gain of 0.1%; both records
are then timed in turns. An empty --check tells the time alone. Needs fftune on the PATH or --tool.
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
ROUNDS = 3


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--tool", default="fftune")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--budget", default="110s")
    parser.add_argument("--long", default="60s")
    parser.add_argument("--check", default="16,1024,4096")
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

        def median_us(name, tokens):
            printed = fftune("bench", "moe-ffn", "--model", own.model, "--m", tokens, "--presets",
                             f"{folder}/{name}", "--json", "--progress", "none", "--budget", "2s",
                             *more)
            problem, = json.loads(printed)["problems"]
            return next(each["median_us"] for each in problem["entries"]
                        if each["name"] == "fftune")

        seconds = search("quick", TOKENS, own.budget)
        found = sorted(record["problem"]["m"]
                       for path in Path(folder, "quick").glob("*/moe-ffn.json")
                       for record in json.loads(path.read_text())["records"])
        print(f"{own.model}: {len(found)} of {len(TOKENS.split(','))} numbers of tokens in "
              f"{seconds:.1f} s from an empty cache (asked: 120)")
        for tokens in filter(None, own.check.split(",")):
            search("long", tokens, own.long, "--min-gain", "0.1%")
            times = {name: [] for name in ("quick", "long")}
            for _ in range(ROUNDS):
                for name, all_of in times.items():
                    all_of.append(median_us(name, tokens))
            quick, best = (statistics.median(times[name]) for name in ("quick", "long"))
            print(f"m={tokens}: {quick:.1f} µs, a search of {own.long} {best:.1f}: "
                  f"{100 * (quick / best - 1):+.1f}% (asked: 2%)")


if __name__ == "__main__":
    main()

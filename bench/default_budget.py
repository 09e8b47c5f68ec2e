#!/usr/bin/env python3
"""How long a search takes from an empty cache when nothing is said of its time, and how far its winner
is from that of an exhaustive search: ten small problems, each with a line.

usage: default_budget.py [--budget none,2s,5s] [--strategy guided] [--kernels DIR] [--records DIR]
                         [--only-exhaustive] [--best DIR]

--budget: a list; each is the --budget of one problem, and "none" gives no budget.

--kernels: a folder for the kernels of the exhaustive searches. --only-exhaustive fills it.
--records: a folder for what the exhaustive searches find.
--best: a folder of such records. Their searches are not done again, and others are left out.
Where the two winners differ by more than 0.5%, bench times both in turns. Needs fftune on the PATH or
--tool.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# The last option is the one whose list of values the search takes.
SEARCHES = ["act-mul --h 14336 --m 4096", "bias-gelu --h 4096 --m 4096", "rmsnorm --d 4096 --m 64",
            "layernorm --d 4096 --m 4096", "ngram-block --len 512 --vocab 32128 --b 256",
            "rope --b 1 --dim 256 --heads 8 --angles table --s 8192", "linear --k 2048 --n 2048 --m 1",
            "moe-ffn --model qwen3-30b-a3b --m 16", "ffn --d 1024 --h 2048 --m 1,16"]
ROUNDS = 2
CLOSE = 0.005


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--tool", default="fftune")
    parser.add_argument("--budget", default="none")
    parser.add_argument("--strategy")
    parser.add_argument("--kernels", type=Path)
    parser.add_argument("--records", type=Path)
    parser.add_argument("--best", type=Path)
    parser.add_argument("--only-exhaustive", action="store_true")
    own = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        kernels = own.kernels or Path(folder, "kernels")

        def fftune(arguments, cache):
            environment = {**os.environ, "FFTUNE_CACHE": str(cache),
                           "XDG_STATE_HOME": f"{folder}/state"}
            done = subprocess.run([own.tool, *arguments], env=environment, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
            if done.returncode not in (0, 1):
                sys.exit(f"fftune {' '.join(arguments)}: {done.stderr.strip()[-600:]}")
            return json.loads(done.stdout)

        def search(command, out, cache, *options):
            found = fftune([*command.split(), "--json", "--progress", "none", "--out", str(out),
                            *options], cache)
            return found[0]["problems"]

        def median_us(command, tokens, presets):
            words = command.split()
            words[-1] = str(tokens)
            found = fftune(["bench", *words, "--json", "--progress", "none", "--budget", "1s",
                            "--presets", str(presets)], kernels)
            return next(entry["median_us"] for entry in found["problems"][0]["entries"]
                        if entry["name"] == "fftune")

        def lost(command, tokens, found, best):
            """The part of the best winner's time by which the found one is slower."""
            part = found["us"] / best["us"] - 1
            if abs(part) <= CLOSE:
                return part
            rounds = [(median_us(command, tokens, found["presets"]),
                       median_us(command, tokens, best["presets"])) for _ in range(ROUNDS)]
            return statistics.median(one / other for one, other in rounds) - 1

        def all_found(name, cache_of, *options, each=""):
            result = {}
            print(name, end="", file=sys.stderr, flush=True)
            for place, command in enumerate(searches):
                tokens = command.split()[-1].split(",")
                budget = ["--budget", f"{float(each[:-1]) * len(tokens):g}s"] if each else []
                presets = (own.records if name == "best" and own.records
                           else Path(folder, name, str(place)))
                for problem in search(command, presets, cache_of(place), *options, *budget):
                    if not problem["record"]:
                        continue
                    verdict = problem["record"]["verdict"]
                    result[command, problem["problem"][command.split()[-2][2:]]] = {
                        "us": verdict["median_us"], "seconds": problem["seconds"],
                        "tried": problem["outcomes"].get("measured", 0), "presets": presets,
                        "decided": verdict["decided"],
                        "ended": "ended early" if problem["stopped"] else "ended by itself"}
                    print(f" {problem['seconds']:.1f} s", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr, flush=True)
            return result

        def recorded(folder):
            """Exhaustive searches of one problem each that were done before."""
            result = {}
            for command in SEARCHES:
                op, size, tokens = command.split()[0], command.split()[-2][2:], command.split()[-1]
                for path in folder.glob(f"*/{op}.json"):
                    for record in json.loads(path.read_text())["records"]:
                        if str(record["problem"][size]) == tokens:
                            result[command, int(tokens)] = {
                                "us": record["verdict"]["median_us"], "seconds": 0, "presets": folder,
                                "tried": sum(stage["measured"] for stage in record["stages"])}
            return result

        best = recorded(own.best) if own.best else {}
        searches = [command for command, _ in best] or SEARCHES
        strategy = ["--strategy", own.strategy] if own.strategy else []
        budgets = [] if own.only_exhaustive else own.budget.split(",")
        found = {budget: all_found(f"found-{budget}", lambda place: f"{folder}/{budget}-{place}",
                                   *strategy, each="" if budget == "none" else budget)
                 for budget in budgets}
        best = best or all_found("best", lambda _: kernels, "--strategy", "exhaustive", each="300s")
        for budget in budgets:
            print(f"budget of a problem: {budget}")
            losses = []
            for (command, tokens), one in found[budget].items():
                other = best[command, tokens]
                losses.append(lost(command, tokens, one, other))
                words = command.rsplit(" ", 1)[0]
                print(f"{words} {tokens}: {one['seconds']:.1f} s, "
                      f"{one['tried']} of {other['tried']} tried, {one['us']:.2f} µs, best "
                      f"{other['us']:.2f}: {100 * losses[-1]:+.1f}%, {one['ended']}, "
                      f"{'decided' if one['decided'] else 'undecided'}", flush=True)
            seconds = sum(one["seconds"] for one in found[budget].values())
            print(f"  {sum(loss <= 0.01 for loss in losses)} of {len(losses)} within 1%, the worst "
                  f"{100 * max(losses):+.1f}%, {seconds:.0f} s")
        seconds = sum(one["seconds"] for one in best.values())
        print(f"exhaustive: {len(best)} problems, {seconds:.0f} s")


if __name__ == "__main__":
    main()

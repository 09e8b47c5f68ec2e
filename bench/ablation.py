#!/usr/bin/env python3
"""The effect of each parameter of a family: how much slower than the best of all variants the best
variant with each of its values is.

usage: ablation.py LANDSCAPE.txt...    (those of tests/data/landscapes/; standard library alone)

Prints a Markdown table a family: for each parameter its values, the best's first, each with its loss
in percent. Families whose best is more than twice as slow as the stage's are left out.
"""
import collections
import sys


def families(path):
    """Reads a landscape: the problem, and for each family its stages, parameters and timed
    variants."""
    problem, found = "", []
    for line in open(path):
        words = line.split()
        if words[0] == "problem":
            problem = line.split(None, 1)[1].strip()
        elif words[0] == "family":
            found.append((words[1], words[2], words[3:], []))
        elif words[0] != "device":
            try:
                found[-1][3].append((tuple(words[:-1]), float(words[-1])))
            except ValueError:
                continue  # a variant that failed has a word in place of its time
    return problem, [family for family in found if family[3]]


def table(name, parameters, variants):
    best = min(time for _, time in variants)
    print(f"\n`{name}`, best {best:g} µs of {len(variants)} variants:\n\n| parameter | values and what "
          "they lose |\n| --- | --- |")
    for place, parameter in enumerate(parameters):
        least = collections.defaultdict(lambda: float("inf"))
        for values, time in variants:
            least[values[place]] = min(least[values[place]], time)
        if len(least) > 1:
            print(f"| {parameter} | " + ", ".join(
                f"{value}: {100 * (time / best - 1):.1f}%"
                for value, time in sorted(least.items(), key=lambda item: item[1])) + " |")


def main(paths):
    for path in paths:
        problem, found = families(path)
        print(f"\n## {problem}")
        stage_best = collections.defaultdict(lambda: float("inf"))
        for stage, _, _, variants in found:
            stage_best[stage] = min(stage_best[stage], min(time for _, time in variants))
        for stage, name, parameters, variants in found:
            if min(time for _, time in variants) <= 2 * stage_best[stage]:
                table(name, parameters, variants)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])

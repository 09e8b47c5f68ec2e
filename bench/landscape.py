#!/usr/bin/env python3
"""Makes a landscape of a sweep's journal: every variant's time, in a table that is small.

usage: landscape.py JOURNAL.jsonl... > LANDSCAPE.txt    (standard library alone)

A line that begins with "device", "problem" or "family" opens something; every other is a variant:

  device NVIDIA H200
  problem ffn/fwd bf16 act=silu ... m=1
  family 0 gate_up_decode rows warps unroll split_k    (first stage, family, its parameters)
  16 8 4 1 3.21                                        (their values, numbers or words; µs, or why there is none)
"""
import json
import sys


def read(path, device, found):
    for line in open(path):
        entry = json.loads(line)
        if "fftune" in entry:
            device.add(entry["device"])
        elif "id" in entry and " + " not in entry["id"] and "/" in entry["id"]:
            family, _, config = entry["id"].partition("/")
            pairs = [pair.split("=") for pair in config.split(",")]
            time = "%.4g" % entry["us"]["median"] if entry["kind"] == "measured" else entry["kind"]
            key = (entry["first_stage"], family, " ".join(name for name, _ in pairs))
            values = " ".join(value for _, value in pairs)
            found.setdefault(entry["problem"], {}).setdefault(key, {})[values] = time


def main(paths):
    device, found = set(), {}
    for path in paths:
        read(path, device, found)
    print("device", *sorted(device))
    for problem, families in found.items():
        print("problem", problem)
        for (stage, family, names), variants in sorted(families.items()):
            print("family", stage, family, names)
            for values, time in sorted(variants.items()):
                print(values, time)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])

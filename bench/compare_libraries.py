#!/usr/bin/env python3
"""Two builds of the library side by side in one process: every problem of a folder of presets.

usage: compare_libraries.py OLD.so OLD_PRESETS NEW.so NEW_PRESETS [--op LIST]
                            [--problems PRESETS] [--json OUT]

For each record of NEW_PRESETS (or of the folder after --problems, to compare untuned choices with
empty folders of presets) both libraries make a plan, from their own presets. Both run on the same
random inputs, and their outputs are compared bit by bit. Then both are timed with
interleaved samples, in CUDA graphs that cycle through enough sets of buffers to overflow the L2. A
ratio above 1: the new one is faster. Records that one of the libraries cannot run are named.
"""
import concurrent.futures
import ctypes
import json
import math
import pathlib
import random
import sys

import torch

from contenders import Fftune, arguments_of, microseconds

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32,
         "fp8": torch.float8_e4m3fn, "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64}
MOST_BYTES = 40 << 30  # of all sets of buffers together


class Library(Fftune):
    """As Fftune, but a failure is an exception that carries the library's line."""

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.fftune_last_error().decode())

    def describe(self, plan):
        return json.loads(self.lib.fftune_plan_describe(plan))


def problems_of(presets, ops):
    found = []
    for path in sorted(pathlib.Path(presets).glob("*/*.json")):
        for record in json.loads(path.read_text())["records"]:
            if not ops or record["problem"]["op"] in ops:
                found.append(record["problem"])
    return found


def marks(pattern, tokens):
    """One byte a token by the pattern's words: block:S, tail:S, even:S, random:S."""
    kind, _, share = pattern.partition(":")
    marked = {"all": tokens, "none": 0}.get(pattern, round(float(share or 0) * tokens))
    rows = torch.zeros(tokens, dtype=torch.uint8)
    if kind == "tail":
        rows[tokens - marked:] = 1
    elif kind == "even":
        rows[[i * tokens // marked for i in range(marked)]] = 1
    elif kind == "random":
        rows[torch.rand(tokens) < float(share)] = 1
    else:
        rows[:marked] = 1
    return rows.cuda()


def draw(buffer, problem):
    shape, dtype = buffer["shape"], TYPES[buffer["dtype"]]
    if buffer["role"] == "output":
        return torch.full(shape, 77, dtype=torch.uint8, device="cuda").to(dtype)
    if buffer["name"] == "mask":
        return marks(problem["mask"], shape[0])
    if dtype in (torch.int32, torch.int64):
        return torch.randint(0, problem.get("vocab", 2), shape, dtype=dtype, device="cuda")
    values = torch.randn(shape, device="cuda")
    if buffer["name"].endswith("scale"):
        values = values.abs() * 0.01 + 0.01
    elif buffer["name"].startswith("w") and len(shape) == 2:
        values /= math.sqrt(shape[-1])
    return values.to(dtype)


def compare(problem, libraries, plans):
    described = [library.describe(plan) for library, plan in zip(libraries, plans)]
    buffers = described[1]["buffers"]
    if [b["name"] for b in buffers] != [b["name"] for b in described[0]["buffers"]]:
        raise RuntimeError("the libraries have other buffers")
    set_bytes = sum(b["bytes"] for b in buffers)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    count = max(2, min(3 * l2 // set_bytes + 1, MOST_BYTES // set_bytes, 400))
    sets = [[draw(b, problem) for b in buffers] for _ in range(count)]
    spaces = [library.workspace(plan) for library, plan in zip(libraries, plans)]
    written = [i for i, b in enumerate(buffers) if b["role"] in ("output", "updated")]
    outputs = []
    for library, plan, space in zip(libraries, plans, spaces):
        tensors = [t.clone() if i in written else t for i, t in enumerate(sets[0])]
        library.run(plan, tensors, space)
        torch.cuda.synchronize()
        outputs.append([tensors[i].flatten().view(torch.uint8) for i in written])
    same = all(torch.equal(a, b) for a, b in zip(*outputs))
    contenders = {
        name: lambda tensors, _, i=i: libraries[i].run(plans[i], tensors, spaces[i])
        for i, name in enumerate(("old", "new"))}
    times = microseconds(contenders, sets)
    return {"problem": problem, "old_us": times["old"], "new_us": times["new"],
            "ratio": times["old"] / times["new"], "same_bits": same,
            "old": [v["id"] for v in described[0]["variants"]],
            "new": [v["id"] for v in described[1]["variants"]]}


def text_of(problem):
    return " ".join(str(problem[k]) for k in ("op", "pass", "dtype") if k in problem) + " " + " ".join(
        f"{k}={v}" for k, v in problem.items() if k not in ("op", "pass", "dtype"))


def main(words):
    ops = []
    if "--op" in words:
        place = words.index("--op")
        ops = words[place + 1].split(",")
        words = words[:place] + words[place + 2:]
    problems_folder = None
    if "--problems" in words:
        place = words.index("--problems")
        problems_folder = words[place + 1]
        words = words[:place] + words[place + 2:]
    words, out = arguments_of(words, __doc__, 4)
    torch.manual_seed(0)
    random.seed(0)
    libraries = [Library(words[0], words[1]), Library(words[2], words[3])]
    problems = problems_of(problems_folder or words[3], ops)

    def plan_of(job):
        library, problem = job
        try:
            return libraries[library].plan(problem)
        except RuntimeError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        plans = list(pool.map(plan_of, [(i, p) for p in problems for i in (0, 1)]))
    results, failures = [], []
    for number, problem in enumerate(problems):
        own = plans[2 * number:2 * number + 2]
        wrong = [plan for plan in own if isinstance(plan, str)]
        try:
            if wrong:
                raise RuntimeError("; ".join(wrong))
            results.append(compare(problem, libraries, own))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            failures.append({"problem": problem, "failure": str(error)})
            print(f"{text_of(problem)}: {error}")
            continue
        last = results[-1]
        print(f"{last['ratio']:6.3f} {last['old_us']:9.2f} {last['new_us']:9.2f} "
              f"{'same bits ' if last['same_bits'] else 'OTHER BITS'} {text_of(problem)}", flush=True)
        torch.cuda.empty_cache()
    if out:
        pathlib.Path(out).write_text(json.dumps({"results": results, "failures": failures}, indent=1))
    ratios = [r["ratio"] for r in results]
    if not ratios:
        sys.exit("compare_libraries.py: nothing could be compared")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"{len(ratios)} records: geometric mean {mean:.4f}, least {min(ratios):.3f}; "
          f"{sum(not r['same_bits'] for r in results)} with other bits, {len(failures)} failed")


if __name__ == "__main__":
    main(sys.argv[1:])

#!/usr/bin/env python3
"""The kernels of a training step of Llama-3.2-1B's sizes, 4 x 2048 tokens, by their time in total.

usage: step_kernels.py LABEL... [--rows N]

Labels are those of models.py: compile+patch, eager+liger, and so on. A step is timed as there, then
two steps run under torch.profiler. For each kernel: milliseconds a step, launches a step, and its
name; then the time in which the device ran no kernel.
"""
import argparse
import gc
import statistics
from collections import defaultdict
from contextlib import nullcontext

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

import models

STEPS = 2


def spans_of(step) -> list[tuple[str, float, float]]:
    """Name, begin and end of all kernels and copies on the device, in microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    found = [(e.name, e.time_range.start, e.time_range.end) for e in record.events()
             if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    return sorted(found, key=lambda span: span[1])


def idle(spans) -> float:
    total, end = 0.0, spans[0][1]
    for _, begin, finish in spans:
        total += max(0.0, begin - end)
        end = max(end, finish)
    return total


def show(label: str, rows: int) -> None:
    config = models.dense("llama-1b")
    model = models.build(transformers.LlamaForCausalLM, config)
    shape = (4, 2048) if models.FULL else (2, 8)
    ids = torch.randint(0, config.vocab_size, shape, device=models.DEVICE)
    step = models.training_step(model, label, {"input_ids": ids, "labels": ids})
    with models.liger(model) if "liger" in label else nullcontext():
        for _ in range(3):
            step()
        times = [models.microseconds(step, 1) / 1e3 for _ in range(9)]
        print(f"\n{label}: {statistics.median(times):.1f} ms a step, "
              f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
        spans = spans_of(step)
    of_kernel = defaultdict(list)
    for name, begin, end in spans:
        of_kernel[name].append(end - begin)
    ordered = sorted(of_kernel.items(), key=lambda item: -sum(item[1]))
    for name, each in ordered[:rows]:
        print(f"{sum(each) / STEPS / 1e3:9.3f} {len(each) / STEPS:7.1f}  {name[:150]}")
    rest = sum(sum(each) for _, each in ordered[rows:])
    print(f"{rest / STEPS / 1e3:9.3f}          the others\n{idle(spans) / STEPS / 1e3:9.3f}          none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", nargs="+")
    parser.add_argument("--rows", type=int, default=40)
    options = parser.parse_args()
    for label in options.labels:
        torch.cuda.reset_peak_memory_stats()
        show(label, options.rows)
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()


if __name__ == "__main__":
    main()

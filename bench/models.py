#!/usr/bin/env python3
"""Whole transformers models, random weights, on one GPU: eager, torch.compile, and both of them
with fftune.patch.

usage: models.py [--out DIR] [--budget SECONDS] [--parts host,forward,train,programs,curves] [--cases ...]

Parts, each in as much of the budget as is left:
  host      the host's time for an op through the dispatcher, beside torch.ops.aten.mul
  forward   one pass without the head, a CUDA graph each, replayed round-robin: median of the rounds
  train     a step of Llama-3.2-1B's sizes at 4 x 2048 tokens: forward, backward, AdamW; peak memory
  programs  GPT-2 at 256 x 16, forward and a training step; T5-base generating without repetition
  curves    losses of 200 steps of a small Llama on generated text, two seeds, with and without

Results go to DIR/models.json after every case; the table comes last. A case that fails is one line.
On a machine without a GPU tiny models are timed on the CPU: that is for trying the script out.
"""
import argparse
import copy
import gc
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import fftune

START = time.monotonic()
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

# hidden, intermediate, layers, heads, key-value heads, vocabulary
LLAMAS = {"llama-1b": (2048, 8192, 16, 32, 8, 128256), "llama-8b/4": (4096, 14336, 8, 32, 8, 128256)}
CASES = ["llama-1b 1x1", "llama-1b 4x1024", "llama-8b/4 1x1", "llama-8b/4 4x1024", "llama-1b 16x1",
         "llama-1b 1x512", "llama-8b/4 16x1", "llama-8b/4 1x512", "llama-1b 64x1"]
CONTENDERS = ("eager", "eager+patch", "compile", "compile+patch")


class Report:
    """Results by part and case, written whenever there is a new one."""

    def __init__(self, folder: str, budget: float):
        self.path = Path(folder) / "models.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.deadline = START + budget
        self.results = {"torch": torch.__version__, "transformers": transformers.__version__,
                        "fftune": fftune.__version__,
                        "device": torch.cuda.get_device_name() if GPU else "cpu"}

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def add(self, part: str, case: str, values: dict) -> None:
        self.results.setdefault(part, {}).setdefault(case, {}).update(values)
        self.path.write_text(json.dumps(self.results, indent=1) + "\n")
        print(f"[{time.monotonic() - START:5.0f} s] {part} {case}: {values}", flush=True)

    def attempt(self, part: str, case: str, run) -> None:
        try:
            run()
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self.add(part, case, {"failed": f"{type(error).__name__}: {lines[0][:300]}"})
            traceback.print_exc(limit=-3)
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
        torch._dynamo.reset()


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def llama(name: str, **options) -> transformers.LlamaConfig:
    hidden, intermediate, layers, heads, kv_heads, vocabulary = LLAMAS[name]
    if not GPU:
        hidden, intermediate, layers, heads, kv_heads, vocabulary = 64, 96, 2, 4, 2, 128
    return transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
        max_position_embeddings=8192, tie_word_embeddings=True, **options)


def build(kind, config, dtype=torch.bfloat16):
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            return kind(config) if not hasattr(kind, "from_config") else kind.from_config(config)
    finally:
        torch.set_default_dtype(torch.float32)


def copy_sharing_weights(model):
    """A model with the same weights, not copies of them."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def microseconds(run, repeats: int) -> float:
    synchronize()
    if not GPU:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats * 1e3


def interleaved(runs: dict, rounds: int = 9, round_seconds: float = 0.02) -> dict:
    """Medians of rounds in which every contender is timed once."""
    repeats = {}
    for name, run in runs.items():
        run()
        repeats[name] = max(1, min(200, int(round_seconds * 1e6 / microseconds(run, 2))))
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(microseconds(run, repeats[name]))
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def graph_of(run):
    """A function that replays a CUDA graph of `run`, after it has run enough to be compiled."""
    if not GPU:
        run()
        return run
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


# host

def host(report: Report) -> None:
    x, w = torch.randn(1, 64, device=DEVICE), torch.rand(64, device=DEVICE)
    q = torch.randn(1, 1, 4, 16, device=DEVICE)
    weights = [torch.randn(64, 64, device=DEVICE) for _ in range(3)]
    ids, logits = torch.randint(0, 9, (1, 16), device=DEVICE), torch.randn(1, 64, device=DEVICE)
    mask = torch.ones(1, dtype=torch.bool, device=DEVICE)
    ops, mul = fftune.ops, torch.ops.aten.mul.Tensor
    calls = {
        "aten.mul": lambda: mul(x, x),
        "aten.rms_norm": lambda: torch.rms_norm(x, (64,), w, 1e-6),
        "rmsnorm": lambda: ops.rmsnorm(x, w),
        "add_rmsnorm": lambda: ops.add_rmsnorm(x, x, w),
        "ffn": lambda: ops.ffn(x, *weights),
        "ffn_block": lambda: ops.ffn_block(x, x, w, *weights),
        "linear": lambda: ops.linear(x, weights[0]),
        "masked_linear": lambda: ops.masked_linear(x, mask, *weights[:2]),
        "bias_gelu": lambda: ops.bias_gelu(x, w),
        "act_mul": lambda: ops.act_mul(x, x),
        "rope": lambda: ops.rope(q, q),
        "ngram_block": lambda: ops.ngram_block(ids, logits),
    }
    times = {}
    with torch.no_grad():
        for name, call in calls.items():
            try:
                for _ in range(50):
                    call()
                rounds = []
                for _ in range(7):
                    synchronize()
                    start = time.perf_counter()
                    for _ in range(300):  # fewer than the queue of launches holds
                        call()
                    rounds.append((time.perf_counter() - start) / 300 * 1e6)
                times[name] = round(min(rounds), 2)
            except Exception as error:
                times[name] = f"failed: {error}"
    report.add("host", "microseconds an op", times)


# forward

def forward(report: Report, case: str) -> None:
    name, shape = case.rsplit(" ", 1)
    batch, tokens = map(int, shape.split("x"))
    if not GPU:
        tokens = min(tokens, 16)
    model = build(transformers.LlamaModel, llama(name)).eval()
    ids = torch.randint(0, model.config.vocab_size, (batch, tokens), device=DEVICE)
    patched = copy_sharing_weights(model)
    print(fftune.patch(patched), flush=True)

    def contender(module):
        return graph_of(lambda: module(input_ids=ids, use_cache=False).last_hidden_state)

    with torch.no_grad():
        ours = patched(input_ids=ids, use_cache=False).last_hidden_state.double()
        theirs = model(input_ids=ids, use_cache=False).last_hidden_state.double()
        difference = ((ours - theirs).norm() / theirs.norm()).item()
        runs = {"eager": contender(model), "eager+patch": contender(patched)}
        report.add("forward", case, {**interleaved(runs), "difference": round(difference, 5)})
        compile_start = time.monotonic()
        for label, module in (("compile", model), ("compile+patch", patched)):
            if report.left() < 30:
                report.add("forward", case, {"left out": f"{label}: no time is left"})
                break
            torch._dynamo.reset()
            runs[label] = contender(torch.compile(module, dynamic=False))
        seconds = round(time.monotonic() - compile_start, 1)
        report.add("forward", case, {**interleaved(runs), "compile seconds": seconds})


# training

def steps_of(model, batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=GPU)

    def step():
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss
    return step


def train(report: Report, part: str, case: str, make, batch: dict, labels) -> None:
    for label in labels:
        if report.left() < 40:
            report.add(part, case, {"left out": f"{label}: no time is left"})
            return
        model = make().train()
        if "patch" in label:
            fftune.patch(model, recompute="recompute" in label)
        step = steps_of(torch.compile(model, dynamic=False) if "compile" in label else model, batch)
        step()
        step()
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        times = [microseconds(step, 1) for _ in range(7)]
        values = {label: round(statistics.median(times), 1)}
        if GPU:
            values[f"{label} GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
        report.add(part, case, values)
        del model, step
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
        torch._dynamo.reset()


def train_llama(report: Report) -> None:
    config = llama("llama-1b")
    shape = (4, 2048) if GPU else (2, 8)
    ids = torch.randint(0, config.vocab_size, shape, device=DEVICE)
    train(report, "train", "llama-1b 4x2048", lambda: build(transformers.LlamaForCausalLM, config),
          {"input_ids": ids, "labels": ids},
          ("eager", "eager+patch", "compile", "compile+patch", "eager+patch+recompute"))


# loss curves

def generated_text(vocabulary: int, length: int) -> torch.Tensor:
    """A text that can be learnt: each token follows from the two before it, but every eighth."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randint(0, vocabulary, (vocabulary, vocabulary), generator=generator).tolist()
    noise = torch.randint(0, 8 * vocabulary, (length,), generator=generator).tolist()
    text = [0, 1]
    for i in range(2, length):
        text.append(noise[i] // 8 if noise[i] % 8 == 0 else table[text[-2] % 64][text[-1] % 64])
    return torch.tensor(text)


def curves(report: Report) -> None:
    steps, batch, tokens = (200, 32, 256) if GPU else (6, 2, 16)
    config = transformers.LlamaConfig(hidden_size=512, intermediate_size=1408, num_hidden_layers=6,
                                      num_attention_heads=8, num_key_value_heads=4, vocab_size=256)
    text = generated_text(256, 1 << (20 if GPU else 12)).to(DEVICE)
    for label in ("eager", "eager+patch"):
        for seed in (1, 2):
            model = build(transformers.LlamaForCausalLM, config, torch.float32).train()
            torch.manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(std=0.02)
            if "patch" in label:
                fftune.patch(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=GPU)
            losses = []
            for _ in range(steps):
                starts = torch.randint(0, len(text) - tokens, (batch, 1), device=DEVICE)
                ids = text[starts + torch.arange(tokens, device=DEVICE)]
                with torch.autocast(DEVICE, torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss.detach())
            losses = [round(x, 4) for x in torch.stack(losses).float().tolist()]
            report.results.setdefault("losses", {})[f"{label} seed {seed}"] = losses
            report.add("curves", "last 20 steps",
                       {f"{label} seed {seed}": round(statistics.mean(losses[-20:]), 4)})


# programs that people came with

def gpt2_config():
    sizes = {} if GPU else dict(n_embd=32, n_layer=2, n_head=4, vocab_size=96)
    return transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)


def gpt2_forward(report: Report) -> None:
    config = gpt2_config()
    model = build(transformers.GPT2LMHeadModel, config).eval()
    ids = torch.randint(0, config.vocab_size, (256, 16) if GPU else (2, 16), device=DEVICE)
    patched = copy_sharing_weights(model)
    print(fftune.patch(patched), flush=True)
    run = lambda module: lambda: module(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        runs = {"eager": run(model), "eager+patch": run(patched)}
        for label, module in (("compile", model), ("compile+patch", patched)):
            if report.left() < 40:
                break
            torch._dynamo.reset()
            runs[label] = run(torch.compile(module, dynamic=False))
            runs[label]()
        report.add("programs", "gpt2 256x16 forward", interleaved(runs))


def gpt2_train(report: Report) -> None:
    config = gpt2_config()
    ids = torch.randint(0, config.vocab_size, (256, 16) if GPU else (2, 16), device=DEVICE)
    train(report, "programs", "gpt2 256x16 step", lambda: build(transformers.GPT2LMHeadModel, config),
          {"input_ids": ids, "labels": ids},
          ("eager", "eager+patch", "compile", "compile+patch", "eager+patch+recompute"))


def t5_generate(report: Report) -> None:
    sizes = dict(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12)
    if not GPU:
        sizes = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=96)
    config = transformers.T5Config(decoder_start_token_id=0, **sizes)
    model = build(transformers.T5ForConditionalGeneration, config).eval()
    ids = torch.full((256 if GPU else 2, 1), 5, device=DEVICE)
    new_tokens = 20 if GPU else 6

    def generate(module):
        return lambda: module.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                                       do_sample=False, no_repeat_ngram_size=3)

    patched = copy_sharing_weights(model)
    print(fftune.patch(patched), flush=True)
    same = torch.equal(generate(model)(), generate(patched)())
    times = interleaved({"eager": generate(model), "eager+patch": generate(patched)}, rounds=3)
    report.add("programs", f"t5-base 256, {new_tokens} tokens", {**times, "same text": same})


# the table

def number(value) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def table(results: dict) -> None:
    print(f"\n{results['device']}, torch {results['torch']}, transformers "
          f"{results['transformers']}; microseconds")
    header = [*CONTENDERS, "compile/compile+patch", "eager/eager+patch"]
    ratios = {"compile": [], "eager": []}
    for part in ("forward", "train", "programs"):
        for case, values in results.get(part, {}).items():
            print(f"\n{part} {case}")
            if "failed" in values:
                print(f"  failed: {values['failed']}")
            for label in (*CONTENDERS, "eager+patch+recompute"):
                if label in values:
                    memory = values.get(f"{label} GB")
                    print(f"  {label:22} {values[label]:12.1f}"
                          + (f"   {memory} GB" if memory else ""))
            for base in ("compile", "eager"):
                if base in values and f"{base}+patch" in values:
                    ratio = values[base] / values[f"{base}+patch"]
                    print(f"  {base} / {base}+patch {ratio:.3f}")
                    if part == "forward":
                        ratios[base].append(ratio)
    for base, found in ratios.items():
        if found:
            print(f"\nforward, {base} / {base}+patch: geometric mean "
                  f"{statistics.geometric_mean(found):.3f}, least {min(found):.3f}, of {len(found)}")
    for label, loss in results.get("curves", {}).get("last 20 steps", {}).items():
        print(f"loss of the last 20 steps, {label}: {loss}")
    for name, value in results.get("host", {}).get("microseconds an op", {}).items():
        print(f"host {name:16} {number(value)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "build/bench"))
    parser.add_argument("--budget", type=float, default=450)
    parser.add_argument("--parts", default="host,forward,train,programs,curves")
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args()
    report = Report(options.out, options.budget)
    jobs = []
    parts = options.parts.split(",")
    if "host" in parts:
        jobs.append(("host", "ops", lambda: host(report)))
    if "forward" in parts:
        for case in options.cases.split(","):
            jobs.append(("forward", case, lambda case=case: forward(report, case)))
    if "train" in parts:  # before the last cases of the forward pass, which are many
        jobs.insert(min(len(jobs), 5), ("train", "llama-1b 4x2048", lambda: train_llama(report)))
    if "curves" in parts:
        jobs.append(("curves", "small llama", lambda: curves(report)))
    if "programs" in parts:
        for name, job in (("gpt2 forward", gpt2_forward), ("gpt2 step", gpt2_train),
                          ("t5 generate", t5_generate)):
            jobs.insert(min(len(jobs), 6), ("programs", name, lambda job=job: job(report)))
    for part, case, job in jobs:
        if report.left() < 20:
            report.add(part, case, {"failed": "left out: no time is left"})
            continue
        report.attempt(part, case, job)
    table(report.results)


if __name__ == "__main__":
    sys.exit(main())

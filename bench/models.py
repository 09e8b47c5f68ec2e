#!/usr/bin/env python3
"""Whole transformers models, random weights, on one GPU: eager, torch.compile, and both of them
with fftune.patch; Liger-Kernel's patch beside them where it is installed.

usage: models.py [--out DIR] [--budget SECONDS] [--parts host,forward,...] [--cases ...]
                 [--whole-cases ...] [--labels ...] [--side-by-side] [--tiny]
       models.py --plot DIR/models.json FILE.svg

Parts, each in as much of the budget as is left:
  warm      processes side by side fill the caches of compilers for the forward cases
  tune      searches the problems of the forward cases that no preset serves, into DIR/presets
  host      the host's time for an op, without gradients and with them, beside torch.ops.aten.mul
  forward   one pass without the head, a CUDA graph each, replayed round-robin: median of the rounds
  moe       the same of mixtures of experts, 2 layers of Mixtral-8x7B and 4 of Qwen3-30B-A3B
  decode    the same of one token of each sequence over a static cache that is half full
  whole     the same over a full cache, with patch(whole_layers=True) beside it
  prefill   one pass of many new tokens, whole layers of them beside torch.compile
  liger     Liger-Kernel's patch beside eager and fftune's: a forward pass, and a training step
  train     a step of Llama-3.2-1B's sizes at 4 x 2048 tokens: forward, backward, AdamW; peak memory
  programs  a layer of Llama and its MLP by fftune.check; two experts behind a mask
  train-experts  the same of Qwen3-30B-A3B with 4 layers at 2 x 4096 tokens, beside grouped_mm;
            "freed": the optimizer takes each gradient in the backward pass
  t5        T5-base generating without repetition, 20 and 128 tokens
  gpt2      GPT-2 at 256 x 16, forward; gpt2-train: a training step
  curves    losses of 200 steps of a small Llama on generated text, three seeds, with and without

With --side-by-side, each case of whole and prefill has a process of its own: these compile at the
same time, and are timed in turn when all have compiled.

Results go to DIR/models.json after every case, beside what other parts left there; the table comes
last. A case that fails is one line. With --tiny, and on a machine without a GPU, models are tiny:
that is for trying the script out.
"""
import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import fftune
from model_sizes import DENSE, HYBRIDS, MIXTURES, title

START = time.monotonic()
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LIGER = GPU and find_spec("liger_kernel") is not None
FULL = GPU and "--tiny" not in sys.argv

CASES = ["llama-1b 1x1", "llama-1b 4x1024", "llama-8b/4 1x1", "llama-8b/4 4x1024", "llama-1b 16x1",
         "llama-1b 1x512", "llama-8b/4 16x1", "llama-8b/4 1x512", "llama-1b 64x1"]
CONTENDERS = ("eager", "eager+patch", "compile", "compile+patch", "compile+patch+projections",
              "compile+patch+attention", "eager+liger")
MOE_CASES = ["qwen3-30b-a3b/12 16x1", "qwen3-30b-a3b/12 4x1024", "mixtral-8x7b/16 16x1",
             "mixtral-8x7b/16 4x1024"]
WHOLE_CASES = ["llama-1b 1x128", "llama-1b 1x2048", "llama-1b 16x2048", "llama-1b 64x2048",
               "llama-8b/4 1x2048", "qwen3-30b-a3b/12 1x2048", "qwen3-30b-a3b/12 16x2048"]
PREFILL_CASES = ["llama-1b 1x512", "llama-1b 4x1024"]
WHOLE_CONTENDERS = ("eager", "eager+whole", "compile", "compile+whole", "compile+patch",
                    "eager+patch", "compile+patch+projections", "compile+patch+attention")
DECODE_CASES = ["llama-1b 1x8192", "llama-1b 16x4096", "llama-8b/4 16x4096"]  # batch, cache's keys
FEW_TOKENS = 64  # up to which a patched model has projections by fftune anyway


class Report:
    """Results by part and case, written whenever there is a new one."""

    def __init__(self, folder: str, budget: float):
        self.path = Path(folder) / "models.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.deadline = START + budget
        self.results = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.results |= {"torch": torch.__version__, "transformers": transformers.__version__,
                          "fftune": fftune.__version__,
                         "device": torch.cuda.get_device_name() if GPU else "cpu"}

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def add(self, part: str, case: str, values: dict) -> None:
        self.results.setdefault(part, {}).setdefault(case, {}).update(values)
        self.path.write_text(json.dumps(self.results, indent=1) + "\n")
        print(f"[{time.monotonic() - START:5.0f} s] {part} {case}: {values}", flush=True)

    @contextmanager
    def without(self, label: str, part: str, case: str):
        """Goes on without a contender that fails."""
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self.add(part, case, {f"{label} failed": f"{type(error).__name__}: {lines[0][:300]}"})
            traceback.print_exc(limit=-3)

    def attempt(self, part: str, case: str, run) -> None:
        with self.without("all", part, case):
            run()
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
        torch._dynamo.reset()


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def dense(name: str) -> transformers.PretrainedConfig:
    model = DENSE[name]
    if not FULL:
        model = replace(model, hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2,
                        vocabulary=128)
    return getattr(transformers, f"{model.prefix}Config")(
        hidden_size=model.hidden, intermediate_size=model.intermediate,
        num_hidden_layers=model.layers, num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads, vocab_size=model.vocabulary,
        max_position_embeddings=8192, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=2)


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
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()

    def replay():
        graph.replay()
    replay.run = run  # the graph reads and writes tensors that live as long as it, such as a cache
    return replay


# host

def host(report: Report) -> None:
    x, w = torch.randn(1, 64, device=DEVICE), torch.rand(64, device=DEVICE)
    q = torch.randn(1, 1, 4, 16, device=DEVICE)
    weights = [torch.randn(64, 64, device=DEVICE) for _ in range(3)]
    ids, logits = torch.randint(0, 9, (1, 16), device=DEVICE), torch.randn(1, 64, device=DEVICE)
    mask = torch.ones(1, dtype=torch.bool, device=DEVICE)
    experts = [torch.randn(4, 64, 64, device=DEVICE) for _ in range(3)]
    choice = torch.tensor([[1, 2]], dtype=torch.int32, device=DEVICE)
    share = torch.rand(1, 2, device=DEVICE)
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
        "attention": lambda: ops.attention(q, q, q),
        "qkv": lambda: ops.qkv(x, tuple(weights), 4),
        "moe_route": lambda: ops.moe_route(x, 2),
        "moe_ffn": lambda: ops.moe_ffn(x, choice, share, *experts),
    }
    report.add("host", "microseconds an op", host_times(calls, torch.no_grad()))
    own = [t.detach().clone().requires_grad_() for t in (x, w, weights[0])]
    linear = torch.nn.functional.linear
    calls = {
        "aten.mul": lambda: mul(own[0], own[0]),
        "aten.rms_norm": lambda: torch.rms_norm(own[0], (64,), own[1], 1e-6),
        "aten.linear": lambda: linear(own[0], own[2]),
        "rmsnorm, none wanted": lambda: ops.rmsnorm(x, w),
        "rmsnorm": lambda: ops.rmsnorm(*own[:2]),
        "bias_gelu": lambda: ops.bias_gelu(*own[:2]),
        "linear": lambda: ops.linear(own[0], own[2]),
    }
    report.add("host", "microseconds an op, with gradients",
               host_times(calls, nullcontext()))


def host_times(calls: dict, context, rounds: int = 30) -> dict:
    """The least of rounds in which every call has its turn: what a shared machine delays is left
    out, and a slow minute is no call's alone."""
    found = {}
    with context:
        for round_ in range(rounds):
            for name, call in calls.items():
                if isinstance(found.get(name), str):
                    continue
                try:
                    if round_ == 0:
                        for _ in range(50):
                            call()
                    synchronize()
                    start = time.perf_counter()
                    for _ in range(100):  # fewer launches than their queue holds
                        call()
                    time_of_one = (time.perf_counter() - start) / 100 * 1e6
                    found[name] = min(found.get(name, time_of_one), time_of_one)
                except Exception as error:
                    found[name] = f"failed: {error}"
    synchronize()
    return {name: round(value, 2) if isinstance(value, float) else value
            for name, value in found.items()}


# forward

def labels_of(case: str) -> list[str]:
    batch, tokens = map(int, case.rsplit(" ", 1)[1].split("x"))
    if case in MOE_CASES:
        return ["eager", "eager+patch", "compile", "compile+patch"]
    return [label for label in CONTENDERS
            if ("projections" not in label or batch * tokens > FEW_TOKENS)
            and ("attention" not in label or tokens > 1)
            and ("liger" not in label or LIGER and DENSE[case.split(" ")[0]].prefix == "Llama")]


@contextmanager
def liger(model):
    """Liger-Kernel's patch of a Llama, which changes transformers' module too, for a while."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    kept = dict(vars(modeling_llama))
    forward = modeling_llama.LlamaForCausalLM.forward
    # Its loss is that of a model with a head.
    apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=hasattr(model, "lm_head"))
    try:
        yield
    finally:
        vars(modeling_llama).update(kept)
        modeling_llama.LlamaForCausalLM.forward = forward


def model_and_ids(case: str):
    name, shape = case.rsplit(" ", 1)
    batch, tokens = map(int, shape.split("x"))
    if not FULL:
        tokens = min(tokens, 16)
    model = model_of(name)
    return model, torch.randint(0, model.config.vocab_size, (batch, tokens), device=DEVICE)


def model_of(name: str):
    """Without a head."""
    if name in MIXTURES:
        return mixture(name).eval()
    if name in HYBRIDS:
        return hybrid(name).eval()
    return build(getattr(transformers, f"{DENSE[name].prefix}Model"), dense(name)).eval()


def mixture(name: str):
    model = MIXTURES[name]
    if not FULL:
        model = replace(model, hidden=64, intermediate=48, experts=6, chosen=2, layers=2, heads=1)
    common = dict(hidden_size=model.hidden, num_hidden_layers=model.layers,
                  num_attention_heads=model.heads,
                  num_key_value_heads=1 if not FULL else 8 if "mixtral" in name else 4,
                  vocab_size=32000 if FULL else 96, num_experts_per_tok=model.chosen)
    if "mixtral" in name:
        return build(transformers.MixtralModel, transformers.MixtralConfig(
            **common, intermediate_size=model.intermediate, num_local_experts=model.experts,
            sliding_window=None))
    return build(transformers.Qwen3MoeModel, transformers.Qwen3MoeConfig(
        **common, intermediate_size=model.intermediate,
        moe_intermediate_size=model.intermediate, num_experts=model.experts, head_dim=128 if FULL else 64, norm_topk_prob=True))


def hybrid(name: str):
    """Tiny ones have narrow MLPs and few experts: heads and features have to fit each other."""
    model = HYBRIDS[name]
    few = {key: value for key, value in dict(intermediate_size=48, moe_intermediate_size=48, num_experts=16,
                                             n_routed_experts=16, num_local_experts=16).items() if key in model.settings}
    settings = model.settings if FULL else model.settings | few
    config = getattr(transformers, f"{model.prefix}{model.suffix}Config")(
        **settings, num_hidden_layers=model.layers, vocab_size=32000 if FULL else 96, pad_token_id=0, bos_token_id=1,
        eos_token_id=2)
    return build(getattr(transformers, f"{model.prefix}{model.suffix}Model"), config)


def variant(model, label: str):
    """The model as the label says, but not compiled; with the same weights."""
    if label in ("eager", "compile"):
        return model
    patched = copy_sharing_weights(model)
    if "liger" in label:
        return patched
    report = fftune.patch(patched, projections="projections" in label or "auto",
                          attention="attention" in label, whole_layers="whole" in label)
    if label in ("eager+patch", "eager+whole"):
        print(report, flush=True)
    return patched


def pass_of(module, ids):
    return lambda: module(input_ids=ids, use_cache=False).last_hidden_state


def forward(report: Report, case: str, part: str = "forward", labels=None) -> None:
    model, ids = model_and_ids(case)
    runs, compiling = {}, time.monotonic()
    with torch.no_grad():
        right = model(input_ids=ids, use_cache=False).last_hidden_state.double()
        for label in labels or labels_of(case):
            if "compile" in label and report.left() < 30:
                report.add(part, case, {"left out": f"{label}: no time is left"})
                break
            with report.without(label, part, case):
                module = variant(model, label)
                if "compile" in label:
                    torch._dynamo.reset()
                    module = torch.compile(module, dynamic=False)
                run = pass_of(module, ids)
                with liger(module) if "liger" in label else nullcontext():
                    difference = (run().double() - right).norm() / right.norm()
                    report.add(part, case,
                               {f"{label} difference": round(difference.item(), 5)})
                    runs[label] = graph_of(run)
            if label == "eager+patch":
                compiling = time.monotonic()
        seconds = round(time.monotonic() - compiling, 1)
        report.add(part, case, {**interleaved(runs), "seconds of compiling": seconds})


def decode(report: Report, case: str, part: str = "decode", labels=(
        "eager", "eager+patch", "eager+patch+attention", "compile", "compile+patch",
        "compile+patch+attention"), turn=lambda: None) -> None:
    """A step over a cache of its own, which is half full, or in the part "whole" full. `turn` comes
    back when it may be timed."""
    name, shape = case.rsplit(" ", 1)
    batch, keys = map(int, shape.split("x"))
    keys = keys if FULL else 128
    model = model_of(name)
    ids = torch.randint(0, model.config.vocab_size, (batch, 1), device=DEVICE)
    runs, outputs = {}, {}

    def step_of(module, run):
        cache = transformers.StaticCache(config=module.config, max_cache_len=keys)
        module(input_ids=ids, past_key_values=cache)  # makes it, in the layout that it wants
        generator = torch.Generator(DEVICE).manual_seed(1)
        with_keys = [layer for layer in cache.layers if hasattr(layer, "cumulative_length")]
        for layer in with_keys:
            for tensor in (layer.keys, layer.values):
                tensor.copy_(torch.randn(tensor.shape, generator=generator, device=DEVICE))
            layer.cumulative_length.fill_(keys - 1 if part == "whole" else keys // 2)
        lengths = [layer.cumulative_length for layer in with_keys]
        windows = [layer for layer in with_keys if hasattr(layer, "cumulative_length_int")]  # on the host too
        counts = [int(layer.cumulative_length) for layer in windows]

        def step():
            for layer, count in zip(windows, counts):
                layer.cumulative_length_int = count
            result = run(input_ids=ids, past_key_values=cache).last_hidden_state
            torch._foreach_add_(lengths, -1)  # the next step is the same one
            return result
        return step

    with torch.no_grad():
        for label in labels:
            if "compile" in label and report.left() < 30:
                report.add(part, case, {"left out": f"{label}: no time is left"})
                break
            with report.without(label, part, case):
                module = variant(model, label)
                run = module
                if "compile" in label:
                    torch._dynamo.reset()
                    run = torch.compile(module, dynamic=False, fullgraph="whole" in label)
                step = step_of(module, run)
                outputs[label] = step().double()
                difference = (outputs[label] - outputs["eager"]).norm() / outputs["eager"].norm()
                report.add(part, case, {f"{label} difference": round(difference.item(), 5)})
                runs[label] = graph_of(step)
                if label == "eager+whole":
                    whole_step = step
        turn()
        report.add(part, case, interleaved(runs, rounds=7, round_seconds=0.01))
        if "eager+whole" in runs:
            report.add(part, case,
                       host_times({"eager+whole host": whole_step}, torch.no_grad(), 5))


def prefill(report: Report, case: str, turn=lambda: None) -> None:
    """New tokens of sequences without a past: whole layers into a static cache, beside a pass that
    keeps no keys. Only here calls of that many tokens have whole layers."""
    from fftune.patching import layers

    model, ids = model_and_ids(case)
    layers.MOST_TOKENS = ids.numel()
    runs = {}

    def step_of(module):
        cache = transformers.StaticCache(config=module.config, max_cache_len=ids.shape[1])
        module(input_ids=ids, past_key_values=cache)
        lengths = [layer.cumulative_length for layer in cache.layers]

        def step():
            for length in lengths:
                length.zero_()
            return module(input_ids=ids, past_key_values=cache).last_hidden_state
        return step

    with torch.no_grad():
        right = pass_of(model, ids)().double()
        for label in ("eager+whole", "compile", "compile+patch"):
            with report.without(label, "prefill", case):
                module = variant(model, label)
                if "compile" in label:
                    torch._dynamo.reset()
                    module = torch.compile(module, dynamic=False)
                run = step_of(module) if "whole" in label else pass_of(module, ids)
                difference = (run().double() - right).norm() / right.norm()
                report.add("prefill", case, {f"{label} difference": round(difference.item(), 5)})
                runs[label] = graph_of(run)
        turn()
        report.add("prefill", case, interleaved(runs))


def side_by_side(report: Report, cases: list[tuple[str, str]], wanted: list[str] | None) -> None:
    """A process for each part and case."""
    folder = report.path.parent / "side"
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    running = []
    for i, (part, case) in enumerate(cases):
        own = folder / str(i)
        own.mkdir(parents=True, exist_ok=True)
        for name in ("ready", "turn", "models.json"):
            (own / name).unlink(missing_ok=True)
        command = [sys.executable, __file__, "--out", str(own), "--budget", str(report.left()),
                   "--one", f"{part}|{case}"] + ([] if FULL else ["--tiny"]) \
            + ([] if wanted is None else ["--labels", ",".join(wanted)])
        with open(own / "log", "w") as log:
            running.append((own, subprocess.Popen(command, env=environment, stdout=log,
                                                  stderr=subprocess.STDOUT)))
    longest = report.left() - 2 * len(cases)  # what timing takes
    end = time.monotonic() + longest

    def is_compiling(own, process):
        return process.poll() is None and not (own / "ready").exists()

    while time.monotonic() < end and any(is_compiling(*each) for each in running):
        time.sleep(0.1)
    for own, process in running:
        if is_compiling(own, process):
            process.kill()
    for (own, process), (part, case) in zip(running, cases):
        (own / "turn").touch()
        process.wait()
        path = own / "models.json"
        values = json.loads(path.read_text()).get(part, {}) if path.exists() else {}
        report.add(part, case, values.get(case, {"all failed": f"see {own}/log"}))


def one_of_several(report: Report, part: str, case: str, wanted: list[str] | None) -> None:
    def turn():
        synchronize()
        (report.path.parent / "ready").touch()
        while not (report.path.parent / "turn").exists():
            time.sleep(0.02)

    run_whole(report, part, case, wanted, turn)


def run_whole(report: Report, part: str, case: str, wanted: list[str] | None,
              turn=lambda: None) -> None:
    if part == "prefill":
        return prefill(report, case, turn)
    labels = WHOLE_CONTENDERS[:4] if case.split(" ")[0] in MIXTURES else WHOLE_CONTENDERS[:6] \
        if case.split(" ")[0] in HYBRIDS else WHOLE_CONTENDERS
    decode(report, case, part, [label for label in labels if wanted is None or label in wanted],
           turn)


def beside_liger(report: Report) -> None:
    if not LIGER:
        report.add("liger", "all", {"left out": "liger_kernel is not installed"})
        return
    labels = ("eager", "eager+liger", "eager+patch")
    forward(report, "llama-1b 4x1024", "liger", labels)
    train_llama(report, "liger", labels)


def warm(report: Report, cases: list[str]) -> None:
    """Compilers use few cores: a process each, which compiles and runs nothing that was compiled,
    so that nothing is tuned while they are in each other's way."""
    began = time.monotonic()
    waiting = [(case, label) for case in cases for label in labels_of(case) if "compile" in label]
    running: list[subprocess.Popen] = []
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    failed = 0
    while waiting or running:
        while waiting and len(running) < max(1, (os.cpu_count() or 2) * 3 // 4):
            command = [sys.executable, __file__, "--warm-one", "|".join(waiting.pop(0))]
            running.append(subprocess.Popen(command + ([] if FULL else ["--tiny"]),
                                            env=environment, stdout=subprocess.DEVNULL,
                                            stderr=subprocess.PIPE, text=True))
        time.sleep(0.2)
        for process in [p for p in running if p.poll() is not None]:
            running.remove(process)
            errors = process.stderr.read()
            if process.returncode:
                failed += 1
                print(f"warm: {errors[-600:]}", flush=True)
        if time.monotonic() - began > 150 or report.left() < 30:
            for process in running:
                process.kill()
                process.wait()
            break
    report.add("warm", "all", {"seconds": round(time.monotonic() - began, 1), "failed": failed})


def warm_one(case: str, label: str) -> None:
    from torch._inductor.compile_fx import compile_fx

    def compile_only(graph, example):
        compile_fx(graph, example)
        return graph.forward

    model, ids = model_and_ids(case)
    with torch.no_grad():
        pass_of(torch.compile(variant(model, label), dynamic=False, backend=compile_only), ids)()


def tune(report: Report, cases: list[str], seconds: float) -> None:
    folder = report.path.parent / "presets"
    for i, case in enumerate(cases):
        model, ids = model_and_ids(case)
        model.layers = model.layers[:1]
        fftune.patch(model, projections="auto")
        left = min(seconds - (time.monotonic() - START), report.left() - 30)
        found = fftune.tune(model, {"input_ids": ids, "use_cache": False}, presets=folder,
                            budget=left / (len(cases) - i))
        report.add("tune", case, {"searched": found.searched, "failed": found.failed})


# training

def step_in_backward(model) -> None:
    """The optimizer takes each gradient as soon as the backward pass has it, and frees it."""
    optimizers = {p: torch.optim.AdamW([p], lr=1e-5, fused=GPU) for p in model.parameters()}

    def take(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad(set_to_none=True)

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(take)


def steps_of(model, batch, graphed=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=GPU)
    graph = fftune.graphed(model) if graphed else None

    def step():
        if graphed:
            loss = graph(**batch, use_cache=False)
        else:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss
    return step


def training_step(model, label: str, batch: dict):
    """The step of a model as the label says. Its user enters liger() for Liger's label."""
    model.train()
    if "patch" in label:
        memory = next((mode for mode in ("balanced", "small") if mode in label), "fast")
        fftune.patch(model, recompute="recompute" in label, memory=memory,
                     attention="attention" in label)
    elif hasattr(model.config, "num_experts"):
        model.set_experts_implementation("grouped_mm")
    if "graphs" in label:  # Inductor's CUDA graphs of the forward and the backward pass
        module = torch.compile(model, dynamic=False, mode="reduce-overhead")
    else:
        module = torch.compile(model, dynamic=False) if "compile" in label else model
    if "freed" in label:
        step_in_backward(model)  # the other optimizer then finds no gradients
    return steps_of(module, batch, "graphed" in label)


def times_of_training(model, label: str, batch: dict) -> dict:
    step = training_step(model, label, batch)
    with liger(model) if "liger" in label else nullcontext():
        step()
        step()
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        times = [microseconds(step, 1) for _ in range(7)]
    values = {label: round(statistics.median(times), 1)}
    if GPU:
        values[f"{label} GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    return values


def train(report: Report, part: str, case: str, make, batch: dict, labels) -> None:
    for label in labels:
        if report.left() < 40:
            report.add(part, case, {"left out": f"{label}: no time is left"})
            return
        with report.without(label, part, case):
            report.add(part, case, times_of_training(make(), label, batch))
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
        torch._dynamo.reset()


def train_llama(report: Report, part: str = "train", labels=None) -> None:
    config = dense("llama-1b")
    shape = (4, 2048) if FULL else (2, 8)
    ids = torch.randint(0, config.vocab_size, shape, device=DEVICE)
    train(report, part, "llama-1b 4x2048", lambda: build(transformers.LlamaForCausalLM, config),
          {"input_ids": ids, "labels": ids},
          labels or ("eager", "eager+patch", "compile", "compile+patch", "eager+patch+balanced",
                     "eager+patch+small", "eager+patch+recompute", "compile+patch+attention"))


def train_experts(report: Report, labels=None) -> None:
    """Qwen3-30B-A3B with 4 of its 48 layers; without patch its experts run by torch._grouped_mm."""
    sizes = dict(hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
                 moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, vocab_size=151936)
    if not FULL:
        sizes = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
                     moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2, vocab_size=96)
    config = transformers.Qwen3MoeConfig(num_hidden_layers=4, norm_topk_prob=True, **sizes)
    ids = torch.randint(0, config.vocab_size, (2, 4096) if FULL else (2, 8), device=DEVICE)
    train(report, "train", "qwen3-30b-a3b, 4 layers 2x4096",
          lambda: build(transformers.Qwen3MoeForCausalLM, config), {"input_ids": ids, "labels": ids},
          labels or ("eager", "compile", "eager+patch", "eager+patch+small", "compile+patch",
                     "compile+freed", "eager+patch+freed", "eager+patch+small+freed"))


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
    steps, batch, tokens = (200, 32, 256) if FULL else (6, 2, 16)
    config = transformers.LlamaConfig(hidden_size=512, intermediate_size=1408, num_hidden_layers=6,
                                      num_attention_heads=8, num_key_value_heads=4, vocab_size=256)
    text = generated_text(256, 1 << (20 if FULL else 12)).to(DEVICE)
    for label in ("eager", "eager+patch"):
        for seed in (1, 2, 3):
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
    sizes = {} if FULL else dict(n_embd=32, n_layer=2, n_head=4, vocab_size=96)
    return transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)


def gpt2_forward(report: Report) -> None:
    config = gpt2_config()
    model = build(transformers.GPT2LMHeadModel, config).eval()
    ids = torch.randint(0, config.vocab_size, (256, 16) if FULL else (2, 16), device=DEVICE)
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


def gpt2_train(report: Report, labels=None) -> None:
    config = gpt2_config()
    ids = torch.randint(0, config.vocab_size, (256, 16) if FULL else (2, 16), device=DEVICE)
    train(report, "programs", "gpt2 256x16 step", lambda: build(transformers.GPT2LMHeadModel, config),
          {"input_ids": ids, "labels": ids},
          labels or ("eager", "eager+patch", "eager+graphed", "eager+patch+graphed", "compile",
                     "compile+patch", "compile+graphs", "compile+patch+graphs",
                     "eager+patch+recompute"))


def t5_generate(report: Report) -> None:
    sizes = dict(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12)
    if not FULL:
        sizes = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=96)
    config = transformers.T5Config(decoder_start_token_id=0, **sizes)
    model = build(transformers.T5ForConditionalGeneration, config).eval()
    ids = torch.full((256 if FULL else 2, 1), 5, device=DEVICE)
    models = {"eager": model}
    for label in ("eager+patch", "eager+patch+graphs"):
        models[label] = copy_sharing_weights(model)
        print(fftune.patch(models[label], graphs="graphs" in label), flush=True)
    for new_tokens in (20, 128) if FULL else (6,):
        def generate(label):
            return models[label].generate(ids, max_new_tokens=new_tokens, do_sample=False,
                                          min_new_tokens=new_tokens, no_repeat_ngram_size=3)

        case = f"t5-base 256, {new_tokens} tokens"
        right = generate("eager")
        runs = {"eager": lambda: generate("eager")}
        for label in list(models)[1:]:
            with report.without(label, "programs", case):
                # In bf16 two tokens may be as good as each other: then texts differ from there on.
                same = (generate(label) == right).float().mean().item()
                report.add("programs", case, {f"{label}, tokens alike": round(same, 4)})
                runs[label] = lambda label=label: generate(label)
        report.add("programs", case, interleaved(runs, rounds=3))


def llama_layer(report: Report) -> None:
    """Hidden 1024, intermediate 11008, 2 x 1024 tokens: the layer, and its MLP alone."""
    hidden, middle, tokens = (1024, 11008, 1024) if FULL else (64, 96, 8)
    config = transformers.LlamaConfig(hidden_size=hidden, intermediate_size=middle, vocab_size=64,
                                      num_hidden_layers=1, num_attention_heads=16 if FULL else 4)
    model = build(transformers.LlamaModel, config).eval()
    x = torch.randn(2, tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
    for name, module, example in (("mlp", model.layers[0].mlp, x),
                                  ("model of one layer", model,
                                   {"inputs_embeds": x, "use_cache": False})):
        found = fftune.check(module, example)
        report.add("programs", f"llama layer 1024, 11008, 2x1024: {name}",
                   {"eager+patch": round(found.microseconds, 1),
                    "eager": round(found.eager_microseconds, 1), "error": found.error,
                    "eager error": found.eager_error, "good": found.good})


def two_experts(report: Report) -> None:
    """MaskedFFN beside both dense experts and a selection, forward and backward."""
    for rows in (1, 8):
        d, h, tokens = (1024, 2816, 4096) if FULL else (32, 48, 16)
        random = lambda *s: torch.randn(*s, device=DEVICE, dtype=torch.bfloat16)
        x = random(rows, tokens, d).requires_grad_()
        seed = random(rows, tokens, d)
        mask = torch.rand(rows, tokens, device=DEVICE) < 0.33
        weights = [random(*s).mul_(s[1] ** -0.5).requires_grad_()
                   for s in ((h, d), (d, h), (h, d)) * 2]

        def dense(x):
            silu, linear = torch.nn.functional.silu, torch.nn.functional.linear
            each = [linear(silu(linear(x, w1)) * linear(x, w3), w2)
                    for w1, w2, w3 in (weights[:3], weights[3:])]
            return torch.where(mask[..., None], *each)

        def fused(x):
            return fftune.MaskedFFN.apply(x, *(w.T for w in weights), mask)

        def step(function):
            return lambda: torch.autograd.grad(function(x), (x, *weights), seed)

        compiled = torch.compile(dense, dynamic=False)
        contenders = {"eager": dense, "compile": compiled, "eager+patch": fused}
        with torch.no_grad():
            right, got = dense(x).double(), fused(x).double()
            times = interleaved({name: lambda f=f: f(x) for name, f in contenders.items()})
            times["difference"] = round(((got - right).norm() / right.norm()).item(), 5)
        report.add("programs", f"two experts {rows}x{tokens} forward", times)
        report.add("programs", f"two experts {rows}x{tokens} step",
                   interleaved({name: step(f) for name, f in contenders.items()}))


# the table

def number(value) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def table(results: dict) -> None:
    print(f"\n{results['device']}, torch {results['torch']}, transformers "
          f"{results['transformers']}; microseconds")
    ratios = {"compile": [], "eager": []}
    for part in ("forward", "moe", "decode", "whole", "prefill", "liger", "train", "programs"):
        for case, values in results.get(part, {}).items():
            name = case.split(" ")[0]
            called = f", {title(name)}" if name in DENSE or name in MIXTURES else ""
            print(f"\n{part} {case}{called}")
            for label, reason in values.items():
                if label.endswith("failed"):
                    print(f"  {label}: {reason}")
            for label in (*CONTENDERS, "eager+whole", "compile+whole", "eager+patch+attention",
                          "eager+patch+graphs",
                          "compile+graphs", "compile+patch+graphs", "eager+patch+recompute"):
                if label in values:
                    memory = values.get(f"{label} GB")
                    print(f"  {label:22} {values[label]:12.1f}"
                          + (f"   {memory} GB" if memory else ""))
            for base, other in (("compile", "compile+patch"), ("eager", "eager+patch"),
                                ("compile", "compile+patch+projections"),
                                ("compile", "compile+patch+attention"),
                                ("compile", "compile+whole"), ("compile", "eager+whole"),
                                ("eager", "eager+patch+graphs"),
                                ("compile+graphs", "compile+patch+graphs"),
                                ("eager+liger", "eager+patch")):
                if base in values and other in values:
                    ratio = values[base] / values[other]
                    print(f"  {base} / {other} {ratio:.3f}")
                    if part == "forward" and base in ratios and other.endswith("patch"):
                        ratios[base].append(ratio)
    for base, found in ratios.items():
        if found:
            print(f"\nforward, {base} / {base}+patch: geometric mean "
                  f"{statistics.geometric_mean(found):.3f}, least {min(found):.3f}, of {len(found)}")
    for label, loss in results.get("curves", {}).get("last 20 steps", {}).items():
        print(f"loss of the last 20 steps, {label}: {loss}")
    for case, times in results.get("host", {}).items():
        print(f"\nhost, {case}")
        for name, value in times.items():
            print(f"  {name:22} {number(value)}")


def plot(results: dict, path: Path) -> None:
    """The losses of "curves" as an SVG."""
    colours = {"eager seed 1": "#444", "eager seed 2": "#aaa", "eager+patch seed 1": "#c33",
               "eager+patch seed 2": "#e99", "eager seed 3": "#777", "eager+patch seed 3": "#d66"}
    width, height, left, low = 720, 400, 60, 350
    losses = results["losses"]
    top = max(map(max, losses.values()))
    steps = max(map(len, losses.values()))
    x = lambda i: left + (width - left - 20) * i / (steps - 1)
    y = lambda loss: low - (low - 20) * loss / top
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
             'font-family="sans-serif" font-size="13">',
             f'<rect width="{width}" height="{height}" fill="white"/>']
    for tick in range(int(top) + 1):
        lines.append(f'<path d="M{left} {y(tick):.1f}H{width - 20}" stroke="#ddd"/>'
                     f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    lines.append(f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">loss by step, '
                 f'{steps} steps</text>')
    for i, (label, values) in enumerate(losses.items()):
        points = " ".join(f"{x(j):.1f},{y(v):.1f}" for j, v in enumerate(values))
        colour = colours.get(label, "#36c")
        dash = ' stroke-dasharray="5 3"' if "patch" in label else ""
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" '
                     f'stroke-width="1.3"{dash}/>')
        lines.append(f'<text x="{width - 200}" y="{40 + 18 * i}" fill="{colour}">{label}</text>')
    path.write_text("\n".join(lines + ["</svg>"]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "build/bench"))
    parser.add_argument("--budget", type=float, default=450)
    parser.add_argument("--tune-budget", type=float, default=90, help="of it, for the part tune")
    parser.add_argument("--parts",
                        default="host,warm,forward,moe,decode,train,train-experts,programs,t5,gpt2,"
                        "gpt2-train,curves")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--whole-cases", default=",".join(WHOLE_CASES), help="of the part whole")
    parser.add_argument("--prefill-cases", default=",".join(PREFILL_CASES))
    parser.add_argument("--labels", help="these contenders of whole, train, train-experts, gpt2-train")
    parser.add_argument("--side-by-side", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--plot", nargs=2, metavar=("JSON", "SVG"))
    parser.add_argument("--warm-one", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plot:
        return plot(json.loads(Path(options.plot[0]).read_text()), Path(options.plot[1]))
    if options.warm_one:
        return warm_one(*options.warm_one.split("|"))
    report = Report(options.out, options.budget)
    chosen = options.labels.split(",") if options.labels else None
    wanted = ["eager", *chosen] if chosen else None
    if options.one:
        part, case = options.one.split("|")
        return report.attempt(part, case, lambda: one_of_several(report, part, case, wanted))
    parts, cases = options.parts.split(","), options.cases.split(",")
    jobs = []
    if "host" in parts:
        jobs.append(("host", "ops", lambda: host(report)))
    if "tune" in parts:
        jobs.append(("tune", "all", lambda: tune(report, cases, options.tune_budget)))
    if "warm" in parts:
        jobs.append(("warm", "all", lambda: warm(report, cases)))
    if "forward" in parts:
        for case in cases:
            jobs.append(("forward", case, lambda case=case: forward(report, case)))
    if "moe" in parts:
        for case in MOE_CASES:
            jobs.append(("moe", case, lambda case=case: forward(report, case, "moe")))
    if "decode" in parts:
        for case in DECODE_CASES:
            jobs.append(("decode", case, lambda case=case: decode(report, case)))
    whole = [(part, case) for part, of_part in (("whole", options.whole_cases),
                                                ("prefill", options.prefill_cases))
             if part in parts for case in of_part.split(",")]
    if whole and options.side_by_side:
        jobs.append(("whole", "all", lambda: side_by_side(report, whole, wanted)))
    else:
        for part, case in whole:
            jobs.append((part, case, lambda part=part, case=case: run_whole(
                report, part, case, wanted)))
    if "liger" in parts:
        jobs.append(("liger", "llama-1b", lambda: beside_liger(report)))
    if "train" in parts:
        jobs.append(("train", "llama-1b 4x2048", lambda: train_llama(report, labels=chosen)))
    if "train-experts" in parts:
        jobs.append(("train", "qwen3-30b-a3b", lambda: train_experts(report, chosen)))
    for part, programs in (("programs", (("llama layer", llama_layer), ("two experts", two_experts))),
                           ("t5", (("t5 generate", t5_generate),)),
                           ("gpt2", (("gpt2 forward", gpt2_forward),)),
                           ("gpt2-train", (("gpt2 step", lambda r: gpt2_train(r, chosen)),))):
        if part in parts:
            for name, job in programs:
                jobs.append(("programs", name, lambda job=job: job(report)))
    if "curves" in parts:
        jobs.append(("curves", "small llama", lambda: curves(report)))
    for part, case, job in jobs:
        if report.left() < 20:
            report.add(part, case, {"all failed": "left out: no time is left"})
            continue
        report.attempt(part, case, job)
    table(report.results)


if __name__ == "__main__":
    sys.exit(main())

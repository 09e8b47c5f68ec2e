#!/usr/bin/env python3
"""Whole models in vLLM without fftune's plugin and with it: one engine at a time, as users run it.

usage: vllm_beside.py --out FILE.json [--models llama-3.2-1b,...] [--batch 1,16,64]
                      [--context 2048] [--parts PARTS] [--alternations 2] [--check] [--serve REQUESTS]
                      [--kernels] [--invariant] [--drafts K] [--tp 2] [--set NAME=JSON ...]
                      [--only vllm|fftune]

vLLM and fftune have to be installed, fftune with its entry point. Models have random weights and no
tokenizer: nothing is downloaded. A model may have fewer layers: llama-3.1-8b:16 has 16. An engine has
the GPU to itself, with vLLM's defaults for memory, numbers of sequences, CUDA graphs and prefix caching;
--set gives it another argument. Engines without the plugin and with it alternate, each with a cache of
compiled code of its own. --parts gives FFTUNE_VLLM another value than its default.

decode   all requests have one new token a step. The time "gpu" is that of a replay of the step's captured
         graph, without the head and the sampling. The time "wall" is what a caller waits for one step,
         and "launch" the host's for one replay
prefill  the wall time of one new token for 1 x 512 and 4 x 1024 tokens
serve    --serve N: the time of N requests of 1,024 tokens in and 128 out, 64 at a time, instead of
         decoding. A quarter of them run before, and kernels are compiled. `steps` has for each engine
         the steps with prompts and those of pure decoding: their number and tokens, and milliseconds of
         the host in the model, of the GPU in the model, and of whole steps
kernels  --kernels: the kernels of each captured step, and of one prefill of 8 x 1024 tokens, under
         torch.profiler: milliseconds, launches and names, the longest first
check    --check: greedy tokens of requests that come and go, some of them aborted, with chunked
         prefill, prefix caching, and a cache that is too small for all. Tokens of both engines are
         compared up to a request's first difference. That difference is fine if the two best logits
         of vLLM lie within twice the largest deviation of log-probabilities before it. Batches run by
         fftune where they are slower, too. Both engines start at once, with small caches. Tiny models
         (tiny-llama, tiny-mistral, tiny-qwen2, tiny-qwen3, tiny-qwen3-moe, tiny-qwen3-next, tiny-gpt-oss,
         tiny-gpt-oss-bf16, tiny-gemma2, tiny-gemma3, and those with quantised weights, such as
         tiny-llama-fp8) are for this

With --drafts K vLLM verifies K drafts of each sequence, found by n-grams.

With --invariant there are four engines: without the plugin and with it, each as usual and with
VLLM_BATCH_INVARIANT=1. Each of the first three is compared with the last, which has both. It runs 24
requests one by one and all at once, and counts those that get other tokens or log-probabilities.

With --tp 2 an engine has two GPUs by tensor parallelism; there are only wall times then.

--only starts the engines without the plugin alone, or those with it: their times are printed, and no
ratios.

A start takes one to two minutes. A time is the median of all rounds of all starts; a ratio above 1 means
that fftune is faster. Each row says which parts ran by fftune (`by`); a model that runs by vLLM alone is
a failure. Each engine's log lies beside FILE.json.
"""
import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", rms_norm_eps=1e-5,
             rope_theta=5e5, max_position_embeddings=131072)
MISTRAL = dict(LLAMA, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None)
QWEN2 = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", rms_norm_eps=1e-6, rope_theta=1e6,
             max_position_embeddings=32768)
QWEN3 = dict(QWEN2, architectures=["Qwen3ForCausalLM"], model_type="qwen3")
QWEN3_MOE = dict(QWEN3, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe",
                 norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], num_experts=128,
                 num_experts_per_tok=8, moe_intermediate_size=768)


def sized(base, hidden, intermediate, layers, heads, kv_heads, dim, vocabulary, **more):
    return dict(base, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim,
                vocab_size=vocabulary, hidden_act="silu", dtype="bfloat16", bos_token_id=1,
                eos_token_id=2, tie_word_embeddings=False, **more)


def tiny(base, **more):
    return sized(base, 512, 1024, 3, 8, 2, 64, 4096, **more)


MODELS = {
    "llama-3.2-1b": sized(LLAMA, 2048, 8192, 16, 32, 8, 64, 128256),
    "llama-3.1-8b": sized(LLAMA, 4096, 14336, 32, 32, 8, 128, 128256),
    "qwen2.5-7b": sized(QWEN2, 3584, 18944, 28, 28, 4, 128, 152064),
    "qwen3-8b": sized(QWEN3, 4096, 12288, 36, 32, 8, 128, 151936),
    "qwen3-30b-a3b-12-layers": sized(QWEN3_MOE, 2048, 6144, 12, 32, 4, 128, 151936),
    "tiny-llama": tiny(LLAMA), "tiny-mistral": tiny(MISTRAL), "tiny-qwen2": tiny(QWEN2),
    "tiny-qwen3": tiny(QWEN3),
    "tiny-qwen3-moe": dict(tiny(QWEN3_MOE), num_experts=16, num_experts_per_tok=4,
                           moe_intermediate_size=256)}
# Without names vLLM looks for them in files of weights, which there are none of.
GPTQ = dict(quant_method="gptq", bits=4, group_size=128, desc_act=False, sym=True, checkpoint_format="gptq",
            modules_in_block_to_quantize=["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                          "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
                                          "mlp.down_proj"])
FP8 = dict(quant_method="fp8", activation_scheme="dynamic")
GPT_OSS = dict(architectures=["GptOssForCausalLM"], model_type="gpt_oss", rms_norm_eps=1e-5,
               max_position_embeddings=131072, attention_bias=True, experts_per_token=4, num_experts_per_tok=4,
               num_local_experts=32, sliding_window=128, swiglu_limit=7.0, rope_theta=150000.0,
               rope_scaling=dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0,
                                 beta_slow=1.0, truncate=False),
               quantization_config=dict(quant_method="mxfp4"))
GEMMA3 = dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", rms_norm_eps=1e-6, query_pre_attn_scalar=256,
              sliding_window=1024, rope_theta=1e6, rope_local_base_freq=1e4, max_position_embeddings=131072,
              hidden_activation="gelu_pytorch_tanh")
GEMMA2 = dict(architectures=["Gemma2ForCausalLM"], model_type="gemma2", rms_norm_eps=1e-6, query_pre_attn_scalar=256,
              sliding_window=4096, rope_theta=1e4, max_position_embeddings=8192, attn_logit_softcapping=50.0,
              final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh")
MODELS |= {"gemma-3-4b": sized(GEMMA3, 2560, 10240, 34, 8, 4, 256, 262208),
           "gemma-2-9b": sized(GEMMA2, 3584, 14336, 42, 16, 8, 256, 256000),
           "tiny-gemma3": dict(tiny(GEMMA3), sliding_window=128, num_hidden_layers=7),
           "tiny-gemma2": dict(tiny(GEMMA2), sliding_window=128, num_hidden_layers=4)}
# Three of four layers have states. An engine without FlashInfer needs
# --set additional_config='{"gdn_prefill_backend":"triton"}'.
QWEN3_NEXT = dict(architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", rms_norm_eps=1e-6, rope_theta=1e7,
                  partial_rotary_factor=0.25, max_position_embeddings=262144, attention_bias=False,
                  full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128,
                  linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, num_experts=512,
                  num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
                  norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
MODELS |= {"qwen3-next-12-layers": sized(QWEN3_NEXT, 2048, 5120, 12, 16, 2, 256, 151936),
           "tiny-qwen3-next": dict(tiny(QWEN3_NEXT), num_hidden_layers=4, linear_num_key_heads=2,
                                   linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
                                   num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256,
                                   shared_expert_intermediate_size=256)}
# gpt-oss in bfloat16: -bf16.
MODELS |= {"gpt-oss-20b": sized(GPT_OSS, 2880, 2880, 24, 64, 8, 64, 201088),
           "tiny-gpt-oss": dict(tiny(GPT_OSS), intermediate_size=512, num_local_experts=8)}
for name in ("gpt-oss-20b", "tiny-gpt-oss"):
    MODELS[name + "-bf16"] = {key: value for key, value in MODELS[name].items() if key != "quantization_config"}
# Formats of quantised weights, by the end of a model's name.
for end, config in (("-int4", GPTQ), ("-fp8", FP8), ("-fp8-blocks", dict(FP8, weight_block_size=[128, 128]))):
    MODELS |= {base + end: dict(MODELS[base], quantization_config=config)
               for base in ("llama-3.1-8b", "qwen3-30b-a3b-12-layers", "tiny-llama", "tiny-qwen3-moe")}
ROUNDS, STEPS = 5, 40  # of decoding
PROMPTS = 9  # rounds of a prefill
PREFILLS = ((1, 512), (4, 1024))


def numbers(words):
    return [int(word) for word in words.split(",")]


# one engine, in a process of its own

class LastGraph:
    """Remembers the CUDA graph that was replayed last."""

    def __init__(self):
        import torch

        self.graph, self.replays, plain = None, 0, torch.cuda.CUDAGraph.replay

        def replay(graph):
            self.graph = graph
            self.replays += 1
            return plain(graph)

        self.plain, torch.cuda.CUDAGraph.replay = plain, replay

    def milliseconds(self, repeats=30):
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            self.plain(self.graph)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / repeats

    def host_milliseconds(self, repeats=5):
        import torch

        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            self.plain(self.graph)
        took = time.perf_counter() - begin
        torch.cuda.synchronize()
        return took * 1e3 / repeats


class Steps:
    """Times of the steps of a runner, by what they had: prompts, or one new token of each request."""

    def __init__(self, runner):
        self.rows, self.run, self.on = [], runner.execute_model, False
        runner.execute_model = self._execute

    def _execute(self, scheduled, *arguments, **named):
        if not self.on:
            return self.run(scheduled, *arguments, **named)
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        host = time.perf_counter()
        result = self.run(scheduled, *arguments, **named)
        host = time.perf_counter() - host
        end.record()
        tokens = scheduled.total_num_scheduled_tokens
        if tokens:
            self.rows.append((tokens > len(scheduled.num_scheduled_tokens), tokens, host, begin, end))
        return result

    def summary(self):
        """The number of steps of each kind, their tokens, and their milliseconds: the host's in the model,
        the GPU's from the model's begin to its end, and those from a step's begin to the next one's."""
        import torch

        torch.cuda.synchronize()
        found = {}
        for row, following in zip(self.rows, self.rows[1:] + [None]):
            prompts, tokens, host, begin, end = row
            until = following[3] if following else end
            own = found.setdefault("prompts" if prompts else "decoding", [0] * 5)
            for i, value in enumerate((1, tokens, host * 1e3, begin.elapsed_time(end),
                                       begin.elapsed_time(until))):
                own[i] += value
        self.rows.clear()
        self.on = False
        return {kind: dict(zip(("steps", "tokens", "host", "gpu", "whole"),
                               (round(value, 1) for value in own))) for kind, own in found.items()}


def checkpoint_like(module, *_):
    """The module's own weights as a quantised checkpoint has them: random codes, scales with which a weight
    has the gain 1, and the rest as unit_gain() has it. vLLM's dummy weights leave codes unset."""
    import torch

    for name, weight in module.named_parameters(recurse=False):
        generator = torch.Generator(weight.device).manual_seed(len(name) + weight.numel())
        data, gain = weight.data, 1 / 64  # of some 4,096 inputs
        if data.dtype == torch.uint8:  # codes of 4 bits, or exponents of scales
            low, high = (119, 122) if name.endswith("scale") else (0, 256)
            data.random_(low, high, generator=generator)
        elif name.endswith(("_idx", "_indices", "zeros")):
            data.zero_()
        elif not data.is_floating_point():
            data.random_(-2**31, 2**31 - 1, generator=generator)
        elif "scale" in name:  # codes of 4 bits deviate by 4.6, those of fp8 by 1
            gain /= 4.6 if name.endswith("scales") else 1
            data.uniform_(gain / 2, gain * 3 / 2, generator=generator)
        elif data.element_size() == 1:
            for part in data.split(4096):
                part.copy_(torch.randn(part.shape, device=data.device, dtype=torch.bfloat16, generator=generator))
        elif name == "sinks":
            data.normal_(generator=generator)
        elif name in ("w13_bias", "w2_bias"):  # of experts
            data.normal_(0, 0.1, generator=generator)
        elif data.dim() < 2 or name.endswith("bias"):
            data.fill_(0 if name.endswith("bias") else 1)
        else:
            data.normal_(0, data.shape[-1] ** -0.5, generator=generator)


def unit_gain(model):
    """Normal weights: vLLM's dummy weights are so small that all tokens choose the same experts."""
    import torch

    rank = torch.distributed.get_rank()
    generators = [torch.Generator(device="cuda").manual_seed(seed) for seed in (0, 1 + rank)]
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            weight.data.normal_(generator=generators[1])
        elif name.endswith(("A_log", "dt_bias")):
            weight.data.uniform_(-1, 1, generator=generators[1])
        elif weight.dim() < 2:  # norms of some models have the distance from 1, but for those behind states
            from_1 = any(word in type(model).__name__ for word in ("Gemma", "Qwen3Next"))
            is_0 = from_1 and not name.endswith("linear_attn.norm.weight")
            weight.data.fill_(0 if name.endswith("bias") or is_0 else 1)
        elif name.endswith("_bias"):  # of experts
            weight.data.normal_(0, 0.1, generator=generators[1])
        else:
            on_all = name.endswith((".gate.weight", ".router.weight"))  # of all ranks; other weights are slices of a rank
            weight.data.normal_(0, weight.shape[-1] ** -0.5, generator=generators[not on_all])


class Engine:
    """The engine of a worker; each public method is a command of the parent."""

    def __init__(self, config, settings):
        from vllm import LLM

        if settings.pop("all_by_fftune", False) and os.environ.get("FFTUNE_VLLM") != "0":
            from fftune.vllm import faster

            faster.GAIN = float("inf")
            faster.Choice.is_faster_everywhere = lambda choice: True
        self.graphs = LastGraph()
        self.vocabulary = config["vocab_size"]
        self.numbers = random.Random(0)
        if "quantization_config" in config:
            from vllm.model_executor.model_loader import dummy_loader

            dummy_loader.initialize_dummy_weights = checkpoint_like
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(config))
        self.llm = LLM(model=str(folder), load_format="dummy", skip_tokenizer_init=True,
                       dtype="bfloat16", generation_config="vllm", seed=0, **settings)
        if "quantization_config" not in config:
            self.llm.apply_model(unit_gain)
        self.engine, self.serial = self.llm.llm_engine, 0
        executor = self.engine.engine_core.engine_core.model_executor
        # With several GPUs each has a process of its own.
        worker = getattr(executor, "driver_worker", None)
        self.steps = worker and Steps(worker.worker.model_runner)

    def _sampling(self, tokens, **more):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = more.pop("every", False)
        return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False,
                              output_kind=RequestOutputKind.DELTA if kind
                              else RequestOutputKind.FINAL_ONLY, **more)

    def _prompt(self, tokens):
        return {"prompt_token_ids": [self.numbers.randrange(10, self.vocabulary)
                                     for _ in range(tokens)]}

    def _add(self, tokens, sampling):
        self.serial += 1
        self.engine.add_request(str(self.serial), self._prompt(tokens), sampling)
        return str(self.serial)

    def decode(self, batch, context):
        """Requests that all decode; they stay until all rounds are timed."""
        new = ROUNDS * (STEPS + 8) + batch + 64
        for i in range(batch - 1):
            self._add(context, self._sampling(new))
        self.last, self.made = self._add(context, self._sampling(new, every=True)), 0
        self._until(8)

    def _until(self, tokens):
        while self.made < tokens:
            for output in self.engine.step():
                if output.request_id == self.last:
                    self.made += len(output.outputs[0].token_ids)

    def step(self):
        """Milliseconds of a step: those that the caller waits, and the graph's."""
        begin, first, replays = time.perf_counter(), self.made, self.graphs.replays
        self._until(first + STEPS)
        steps = self.made - first
        wall = (time.perf_counter() - begin) * 1e3 / steps
        one_graph = 0 < self.graphs.replays - replays < 1.5 * steps
        return {"wall": wall, "gpu": self.graphs.milliseconds() if one_graph else None,
                "launch": self.graphs.host_milliseconds() if one_graph else None}

    def finish(self):
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def prefill(self, batch, tokens):
        for _ in range(batch):
            self._add(tokens, self._sampling(1))
        begin = time.perf_counter()
        self.finish()
        return (time.perf_counter() - begin) * 1e3

    def kernels(self, batch=0, most=30):
        """Milliseconds, launches and name of the kernels of one step of decoding, or without a batch of a prefill
        of 8 x 1024 tokens."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        if batch and not self.graphs.graph:
            return []
        with profile(activities=[ProfilerActivity.CUDA]) as record:
            self.graphs.plain(self.graphs.graph) if batch else self.prefill(8, 1024)
            torch.cuda.synchronize()
        found = {}
        for event in record.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
                own = found.setdefault(event.name[:160], [0.0, 0])
                own[0] += event.time_range.elapsed_us() / 1e3
                own[1] += 1
        return sorted(((round(time, 3), count, name) for name, (time, count) in found.items()), reverse=True)[:most]

    def parts(self):
        """The parts that run by fftune, with the numbers of tokens or sequences for which it is the faster one."""
        found = {}
        for name, read in (("layers", self._layers), ("experts", self._experts), ("products", self._products),
                           ("linear_attention", self._linear_attention)):
            module = sys.modules.get(f"fftune.vllm.{name}")
            for part, choice in read(module) if module else ():
                found[part] = None if choice is None else {
                    rows: [round(own, 4), round(mine, 4), choice.is_faster(rows)]
                    for rows, (own, mine) in sorted(choice.times.items())}
        return found

    @staticmethod
    def _layers(module):
        for model, state in module._states.items():
            for kind in sorted(state.tested):
                yield f"layers of {type(model).__name__} {kind}", next(iter(state.choices.values()), None)

    @staticmethod
    def _experts(module):
        for kind, tested in module._tested.items():
            yield f"experts of {module._words_of(kind)}", tested.choice

    @staticmethod
    def _products(module):
        for kind in module._kinds:
            yield kind, module._choices.get(kind)

    @staticmethod
    def _linear_attention(module):
        for kind in module._kinds.values():
            for what in sorted(kind.agreed):
                choices = kind.prompts if what == "prompts" else kind.steps
                yield f"{what} of {kind.words}", next((choice for choice in choices.values() if choice), None)

    def settle(self):
        """Waits for kernels that are compiled beside the engine."""
        linear = sys.modules.get("fftune.vllm.linear_attention")
        for thread in list(linear._making.values()) if linear else ():
            thread.join()
        layers, plans = (sys.modules.get(f"fftune.vllm.{name}") for name in ("layers", "plans"))
        while layers and (plans._making.locked() or not all(
                made for state in list(layers._states.values()) for made in list(state.plans.values()))):
            time.sleep(0.1)

    def serve(self, requests):
        for _ in range(requests):
            self._add(1024, self._sampling(128))
        if self.steps:
            self.steps.on = True
        begin = time.perf_counter()
        self.finish()
        return {"seconds": time.perf_counter() - begin, "steps": self.steps and self.steps.summary()}

    def alone(self, requests):
        """How many requests get other tokens or log-probabilities beside others than alone."""
        sampling = self._sampling(48, logprobs=1)
        prompts = [self._prompt(self.numbers.randint(1, 600)) for _ in range(requests)]

        def finished():
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    if output.finished:
                        one = output.outputs[0]
                        yield output.request_id, [(token, best[token].logprob) for token, best
                                                  in zip(one.token_ids, one.logprobs)]

        results = []
        for together in (False, True):
            found = {}
            for number, prompt in enumerate(prompts):
                self.engine.add_request(f"{number}", prompt, sampling)
                if not together:
                    found |= finished()
            results.append(found | dict(finished()))
        return sum(results[0][name] != results[1][name] for name in results[0])

    def churn(self, requests):
        """Tokens of requests that come and go, with the log-probability of each and the gap between
        the two best. Every eighth is aborted; half of them share a beginning."""
        if plans := sys.modules.get("fftune.vllm.plans"):
            plans.COMPILES_BESIDE = False  # all batches run by the ops
        if linear := sys.modules.get("fftune.vllm.linear_attention"):
            linear._PATIENCE = 600
        shared = self._prompt(200)["prompt_token_ids"]
        waiting = []
        for number in range(requests):
            prompt = self._prompt(self.numbers.randint(1, 500))["prompt_token_ids"]
            if number % 2:
                prompt = shared[:self.numbers.randint(1, 200)] + prompt
            waiting.append((prompt, self.numbers.randint(1, 120), self.numbers.randint(0, 3)))
        found, running, steps = {}, [], 0
        while waiting or self.engine.has_unfinished_requests():
            while waiting and steps >= waiting[-1][2]:
                prompt, tokens, _ = waiting.pop()
                name = f"churn{len(waiting)}"
                self.engine.add_request(name, {"prompt_token_ids": prompt},
                                        self._sampling(tokens, logprobs=2))
                running.append(name)
                steps = 0
            steps += 1
            if len(running) % 8 == 7:
                self.engine.abort_request([running[-1]])
                running.append("aborted")
            for output in self.engine.step():
                if output.finished and output.outputs[0].finish_reason != "abort":
                    one = output.outputs[0]
                    rows = []
                    for token, best in zip(one.token_ids, one.logprobs):
                        values = sorted((entry.logprob for entry in best.values()), reverse=True)
                        rows.append((token, best[token].logprob, values[0] - values[1]))
                    found[output.request_id] = rows
        return found


def worker(config, settings, answers):
    engine = None
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name == "start":
            begin = time.perf_counter()
            engine = Engine(config, settings)
            import torch
            import vllm

            answer = {"seconds": time.perf_counter() - begin, "vllm": vllm.__version__,
                      "torch": torch.__version__, "device": torch.cuda.get_device_name()}
        else:
            answer = getattr(engine, name)(*arguments)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


# engines

def log_of(model, name, folder):
    return folder / f"{model}.{name}.log".replace(":", "-")


class Contender:
    def __init__(self, name, model, settings, plugin, folder):
        read, write = os.pipe()
        invariant = {"VLLM_BATCH_INVARIANT": "1"} if name.endswith("invariant") else {}
        environment = {**os.environ, **invariant, "FFTUNE_VLLM": plugin,
                       "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
                       "VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": f"{tempfile.gettempdir()}/vllm-{name}",
                       "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")}
        self.name, self.log = name, log_of(model, name, folder)
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--worker", json.dumps([config_of(model), settings, write])],
                stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=[write],
                env=environment)
        os.close(write)
        self.answers = os.fdopen(read)

    def ask(self, *words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.answers.readline()
        if not line:
            self.process.wait()
            end = "".join(self.log.read_text().splitlines(True)[-30:])
            raise RuntimeError(f"an engine ended; the end of {self.log}:\n{end}")
        return json.loads(line)

    def call(self, *words):
        self.ask(*words)
        return self.answer()

    def lines(self):
        return [line[line.index("fftune: "):].strip()
                for line in self.log.read_text().splitlines() if "fftune: " in line]

    def end(self):
        self.process.kill()
        self.process.wait()


def config_of(word):
    """The configuration of a model, with another number of layers behind a colon."""
    model, _, layers = word.partition(":")
    config = dict(MODELS[model], **({"num_hidden_layers": int(layers)} if layers else {}))
    if "fp8" in model and "num_experts" in config:  # routers stay as they were trained
        names = [f"model.layers.{i}.mlp.gate" for i in range(config["num_hidden_layers"])]
        config["quantization_config"] = dict(config["quantization_config"], modules_to_not_convert=names)
    return config


def settings_of(model, arguments):
    """The engine's arguments: vLLM's defaults, but for a check a cache that is too small for all requests."""
    config = config_of(model)
    row = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] // arguments.tp
    found = dict(tensor_parallel_size=arguments.tp) if arguments.tp > 1 else {}
    if arguments.check:
        found |= dict(max_model_len=1024, max_num_seqs=32, max_num_batched_tokens=256, kv_cache_memory_bytes=row * 16 * 320, gpu_memory_utilization=0.1, all_by_fftune=True)
    if arguments.drafts:
        found["speculative_config"] = dict(method="ngram", num_speculative_tokens=arguments.drafts, prompt_lookup_max=3)
    for name, _, value in (word.partition("=") for word in arguments.set):
        found[name] = json.loads(value)
    return found


def compare_tokens(own, mine):
    """How far both engines agree; own and mine: request -> [(token, log-probability, gap)]."""
    common = sorted(set(own) & set(mine))
    equal, deviation, wrong, gaps = 0, 0.0, [], []
    for request in common:
        for (a, p, gap), (b, q, _) in zip(own[request], mine[request]):
            if a != b:
                gaps.append((gap, request))
                break
            deviation = max(deviation, abs(p - q))
        else:
            equal += 1
    wrong = [request for gap, request in gaps if gap > 2 * deviation]
    return {"requests": len(common), "only_one": len(set(own) ^ set(mine)), "equal": equal,
            "other": len(gaps), "largest_gap": max(gaps, default=(0, ""))[0],
            "deviation": deviation, "wrong": wrong}


def report(row):
    words = " ".join(f"{key} {value}" for key, value in row.items()
                     if key not in ("own", "mine", "rounds", "kernels", "by"))
    times = f"{row.get('beside', 'vLLM')} {row['own']:9.3f}  with fftune {row['mine']:9.3f}  ratio " \
            f"{row['own'] / row['mine']:.3f}" if row.get("own") and row.get("mine") else ""
    print(words, times, flush=True)
    for milliseconds, launches, name in row.get("kernels", ())[:12]:
        print(f"  {milliseconds:9.3f} ms {launches:5} {name[:100]}", flush=True)


def measured(engine, arguments):
    """The times of one start of an engine: by what was measured, a list."""
    times, found = {}, {}

    def add(key, values):
        if None not in values:  # a step may be no graph
            times.setdefault(key, []).extend(values)
            print(engine.name, *key, "median", round(statistics.median(values), 4), flush=True)

    if arguments.serve:
        engine.call("serve", max(arguments.serve // 4, 1))
        engine.call("settle")
    for batch in arguments.batch:
        engine.call("decode", batch, arguments.context)
        rounds = [engine.call("step") for _ in range(ROUNDS)]
        if arguments.kernels:
            found["kernels", batch] = engine.call("kernels", batch)
        engine.call("finish")
        for kind in ("gpu", "wall", "launch"):
            add(("decode", batch, arguments.context, kind), [own[kind] for own in rounds])
    if arguments.batch:
        for batch, tokens in PREFILLS:
            engine.call("prefill", batch, tokens)
            add(("prefill", batch, tokens, "wall"), [engine.call("prefill", batch, tokens) for _ in range(PROMPTS)])
    if arguments.serve:
        own = engine.call("serve", arguments.serve)
        add(("serve", arguments.serve, 1024, "seconds"), [own["seconds"]])
        found["steps"] = own["steps"]
    if arguments.kernels:
        engine.call("prefill", 8, 1024)
        found["kernels", 0] = engine.call("kernels")
    if arguments.check:
        found["check"] = engine.call("churn", 200)
    if arguments.invariant:
        found["alone"] = engine.call("alone", 24)
    return times, found


def run(model, arguments, folder):
    settings = settings_of(model, arguments)
    names = ("vllm", "vllm-invariant", "fftune", "fftune-invariant") if arguments.invariant else ("vllm", "fftune")
    names = [name for name in names if arguments.only in ("", name)]
    rows, facts, times, found, by, lines = [], {}, {name: {} for name in names}, {}, {}, []
    for name in names:
        log_of(model, name, folder).unlink(missing_ok=True)

    def add(**row):
        rows.append(dict(model=model, **row))
        report(rows[-1])

    def started(name):
        engines.append(Contender(name, model, settings, arguments.parts if name.startswith("fftune") else "0", folder))
        engines[-1].ask("start")
        return engines[-1]

    engines = []
    try:
        for alternation in range(1 if arguments.check or arguments.invariant else arguments.alternations):
            at_once = {name: started(name) for name in names} if arguments.check else {}
            for name in names:
                engine = at_once.get(name) or started(name)
                facts[name] = engine.answer()
                print(f"{model}: {name} starts in {facts[name]['seconds']:.0f} s", flush=True)
                own, found[name] = measured(engine, arguments)
                for key, values in own.items():
                    times[name].setdefault(key, []).extend(values)
                if name.startswith("fftune"):
                    by = engine.call("parts")
                    lines = list(dict.fromkeys(engine.lines()))
                engine.end()
    except RuntimeError as error:
        add(work="failed")
        print(error, flush=True)
        for engine in engines:
            engine.end()
        return rows, dict(facts)
    for line in lines:
        print(f"  {line}", flush=True)
    parts = [part for part, choice in by.items() if choice is None or any(fast for *_, fast in choice.values())]
    if not parts and arguments.only != "vllm":
        add(work="failed", by="vLLM alone")
    *others, mine = names
    for key, values in times[mine].items():
        work, batch, tokens, kind = key
        for other in others:
            if key in times[other]:
                add(work=work, batch=batch, tokens=tokens, time=kind, by=parts,
                    **({"beside": other} if arguments.invariant else {}), own=statistics.median(times[other][key]),
                    mine=statistics.median(values), rounds=[times[other][key], values])
    for name in names:
        for key in found[name]:
            if key == "steps" or key[0] == "kernels":
                add(work=key[0] if key != "steps" else key, engine=name,
                    **(dict(steps=found[name][key]) if key == "steps" else dict(batch=key[1], kernels=found[name][key])))
    if arguments.check and others:
        add(work="check", by=parts, **compare_tokens(*[found[name]["check"] for name in names]))
    if arguments.invariant:
        usual, invariant = (found[name]["alone"] for name in names[-2:])
        add(work="alone", requests=24, differ=usual, differ_with_invariance=invariant,
            wrong=[invariant] * bool(invariant))
    return rows, {**facts[mine], "starts": {name: own["seconds"] for name, own in facts.items()}, "parts": by,
                  "log": lines}


def main():
    if sys.argv[1:2] == ["--worker"]:
        config, settings, answers = json.loads(sys.argv[2])
        return worker(config, settings, os.fdopen(answers, "w"))
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--models", default="llama-3.2-1b,llama-3.1-8b,qwen3-30b-a3b-12-layers")
    parser.add_argument("--batch", type=numbers)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--parts", default="")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--serve", type=int, default=0)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--alternations", type=int, default=2)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--only", default="", choices=["vllm", "fftune"])
    parser.add_argument("--tp", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.batch is None:
        arguments.batch = [] if arguments.serve or arguments.check else [1, 16, 64]
    models = arguments.models.split(",")
    unknown = [model for model in models if model.partition(":")[0] not in MODELS]
    if unknown:
        parser.error(f"unknown models {', '.join(unknown)}; known: {', '.join(MODELS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the engines, too
    rows, facts = [], {}
    for model in models:
        own, facts[model] = run(model, arguments, arguments.out.parent)
        rows += own
        arguments.out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1))
    return 1 if any(row["work"] == "failed" or row.get("wrong") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Times the attention block of a transformer layer in three kernels beside what a PyTorch user would
call, and with each of its fusions undone, in one process.

usage: peers_block.py LIBFFTUNE.so PRESETS [NAME...] [--json OUT]

    q, k, v = heads of x w_qkv^T + bias, q and k rotated        fftune: qkv
    o       = softmax(q k^T / sqrt(dim), causal or not) v       fftune: attention
    y       = o w_out^T + bias + residual                       fftune: linear

Contenders (bf16, all forward): eager PyTorch and torch.compile of the same, both with cuDNN's
attention; and fftune. Three more are fftune with one fusion undone: bias and rotation by a compiled
kernel behind a plain product; bias and residual likewise; and attention with its scores in memory
(products of cuBLAS around fftune's masked-softmax). The last is the product of q, k and v alone,
which writes k and v to the rows of a cache, against a product with a compiled kernel that copies
them there. Each contender is a CUDA graph that goes through enough sets of inputs to overflow the
L2 three times; the graphs are replayed round-robin, and the median of the rounds is the time of a
pass. The difference is that of fftune's y from eager's in float64, and eager's own.
"""
import json
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from contenders import Fftune, arguments_of, microseconds, random, sets_of

THETA = 10000.0


def block(b, s, d, heads, kv_heads, dim, causal, rotates, bias):
    label = f"{b} x {s}, d {d}, {heads}/{kv_heads} heads of {dim}" + \
        (", causal" if causal else "") + (", RoPE" if rotates else "") + (", bias" if bias else "")
    return dict(label=label, b=b, s=s, d=d, heads=heads, kv_heads=kv_heads, dim=dim, causal=causal,
                rotates=rotates, bias=bias)


CASES = [block(4, 2048, 4096, 32, 32, 128, False, False, True),
         block(4, 2048, 4096, 32, 32, 128, True, True, False),
         block(4, 2048, 4096, 32, 8, 128, True, True, False),
         block(8, 512, 1024, 16, 16, 64, False, False, True),
         block(1, 512, 4096, 32, 8, 128, True, True, False)]


def sines_of(case):
    dim, s = case["dim"], case["s"]
    turns = torch.arange(s, device="cuda")[:, None] * \
        THETA ** (-torch.arange(0, dim, 2, device="cuda") / dim)
    turns = torch.cat([turns, turns], -1).repeat(case["b"], 1)[:, None]
    return turns.cos(), turns.sin()


def rotated(x, cosine, sine):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = wide.chunk(2, -1)
    return (wide * cosine + torch.cat([-high, low], -1) * sine).to(x.dtype)


def plain(case, t, sines):
    """The block in PyTorch, in the dtype of its tensors."""
    rows, dim = case["b"] * case["s"], case["dim"]
    heads = [linear(t["x"], t[f"w_{part}"], t.get(f"b_{part}")).view(rows, -1, dim)
             for part in "qkv"]
    if case["rotates"]:
        heads[:2] = [rotated(h, *sines) for h in heads[:2]]
    q, k, v = (h.view(case["b"], case["s"], -1, dim).transpose(1, 2) for h in heads)
    o = scaled_dot_product_attention(q, k, v, is_causal=case["causal"],
                                     enable_gqa=case["heads"] != case["kv_heads"])
    o = o.transpose(1, 2).reshape(rows, -1)
    return linear(o, t["w_out"], t.get("b_out")) + t["residual"]


def tensors_of(case):
    rows, d, dim = case["b"] * case["s"], case["d"], case["dim"]
    q, kv = case["heads"] * dim, case["kv_heads"] * dim

    def make():
        t = {"x": random(rows, d), "residual": random(rows, d),
             "w_out": random(d, q, scale=q ** -0.5)}
        for part, n in (("q", q), ("k", kv), ("v", kv)):
            t[f"w_{part}"] = random(n, d, scale=d ** -0.5)
            t[part], t[f"plain_{part}"] = random(rows, n), random(rows, n)
            if case["bias"]:
                t[f"b_{part}"] = random(n)
        if case["bias"]:
            t["b_out"] = random(d)
        t["slots"] = torch.arange(rows, device="cuda", dtype=torch.int32)
        for part in "kv":
            t[f"{part}_cache"] = random(rows, kv)
        t["positions"] = torch.arange(case["s"], device="cuda", dtype=torch.int32).repeat(case["b"])
        t["o"], t["y"], t["product"] = random(rows, q), random(rows, d), random(rows, d)
        return t

    return sets_of(make, 2 * (rows * (5 * d + 4 * q + 2 * kv) + 2 * d * (q + kv)), 8)


class Kernels:
    """fftune's plans of a block's parts, with and without their fusions."""

    def __init__(self, library, case):
        self.library, self.variants = library, []
        b, s, d, heads, dim = (case[name] for name in ("b", "s", "d", "heads", "dim"))
        m, q, kv = b * s, heads * dim, case["kv_heads"] * dim
        bias, rotates = ("yes" if case[name] else "no" for name in ("bias", "rotates"))
        sizes = {"m": m, "d": d, "heads": heads, "kv-heads": case["kv_heads"], "dim": dim}
        turn = {"rotation": "halves", "angles": "base", "base": str(THETA)} if case["rotates"] else {}
        self.heads = self.call({"op": "qkv", **sizes, "bias": bias, **turn},
                               {part: part for part in "qkv"})
        self.cached_heads = self.call({"op": "qkv", **sizes, "bias": bias, "cache": "yes", **turn},
                                      {"q": "q"})
        self.plain_heads = self.call({"op": "qkv", **sizes},
                                     {part: f"plain_{part}" for part in "qkv"})
        self.attention = self.call(
            {"op": "attention", "b": b, "s": s, "heads": heads, "kv-heads": case["kv_heads"],
             "dim": dim, "mask": "causal" if case["causal"] else "none"}, {"out": "o"})
        self.out = self.call({"op": "linear", "m": m, "k": q, "n": d, "bias": bias,
                              "residual": "yes"}, {"x": "o", "w": "w_out", "bias": "b_out"})
        self.plain_out = self.call({"op": "linear", "m": m, "k": q, "n": d},
                                   {"x": "o", "w": "w_out", "y": "product"})
        self.softmax = self.plan({"op": "masked-softmax", "b": b, "heads": heads, "s": s,
                                  "mask": "causal" if case["causal"] else "none"})

    def plan(self, problem):
        plan = self.library.plan({"pass": "fwd", "dtype": "bf16", **problem})
        described = json.loads(self.library.lib.fftune_plan_describe(plan))
        self.variants += [v["id"] for v in described["variants"]]
        return plan, self.library.workspace(plan), [x["name"] for x in described["buffers"]]

    def call(self, problem, renamed):
        plan, space, names = self.plan(problem)
        return lambda t: self.library.run(plan, [t[renamed.get(n, n)] for n in names], space)

    def scores(self, case, t):
        """Attention whose scores are stored."""
        b, s, heads, kv_heads, dim = (case[n] for n in ("b", "s", "heads", "kv_heads", "dim"))
        q, k, v = (t[part].view(b, s, -1, dim).transpose(1, 2) for part in "qkv")
        if heads != kv_heads:
            k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.matmul(q * dim ** -0.5, k.transpose(-1, -2))
        plan, space, names = self.softmax
        weights = torch.empty_like(scores)
        self.library.run(plan, [{"x": scores, "y": weights}[n] for n in names], space)
        t["o"].copy_(torch.matmul(weights, v).transpose(1, 2).reshape(b * s, heads * dim))


def contenders_of(case, library):
    kernels, sines, dim = Kernels(library, case), sines_of(case), case["dim"]

    def turn(t):
        for part in "qkv":
            x = t[f"plain_{part}"]
            x = x + t[f"b_{part}"] if case["bias"] else x
            if case["rotates"] and part != "v":
                x = rotated(x.view(x.shape[0], -1, dim), *sines).view_as(x)
            t[part].copy_(x)

    def finish(t):
        y = t["product"] + t["residual"]
        t["y"].copy_(y + t["b_out"] if case["bias"] else y)

    def store(t):
        slots = t["slots"].long()
        for part in "kv":
            t[f"{part}_cache"].index_copy_(0, slots, t[part])

    compiled_store = torch.compile(store, dynamic=False)
    compiled_turn = torch.compile(turn, dynamic=False)
    compiled_finish = torch.compile(finish, dynamic=False)
    whole = torch.compile(lambda t: plain(case, t, sines), dynamic=False)

    def by_cudnn(call):
        def run(t, _):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return call(t)
        return run

    def ours(*parts):
        def run(t, _):
            for part in parts:
                part(t)
            return t["y"]
        return run

    def unfused_heads(t):
        kernels.plain_heads(t)
        compiled_turn(t)

    def unfused_out(t):
        kernels.plain_out(t)
        compiled_finish(t)

    found = {"eager": by_cudnn(lambda t: plain(case, t, sines)), "compile": by_cudnn(whole),
             "fftune": ours(kernels.heads, kernels.attention, kernels.out)}
    if case["bias"] or case["rotates"]:
        found["heads undone"] = ours(unfused_heads, kernels.attention, kernels.out)
    found["output undone"] = ours(kernels.heads, kernels.attention, unfused_out)
    found["scores stored"] = ours(kernels.heads, lambda t: kernels.scores(case, t), kernels.out)
    found["qkv alone"] = ours(kernels.heads)
    found["qkv into a cache"] = ours(kernels.cached_heads)
    found["cache undone"] = ours(kernels.heads, compiled_store)
    found["addmm alone"] = lambda t, _: [linear(t["x"], t[f"w_{p}"], t.get(f"b_{p}")) for p in "qkv"]
    found["attention alone"] = ours(kernels.attention)
    found["output alone"] = ours(kernels.out)
    return found, kernels.variants


def relative_error(value, exact):
    return float((value.double() - exact).norm() / exact.norm())


def measure(library, case):
    sets = tensors_of(case)
    contenders, variants = contenders_of(case, library)
    first = sets[0]
    wide = {name: t.double() if t.is_floating_point() else t for name, t in first.items()}
    few = {**case, "b": 1}
    rows = case["s"]
    wide = {name: t[:rows] if name in ("x", "residual") else t for name, t in wide.items()}
    sines = [t[:rows].double() for t in sines_of(case)]
    with sdpa_kernel(SDPBackend.MATH):
        exact = plain(few, wide, sines)
    del wide
    errors = {name: relative_error(contenders[name](first, 0)[:rows], exact)
              for name in ("eager", "fftune")}
    kept = {}
    for name, call in contenders.items():
        try:
            call(first, 0)
            torch.cuda.synchronize()
            kept[name] = call
        except Exception as error:  # a contender that cannot run it is left out
            print(f"{case['label']}: {name} is left out: {str(error).splitlines()[0][:120]}",
                  file=sys.stderr)
    return {"label": case["label"], "variants": variants, "errors": errors,
            "us": microseconds(kept, sets)}


def main(words):
    words, out = arguments_of(words, __doc__, 2)
    library = Fftune(words[0], words[1])
    results = []
    for case in CASES:
        if words[2:] and not any(word in case["label"] for word in words[2:]):
            continue
        result = measure(library, case)
        results.append(result)
        times = ", ".join(f"{name} {us:.1f}" for name, us in result["us"].items())
        print(f"{case['label']}: {times}; compile / fftune "
              f"{result['us']['compile'] / result['us']['fftune']:.2f}; errors "
              f"{result['errors']['eager']:.2e} (eager) {result['errors']['fftune']:.2e}", flush=True)
        torch.cuda.empty_cache()
    if out:
        with open(out, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
"""Times attention and masked-softmax through fftune's C API beside what a PyTorch user would call,
in one process.

usage: peers_attention.py LIBFFTUNE.so PRESETS [NAME...] [--json OUT]
       peers_attention.py LIBFFTUNE.so PRESETS --errors

Contenders (bf16): cuDNN and flash-2, above 256 features the memory-efficient kernel, as PyTorch
calls them, FlexAttention compiled (documents of a packed sequence), torch.compile of the softmax
(masked-softmax), and fftune, of the cases below or of those whose label contains a NAME. A boolean
mask is packed within fftune's time. Each contender is a CUDA graph that goes through enough sets of
inputs to overflow the L2 three times; the graphs are replayed round-robin, and the median of the
rounds is what a pass takes. The difference is that of fftune's first output from cuDNN's, relative
to its norm.

--errors compares instead the outputs and gradients of fftune and of flash-2 on the same inputs with
attention in float64.
"""
import ctypes
import json
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from contenders import Fftune, arguments_of, microseconds, random, sets_of

aten = torch.ops.aten


def heads_first(tensor):
    return tensor.transpose(1, 2)


def repeated(tensor, heads):
    """Keys or values once for each head of the queries: a view."""
    b, s, kv_heads, dim = tensor.shape
    wide = tensor.unsqueeze(3).expand(b, s, kv_heads, heads // kv_heads, dim)
    return heads_first(wide.reshape(b, s, heads, dim)) if kv_heads != heads else heads_first(tensor)


def attention(b, heads, s, dim, mask="none", kv_heads=None, kv=None, backward=False, data="random"):
    kv_heads, kv = kv_heads or heads, kv or s
    kind = "bwd" if backward else "decode" if kv > s else "fwd"
    words = {"causal-documents": "documents", "random": "random mask"}.get(data, "") \
        if mask == "bool" else mask if mask == "causal" else "full" if kind != "decode" else ""
    problem = {"op": "attention", "pass": "bwd" if backward else "fwd", "dtype": "bf16", "b": b,
               "s": s, "heads": heads, "dim": dim, "mask": mask}
    if kv_heads != heads:
        problem["kv-heads"] = kv_heads
    if kv != s:
        problem["kv"] = kv
    if mask == "bool":
        problem["mask-data"] = data
    return {"label": f"{kind} {words} {b}, {heads}/{kv_heads}, {max(s, kv)}, {dim}".replace("  ", " "),
            "problem": problem, "shape": (b, heads, kv_heads, s, kv, dim), "causal": mask == "causal",
            "mask": mask == "bool", "data": data, "backward": backward}


def softmax(b, heads, s, n, mask, backward=False):
    problem = {"op": "masked-softmax", "pass": "bwd" if backward else "fwd", "dtype": "bf16",
               "b": b, "heads": heads, "s": s, "n": n, "mask": mask}
    return {"label": f"masked-softmax {problem['pass']} {mask} {b}, {heads}, {s}, {n}",
            "problem": problem, "softmax": (b, heads, s, n), "backward": backward}


CASES = [attention(4, 32, 2048, 128), attention(4, 32, 2048, 128, "causal"),
         attention(1, 32, 8192, 128, "causal", 8), attention(4, 16, 2048, 64, "causal"),
         attention(2, 16, 4096, 256, "causal"), attention(1, 32, 512, 128, "causal", 8),
         attention(4, 32, 2048, 128, "bool", data="causal-documents"),
         attention(4, 32, 2048, 128, "bool"), attention(2, 16, 1024, 64, "bool"),
         attention(1, 32, 1, 128, kv_heads=8, kv=8192), attention(16, 32, 1, 128, kv_heads=8, kv=4096),
         attention(64, 32, 1, 128, kv_heads=8, kv=2048)]
CASES += [attention(*shape[:4], "causal" if shape[4] else "none", shape[5], backward=True)
          for shape in ((4, 32, 2048, 128, False, 32), (4, 32, 2048, 128, True, 32),
                        (1, 32, 8192, 128, True, 8), (4, 16, 2048, 64, True, 16),
                        (2, 16, 4096, 256, True, 16), (8, 32, 1024, 64, True, 32),
                        (1, 32, 16384, 128, True, 32))]
# Others, untuned: lengths and heads that no preset has.
CASES += [attention(3, 24, 1536, 128, "causal", 8), attention(2, 40, 3000, 128),
          attention(8, 12, 1000, 64, "causal"), attention(1, 28, 5000, 128, "causal", 4),
          attention(2, 20, 1777, 96), attention(5, 32, 1, 128, kv_heads=4, kv=6000)]
# Every 8 features of a head, other groups and masks at some of them, and the 512 of Gemma 4.
CASES += [attention(2, 16, 4096, dim, "causal", 4, backward=backward)
          for backward in (False, True) for dim in range(32, 257, 8)]
CASES += [attention(2, heads, 2048, dim, mask, kv_heads)
          for heads, kv_heads in ((32, 8), (16, 16), (24, 2)) for mask in ("none", "causal")
          for dim in (40, 72, 88, 112, 136, 192)]
CASES += [attention(1, 16, 8192, 512, "causal", 4), attention(4, 16, 2048, 512, "causal", 4)]
CASES += [softmax(4, 32, 2048, 2048, "none"), softmax(4, 32, 2048, 2048, "causal"),
          softmax(4, 32, 2048, 2048, "bool"), softmax(4, 32, 2048, 2048, "none", True)]


def documents(b, s, kv):
    """Four documents in each sequence, causal within each."""
    number = torch.zeros(b, s, dtype=torch.int32, device="cuda")
    for row in number:
        for end in torch.randint(1, s, (3,)).tolist():
            row[end:] += 1
    i = torch.arange(s, device="cuda")
    return (number[:, :, None] == number[:, None, :]) & (i[:, None] >= i), number


def attention_tensors(case):
    b, heads, kv_heads, s, kv, dim = case["shape"]
    tensors = {"q": random(b, s, heads, dim), "k": random(b, kv, kv_heads, dim),
               "v": random(b, kv, kv_heads, dim), "out": random(b, s, heads, dim)}
    if case["mask"]:
        allowed, tensors["number"] = documents(b, s, kv) if case["data"] != "random" else \
            (torch.rand(b, s, kv, device="cuda") < 0.5, None)
        tensors["mask"] = allowed[:, None].contiguous()
    if case["backward"]:
        tensors["d_out"] = random(b, s, heads, dim)
        for name in ("q", "k", "v"):
            tensors[f"d{name}"] = torch.empty_like(tensors[name])
        tensors["flash"] = aten._scaled_dot_product_flash_attention(
            heads_first(tensors["q"]), repeated(tensors["k"], heads), repeated(tensors["v"], heads),
            0.0, case["causal"])
        # Not a view: fftune's forward pass writes to it.
        tensors["out"] = heads_first(tensors["flash"][0]).clone()
        tensors["lse"] = tensors["flash"][1].float().contiguous()
    return tensors


def attention_sets(case):
    b, heads, kv_heads, s, kv, dim = case["shape"]

    def make():
        tensors = attention_tensors(case)
        if case["backward"]:
            tensors["cudnn"] = aten._scaled_dot_product_cudnn_attention(
                heads_first(tensors["q"]), repeated(tensors["k"], heads),
                repeated(tensors["v"], heads), None, True, 0.0, case["causal"], False)
        return tensors

    numbers = b * dim * (2 * s * heads + 2 * kv * kv_heads) * (2 if case["backward"] else 1)
    return sets_of(make, 2 * numbers + (b * s * kv if case["mask"] else 0), 64)


def flash_backward(case, t):
    heads, o = case["shape"][1], t["flash"]
    return aten._scaled_dot_product_flash_attention_backward(
        heads_first(t["d_out"]), heads_first(t["q"]), repeated(t["k"], heads),
        repeated(t["v"], heads), *o[:6], 0.0, case["causal"], *o[6:8])


def attention_contenders(case, sets):
    heads, causal = case["shape"][1], case["causal"]

    def views(t):
        # Grouped heads: cuDNN and flash-2 take the keys of each group once.
        return heads_first(t["q"]), heads_first(t["k"]), heads_first(t["v"])

    grouped = case["shape"][2] != heads

    def by(backend, masked=False):
        def call(t, _):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    *views(t), attn_mask=t["mask"] if masked else None, is_causal=causal,
                    enable_gqa=grouped)
        return call

    def cudnn_backward(t, _):
        o = t["cudnn"]
        return aten._scaled_dot_product_cudnn_attention_backward(
            heads_first(t["d_out"]), heads_first(t["q"]), repeated(t["k"], heads),
            repeated(t["v"], heads), o[0], o[1], o[6], o[7], None, o[2], o[3], o[4], o[5], 0.0, causal)

    if case["backward"]:
        return {"cuDNN": cudnn_backward, "flash-2": lambda t, _: flash_backward(case, t)}
    found = {"cuDNN": by(SDPBackend.CUDNN_ATTENTION, case["mask"])}
    if case["shape"][5] > 256:
        # It has no grouped heads: its keys are repeated.
        def efficient(t, _):
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    heads_first(t["q"]), repeated(t["k"], heads), repeated(t["v"], heads),
                    is_causal=causal)
        return {"efficient": efficient}
    if not case["mask"]:
        found["flash-2"] = by(SDPBackend.FLASH_ATTENTION)
    elif case["data"] != "random":
        compiled = torch.compile(flex_attention, dynamic=False)

        def same_document(number):
            return create_block_mask(
                lambda b, h, i, j: (number[b, i] == number[b, j]) & (i >= j), number.shape[0], None,
                number.shape[1], number.shape[1], device="cuda")

        blocks = [same_document(t["number"]) for t in sets]
        found["flex"] = lambda t, i: compiled(*views(t), block_mask=blocks[i])
    return found


def softmax_sets(case):
    b, heads, s, n = case["softmax"]

    def make():
        x = random(b, heads, s, n)
        tensors = {"x": x, "y": x.float().softmax(-1).to(x.dtype) if case["backward"]
                   else torch.empty_like(x)}
        if case["backward"]:
            tensors["dy"], tensors["dx"] = torch.randn_like(x), torch.empty_like(x)
        if case["problem"]["mask"] == "bool":
            tensors["mask"] = torch.rand(b, 1, s, n, device="cuda") < 0.5
        return tensors

    return sets_of(make, 4 * b * heads * s * n, 4)


def softmax_contenders(case, sets):
    mask = case["problem"]["mask"]
    s, n = case["softmax"][2:]
    lower = torch.ones(s, n, dtype=torch.bool, device="cuda").tril()

    def forward(x, allowed):
        x = x.float()
        if allowed is not None:
            x = x.masked_fill(~allowed, float("-inf"))
        return x.softmax(-1).to(torch.bfloat16)

    def backward(y, dy):
        y, dy = y.float(), dy.float()
        return (y * (dy - (y * dy).sum(-1, keepdim=True))).to(torch.bfloat16)

    if case["backward"]:
        compiled = torch.compile(backward, dynamic=False)
        return {"compile": lambda t, _: compiled(t["y"], t["dy"]),
                "copy": lambda t, _: t["dx"].copy_(t["dy"])}
    compiled = torch.compile(forward, dynamic=False)
    return {"compile": lambda t, _: compiled(
                t["x"], t["mask"] if mask == "bool" else lower if mask == "causal" else None),
            "copy": lambda t, _: t["y"].copy_(t["x"])}


def measure(library, case, more=None):
    """Times the case's contenders and `more` of them, by name."""
    plan = library.plan(case["problem"])
    library.lib.fftune_plan_describe.restype = ctypes.c_char_p
    described = json.loads(library.lib.fftune_plan_describe(plan))
    space = library.workspace(plan)
    names = [buffer["name"] for buffer in described["buffers"]]
    is_softmax = "softmax" in case
    sets = softmax_sets(case) if is_softmax else attention_sets(case)
    contenders = {**(softmax_contenders if is_softmax else attention_contenders)(case, sets), **(more or {})}

    def ours(t, _):
        library.run(plan, [t[name] for name in names], space)

    result = {"label": case["label"], "problem": case["problem"],
              "variants": [v["id"] for v in described["variants"]], "us": {}}
    kept, theirs = {}, None
    for name, call in {**contenders, "fftune": ours}.items():
        try:
            value = call(sets[0], 0)
            torch.cuda.synchronize()
            kept[name] = call
            if name in ("cuDNN", "compile"):
                theirs = value[0] if isinstance(value, tuple) else value
        except Exception as error:  # a contender that cannot run it is left out
            print(f"{case['label']}: {name} is left out: {str(error).splitlines()[0][:120]}",
                  file=sys.stderr)
    if theirs is not None:
        mine = sets[0]["dx" if is_softmax and case["backward"] else "y" if is_softmax else
                       "dq" if case["backward"] else "out"]
        theirs = theirs if is_softmax else heads_first(theirs)
        if theirs.shape == mine.shape:
            result["difference"] = float((mine.float() - theirs.float()).norm()
                                         / theirs.float().norm())
    not_captured = {}
    result["us"] = microseconds(kept, sets, not_captured)
    for name, why in not_captured.items():
        print(f"{case['label']}: {name} is left out: {why}", file=sys.stderr)
    library.destroy(plan)
    return result


def exact_attention(t, causal):
    """Out, and the gradients of q, k and v, in float64."""
    q, k, v = (t[name].double().requires_grad_() for name in "qkv")
    heads, s, kv = q.shape[2], q.shape[1], k.shape[1]
    scores = heads_first(q) @ repeated(k, heads).transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(s, kv, dtype=torch.bool, device="cuda").tril(kv - s)
        scores = scores.masked_fill(~seen, float("-inf"))
    out = heads_first(scores.softmax(-1) @ repeated(v, heads))
    gradients = torch.autograd.grad(out, (q, k, v), t["d_out"].double())
    return [out.detach(), *gradients]


def outputs_of(library, case, t):
    plan = library.plan(case["problem"])
    described = json.loads(library.lib.fftune_plan_describe(plan))
    library.run(plan, [t[buffer["name"]] for buffer in described["buffers"]],
                library.workspace(plan))
    torch.cuda.synchronize()
    library.destroy(plan)


def compare_errors(library):
    worst = {"out": 0.0, "dq": 0.0, "dk": 0.0, "dv": 0.0}
    print("relative errors: flash-2, fftune, ratio; ratios of up to 1.1 are left out")
    for s in (17, 65, 1000, 2049):
        for dim in (64, 128, 256):
            for mask in ("none", "causal"):
                case = attention(2, 4, s, dim, mask, backward=True)
                t = attention_tensors(case)
                exact = exact_attention(t, case["causal"])
                theirs = [heads_first(x) for x in (t["flash"][0], *flash_backward(case, t))]
                outputs_of(library, case, t)
                outputs_of(library, attention(2, 4, s, dim, mask), t)
                for name, other, true in zip(worst, theirs, exact):
                    errors = [float((x.double() - true).norm() / true.norm())
                              for x in (other, t[name])]
                    ratio = errors[1] / errors[0]
                    worst[name] = max(worst[name], ratio)
                    if ratio > 1.1:
                        print(f"s {s:5} dim {dim:4} {mask:7} {name:4} {errors[0]:.2e} "
                              f"{errors[1]:.2e} {ratio:5.2f}", flush=True)
    print("the largest ratios:", ", ".join(f"{name} {ratio:.2f}" for name, ratio in worst.items()))
    return 0 if max(worst.values()) <= 1.2 else 1


def main(words):
    words, out = arguments_of(words, __doc__, 2)
    torch.manual_seed(0)
    library = Fftune(words[0], words[1])
    if "--errors" in words:
        return compare_errors(library)
    results = []
    for case in CASES:
        if words[2:] and not any(name in case["label"] for name in words[2:]):
            continue
        try:
            result = measure(library, case)
        except Exception as error:
            print(f"{case['label']}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        results.append(result)
        others = {name: us for name, us in result["us"].items() if name not in ("fftune", "copy")}
        own = result["us"].get("fftune", float("nan"))
        best = min(others.values(), default=float("nan"))
        print(f"{result['label']:44} fftune {own:8.1f}  " + "  ".join(
            f"{name} {us:8.1f}" for name, us in result["us"].items() if name != "fftune")
            + f"  {best / own:5.2f}x  difference {result.get('difference', float('nan')):.1e}",
            flush=True)
        if out:
            with open(out, "w") as file:
                json.dump(results, file, indent=1)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

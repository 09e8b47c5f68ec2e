#!/usr/bin/env python3
"""Times two experts behind a mask, and backward passes, beside what a PyTorch user would call.

usage: peers_training.py LIBFFTUNE.so PRESETS [CASE,M[,M...]]... [--json OUT] [--other FILE.py]

A case is ffn-bwd,D,H, masked-ffn,D,H, masked-linear,D or masked-linear-bwd,D, followed by sizes m
(bf16, silu; x, gate and up are saved). A mask is one block of a third of the tokens, or random of
that share where the case ends in `:random`. Contenders:

eager    the formula; of two experts both, for all tokens, and a choice by the mask
compile  torch.compile of it
split    two experts: the rows of each by lists that are known beforehand, dense layers, scattered
other    what FILE.py brings: masked_ffn(x, mask, *w), masked_linear(x, mask, *w) and
         masked_linear_bwd(dy, x, mask, *w), weights of mask's tokens first, each [out, in]

They are timed as in peers.py; the error is against float64 on the GPU.
"""
import importlib.util
import json
import sys

import torch
import torch.nn.functional as F

from contenders import Fftune, arguments_of, microseconds, random, sets_of

CASES = ["ffn-bwd,1024,2048,1024,4096,16384", "ffn-bwd,4096,14336,4096,16384",
         "masked-ffn,1024,2048,1024,4096,16384", "masked-ffn:random,1024,2048,4096",
         "masked-ffn,4096,14336,1024,4096,16384", "masked-ffn:random,4096,14336,4096",
         "masked-linear,1024,4096,16384", "masked-linear,4096,4096",
         "masked-linear-bwd,1024,4096,16384", "masked-linear-bwd,4096,4096"]


def ffn(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def ffn_bwd(dy, x, g, u, w_gate, w_up, w_down):
    """The gradients of x, w_gate, w_up and w_down."""
    dhidden = dy @ w_down
    s = torch.sigmoid(g)
    silu = g * s
    dg, du = dhidden * u * (s + silu * (1 - s)), dhidden * silu
    return dg @ w_gate + du @ w_up, dg.t() @ x, du.t() @ x, dy.t() @ (silu * u)


def both(layer, x, mask, weights):
    half = len(weights) // 2
    return torch.where(mask[:, None], layer(x, *weights[:half]), layer(x, *weights[half:]))


def split(layer, x, places, weights, y):
    half = len(weights) // 2
    y[places[0]] = layer(x[places[0]], *weights[:half])
    y[places[1]] = layer(x[places[1]], *weights[half:])
    return y


def linear_bwd(dy, x, mask, w_true, w_false):
    dx = torch.where(mask[:, None], dy @ w_true, dy @ w_false)
    chosen = dy * mask[:, None]
    return dx, chosen.t() @ x, (dy - chosen).t() @ x


def split_linear_bwd(dy, x, places, weights, dx):
    sums = []
    for rows, w in zip(places, weights):
        dy_rows = dy[rows]
        dx[rows] = dy_rows @ w
        sums.append(dy_rows.t() @ x[rows])
    return dx, *sums


def mask_of(kind, m):
    if kind == "random":
        return torch.rand(m, device="cuda") < 0.33
    mask = torch.zeros(m, device="cuda", dtype=torch.bool)
    mask[m // 3:m // 3 + round(0.33 * m)] = True
    return mask


class Case:
    """One row: its inputs, a problem of fftune, and calls by name."""

    def __init__(self, word, sizes, m, other):
        self.op, _, mask = word.partition(":")
        self.kind, self.backward = mask or "block", self.op.endswith("-bwd")
        self.m, self.d, self.h = m, sizes[0], sizes[-1]
        self.experts, self.other = self.op.startswith("masked"), other
        self.problem = {"op": self.op.removesuffix("-bwd"), "dtype": "bf16", "m": m,
                        "pass": "bwd" if self.backward else "fwd"}
        self.problem |= {"k": self.d, "n": self.d} if "linear" in word else {"d": self.d, "h": self.h}
        if self.experts:
            self.problem["mask"] = f"{self.kind}:0.33"

    def weights(self):
        d, h = self.d, self.h
        shapes = [(d, d)] if "linear" in self.op else [(h, d), (h, d), (d, h)]
        return [random(*shape, scale=shape[1]**-0.5)
                for _ in range(2 if self.experts else 1) for shape in shapes]

    def inputs(self):
        """As fftune takes them: [dy], x, [mask], [gate, up], weights."""
        x = random(self.m, self.d)
        before = [random(self.m, self.d)] if self.backward else []
        if self.experts:
            return [*before, x, mask_of(self.kind, self.m), *self.weights()]
        w = self.weights()
        return [*before, x, F.linear(x, w[0]), F.linear(x, w[1]), *w]

    def outputs(self, inputs):
        """[dx or y], and of a backward pass a gradient of each weight."""
        outs = [torch.empty_like(inputs[0])]
        if self.backward:
            outs += [torch.empty_like(w) for w in self.weights_of(inputs)]
        return outs

    def weights_of(self, inputs):
        count = (2 if self.experts else 1) * (1 if "linear" in self.op else 3)
        return inputs[-count:]

    def calls(self, places, outs):
        first, w = 2 if self.backward else 1, self.weights_of
        if self.op == "ffn-bwd":
            compiled = torch.compile(ffn_bwd, dynamic=False)
            return {"eager": lambda s, i: ffn_bwd(*s), "compile": lambda s, i: compiled(*s)}
        calls = {}
        if self.op == "masked-linear-bwd":
            calls["eager"] = lambda s, i: linear_bwd(*s)
            calls["split"] = lambda s, i: split_linear_bwd(s[0], s[1], places[i], w(s), outs[i][0])
        else:
            layer = ffn if self.op == "masked-ffn" else F.linear
            calls["eager"] = lambda s, i: both(layer, s[0], s[1], w(s))
            calls["split"] = lambda s, i: split(layer, s[0], places[i], w(s), outs[i][0])
        if self.other:
            call = getattr(self.other, self.op.replace("-", "_"))
            calls["other"] = lambda s, i: call(*s[:first + 1], *w(s))
        return calls

    def bytes(self):
        tokens = 2 * self.m * (2 * self.d + (2 * self.h if self.op == "ffn-bwd" else 0))
        return tokens + 2 * sum(w.numel() for w in self.weights())


def error(got, right):
    got = got if isinstance(got, tuple) else (got,)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, right))


def run(library, word, sizes, m, other):
    case = Case(word, sizes, m, other)
    sets = sets_of(case.inputs, case.bytes(), 16)
    outs = [case.outputs(s) for s in sets]
    mask = 2 if case.backward else 1
    places = [[torch.nonzero(s[mask])[:, 0], torch.nonzero(~s[mask])[:, 0]] if case.experts else None
              for s in sets]
    torch._dynamo.reset()
    plan = library.plan(case.problem)
    workspace = library.workspace(plan)
    calls = case.calls(places, [case.outputs(s) for s in sets])
    calls["fftune"] = lambda s, i: library.run(plan, [*s, *outs[i]], workspace)

    exact = [t if t.dtype == torch.bool else t.double() for t in sets[0]]
    right = case.calls([places[0]], [[t.double() for t in outs[0]]])["eager"](exact, 0)
    right = right if isinstance(right, tuple) else (right,)
    row = {"case": word, "d": case.d, "h": case.h, "m": m, "workspace": workspace.numel() - 256}
    for name, call in calls.items():
        got = call(sets[0], 0)
        torch.cuda.synchronize()
        row[name + "_error"] = error(tuple(outs[0]) if name == "fftune" else got, right)
    del exact, right
    row.update(microseconds(calls, sets))
    best = min((name for name in calls if name not in ("fftune", "other")), key=lambda n: row[n])
    row["best"], row["ratio"] = best, row[best] / row["fftune"]
    print(f"{word:22s} {case.d:5d} {case.h:6d} {m:6d} "
          + " ".join(f"{name} {row[name]:.1f}" for name in calls)
          + f" | {row['ratio']:.2f} x {best}"
          + (f", {row['other'] / row['fftune']:.2f} x other" if "other" in row else "")
          + f" | error {row['fftune_error']:.1e} ({best} {row[best + '_error']:.1e})", flush=True)
    library.destroy(plan)
    return row


def main(words):
    other = None
    if "--other" in words:
        place = words.index("--other")
        spec = importlib.util.spec_from_file_location("other", words[place + 1])
        other = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(other)
        words = words[:place] + words[place + 2:]
    words, out = arguments_of(words, __doc__, 2)
    torch.manual_seed(1)
    library = Fftune(*words[:2])
    rows = []
    for text in words[2:] or CASES:
        word, *numbers = text.split(",")
        count = 1 if "linear" in word else 2
        for m in numbers[count:]:
            rows.append(run(library, word, [int(n) for n in numbers[:count]], int(m), other))
            torch.cuda.empty_cache()
            if out:
                json.dump(rows, open(out, "w"), indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Calls of every custom op, small ones: what test_ops.py checks in many ways."""
import itertools
import json
import math
import os
import pathlib
import re
from dataclasses import dataclass, field
from typing import Callable

import pytest
import torch
from torch import Tensor

from fftune import reference


def trusted(presets):
    """The folder, whose records serve even where a busy machine timed their choice as slower than the default."""
    for path in pathlib.Path(presets).glob("*/*.json"):
        file = json.loads(path.read_text())
        for record in file["records"]:
            record["verdict"].pop("untuned_ratio", None)
        own = path.with_suffix(f".{os.getpid()}")  # another rank may read the file meanwhile
        own.write_text(json.dumps(file))
        own.replace(path)
    return presets


NUMBERS = [10000.0, 4.0, 64.0, 1.0, 4.0, 32.0, 1.0, 0.0]


@dataclass
class Case:
    """Arguments of torch.ops.fftune.<op>, of a dtype and a device."""

    name: str
    op: str
    make: Callable[..., tuple]
    differentiable: bool = True  # its inputs of floating point have gradients
    outputs: int | None = None  # of those that have gradients, None for all
    constants: tuple[int, ...] = field(default=())  # arguments that have none
    updated: tuple[int, ...] = field(default=())  # arguments that it writes to

    def arguments(self, dtype=torch.float32, device="cpu") -> tuple:
        def random(*shape, scale=1.0):
            return (torch.randn(*shape) * scale).to(dtype)

        # All are made on the CPU, where references of other arguments can run.
        return tuple(a.to(device) if isinstance(a, Tensor) else a for a in self.make(random))

    def __str__(self):
        return self.name


def _codes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _packed_linear(random, m, zeros, k=64, n=40):
    zero = _codes(n, 2) % 16 if zeros else None
    w, scale, zero = reference.pack_weight_32(_codes(n, k // 2), random(n, 2, scale=0.2 / k**0.5),
                                              zero, k)
    extra = (random(n), random(m, n)) if zeros else (None, None)
    return random(m, k), w, scale, zero if zeros else None, *extra, n, "32"


def _packed(random, n, k, zeros):
    zero = _codes(n, k // 32) % 16 if zeros else None
    w, scale, zero = reference.pack_weight_32(_codes(n, k // 2),
                                              random(n, k // 32, scale=0.2 / k**0.5), zero, k)
    return w, scale, zero if zeros else None


def _packed_as(format, n, k):
    """A packed weight of another format than int4, in groups of 32."""
    bits8 = format in ("fp8", "int8")
    codes = _codes(n, k if bits8 else k // 2)
    if format == "fp8":
        codes = codes & 191  # at most 1.875: tolerances are by the largest values
    scale = torch.randint(118, 122, (n, k // 32), dtype=torch.uint8)
    if format == "nvfp4":
        scale = torch.randint(80, 100, (n, k // 16), dtype=torch.uint8)
        return reference.pack_weight_nvfp4(codes, scale, torch.rand(n) * 0.002, k)
    if bits8:
        scale = torch.rand(n, k // 32) * {"fp8": 0.5, "int8": 0.003}[format]
    name = f"pack_weight_{format}" + ("_32" if bits8 else "")
    return getattr(reference, name)(codes, scale, k)


def _linear_as(format, random, m, k=64, n=40):
    return random(m, k), *_packed_as(format, n, k), random(n), random(m, n), n, _group_as(format)


def _ffn_as(format, random, m, d=64, h=96):
    weights = [_packed_as(format, n, k) for n, k in ((h, d), (h, d), (d, h))]
    return (random(m, d), *[w[i] for i in range(2) for w in weights], random(d), random(m, d), h,
            _group_as(format), "silu")


def _qkv_as(format, random, tokens, **options):
    a = _qkv(random, tokens, packed=True, d=64, **options)
    return (a[0], *_packed_as(format, len(a[1]), 64), a[4], *a[7:-5], 16, _group_as(format), *a[-5:])


def _group_as(format):
    return "128" if format.endswith("fp4") else "32"


def _moe_as(format, random, *options, bias=False, zeros=False, experts=6, d=64, h=96):
    x, ids, shares, *_ = _moe(random, d=d, h=h)
    pack = (lambda n, k: _packed(random, n, k, zeros)) if format == "int4" else (
        lambda n, k: _packed_as(format, n, k))
    weights = [pack(n, k) for n, k in ((experts * h, d), (experts * h, d), (experts * d, h))]
    biases = ((random(experts, h), random(experts, h), random(experts, d)) if bias else (None,) * 3)
    act, weigh, shared = options
    return (x, ids, shares, *[w[i] for i in range(len(weights[0])) for w in weights], *biases,
            experts - shared, h, act, weigh, shared, _group_as(format), "")


def _mlp_as(random, up, down, group):
    return (random(5, 64), *(w[i] for i in range(len(up)) for w in (up, down)), random(96), random(64), None, 96,
            group, "gelu")


def _cases_as(format):
    words = ("",) if format.endswith("fp4") else ("_128", "_64", "_32", "_row")
    counts = {"": 4, "_128": 1, "_64": 2, "_32": 4, "_row": 1}

    def plain(word):
        if format == "nvfp4":
            return _codes(37, 56), torch.randint(0, 256, (37, 7), dtype=torch.uint8), torch.randn(37), 112
        scale = (torch.randint(0, 256, (37, counts[word]), dtype=torch.uint8) if format == "mxfp4" else
                 torch.rand(37, counts[word]))
        return _codes(37, 64 if format == "mxfp4" else 128), scale, 128

    for word in words:
        yield Case(f"pack_weight_{format}{word}", f"pack_weight_{format}{word}",
                   lambda r, word=word: plain(word), differentiable=False)
        yield Case(f"unpack_weight_{format}{word}", f"unpack_weight_{format}{word}", lambda r, word=word: (
            *getattr(reference, f"pack_weight_{format}{word}")(*plain(word)), 37, plain(word)[-1]),
            differentiable=False)
    yield Case(f"linear_packed_{format}", f"linear_packed_{format}", lambda r: _linear_as(format, r, 3),
               constants=(1, 2))
    yield Case(f"linear_packed_{format}-many", f"linear_packed_{format}", lambda r: _linear_as(format, r, 70),
               constants=(1, 2))
    yield Case(f"mlp_packed_{format}", f"mlp_packed_{format}", lambda r: _mlp_as(r, _packed_as(format, 96, 64),
               _packed_as(format, 64, 96), _group_as(format)), differentiable=False)
    yield Case(f"head_packed_{format}", f"head_packed_{format}", lambda r: (
        r(5, 64), r(64), None, *_packed_as(format, 41, 64), r(41), *_draw(False, 5), 41, _group_as(format), 1e-5,
        "llama", 0.0, "f32", True, 0), differentiable=False)
    yield Case(f"head_logits_packed_{format}", f"head_logits_packed_{format}", lambda r: (
        r(2, 3, 64), None, None, *_packed_as(format, 41, 64), None, 41, _group_as(format), 1e-6, "llama", "same"),
        differentiable=False)
    yield Case(f"ffn_packed_{format}", f"ffn_packed_{format}", lambda r: _ffn_as(format, r, 3),
               constants=tuple(range(1, 7)))
    yield Case(f"qkv_packed_{format}", f"qkv_packed_{format}", lambda r: _qkv_as(format, r, (2, 5)),
               differentiable=False)
    yield Case(f"qkv_packed_cached_{format}", f"qkv_packed_cached_{format}",
               lambda r: _qkv_as(format, r, (6,), norm=True, rule="base", cache=True),
               differentiable=False, updated=(8, 9))


def _packed_ffn(random, m, zeros, d=64, h=96):
    weights = [_packed(random, n, k, zeros) for n, k in ((h, d), (h, d), (d, h))]
    extra = (random(d), random(m, d)) if zeros else (None, None)
    return random(m, d), *[w[i] for i in range(3) for w in weights], *extra, h, "32", "silu"


def _packed_qkv(random, tokens, zeros, **options):
    a = _qkv(random, tokens, packed=True, d=64, **options)
    return (a[0], *_packed(random, len(a[1]), 64, zeros), a[4], *a[7:-5], 16, "32", *a[-5:])


def _weights(random, d=24, h=40):
    return random(h, d, scale=d**-0.5), random(h, d, scale=d**-0.5), random(d, h, scale=h**-0.5)


def _mask(*shape):
    return torch.rand(shape) < 0.4


def _ids(rows, length):
    return torch.randint(0, 5, (rows, length))


def _draw(filters, *rows) -> tuple:
    """Parameters of a draw: without any, without filters, or with them."""
    if filters is None:
        return (None,) * 6

    def of(*values, dtype=torch.float32):
        count = math.prod(rows)
        return torch.tensor((values * count)[:count], dtype=dtype).view(rows)

    draw = of(0.0, 0.7, 1.0, 1.5), of(1, 2, 2**40, -3, dtype=torch.int64), \
        of(0, 1, 7, dtype=torch.int32)
    if not filters:
        return *draw, None, None, None
    return *draw, of(0, 5, 2, 100, dtype=torch.int32), of(1.0, 0.9, 0.5), of(0.0, 0.0, 0.1, 0.0, 0.3)


def _attention(r, q=(2, 9, 4, 16), k=(2, 9, 2, 16), v=None, *, pages=None, mask=None, bias=None,
               offsets=None, kv_offsets=None, lengths=None, sinks=None, causal=False, window=0,
               softcap=0.0, scale=0.0, lse=True, packed=False) -> tuple:
    bits = flags = None
    if packed:
        (bits, flags), mask = reference.pack_mask(mask), None
    numbers = [None if t is None else torch.tensor(t) for t in (offsets, kv_offsets, lengths)]
    return (r(*q), r(*k), r(*(v or k)), None if pages is None else torch.tensor(pages), mask, bits, flags,
            bias, *numbers, sinks, causal, window, softcap, scale, lse)


def _attention_backward(r, **options) -> tuple:
    q, k, v, pages, *rules = _attention(r, **options)
    y, lse = reference.attention(q, k, v, pages, *rules)
    return r(*y.shape), q, k, v, y, lse, *rules[:-1], False


def _delta(r, lead=(2, 9), heads=2, v_heads=4, dim=16, v_dim=8, *, gate="log", channel=False, norm="l2",
           layout="vk", initial=False, has_state=None, offsets=None, beta_scale=1.0) -> tuple:
    """The arguments of gated_delta_rule in front of the dtype of its state."""
    own = (dim,) if channel else ()
    sequences = lead[0] if offsets is None else len(offsets) - 1
    given = gate == "log"
    g = (-0.3 * torch.rand(*lead, v_heads, *own), None, None, None) if given else (
        None, r(*lead, v_heads, *own), 2 * torch.rand(v_heads),
        -2 * torch.rand(v_heads * (dim if channel else 1)))
    beta = (torch.rand(*lead, v_heads), None) if given else (None, r(*lead, v_heads))
    state = (v_dim, dim) if layout == "vk" else (dim, v_dim)
    k = r(*lead, heads, dim, scale=1.0 if norm == "l2" else dim**-0.5)
    return (r(*lead, heads, dim), k, r(*lead, v_heads, v_dim), *g, *beta,
            torch.randn(sequences, v_heads, *state) if initial else None,
            None if has_state is None else torch.tensor(has_state),
            None if offsets is None else torch.tensor(offsets), gate, "channel" if channel else "head",
            norm, 0.0, beta_scale, -5.0)


def _delta_cache(r, indices, null_index=0.0, accepted=None, **options) -> tuple:
    given = list(_delta(r, initial=True, **options))
    given[9] = torch.randn(7, *given[9].shape[1:])
    given.insert(10, torch.tensor(indices))
    return *given, null_index, None if accepted is None else torch.tensor(accepted)


def _delta_backward(r, final=True, layout="vk", **options) -> tuple:
    given = list(_delta(r, layout=layout, **options))
    v, q, offsets = given[2], given[0], given[11]
    sequences = q.shape[0] if offsets is None else len(offsets) - 1
    state = (v.shape[-1], q.shape[-1]) if layout == "vk" else (q.shape[-1], v.shape[-1])
    d_final = torch.randn(sequences, v.shape[-2], *state) if final else None
    del given[10]
    return r(*v.shape), d_final, *given


def _ssd(r, lead=(2, 9), heads=4, groups=2, dim=8, state_dim=16, *, log=False, skip=True, bias=True,
         softplus=True, initial=False, has_state=None, offsets=None, limits=(0.0, 0.0)) -> tuple:
    """The arguments of ssd in front of the dtype of its state."""
    sequences = lead[0] if offsets is None else len(offsets) - 1
    A, dt = 4 * torch.rand(heads), r(*lead, heads) if softplus else r(*lead, heads).abs()
    return (r(*lead, heads, dim), dt, None if log else -A, A.log() if log else None, r(*lead, groups, state_dim),
            r(*lead, groups, state_dim), torch.randn(heads) if skip else None,
            torch.rand(heads) - 2 * softplus if bias else None,
            torch.randn(sequences, heads, dim, state_dim) if initial else None,
            None if has_state is None else torch.tensor(has_state),
            None if offsets is None else torch.tensor(offsets), softplus, *limits)


def _ssd_cache(r, indices, null_index=0.0, accepted=None, **options) -> tuple:
    given = list(_ssd(r, initial=True, **options))
    given[8:9] = torch.randn(7, *given[8].shape[1:]), torch.tensor(indices)
    return *given, null_index, None if accepted is None else torch.tensor(accepted)


def _ssd_backward(r, final=True, **options) -> tuple:
    given = list(_ssd(r, **options))
    x, B, offsets = given[0], given[4], given[10]
    sequences = x.shape[0] if offsets is None else len(offsets) - 1
    d_final = torch.randn(sequences, *x.shape[-2:], B.shape[-1]) if final else None
    del given[9]
    return r(*x.shape), d_final, *given


def _moe(r, tokens=(7,), experts=6, top_k=3, d=24, h=40, missing=True) -> tuple:
    """An expert has no tokens, and one choice may be of an expert that is not here."""
    ids = torch.rand(*tokens, experts - 1).argsort(-1)[..., :top_k] + 1
    if missing:
        ids[..., 0, 1] = -1
    weights = [r(experts, *s, scale=s[1]**-0.5) for s in ((h, d), (h, d), (d, h))]
    return r(*tokens, d), ids.to(torch.int32), torch.rand(*tokens, top_k), *weights


def _mixture(r, *options, packed=False, bias=False, **sizes) -> tuple:
    """A case of moe_ffn: act, packing, weigh, shared, routing."""
    x, ids, shares, w_gate, w_up, w_down = _moe(r, **sizes)
    if packed:
        w_gate, w_up = torch.cat((w_gate, w_up), 1), None
    biases = (r(6, 80), r(6, 24)) if bias else (None, None)
    return x, ids, shares, w_gate, w_up, w_down, *biases, *options


def moe_fp8_arguments(kind, packed=False, device="cpu") -> tuple:
    """A case of moe_ffn_fp8, with scales of that kind."""
    experts, d, h = 5, 256, 128
    x, down = torch.randn(7, d), torch.randn(experts, d, h) * h**-0.5
    gate, up = torch.randn(2, experts, h, d) * d**-0.5
    ids = torch.rand(7, experts - 1).argsort(-1)[:, :2].int()

    def quantised(w, parts=1):
        if kind == "block":
            pairs = [reference.quantise_weight(one, True) for one in w]
            return tuple(map(torch.stack, zip(*pairs)))
        rows = w if kind == "token" else w.unflatten(1, (parts, -1)).flatten(2)
        scale = rows.abs().amax(-1) / 448
        spread = scale.repeat_interleave(w.shape[1] // scale.shape[1], 1)[..., None]
        q = (w / spread).to(torch.float8_e4m3fn)
        return q, scale if kind == "token" or parts > 1 else scale.flatten()

    x_scale = {"tensor": torch.tensor([0.02]), "token": x.abs().amax(-1, keepdim=True) / 448}
    x, x_scale = reference.quantise(x, x_scale.get(kind))
    w_down, down_scale = quantised(down)
    if packed:
        (w_gate, gate_scale), (w_up, up_scale) = quantised(torch.cat((gate, up), 1), 2), (None,) * 2
    else:
        (w_gate, gate_scale), (w_up, up_scale) = quantised(gate), quantised(up)
    hidden = torch.tensor([0.01]) if kind == "tensor" else None
    arguments = (x, ids, torch.rand(7, 2), w_gate, w_up, w_down, x_scale, gate_scale, up_scale,
                 hidden, down_scale, "silu", "halves", 1, "")
    return tuple(a.to(device) if isinstance(a, Tensor) else a for a in arguments)


def _moe_backward(r, *options, gates=False, **form) -> tuple:
    given = _mixture(r, *options, **form)
    gate_up = reference.moe_ffn_preact(*given)[1:] if gates else (None, None)
    return r(*given[0].shape), *given[:3], *gate_up, *given[3:]


def _labels(vocab, *rows):
    """One of them is ignored."""
    labels = torch.randint(0, vocab, rows)
    labels.view(-1)[1] = -100
    return labels


_LOSS = (-100.0, 0.0, 0.0, 0.0)  # ignore_index, label_smoothing, z_loss, softcap
_ALL_LOSS = (-100.0, 0.2, 0.01, 5.0)


def _loss(r, *rows, rules=_LOSS, weighs=False, items=None, extras=(False, False), vocab=37) -> tuple:
    weights = torch.rand(vocab) + 0.5 if weighs else None
    divisor = () if items is None else (torch.tensor([items]),)
    return r(*rows, vocab, scale=2), _labels(vocab, *rows), weights, *divisor, *rules, *extras


def _head_loss(r, *rows, bias=False, **options) -> tuple:
    """With chunks of 8 rows."""
    _, labels, *rest = _loss(r, *rows, **options)
    return (r(*rows, 24), r(37, 24, scale=0.4), r(37) if bias else None, labels, *rest[:-2], 0.0,
            *rest[-2:])


def _slice(tensors: int, arguments: tuple) -> tuple:
    """The same of a slice of 50 ids, one of whose labels is in another slice."""
    *given, labels = arguments[:tensors]
    labels[0, 0] = 40
    rules, rest = arguments[tensors + 1:tensors + 5], arguments[tensors + 5:]
    return *given, labels, *rules, 50.0, *rest


def _loss_backward(r, name, dloss, arguments) -> tuple:
    """Arguments of the backward op, from those of the forward op."""
    lse = getattr(reference, name)(*arguments)[1]
    *tensors, _, _ = arguments
    at = next(i for i, a in enumerate(tensors) if isinstance(a, float))
    return dloss, *tensors[:at], lse, *tensors[at:]


def _route(r, *options, bias=False) -> tuple:
    # Far enough from one another that a small step changes no choice.
    logits = torch.rand(5, 12).argsort(-1) * 0.4 + torch.rand(5, 12) * 0.1
    return r(5, 12) * 0 + logits, torch.rand(12) * 0.01 if bias else None, *options


def _qkv(r, tokens=(2, 5), *, packed=False, bias=False, norm=False, rule=None, cache=False,
         rotation="halves", rotary=0, d=24, heads=4, kv_heads=2, dim=16) -> tuple:
    rows = [n * dim for n in (heads, kv_heads, kv_heads)]
    weights = [r(n, d, scale=d**-0.5) for n in rows]
    biases = [r(n) for n in rows] if bias else [None] * 3
    if packed:
        weights = [torch.cat(weights), None, None]
        biases = [torch.cat(biases) if bias else None, None, None]
    norms = [r(dim), r(dim)] if norm else [None, None]
    pairs = torch.rand(9, (rotary or dim) // 2)  # of a pair the kernels read the first one's
    angles = None
    if rule == "table":
        angles = torch.cat((pairs, pairs), -1) if rotation == "halves" else \
            pairs.repeat_interleave(2, -1)
    positions = torch.randint(0, 12, tokens) if rule else None
    caches = ()
    if cache:
        count = positions.numel() if rule else torch.Size(tokens).numel()
        slots = torch.randperm(14)[:count].view(tokens)
        slots[0], slots[-1] = -1, 14  # nowhere
        caches = r(2, 7, kv_heads, dim), r(2, 7, kv_heads, dim), slots
    return (r(*tokens, d), *weights, *biases, *norms, positions, angles, *caches, heads, kv_heads,
            1e-6, rotation, rotary, rule or "base", NUMBERS)


CASES = [
    Case("ffn", "ffn", lambda r: (r(2, 3, 24), *_weights(r), None, None, "silu")),
    Case("ffn-added", "ffn", lambda r: (r(5, 24), *_weights(r), r(24), r(5, 24), "gelu")),
    Case("ffn_preact", "ffn_preact", lambda r: (r(7, 24), *_weights(r), None, r(7, 24), "gelu-tanh"),
         outputs=1),
    Case("mlp", "mlp", lambda r: (r(2, 3, 24), *_weights(r)[1:], None, None, None, "relu")),
    Case("mlp-added", "mlp",
         lambda r: (r(5, 24), *_weights(r)[1:], r(40), r(24), r(5, 24), "gelu-tanh")),
    Case("ffn_block", "ffn_block",
         lambda r: (r(2, 3, 24), r(2, 3, 24), r(24), *_weights(r), "silu", "llama", 1e-6)),
    Case("ffn_block-plain", "ffn_block",
         lambda r: (r(6, 24), None, r(24), *_weights(r), "relu", "gemma", 1e-5)),
    Case("linear", "linear", lambda r: (r(2, 3, 24), r(40, 24), None, None)),
    Case("linear-added", "linear", lambda r: (r(6, 24), r(40, 24), r(40), r(6, 40))),
    Case("pack_weight", "pack_weight_32", lambda r: (_codes(40, 48), r(40, 3), None, 96),
         differentiable=False),
    Case("pack_weight-zeros", "pack_weight_row",
         lambda r: (_codes(33, 100), r(33, 1), _codes(33, 1) % 16, 200), differentiable=False),
    Case("pack_weight-64", "pack_weight_64", lambda r: (_codes(5, 64), r(5, 2), None, 128),
         differentiable=False),
    Case("pack_weight-128", "pack_weight_128", lambda r: (_codes(5, 64), r(5, 1), None, 128),
         differentiable=False),
    Case("unpack_weight", "unpack_weight_32", lambda r: (
        *reference.pack_weight_32(_codes(33, 32), r(33, 2), _codes(33, 2) % 16, 64), 33, 64),
        differentiable=False),
    *(Case(f"unpack_weight-{group}", f"unpack_weight_{group}", lambda r, count=count: (
        *reference.pack_weight_128(_codes(7, 64), r(7, count), None, 128)[:2], None, 7, 128),
        differentiable=False) for group, count in (("row", 1), ("64", 2), ("128", 1))),
    Case("linear_packed", "linear_packed", lambda r: _packed_linear(r, 2, False),
         constants=(1, 2, 3)),
    Case("linear_packed-zeros", "linear_packed", lambda r: _packed_linear(r, 70, True),
         constants=(1, 2, 3)),
    Case("ffn_packed", "ffn_packed", lambda r: _packed_ffn(r, 2, False),
         constants=tuple(range(1, 10))),
    Case("ffn_packed-zeros", "ffn_packed", lambda r: _packed_ffn(r, 70, True),
         constants=tuple(range(1, 10))),
    *(case for format in ("mxfp4", "nvfp4", "fp8", "int8") for case in _cases_as(format)),
    Case("moe_ffn_packed", "moe_ffn_packed", lambda r: _moe_as("int4", r, "silu", "before", 1, zeros=True),
         differentiable=False),
    *(Case(f"moe_ffn_packed_{format}", f"moe_ffn_packed_{format}",
           lambda r, format=format: _moe_as(format, r, "swiglu-oai", "after", 0, bias=True), differentiable=False)
      for format in ("mxfp4", "nvfp4")),
    Case("moe_ffn_packed_fp8", "moe_ffn_packed_fp8", lambda r: _moe_as("fp8", r, "silu", "after", 0),
         differentiable=False),
    Case("moe_ffn_packed_int8", "moe_ffn_packed_int8",
         lambda r: _moe_as("int8", r, "gelu", "after", 1, bias=True), differentiable=False),
    Case("masked_linear", "masked_linear",
         lambda r: (r(2, 5, 24), _mask(2, 5), r(40, 24), r(40, 24), "")),
    Case("masked_linear-pattern", "masked_linear",
         lambda r: (r(9, 24), _mask(9), r(40, 24), r(40, 24), "random:0.33")),
    Case("masked_ffn", "masked_ffn",
         lambda r: (r(2, 5, 24), _mask(2, 5), *_weights(r), *_weights(r), "silu", "")),
    Case("masked_ffn_preact", "masked_ffn_preact",
         lambda r: (r(10, 24), _mask(10), *_weights(r), *_weights(r), "silu", "even:0.5"),
         outputs=1),
    Case("rmsnorm", "rmsnorm", lambda r: (r(2, 3, 24), r(24), 1e-6, "llama")),
    Case("rmsnorm-gemma", "rmsnorm", lambda r: (r(6, 24), r(24), 1e-6, "gemma")),
    Case("rmsnorm-t5", "rmsnorm", lambda r: (r(6, 24), r(24), 1e-6, "t5")),
    Case("add_rmsnorm", "add_rmsnorm", lambda r: (r(6, 24), r(6, 24), r(24), 1e-6, "llama")),
    Case("rmsnorm_rstd", "rmsnorm_rstd", lambda r: (r(2, 3, 24), r(24), 1e-6, "t5"), outputs=1),
    Case("add_rmsnorm_rstd", "add_rmsnorm_rstd",
         lambda r: (r(6, 24), r(6, 24), r(24), 1e-6, "llama"), outputs=2),
    Case("rmsnorm_quantised", "rmsnorm_quantised",
         lambda r: (r(6, 24), None, r(24), 1e-6, "llama", True), differentiable=False),
    Case("bias_gelu", "bias_gelu", lambda r: (r(2, 3, 24), r(24), "gelu")),
    Case("bias_gelu-tanh", "bias_gelu", lambda r: (r(6, 24), r(24), "gelu-tanh")),
    Case("act_mul", "act_mul", lambda r: (r(2, 3, 24), r(2, 3, 24), "silu")),
    Case("act_mul_packed", "act_mul_packed", lambda r: (r(2, 3, 48), "gelu")),
    Case("rope", "rope",
         lambda r: (r(2, 5, 3, 16), None, None, None, "interleaved", 8, "yarn", NUMBERS)),
    Case("rope_qk", "rope_qk",
         lambda r: (r(2, 5, 3, 16), r(2, 5, 2, 16), None, torch.tensor([3, 40]), None, "halves", 0,
                    "llama3", NUMBERS)),
    Case("rope_qk-table", "rope_qk",
         lambda r: (r(2, 5, 3, 16), r(2, 5, 1, 16), torch.rand(9, 16), None, None, "halves", 0,
                    "table", NUMBERS), constants=(2,)),
    Case("rope_qk-packed", "rope_qk",
         lambda r: (r(9, 3, 16), r(9, 2, 16), None, None, torch.tensor([0, 4, 9]), "halves", 0,
                    "base", NUMBERS)),
    Case("gated_rmsnorm", "gated_rmsnorm",
         lambda r: (r(2, 3, 4, 24), r(2, 3, 4, 24), r(24), 1e-6, "after", "silu", "t5", 1)),
    Case("gated_rmsnorm-before", "gated_rmsnorm",
         lambda r: (r(5, 24), r(5, 24), r(24), 1e-5, "before", "sigmoid", "llama", 3)),
    Case("causal_conv1d", "causal_conv1d", lambda r: (r(2, 7, 24), r(24, 4), r(24), None, "silu")),
    Case("causal_conv1d-packed", "causal_conv1d",
         lambda r: (r(9, 10), r(10, 3), None, torch.tensor([0, 2, 2, 8]), "none")),
    Case("causal_conv1d-rows", "causal_conv1d", lambda r: (r(2, 7, 17), r(17, 3), r(17).float(), None, "silu")),
    Case("causal_conv1d_states-rows", "causal_conv1d_states",
         lambda r: (r(2, 7, 17), r(17, 3).float(), r(17), None, r(2, 2, 17), "silu", "entries")),
    Case("causal_conv1d_states", "causal_conv1d_states",
         lambda r: (r(2, 7, 24), r(24, 4), r(24), None, r(2, 24, 4), "silu", "channels")),
    Case("causal_conv1d_states-packed", "causal_conv1d_states",
         lambda r: (r(9, 10), r(10, 3), None, torch.tensor([0, 2, 2, 8]), r(3, 2, 10), "none", "entries")),
    Case("causal_conv1d_update", "causal_conv1d_update",
         lambda r: (r(3, 1, 24), r(24, 4), r(24), None, torch.tensor([4, 0, 2]), torch.tensor([True, True, False]), None,
                    r(5, 3, 24), "silu", "entries", 1), differentiable=False, updated=(7,)),
    Case("causal_conv1d_update-drafts", "causal_conv1d_update",
         lambda r: (r(9, 16), r(16, 4), None, torch.tensor([0, 3, 5, 9]), torch.tensor([4, 0, 2]), None,
                    torch.tensor([1, 3, 2]), r(5, 16, 6), "none", "channels", 0), differentiable=False, updated=(7,)),
    Case("attention", "attention", lambda r: _attention(r, causal=True), outputs=1),
    Case("attention-no-lse", "attention", lambda r: _attention(r, k=(2, 13, 4, 16), lse=False),
         outputs=1),
    Case("attention-mask", "attention",
         lambda r: _attention(r, mask=_mask(2, 4, 9, 9), bias=r(1, 4, 9, 9), softcap=4.0),
         outputs=1, constants=(7,)),
    Case("attention-packed-mask", "attention",
         lambda r: _attention(r, k=(2, 70, 2, 16), mask=_mask(2, 1, 9, 70), packed=True, scale=0.5),
         outputs=1),
    Case("attention-sequences", "attention",
         lambda r: _attention(r, (11, 4, 16), (11, 1, 16), offsets=[0, 4, 11], causal=True,
                              window=3), outputs=1),
    Case("attention-sequences-keys", "attention",
         lambda r: _attention(r, (6, 2, 16), (20, 2, 16), offsets=[0, 1, 6], kv_offsets=[0, 8, 20],
                              causal=True), outputs=1),
    Case("attention-lengths", "attention",
         lambda r: _attention(r, (2, 1, 4, 16), (2, 12, 2, 16), lengths=[12, 5], sinks=r(4)),
         outputs=1),
    Case("attention-pages", "attention",
         lambda r: _attention(r, (2, 1, 4, 16), (5, 16, 2, 16), pages=[[3, 1], [0, 4]],
                              lengths=[20, 32]), differentiable=False),
    Case("attention-pages-outside", "attention",
         lambda r: _attention(r, (3, 1, 4, 16), (5, 16, 2, 16), sinks=r(4), window=30,
                              pages=[[3, -1], [2**31 - 1, 4], [5, 2]], lengths=[32, 99, -7]),
         differentiable=False),
    Case("attention-values-of-8", "attention",
         lambda r: _attention(r, v=(2, 9, 2, 8), causal=True), outputs=1),
    Case("attention-heads-of-10", "attention",
         lambda r: _attention(r, (2, 9, 4, 10), (2, 9, 2, 10), causal=True, sinks=r(4)), outputs=1),
    Case("gated_delta_rule", "gated_delta_rule", lambda r: (*_delta(r), "f32", False), outputs=1),
    Case("gated_delta_rule_kv", "gated_delta_rule_kv",
         lambda r: (*_delta(r, (2, 70), gate="softplus", initial=True, layout="kv", beta_scale=2.0), "f32",
                    True)),
    Case("gated_delta_rule-channels", "gated_delta_rule",
         lambda r: (*_delta(r, gate="bounded", channel=True, norm="none"), "f32", True)),
    Case("gated_delta_rule-sequences", "gated_delta_rule",
         lambda r: (*_delta(r, (11,), offsets=[0, 4, 4, 11], initial=True), "f32", True)),
    Case("gated_delta_rule-has-state", "gated_delta_rule",
         lambda r: (*_delta(r, initial=True, has_state=[True, False]), "f32", True),
         differentiable=False),
    Case("gated_delta_rule_update", "gated_delta_rule_update",
         lambda r: _delta_cache(r, [3, 0, 5], lead=(3, 1), gate="softplus"), differentiable=False,
         updated=(9,)),
    Case("gated_delta_rule_update_kv", "gated_delta_rule_update_kv",
         lambda r: _delta_cache(r, [3, 5], lead=(2, 3), layout="kv"), differentiable=False, updated=(9,)),
    Case("gated_delta_rule_update-sequences", "gated_delta_rule_update",
         lambda r: _delta_cache(r, [-1, 0, 9, 4], -1.0, lead=(12,), offsets=[0, 1, 5, 7, 12],
                                has_state=[True, True, True, False]), differentiable=False, updated=(9,)),
    Case("gated_delta_rule_update-slots", "gated_delta_rule_update",
         lambda r: _delta_cache(r, [[3, 1, 5], [0, 2, 4], [2, 0, 9]], accepted=[2, 1, 7], lead=(3, 3), gate="softplus"),
         differentiable=False, updated=(9,)),
    Case("gated_delta_rule_update_kv-slots", "gated_delta_rule_update_kv",
         lambda r: _delta_cache(r, [[3, 1], [0, 4], [6, 5]], -1.0, accepted=[1, 2, 2], lead=(8,), offsets=[0, 2, 3, 8],
                                layout="kv"), differentiable=False, updated=(9,)),
    Case("ssd", "ssd", lambda r: (*_ssd(r), "f32", False), outputs=1),
    Case("ssd-chunks", "ssd", lambda r: (*_ssd(r, (2, 70), log=True, initial=True, limits=(0.01, 2.0)), "f32", True)),
    Case("ssd-few", "ssd",
         lambda r: (*_ssd(r, (3, 2), skip=False, bias=False, softplus=False, groups=1), "f32", True)),
    Case("ssd-sequences", "ssd", lambda r: (*_ssd(r, (41,), offsets=[0, 4, 4, 41], initial=True), "f32", True)),
    Case("ssd-has-state", "ssd", lambda r: (*_ssd(r, initial=True, has_state=[True, False]), "f32", True),
         differentiable=False),
    Case("ssd_update", "ssd_update", lambda r: _ssd_cache(r, [3, 0, 5], lead=(3, 1), log=True),
         differentiable=False, updated=(8,)),
    Case("ssd_update-sequences", "ssd_update",
         lambda r: _ssd_cache(r, [-1, 0, 9, 4], -1.0, lead=(12,), offsets=[0, 1, 5, 7, 12],
                              has_state=[True, True, True, False]), differentiable=False, updated=(8,)),
    Case("ssd_update-slots", "ssd_update",
         lambda r: _ssd_cache(r, [[3, 1, 5], [0, 2, 4], [2, 0, 9]], accepted=[2, 1, 7], lead=(3, 3), log=True),
         differentiable=False, updated=(8,)),
    Case("ssd_update-slots-sequences", "ssd_update",
         lambda r: _ssd_cache(r, [[3, 1], [0, 4], [6, 5]], -1.0, accepted=[1, 2, 2], lead=(8,), offsets=[0, 2, 3, 8]),
         differentiable=False, updated=(8,)),
    Case("mla", "mla", lambda r: (r(2, 1, 4, 16), r(2, 1, 4, 8), r(2, 9, 24), None, None, None, 0.0, True),
         differentiable=False),
    Case("mla-pages", "mla",
         lambda r: (r(3, 3, 5, 8), None, r(6, 4, 8), torch.tensor([[5, 0], [1, -1], [9, 2]]),
                    torch.tensor([7, 2, 99]), None, 0.5, False), differentiable=False),
    Case("mla-lengths", "mla",
         lambda r: (r(3, 2, 4, 8), r(3, 2, 4, 4), r(3, 5, 12), None, torch.tensor([5, 0, 1]), None, 0.5, True),
         differentiable=False),
    Case("mla-chosen", "mla",
         lambda r: (r(2, 3, 4, 8), r(2, 3, 4, 4), r(2, 9, 12), None, torch.tensor([9, 4]),
                    torch.tensor([[[6, 0, -1, 3], [-1, -1, -1, -1], [8, 8, 9, 1]],
                                  [[0, 1, 2, 3], [2, -5, 1, 0], [3, 1, 2, 0]]]), 0.5, True), differentiable=False),
    Case("mla-chosen-pages", "mla",
         lambda r: (r(2, 1, 4, 8), None, r(6, 4, 8), torch.tensor([[5, 0], [1, -1]]), None,
                    torch.tensor([[[7, 2, 0]], [[3, 5, 1]]]), 0.5, False), differentiable=False),
    Case("indexer", "indexer",
         lambda r: (r(2, 3, 4, 8), r(2, 3, 4).float(), r(2, 9, 8), None, None, 5), differentiable=False),
    Case("indexer-lengths", "indexer",
         lambda r: (r(3, 2, 4, 16), r(3, 2, 4).float(), r(3, 11, 16), None, torch.tensor([11, 0, 4]), 6),
         differentiable=False),
    Case("indexer-pages", "indexer",
         lambda r: (r(2, 2, 4, 8), r(2, 2, 4).float(), r(6, 4, 8), torch.tensor([[5, 0, 7], [1, -1, 2]]),
                    torch.tensor([12, 9]), 3), differentiable=False),
    Case("mla_rope", "mla_rope",
         lambda r: (r(3, 4, 12), r(3, 14), r(10), torch.tensor([5, 0, 9]), torch.rand(7, 2).repeat(1, 2), r(8, 14),
                    torch.tensor([7, -1, 2]),
                    "halves", "same", 1e-6, "table", [0.0] * 8), differentiable=False, updated=(5,)),
    Case("mla_rope-pairs", "mla_rope",
         lambda r: (r(2, 2, 3, 9), r(2, 2, 14), r(8), torch.arange(4).view(2, 2), None, r(9, 14),
                    torch.tensor([[3, 9], [0, 1]]), "interleaved", "halves", 1e-2, "base",
                    [100.0, 1.0, 8192.0, 1.0, 4.0, 32.0, 1.0, 1.5]), differentiable=False, updated=(5,)),
    Case("mla_rope-none", "mla_rope",
         lambda r: (r(2, 3, 9), r(2, 14), r(8), None, None, r(4, 14), torch.tensor([3, 0]), "none", "same", 1e-6,
                    "base", [0.0] * 8), differentiable=False, updated=(5,)),
    Case("head_linear", "head_linear", lambda r: (r(2, 3, 4, 8), r(4, 5, 8)), differentiable=False),
    Case("head_linear_transposed", "head_linear_transposed", lambda r: (r(5, 4, 7), r(4, 7, 6)), differentiable=False),
    Case("pack_mask", "pack_mask", lambda r: (_mask(2, 3, 70, 130),), differentiable=False),
    Case("masked_softmax", "masked_softmax",
         lambda r: (r(2, 3, 5, 7), _mask(2, 1, 5, 7) | (torch.arange(7) == 2), False, 0.5)),
    Case("masked_softmax-causal", "masked_softmax", lambda r: (r(1, 2, 5, 7), None, True, 1.0)),
    Case("layernorm", "layernorm", lambda r: (r(2, 3, 24), r(24), r(24), 1e-5)),
    Case("add_layernorm", "add_layernorm", lambda r: (r(6, 24), r(6, 24), r(24), r(24), 1e-5)),
    Case("moe_ffn", "moe_ffn", lambda r: _mixture(r, "silu", "halves", "after", 0, "")),
    Case("moe_ffn-batches", "moe_ffn",
         lambda r: _mixture(r, "gelu-tanh", "halves", "after", 0, "zipf:1", tokens=(2, 5))),
    Case("moe_ffn-packed", "moe_ffn",
         lambda r: _mixture(r, "silu", "halves", "after", 0, "", packed=True)),
    Case("moe_ffn-oai", "moe_ffn",
         lambda r: _mixture(r, "swiglu-oai", "interleaved", "after", 0, "", packed=True, bias=True)),
    Case("moe_ffn-before", "moe_ffn",
         lambda r: _mixture(r, "gelu", "interleaved", "before", 0, "", packed=True)),
    Case("moe_ffn-before-bias", "moe_ffn",
         lambda r: _mixture(r, "silu", "halves", "before", 1, "", packed=True, bias=True)),
    Case("moe_ffn-shared", "moe_ffn", lambda r: _mixture(r, "silu", "halves", "after", 1, "")),
    Case("moe_ffn-shared-packed", "moe_ffn",
         lambda r: _mixture(r, "gelu", "interleaved", "after", 2, "zipf:1", packed=True)),
    Case("moe_ffn_preact", "moe_ffn_preact",
         lambda r: _mixture(r, "silu", "halves", "after", 0, "", missing=False), outputs=1),
    Case("moe_ffn_preact-oai", "moe_ffn_preact",
         lambda r: _mixture(r, "swiglu-oai", "halves", "after", 0, "", packed=True, bias=True,
                            missing=False), outputs=1),
    Case("moe_route", "moe_route",
         lambda r: _route(r, 3, "softmax", "before", 0, 0, "max", False, 1.0), outputs=1),
    Case("moe_route-after", "moe_route",
         lambda r: _route(r, 3, "softmax", "after", 0, 0, "max", False, 1.0), outputs=1),
    Case("moe_route-groups", "moe_route",
         lambda r: _route(r, 3, "sigmoid", "before", 4, 2, "top2", True, 2.5, bias=True),
         outputs=1, constants=(1,)),
    Case("sample", "sample", lambda r: (r(3, 5, 37), *_draw(None), 0.0, False, 0),
         differentiable=False),
    Case("sample-draws", "sample", lambda r: (r(3, 5, 37), *_draw(False, 3, 5), 30.0, True, 0),
         differentiable=False),
    Case("sample-filtered", "sample", lambda r: (r(15, 40), *_draw(True, 15), 0.0, True, 0),
         differentiable=False),
    Case("head", "head",
         lambda r: (r(5, 24), r(24), None, r(41, 24), None, *_draw(None), 1e-5, "llama", 0.0, "same",
                    False, 0), differentiable=False),
    Case("head-draws", "head",
         lambda r: (r(5, 24), r(24), r(24), r(41, 24), r(41), *_draw(False, 5), 1e-5, "llama", 0.0,
                    "f32", True, 3), differentiable=False),
    Case("head-filtered", "head",
         lambda r: (r(5, 24), None, None, r(41, 24), r(41), *_draw(True, 5), 1e-6, "llama", 30.0,
                    "same", False, 0), differentiable=False),
    Case("mlp_packed", "mlp_packed", lambda r: _mlp_as(r, _packed(r, 96, 64, True), _packed(r, 64, 96, True), "32"),
         differentiable=False),
    Case("head_packed", "head_packed",
         lambda r: (r(5, 64), r(64), None, *_packed(r, 41, 64, True), None, *_draw(None), 41, "32", 1e-5, "llama",
                    0.0, "same", False, 2), differentiable=False),
    Case("head_logits_packed", "head_logits_packed",
         lambda r: (r(2, 3, 64), r(64), None, *_packed(r, 41, 64, False), r(41), 41, "32", 1e-5, "gemma", "same"),
         differentiable=False),
    Case("head_logits", "head_logits",
         lambda r: (r(2, 3, 24), r(24), None, r(41, 24), r(41), 1e-5, "gemma", "same"),
         differentiable=False),
    Case("cross_entropy", "cross_entropy", lambda r: _loss(r, 2, 3, items=5.0), outputs=1,
         constants=(2, 3)),
    Case("cross_entropy-all", "cross_entropy",
         lambda r: _loss(r, 7, rules=_ALL_LOSS, weighs=True, items=4.0, extras=(True, True)),
         outputs=1, constants=(2, 3)),
    Case("cross_entropy_rows", "cross_entropy_rows",
         lambda r: _loss(r, 2, 5, rules=_ALL_LOSS, extras=(True, False)), outputs=1, constants=(2,)),
    Case("cross_entropy_slice", "cross_entropy_slice",
         lambda r: _slice(2, _loss(r, 2, 5, rules=_ALL_LOSS, extras=(True, True))), differentiable=False),
    Case("linear_cross_entropy_slice", "linear_cross_entropy_slice",
         lambda r: _slice(4, _head_loss(r, 3, 5, bias=True, rules=_ALL_LOSS, extras=(True, True))),
         differentiable=False),
    Case("linear_cross_entropy", "linear_cross_entropy", lambda r: _head_loss(r, 2, 9, items=5.0),
         outputs=1, constants=(4, 5)),
    Case("linear_cross_entropy-all", "linear_cross_entropy",
         lambda r: _head_loss(r, 11, bias=True, rules=_ALL_LOSS, weighs=True, items=4.0,
                              extras=(True, True)), outputs=1, constants=(4, 5)),
    Case("linear_cross_entropy_rows", "linear_cross_entropy_rows",
         lambda r: _head_loss(r, 3, 5, bias=True, rules=_ALL_LOSS, extras=(False, True)), outputs=1,
         constants=(4,)),
    Case("linear_cross_entropy_gradients", "linear_cross_entropy_gradients",
         lambda r: _head_loss(r, 2, 9, items=5.0), outputs=1, constants=(4, 5)),
    Case("linear_cross_entropy_gradients-all", "linear_cross_entropy_gradients",
         lambda r: _head_loss(r, 11, bias=True, rules=_ALL_LOSS, weighs=True, items=4.0,
                              extras=(True, True)), outputs=1, constants=(4, 5)),
    Case("linear_cross_entropy_gradients_frozen", "linear_cross_entropy_gradients_frozen",
         lambda r: _head_loss(r, 9, bias=True, items=5.0), differentiable=False),
    Case("qkv", "qkv", lambda r: _qkv(r), differentiable=False),
    Case("qkv-packed", "qkv",
         lambda r: _qkv(r, (7,), packed=True, bias=True, norm=True, rule="llama3"),
         differentiable=False),
    Case("qkv-table", "qkv",
         lambda r: _qkv(r, bias=True, rule="table", rotation="interleaved", rotary=8),
         differentiable=False),
    Case("qkv_cached", "qkv_cached", lambda r: _qkv(r, (6,), norm=True, rule="base", cache=True),
         differentiable=False, updated=(11, 12)),
    Case("qkv_packed", "qkv_packed", lambda r: _packed_qkv(r, (2, 5), False), differentiable=False),
    Case("qkv_packed-table", "qkv_packed", lambda r: _packed_qkv(
        r, (70,), True, bias=True, norm=True, rule="table", rotation="interleaved", rotary=8),
        differentiable=False),
    Case("qkv_packed_cached", "qkv_packed_cached",
         lambda r: _packed_qkv(r, (6,), True, norm=True, rule="base", cache=True),
         differentiable=False, updated=(9, 10)),
    Case("scale_", "scale_", lambda r: (r(3, 5, 40), torch.tensor([0.3])), differentiable=False,
         updated=(0,)),
    Case("ngram_block", "ngram_block",
         lambda r: (_ids(4, 30), r(4, 7), 3, -1, None, None, None, None), differentiable=False,
         updated=(1,)),
    Case("ngram_block-rows", "ngram_block",
         lambda r: (_ids(4, 12), r(4, 7), 1, 2, torch.tensor([12, 0, 7, 5]), _ids(2, 20),
                    torch.tensor([20, 3]), torch.tensor([2, 3, 2, 0])), differentiable=False,
         updated=(1,)),
]

BACKWARDS = [
    Case("cross_entropy_backward", "cross_entropy_backward",
         lambda r: _loss_backward(r, "cross_entropy", torch.tensor([1.5]),
                                  _loss(r, 7, rules=_ALL_LOSS, weighs=True, items=4.0))),
    Case("cross_entropy_rows_backward", "cross_entropy_rows_backward",
         lambda r: _loss_backward(r, "cross_entropy_rows", torch.rand(2, 5), _loss(r, 2, 5))),
    *[Case(f"linear_cross_entropy{end}_backward", f"linear_cross_entropy{end}_backward",
           lambda r: _loss_backward(r, "linear_cross_entropy", torch.tensor([1.5]),
                                    _head_loss(r, 11, bias=True, rules=_ALL_LOSS, weighs=True,
                                               items=4.0))) for end in ("", "_frozen")],
    *[Case(f"linear_cross_entropy_rows{end}_backward", f"linear_cross_entropy_rows{end}_backward",
           lambda r: _loss_backward(r, "linear_cross_entropy_rows", torch.rand(3, 5),
                                    _head_loss(r, 3, 5))) for end in ("", "_frozen")],
    Case("cross_entropy_slice_backward", "cross_entropy_slice_backward",
         lambda r: _loss_backward(r, "cross_entropy_slice", torch.rand(2, 5),
                                  _slice(2, _loss(r, 2, 5, rules=_ALL_LOSS)))),
    *[Case(f"linear_cross_entropy_slice{end}_backward", f"linear_cross_entropy_slice{end}_backward",
           lambda r: _loss_backward(r, "linear_cross_entropy_slice", torch.rand(3, 5), _slice(
               4, _head_loss(r, 3, 5, bias=True, rules=_ALL_LOSS)))) for end in ("", "_frozen")],
    Case("ffn_backward", "ffn_backward",
         lambda r: (r(6, 24), r(6, 24), r(6, 40), r(6, 40), *_weights(r), "silu")),
    Case("ffn_backward-input", "ffn_backward",
         lambda r: (r(6, 24), r(6, 24), None, None, *_weights(r), "silu")),
    *[Case(f"ffn_frozen_backward{end}", "ffn_frozen_backward",
           lambda r, saved=saved: (r(6, 24), r(6, 24), *(r(6, 40) if saved else None for _ in "ab"),
                                   *_weights(r), "gelu"))
      for end, saved in (("", True), ("-input", False))],
    Case("linear_backward", "linear_backward", lambda r: (r(6, 40), r(6, 24), r(40, 24), True)),
    Case("masked_linear_backward", "masked_linear_backward",
         lambda r: (r(9, 40), r(9, 24), _mask(9), r(40, 24), r(40, 24), "")),
    Case("masked_ffn_backward", "masked_ffn_backward",
         lambda r: (r(9, 24), r(9, 24), _mask(9), None, None, *_weights(r), *_weights(r), "silu",
                    "block:0.4")),
    Case("masked_linear_frozen_backward", "masked_linear_frozen_backward",
         lambda r: (r(9, 40), _mask(9), r(40, 24), r(40, 24), "")),
    Case("masked_ffn_frozen_backward", "masked_ffn_frozen_backward",
         lambda r: (r(9, 24), r(9, 24), _mask(9), None, None, *_weights(r), *_weights(r), "silu",
                    "block:0.4")),
    Case("rmsnorm_backward", "rmsnorm_backward",
         lambda r: (r(6, 24), r(6, 24), r(24), r(6, 24), None, 1e-6, "gemma")),
    Case("rmsnorm_backward-rstd", "rmsnorm_backward",
         lambda r: (r(6, 24), r(6, 24), r(24), None, torch.rand(6) + 0.5, 1e-6, "llama")),
    Case("ffn_backward_into", "ffn_backward_into",
         lambda r: (r(6, 24), r(6, 24), r(6, 40), r(6, 40), *_weights(r), *_weights(r), "silu"),
         updated=(7, 8, 9)),
    Case("linear_backward_into", "linear_backward_into",
         lambda r: (r(6, 40), r(6, 24), r(40, 24), r(40, 24), r(40)), updated=(3, 4)),
    Case("linear_backward_into-w", "linear_backward_into",
         lambda r: (r(2, 3, 40), r(2, 3, 24), r(40, 24), r(40, 24), None), updated=(3,)),
    Case("masked_linear_backward_into", "masked_linear_backward_into",
         lambda r: (r(9, 40), r(9, 24), _mask(9), r(40, 24), r(40, 24), r(40, 24), r(40, 24), ""),
         updated=(5, 6)),
    Case("masked_ffn_backward_into", "masked_ffn_backward_into",
         lambda r: (r(9, 24), r(9, 24), _mask(9), None, None, *_weights(r), *_weights(r),
                    *_weights(r), *_weights(r), "silu", ""), updated=tuple(range(5, 11))),
    Case("attention_backward", "attention_backward",
         lambda r: _attention_backward(r, causal=True, softcap=3.0, sinks=r(4))),
    Case("attention_backward-values-of-8", "attention_backward",
         lambda r: _attention_backward(r, v=(2, 9, 2, 8), causal=True)),
    Case("attention_backward-sequences", "attention_backward",
         lambda r: _attention_backward(r, q=(11, 4, 16), k=(11, 1, 16), offsets=[0, 4, 11],
                                       window=3)),
    Case("gated_delta_rule_backward", "gated_delta_rule_backward", lambda r: _delta_backward(r, False)),
    Case("gated_delta_rule_kv_backward", "gated_delta_rule_kv_backward",
         lambda r: _delta_backward(r, lead=(2, 70), gate="softplus", initial=True, layout="kv",
                                   beta_scale=2.0)),
    Case("gated_delta_rule_backward-channels", "gated_delta_rule_backward",
         lambda r: _delta_backward(r, lead=(11,), offsets=[0, 4, 4, 11], gate="bounded", channel=True)),
    Case("ssd_backward", "ssd_backward", lambda r: _ssd_backward(r, False)),
    Case("ssd_backward-log", "ssd_backward",
         lambda r: _ssd_backward(r, lead=(2, 70), log=True, initial=True, limits=(0.01, 2.0))),
    Case("ssd_backward-sequences", "ssd_backward",
         lambda r: _ssd_backward(r, lead=(11,), offsets=[0, 4, 4, 11], skip=False, bias=False,
                                 softplus=False)),
    Case("masked_softmax_backward", "masked_softmax_backward",
         lambda r: (r(2, 3, 5, 7), r(2, 3, 5, 7).softmax(-1), False, 0.5)),
    *[Case(f"layernorm{end}_backward", f"layernorm{end}_backward",
           lambda r: (r(6, 24), r(6, 24), r(24), r(6, 24), 1e-5)) for end in ("", "_frozen")],
    Case("rmsnorm_frozen_backward", "rmsnorm_frozen_backward",
         lambda r: (r(6, 24), r(6, 24), r(24), r(6, 24), None, 1e-6, "llama")),
    Case("moe_ffn_backward", "moe_ffn_backward",
         lambda r: _moe_backward(r, "silu", "halves", "after", 0, "", gates=True)),
    Case("moe_ffn_backward-input", "moe_ffn_backward",
         lambda r: _moe_backward(r, "gelu", "halves", "after", 0, "")),
    Case("moe_ffn_backward-oai", "moe_ffn_backward",
         lambda r: _moe_backward(r, "swiglu-oai", "interleaved", "after", 1, "", gates=True,
                                 packed=True, bias=True)),
    Case("moe_ffn_backward-before", "moe_ffn_backward",
         lambda r: _moe_backward(r, "silu", "halves", "before", 0, "", packed=True, bias=True)),
    Case("moe_ffn_frozen_backward", "moe_ffn_frozen_backward",
         lambda r: _moe_backward(r, "silu", "halves", "after", 0, "", gates=True)),
    Case("moe_ffn_frozen_backward-before", "moe_ffn_frozen_backward",
         lambda r: _moe_backward(r, "gelu", "interleaved", "before", 1, "", packed=True, bias=True)),
    Case("moe_ffn_backward_into", "moe_ffn_backward_into",
         lambda r: (*_moe_backward(r)[:9], r(6, 40, 24), r(6, 40, 24), r(6, 24, 40),
                    "silu", ""), updated=(9, 10, 11)),
    Case("moe_route_backward", "moe_route_backward",
         lambda r: (torch.randn(5, 3), r(5, 12), torch.rand(5, 12).argsort(-1)[:, :3].int(),
                    "softmax", "before", True, 2.0)),
    Case("moe_route_backward-sigmoid", "moe_route_backward",
         lambda r: (torch.randn(5, 3), r(5, 12), torch.rand(5, 12).argsort(-1)[:, :3].int(),
                    "sigmoid", "before", False, 1.0)),
    *[Case(f"bias_gelu{end}_backward", f"bias_gelu{end}_backward",
           lambda r: (r(6, 24), r(6, 24), r(24), "gelu")) for end in ("", "_frozen")],
    Case("act_mul_backward", "act_mul_backward",
         lambda r: (r(6, 24), r(6, 24), r(6, 24), "silu")),
    Case("act_mul_packed_backward", "act_mul_packed_backward",
         lambda r: (r(6, 24), r(6, 48), "silu")),
    *[Case(f"gated_rmsnorm{end}_backward", f"gated_rmsnorm{end}_backward",
           lambda r: (r(6, 24), r(6, 24), r(6, 24), r(24), 1e-6, "before", "silu", "t5", 2))
      for end in ("", "_frozen")],
    *[Case(f"causal_conv1d{end}_backward", f"causal_conv1d{end}_backward",
           lambda r: (r(2, 7, 24), r(2, 7, 24), r(24, 4), r(24), None, "silu")) for end in ("", "_frozen")],
    *[Case(f"causal_conv1d_states{end}_backward", f"causal_conv1d_states{end}_backward",
           lambda r: (r(2, 7, 24), r(2, 24, 4), r(2, 7, 24), r(24, 4), r(24), None, r(2, 24, 4), "silu", "channels"))
      for end in ("", "_frozen")],
    Case("rope_backward", "rope_backward",
         lambda r: (r(2, 5, 3, 16), None, None, None, "halves", 0, "base", NUMBERS)),
    Case("rope_qk_backward", "rope_qk_backward",
         lambda r: (r(2, 5, 3, 16), r(2, 5, 2, 16), None, None, None, "interleaved", 0, "base",
                    NUMBERS)),
]


def linear_fp8_arguments(kind, dtype=torch.float32, device="cpu") -> tuple:
    """A case of torch.ops.fftune.linear_fp8_<kind>, with sizes that blocks do not divide."""
    n, k = 144, 160
    scale = torch.rand(n) if kind == "token" else torch.rand(2, 2)
    made = [torch.randn(2, 3, k), torch.randn(n, k).to(torch.float8_e4m3fn), scale / 24, torch.randn(n),
            torch.randn(2, 3, n)]
    return tuple(t.to(dtype).to(device) if at in (0, 3, 4) else t.to(device) for at, t in enumerate(made))


def representative(cases: list[Case]) -> list:
    """The first and the last case of each op, for checks that take long: formats of packed weights differ in their
    codes and not in their declarations. The others are run with --all-cases."""
    def kind(case: Case) -> str:
        return re.sub("_(mxfp4|fp8|int8|nvfp4|row|32|64|128)\\b|(?<=packed_cached)_.*", "", case.op) \
            if "pack" in case.op else case.op

    of_kind: dict[str, list[Case]] = {}
    for case in cases:
        of_kind.setdefault(kind(case), []).append(case)
    chosen = list(itertools.chain(*((own[0], own[-1]) for own in of_kind.values())))
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.further) for case in cases]


def quantising_fp8_arguments(op, kind, dtype=torch.float32, device="cpu") -> tuple:
    """A case of torch.ops.fftune.<op>_fp8_<kind>, of ffn, moe_ffn or qkv, which quantises its tokens."""
    if op == "qkv":
        heads, kv_heads, dim, d = 4, 2, 48, 160
        n = (heads + 2 * kv_heads) * dim
        made = [torch.randn(2, 3, d), torch.randn(n, d).to(torch.float8_e4m3fn),
                (torch.rand(n) if kind == "token" else torch.rand(3, 2)) / 24, torch.randn(n), torch.randn(dim),
                torch.randn(dim), torch.arange(6, dtype=torch.int32).view(2, 3), None, heads, kv_heads, dim, 1e-6,
                "halves", 0, "base", NUMBERS]
        typed = (0, 3, 4, 5)
    elif op == "moe_ffn":
        x, ids, shares, *weights, _, gate, up, _, down, act, packing, shared, routing = moe_fp8_arguments(kind)
        made = [torch.randn(x.shape), ids, shares, *weights, gate, up, down, act, packing, shared, routing]
        typed = (0,)
    else:
        d, h = 160, 272
        weights = [torch.randn(n, k).to(torch.float8_e4m3fn) for n, k in ((h, d), (h, d), (d, h))]
        scales = [(torch.rand(len(w)) if kind == "token" else torch.rand(-(-w.shape[0] // 128), -(-w.shape[1] // 128)))
                  / 24 for w in weights]
        made = [torch.randn(2, 3, d), *weights, *scales, torch.randn(d), torch.randn(2, 3, d), "silu"]
        typed = (0, 7, 8)
    return tuple(t if not isinstance(t, Tensor) else t.to(device, dtype if at in typed else t.dtype)
                 for at, t in enumerate(made))


def fp8_arguments(block: bool, device="cpu") -> tuple:
    """A case of torch.ops.fftune.ffn_fp8, with sizes that blocks do not divide."""
    quantise, quantise_weight = reference.quantise, reference.quantise_weight
    d, h = 160, 272
    x = torch.randn(3, d)
    one = None if block else torch.tensor([0.02])
    x, x_scale = quantise(x, one)
    weights = [quantise_weight(torch.randn(n, k) * k**-0.5, block)
               for n, k in ((h, d), (h, d), (d, h))]
    hidden = None if block else torch.tensor([0.01])
    tensors = [x, *(w for w, _ in weights), x_scale, weights[0][1], weights[1][1], hidden,
               weights[2][1]]
    return (*(None if t is None else t.to(device) for t in tensors), "silu")

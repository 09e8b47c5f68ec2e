"""Layers whose states are entries of caches, as vLLM keeps them: parts of pages, in other orders and types."""
import importlib

import pytest
import torch

from fftune import Error, ops, reference
from fftune._layer_form import Choice
from fftune._ops.layer import delta_layers

D, H, HEADS, V_HEADS, DIM, V_DIM, WIDTH = 32, 48, 2, 4, 8, 16, 4
KEYS, VALUES = HEADS * DIM, V_HEADS * V_DIM
CHANNELS = 2 * KEYS + VALUES
ENTRIES = 7
OF_MIXER = dict(w_conv=(CHANNELS, WIDTH), A_log=(V_HEADS,), dt_bias=(V_HEADS,), mixer_norm=(V_DIM,), w_o=(D, VALUES))
FORMS = {"packed": dict(w_qkv=(CHANNELS, D), w_z=(VALUES, D), w_b=(V_HEADS, D), w_a=(V_HEADS, D)),
         "grouped": dict(w_qkvz=(CHANNELS + VALUES, D), w_ba=(2 * V_HEADS, D))}
NETWORK = dict(attn_norm=(D,), ffn_norm=(D,), w_gate=(H, D), w_up=(H, D), w_down=(D, H))
MIXTURE = dict(attn_norm=(D,), ffn_norm=(D,), w_router=(4, D), w_gate_up=(4, 2 * H, D), w_down=(4, D, H),
               w_shared_router=(1, D), w_shared_gate=(H, D), w_shared_up=(H, D), w_shared_down=(D, H))


def weights_of(shapes, dtype):
    return {name: (torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)).to(
        torch.float32 if name in ("A_log", "dt_bias") else dtype) for name, shape in shapes.items()}


def pages(dtype, states=torch.float32, order="entries", layout="vk", entries=WIDTH - 1, gap=64, count=ENTRIES):
    """The states of a layer: both are parts of one page."""
    begin = -(-CHANNELS * entries * dtype.itemsize // 16) * 16
    page = begin + VALUES * DIM * states.itemsize + gap
    memory = torch.zeros(count * page, dtype=torch.uint8)
    shape = (entries, CHANNELS) if order == "entries" else (CHANNELS, entries)
    conv = memory.view(dtype).as_strided((count, *shape), (page // dtype.itemsize, shape[1], 1))
    own = (V_DIM, DIM) if layout == "vk" else (DIM, V_DIM)
    cache = memory.view(states).as_strided((count, V_HEADS, *own), (page // states.itemsize, DIM * V_DIM, own[1], 1),
                                           begin // states.itemsize)
    for one in (conv, cache):
        one.copy_(torch.randn(one.shape) * 0.5)
    return conv, cache


def by_reference(monkeypatch, x, weights, states, *arguments, **named):
    """The result in float32, and the states behind it."""
    states = [tuple(t.to(torch.float32, copy=True).contiguous() for t in pair) for pair in states]
    with monkeypatch.context() as patched:
        patched.setattr(importlib.import_module("fftune._ops.layer"), "call", lambda op, *a: reference.layer(*a))
        y = delta_layers(x.float(), [{name: w.float() for name, w in one.items()} for one in weights], states,
                         *arguments, **named)
    return y, states


def expect_alike(mine, right, dtype):
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    assert (mine.double() - right.double()).norm() <= tolerance * right.double().norm()


OPTIONS = dict(heads=HEADS, v_heads=V_HEADS, convention="gemma", mixer_eps=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [
    dict(), dict(order="channels", layout="kv", entries=5), dict(states=torch.bfloat16, gap=0),
    dict(layout="kv", gap=16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("null, indices", [(0, [3, 0, 6]), (-1, [0, -1, 5])])
def test_numbers(monkeypatch, form, options, dtype, null, indices):
    torch.manual_seed(1)
    weights = [weights_of(NETWORK | OF_MIXER | FORMS[form], dtype) for _ in range(2)]
    states = [pages(dtype, **options) for _ in weights]
    named = OPTIONS | dict(null_index=null, state_layout=options.get("layout", "vk"))
    kept = [i for i in indices if i > null]
    seen, others = [indices.index(i) for i in kept], [i for i in range(ENTRIES) if i not in kept]
    indices = torch.tensor(indices, dtype=torch.int32)
    for tokens in (1, 2, 5):
        x = torch.randn(3, tokens, D).to(dtype)
        memory = [torch.tensor([], dtype=torch.uint8).set_(pair[0].untyped_storage()).view(ENTRIES, -1)
                  for pair in states]
        before = [one.clone() for one in memory]
        right, behind = by_reference(monkeypatch, x, weights, states, indices, **named)
        mine = delta_layers(x, weights, states, indices, **named)
        expect_alike(mine[seen], right[seen], dtype)
        for pair, own, old, now in zip(states, behind, before, memory):
            for mine_of, right_of in zip(pair, own):
                expect_alike(mine_of, right_of, torch.bfloat16 if mine_of.dtype is torch.bfloat16 else dtype)
            assert torch.equal(now[others], old[others]), "other sequences' pages"
            begin = pair[1].storage_offset() * pair[1].itemsize
            end = begin + VALUES * DIM * pair[1].itemsize
            of_conv = pair[0][0].numel() * pair[0].itemsize
            assert torch.equal(now[:, of_conv:begin], old[:, of_conv:begin]), "what is between states"
            assert torch.equal(now[:, end:], old[:, end:])


def test_a_mixture_beside_a_network(monkeypatch):
    torch.manual_seed(1)
    weights = [weights_of(MIXTURE | OF_MIXER | FORMS["grouped"], torch.float32)]
    states, indices = [pages(torch.float32)], torch.tensor([2, 4], dtype=torch.int32)
    named = OPTIONS | dict(null_index=0, state_layout="vk", choice=Choice(4, 2, renormalise=True))
    x = torch.randn(2, 1, D)
    right, behind = by_reference(monkeypatch, x, weights, states, indices, **named)
    expect_alike(delta_layers(x, weights, states, indices, **named), right, torch.float32)
    for mine, own in zip(states[0], behind[0]):
        expect_alike(mine, own, torch.float32)


def test_strides_are_of_the_plan(monkeypatch):
    """Caches of the same shapes, whose pages are longer."""
    torch.manual_seed(1)
    weights, indices = [weights_of(NETWORK | OF_MIXER | FORMS["packed"], torch.float32)], torch.tensor([2, 4]).int()
    named = OPTIONS | dict(null_index=0, state_layout="vk")
    x = torch.randn(2, 1, D)
    for gap in (0, 64, 128):
        states = [pages(torch.float32, gap=gap)]
        right, _ = by_reference(monkeypatch, x, weights, states, indices, **named)
        expect_alike(delta_layers(x, weights, states, indices, **named), right, torch.float32)


def test_what_layers_refuse():
    torch.manual_seed(1)
    weights = [weights_of(NETWORK | OF_MIXER | FORMS["packed"], torch.float32) for _ in range(2)]
    x, indices = torch.randn(2, 1, D), torch.tensor([2, 4], dtype=torch.int32)
    named = OPTIONS | dict(null_index=0, state_layout="vk")
    own = pages(torch.float32)
    for other in (pages(torch.float32, gap=128), pages(torch.float32, count=6),
                  (own[0], pages(torch.float32, states=torch.bfloat16)[1]), (own[0], own[1].mT.contiguous().mT)):
        with pytest.raises(Error, match="states of layer 1 are .* give contiguous ones, as far apart as"):
            delta_layers(x, weights, [own, other], indices, **named)
    with pytest.raises(Error, match="slots is torch.int64"):
        delta_layers(x, weights, [own, own], indices.long(), **named)
    with pytest.raises(Error, match="slots=1 is less than b=2"):
        delta_layers(x, weights, [pages(torch.float32, count=1)] * 2, indices, **named)


def test_gates_in_the_rows_of_q():
    """`layer` as Qwen3.5's attention has it: behind the rows of each head those of its gate."""
    torch.manual_seed(1)
    heads, dim = 4, 16
    shapes = NETWORK | dict(w_k=(2 * dim, D), w_v=(2 * dim, D), w_o=(D, heads * dim), q_norm=(dim,), k_norm=(dim,))
    weights = weights_of(shapes | dict(w_q=(heads * dim, D), w_g=(heads * dim, D)), torch.float32)
    both = torch.stack([weights[name].view(heads, dim, D) for name in ("w_q", "w_g")], 1).reshape(2 * heads * dim, D)
    rows = {name: w for name, w in weights.items() if name != "w_g"} | {"w_q": both}
    x, lengths = torch.randn(2, 1, D), torch.tensor([9, 5], dtype=torch.int32)
    caches = [torch.randn(2, 12, 2, dim).transpose(1, 2) for _ in "kv"]
    angles = torch.randn(16, dim)
    apart = [tuple(t.transpose(1, 2).clone().transpose(1, 2) for t in caches) for _ in "12"]
    y = ops.layer(x, [weights], [apart[0]], lengths, heads, 2, angles=angles)
    expect_alike(ops.layer(x, [rows], [apart[1]], lengths, heads, 2, angles=angles, gated_rows=True), y, torch.float32)

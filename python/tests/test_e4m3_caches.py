"""Caches of float8_e4m3fn with scales: qkv writes them, attention reads them, layers do both."""
import math

import pytest
import torch

import fftune
from fftune import ops, reference

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3}
E4M3 = torch.float8_e4m3fn


def stored(x, scale):
    """What a cache of e4m3 has of rows [..., heads, features]."""
    return (x.float() / scale[:, None]).clamp(-448, 448).to(E4M3)


def error(ours, theirs):
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).norm() / theirs.norm()).item()


def scales_of(heads):
    return (torch.rand(heads) + 0.5) / 16, (torch.rand(heads) + 0.5) / 16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("dim", [64, 20])
def test_attention(dtype, count, page, dim):
    q = torch.randn(3, 2, 6, dim, dtype=dtype)
    lengths = torch.tensor([40, 2, 17], dtype=torch.int32)
    k_scale, v_scale = scales_of(count)
    shape = (12, page, 2, dim) if page else (3, 40, 2, dim)
    k, v = (stored(torch.randn(shape), scale) for scale in (k_scale, v_scale))
    pages = torch.randperm(12).int()[:9].view(3, 3) if page else None
    options = dict(lengths=lengths, pages=pages, causal=True, return_lse=True, window=30)
    y, lse = ops.attention(q, k, v, k_scale=k_scale, v_scale=v_scale, **options)
    assert y.dtype == dtype and lse.dtype == torch.float32
    # The same numbers in a cache of f32.
    wide = [t.float() * scale[:, None] for t, scale in ((k, k_scale), (v, v_scale))]
    right, of_right = ops.attention(q.float(), *wide, **options)
    assert error(y, right) < TOLERANCE[dtype] and error(lse, of_right) < TOLERANCE[dtype]
    op = torch.ops.fftune.attention_e4m3_heads if count == 2 else torch.ops.fftune.attention_e4m3
    arguments = (q, k, v, k_scale, v_scale, pages, None, None, None, None, None, None, lengths, None, True, 30, 0.0,
                 0.0, True)
    assert error(op(*arguments)[0], getattr(reference, op.__name__)(*arguments)[0]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_qkv(dtype, count):
    x, w = torch.randn(7, 48, dtype=dtype), torch.randn(8 * 16, 48, dtype=dtype) / 7
    k_scale, v_scale = scales_of(count)
    k_cache, v_cache = (torch.zeros(2, 10, 2, 16).to(E4M3) for _ in range(2))
    slots = torch.tensor([3, 19, -1, 0, 7, 8, 11], dtype=torch.int32)
    positions = torch.arange(7, dtype=torch.int32) + 5
    options = dict(positions=positions, norms=(torch.rand(16, dtype=dtype), torch.rand(16, dtype=dtype)))
    q = ops.qkv(x, w, 4, 2, caches=(k_cache, v_cache), slots=slots, k_scale=k_scale, v_scale=v_scale, **options)
    right, k, v = ops.qkv(x.float(), w.float(), 4, 2, **options | {"norms": tuple(n.float() for n in options["norms"])})
    assert error(q, right) < TOLERANCE[dtype]
    for cache, rows, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        own = cache.flatten(0, 1)
        there = slots >= 0
        got = own[slots[there].long()].float()
        # A few of these round the other way.
        assert error(got, stored(rows[there], scale).float()) < (1e-2 if dtype == torch.float32 else 4e-2)
        assert (got - rows[there] / scale[:, None]).abs().max() <= 0.07 * got.abs().max()
        others = torch.ones(20, dtype=torch.bool)
        others[slots[there].long()] = False
        assert not own[others].float().any()


def test_qkv_saturates_and_keeps_nan():
    # k is x in all features, v its reverse.
    values = torch.tensor([0.0, -0.0, 1.0, 447.0, 448.0, 460.0, 465.0, -1e5, math.inf, -math.inf, math.nan, 1.0625,
                           1.1875, 2.0**-10, 2.0**-9, 3 * 2.0**-10])
    w = torch.cat((torch.eye(16), torch.eye(16), torch.eye(16).flip(0)))
    bias = torch.cat((torch.zeros(16), values, values.flip(0)))
    caches = [torch.zeros(1, 1, 16).to(E4M3) for _ in range(2)]
    ops.qkv(torch.zeros(1, 16), w, 1, 1, bias=bias, caches=tuple(caches), slots=torch.zeros(1, dtype=torch.int64),
            k_scale=torch.ones(1), v_scale=torch.ones(1))
    right = values.clamp(-448, 448).to(E4M3).float()
    for cache, expected in zip(caches, (right, right.flip(0))):
        assert torch.equal(cache.float().flatten().nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))


def layer_arguments(dtype, scales):
    d, h, heads, kv_heads, dim, layers = 48, 64, 4, 2, 16, 2

    def weights():
        def w(*shape):
            return (torch.randn(shape) / shape[-1]**0.5).to(dtype)
        return {"attn_norm": torch.ones(d, dtype=dtype), "ffn_norm": torch.ones(d, dtype=dtype),
                "w_q": w(heads * dim, d), "w_k": w(kv_heads * dim, d), "w_v": w(kv_heads * dim, d),
                "w_o": w(d, heads * dim), "w_gate": w(h, d), "w_up": w(h, d), "w_down": w(d, h),
                **dict(zip(("k_scale", "v_scale"), scales_of(scales)))}
    return [weights() for _ in range(layers)], torch.randn(2, 3, d, dtype=dtype), (heads, kv_heads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", [1, 2])
@pytest.mark.parametrize("paged", [False, True])
def test_layer(dtype, scales, paged):
    weights, x, heads = layer_arguments(dtype, scales)
    lengths = torch.tensor([20, 3], dtype=torch.int32)
    angles = torch.randn(32, 8).repeat(1, 2)
    pages = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32) if paged else None
    shape = (5, 16, 2, 16) if paged else (2, 32, 2, 16)

    def caches():
        torch.manual_seed(3)
        made = [[(torch.randn(shape) * 16).to(E4M3) for _ in range(2)] for _ in weights]
        return [tuple(t if paged else t.transpose(1, 2) for t in pair) for pair in made]

    own, others = caches(), caches()
    y = ops.layer(x, weights, own, lengths, *heads, angles=angles, pages=pages)
    with torch.no_grad():
        # By ops: new keys and values, then attention over the caches.
        z, places = x, lengths[:, None] - 3 + torch.arange(3, dtype=torch.int32)
        room = 32
        slots = (pages.gather(1, places.long() // 16) * 16 + places % 16 if paged else
                 torch.arange(2)[:, None] * room + places)
        for w, pair in zip(weights, others):
            in_order = pair if paged else tuple(t.transpose(1, 2) for t in pair)
            n = ops.rmsnorm(z, w["attn_norm"], eps=1e-6)
            of = {name: w[name] for name in ("k_scale", "v_scale")}
            q = ops.qkv(n, (w["w_q"], w["w_k"], w["w_v"]), *heads, positions=places, angles=angles, caches=in_order,
                        slots=slots, **of)
            a = ops.attention(q, *in_order, lengths=lengths, pages=pages, causal=True, **of)
            mid = z + ops.linear(a.flatten(2), w["w_o"])
            n = ops.rmsnorm(mid, w["ffn_norm"], eps=1e-6)
            z = mid + ops.linear(torch.nn.functional.silu(ops.linear(n, w["w_gate"])) * ops.linear(n, w["w_up"]),
                                 w["w_down"])
    assert error(y, z) < (1e-5 if dtype == torch.float32 else 2e-2)
    for mine, theirs in zip(own, others):
        for a, b in zip(mine, theirs):
            assert error(a.float(), b.float()) < (1e-3 if dtype == torch.float32 else 2e-2)
    assert ops.layer(x.to("meta"), [{n: t.to("meta") for n, t in w.items()} for w in weights],
                     [tuple(t.to("meta") for t in pair) for pair in own], lengths.to("meta"), *heads,
                     angles=angles.to("meta"), pages=None if pages is None else pages.to("meta")).shape == x.shape


@pytest.mark.parametrize("paged", [False, True])
def test_the_definition_of_layers(paged):
    weights, x, heads = layer_arguments(torch.float32, 2)
    lengths, angles = torch.tensor([20, 3], dtype=torch.int32), torch.randn(32, 8).repeat(1, 2)
    pages = torch.tensor([[4, 9], [0, 3]], dtype=torch.int32) if paged else None
    shape = (5, 16, 2, 16) if paged else (2, 32, 2, 16)
    made = [(torch.randn(shape) * 16).to(E4M3) for _ in range(4)]
    caches = [t.clone() if paged else t.clone().transpose(1, 2) for t in made]
    flat = [t.clone() if paged else t.clone().transpose(1, 2) for t in made]
    form, own, _ = ops_form(x, weights, list(zip(caches[::2], caches[1::2])), *heads, angles)
    places = lengths[:, None] - 3 + torch.arange(3, dtype=torch.int32)
    slots = torch.tensor([[65, 66, 67], [0, 1, 2]] if paged else [[17, 18, 19], [32, 33, 34]], dtype=torch.int32)
    arguments = (x, places, angles, slots, lengths, pages, own)
    y = torch.ops.fftune.layer(*arguments, caches, form)
    assert error(y, reference.layer(*arguments, flat, form)) < 1e-4
    for a, b in zip(caches, flat):
        assert error(a.float(), b.float()) < 1e-3


def ops_form(*arguments):
    from fftune._ops.layer import given_layers
    return given_layers(*arguments)


def test_wrong_arguments():
    q, k = torch.randn(1, 1, 2, 8), torch.zeros(1, 4, 2, 8).to(E4M3)
    one, two = torch.ones(1), torch.ones(2)
    for given, words in (((one, two), r"k_scale is \[1\], v_scale \[2\]"), ((one, None), "v_scale is None"),
                         ((None, None), "k_scale is None"), ((torch.ones(3), torch.ones(3)), "scale"),
                         ((one.double(), one), "float32")):
        with pytest.raises(fftune.Error, match=words):
            ops.attention(q, k, k, k_scale=given[0], v_scale=given[1])
    with pytest.raises(fftune.Error, match="float8_e4m3fn"):
        ops.attention(q, k.float(), k.float(), k_scale=one, v_scale=one)
    with pytest.raises(fftune.Error, match="no gradients"):
        ops.attention(q.requires_grad_(), k, k, k_scale=one, v_scale=one)
    w, x = torch.randn(4 * 8, 16), torch.randn(3, 16)
    slots = torch.zeros(3, dtype=torch.int32)
    caches = torch.zeros(5, 1, 8).to(E4M3), torch.zeros(5, 1, 8).to(E4M3)
    with pytest.raises(fftune.Error, match="without caches"):
        ops.qkv(x, w, 2, 1, k_scale=one, v_scale=one)
    with pytest.raises(fftune.Error, match="k_cache"):
        ops.qkv(x, w, 2, 1, caches=caches, slots=slots)
    with pytest.raises(fftune.Error, match="v_scale is None"):
        ops.qkv(x, w, 2, 1, caches=caches, slots=slots, k_scale=one)
    weights, x, heads = layer_arguments(torch.float32, 1)
    lengths, pair = torch.tensor([8, 3], dtype=torch.int32), torch.zeros(2, 8, 2, 16).transpose(1, 2)
    with pytest.raises(fftune.Error, match="a cache of layer 0 is torch.float32"):
        ops.layer(x, weights, [(pair, pair.clone())] * 2, lengths, *heads)
    with pytest.raises(fftune.Error, match="all of k_scale, v_scale"):
        ops.layer(x, [{n: t for n, t in w.items() if n != "v_scale"} for w in weights],
                  [(pair.to(E4M3), pair.to(E4M3))] * 2, lengths, *heads)


@pytest.mark.parametrize("paged", [False, True])
def test_decode(paged):
    from test_decode import DEVICE, model, state
    parts = model(paged=paged)
    wide = [[t.clone() for t in pair] for pair in parts["caches"]]
    small = [[stored(t, torch.full((1,), 1 / 16, device=DEVICE)) for t in pair] for pair in wide]
    for pair, codes in zip(wide, small):
        for t, c in zip(pair, codes):
            t.copy_(c.float() / 16)
    scales = {name: torch.full((1,), 1 / 16, device=DEVICE) for name in ("k_scale", "v_scale")}
    before = [[t.clone() for t in pair] for pair in small]
    _, logit = ops.decode(**state(), **parts | {
        "caches": small, "weights": [w | scales for w in parts["weights"]]})[:2]
    _, right = ops.decode(**state(), **parts | {"caches": wide})[:2]
    assert error(logit, right) < 3e-2
    for pair, old, other in zip(small, before, wide):
        for t, o, wider in zip(pair, old, other):
            assert not torch.equal(t.float(), o.float())
            assert error(t.float() / 16, wider) < 4e-2  # the new keys' rounding

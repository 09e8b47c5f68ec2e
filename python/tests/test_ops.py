"""Every custom op: values beside the references, gradients, and what torch.compile needs of it."""
import inspect
import math
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fftune
from cases import (BACKWARDS, CASES, fp8_arguments, linear_fp8_arguments, moe_fp8_arguments,
                   quantising_fp8_arguments, representative)
from fftune import ops, reference
from fftune._ops import attention as attention_op, indexer as indexer_op, mla as mla_op
from fftune._reference.rope import _rotated

DIFFERENTIABLE = [case for case in CASES if case.differentiable]
# PyTorch 2.6 cannot be told how close two results must be.
OPCHECK = ({"atol": 1e-4, "rtol": 1e-4}
           if "atol" in inspect.signature(torch.library.opcheck).parameters else {})
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3}


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=str)


def op_of(case):
    return getattr(torch.ops.fftune, case.op).default


def listed(result) -> list[Tensor]:
    if result is None:  # an op in place
        return []
    return list(result) if isinstance(result, (tuple, list)) else [result]


def error(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.double(), theirs.double()
    if torch.isinf(theirs).any():
        assert torch.equal(torch.isinf(ours), torch.isinf(theirs))
        ours, theirs = ours[~torch.isinf(ours)], theirs[~torch.isinf(theirs)]
    return ((ours - theirs).norm() / (theirs.norm() + 1e-30)).item()


def with_gradients(case, arguments):
    return tuple(a.detach().clone().requires_grad_()
                 if isinstance(a, Tensor) and a.is_floating_point() and i not in case.constants
                 else a for i, a in enumerate(arguments))


def leaves(arguments):
    return [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@each(CASES + BACKWARDS)
def test_values(case, dtype):
    arguments = case.arguments(dtype)
    own = tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)
    wide = tuple(a.double() if isinstance(a, Tensor) and a.dtype == dtype and dtype.is_floating_point
                 else a for a in arguments)
    ours = listed(op_of(case)(*own))
    theirs = listed(getattr(reference, case.op)(*(wide if "quantised" not in case.op else arguments)))
    ours, theirs = ([*results, *(given[i] for i in case.updated)]
                    for results, given in ((ours, own), (theirs, wide)))
    if case.op in ("masked_ffn_preact", "moe_ffn_preact"):  # whose gate and up are in other orders
        ours, theirs = ours[:1], theirs[:1]
    for got, right in zip(ours, theirs, strict=True):
        assert got.shape == right.shape and got.is_contiguous()
        assert error(got, right) < TOLERANCE[dtype]


@pytest.mark.parametrize("block", [False, True])
def test_fp8(block):
    arguments = fp8_arguments(block)
    got = torch.ops.fftune.ffn_fp8(*arguments)
    assert got.dtype == torch.bfloat16
    assert error(got, reference.ffn_fp8(*arguments)) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["token", "block"])
def test_linear_in_fp8(kind, dtype):
    arguments = linear_fp8_arguments(kind, dtype)
    name = f"linear_fp8_{kind}"
    got = getattr(torch.ops.fftune, name)(*arguments)
    assert got.dtype == dtype
    assert error(got, getattr(reference, name)(*arguments)) < 2e-2
    assert torch.equal(ops.linear_fp8(*arguments), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["token", "block"])
@pytest.mark.parametrize("op", ["ffn", "moe_ffn", "qkv"])
def test_ops_in_fp8_that_quantise_their_tokens(op, kind, dtype):
    arguments = quantising_fp8_arguments(op, kind, dtype)
    name = f"{op}_fp8_{kind}"
    got = getattr(torch.ops.fftune, name)(*arguments)
    for ours, right in zip(listed(got), listed(getattr(reference, name)(*arguments)), strict=True):
        assert ours.dtype == dtype and error(ours, right) < 2e-2
    if op == "ffn":
        x, *weights, gate, up, down, bias, residual, act = arguments
        assert torch.equal(ops.ffn_fp8(x, *weights, None, gate, up, down, bias=bias, residual=residual, act=act), got)
        with pytest.raises(fftune.Error, match="hidden_scale without x_scale"):
            ops.ffn_fp8(x, *weights, None, gate, up, down, gate)
        with pytest.raises(fftune.Error, match="bias or residual beside x_scale"):
            ops.ffn_fp8(x, *weights, gate, gate, up, down, bias=bias)
    elif op == "qkv":
        x, w, scale, bias, *norms, positions, _, heads, kv_heads = arguments[:10]
        again = ops.qkv(x, w, heads, kv_heads, bias=bias, norms=norms, positions=positions, factor=arguments[-1][1],
                        w_scale=scale)
        assert all(map(torch.equal, again, got))
        with pytest.raises(fftune.Error, match="w_scale goes with one dense w"):
            ops.qkv(x, (w, w, w), heads, kv_heads, w_scale=scale)
    else:
        x, ids, shares, *weights, gate, up, down, act, packing, shared, _ = arguments
        assert torch.equal(ops.moe_ffn_fp8(x, ids, shares, *weights, None, gate, up, down, act=act, shared=shared),
                           got)
        with pytest.raises(fftune.Error, match="hidden_scale without x_scale"):
            ops.moe_ffn_fp8(x, ids, shares, *weights, None, gate, up, down, gate)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "token", "block"])
def test_experts_in_fp8(kind, packed):
    arguments = moe_fp8_arguments(kind, packed)
    ours = torch.ops.fftune.moe_ffn_fp8(*arguments)
    assert ours.dtype == torch.bfloat16
    assert error(ours, reference.moe_ffn_fp8(*arguments)) < 2e-2
    x, ids, weights, w_gate, w_up, w_down, x_scale, gate_scale, up_scale, hidden, down_scale = \
        arguments[:11]
    again = ops.moe_ffn_fp8(x, ids, weights, w_gate, w_up, w_down, x_scale, gate_scale, up_scale,
                            down_scale, hidden, shared=1)
    assert torch.equal(again, ours)
    with pytest.raises(fftune.Error, match="w_down_scale"):
        ops.moe_ffn_fp8(x, ids, weights, w_gate, w_up, w_down, x_scale, gate_scale, up_scale,
                        down_scale[1:], hidden)


def test_what_moe_ffn_refuses():
    x, ids, weights, w_gate, w_up, w_down = CASES[
        [c.name for c in CASES].index("moe_ffn")].arguments()[:6]
    biases = torch.zeros(6, 80), torch.zeros(6, 24)
    with pytest.raises(fftune.Error, match="leave w_up out"):
        ops.moe_ffn(x, ids, weights, w_gate, w_up, w_down, biases=biases)
    both = torch.cat((w_gate, w_up), 1)
    with pytest.raises(fftune.Error, match="both products"):
        ops.moe_ffn(x, ids, weights, both, None, w_down, biases=(biases[0], None))
    with pytest.raises(fftune.Error, match="no packing"):
        ops.moe_ffn(x, ids, weights, both, None, w_down, packing="thirds")


@pytest.mark.parametrize("recompute", [False, True])
def test_experts_without_copies_have_the_gradients_of_those_with(recompute):
    x, ids, weights, w_gate, w_up, w_down = CASES[
        [c.name for c in CASES].index("moe_ffn")].arguments()[:6]
    apart = [t.requires_grad_() for t in (x, weights, w_gate, w_up, w_down)]
    both = torch.cat((w_gate, w_up), 1).detach().requires_grad_()
    seed = torch.randn_like(x)
    own = torch.autograd.grad(ops.moe_ffn(x, ids, weights, w_gate, w_up, w_down), apart, seed)
    dx, d_weights, d_both, d_down = torch.autograd.grad(
        ops.moe_ffn(x, ids, weights, both, None, w_down, recompute=recompute),
        (x, weights, both, w_down), seed)
    for mine, other in zip((dx, d_weights, d_both, d_down),
                           (*own[:2], torch.cat(own[2:4], 1), own[4])):
        assert error(mine, other) < 2e-6


@each(DIFFERENTIABLE)
def test_gradients(case):
    """Beside those of the reference in float64, through PyTorch's autograd."""
    arguments = with_gradients(case, case.arguments())
    wide = tuple(a.detach().double().requires_grad_() if isinstance(a, Tensor) and a.requires_grad
                 else a for a in arguments)
    ours = listed(op_of(case)(*arguments))[:case.outputs]
    theirs = listed(getattr(reference, case.op)(*wide))[:case.outputs]
    seeds = [torch.randn(t.shape) for t in ours]
    got = torch.autograd.grad(ours, leaves(arguments), seeds)
    right = torch.autograd.grad(theirs, leaves(wide), [s.double() for s in seeds])
    for mine, other in zip(got, right, strict=True):
        assert error(mine, other) < 2e-5


MOST = 48  # numbers of a tensor that are tried one by one


def moved(base: Tensor) -> tuple[Tensor, Callable]:
    """A few numbers, and the tensor as a function of them: some move an element each, the last one moves all
    along a random direction."""
    places = torch.randperm(base.numel())[:MOST]
    direction = torch.randn(base.numel()) / max(base.numel(), 1) ** 0.5
    numbers = torch.zeros(len(places) + 1, requires_grad=True)
    return numbers, lambda by: (base.flatten() + by[-1] * direction).index_add(0, places, by[:-1]).view_as(base)


def sampled(result: Tensor) -> Tensor:
    """Some elements, the same ones each time, and a random sum of all."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(result.numel(), generator=generator)[:MOST]
    weights = torch.randn(result.numel(), generator=generator) / max(result.numel(), 1) ** 0.5
    return torch.cat((result.flatten()[places], (result.flatten() * weights).sum()[None]))


@each(DIFFERENTIABLE)
def test_gradcheck(case):
    """By finite differences in float32, whose roundings set the step and the tolerance."""
    arguments = list(case.arguments())
    if "relu" in arguments:
        pytest.skip("its corner has no derivative")
    places = [i for i, a in enumerate(with_gradients(case, arguments)) if isinstance(a, Tensor) and a.requires_grad]
    numbers, functions = zip(*(moved(arguments[i].detach()) for i in places))

    def function(*by):
        for i, of, own in zip(places, functions, by):
            arguments[i] = of(own)
        return tuple(map(sampled, listed(op_of(case)(*arguments))[:case.outputs]))

    assert torch.autograd.gradcheck(function, numbers, eps=1e-2, atol=5e-3, rtol=1e-2)


def opcheck(case, **options):
    arguments = case.arguments()
    if case.differentiable and case in CASES:
        arguments = with_gradients(case, arguments)
    torch.library.opcheck(op_of(case), arguments, **OPCHECK, **options)


@each(representative(CASES + BACKWARDS))
def test_opcheck(case):
    opcheck(case)


@each(CASES + BACKWARDS)
def test_schemas_and_fakes(case):
    opcheck(case, test_utils=("test_schema", "test_faketensor"))


def test_opcheck_fp8():
    # The other tests of opcheck scale their inputs, for which PyTorch has no kernel in fp8.
    utils = "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.fftune.ffn_fp8.default, fp8_arguments(True), test_utils=utils)
    for kind in ("token", "block"):
        torch.library.opcheck(getattr(torch.ops.fftune, f"linear_fp8_{kind}").default,
                              linear_fp8_arguments(kind), test_utils=utils)
        for op in ("ffn", "moe_ffn", "qkv"):
            torch.library.opcheck(getattr(torch.ops.fftune, f"{op}_fp8_{kind}").default,
                                  quantising_fp8_arguments(op, kind), test_utils=utils)


def layer(x, norm, gate, up, down):
    y = ops.rmsnorm(x * 2, norm)
    q = ops.rope(y.view(*y.shape[:-1], 2, 12))
    return ops.ffn(q.flatten(-2), gate, up, down, residual=x).sin()


def layer_arguments(tokens=6):
    weights = torch.randn(40, 24) / 5, torch.randn(40, 24) / 5, torch.randn(24, 40) / 6
    return [t.requires_grad_() for t in (torch.randn(2, tokens, 24), torch.rand(24), *weights)]


def test_compile_has_no_graph_break_and_the_same_gradients():
    arguments = layer_arguments()
    compiled = torch.compile(layer, fullgraph=True)
    seed = torch.randn(2, 6, 24)
    for run in (compiled, layer):
        run(*arguments)
    ours = torch.autograd.grad(compiled(*arguments), arguments, seed)
    theirs = torch.autograd.grad(layer(*arguments), arguments, seed)
    for mine, other in zip(ours, theirs):
        assert error(mine, other) < 1e-5


def test_numbers_of_tokens_do_not_recompile():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for tokens in (6, 9, 17, 130):
            arguments = layer_arguments(tokens)
            assert error(compiled(*arguments), layer(*arguments)) < 1e-6
    assert counter.frame_count == 1


@pytest.mark.parametrize("recompute", [False, True])
def test_numbers_of_tokens_do_not_recompile_a_mixture(recompute):
    from torch._dynamo.testing import CompileCounterWithBackend

    layer = fftune.nn.MoE(16, 24, 4, 2, recompute=recompute)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    compiled(torch.randn(5, 16))
    count = counter.frame_count
    for tokens in (6, 9, 17):
        x = torch.randn(tokens, 16)
        mine, other = (torch.autograd.grad(each(x).sum(), list(layer.parameters()))
                       for each in (compiled, layer))
        for ours, theirs in zip(mine, other):
            assert error(ours, theirs) < 1e-5
    assert counter.frame_count == count


def test_fake_tensors_with_symbolic_sizes():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(5, 24), static_shapes=False)
    weights = [mode.from_tensor(w, static_shapes=True) for w in layer_arguments()[2:]]
    with mode:
        y = torch.ops.fftune.ffn(x, *weights, None, None, "silu")
    assert isinstance(y.shape[0], torch.SymInt) and y.shape[1] == 24


def test_autocast():
    x, norm, gate, up, down = layer_arguments()
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.ffn(x, gate, up, down)
        assert y.dtype == torch.bfloat16
        assert ops.linear(x, gate).dtype == torch.bfloat16
        for norms in (None, (norm[:8], norm[:8])):
            for t in ops.qkv(x, gate.bfloat16(), 3, 1, norms=norms, positions=torch.arange(12).view(2, 6)):
                assert t.dtype == torch.bfloat16 and t.requires_grad
        # Like PyTorch's own norms, this one leaves types alone.
        assert ops.rmsnorm(x, norm).dtype == torch.float32
        y.float().sum().backward()
    assert gate.grad.dtype == torch.float32 and gate.grad.abs().sum() > 0


def test_calls_without_gradients_are_seen_by_those_who_look():
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            seen.append(str(function))
            return function(*arguments, **options or {})

    class Special(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):
            seen.append(str(function))
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **options or {})

    seen = []
    x, w = torch.randn(6, 24), torch.rand(24)
    with torch.no_grad():
        right = ops.rmsnorm(x, w)
        with Seeing():
            ops.rmsnorm(x, w)
        assert seen == ["fftune.rmsnorm.default"]
        assert torch.equal(ops.rmsnorm(x.as_subclass(Special), w).as_subclass(Tensor), right)
        assert len(seen) == 2
        assert ops.rmsnorm(x.to("meta"), w.to("meta")).is_meta
        with FakeTensorMode() as mode:
            assert ops.rmsnorm(mode.from_tensor(x), mode.from_tensor(w)).shape == x.shape
        with torch.autograd.profiler.profile() as profile:
            ops.rmsnorm(x, w)
        assert any(event.name == "fftune::rmsnorm" for event in profile.function_events)
        traced = torch.fx.experimental.proxy_tensor.make_fx(
            lambda x, w: ops.rmsnorm(x, w))(x, w)
        assert "fftune.rmsnorm" in traced.code
        with torch.autocast("cpu", torch.bfloat16):
            assert ops.linear(x, torch.randn(5, 24)).dtype == torch.bfloat16


def test_autocast_of_a_block():
    arguments = layer_arguments()
    right = ops.ffn_block(arguments[0], None, *arguments[1:])
    for context in (torch.no_grad, torch.enable_grad):
        with context(), torch.autocast("cpu", torch.bfloat16):
            assert error(ops.ffn_block(arguments[0], None, *arguments[1:]), right) < 2e-2


def test_norm_with_a_weight_of_float32():
    x, w = torch.randn(6, 24).bfloat16(), torch.randn(24).requires_grad_()
    y = ops.rmsnorm(x, w, convention="t5")
    assert y.dtype == torch.bfloat16
    assert error(y, reference.rmsnorm(x.double(), w.double(), 1e-6, "t5")) < 8e-3
    y.sum().backward()
    assert w.grad.dtype == torch.float32


def test_inputs_that_are_not_contiguous():
    x = torch.randn(24, 10).T
    w = torch.randn(24, 40).T
    assert error(ops.linear(x, w), x.double() @ w.double().T) < 1e-6
    assert error(ops.rmsnorm(x[::2], torch.ones(24)),
                 reference.rmsnorm(x[::2].double(), torch.ones(24), 1e-6, "llama")) < 1e-6
    logits = torch.zeros(7, 3).T
    ops.ngram_block(torch.tensor([[1, 2, 1]] * 3), logits, 2)
    assert torch.isinf(logits[:, 2]).all() and logits[:, :2].eq(0).all()


def test_memory_with_the_other_sign():
    """The imaginary part of a conjugate is a view of memory that has the values negated."""
    made = lambda *shape: torch.complex(torch.zeros(shape), torch.randn(shape)).conj().imag
    x, w, bias, q = made(3, 8), made(6, 8), made(6), made(2, 5, 4, 8)
    assert x.is_neg() and q.is_neg()
    plain = lambda t: t.clone().contiguous()
    assert torch.equal(ops.linear(x, w, bias), ops.linear(plain(x), plain(w), plain(bias)))
    assert torch.equal(ops.rope(q), ops.rope(plain(q)))
    assert torch.equal(ops.attention(q, q, q), ops.attention(plain(q), plain(q), plain(q)))
    with pytest.raises(fftune.Error, match="scale: .* a view of negated memory: clone it"):
        ops.scale_(x, torch.ones(1))
    norm = made(8).requires_grad_()
    ops.rmsnorm(x, norm).sum().backward()
    other = plain(norm.detach()).requires_grad_()
    ops.rmsnorm(plain(x), other).sum().backward()
    assert torch.equal(norm.grad, other.grad)


def test_rope_takes_views():
    """Heads of a packed projection, in the two orders that models have."""
    packed = torch.randn(2, 6, 8, 16)
    q, k = packed[:, :, :4], packed[:, :, 4:6]
    plain = ops.rope(q.contiguous(), k.contiguous())
    for got, right in zip(ops.rope(q, k), plain):
        assert torch.equal(got, right)
    swapped = q.transpose(1, 2).contiguous().transpose(1, 2)  # in memory [batch, heads, tokens]
    assert torch.equal(ops.rope(swapped), plain[0])


def test_attention_beside_pytorchs():
    q, k, v = (torch.randn(2, 33, heads, 24, requires_grad=True) for heads in (6, 2, 2))
    ours = ops.attention(q, k, v, causal=True)
    swapped = (t.transpose(1, 2) for t in (q, k, v))
    theirs = F.scaled_dot_product_attention(*swapped, is_causal=True, enable_gqa=True)
    assert error(ours, theirs.transpose(1, 2)) < 1e-6
    seed = torch.randn_like(ours)
    right = torch.autograd.grad(theirs.transpose(1, 2), (q, k, v), seed)
    for mine, other in zip(torch.autograd.grad(ours, (q, k, v), seed), right):
        assert error(mine, other) < 1e-5


def test_attention_takes_parts_of_a_row(monkeypatch):
    qkv = torch.randn(2, 9, 8 * 16)
    q, k, v = (t.unflatten(-1, (-1, 16)) for t in qkv.split((64, 32, 32), -1))
    right = ops.attention(*(t.contiguous() for t in (q, k, v)), causal=True)
    monkeypatch.setattr(attention_op, "ready", None)  # which copies
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    assert torch.equal(ops.attention(q, k, v, causal=True), right)
    one = q[:, :1]
    assert error(ops.attention(one, k, v), reference.attention(
        one.double(), k.double(), v.double(), *(None,) * 9, False, 0, 0.0, 0.0, False)[0]) < 1e-6


def test_mla_is_attention_of_expanded_keys_and_values(monkeypatch):
    heads, nope, v_dim, rank, rope = 3, 8, 10, 16, 4
    kv_b = torch.randn(heads, nope + v_dim, rank, dtype=torch.float64)
    q = torch.randn(2, 3, heads, nope + rope, dtype=torch.float64)
    cache = torch.randn(2, 12, rank + rope + 4, dtype=torch.float64)[:, :9, :rank + rope]
    latent, k_rope = cache.split((rank, rope), -1)
    k, v = torch.einsum("bkr,hnr->bhkn", latent, kv_b).split((nope, v_dim), -1)
    k = torch.cat((k, k_rope[:, None].expand(-1, heads, -1, -1)), -1)
    scores = 0.3 * q.transpose(1, 2) @ k.transpose(2, 3)
    hidden = torch.arange(9) > torch.arange(3)[:, None] + 6
    right = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    q_latent = torch.einsum("bqhn,hnr->bqhr", q[..., :nope], kv_b[:, :nope]).float()
    monkeypatch.setattr(mla_op, "ready", None)  # which copies a cache that the kernels cannot read
    wide = torch.zeros(2, 12, rank + rope + 4)
    wide[:, :9, :rank + rope] = cache
    out, lse = ops.mla(q_latent, q[..., nope:].float(), wide[:, :9, :rank + rope], scale=0.3,
                       return_lse=True)
    assert error(torch.einsum("bqhr,hvr->bhqv", out.double(), kv_b[:, nope:]), right) < 1e-6
    assert error(lse, scores.masked_fill(hidden, -math.inf).logsumexp(-1)) < 1e-6
    with pytest.raises(fftune.Error, match="no gradients"):
        ops.mla(q_latent.requires_grad_(), None, torch.zeros(2, 9, rank))


def test_products_of_heads_read_views(monkeypatch):
    monkeypatch.setattr(mla_op, "ready", None)  # which copies
    heads, nope, v_dim, rank, rope = 3, 8, 10, 16, 4
    kv_b, q = torch.randn(heads, nope + v_dim, rank), torch.randn(2, 5, heads, nope + rope)
    latent = ops.head_linear(q[..., :nope], kv_b[:, :nope], transposed=True)
    assert error(latent, torch.einsum("bqhn,hnr->bqhr", q[..., :nope].double(), kv_b[:, :nope].double())) < 1e-6
    out = ops.head_linear(latent, kv_b[:, nope:])
    assert error(out, torch.einsum("bqhr,hvr->bqhv", latent.double(), kv_b[:, nope:].double())) < 1e-6
    with pytest.raises(fftune.Error, match="give \\[..., heads, k\\]"):
        ops.head_linear(latent, kv_b[:2])
    with pytest.raises(fftune.Error, match="no gradients"):
        ops.head_linear(latent.requires_grad_(), kv_b)


def test_indexer_chooses_the_keys_of_the_highest_scores():
    q, weights, k = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 4), torch.randn(2, 9, 16)
    ids = ops.indexer(q, weights, k, top=5)
    # As transformers' DeepSeek-V3.2 does, for a prompt.
    scores = torch.matmul(weights.unsqueeze(-2), torch.relu(q @ k.mT.unsqueeze(1) * 16 ** -0.5)).squeeze(-2)
    scores.masked_fill_(torch.ones(9, 9, dtype=torch.bool).triu(1), -math.inf)
    mask = torch.full_like(scores, -math.inf).scatter(-1, scores.topk(5).indices, 0) + scores.clamp(max=0)
    for own, right in zip(ids.flatten(0, 1), mask.flatten(0, 1)):
        chosen = own[own >= 0]
        assert chosen.tolist() == (right > -math.inf).nonzero().flatten().tolist()
        assert (own[len(chosen):] == -1).all()
    assert ops.indexer(q, weights, k).shape == (2, 9, 2048)
    with pytest.raises(fftune.Error, match="give \\[batch, keys, 16\\]"):
        ops.indexer(q, weights, k[..., :8])
    with pytest.raises(fftune.Error, match="\\[batch, queries, heads\\]"):
        ops.indexer(q, weights[:, :1], k)
    with pytest.raises(fftune.Error, match="top is 0"):
        ops.indexer(q, weights, k, top=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_indexer_reads_keys_of_e4m3(dtype):
    q, weights, k = torch.randn(2, 3, 4, 16, dtype=dtype), torch.randn(2, 3, 4), torch.randn(2, 30, 16)
    k, k_scale, lengths = (64 * k).to(torch.float8_e4m3fn), torch.rand(2, 30), torch.tensor([30, 7])
    ids = ops.indexer(q, weights, k, top=6, lengths=lengths, k_scale=k_scale)
    assert torch.equal(ids, reference.indexer_e4m3(q, weights, k, k_scale, None, lengths, 6))
    assert not torch.equal(ids, ops.indexer(q, weights, k, top=6, lengths=lengths, k_scale=torch.ones(2, 30)))
    for other in (torch.float64, torch.bfloat16):
        wide = k_scale.to(other).float()
        assert torch.equal(ops.indexer(q, weights, k, top=6, lengths=lengths, k_scale=k_scale.to(other)),
                           reference.indexer_e4m3(q, weights, k, wide, None, lengths, 6))
    compiled = torch.compile(lambda *a: ops.indexer(*a, top=6, lengths=lengths, k_scale=k_scale), backend="eager",
                             fullgraph=True)
    assert torch.equal(compiled(q, weights, k), ids)
    with pytest.raises(fftune.Error, match="give k_scale"):
        ops.indexer(q, weights, k)
    with pytest.raises(fftune.Error, match="k_scale"):
        ops.indexer(q, weights, k, k_scale=k_scale[:, :5])


def test_indexer_reads_vllms_cache(monkeypatch):
    """Pages of 64 keys of 128 features and then their scales, 132 bytes a key."""
    pages = torch.zeros(5, 64 * 132, dtype=torch.uint8)
    k = pages[:, :64 * 128].view(torch.float8_e4m3fn).unflatten(1, (64, 128))
    k_scale = pages[:, 64 * 128:].view(torch.float32)
    k.copy_((16 * torch.randn(5, 64, 128)).to(k.dtype))
    k_scale.copy_(torch.rand(5, 64))
    q, weights, table = torch.randn(2, 1, 8, 128), torch.randn(2, 1, 8), torch.tensor([[4, 0, 1], [2, 3, 0]])
    lengths = torch.tensor([150, 70])
    monkeypatch.setattr(indexer_op, "ready", None)  # which copies
    ids = ops.indexer(q, weights, k, top=20, pages=table, lengths=lengths, k_scale=k_scale)
    assert torch.equal(ids, reference.indexer_e4m3(q, weights, k, k_scale, table, lengths, 20))


@pytest.mark.parametrize("name", ["gated_delta_rule", "ssd"])
def test_references_take_no_sequences(name):
    x, of_heads = torch.randn(0, 3, 2, 8), torch.randn(0, 3, 2)
    arguments = ((x, x, x, of_heads, None, None, None, of_heads, None, None, None, None, "log", "head", "l2", 0.0, 1.0,
                  -5.0) if name == "gated_delta_rule" else
                 (x, of_heads, torch.randn(2), None, x, x, None, None, None, None, None, True, 0.0, 0.0))
    ours = getattr(torch.ops.fftune, name)(*arguments, "f32", True)
    theirs = getattr(reference, name)(*arguments, "f32", True)
    assert [t.shape for t in ours] == [t.shape for t in theirs] == [(0, 3, 2, 8), (0, 2, 8, 8)]


def test_padding_of_a_convolution_is_that_of_its_reference():
    """Indices, offsets and numbers of tokens out of range."""
    x, w, state, indices = torch.randn(9, 8), torch.randn(8, 4), torch.randn(4, 5, 8), torch.tensor([4, -1, 1])
    accepted, offsets = torch.tensor([2, 1, 9]), torch.tensor([0, 2, 4, 20])
    ours, theirs = state.clone(), state.clone()
    y = ops.causal_conv1d_update(x, w, state=ours, indices=indices, offsets=offsets, accepted=accepted)
    right = reference.causal_conv1d_update(x, w, None, offsets, indices, None, accepted, theirs, "none", "entries", 0)
    assert error(y, right) < 1e-6 and error(ours, theirs) < 1e-6
    assert torch.equal(ours[[0, 2, 3]], state[[0, 2, 3]]) and not y[:4].any() and y[4:].all()


def test_states_of_a_convolution_hold_the_tokens_of_drafts():
    x, w = torch.randn(2, 3, 8), torch.randn(8, 4)
    for order, state in (("entries", torch.randn(2, 4, 8)), ("channels", torch.randn(2, 8, 4))):
        with pytest.raises(fftune.Error, match="state has 4 entries: accepted asks for 5"):
            ops.causal_conv1d_update(x, w, state=state, accepted=torch.tensor([1, 2]), state_order=order)


def test_mla_rope_writes_rows_of_the_cache_that_exist():
    q, kv, norm = torch.randn(3, 2, 12), torch.randn(3, 20), torch.rand(16)
    cache = torch.zeros(4, 20)
    out = ops.mla_rope(q, kv, norm, cache, torch.tensor([2, -1, 4]), rotation="none", eps=1e-5)
    assert torch.equal(out, q[..., 8:])
    right = torch.zeros(4, 20)
    right[2] = torch.cat((reference.rmsnorm(kv[0, :16], norm, 1e-5, "t5"), kv[0, 16:]))
    assert error(cache, right) < 1e-6
    with pytest.raises(fftune.Error, match="positions are given with a rotation"):
        ops.mla_rope(q, kv, norm, cache, torch.tensor([0, 1, 2]))
    with pytest.raises(fftune.Error, match="nope \\+ rope"):
        ops.mla_rope(q[..., :4], kv, norm, cache, torch.tensor([0, 1, 2]), rotation="none")


def test_a_packed_mask_says_what_the_mask_says():
    q, k, v = (torch.randn(2, 70, 2, 16) for _ in range(3))
    mask = torch.rand(2, 1, 70, 70) < 0.5
    mask[:, :, :64, :64] = False
    packed = ops.pack_mask(mask)
    assert packed[1][0, 0].tolist() == [[0, 2], [2, 2]]
    assert torch.equal(ops.attention(q, k, v, packed), ops.attention(q, k, v, mask))


@pytest.mark.parametrize(
    "shape", ((1, 1, 9, 11), (1, 4, 9, 11), (3, 1, 1, 11), (9, 11), (1, 11), (1, 9, 1)), ids=str)
def test_masks_are_broadcast_as_pytorchs(shape):
    q, k, v = (torch.randn(3, tokens, heads, 8, requires_grad=True)
               for tokens, heads in ((9, 4), (11, 2), (11, 2)))
    mask = torch.arange(math.prod(shape)).reshape(shape) % 3 != 1
    bias = torch.randn(shape)
    swapped = [t.transpose(1, 2) for t in (q, k, v)]
    for given in {"mask": mask}, {"bias": bias}:
        ours = ops.attention(q, k, v, **given)
        theirs = F.scaled_dot_product_attention(
            *swapped, attn_mask=next(iter(given.values())), enable_gqa=True).transpose(1, 2)
        seen = ~theirs.isnan()  # a query without keys has zeros in ours
        assert error(ours * seen, theirs.where(seen, torch.zeros(()))) < 1e-6
    scores = torch.randn(3, 4, 9, 11)
    hidden = scores.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0)
    assert error(ops.masked_softmax(scores, mask), hidden) < 1e-6
    ops.attention(q, k, v, mask).sum().backward()
    own, full = v.grad.clone(), mask.expand(3, mask.shape[-3] if mask.dim() > 2 else 1, 9, 11)
    v.grad = None
    ops.attention(q, k, v, full.contiguous()).sum().backward()
    assert torch.equal(own, v.grad) and own.any()


@pytest.mark.parametrize("keys", (1, 33, 64, 70, 128, 129, 200))
def test_a_packed_mask_has_no_bits_behind_its_keys(keys):
    for mask in torch.rand(1, 2, 65, keys) < 0.5, torch.ones(1, 2, 65, keys, dtype=torch.bool):
        for own, right in zip(ops.pack_mask(mask), reference.pack_mask(mask)):
            assert torch.equal(own, right)


def test_no_tokens():
    x = torch.randn(0, 24, requires_grad=True)
    _, _, gate, up, down = layer_arguments()
    y = ops.ffn(x, gate, up, down)
    assert y.shape == (0, 24)
    y.sum().backward()
    assert gate.grad.eq(0).all() and x.grad.shape == x.shape


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", ["ssd", "gated_delta_rule", "gated_delta_rule kv", "causal_conv1d"])
def test_states_of_no_tokens_stay(op, packed):
    lead, offsets = ((0,), torch.zeros(3, dtype=torch.int32)) if packed else ((2, 0), None)
    heads, wide = torch.zeros(*lead, 2, 3), torch.zeros(*lead, 2, 4)
    state = torch.randn(2, 2, 3, 4)
    if op == "ssd":
        run = lambda **more: ops.ssd(heads, heads[..., 0], -torch.ones(2), wide, wide, **more)
    elif op == "causal_conv1d":
        state = torch.randn(2, 3, 6)
        run = lambda initial_state, return_state, offsets: ops.causal_conv1d(
            wide[..., 0, :].repeat(*[1] * len(lead), 2)[..., :6], torch.randn(6, 4), initial=initial_state, final=return_state,
            offsets=offsets)
    else:
        layout = "kv" if op.endswith("kv") else "vk"
        state = state.mT.contiguous() if layout == "kv" else state
        run = lambda **more: ops.gated_delta_rule(wide, wide, heads, heads[..., 0], heads[..., 0], state_layout=layout, **more)
    begins = state.clone().requires_grad_()
    out, final = run(initial_state=begins, return_state=True, offsets=offsets)
    assert out.numel() == 0 and torch.equal(final, state)
    final.sum().backward()
    assert begins.grad.eq(1).all()
    if op != "causal_conv1d":
        counts = torch.tensor([True, False])
        _, final = run(initial_state=state, has_state=counts, return_state=True, offsets=offsets)
        assert torch.equal(final, state * counts[:, None, None, None])


@pytest.mark.parametrize("compiled", [False, True])
def test_an_op_without_a_gradient_says_so(compiled):
    """PyTorch would leave it out with a warning, and the rest of a model would be trained."""
    x, w = torch.randn(3, 8), torch.randn(6, 8, requires_grad=True)
    run = torch.compile(ops.head_logits, backend="aot_eager") if compiled else ops.head_logits
    logits = run(x, w)
    assert torch.equal(logits.detach(), ops.head_logits(x, w.detach())) and logits.requires_grad
    with pytest.raises(fftune.Error, match="head: it has no gradient"):
        (logits.sum() + w.sum()).backward()
    ids, logit = ops.head(x, w)
    assert not ids.requires_grad and logit.requires_grad
    with torch.no_grad():
        assert not run(x, w).requires_grad


def test_ops_that_write_in_place_take_nothing_that_wants_a_gradient():
    for x in torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True) * 2:
        before = x.detach().clone()
        with pytest.raises(fftune.Error, match="scale: it writes in place and has no gradient"):
            ops.scale_(x, torch.tensor([2.0]))
        with pytest.raises(fftune.Error, match="ngram-block: it writes in place"):
            ops.ngram_block(torch.tensor([[1, 2, 1]] * 3), x, 2)
        assert torch.equal(x.detach(), before)
        with torch.no_grad():
            ops.scale_(x, torch.tensor([2.0]))
        assert torch.equal(x.detach(), 2 * before)


def test_class_weights_have_no_gradient():
    x, labels = torch.randn(3, 8, requires_grad=True), torch.tensor([0, 3, 7])
    weights = torch.rand(8, requires_grad=True)
    with pytest.raises(fftune.Error, match="class_weights has no gradient: detach it"):
        ops.cross_entropy(x, labels, class_weights=weights)
    with pytest.raises(fftune.Error, match="items has no gradient: detach it"):
        ops.linear_cross_entropy(x, torch.randn(9, 8), labels, items=torch.tensor(3.0, requires_grad=True))
    ops.cross_entropy(x, labels, class_weights=weights.detach()).backward()


def test_gradients_are_added_where_they_are():
    x, _, gate, up, down = (t.detach() for t in layer_arguments())
    sums = [torch.zeros_like(w) for w in (gate, up, down)]
    dy = torch.randn(2, 6, 24)
    right = ops.ffn_backward(dy, x, None, None, gate, up, down)
    for _ in range(2):
        dx, *given = ops.ffn_backward(dy, x, None, None, gate, up, down, into=sums)
    assert all(a is b for a, b in zip(given, sums)) and error(dx, right[0]) < 1e-6
    for total, once in zip(sums, right[1:]):
        assert error(total, 2 * once) < 1e-6
    ops.ffn_backward(dy[:0], x[:0], None, None, gate, up, down, into=sums)  # no tokens
    assert error(sums[0], 2 * right[1]) < 1e-6
    with pytest.raises(fftune.Error, match="contiguous"):
        ops.linear_backward(torch.randn(6, 40), torch.randn(6, 24), gate,
                            into=[torch.zeros(24, 40).T])
    with pytest.raises(fftune.Error, match="holds 1 values, not 2"):
        ops.linear_backward(torch.randn(6, 40), torch.randn(6, 24), gate, bias=True,
                            into=[torch.zeros(40, 24)])


def test_saved_rstd_has_the_same_gradients():
    x, w = torch.randn(6, 24, requires_grad=True), torch.rand(24, requires_grad=True)
    results = []
    for save in (False, True):
        y, total = ops.add_rmsnorm(x, x * 2, w, save_rstd=save)
        y = ops.rmsnorm(y + total, w, save_rstd=save)
        results.append(torch.autograd.grad(y.square().sum(), (x, w)))
        assert ("rstd" in y.grad_fn.name()) == save
    for one, other in zip(*results):
        assert error(one, other) < 1e-5


def test_plans_are_bounded_and_those_in_use_are_kept(monkeypatch):
    from fftune import _run

    _run.forget_plans()
    monkeypatch.setattr(_run, "PLANS", 8)
    made = []

    class Counted(_run.Plan):
        def __init__(self, device, problem):
            made.append(problem["m"])
            super().__init__(device, problem)

    monkeypatch.setattr(_run, "Plan", Counted)
    w = torch.rand(8)
    for m in range(2, 40):
        ops.rmsnorm(torch.randn(1, 8), w)
        ops.rmsnorm(torch.randn(m, 8), w)
        assert len(_run._plans) + len(_run._older) <= 8
    assert made == [1, *range(2, 40)]
    _run.forget_plans()


def test_frozen_weights_get_no_gradient():
    x, _, gate, up, down = (t.detach() for t in layer_arguments())
    x.requires_grad_()
    ours, = torch.autograd.grad(ops.ffn(x, gate, up, down).sum(), x)
    theirs, = torch.autograd.grad(reference.ffn(x, gate, up, down, None, None, "silu").sum(), x)
    assert error(ours, theirs) < 1e-5


def test_recompute_has_the_same_gradients():
    arguments = layer_arguments()
    results = []
    for recompute in (False, True):
        y = ops.ffn_block(arguments[0], arguments[0] * 2, *arguments[1:], recompute=recompute)
        results.append(torch.autograd.grad(y.square().sum(), arguments))
    for one, other in zip(*results):
        assert error(one, other) < 1e-5


def test_threads():
    arguments = [t.detach() for t in layer_arguments(33)]
    right = layer(*arguments)
    wrong = []

    def work():
        for _ in range(20):
            if not torch.equal(layer(*arguments), right):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("call, words", [
    (lambda: ops.rmsnorm(torch.randn(2, 8), torch.randn(9)), r"w is \[9\], not \[8\]"),
    (lambda: ops.linear(torch.randn(2, 8), torch.randn(4, 8).bfloat16()), "x is torch.float32"),
    (lambda: ops.rmsnorm(torch.randn(2, 8).half(), torch.randn(8).half()), "fp16"),
    (lambda: ops.rmsnorm(torch.randn(2, 8).double(), torch.randn(8).double()), "torch.float64"),
    (lambda: ops.ffn(*[torch.ones(8, 8).int()] * 4), "torch.int32"),
    (lambda: ops.rmsnorm(torch.ones(2, 8).int(), torch.ones(8)), "x is torch.int32"),
    (lambda: ops.bias_gelu(torch.ones(2, 8).int(), torch.ones(8)), "x is torch.int32"),
    (lambda: fftune.patch("llama"), "patch: str is not a torch.nn.Module"),
    (lambda: ops.ffn(torch.randn(2, 8), *[torch.randn(8, 8)] * 3, act="swish"), "swish"),
    (lambda: ops.rope(torch.randn(2, 8)), "batch, tokens, heads, features"),
    (lambda: ops.rope(torch.randn(1, 2, 3, 8), rule="ntk"), "no rule 'ntk'"),
    (lambda: ops.masked_linear(torch.randn(2, 8), torch.ones(2), *[torch.randn(4, 8)] * 2),
     "mask is torch.float32"),
    (lambda: ops.attention(*[torch.randn(2, 3, 4, 16)] * 3, torch.rand(2, 1, 3, 3)),
     "mask is torch.float32.*bias"),
    (lambda: ops.attention(*[torch.randn(2, 3, 4, 16)] * 3, torch.ones(2, 1, 3, 3).bool(),
                           causal=True), "causal itself"),
    (lambda: ops.attention(torch.randn(2, 3, 4, 16), *[torch.randn(2, 3, 4, 8)] * 2),
     "as many features"),
    (lambda: ops.attention(*[torch.randn(2, 3, 4, 16)] * 3, bias=torch.randn(
        1, 4, 3, 3, requires_grad=True)), "no gradient"),
    (lambda: ops.rmsnorm(torch.randn(2, 70000), torch.randn(70000)), "65536"),
])
def test_errors_are_one_exception_with_one_line(call, words):
    with pytest.raises(fftune.Error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_disabled_ops_run_their_references(run_python):
    assert run_python("""
        import torch, fftune
        from fftune import _run
        x, w = torch.randn(3, 24, dtype=torch.float64, requires_grad=True), torch.ones(24).double()
        y = fftune.ops.rmsnorm(x, w)  # the kernels have no float64
        assert torch.autograd.gradcheck(lambda x: fftune.ops.rmsnorm(x, w), (x,))
        assert not _run._plans
        print("good")
    """, FFTUNE_DISABLE="1") == "good"


def test_import_of_the_package_leaves_pytorch_alone(run_python):
    assert run_python("""
        import sys, fftune
        assert "torch" not in sys.modules
        print(fftune.__version__.count("."))
    """) == "2"


@pytest.mark.parametrize("packed", [False, True])
def test_qkv_has_gradients_by_parts(packed):
    x, *weights = torch.randn(2, 5, 24), *(torch.randn(n, 24) for n in (64, 32, 32))
    norms, positions = (torch.rand(16), torch.rand(16)), torch.randint(0, 9, (2, 5))
    options = dict(norms=norms, positions=positions, rule="llama3", context=64.0, factor=4.0)
    w = torch.cat(weights) if packed else tuple(weights)
    right = ops.qkv(x, w, 4, 2, **options)
    x.requires_grad_()
    ours = ops.qkv(x, w, 4, 2, **options)
    for mine, other in zip(ours, right):
        assert mine.requires_grad and error(mine, other) < 2e-6
    wide = [t.detach().double() for t in (x, *weights)]
    wide[0].requires_grad_()
    parts = (F.linear(wide[0], weight).unflatten(-1, (-1, 16)) for weight in wide[1:])
    exact = [reference.rmsnorm(t, n.double(), 1e-6, "t5") for t, n in zip(parts, norms)]
    angle, _ = reference.angles_at(positions, None, "halves", 16, "llama3",
                                   [10000.0, 4.0, 64.0, 1.0, 4.0, 32.0, 1.0, 0.0])
    exact = [_rotated(t, angle.unsqueeze(-2), 1.0, "halves", False) for t in exact]
    seeds = [torch.randn(t.shape) for t in exact]
    mine, = torch.autograd.grad(ours[:2], x, seeds)
    other, = torch.autograd.grad(exact, wide[0], [s.double() for s in seeds])
    assert error(mine, other) < 2e-5
    with pytest.raises(fftune.Error, match="no gradient"):
        ops.qkv(x, w, 4, 2, caches=(torch.zeros(10, 2, 16), torch.zeros(10, 2, 16)),
                slots=torch.arange(10).view(2, 5))


def test_a_choice_of_experts_has_gradients_to_the_router():
    x, router = torch.randn(5, 24, requires_grad=True), torch.randn(6, 24, requires_grad=True)
    experts = [torch.randn(6, *shape) / 5 for shape in ((80, 24), (24, 40))]

    def mixture(route, experts_of, dtype):
        own_x, own_router, gate_up, down = (t.to(dtype) for t in (x, router, *experts))
        ids, weights = route(own_x @ own_router.T)
        return experts_of(own_x, ids, weights, gate_up, down)

    ours = mixture(lambda t: ops.moe_route(t, 2, renormalise=True),
                   lambda x, ids, weights, gate_up, down:
                   ops.moe_ffn(x, ids, weights, gate_up, None, down), torch.float32)
    exact = mixture(lambda t: reference.moe_route(t, None, 2, "softmax", "before", 0, 0, "max",
                                                  True, 1.0)[::-1],
                    lambda x, ids, weights, gate_up, down: reference.moe_ffn(
                        x, ids, weights, gate_up, None, down, None, None, "silu", "halves", "after",
                        0, ""), torch.float64)
    assert error(ours, exact) < 1e-6
    seed = torch.randn(5, 24)
    for mine, other in zip(torch.autograd.grad(ours, (x, router), seed),
                           torch.autograd.grad(exact, (x, router), seed.double())):
        assert error(mine, other) < 2e-5


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("options", [
    {}, {"positions": torch.arange(5)}, {"norms": (torch.rand(16), torch.rand(16))},
    {"norms": (torch.rand(16), torch.rand(16)), "positions": torch.arange(5), "rotary": 8}])
def test_results_of_qkv_lie_alike_with_and_without_gradients(parts, options):
    x, w = torch.randn(2, 5, 32), torch.randn(8 * 16, 32)
    if "positions" in options:
        options = {**options, "positions": options["positions"].expand(2, 5)}
    given = tuple(t.contiguous() for t in w.split((64, 32, 32))) if parts else w
    plain = ops.qkv(x, given, 4, 2, **options)
    derived = ops.qkv(x.requires_grad_(), given, 4, 2, **options)
    for ours, theirs in zip(derived, plain, strict=True):
        assert ours.requires_grad and ours.is_contiguous() and ours.stride() == theirs.stride()
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("order, score", [("after", "softmax"), ("before", "softmax"), ("before", "sigmoid")])
def test_the_choice_of_a_router_is_by_scores_and_they_are_logits_where_the_softmax_is_behind_it(order, score):
    """As the docstring says; a bias of the size of logits tells the two apart."""
    logits, bias = torch.randn(64, 12) * 3, torch.randn(12)
    scores = logits if order == "after" else logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    ids, weights = ops.moe_route(logits, 3, bias=bias, score=score, order=order)
    right = (scores + bias).topk(3).indices
    assert torch.equal(ids.long(), right)
    own = scores.gather(-1, right)
    assert torch.allclose(weights, own.softmax(-1) if order == "after" else own, atol=1e-6)
    ids, _ = ops.moe_route(logits, 3, groups=4, top_groups=2, group_score="top2", score=score, order=order)
    best = scores.view(64, 4, 3).topk(2).values.sum(-1).topk(2).indices
    inside = torch.zeros(64, 4, dtype=torch.bool).scatter(-1, best, True).repeat_interleave(3, -1)
    assert torch.equal(ids.long(), scores.masked_fill(~inside, -torch.inf).topk(3).indices)


@pytest.mark.parametrize("op", ["sample", "head"])
def test_tiny_temperatures_choose_the_best_id(op):
    for row in ([1.0, 2, 3, 8], [-8.0, -3, -2, -1], [1e38, 2e38, 0, 3e38]):
        for temperature in (1e-45, 1e-39, 1e-38, 1e-30, 1e-6):
            draw = dict(temperature=torch.full((9,), temperature), seeds=torch.arange(9),
                        steps=torch.zeros(9, dtype=torch.int32))
            for filters in ({}, {"top_p": torch.full((9,), 0.9), "min_p": torch.full((9,), 0.1)}):
                logits = torch.tensor(row).expand(9, 4).contiguous()
                ids = (ops.sample(logits, **draw, **filters) if op == "sample" else
                       ops.head(logits[:, :1].contiguous(), torch.tensor(row)[:, None] / row[0], **draw, **filters))[0]
                assert ids.tolist() == [3] * 9, (row, temperature, filters)

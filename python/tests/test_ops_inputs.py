"""Inputs that ops refuse, and those at the edge of what they take."""
import pytest
import torch
import torch.nn.functional as F

import fftune
from cases import CASES, representative
from fftune import ops, reference
from fftune._checks import KINDS
from fftune._custom import OPS


def refuses(call, words):
    with pytest.raises(fftune.Error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_act_mul_refuses_halves_that_are_not_as_long():
    refuses(lambda: ops.act_mul(torch.randn(3, 7)), r"act-mul: gate is \[3, 7\].*2h")
    refuses(lambda: ops.act_mul(torch.randn(3, 7, requires_grad=True)), r"gate is \[3, 7\]")


def test_a_prefix_counts_where_rows_have_no_ids_yet():
    ids, prefix = torch.zeros(2, 0, dtype=torch.long), torch.tensor([[1, 2, 1, 9]])
    for of_prefix in (prefix[:, :3], prefix):
        logits = torch.zeros(2, 5)
        right = logits.clone()
        invalid = ops.ngram_block(ids, logits, 2, prefix=of_prefix)
        assert torch.equal(invalid, reference.ngram_block(ids, right, 2, -1, None, of_prefix, None,
                                                          None))
        assert torch.equal(logits, right)
    logits = torch.zeros(2, 5)
    ops.ngram_block(ids, logits, 2, prefix=prefix, lengths=torch.zeros(2, dtype=torch.int32),
                    prefix_lengths=torch.tensor([3]))
    assert logits.isinf().nonzero().tolist() == [[0, 2], [1, 2]]
    assert ops.ngram_block(ids, logits, 2).tolist() == [0, 0]


def test_bias_gelu_knows_none_and_tanh_alone():
    x, b = torch.randn(3, 8), torch.randn(8)
    right = F.gelu(x + b, approximate="tanh")
    assert torch.allclose(ops.bias_gelu(x, b, approximate="tanh"), right, atol=1e-6)
    for other in ("foo", "Tanh", True, None):
        refuses(lambda: ops.bias_gelu(x, b, approximate=other), "bias-gelu: approximate is .*tanh")


def in_place_calls():
    """The written tensors, and a call that writes them, of each op that writes in place."""
    x, w, dy, mask = torch.randn(3, 8), torch.randn(4, 8), torch.randn(3, 4), torch.ones(3).bool()
    gate, down = torch.randn(6, 8), torch.randn(8, 6)
    like = lambda *tensors: [torch.zeros_like(t) for t in tensors]
    logits = torch.zeros(1, 5)
    yield [logits], lambda: ops.ngram_block(torch.tensor([[1, 2, 1]]), logits, 2)
    other = torch.zeros(1, 5)
    yield [other], lambda: torch.ops.fftune.ngram_block(torch.tensor([[1, 2, 1]]), other, 2, -1,
                                                        *[None] * 4)
    dw = like(w, w[:, 0])
    yield dw, lambda: ops.linear_backward(dy, x, w, bias=True, into=dw)
    of_mlp = like(gate, gate, down)
    yield of_mlp, lambda: ops.ffn_backward(x, x, None, None, gate, gate, down, into=of_mlp)
    masked = like(w, w)
    yield masked, lambda: ops.masked_linear_backward(dy, x, mask, w, w, into=masked)
    six = like(*[gate, gate, down] * 2)
    yield six, lambda: ops.masked_ffn_backward(x, x, mask, None, None, *[gate, gate, down] * 2,
                                               into=six)
    experts = [t.expand(2, *t.shape).contiguous() for t in (gate, gate, down)]
    of_experts = like(*experts)
    yield of_experts, lambda: ops.moe_ffn_backward(x, x, torch.zeros(3, 1).int(), torch.ones(3, 1),
                                                   None, None, *experts, into=of_experts)
    caches = torch.zeros(4, 1, 8), torch.zeros(4, 1, 8)
    yield caches, lambda: ops.qkv(x, torch.randn(32, 8), 2, 1, caches=caches, slots=torch.arange(3))
    pairs = [torch.zeros(1, 4, 1, 8).transpose(1, 2) for _ in range(2)]
    weights = {"attn_norm": torch.ones(8), "w_q": torch.randn(8, 8), "w_k": torch.randn(8, 8),
               "w_v": torch.randn(8, 8), "w_o": torch.randn(8, 8), "ffn_norm": torch.ones(8),
               "w_gate": gate, "w_up": gate, "w_down": down}
    yield pairs, lambda: ops.layer(x[None], [weights], [tuple(pairs)],
                                   torch.tensor([3], dtype=torch.int32), 1)


def test_what_is_written_in_place_has_a_new_version():
    for tensors, call in in_place_calls():
        versions = [tensor._version for tensor in tensors]
        call()
        assert all(tensor._version > before for tensor, before in zip(tensors, versions))
    logits = torch.zeros(1, 5)
    loss = (torch.randn(1, 5, requires_grad=True) * logits).sum()
    ops.ngram_block(torch.tensor([[1, 2, 1]]), logits, 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():  # whose tensors have no versions
        for _, call in in_place_calls():
            call()


@pytest.mark.parametrize("shape", [(2, 0, 2, 8), (0, 2, 8)])
def test_attention_over_no_keys_says_so(shape):
    q = torch.randn(2, 3, 2, 8) if len(shape) == 4 else torch.randn(3, 2, 8)
    offsets = {} if len(shape) == 4 else {name: torch.tensor([0, end], dtype=torch.int32)
                                          for name, end in (("offsets", 3), ("kv_offsets", 0))}
    k = torch.randn(shape)
    with pytest.raises(fftune.Error, match=r"k is \[.*\]: give one key or more"):
        ops.attention(q, k, k, **offsets)


def test_meta_tensors_have_no_autocast_to_ask_for():
    x, w = torch.randn(2, 8, device="meta"), torch.randn(4, 8, device="meta", requires_grad=True)
    for weight in (w.detach(), w):
        y = ops.linear(x, weight)
        assert y.is_meta and y.shape == (2, 4)
    module = fftune.nn.GatedMLP(8, 12, device="meta")
    assert module(x).shape == x.shape
    module(x).sum().backward()
    assert module.up_proj.weight.grad.shape == (12, 8)


def test_meta_tensors_beside_others_are_an_error():
    x, w = torch.randn(2, 8), torch.randn(4, 8)
    for one, other in ((x.to("meta"), w), (x, w.to("meta")),
                       (x.to("meta"), w.clone().requires_grad_())):
        with pytest.raises(fftune.Error, match="linear: tensors on .* move them to one device"):
            ops.linear(one, other)
    experts = torch.randn(2, 6, 8), torch.randn(2, 6, 8), torch.randn(2, 8, 6)
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(fftune.Error, match="tensors on cpu and on meta"):
        ops.moe_ffn(x, ids, torch.ones(2, 1), *(e.to("meta") for e in experts))


def test_ids_beyond_int32_are_no_experts():
    x = torch.randn(3, 8)
    experts = torch.randn(2, 6, 8), torch.randn(2, 6, 8), torch.randn(2, 8, 6)
    ids = torch.tensor([[2**32, 2**40 + 1], [-2**32, 1 - 2**32], [0, 1]])
    y = ops.moe_ffn(x, ids, torch.ones(3, 2), *experts)
    assert not y[:2].any() and y[2].any()
    for small in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(ops.moe_ffn(x[2:], ids[2:].to(small), torch.ones(1, 2), *experts), y[2:])


@pytest.mark.parametrize("batch, queries", [(2, 3), (2, 0), (0, 3)])
@pytest.mark.parametrize("cache, pages", [("keys", None), ("pages", 0)])
def test_no_keys_are_refused_where_there_are_queries(batch, queries, cache, pages):
    rows = (batch, 0) if cache == "keys" else (5, 16)
    table = None if pages is None else torch.zeros(batch, pages, dtype=torch.int32)
    q = torch.randn(batch, queries, 4, 16)
    for call, shape in (
            (lambda: ops.attention(q, *torch.randn(2, *rows, 2, 16), pages=table), (batch, queries, 4, 16)),
            (lambda: ops.mla(q, q[..., :8], torch.randn(*rows, 24), pages=table), (batch, queries, 4, 16)),
            (lambda: ops.indexer(q, q[..., 0], torch.randn(*rows, 16), top=4, pages=table), (batch, queries, 4)),
            (lambda: ops.indexer(q, q[..., 0], torch.randn(*rows, 16).to(torch.float8_e4m3fn), top=4, pages=table,
                                 k_scale=torch.ones(rows)), (batch, queries, 4))):
        if batch * queries:
            refuses(call, "give one (key|page) or more")
        else:
            assert call().shape == shape


def _cast_to_int32(case):
    """The places of arguments that the op casts, without those that leave rows to no sequence."""
    arguments = getattr(OPS, case.op).overload._schema.arguments
    kinds = getattr(OPS, case.op).kinds
    return [i for i, (argument, value) in enumerate(zip(arguments, case.arguments()))
            if isinstance(value, torch.Tensor) and "offsets" not in argument.name
            and kinds[argument.name].types is KINDS["ints"]]


@pytest.mark.parametrize("case", representative([c for c in CASES if "preact" not in c.op and _cast_to_int32(c)]),
                         ids=str)
def test_int64_out_of_range_is_the_nearest_int32(case):
    call = getattr(OPS, case.op).overload
    for place in _cast_to_int32(case):
        for beyond, nearest in ((2**32, 2**31 - 1), (-2**32, -2**31)):
            results = []
            for dtype, value in ((torch.int64, None), (torch.int32, nearest)):
                torch.manual_seed(1)
                arguments = list(case.arguments())
                given = arguments[place].long().flatten()
                given[0] = given[0] + beyond if value is None else value
                arguments[place] = given.view(arguments[place].shape).to(dtype)
                result = call(*arguments)
                results.append([*(result if isinstance(result, (tuple, list)) else (result,)),
                                *(arguments[i] for i in case.updated)])
            for wide, near in zip(*results):
                torch.testing.assert_close(wide, near, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.complex64])
def test_numbers_that_are_no_integers_are_refused(dtype):
    x, q, k = torch.randn(3, 8), torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
    some = lambda *values: torch.tensor(values).to(dtype)
    for call, words in (
            (lambda: ops.moe_ffn(x, some([0], [1], [1]), torch.ones(3, 1), torch.randn(2, 6, 8),
                                 torch.randn(2, 6, 8), torch.randn(2, 8, 6)), "moe-ffn: ids"),
            (lambda: ops.attention(q, k, k, lengths=some(1, 3)), "attention: lengths"),
            (lambda: ops.attention(q[0], k[0], k[0], offsets=some(0, 3)), "attention: offsets"),
            (lambda: ops.attention(q[:, :1].contiguous(), k, k, pages=some([0], [1]),
                                   lengths=torch.tensor([1, 3])), "attention: pages"),
            (lambda: ops.rope(q, k, starts=some(0, 1)), "rope: starts"),
            (lambda: ops.rope(q[0], k[0], offsets=some(0, 3)), "rope: offsets"),
            (lambda: ops.qkv(x, torch.randn(32, 8), 2, 1, positions=some(0, 1, 1)),
             "qkv: positions"),
            (lambda: ops.qkv(x, torch.randn(32, 8, requires_grad=True), 2, 1,
                             positions=some(0, 1, 1)), "qkv: positions"),
            (lambda: ops.ngram_block(torch.zeros(2, 3).int(), torch.zeros(2, 5), some(1, 1)),
             "ngram-block: n "),
            (lambda: ops.ngram_block(torch.zeros(2, 3).int(), torch.zeros(2, 5), 2,
                                     lengths=some(1, 1)), "ngram-block: lengths")):
        refuses(call, f"{words}.*{dtype}: give int32 or int64")


def test_complex_numbers_are_refused():
    x, w = torch.randn(3, 8), torch.ones(8, dtype=torch.complex64)
    refuses(lambda: ops.rmsnorm(x, w), "rmsnorm: w is torch.complex64")
    refuses(lambda: ops.bias_gelu(x, w), "bias-gelu: bias is torch.complex64")
    refuses(lambda: ops.moe_route(x, 2, bias=w), "moe-route: bias is torch.complex64")
    refuses(lambda: ops.moe_ffn(x, torch.zeros(3, 1).int(), w[:3, None], torch.randn(2, 6, 8),
                                torch.randn(2, 6, 8), torch.randn(2, 8, 6)),
            "moe-ffn: weights is torch.complex64")


def _odd(tensor):
    """The tensor in ways in which ops take none."""
    yield torch.complex(tensor, tensor)
    yield tensor.bool()
    yield torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8)
    yield tensor.to_sparse()
    yield tensor.tolist()


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_odd_weights_and_divisors_of_losses_are_one_error(rows, reduction):
    x, w = torch.randn(rows, 8), torch.randn(10, 8)
    labels = torch.randint(10, (rows,))
    for loss, given in ((ops.cross_entropy, (x @ w.T, labels)), (ops.linear_cross_entropy, (x, w, labels))):
        for odd in _odd(torch.rand(10)):
            refuses(lambda: loss(*given, reduction=reduction, class_weights=odd), "class_weights")
        for odd in (*_odd(torch.tensor(3.0)), torch.tensor(3j)) if reduction == "mean" else ():
            if not isinstance(odd, float):
                refuses(lambda: loss(*given, items=odd), "items")
        assert loss(*given, reduction=reduction, class_weights=torch.rand(10)).shape == \
            ((rows,) if reduction == "none" else ())


def test_second_gradients_are_right_or_an_error():
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x, w, b: ops.linear(x, w, b).float().pow(2).sum(), (x, w, torch.randn(
            4, requires_grad=True)), eps=1e-2, atol=1e-1, rtol=1e-2)
    norm, up, down = (torch.randn(*shape, requires_grad=True) for shape in ((8,), (6, 8), (8, 6)))
    for call in (lambda: ops.rmsnorm(x, norm), lambda: ops.ffn(x, up, up, down),
                 lambda: ops.act_mul(x, act="gelu"), lambda: ops.add_rmsnorm(x, x, norm)[0],
                 lambda: ops.masked_softmax(x[None, None]), lambda: ops.mlp(x, up, down),
                 lambda: ops.attention(*[x[None, :, None]] * 3)):
        for loss in (call().pow(2).sum(), call().sum()):
            first, = torch.autograd.grad(loss, x, create_graph=True)
            refuses(lambda: torch.autograd.grad((first + x.pow(3)).sum(), x),
                    "its gradient has no gradient itself")
    first, = torch.autograd.grad(ops.ffn(x, up, up, down).sum(), up, create_graph=True)
    refuses(lambda: first.sum().backward(), "its gradient has no gradient itself")
    loss = ops.linear_cross_entropy(x, up, torch.zeros(len(x), dtype=torch.int64))
    first, = torch.autograd.grad(loss, x, create_graph=True)
    refuses(lambda: first.sum().backward(), "linear_cross_entropy: its gradient has no gradient itself")


def test_forward_mode_is_an_error():
    from torch.autograd import forward_ad

    x, w, norm = torch.randn(3, 8), torch.randn(4, 8), torch.randn(8)
    for call in (lambda x: ops.linear(x, w), lambda x: ops.rmsnorm(x, norm),
                 lambda x: ops.rmsnorm_quantised(x, norm), lambda x: torch.ops.fftune.linear(
                     x, w, None, None)):
        with forward_ad.dual_level():
            assert call(x) is not None  # which has no tangent
            refuses(lambda: call(forward_ad.make_dual(x, x)), "no derivative in forward mode")
            refuses(lambda: call(forward_ad.make_dual(x.clone().requires_grad_(), x)),
                    "no derivative in forward mode")
        refuses(lambda: torch.func.jvp(call, (x,), (x,)), "no derivative in forward mode")


X, W, D, V = torch.ones(3, 8), torch.ones(6, 8), torch.ones(8, 6), torch.ones(8)
Q, GATE = torch.ones(2, 3, 2, 8), torch.ones(3, 6)
NONE = torch.tensor(1.0)
NESTED = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])
IDS, LABELS = torch.zeros(3, 1).int(), torch.zeros(3).long()


def _packed_experts(x, **options):
    packed = ops.pack_weight(torch.zeros(64, 32, dtype=torch.uint8), torch.ones(64, 2), group=32)
    return ops.moe_ffn(x, IDS, X[:, :1], packed, packed, packed, **options)


@pytest.mark.parametrize("call, words", [
    (lambda: ops.ffn(X, W, W, D, act=None), "ffn: act is None"),
    (lambda: ops.ffn(X, W.clone().requires_grad_(), W, D, act=None), "ffn: act is None"),
    (lambda: ops.ffn_block(X, None, V, W, W, D, eps=None), "ffn: eps is None"),
    (lambda: ops.mlp(X, W, D, act=None), "mlp: act is None"),
    (lambda: ops.masked_ffn(X, X[:, 0].bool(), W, W, D, W, W, D, act=None), "ffn: act is None"),
    (lambda: ops.rmsnorm(X, V, eps=None), "rmsnorm: eps is None"),
    (lambda: ops.rmsnorm(X, V, convention=None), "rmsnorm: convention is None"),
    (lambda: ops.layernorm(X, V, V, eps=None), "layernorm: eps is None"),
    (lambda: ops.act_mul(X, act=None), "act-mul: act is None"),
    (lambda: ops.rope(Q, rotation=None), "rope: rotation is None"),
    (lambda: ops.moe_ffn(X, torch.zeros(3, 1).int(), X[:, :1], W[None], W[None], D[None], act=None),
     "moe-ffn: act is None"),
    (lambda: ops.moe_route(X, 2, score=None), "moe-route: score is None"),
    (lambda: ops.moe_route(X, 2, group_score="sum"), "group_score is 'sum': give one of max, top2"),
    (lambda: ops.head_logits(X, W, logits="f64"), "head: logits is 'f64': give one of same, f32"),
    (lambda: ops.head(X, W, norm_bias=V), "head: norm_bias without norm"),
    (lambda: ops.ngram_block(torch.zeros(4, 1).int(), X.new_zeros(4, 8), prefix_lengths=torch.ones(2).int()),
     "ngram-block: prefix_lengths without prefix"),
    (lambda: ops.attention(Q, Q, Q, NESTED), "attention: mask is a nested tensor"),
    (lambda: ops.attention(Q, Q, Q, bias=NESTED), "attention: bias is a nested tensor"),
    (lambda: ops.attention(Q, Q, Q, pages=NESTED), "attention: pages are torch.float32: give int32"),
    (lambda: ops.masked_softmax(Q, NESTED), "masked-softmax: mask is a nested tensor"),
    (lambda: ops.cross_entropy(X, LABELS, items=NESTED), "cross-entropy: items is a nested tensor"),
    (lambda: ops.linear_cross_entropy(NONE, W, LABELS, skip_ignored=True), r"x is \[\], labels torch.int64 \[3\]"),
    (lambda: ops.linear_cross_entropy(X, W, LABELS.view(1, 3), skip_ignored=True), r"labels torch.int64 \[1, 3\]"),
    (lambda: ops.linear_cross_entropy(X, W, X[:, 0], skip_ignored=True), "labels torch.float32"),
    (lambda: ops.linear_cross_entropy(X, W, NESTED, skip_ignored=True), "labels is a nested tensor"),
    (lambda: ops.linear(X, ops.PackedWeight(X, X, None, 8, 8, 128, "int3")), "format 'int3': give one of int4"),
    (lambda: ops.moe_ffn(X, IDS, X[:, :1], NONE, W[None], D[None], experts=1), r"w_gate is \[\]: give \[own-experts"),
    (lambda: _packed_experts(NESTED), "moe-ffn: x is a nested tensor"),
    (lambda: _packed_experts(NONE), r"moe-ffn: x is \[\]"),
    (lambda: _packed_experts(X[:, :0]), r"moe-ffn: w_gate is \[64, 64\]"),
    (lambda: _packed_experts(None), "moe-ffn: x is None"),
    (lambda: _packed_experts(torch.ones(3, 64), shared=None), "moe-ffn: shared is None: give an integer"),
    (lambda: _packed_experts(torch.ones(3, 64), shared=1), "moe-ffn: shared is 1 of 1 experts"),
    (lambda: _packed_experts(torch.ones(3, 64), biases=(None, X, X)), "moe-ffn: one of biases is None"),
    (lambda: ops.qkv(X, torch.ones(32, 8), 2, 1, norms=(V, V), eps=None), "qkv: eps is None"),
    (lambda: ops.layernorm(X, None, None), "layernorm: [bw] is None"),
    (lambda: ops.layernorm(X, V, None), "layernorm: b is None"),
    (lambda: ops.attention(Q, Q, Q, kv_offsets=torch.tensor([0, 3, 5])), "without offsets"),
    (lambda: ops.ffn_backward(X, X, GATE, None, W, W, D), "gate without up"),
    (lambda: ops.linear(X, V), r"linear: w is \[8\]: give \[n, k\]"),
    (lambda: ops.linear(X, W[None]), r"linear: w is \[1, 6, 8\]"),
    (lambda: ops.masked_linear(X, X[:, 0].bool(), V, V), r"masked-linear: w_true is \[8\]"),
    (lambda: ops.ngram_block(torch.zeros(4, 1).int(), V, 2), r"ngram-block: logits is \[8\]"),
    (lambda: ops.ngram_block(torch.zeros(3).int(), X, 2), r"ngram-block: ids is \[3\]"),
    (lambda: ops.masked_softmax(Q[0]), r"masked-softmax: x is \[3, 2, 8\]"),
    (lambda: ops.ffn(NONE, W, W, D), r"ffn: x is \[\]"),
    (lambda: ops.rmsnorm(NONE, V), r"rmsnorm: x is \[\]"),
    (lambda: ops.act_mul(NONE), r"act-mul: gate is \[\]"),
    (lambda: ops.moe_route(NONE, 1), r"moe-route: logits is \[\]"),
    (lambda: ops.moe_route(X, -1), "top_k is -1"),
    (lambda: ops.qkv(X, torch.ones(32, 8), 0), "qkv: 0 heads"),
    (lambda: ops.qkv(X, (W, W), 2, 1), "qkv: w holds 2 values, not 3"),
    *((lambda of=of, gradients=gradients: ops.qkv(X.clone().requires_grad_(gradients), torch.ones(32, 8), 2, 1, **of),
       words) for gradients in (False, True) for of, words in (
        (dict(positions=LABELS[:1]), r"qkv: positions is \[1\], not \[3\]"),
        (dict(positions=LABELS[None]), r"qkv: positions is \[1, 3\], not \[3\]"),
        (dict(positions=LABELS, angles=X[:, :4]), r"qkv: angles is \[3, 4\], not \[3, 8\]"),
        (dict(positions=LABELS, rule="table"), "qkv: angles are given with rule='table'"),
        (dict(positions=LABELS, angles=X, rule="base"), "qkv: angles are given with rule='table'"),
        (dict(angles=X), "qkv: angles without positions"),
        (dict(rule="foo"), "qkv: rule is 'foo': give one of table"),
        (dict(rotation="foo"), "qkv: rotation is 'foo': give one of none"),
        (dict(norms=(V, None)), "qkv: give weights, biases and norms of all parts"))),
    (lambda: ops.qkv(X, torch.ones(32, 8), "2", 1), "qkv: heads is '2': give an integer"),
    (lambda: ops.qkv(X, torch.ones(32, 8), 2, 1.0), "qkv: kv_heads is 1.0: give an integer"),
    (lambda: ops.qkv(X, torch.ones(32, 8), 2, 1, bias=(V, V, V)), "qkv: give weights, biases"),
])
def test_wrong_inputs_are_one_error(call, words):
    refuses(call, words)

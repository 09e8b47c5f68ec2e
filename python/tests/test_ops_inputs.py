"""Inputs that ops refuse, and those at the edge of what they take."""
import pytest
import torch
import torch.nn.functional as F

import fftune
from fftune import ops, reference


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
    assert torch.allclose(ops.bias_gelu(x, b, approximate="tanh"), F.gelu(x + b, approximate="tanh"),
                          atol=1e-6)
    for other in ("foo", "Tanh", True, None):
        refuses(lambda: ops.bias_gelu(x, b, approximate=other), "bias-gelu: approximate is .*tanh")


def in_place_calls():
    """What is written, and a call that writes it, of each op that writes in place."""
    x, w, dy, mask = torch.randn(3, 8), torch.randn(4, 8), torch.randn(3, 4), torch.ones(3).bool()
    gate, down = torch.randn(6, 8), torch.randn(8, 6)
    like = lambda *tensors: [torch.zeros_like(t) for t in tensors]
    logits = torch.zeros(1, 5)
    yield [logits], lambda: ops.ngram_block(torch.tensor([[1, 2, 1]]), logits, 2)
    other = torch.zeros(1, 5)
    yield [other], lambda: torch.ops.fftune.ngram_block(torch.tensor([[1, 2, 1]]), other, 2, -1, None,
                                                        None, None, None)
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


def test_meta_tensors_have_no_autocast_to_ask_for():
    x, w = torch.randn(2, 8, device="meta"), torch.randn(4, 8, device="meta", requires_grad=True)
    for weight in (w.detach(), w):
        y = ops.linear(x, weight)
        assert y.is_meta and y.shape == (2, 4)
    module = fftune.nn.GatedMLP(8, 12, device="meta")
    assert module(x).shape == x.shape
    module(x).sum().backward()
    assert module.up_proj.weight.grad.shape == (12, 8)

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

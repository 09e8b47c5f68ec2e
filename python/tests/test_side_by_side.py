"""Caches with the keys and values of each head side by side, [..., kv heads, 2 features], have the
results of two caches, in every bit."""
import pytest
import torch

from fftune import Error, ops

DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]


def numbers(device, *shape):
    return torch.randn(*shape, device=device).bfloat16()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads, dim", [(2, 64), (1, 128), (3, 16)])
@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_qkv_writes_them(device, kv_heads, dim, tokens):
    d, blocks, block = 128, 24, 16
    w = numbers(device, 5 * kv_heads * dim, d) / d**0.5
    x = numbers(device, tokens, d)
    slots = torch.randperm(blocks * block, device=device)[:tokens]
    slots[2:3] = -1
    positions = torch.arange(tokens, device=device)
    apart = [numbers(device, blocks, block, kv_heads, dim) for _ in range(2)]
    both = torch.cat(apart, -1)
    named = dict(positions=positions, slots=slots)
    right = ops.qkv(x, w, 3 * kv_heads, kv_heads, caches=tuple(apart), **named)
    q = ops.qkv(x, w, 3 * kv_heads, kv_heads, caches=both.split(dim, -1), **named)
    assert torch.equal(q, right)
    assert torch.equal(both, torch.cat(apart, -1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads, dim", [(2, 64), (1, 128), (3, 16)])
@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("block", [16, 64])
def test_attention_reads_them(device, kv_heads, dim, queries, block):
    sequences, blocks = 4, 20
    q = numbers(device, sequences, queries, 2 * kv_heads, dim)
    k, v = (numbers(device, blocks, block, kv_heads, dim) for _ in range(2))
    pages = torch.randperm(blocks, device=device)[:sequences * 5].view(sequences, 5).int()
    lengths = torch.tensor([5 * block, 0, 17, block + 1], dtype=torch.int32, device=device)
    named = dict(pages=pages, lengths=lengths, causal=True)
    both = torch.cat((k, v), -1)
    before = both.clone()
    assert torch.equal(ops.attention(q, *both.split(dim, -1), **named),
                       ops.attention(q, k, v, **named))
    assert torch.equal(both, before)


def test_other_layouts_are_copied_or_refused():
    k = numbers("cpu", 4, 2, 16, 8).transpose(1, 2)  # heads before tokens
    q = numbers("cpu", 1, 1, 2, 8)
    pages = torch.tensor([[2, 0]], dtype=torch.int32)
    assert torch.equal(ops.attention(q, k, k, pages=pages),
                       ops.attention(q, k.contiguous(), k.contiguous(), pages=pages))
    with pytest.raises(Error, match="rows of a cache do not follow each other"):
        ops.qkv(numbers("cpu", 1, 16), numbers("cpu", 48, 16), 2, 2, caches=(k, k),
                slots=torch.tensor([0]))

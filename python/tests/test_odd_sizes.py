"""Random calls of the public ops: no rows, one element, primes, strides, and every option, beside their
definitions in float64."""
import random

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fftune import ops

SIZES = (1, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 40, 64, 65, 96, 127, 130)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}


class Draw(random.Random):
    """Draws the arguments of a call."""

    def __init__(self, seed: int):
        super().__init__(seed)
        torch.manual_seed(seed)
        self.dtype = self.choice(tuple(TOLERANCE))
        self.gradients = self.random() < 0.5

    def one(self, *choices):
        return self.choice(choices)

    def size(self) -> int:
        return self.choice(SIZES)

    def rows(self) -> tuple[int, ...]:
        return tuple(self.one(0, 1, 2, 3, 5, 7, 17) for _ in range(self.one(0, 1, 1, 1, 2, 3)))

    def strided(self, tensor: Tensor) -> Tensor:
        way = self.one("whole", "whole", "transposed", "every second", "expanded", "shifted", "part of rows")
        if way == "shifted":
            return torch.cat((tensor.new_zeros(3), tensor.flatten()))[3:].view(tensor.shape)
        if way == "every second" and tensor.dim():
            return torch.stack((tensor, tensor), -1)[..., 0]
        if way == "transposed" and tensor.dim() > 1:
            return tensor.mT.contiguous().mT
        if way == "part of rows" and tensor.dim() > 1:
            return torch.cat((tensor, tensor), -1)[..., :tensor.shape[-1]]
        return tensor[:1].expand(tensor.shape) if way == "expanded" and tensor.dim() > 1 else tensor

    def tensor(self, *shape, scale: float = 1.0, leaf: bool = True) -> Tensor:
        made = self.strided((torch.randn(shape) * scale).to(self.dtype))
        return made.requires_grad_() if leaf and self.gradients else made

    def weight(self, *shape) -> Tensor:
        return self.tensor(*shape, scale=shape[-1] ** -0.5)

    def maybe(self, *shape) -> Tensor | None:
        return self.tensor(*shape) if self.random() < 0.5 else None

    def flag(self) -> bool:
        return self.random() < 0.5

    def act(self) -> str:
        return self.one("silu", "gelu", "gelu-tanh", "relu")


def ffn(of: Draw):
    d, h, rows = of.size(), of.size(), of.rows()
    return (of.tensor(*rows, d), of.weight(h, d), of.weight(h, d), of.weight(d, h)), dict(
        bias=of.maybe(d), residual=of.maybe(*rows, d), act=of.act(), recompute=of.flag())


def mlp(of: Draw):
    d, h, rows = of.size(), of.size(), of.rows()
    biases = of.one(dict(), dict(b_down=of.tensor(d)), dict(b_up=of.tensor(h), b_down=of.tensor(d)))
    return (of.tensor(*rows, d), of.weight(h, d), of.weight(d, h)), dict(
        biases, residual=of.maybe(*rows, d), act=of.act())


def ffn_block(of: Draw):
    d, h, rows = of.size(), of.size(), of.rows()
    return (of.tensor(*rows, d), of.maybe(*rows, d), of.tensor(d), of.weight(h, d), of.weight(h, d),
            of.weight(d, h)), dict(act=of.act(), convention=of.one("llama", "t5", "gemma"), recompute=of.flag())


def linear(of: Draw):
    k, n, rows = of.size(), of.size(), of.rows()
    return (of.tensor(*rows, k), of.weight(n, k)), dict(bias=of.maybe(n), residual=of.maybe(*rows, n))


def rmsnorm(of: Draw):
    d = of.size()
    return (of.tensor(*of.rows(), d), of.tensor(d)), dict(eps=of.one(1e-6, 1e-2),
                                                          convention=of.one("llama", "t5", "gemma"))


def add_layernorm(of: Draw):
    d, rows = of.size(), of.rows()
    return (of.tensor(*rows, d), of.tensor(*rows, d), of.tensor(d), of.tensor(d)), dict(eps=1e-2)


def bias_gelu(of: Draw):
    d = of.size()
    return (of.tensor(*of.rows(), d), of.tensor(d)), dict(approximate=of.one("none", "tanh"))


def act_mul(of: Draw):
    shape = *of.rows(), of.size()
    return (of.tensor(*shape), of.tensor(*shape)), dict(act=of.act())


def masked_linear(of: Draw):
    k, n, rows = of.size(), of.size(), of.rows()
    return (of.tensor(*rows, k), torch.rand(rows) < of.one(0, 0.3, 1), of.weight(n, k), of.weight(n, k)), {}


def masked_ffn(of: Draw):
    d, h, rows = of.size(), of.size(), of.rows()
    weights = (of.weight(*shape) for _ in range(2) for shape in ((h, d), (h, d), (d, h)))
    return (of.tensor(*rows, d), torch.rand(rows) < of.one(0, 0.3, 1), *weights), dict(
        act=of.act(), recompute=of.flag())


def attention(of: Draw):
    b, s, t = of.one(1, 2, 3), of.one(1, 1, 2, 5, 17, 33, 65), of.one(1, 3, 16, 33, 70, 129)
    kv_heads, dim, causal = of.one(1, 2, 3), of.one(2, 8, 10, 16, 34, 64, 80, 128), of.flag()
    heads, t = kv_heads * of.one(1, 2, 4), max(s, t) if causal else t
    options = dict(causal=causal, window=of.one(0, 0, 5, 64) if causal else 0, softcap=of.one(0.0, 5.0),
                   scale=of.one(0.0, 0.3))
    masked = of.one("not", "lengths", "sinks", *(() if causal else ("bytes", "bias")))
    if masked == "bytes":
        options["mask"] = torch.rand(b, of.one(1, heads), s, t) < of.one(0.0, 0.5, 0.9)
    elif masked == "bias":
        options["bias"] = of.tensor(of.one(1, b), of.one(1, heads), s, t, leaf=False)
    elif masked == "lengths":
        options["lengths"] = torch.tensor([of.randint(s if causal else 0, t) for _ in range(b)])
    elif masked == "sinks":
        options["sinks"] = torch.randn(heads).to(of.dtype)
    return (of.tensor(b, s, heads, dim), of.tensor(b, t, kv_heads, dim), of.tensor(b, t, kv_heads, dim)), options


def masked_softmax(of: Draw):
    shape = of.one(1, 2), of.one(1, 3), of.one(1, 5, 33), of.one(1, 7, 64, 100)
    mask = dict(mask=torch.rand(shape[0], of.one(1, shape[1]), *shape[2:]) < 0.6)
    return (of.tensor(*shape),), dict(of.one(dict(causal=True), {}, mask), scale=of.one(1.0, 0.2))


def labels_of(of: Draw, vocab: int, rows) -> Tensor:
    return torch.where(torch.rand(rows) < 0.2, -100, torch.randint(vocab, rows))


def loss_rules(of: Draw, vocab: int) -> dict:
    return dict(reduction=of.one("mean", "sum", "none"), label_smoothing=of.one(0.0, 0.1), z_loss=of.one(0.0, 0.01),
                softcap=of.one(0.0, 3.0), class_weights=torch.rand(vocab) if of.flag() else None,
                lse=of.flag(), logprobs=of.flag(), entropy=of.flag())


def cross_entropy(of: Draw):
    vocab, rows = 1 + of.size(), of.rows()
    return (of.tensor(*rows, vocab), labels_of(of, vocab, rows)), loss_rules(of, vocab)


def linear_cross_entropy(of: Draw):
    d, vocab, rows = of.size(), 1 + of.size(), of.rows()
    return (of.tensor(*rows, d), of.weight(vocab, d), labels_of(of, vocab, rows)), dict(
        loss_rules(of, vocab), bias=of.maybe(vocab), recompute=of.flag())


def moe_ffn(of: Draw):
    d, h, experts, rows = of.size(), of.size(), of.one(1, 2, 5, 17), of.rows()
    top_k = min(experts, of.one(1, 2, 4))
    ids = torch.rand(*rows, experts).topk(top_k, -1).indices.int()
    return (of.tensor(*rows, d), torch.where(torch.rand(ids.shape) < 0.1, -1, ids), torch.rand(*rows, top_k),
            of.weight(experts, h, d), of.weight(experts, h, d), of.weight(experts, d, h)), dict(
                act=of.act(), weigh=of.one("after", "before"), recompute=of.flag())


def moe_route(of: Draw):
    groups = of.one(0, 2)
    experts = of.one(4, 8, 64) if groups else of.one(1, 2, 5, 130)
    return (of.tensor(*of.rows(), experts), min(experts, of.one(1, 2))), dict(
        bias=torch.randn(experts) if of.flag() else None, score=of.one("softmax", "sigmoid"), groups=groups,
        top_groups=groups // 2, group_score=of.one("max", "top2") if groups else "max", renormalise=of.flag(),
        scale=of.one(1.0, 2.5))


def rope(of: Draw):
    b, s, dim = of.one(1, 2), of.one(1, 3, 17), 2 * of.one(1, 4, 5, 32)
    return (of.tensor(b, s, of.one(1, 4), dim), of.maybe(b, s, of.one(1, 2), dim)), dict(
        starts=torch.randint(50, (b,)) if of.flag() else None, rotation=of.one("halves", "interleaved"),
        rotary=of.one(0, 2), rule=of.one("base", "llama3", "yarn"), factor=of.one(1.0, 8.0), context=64.0)


def causal_conv1d(of: Draw):
    channels, width, final = of.size(), of.one(2, 3, 4, 7, 8), of.flag()
    packed = of.flag()
    rows = (13,) if packed else (of.one(1, 3), of.one(1, 2, 17))
    sequences, order = 4 if packed else rows[0], of.one("entries", "channels")
    state = (width + 1, channels) if order == "entries" else (channels, width + 1)
    return (of.tensor(*rows, channels), of.tensor(channels, width), of.maybe(channels)), dict(
        act=of.one("none", "silu"), offsets=torch.tensor([0, 1, 5, 5, 12]) if packed else None,
        initial=of.maybe(sequences, *state), final=final, state_order=order)


def head_logits(of: Draw):
    d, vocab = of.size(), of.size()
    of.gradients = False
    return (of.tensor(*of.rows(), d), of.weight(vocab, d)), dict(
        norm=of.maybe(d), bias=of.maybe(vocab), logits=of.one("same", "f32"))


def qkv(of: Draw):
    d, heads, kv_heads, dim, rows = of.size(), of.one(1, 3), of.one(1, 2), 2 * of.one(8, 17, 32), of.rows()
    weights = of.weight((heads + 2 * kv_heads) * dim, d) if of.flag() else tuple(
        of.weight(n * dim, d) for n in (heads, kv_heads, kv_heads))
    norms = (of.tensor(dim), of.tensor(dim)) if of.flag() else None
    positions = torch.randint(50, rows) if of.flag() else None
    return (of.tensor(*rows, d), weights, heads, kv_heads), dict(
        norms=norms, positions=positions, eps=1e-2, rotation=of.one("halves", "interleaved"), rotary=of.one(0, 2))


CALLS = [ffn, mlp, ffn_block, linear, rmsnorm, add_layernorm, bias_gelu, act_mul, masked_linear, masked_ffn,
         attention, masked_softmax, cross_entropy, linear_cross_entropy, moe_ffn, moe_route, rope, causal_conv1d,
         head_logits, qkv]


def results_of(name: str, arguments, options) -> list[Tensor]:
    """The outputs of an op, and the gradients of all its leaves by random ones of the outputs."""
    leaves = [t for t in pytree.tree_leaves((arguments, options)) if isinstance(t, Tensor) and t.is_leaf
              and t.requires_grad]
    given = [t for t in pytree.tree_leaves(getattr(ops, name)(*arguments, **options)) if isinstance(t, Tensor)]
    outputs = [t for t in given if t.requires_grad]
    torch.manual_seed(0)
    by = [torch.randn(t.shape).to(t.dtype) for t in outputs]
    gradients = torch.autograd.grad(outputs, leaves, by, allow_unused=True) if outputs and leaves else ()
    return [*given, *gradients]


def wide(value):
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_random_calls(call, references):
    drawn = [(of := Draw(seed), call(of)) for seed in range(12)]
    ours = [results_of(call.__name__, *given) for _, given in drawn]
    with references():
        theirs = [results_of(call.__name__, *pytree.tree_map(wide, given)) for _, given in drawn]
    for seed, (of, _) in enumerate(drawn):
        for at, (got, right) in enumerate(zip(ours[seed], theirs[seed], strict=True)):
            where = f"seed {seed}, result {at}"
            assert (got is None) == (right is None), where
            if got is None:
                continue
            assert got.shape == right.shape, where
            if not got.is_floating_point():
                assert torch.equal(got, right), where
                continue
            got, right = got.double(), right.double()
            assert torch.equal(got.isnan(), right.isnan()) and torch.equal(got.isinf(), right.isinf()), where
            finite = right.isfinite()
            # A gradient may be 0 but for rounding: of one key's probability, say.
            size = right[finite].norm() + 0.1 * finite.sum() ** 0.5
            assert (got - right)[finite].norm() <= TOLERANCE[of.dtype] * size, where

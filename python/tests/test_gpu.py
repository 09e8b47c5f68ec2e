"""On a GPU: values and gradients of the ops, which other tests check on the CPU."""
import pytest
import torch

from cases import BACKWARDS, CASES, fp8_arguments, moe_fp8_arguments
from fftune import ops, reference
from gpu import DEVICE, GPU, on_gpu
from test_ops import DIFFERENTIABLE, each, error, leaves, listed, op_of, with_gradients

pytestmark = on_gpu
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, **({torch.float16: 1e-3} if GPU else {})}


def wide(argument, dtype):
    if isinstance(argument, torch.Tensor) and argument.dtype == dtype:
        return argument.double()
    return argument


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each(CASES + BACKWARDS)
def test_values(case, dtype):
    arguments = case.arguments(dtype, DEVICE)
    own = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)
    exact = arguments if "quantised" in case.op else tuple(wide(a, dtype) for a in arguments)
    ours = listed(op_of(case)(*own))
    theirs = listed(getattr(reference, case.op)(*exact))
    ours, theirs = ([*results, *(given[i] for i in case.updated)]
                    for results, given in ((ours, own), (theirs, exact)))
    if case.op in ("masked_ffn_preact", "moe_ffn_preact"):
        ours, theirs = ours[:1], theirs[:1]
    for got, right in zip(ours, theirs, strict=True):
        assert got.shape == right.shape and got.device.type == DEVICE
        assert error(got, right) < DTYPES[dtype]


@pytest.mark.parametrize("block", [False, True])
def test_fp8(block):
    arguments = fp8_arguments(block, DEVICE)
    got = torch.ops.fftune.ffn_fp8(*arguments)
    assert error(got, reference.ffn_fp8(*arguments)) < 2e-2


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "token", "block"])
def test_experts_in_fp8(kind, packed):
    arguments = moe_fp8_arguments(kind, packed, DEVICE)
    got = torch.ops.fftune.moe_ffn_fp8(*arguments)
    assert error(got, reference.moe_ffn_fp8(*arguments)) < 2e-2


@each(DIFFERENTIABLE)
def test_gradients_in_bf16(case):
    arguments = with_gradients(case, case.arguments(torch.bfloat16, DEVICE))
    exact = tuple(a.detach().double().requires_grad_()
                  if isinstance(a, torch.Tensor) and a.requires_grad else a for a in arguments)
    ours = listed(op_of(case)(*arguments))[:case.outputs]
    theirs = listed(getattr(reference, case.op)(*exact))[:case.outputs]
    seeds = [torch.randn(t.shape, device=DEVICE).bfloat16() for t in ours]
    got = torch.autograd.grad(ours, leaves(arguments), seeds)
    right = torch.autograd.grad(theirs, leaves(exact), [s.double() for s in seeds])
    for mine, other in zip(got, right, strict=True):
        assert error(mine, other) < 2e-2


@pytest.mark.parametrize("shape", [(1, 2048, 8192), (16, 2048, 8192), (777, 1024, 2816),
                                   (4096, 1024, 2048)], ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_ffn_block_of_models_sizes(shape, adds):
    """The sum that the norm writes is the residual of the last product."""
    m, d, h = shape if GPU else (5, 64, 96)
    random = lambda *s: torch.randn(*s, device=DEVICE).bfloat16()
    x, residual = random(m, d), random(m, d) if adds else None
    weights = random(d), random(h, d) * d**-0.5, random(h, d) * d**-0.5, random(d, h) * h**-0.5
    with torch.no_grad():
        for _ in range(3):
            got = ops.ffn_block(x, residual, *weights)
    total = x if residual is None else x + residual  # rounded, as the kernels round it
    normed = reference.rmsnorm(total, weights[0], 1e-6, "llama")
    right = reference.ffn(normed.double(), *(w.double() for w in weights[1:]), None,
                          total.double(), "silu")
    assert error(got, right) < 5e-3

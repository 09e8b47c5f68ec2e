"""On a GPU: what the other tests check on the CPU, and streams, graphs, memory and alignment.

With FFTUNE_DRY_RUN=1 those that can run on the CPU do, to see that the tests themselves are sound.
"""
import os

import pytest
import torch
import transformers

import fftune
from cases import BACKWARDS, CASES, fp8_arguments, moe_fp8_arguments
from fftune import ops, reference
from models import inputs, make
from test_ops import DIFFERENTIABLE, each, error, leaves, listed, op_of, with_gradients

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.skipif(not GPU and "FFTUNE_DRY_RUN" not in os.environ, reason="no GPU")
needs_gpu = pytest.mark.skipif(not GPU, reason="no GPU")
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, **({torch.float16: 1e-3} if GPU else {})}


@pytest.fixture(autouse=True)
def _exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


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


@needs_gpu
def test_streams_have_workspaces_of_their_own():
    x = torch.randn(300, 1024, device=DEVICE).bfloat16()
    weights = [torch.randn(*s, device=DEVICE).bfloat16() / 32 for s in
               ((2048, 1024), (2048, 1024), (1024, 2048))]
    with torch.no_grad():
        right = ops.ffn(x, *weights)
        streams = [torch.cuda.Stream() for _ in range(4)]
        torch.cuda.synchronize()
        results = []
        for _ in range(10):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(ops.ffn(x, *weights))
        torch.cuda.synchronize()
    assert all(torch.equal(result, right) for result in results)


@needs_gpu
@each(CASES)
def test_cuda_graphs(case):
    arguments = case.arguments(torch.bfloat16, DEVICE)
    op = op_of(case)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            op(*arguments)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = listed(op(*arguments))
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        again = listed(op(*arguments))
    assert all(torch.equal(a, b) for a, b in zip(captured, again))


@needs_gpu
def test_compiled_with_cuda_graphs():
    model = make("llama", torch.bfloat16, DEVICE)
    fftune.patch(model)
    example = inputs("llama", device=DEVICE)
    with torch.no_grad():
        right = model(**example, use_cache=False).logits
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        for _ in range(4):
            got = compiled(**example, use_cache=False).logits.clone()
    assert error(got, right) < 2e-2


@needs_gpu
def test_addresses_that_are_not_aligned_are_copied():
    memory = torch.randn(24 * 6 + 1, device=DEVICE)
    x = memory[1:].view(6, 24)
    w = torch.rand(25, device=DEVICE)[1:]
    assert error(ops.rmsnorm(x, w), reference.rmsnorm(x.double(), w, 1e-6, "llama")) < 1e-6


@needs_gpu
def test_a_tensor_of_the_cpu_among_those_of_the_gpu():
    with pytest.raises(fftune.Error, match="cuda:0 and on cpu"):
        ops.rmsnorm(torch.randn(2, 24, device=DEVICE), torch.randn(24))


@needs_gpu
def test_memory_goes_back():
    x = torch.randn(512, 1024, device=DEVICE).bfloat16()
    weights = [torch.randn(*s, device=DEVICE).bfloat16() for s in
               ((2048, 1024), (2048, 1024), (1024, 2048))]
    with torch.no_grad():
        ops.ffn(x, *weights)
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            ops.ffn(x, *weights)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen3", "gemma", "gpt2", "t5-gated"])
@pytest.mark.parametrize("compiled", [False, True])
def test_patched_models_in_bf16(name, compiled):
    """No further from float32 than the model itself."""
    model = make(name, torch.bfloat16, DEVICE)
    example = inputs(name, device=DEVICE)
    run = lambda m: m(**example, use_cache=False).logits.double()
    with torch.no_grad():
        exact = run(make(name, torch.float32, DEVICE))
        before = (run(model) - exact).norm()
        fftune.patch(model)
        if compiled:
            torch._dynamo.reset()
            model = torch.compile(model, fullgraph=True, backend="inductor" if GPU else "aot_eager")
        assert (run(model) - exact).norm() <= 1.2 * before


@torch.no_grad()
def decoded(model, how="eager"):
    """Logits of four steps over a static cache."""
    texts = torch.arange(3, 87).view(2, 42).to(DEVICE)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    model(texts[:, :7], past_key_values=cache)
    ids = texts[:, 7:8].clone()
    run = torch.compile(model, fullgraph=True) if how == "compiled" else model
    step = lambda: run(ids, past_key_values=cache).logits
    results, graph = [], None
    for at in range(4):
        ids.copy_(texts[:, 7 + at:8 + at])
        if how == "graph" and at == 1:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step()
        if graph is not None:
            graph.replay()
        results.append((captured if graph is not None else step()).double())
    return torch.stack(results)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "phi", "gpt2"])
@pytest.mark.parametrize("how", ["eager", "compiled", pytest.param("graph", marks=needs_gpu)])
def test_whole_layers(name, how):
    """No further from float32 than the model itself; and exactly as far in a graph."""
    if how == "graph" and name == "gemma3":
        pytest.skip("its sliding cache counts tokens in Python: a captured step is always the same")
    exact, before = (decoded(make(name, dtype, DEVICE)) for dtype in (torch.float32, torch.bfloat16))
    models = [make(name, dtype, DEVICE) for dtype in (torch.float32, torch.bfloat16)]
    for model in models:
        report = fftune.patch(model, whole_layers=True)
        assert any("by layer" in words for _, words in report.replaced), str(report)
    torch._dynamo.reset()
    wide, ours = (decoded(model, how) for model in models)
    assert error(wide, exact) < 1e-5
    assert (ours - exact).norm() <= 1.2 * (before - exact).norm()
    if how == "graph":
        assert torch.equal(ours, decoded(models[1]))


@pytest.mark.parametrize("recompute", [False, True])
def test_training_under_autocast(recompute):
    """Gradients no further from those in float32 than PyTorch's under autocast."""
    grads = []
    for patched, autocast in ((False, False), (False, True), (True, True)):
        model = make("llama", torch.float32, DEVICE).train()
        if patched:
            fftune.patch(model, recompute=recompute)
        ids = torch.arange(3, 67, device=DEVICE).view(2, 32)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    exact, theirs, ours = grads
    assert (ours - exact).norm() <= 1.3 * (theirs - exact).norm()


@needs_gpu
def test_other_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, w = torch.randn(6, 24, device="cuda:1"), torch.rand(24, device="cuda:1")
    assert error(ops.rmsnorm(x, w), reference.rmsnorm(x.double(), w, 1e-6, "llama")) < 1e-6

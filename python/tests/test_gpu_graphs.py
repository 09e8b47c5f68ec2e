"""On a GPU: streams, graphs, memory, alignment and other devices."""
import pytest
import torch

import fftune
from cases import CASES
from fftune import ops, reference
from gpu import DEVICE, needs_gpu, on_gpu
from models import inputs, make
from test_ops import each, error, listed, op_of

pytestmark = on_gpu


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


@needs_gpu
def test_other_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, w = torch.randn(6, 24, device="cuda:1"), torch.rand(24, device="cuda:1")
    assert error(ops.rmsnorm(x, w), reference.rmsnorm(x.double(), w, 1e-6, "llama")) < 1e-6

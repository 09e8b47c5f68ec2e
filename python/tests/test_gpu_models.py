"""On a GPU: models that are patched, and training."""
import pytest
import torch

import fftune
from gpu import DEVICE, GPU, on_gpu
from models import inputs, make

pytestmark = on_gpu


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

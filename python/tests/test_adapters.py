"""Low-rank adapters beside weights that are left in place: a patched model calls them, and their gradients
are those of the model."""
import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fftune
from models import make


class Adapted(nn.Module):
    """A linear layer that is frozen, and what is added to it."""

    def __init__(self, layer: nn.Linear, rank: int = 4):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


class Added(nn.Module):
    """A low-rank summand for weights of experts, [experts, out, in]."""

    def __init__(self, weight: torch.Tensor, rank: int = 4):
        super().__init__()
        experts, rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(experts, rank, columns) * 0.1)
        self.up = nn.Parameter(torch.randn(experts, rows, rank) * 0.1)

    def forward(self, weight):
        return weight + self.up @ self.down


def adapt(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    torch.manual_seed(1)
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if name in names and isinstance(part, nn.Linear):
                setattr(module, name, Adapted(part))
        for name, weight in list(module.named_parameters(recurse=False)):
            if name in names:
                parametrize.register_parametrization(module, name, Added(weight))
    return model


def with_peft(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    experts = [f"mlp.experts.{name}" for name in names if name in ("gate_up_proj",)]
    dense = [name for name in names if name not in ("gate_up_proj",)]
    if experts:
        experts.append("mlp.experts.down_proj")
        dense.remove("down_proj")
    return peft.get_peft_model(model, peft.LoraConfig(
        r=4, init_lora_weights=False, target_modules=dense, target_parameters=experts or None))


def gradients(model: nn.Module) -> tuple:
    torch.manual_seed(5)
    ids = torch.randint(3, 96, (2, 12))
    loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("patches_first", [True, False])
@pytest.mark.parametrize("memory", ["fast", "small"])
@pytest.mark.parametrize("adapts", [adapt, with_peft])
@pytest.mark.parametrize("name, names", [
    ("llama", ("q_proj", "v_proj", "gate_proj", "down_proj")), ("llama", ("up_proj", "lm_head")),
    ("qwen3", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    ("mixtral", ("q_proj", "gate_up_proj", "down_proj"))], ids=str)
def test_adapters_are_called(name, names, adapts, memory, patches_first):
    model = make(name)
    loss, right = gradients(adapts(copy.deepcopy(model), names))
    own = model
    if patches_first:
        fftune.patch(own, memory=memory)
        own = adapts(own, names)
    else:
        own = adapts(own, names)
        fftune.patch(own, memory=memory)
    frozen = [p.clone() for p in own.parameters() if not p.requires_grad]
    found, mine = gradients(own)
    assert torch.allclose(found, loss, rtol=1e-5)
    assert mine.keys() == right.keys() and len(mine) >= 2 * 2
    for key, gradient in right.items():
        assert gradient.any(), key
        assert ((mine[key] - gradient).norm() / gradient.norm()).item() < 2e-4, key
    assert all(map(torch.equal, frozen, (p for p in own.parameters() if not p.requires_grad)))

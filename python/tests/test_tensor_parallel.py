"""fftune.patch on a model that transformers splits among ranks by tp_plan="auto"."""
import os
import socket

import pytest
import torch
import transformers

import fftune
from ranks import start

tensor_parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
DistributedConfig = pytest.importorskip("transformers.distributed").DistributedConfig
apply_tensor_parallelism = tensor_parallel.apply_tensor_parallelism


def _model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2)).eval()


def _tokens() -> torch.Tensor:
    return torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(3))


def _join(rank: int, ranks: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)


def _split(rank: int, ranks: int, folder: str, port: int) -> None:
    _join(rank, ranks, port)
    # As from_pretrained(tp_plan="auto") does, which needs accelerate.
    model = _model()
    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_plan="auto", tp_size=ranks))
    apply_tensor_parallelism(model, torch.distributed.init_device_mesh("cpu", (ranks,)), plan)
    layer = model.model.layers[0]
    local = layer.mlp.down_proj.weight.to_local()
    assert local.shape == (48, 64 // ranks)
    with torch.no_grad():
        expected = model(_tokens()).logits
        report = fftune.patch(model)
        # Its sums over ranks are in forwards of transformers, which a fused kernel would pass by.
        assert "tp_forward" in str(layer.mlp.down_proj.forward)
        got = model(_tokens()).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert not [name for name, _ in report.replaced if "mlp" in name]
    whole = torch.load(os.path.join(folder, "logits.pt"))
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)


def _start(work, model, ranks: int, folder) -> None:
    with torch.no_grad():
        torch.save(model(_tokens()).logits, folder / "logits.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start(work, ranks, ranks, str(folder), port)


def test_a_model_that_is_split_stays_split(tmp_path):
    _start(_split, _model(), 2, tmp_path)


def _mixture() -> transformers.Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=48, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, num_experts=12, num_experts_per_tok=3, norm_topk_prob=True)).eval()
    for layer in model.model.layers:  # some experts that nobody chooses
        layer.mlp.gate.weight.data[:5] = 0
    return model


def _whole_experts(rank: int, ranks: int, folder: str, port: int) -> None:
    _join(rank, ranks, port)
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    model = _mixture()
    _, plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_plan="auto", tp_size=ranks, ep_size=ranks))
    mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
    apply_expert_parallelism(model, mesh, mesh, plan)
    experts = model.model.layers[0].mlp.experts
    assert experts.down_proj.to_local().shape[0] == 12 // ranks
    with torch.no_grad():
        report = fftune.patch(model)
        # Experts of other ranks are reached by transformers' forward, which a kernel would pass by.
        assert "ep_forward" in str(experts.forward)
        got = model(_tokens()).logits
    assert report.replaced and not [name for name, _ in report.replaced if name.endswith(("mlp", "experts"))]
    assert any(name.endswith("experts") and "DTensor" in reason for name, reason in report.left)
    torch.testing.assert_close(got, torch.load(os.path.join(folder, "logits.pt")), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mixture_split_by_whole_experts_stays_split(tmp_path, ranks):
    _start(_whole_experts, _mixture(), ranks, tmp_path)

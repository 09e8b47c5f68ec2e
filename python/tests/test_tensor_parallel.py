"""fftune.patch on a model that transformers splits among ranks by tp_plan="auto"."""
import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
import transformers

import fftune

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


def _split(rank: int, ranks: int, folder: str, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
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
    torch.distributed.destroy_process_group()


def test_a_model_that_is_split_stays_split(tmp_path):
    with torch.no_grad():
        torch.save(_model()(_tokens()).logits, tmp_path / "logits.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_split, (2, str(tmp_path), port), nprocs=2, start_method="spawn")

"""patch() of gpt-oss' experts in mxfp4, with the tensors that transformers loads and a forward by PyTorch."""
import types

import pytest
import torch
from torch import nn

import fftune
from fftune.patching import layers as patched_layers
from fftune.patching.mxfp4 import _storages

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Layout:
    """Turned bytes, as a kernel might want them."""

    def swizzle_data(self, data):
        return data.flip(-1).contiguous()

    def unswizzle_data(self, data):
        return data.flip(-1)


class Stored:
    """Triton's tensor, [experts, k, n] with k packed."""

    def __init__(self, data):
        self.storage = types.SimpleNamespace(layout=Layout(), data=Layout().swizzle_data(data.transpose(-1, -2)))


class Mxfp4GptOssExperts(nn.Module):
    __module__ = "transformers.integrations.mxfp4"

    def __init__(self, experts, d, h, device):
        super().__init__()
        self.num_experts, self.hidden_size, self.intermediate_size = experts, d, h
        self.alpha, self.limit = 1.702, 7.0
        for name, n, k in (("gate_up_proj", 2 * h, d), ("down_proj", d, h)):
            codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=device)
            scale = torch.randint(121, 125, (experts, n, k // 32), dtype=torch.uint8, device=device)
            setattr(self, name, Stored(codes))
            setattr(self, f"{name}_precision_config", types.SimpleNamespace(weight_scale=Stored(scale)))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(experts, n, device=device) * 0.1, False))

    def dense(self, name):
        read = lambda stored: stored.storage.layout.unswizzle_data(stored.storage.data).transpose(-1, -2)
        codes = read(getattr(self, name))
        scale = read(getattr(self, f"{name}_precision_config").weight_scale)
        values = E2M1.to(codes.device)[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
        return values * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)


class Mxfp4GptOssMLP(nn.Module):
    __module__ = "transformers.integrations.mxfp4"

    def __init__(self, experts, d, h, top_k, device):
        super().__init__()
        self.router = nn.Linear(d, experts, device=device)
        self.router.top_k, self.router.hidden_dim = top_k, d
        self.experts = Mxfp4GptOssExperts(experts, d, h, device)
        self.added = 0.0

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, self.router.hidden_dim)
        logits = nn.functional.linear(x, self.router.weight, self.router.bias)
        best = logits.float().topk(self.router.top_k)
        shares, own = best.values.softmax(-1), self.experts
        y = torch.zeros(x.shape, device=x.device)
        for i in range(own.num_experts):
            both = x.float() @ own.dense("gate_up_proj")[i].T + own.gate_up_proj_bias[i]
            gate, up = both[:, 0::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
            out = (up + 1) * gate * torch.sigmoid(own.alpha * gate) @ own.dense("down_proj")[i].T
            y += ((best.indices == i) * shares).sum(-1, True) * (out + own.down_proj_bias[i])
        return (y + self.added).to(x.dtype).reshape(hidden_states.shape[0], -1, x.shape[-1]), logits


def model_of(device, dtype):
    torch.manual_seed(3)
    mlp = Mxfp4GptOssMLP(6, 64, 96, 2, device)
    mlp.router.to(dtype)
    return nn.ModuleList([mlp])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_experts_compute_what_they_did_and_come_back(device, dtype):
    model = model_of(device, dtype)
    before = [storage.data.clone() for storage in _storages(model[0].experts)]
    names = set(model.state_dict())
    x = torch.randn(2, 9, 64, device=device, dtype=dtype)
    with torch.no_grad():
        theirs, their_logits = model[0](x)
        report = fftune.patch(model)
        assert any("moe-ffn with packed weights (mxfp4" in words for _, words in report.replaced), str(report)
        ours, logits = model[0](x)
    assert ours.dtype == dtype and torch.equal(logits, their_logits)
    assert (ours - theirs).double().norm() <= 16 * torch.finfo(dtype).eps * theirs.double().norm()
    assert set(model.state_dict()) == names
    assert all(storage.data.device.type == "cpu" for storage in _storages(model[0].experts))
    fftune.unpatch(model)
    after = [storage.data for storage in _storages(model[0].experts)]
    assert all(a.device == b.device and torch.equal(a, b) for a, b in zip(after, before))
    assert not any(name.startswith("_fftune") for name in model[0].experts._buffers)
    with torch.no_grad():
        assert torch.equal(model[0](x)[0], theirs)


def test_gradients_of_the_input_are_those_of_the_dense_experts():
    model = model_of("cpu", torch.float32)
    x = torch.randn(1, 5, 64, requires_grad=True)
    right, = torch.autograd.grad(model[0](x)[0].square().sum(), x)
    fftune.patch(model)
    ours, = torch.autograd.grad(model[0](x)[0].square().sum(), x)
    assert (ours - right).norm() <= 1e-4 * right.norm()


@pytest.mark.parametrize("change, words", ((lambda m: setattr(m.experts, "limit", 10.0), "limit 10.0"),
                                           (lambda m: setattr(m, "added", 0.5), "computes something else"),
                                           (lambda m: setattr(m.experts, "gate_up_proj_precision_config", None),
                                            "not loaded"),
                                           (lambda m: m.experts.register_forward_hook(lambda *_: None), "hooks")))
def test_others_are_left_with_the_reason(change, words):
    model = model_of("cpu", torch.float32)
    change(model[0])
    report = fftune.patch(model)
    assert any(words in reason for _, reason in report.left), str(report)
    assert "forward" not in model[0].__dict__ and not model[0].experts._buffers


def gpt_oss(device, dtype):
    """A small model of gpt-oss with its experts in mxfp4."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=6, num_experts_per_tok=2, sliding_window=64,
        max_position_embeddings=64, eos_token_id=None, pad_token_id=0))
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    for layer in model.model.layers:
        layer.mlp = Mxfp4GptOssMLP(6, 64, 96, 2, "cpu")
    for layer in model.model.layers:
        layer.mlp.experts.to(device)
        for storage in _storages(layer.mlp.experts):
            storage.data = storage.data.to(device)
    model = model.to(device, dtype).eval()
    return model


def logits_of(model, ids, steps=4):
    """A prefill, then tokens one by one in a static cache."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=32)
    logits = []
    with torch.no_grad():
        for at in (slice(0, ids.shape[1] - steps), *(slice(i, i + 1) for i in range(ids.shape[1] - steps, ids.shape[1]))):
            places = torch.arange(ids.shape[1], device=ids.device)[at]
            logits.append(model(ids[:, at], past_key_values=cache, position_ids=places[None]).logits[:, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("device, dtype", [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=DEVICES[
    1].marks)])
def test_whole_layers_run_by_one_op(device, dtype, monkeypatch):
    model = gpt_oss(device, dtype)
    ids = torch.randint(3, 96, (2, 12), device=device)
    right = logits_of(model, ids)
    best = right[0].argmax(-1)
    report = str(fftune.patch(model, whole_layers=True))
    assert "3 layers of" in report and "by layer in calls" in report, report
    calls, inner = [], patched_layers.call
    monkeypatch.setattr(patched_layers, "call", lambda *given: calls.append(1) or inner(*given))
    ours = logits_of(model, ids)
    assert len(calls) >= 4
    assert dtype != torch.float32 or torch.equal(fftune.generate(model, ids[:, :-4], 3)[:, 8], best)
    assert (ours.double() - right.double()).norm() <= 64 * torch.finfo(dtype).eps * right.double().norm()
    fftune.unpatch(model)
    assert torch.equal(logits_of(model, ids), right)

"""patch() runs each replacement before it makes it, in all modes, and leaves nothing behind."""
import copy
import itertools
import random
import types
import warnings

import pytest
import torch
import transformers
from torch import nn

import fftune
from fftune import _run as running
from fftune import ops
from fftune.patching import trial
from fftune.patching.recognise import has_fast_products
from test_left_alone import GPT2, SIZES, close, logits, make

MIXTURE = dict(SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


class Projector(nn.Module):
    """Two layers that may give another number of features than they take."""

    def __init__(self, first: int, hidden: int, last: int, act=nn.GELU, biases=(True, True)):
        super().__init__()
        self.linear_1 = nn.Linear(first, hidden, biases[0])
        self.act = act()
        self.linear_2 = nn.Linear(hidden, last, biases[1])

    def forward(self, features):
        return self.linear_2(self.act(self.linear_1(features)))


def modes():
    return itertools.product((False, True), (torch.no_grad, torch.enable_grad, torch.inference_mode))


@pytest.mark.parametrize("sizes", [(32, 64, 64), (64, 64, 32), (32, 48, 32), (24, 24, 24), (32, 96, 16)])
@pytest.mark.parametrize("act", [nn.GELU, nn.ReLU, nn.SiLU])
@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False)])
def test_two_layers_of_any_widths(sizes, act, biases):
    torch.manual_seed(0)
    module = Projector(*sizes, act, biases)
    own = copy.deepcopy(module)
    report = fftune.patch(own)
    for training, mode in modes():
        module.train(training), own.train(training)
        with mode():
            x = torch.randn(2, 5, sizes[0])
            assert close(own(x), module(x), 1e-5), (training, mode, str(report))


def test_two_layers_whose_widths_change_later():
    torch.manual_seed(0)
    module = Projector(32, 48, 32).eval()
    fftune.patch(module)
    module.linear_2 = nn.Linear(48, 16)
    with torch.no_grad():
        assert module(torch.randn(2, 32)).shape == (2, 16)


@pytest.mark.parametrize("kind, sizes, parts", [
    ("LlamaConfig", SIZES, ["rmsnorm (llama)", "LlamaMLP by ffn", "by rope", "ffn with a norm"]),
    ("GPT2Config", GPT2, ["layernorm", "bias-gelu"]), ("Qwen3MoeConfig", MIXTURE, ["moe-ffn", "moe-route"])])
def test_what_runs_is_replaced(kind, sizes, parts):
    report = fftune.patch(make(kind, **sizes))
    assert all(any(part in words for _, words in report.replaced) for part in parts), str(report)
    assert not any("tried" in words or "as such modules do" in words for _, words in report.left), str(report)


# The op that runs in a part of a model, in these modes: training, and whether gradients are computed.
OPS = [("LlamaConfig", SIZES, "ffn", "LlamaMLP"), ("LlamaConfig", SIZES, "rope", "LlamaAttention"),
       ("LlamaConfig", SIZES, "rmsnorm", "LlamaRMSNorm"), ("Qwen3MoeConfig", MIXTURE, "moe_ffn", "Qwen3MoeExperts"),
       ("Qwen3MoeConfig", MIXTURE, "moe_route", "Qwen3MoeTopKRouter"), ("GPT2Config", GPT2, "bias_gelu", "GPT2MLP")]


@pytest.mark.parametrize("kind, sizes, op, part", OPS)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_what_raises_in_one_mode_is_left_alone(kind, sizes, op, part, training, grad, monkeypatch):
    model = make(kind, **sizes)
    right, own = logits(model), getattr(ops, op)
    state = []

    def failing(*arguments, **options):
        # A stand-in of the trial is in training where the test's modes are.
        if state and state[-1] == (training, torch.is_grad_enabled()) and torch.is_grad_enabled() == grad:
            raise fftune.Error(f"{op}: it does not run here")
        return own(*arguments, **options)

    train = nn.Module.train

    def training_as(module, mode=True):
        state.append((mode, grad))
        return train(module, mode)

    monkeypatch.setattr(ops, op, failing)
    monkeypatch.setattr(nn.Module, "train", training_as)
    report = fftune.patch(model)
    monkeypatch.undo()
    assert not any(part in words and "residual" not in words for _, words in report.replaced), str(report)
    assert any("does not run" in words for _, words in report.left), str(report)
    assert close(logits(model), right)


def test_nothing_is_replaced_that_was_not_tried(monkeypatch):
    def refuse(*_):
        raise trial.Unfit("it was not tried")

    monkeypatch.setattr(trial, "_expect_to_run", refuse)
    for kind, sizes in (("LlamaConfig", SIZES), ("GPT2Config", GPT2), ("Qwen3MoeConfig", MIXTURE),
                        ("T5Config", dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64)),
                        ("BartConfig", dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64,
                                            decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4,
                                            vocab_size=64))):
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**sizes)
        model = transformers.AutoModel.from_config(config)
        report = fftune.patch(model, projections=True, whole_layers=True)
        # Decoders were run with masks and without, as stand-ins.
        assert all("mask" in words or "generate" in name for name, words in report.replaced), str(report)
        assert any("not tried" in words for _, words in report.left)


@pytest.mark.parametrize("kind, sizes", [("LlamaConfig", SIZES), ("GPT2Config", GPT2), ("Qwen3MoeConfig", MIXTURE)])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_left_behind(kind, sizes, training):
    model = make(kind, **sizes).train(training)
    model.register_buffer("count", torch.zeros(()))
    called = []
    model.base_model.register_forward_hook(lambda *_: called.append(1))
    tensors = {name: (t.clone(), t._version, t.data_ptr())
               for name, t in (*model.named_parameters(), *model.named_buffers())}
    hooks = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    states = torch.get_rng_state(), random.getstate()
    fftune.patch(model, whole_layers=True, projections=True)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        before, version, place = tensors[name]
        assert torch.equal(t, before) and t.grad is None, name
        # Weights that lie in memory the other way round are written there.
        assert t.data_ptr() != place or t._version == version, name
    assert hooks == {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    assert not called and all(m.training == training for m in model.modules())


@pytest.mark.parametrize("dtype, stays", [(torch.bfloat16, False), (torch.float32, True)])
def test_what_pytorch_does_faster_is_left_alone(dtype, stays, monkeypatch):
    """Only in 16 bits: under autocast a module of float32 runs by their kernels."""
    asked = []

    def slower(device, problem):
        asked.append(problem["op"])
        return "gate_up of ffn run by fallback kernels" if problem["op"] == "ffn" else None

    monkeypatch.setattr(running, "slower_fallback", slower)
    report = fftune.patch(make("LlamaConfig", **SIZES).to(dtype))
    assert {"ffn", "rmsnorm"} <= set(asked)
    assert any("LlamaMLP by ffn" in words for _, words in report.replaced) == stays, str(report)
    assert any("rmsnorm (llama)" in words for _, words in report.replaced)
    assert any("gate_up of ffn run by fallback kernels" in words for _, words in report.left) == (not stays)


class PlanOf:
    def __init__(self, slower):
        self.slower = slower

    def describe(self):
        return {"slower_fallback": self.slower}


def test_a_user_is_told_once_of_an_op_that_pytorch_does_faster(monkeypatch):
    monkeypatch.setattr(running, "_told", set())
    monkeypatch.setattr(running, "_slower", {})
    slower = PlanOf({"stages": ["product"], "us": 181.4, "pytorch_us": 12.3})
    linear, ffn = {"op": "linear", "pass": "fwd", "dtype": "bf16", "m": 1, "k": 4097, "n": 4096}, {"op": "ffn", "m": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running._tell_of_fallback(0, linear, PlanOf(None))
        assert running.slower_fallback(0, linear) is None
        with running.tried():  # patch() reports by itself
            running._tell_of_fallback(0, ffn, slower)
    assert "ffn" in running.slower_fallback(0, ffn)
    words = r"product of linear \(dtype=bf16, m=1, k=4097, n=4096\) .* 181 us .* than 12"
    with pytest.warns(RuntimeWarning, match=words):
        running._tell_of_fallback(0, linear, slower)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running._tell_of_fallback(0, {**linear, "m": 2}, slower)
    with pytest.warns(RuntimeWarning, match="of ffn"):
        running._tell_of_fallback(0, ffn, slower)


@pytest.mark.parametrize("device, dtype, features, fast", [
    ("cuda", torch.float32, 4096, False), ("cuda", torch.float32, 64, True), ("cuda", torch.bfloat16, 4096, True),
    ("cuda", torch.float64, 64, False), ("cpu", torch.float32, 4096, True)])
def test_products_of_float32_are_slow_on_cuda(device, dtype, features, fast, monkeypatch):
    x = types.SimpleNamespace(is_cuda=device == "cuda", is_cpu=device == "cpu", dtype=dtype, shape=(1, 8, features))
    assert has_fast_products(x) == fast
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    assert has_fast_products(x) == (dtype != torch.float64)

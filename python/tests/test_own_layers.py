"""patch() of models that fftune.quantise() rounded."""
import copy
import pickle

import pytest
import torch

import fftune
from fftune import nn as own_nn
from test_left_alone import close, ids, make

SIZES = dict(vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0)
FORMATS = {"int4": dict(group=32), "int4 with zeros": dict(group=64, zeros=True), "mxfp4": {}, "fp8": dict(group=0),
           "int8": dict(group=0), "nvfp4": {}}


def rounded(format: str, kind: str = "LlamaConfig", dtype=torch.float32, **sizes):
    return fftune.quantise(make(kind, **SIZES, **sizes).to(dtype), format.split()[0], **FORMATS[format])


def same_state(one, other) -> bool:
    states = one.state_dict(), other.state_dict()
    return list(states[0]) == list(states[1]) and all(
        a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(*map(dict.values, states)))


@torch.no_grad()
def logits(model, tokens: int = 20):
    return model(input_ids=ids(tokens), use_cache=False).logits


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind, dtype", [
    ("LlamaConfig", torch.float32), ("Qwen2Config", torch.bfloat16),
    *(pytest.param(*given, marks=pytest.mark.further) for given in (
        ("LlamaConfig", torch.bfloat16), ("Qwen2Config", torch.float32)))])
def test_all_parts_are_known(kind, format, dtype):
    model = rounded(format, kind, dtype)
    own = copy.deepcopy(model)
    report = fftune.patch(own, whole_layers=True)
    words = str(report)
    assert "LlamaMLP by ffn with packed" in words or "Qwen2MLP by ffn with packed" in words, words
    assert "2 layers" in words and not any("QuantLinear" in w for _, w in report.left), words
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for tokens in (1, 20, 100):
        assert close(logits(own, tokens), logits(model, tokens), tolerance)
    assert same_state(model, own)
    if dtype == torch.float32:
        right = model.generate(ids(), max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert torch.equal(fftune.generate(own, ids(), 8, stop=[]), right)
        assert torch.equal(own.generate(ids(), max_new_tokens=8, do_sample=False, eos_token_id=None), right)
    for other in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert close(logits(other), logits(model), tolerance) and same_state(model, other)
    fftune.unpatch(own)
    assert same_state(model, own) and torch.equal(logits(own), logits(model))
    assert not any(name.startswith("_fftune") for m in own.modules() for name in (*vars(m), *m._buffers))


@pytest.mark.parametrize("format", FORMATS)
def test_another_type_and_other_weights_later(format):
    model, other = rounded(format), rounded(format)
    own = copy.deepcopy(model)
    fftune.patch(own, whole_layers=True)
    model.to(torch.bfloat16), own.to(torch.bfloat16)
    assert close(logits(own), logits(model), 0.03)
    assert same_state(model, own)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    for each in (model, own):  # frequencies of a rotary embedding stay rounded
        each.float(), each.load_state_dict(other.state_dict())
    assert close(logits(own), logits(model))


def test_gradients_of_what_is_before_the_layers():
    model = rounded("int4").train()
    own = copy.deepcopy(model)
    fftune.patch(own)
    for each in (model, own):
        each(input_ids=ids(), labels=ids()).loss.backward()
    for (name, a), b in zip(model.named_parameters(), own.parameters()):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or close(b.grad, a.grad, 1e-4), name


def test_a_subclass_is_left_alone():
    class Other(own_nn.QuantLinear):
        def forward(self, x):
            return super().forward(x) * 2

    model = torch.nn.Sequential(Other(64, 64, group=32))
    with torch.no_grad():
        model[0].bias.fill_(1.0)
        fftune.patch(model)
        assert torch.equal(model(torch.zeros(2, 64)), torch.full((2, 64), 2.0))


def test_its_residual():
    layer = own_nn.QuantLinear.from_linear(torch.nn.Linear(64, 64), 32)
    model = torch.nn.ModuleList([layer])
    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    with torch.no_grad():
        right = layer(x, residual)
        assert fftune.patch(model).replaced
        assert close(layer(x, residual), right) and close(layer(x), right - residual)

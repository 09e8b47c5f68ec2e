"""Nothing that measures or verifies leaves a trace: parameters, buffers, gradients, hooks, arguments and their
caches, the state of modules and of random numbers are the same bits and objects afterwards."""
import contextlib
import copy
import random

import numpy
import pytest
import torch
from torch import nn

import fftune
from fftune import tuning
from models import RELEASE, inputs, make

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_transformers_5 = pytest.mark.skipif(RELEASE < (5, 0), reason="transformers is older than 5")


def state_of(value, seen=None):
    """Any value as one that can be compared: contents and places of tensors, attributes of objects."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, torch.Tensor):
        seen[id(value)] = len(seen)
        return ("tensor", id(value), value._version, value.data_ptr(), value.detach().double().sum().item(),
                state_of(value.grad, seen) if value.is_leaf else None)
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)):
        return value
    if isinstance(value, dict):
        return [(str(key), state_of(own, seen)) for key, own in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [state_of(own, seen) for own in value]
    seen[id(value)] = len(seen)
    if isinstance(value, nn.Module) or type(value).__module__.startswith(("transformers.cache", "test_")):
        return type(value).__name__, state_of(vars(value), seen)
    return str(type(value))


def random_numbers():
    of_gpus = [s.tolist() for s in torch.cuda.get_rng_state_all()] if DEVICE == "cuda" else None
    return torch.get_rng_state().tolist(), of_gpus, random.getstate(), str(numpy.random.get_state())


class Untidy(nn.Module):
    """A module that writes wherever a module can."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 32, max_norm=0.5)
        self.norm = fftune.nn.RMSNorm(32)
        self.batch = nn.BatchNorm1d(32)
        self.product = nn.Linear(32, 32)
        self.turned = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("past", torch.zeros(8, 32))
        self.count, self.seen = 0, []

    def forward(self, ids, scale, past=None):
        self.count += 1
        self.seen.append(self.count)
        self.calls += 1
        scale.mul_(2)
        numpy.random.rand(), random.random()
        x = self.drop(self.batch(self.turned(self.product(self.norm(self.words(ids))))))
        self.past.copy_(x[:8].detach())
        if past is not None:
            past.add(x)
        return x * scale


class Past:
    """A cache of the user's."""

    def __init__(self):
        self.rows, self.dtype, self.length = torch.zeros(16, 32, device=DEVICE), torch.float32, 0

    def add(self, x):
        self.rows[self.length] = x[0].detach()
        self.length += 1


def untidy():
    """Such a module with hooks that step, and what it is called with."""
    model = Untidy().train().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_hook(lambda g: optimizer.step())
        parameter.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    model.register_forward_hook(lambda *_: optimizer.step())
    model.product.register_full_backward_hook(lambda *_: optimizer.step())
    model.norm.register_forward_pre_hook(lambda module, given: model.seen.append(given))
    ids, scale = torch.randint(40, (9,), device=DEVICE), torch.ones(32, device=DEVICE)
    return model, {"ids": ids, "scale": scale, "past": Past()}


@pytest.fixture
def no_search(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "_search", lambda *_: None)
    monkeypatch.setenv("FFTUNE_PRESETS", str(tmp_path))


def expect_no_trace(run, *things):
    before = state_of(things), random_numbers()
    copies = [copy.deepcopy(t.state_dict()) for t in things if isinstance(t, nn.Module)]
    result = run()
    assert state_of(things) == before[0]
    assert random_numbers() == before[1]
    for own, kept in zip((t for t in things if isinstance(t, nn.Module)), copies):
        for name, tensor in own.state_dict().items():
            assert torch.equal(tensor, kept[name]), name
    return result


@pytest.mark.parametrize("train", [False, True])
def test_tune_of_a_module_that_writes_everywhere(train, no_search):
    model, example = untidy()
    report = expect_no_trace(lambda: fftune.tune(model, example, train=train), model, example)
    assert not report.failed


def test_check_of_a_module_that_writes_everywhere():
    model, example = untidy()
    model.eval()  # random numbers of float64 are others
    report = expect_no_trace(lambda: fftune.check(model, example), model, example)
    assert report.good, str(report)


@pytest.mark.parametrize("train", [False, True])
def test_inputs_that_want_gradients(train, no_search):
    model, x = fftune.nn.RMSNorm(32).to(DEVICE), torch.randn(5, 32, device=DEVICE, requires_grad=True)
    for given in (x, x * 2, nn.Parameter(x.detach())):
        expect_no_trace(lambda: fftune.tune(model, [given], train=train), model, given)
        expect_no_trace(lambda: fftune.check(model, [given]), model, given)


@pytest.mark.parametrize("options", [{}, {"attention": True}, {"whole_layers": True}, {"memory": "small"},
                                     {"graphs": True}])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5-gated", *["mixtral", "gemma2"] * (RELEASE >= (5, 0))])
def test_patch_draws_no_random_numbers(name, options):
    model = make(name, device=DEVICE)
    weights = {key: t.clone() for key, t in model.state_dict().items()}
    before = random_numbers()
    fftune.patch(model.train(), **options)
    assert random_numbers() == before
    assert all(torch.equal(t, weights[key]) for key, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@needs_transformers_5
@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
def test_caches_in_examples(kind, no_search):
    import transformers

    model = make("llama", device=DEVICE)
    fftune.patch(model)
    ids = inputs("llama", device=DEVICE)["input_ids"]
    options = {} if kind == "DynamicCache" else {"max_cache_len": 10}
    cache = getattr(transformers, kind)(config=model.config, **options)
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache)
    example = {"input_ids": ids[:, 6:], "past_key_values": cache}
    # More calls than the cache has places.
    assert expect_no_trace(lambda: fftune.check(model, example), model, cache).good
    expect_no_trace(lambda: fftune.tune(model, example), model, cache)


def test_what_cannot_be_copied_is_an_error():
    model = fftune.nn.RMSNorm(32)
    model.handle = (line for line in ())
    with pytest.raises(fftune.Error, match="tune: RMSNorm cannot be copied.*give a part"):
        fftune.tune(model, torch.randn(5, 32))
    with pytest.raises(fftune.Error, match="check: RMSNorm cannot be copied"):
        fftune.check(model, torch.randn(5, 32))
    del model.handle
    with pytest.raises(fftune.Error, match="check: list cannot be copied"):
        fftune.check(model, [torch.randn(5, 32), (line for line in ())])


@contextlib.contextmanager
def _default_type(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("setting", [
    lambda: _default_type(torch.bfloat16), lambda: _default_type(torch.float64), lambda: torch.device("meta"),
    lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode], ids=["bf16", "f64", "device", "autocast", "inference"])
def test_patch_does_not_depend_on_what_its_caller_has_set(setting):
    right = fftune.patch(make("llama"), whole_layers=True)
    model = make("llama")
    with setting():
        dtype, device = torch.get_default_dtype(), torch.empty(0).device
        report = fftune.patch(model, whole_layers=True)
        assert (torch.get_default_dtype(), torch.empty(0).device) == (dtype, device)
        assert torch.is_autocast_enabled("cpu") == isinstance(setting(), torch.autocast)
    assert report.replaced == right.replaced and report.left == right.left

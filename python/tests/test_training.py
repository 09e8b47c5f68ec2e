"""graphed(): losses and gradients of replayed steps are those of the model. Without a GPU a stand-in runs
the captured step again on the memory of the capture, as a graph does."""
import copy
import inspect
import warnings

import pytest
import torch
from torch import nn

import fftune
from fftune.patching import training
from models import inputs, make

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Rerun:
    """A graph's stand-in."""

    pool = None

    def capture(self, run, pool):
        self.run, self.results = run, run()
        self.parameters = inspect.getclosurevars(run).nonlocals["parameters"]
        return self.results

    def replay(self):
        there = [p.grad for p in self.parameters]
        for own, new in zip(self.results, self.run(), strict=True):
            if own is not None:
                own.copy_(new)
        for p, gradient in zip(self.parameters, there):
            p.grad = gradient


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(training, "_Graph", Rerun)
        monkeypatch.setattr(training, "_is_on_gpu", lambda parameter: True)


def pair(name="gpt2", patched=True, **options):
    """A model in training, and a copy of it as a graphed step."""
    model = make(name, device=DEVICE).train()
    own = copy.deepcopy(model)
    if patched:
        fftune.patch(own)
    return model, own, fftune.graphed(own, **options)


def batches(name, count, **sizes):
    found = []
    for i in range(count):
        torch.manual_seed(i)
        batch = inputs(name, device=DEVICE, **sizes)
        ids = batch["input_ids"]
        found.append({"input_ids": ids.roll(i, -1), "labels": ids.roll(i, -1)})
    return found


def graphs(step):
    return sum(each.graph is not None for each in step._steps.values())


def close(a, b):
    assert torch.allclose(a.float(), b.float(), rtol=2e-4, atol=2e-5), (a - b).abs().max()


def compare(model, own):
    for (name, one), other in zip(model.named_parameters(), own.parameters(), strict=True):
        if one.grad is None:
            assert other.grad is None, name
        else:
            close(one.grad, other.grad)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("to_none", [True, False])
def test_steps_train_as_the_model_does(name, to_none):
    model, own, step = pair(name)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, own)]
    for batch in batches(name, 6):
        loss = model(**batch).loss
        loss.backward()
        found = step(**batch)
        assert not found.requires_grad
        close(found, loss.detach())
        compare(model, own)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    assert graphs(step) == 1


def test_gradients_are_added_to_those_that_are_there():
    model, own, step = pair()
    for i, batch in enumerate(batches("gpt2", 6)):
        if i == 3:  # from here on to the graph's own
            model.zero_grad()
            own.zero_grad()
        model(**batch).loss.backward()
        step(**batch)
        compare(model, own)
    assert graphs(step) == 1
    for m in (model, own):  # others than the graph's
        for p in m.parameters():
            p.grad = torch.ones_like(p)
    mine = [p.grad for p in own.parameters()]
    batch = batches("gpt2", 1)[0]
    model(**batch).loss.backward()
    step(**batch)
    compare(model, own)
    assert all(p.grad is gradient for p, gradient in zip(own.parameters(), mine))


def test_a_loss_of_an_earlier_step_stays():
    _, _, step = pair()
    losses = [step(**batch) for batch in batches("gpt2", 4)]
    again = [float(loss) for loss in losses]
    step(**batches("gpt2", 1)[0])
    assert [float(loss) for loss in losses] == again and len(set(again)) > 1


def test_shapes_settings_and_addresses_have_graphs_of_their_own():
    model, own, step = pair()
    first, second = batches("gpt2", 1)[0], {k: v[:, :5] for k, v in batches("gpt2", 1)[0].items()}

    def run(batch):
        for m in (model, own):
            m.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        close(step(**batch), loss.detach())
        compare(model, own)

    for batch in (first, second, first, second, first):
        run(batch)
    assert graphs(step) == 2
    with torch.no_grad():
        for m in (model, own):
            p = m.get_input_embeddings().weight
            p.data = p.data.clone() * 1.5
    for _ in range(3):
        run(first)
    assert graphs(step) == 3
    for m in (model, own):
        next(m.parameters()).requires_grad_(False)
    for _ in range(3):
        run(first)
    assert graphs(step) == 4


def test_a_loss_function_of_ones_own():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)
    own = copy.deepcopy(model)
    step = fftune.graphed(own, loss=lambda y: y.square().mean() / 8)
    for _ in range(4):
        x = torch.randn(4, 8, device=DEVICE)
        (model(x).square().mean() / 8).backward()
        step(x)
        compare(model, own)
    assert graphs(step) == 1


def test_hooks_are_called():
    _, own, step = pair()
    seen = []
    handle = next(own.parameters()).register_hook(lambda gradient: seen.append(1))
    batch = batches("gpt2", 1)[0]
    with pytest.warns(UserWarning, match="steps run as usual: hooks of parameters"):
        step(**batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(**batch)  # says it once
    assert len(seen) == 2 and graphs(step) == 0
    handle.remove()
    own.register_forward_pre_hook(lambda module, given: seen.append(2))
    for _ in range(3):
        step(**batch)
    assert seen[2:] == [2] * 3


def test_a_failed_capture_leaves_steps_as_they_were(monkeypatch):
    model, own, step = pair()

    def fail(self, run, pool):
        run()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(training._Graph, "capture", fail)
    for i, batch in enumerate(batches("gpt2", 3)):
        model(**batch).loss.backward()
        if i == 1:
            with pytest.warns(UserWarning, match="capture failed: RuntimeError: operation not permitted"):
                step(**batch)
        else:
            step(**batch)
        compare(model, own)
    assert graphs(step) == 0


def test_wrong_calls_have_one_line():
    with pytest.raises(fftune.Error, match="graphed: int is not a torch.nn.Module: give a model"):
        fftune.graphed(3)
    _, _, step = pair()
    for _ in range(3):
        with pytest.raises(fftune.Error, match="the model gives no loss"):
            step(input_ids=batches("gpt2", 1)[0]["input_ids"])


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_dropout_differs_from_replay_to_replay():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).to(DEVICE)
    step = fftune.graphed(model, loss=lambda y: y.square().mean())
    x = torch.randn(32, 64, device=DEVICE)
    assert len({float(step(x)) for _ in range(6)}) == 6 and graphs(step) == 1


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_steps_under_autocast():
    model, own, step = pair()
    for batch in batches("gpt2", 4):
        for m in (model, own):
            m.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(**batch).loss
            found = step(**batch)
        loss.backward()
        assert abs(found - loss) < 0.02 * loss
    assert graphs(step) == 1

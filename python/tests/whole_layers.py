"""Models by whole layers, beside what they were."""
import copy

import pytest
import torch
import transformers

import fftune
from fftune import _run
from fftune._custom import OPS
from fftune.patching import decoding
from models import inputs


def patched_layers(model, **options):
    """A copy of the model by whole layers, and the report's words for its decoder."""
    patched = copy.deepcopy(model)
    report = fftune.patch(patched, whole_layers=True, **options)
    return patched, [w for _, w in report.replaced + report.left if w.startswith("layers:") or "by layer in" in w]


def generates_alike(model, layers, options):
    """A copy by whole layers, ids, the model's tokens, which are the copy's too, and the problems of its layers."""
    ids = inputs("llama")["input_ids"]
    before = model.generate(ids, **options)
    patched, words = patched_layers(model)
    assert [w for w in words if f"{layers} layers" in w], words
    found = {}
    with _run.listening(found):
        assert torch.equal(patched.generate(ids, **options), before)
    return patched, ids, before, [problem for _, problem in found.values() if problem["op"] == "layer"]


def run_over_cache(model, ids, past=None):
    """Logits, and the cache of a call for these ids."""
    past = transformers.StaticCache(config=model.config, max_cache_len=40) if past is None else past
    with torch.no_grad():
        return model(ids, past_key_values=past, use_cache=True).logits, past


def error(ours, theirs) -> float:
    return float(((ours - theirs).norm() / theirs.norm()).detach())


@pytest.fixture
def steps(monkeypatch):
    """The arguments of the steps that the op decode has run, as they were before them."""
    seen, original = [], decoding.call

    def listen(op, *arguments):
        if op is OPS.decode:
            seen.append(copy.deepcopy(arguments))
        return original(op, *arguments)

    monkeypatch.setattr(decoding, "call", listen)
    return seen

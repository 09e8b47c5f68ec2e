"""vLLM's plugin takes the faster computation, by times that it measures on the user's device."""
import importlib
import json
import logging
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import test_vllm_layers as layers_tests
from test_vllm_layers import Captured, batch_of, graphed, lines_of, stand_in, step  # noqa: F401  (a fixture)


@pytest.fixture
def faster(vllm, tmp_path, monkeypatch):
    """The module, with a cache of its own, for a device of no name."""
    monkeypatch.setenv("FFTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    return importlib.import_module("fftune.vllm.faster")


def test_neighbours_decide(faster):
    choice = faster.Choice({1: (2.0, 1.0), 16: (1.0, 0.98), 64: (1.0, 0.995), 128: (1.0, 1.2)})
    assert [rows for rows in (1, 2, 15, 16, 17, 64, 100, 128, 400) if choice.is_faster(rows)] == [1, 2, 15, 16]
    assert not faster.Choice().is_faster(1), "nothing is known"
    assert choice.words() == "1: 2.00, 16: 1.02, 64: 1.01 (vLLM), 128: 0.83 (vLLM)"


@pytest.mark.parametrize("times, everywhere", [
    ({1: (2, 1), 64: (1, 1.02)}, True), ({1: (2, 1), 64: (1, 1.04)}, False), ({1: (1, 1.01), 64: (1, 1.0)}, False)])
def test_a_weight_in_memory_once(faster, times, everywhere):
    assert faster.Choice(times).is_faster_everywhere() == everywhere


class Times:
    """Stands in for milliseconds(): each run adds its own time."""

    def __init__(self, monkeypatch, faster, own, mine):
        self.asked = 0

        def milliseconds(*runs, among=None, captured=True):
            self.asked += 1
            return own, mine

        monkeypatch.setattr(faster, "milliseconds", milliseconds)


def choice_of(faster, counts, runs, **options):
    return faster.choice_of("a kind", lambda count: nullcontext((lambda: runs.append(count), lambda: None)), counts,
                            "sizes", **options)


def test_a_measurement_draws_no_random_numbers_of_the_engine(faster, monkeypatch):
    Times(monkeypatch, faster, 3.0, 2.0)
    before = torch.get_rng_state()
    faster.choice_of("a kind", lambda count: nullcontext((lambda: torch.rand(count), lambda: None)), (1, 8))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_choice_is_kept_for_the_next_start(faster, monkeypatch, tmp_path):
    times, runs = Times(monkeypatch, faster, 3.0, 2.0), []
    first = choice_of(faster, (1, 8, 1), runs, outside=lambda: 0.5)
    assert first.times == {1: (2.5, 2.0), 8: (2.5, 2.0)} and runs == [1, 8] and times.asked == 2
    assert choice_of(faster, (1, 8), runs).times == first.times and times.asked == 2
    file, = (tmp_path / "vllm").glob("*.json")
    assert json.loads(file.read_text())["what"] == "a kind"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another device")
    choice_of(faster, (1,), runs)
    assert times.asked == 3


@pytest.mark.parametrize("entry, changed", [("a", "a/own.json"), ("own.json", "own.json"), ("a:own.json", "own.json"),
                                            ("a:own.json", "a/b/own.json"), ("missing", "data/fftune/presets/own.json")])
def test_a_choice_is_measured_again_with_other_presets(faster, monkeypatch, tmp_path, entry, changed):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("FFTUNE_PRESETS", ":".join(str(tmp_path / own) for own in entry.split(":")))
    file = tmp_path / changed
    file.parent.mkdir(parents=True, exist_ok=True)
    keys = [faster.key_of("a kind")]
    for text in ("{}", "{ }"):
        file.write_text(text)
        keys.append(faster.key_of("a kind"))
    (tmp_path / "other.json").write_text("{}")
    assert len({*keys}) == 3 and faster.key_of("a kind") == keys[-1]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"milliseconds": {"1": [1]}}', '{"milliseconds": {"a": [1, 2]}}',
                                  '{"milliseconds": 3}'])
def test_a_damaged_file_is_measured_again(faster, monkeypatch, tmp_path, text):
    times, runs = Times(monkeypatch, faster, 3.0, 2.0), []
    choice_of(faster, (1,), runs)
    file, = (tmp_path / "vllm").glob("*.json")
    file.write_text(text)
    assert choice_of(faster, (1,), runs).times == {1: (3.0, 2.0)} and times.asked == 2


def test_a_folder_that_cannot_be_written(faster, monkeypatch, tmp_path, caplog):
    Times(monkeypatch, faster, 3.0, 2.0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FFTUNE_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO):
        assert choice_of(faster, (1,), []).is_faster(1)
    assert "is not kept for the next start" in caplog.text


def test_a_start_is_not_held_up(faster, monkeypatch):
    times, runs = Times(monkeypatch, faster, 3.0, 2.0), []
    monkeypatch.setattr(faster, "BUDGET", -1.0)
    assert choice_of(faster, (1, 8, 64), runs).times == {1: (3.0, 2.0)}


class DeviceCache(torch.Tensor):
    """A cache that says that it is on a device."""

    is_cuda = True


@pytest.fixture
def measured(faster, stand_in, monkeypatch):  # noqa: F811
    """Times of the layers are measured: fftune's are faster for up to 8 sequences."""
    layers = importlib.import_module("fftune.vllm.layers")
    monkeypatch.setattr(faster, "BUDGET", 1e9)
    monkeypatch.setattr(layers, "_is_measured", lambda state: True)
    monkeypatch.setattr(sys.modules["test_vllm_layers"], "BLOCKS", 200)
    rows = []

    def milliseconds(own, mine, among=None, captured=True):
        before = layers_tests.RUNS[:]
        own()
        rows.append(layers_tests.RUNS[len(before)])
        mine()
        return 1.0, 0.5 if rows[-1] <= 8 else 1.5

    monkeypatch.setattr(faster, "milliseconds", milliseconds)
    return SimpleNamespace(rows=rows, layers=layers)


def counting(model):
    """The model, whose own layers note their numbers of rows."""
    layers_tests.RUNS = runs = []
    forward = model.forward

    def noted(ids, *arguments, **named):
        runs.append(len(ids))
        return forward(ids, *arguments, **named)

    model.forward = noted
    return model


def test_batches_run_where_they_are_faster(measured, stand_in, monkeypatch, caplog):  # noqa: F811
    captured, model = Captured(monkeypatch), counting(graphed(stand_in))
    before = layers_tests.caches(model).clone()
    metadata, positions = batch_of(model, (5,) * 16)
    with caplog.at_level(logging.INFO):
        step(model, metadata, positions)
    assert sorted(measured.rows) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    line, = lines_of(caplog)
    assert line.endswith("by sequences: 1: 2.00, 2: 2.00, 4: 2.00, 8: 2.00, 16: 0.67 (vLLM), 24: 0.67 (vLLM), "
                         "32: 0.67 (vLLM), 48: 0.67 (vLLM), 64: 0.67 (vLLM)")
    for count, calls in ((16, 1), (9, 1), (8, 0), (3, 0)):
        metadata, positions = batch_of(model, (5,) * count)
        captured.now = False
        step(model, metadata, positions)
        captured.now, model.calls = True, 0
        step(model, metadata, positions)
        assert model.calls == calls
    assert len(measured.rows) == 9, "once"
    assert before.shape == layers_tests.caches(model).shape


def test_a_measurement_leaves_no_trace(measured, stand_in):  # noqa: F811
    model = counting(graphed(stand_in))
    metadata, positions = batch_of(model, (5,) * 4)
    plain = batch_of(model, (5,) * 4)
    before = layers_tests.caches(model).clone()
    metadata = layers_tests.changed(metadata, slot_mapping=torch.full((4,), -1))
    step(model, metadata, positions)
    assert measured.rows and torch.equal(layers_tests.caches(model), before)
    assert plain is not None


@pytest.mark.parametrize("queries", [1, 4])
def test_a_profile_run_is_vllms(measured, stand_in, monkeypatch, queries):  # noqa: F811
    """It has a block for each of 8 sequences: too few for the new tokens alone of sequences that verify drafts."""
    monkeypatch.setattr(sys.modules["test_vllm_layers"], "BLOCKS", 8)
    model = counting(graphed(stand_in))
    if queries > 1:
        model.vllm_config.speculative_config = layers_tests.verifying(queries - 1)
    metadata, positions = batch_of(model, (5,) * 2, 0, [queries] * 2)
    step(model, metadata, positions)
    assert model.calls == 1 and not measured.rows and not measured.layers._states[model].tested
    monkeypatch.setattr(sys.modules["test_vllm_layers"], "BLOCKS", 200)
    for layer in model.layers:
        layer.self_attn.attn.kv_cache = layers_tests.cache_of()
    step(model, *batch_of(model, (5,) * 2, 0, [queries] * 2))
    assert measured.rows


def test_an_error_in_a_measurement_leaves_the_model_to_vllm(measured, stand_in, faster, monkeypatch, caplog):  # noqa: F811
    def fails(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(faster, "milliseconds", fails)
    model = graphed(stand_in)
    with caplog.at_level(logging.INFO):
        step(model, *batch_of(model))
    step(model, *batch_of(model))
    assert caplog.text.count("layers of LlamaModel stay vLLM's: RuntimeError: out of memory") == 1

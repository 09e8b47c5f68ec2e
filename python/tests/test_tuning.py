"""tune, check, explain, and the tool."""
import json
import re
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import fftune
from fftune import tuning
from models import inputs, make


def test_tune_writes_presets_that_are_then_used(tmp_path, monkeypatch):
    monkeypatch.setenv("FFTUNE_PRESETS", str(tmp_path))
    model = fftune.nn.RMSNorm(64)
    x = torch.randn(6, 64)
    report = fftune.tune(model, x, budget=1, presets=tmp_path, keep_undecided=True)
    assert not report.failed and len(report.searched) == 1, str(report)
    records = json.loads(next(tmp_path.glob("*/rmsnorm.json")).read_text())
    assert records
    model(x)
    again = fftune.tune(model, x, budget=1, presets=tmp_path, keep_undecided=True)
    assert len(again.served) == 1 and not again.searched


def test_tune_collects_the_problems_of_a_model(tmp_path, monkeypatch):
    monkeypatch.setenv("FFTUNE_PRESETS", str(tmp_path))
    model = make("llama")
    fftune.patch(model)
    searched = []
    monkeypatch.setattr(tuning, "_search",
                        lambda report, device, problem, *rest: searched.append(problem))
    fftune.tune(model, inputs("llama"), presets=tmp_path)
    assert sorted(p["op"] for p in searched) == ["ffn", "linear", "qkv", "rmsnorm"]
    searched.clear()
    fftune.tune(model.train(), inputs("llama"), train=True, presets=tmp_path)
    assert {"ffn", "rmsnorm", "rope"} == {p["op"] for p in searched if p["pass"] == "bwd"}


def test_tune_knows_the_tokens_of_every_op(tmp_path, monkeypatch):
    from transformers import StaticCache

    monkeypatch.setenv("FFTUNE_PRESETS", str(tmp_path))
    model = make("llama")
    fftune.patch(model, attention=True)
    found = []
    monkeypatch.setattr(tuning, "_search", lambda report, device, problem, tokens, *rest:
                        found.append((problem["op"], tokens)))
    fftune.tune(model, {**inputs("llama"), "use_cache": False}, presets=tmp_path)
    assert ("attention", [9]) in found
    fftune.patch(model, whole_layers=True)
    cache = StaticCache(config=model.config, max_cache_len=16)
    fftune.tune(model, {**inputs("llama", batch=3), "past_key_values": cache}, presets=tmp_path)
    assert ("layer", [3]) in found
    assert set(tuning._token_sizes().values()) == {"m", "n", "s", "b", "batch"}


def test_tune_says_when_there_is_nothing_to_tune():
    with pytest.raises(fftune.Error, match="patch it first"):
        fftune.tune(nn.Linear(4, 4), torch.randn(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_of_a_layer(dtype):
    model = make("llama", dtype)
    x = torch.randn(2, 9, 32, dtype=dtype)
    positions = model.model.rotary_emb(x, torch.arange(9)[None])
    report = fftune.check(model.model.layers[0],
                          {"hidden_states": x, "position_embeddings": positions})
    assert report.good and 0 < report.error < 1e-2 and report.microseconds > 0
    assert "norm, MLP and residual" in report.replaced
    assert "good" in str(report)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_check_of_a_mixture(name):
    """PyTorch does not compute its products of experts in float64."""
    report = fftune.check(make(name), {**inputs("llama"), "use_cache": False})
    assert report.good and 0 < report.error < 1e-5, report


def test_check_finds_what_is_wrong(monkeypatch):
    from fftune import ops

    right = ops.ffn

    def wrong(x, *arguments, **options):  # not where patch() tries it
        return right(x, *arguments, **options) * (1.01 if len(x) == 5 else 1)

    monkeypatch.setattr(ops, "ffn", wrong)
    mlp = make("llama").model.layers[0].mlp
    assert not fftune.check(mlp, torch.randn(5, 32)).good


def test_work_of_others_is_told_and_ones_own_is_not(monkeypatch):
    readings = iter([(0.0, 0.0, 0.0), (10.0, 4.9, 4.5), (0.0, 0.0, 0.0), (10.0, 14.5, 4.5)])
    monkeypatch.setattr(tuning.OtherWork, "_reading", lambda self: next(readings))
    monkeypatch.setattr(tuning.os, "sched_getaffinity", lambda _: {0, 1})
    assert str(tuning.OtherWork()) == ""
    assert str(tuning.OtherWork()).startswith("disturbed: other processes use 1 of its 2 cores")


def test_work_of_another_process_is_counted():
    cores = sorted(tuning.os.sched_getaffinity(0))
    others = tuning.OtherWork()
    run = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cores]
    time.sleep(1)
    note = str(others)
    for process in run:
        process.kill()
        process.wait()
    assert f"of its {len(cores)} cores" in note


def test_the_line_of_a_device():
    assert re.fullmatch(r"cpu: .+, \d+ cores", tuning.device_line("cpu"))


def test_check_tells_what_others_did(monkeypatch):
    monkeypatch.setattr(tuning.OtherWork, "__str__", lambda self: "disturbed: by a test")
    assert "\ndisturbed: by a test\n" in str(fftune.check(fftune.nn.RMSNorm(32), torch.randn(5, 32)))


def test_explain():
    described = fftune.explain({"op": "ffn", "m": 16, "d": 64, "h": 96}, "cpu")
    assert described["problem"]["m"] == 16 and described["variants"] and described["reason"]
    with pytest.raises(fftune.Error, match="ffm"):
        fftune.explain({"op": "ffm", "m": 16}, "cpu")


def test_the_tool():
    done = subprocess.run([sys.executable, "-m", "fftune", "ops"], capture_output=True, text=True)
    assert done.returncode == 0 and "ngram-block" in done.stdout


@pytest.mark.parametrize("make", [
    lambda: fftune.nn.GatedMLP(32, 48), lambda: fftune.nn.MoE(32, 48, 4, 2), lambda: fftune.nn.RMSNorm(32),
    lambda: fftune.quantise(torch.nn.Sequential(torch.nn.Linear(32, 48)), "fp8", group=32)])
def test_check_takes_modules_of_fftunes_own_ops(make):
    """In float64, which has no kernels, they run their references."""
    report = fftune.check(make(), torch.randn(5, 32))
    assert report.good, report

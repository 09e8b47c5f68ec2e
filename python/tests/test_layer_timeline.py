"""bench/layer_timeline.py without a GPU: its rows of a known trace, and the layers that it runs."""
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))  # behind the tests, whose modules have some of its names

import layer_timeline as timeline  # noqa: E402
from layer_timeline import Kernel  # noqa: E402


def trace(layers, before=0):
    """Layers of three kernels, 10 us each: norm, and a product in whose last microsecond attention starts."""
    kernels = [Kernel("copy", float(at), at + 1.0) for at in range(before)]
    for zero in range(100, 100 + 10 * layers, 10):
        kernels += [Kernel("norm", zero, zero + 2.0), Kernel("product", zero + 1.5, zero + 7.0),
                    Kernel("attention", zero + 6.0, zero + 10.0)]
    return kernels


@pytest.mark.parametrize("before", (0, 1, 2))
def test_rows_are_an_inner_layer(before):
    rows = timeline.rows_of([trace(6, before), trace(6, before)], 6)
    # The row in front of which others end may be any: a layer has no mark at which it begins.
    assert sorted(row.name for row in rows) == ["attention", "norm", "product"]
    assert {row.name: row.adds for row in rows} == {"norm": 2.0, "product": 5.0, "attention": 3.0}
    assert sum(row.adds for row in rows) == 10.0
    if not before:
        assert rows[1] == ("product", 1.5, 7.0, 5.0)


def test_kernels_that_do_not_repeat_are_one_launch():
    with pytest.raises(ValueError, match="1 kernels of 6 layers"):
        timeline.rows_of([[Kernel("persistent", 0.0, 60.0)]], 6)
    with pytest.raises(ValueError, match="do not repeat"):
        timeline.rows_of([[kernel._replace(name=f"{at % 7}") for at, kernel in enumerate(trace(6))]], 6)


@pytest.mark.parametrize("name", timeline.MODELS)
def test_models_run(name):
    model = timeline.MODELS[name]
    small = replace(model, d=256, h=256, heads=4, kv_heads=2, dim=64, experts=min(model.experts, 8),
                    chosen=min(model.chosen, 2))
    weights = [timeline.make_layer(small, "cpu") for _ in range(2)]
    y = timeline.call_of(small, weights, 3, 16, "cpu")()
    assert y.shape == (3, 1, 256) and torch.isfinite(y).all()


def test_floors_are_the_bytes_of_weights_and_caches():
    model = timeline.MODELS["llama-3.2-1b"]
    weights = 2 * 2048 * (64 * (32 * 2 + 8 * 2) + 3 * 8192)
    assert timeline.floor_bytes(model, 16, 512) == weights + 16 * 512 * 2 * 2 * 8 * 64
    experts = timeline.MODELS["qwen3-30b-a3b"]
    one, all_ = (timeline.floor_bytes(experts, batch, 1) for batch in (1, 4096))
    assert (all_ - one) / (2 * 2048 * 3 * 768) == pytest.approx(120, abs=8)

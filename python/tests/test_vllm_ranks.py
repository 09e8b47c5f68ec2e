"""Whole layers in vLLM's decode batches under tensor parallelism: a process for each rank, with a slice
of the stand-in's model and a group on the CPU."""
import importlib
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import test_vllm_layers as of_layers
from ranks import start
from test_vllm_layers import MODELS, batch_of, caches, expect_right, model_of, step, warm


def _start(work, tmp_path, *arguments, ranks=2):
    start(_rank, ranks, work, ranks, str(tmp_path / "meeting"), *arguments)


def _rank(rank, work, ranks, meeting, *arguments):
    sys.path.insert(0, str(Path(__file__).parent / "stand_ins"))
    os.environ["FFTUNE_VLLM"] = "layers,ranks"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    importlib.import_module("fftune.vllm").register()
    import vllm.distributed

    vars(vllm.distributed._ranks).update(world_size=ranks, rank_in_group=rank, cpu_group=dist.group.WORLD)
    of_layers.cache_of = of_layers.CACHES["0.24.0"]
    lines = []
    logging.getLogger("vllm.fftune").addHandler(SimpleNamespace(
        level=0, handle=lambda record: lines.append(record.getMessage())))
    logging.getLogger("vllm.fftune").setLevel(logging.INFO)
    work(rank, importlib.import_module("vllm.model_executor.models.llama"), lines, *arguments)
    dist.barrier()
    for state in list(importlib.import_module("fftune.vllm.layers")._states.values()):
        if state.model is not None and state.model.group is not None:
            state.model.group.close()


def _model(rank, stand_in, kind="llama", **changes):
    """A rank's slice of a model: other heads and features, and the same of everything else."""
    torch.manual_seed(7)
    model = model_of(stand_in, kind, tp=2, **changes)
    torch.manual_seed(20 + rank)
    for layer in model.layers:
        own, network = layer.self_attn, layer.mlp
        for linear in (own.qkv_proj, own.o_proj, network.gate_up_proj, network.down_proj):
            linear.weight.data.normal_(0, linear.weight.shape[1]**-0.5)
        if own.qkv_proj.bias is not None:
            own.qkv_proj.bias.data.normal_()
        for linear in (own.o_proj, network.down_proj):
            linear.tp_rank = rank
        own.attn.kv_cache = of_layers.cache_of()
    torch.manual_seed(7)  # batches are the same
    return model


def _state(model):
    return importlib.import_module("fftune.vllm.layers")._states[model]


def _numbers(rank, stand_in, lines, kind):
    from vllm.distributed import get_tp_group

    custom = get_tp_group().device_communicator.ca_comm
    custom._IS_CAPTURING = True  # the first batch is the warm-up of a capture
    model = warm(_model(rank, stand_in, kind))
    custom._IS_CAPTURING = False
    assert _state(model).model.group.ranks == 2
    used = []
    ops = importlib.import_module("fftune.ops")
    own = ops.layer
    ops.layer = lambda *a, **o: used.append(o["group"]) or own(*a, **o)
    for lengths in ((5, 40, 1, 16), (48,)):
        torch.manual_seed(8)
        y = expect_right(model, *batch_of(model, lengths))
        whole = [torch.empty_like(y) for _ in range(2)]
        dist.all_gather(whole, y)
        assert torch.equal(*whole), "the ranks have other bits"
    assert used == [_state(model).model.group] * 2
    assert lines[0] == (f"fftune: 3 layers of {MODELS[kind]} run by fftune's ops in batches of pure decoding")


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_numbers(tmp_path, kind):
    _start(_numbers, tmp_path, kind)


def _expect_vllms(model, calls, lines, expected):
    torch.manual_seed(8)
    metadata, positions = batch_of(model)
    model.calls = 0
    before = caches(model).clone()
    y = step(model, metadata, positions)
    assert model.calls == calls and lines == [f"fftune: {expected}"]
    plain = importlib.import_module("vllm.forward_context").set_forward_context
    for layer, cache in zip(model.layers, before):
        layer.self_attn.attn.kv_cache = cache
    with torch.inference_mode(), plain(metadata):
        assert torch.equal(y, model.forward(torch.arange(len(positions)).int(), positions))


def _a_rank_that_is_unfit(rank, stand_in, lines):
    model = _model(rank, stand_in, kv_transfer_config=object() if rank else None)
    _expect_vllms(model, 1, lines, "layers of LlamaModel stay vLLM's: a KV connector on rank 1")


def _a_rank_that_fails(rank, stand_in, lines, when):
    """In the test, or in the first batch of another size."""
    model = _model(rank, stand_in)
    if when == "later":
        warm(model, (5, 40, 1))
        lines.clear()
    ops = importlib.import_module("fftune.ops")

    def fails(*arguments, **options):
        raise MemoryError("out of memory")

    if rank == 0:  # its peer waits for a summand
        ops.layer = fails
    _expect_vllms(model, 1, lines, "layers of LlamaModel stay vLLM's: MemoryError: out of memory on rank 0")


@pytest.mark.parametrize("when", ["at first", "later"])
def test_a_rank_that_fails_decides_for_all(tmp_path, when):
    _start(_a_rank_that_fails, tmp_path, when)


def test_a_rank_that_is_unfit_decides_for_all(tmp_path):
    _start(_a_rank_that_is_unfit, tmp_path)


def test_a_rank_with_wrong_keys_decides_for_all(tmp_path):
    _start(_a_rank_with_wrong_keys, tmp_path)


def _a_rank_with_wrong_keys(rank, stand_in, lines):
    model = _model(rank, stand_in)
    ops = importlib.import_module("fftune.ops")
    own = ops.layer
    if rank == 1:
        def wrong(x, weights, caches, *arguments, **options):
            y = own(x, weights, caches, *arguments, **options)
            caches[0][0].flatten(0, 1)[options["slots"].flatten().long()] += 9  # the rows that it wrote
            return y

        ops.layer = wrong
    torch.manual_seed(8)
    metadata, positions = batch_of(model)
    step(model, metadata, positions)
    assert model.calls == 2
    line, = lines
    assert line.startswith("fftune: layers of LlamaModel stay vLLM's: keys and values differ from vLLM's")
    assert line.endswith("of their norm on rank 1")


def _no_group(rank, stand_in, lines, cause):
    """Where the devices make no group, layers run op by op."""
    ranks = importlib.import_module("fftune.vllm.ranks")
    if cause == "several hosts":
        ranks.host = lambda: f"host {rank}"
    else:
        ranks.TIMEOUT = 2
        if rank == 1:
            def fails(*_, **__):
                raise OSError(cause)

            ranks.Group = fails
    model = warm(_model(rank, stand_in))
    assert _state(model).model.group is None
    assert lines[0].startswith("fftune: layers run op by op, with vLLM's all-reduce: ")
    # Without its peer, which fails, the first rank has a reason, too.
    assert cause in lines[0] or cause == "no peer access" and lines[0].endswith(" on rank 0")
    assert "run by fftune's ops" in lines[1]
    torch.manual_seed(8)
    expect_right(model, *batch_of(model))


@pytest.mark.parametrize("cause", ["no peer access", "several hosts"])
def test_ranks_without_a_group(tmp_path, cause):
    _start(_no_group, tmp_path, cause)


def _measured(rank, folder, milliseconds):
    """Has the ranks measure; each would keep its choices in a folder of its own."""
    faster, layers = (importlib.import_module(f"fftune.vllm.{name}") for name in ("faster", "layers"))
    os.environ["FFTUNE_CACHE"] = f"{folder}/{rank}"
    of_layers.BLOCKS = 200
    faster.BUDGET = 1e9 if rank else -1e9
    torch.cuda.get_device_name = lambda: "a device"
    layers._is_measured = lambda state: True

    def both(*runs, among, captured):
        for run in runs:
            run()
        return milliseconds(max(among.all(rank)))

    faster.milliseconds = both
    return layers


def _one_choice(rank, stand_in, lines, folder):
    """The slower rank counts for each computation, and the end of the first one's time for both; what only one has kept
    is measured again."""
    layers = _measured(rank, folder, lambda last: (2.0 + rank, 2.5 - rank))
    for _ in range(2):
        model = _model(rank, stand_in, compilation_config__max_cudagraph_capture_size=64)
        torch.manual_seed(8)
        step(model, *batch_of(model))
        choice, = _state(model).choices.values()
        assert choice.times == {1: (3.0, 2.5)} and _state(model).reason == ""
        if rank:
            for file in (Path(folder) / "1" / "vllm").glob("*.json"):
                file.unlink()
        dist.barrier()
    assert "1: 1.20" in lines[-1]


def _a_rank_that_cannot_measure(rank, stand_in, lines, folder):
    def fails(last):
        if rank == last:
            raise MemoryError("out of memory")
        return 1.0, 1.0

    _measured(rank, folder, fails)
    model = _model(rank, stand_in, compilation_config__max_cudagraph_capture_size=64)
    torch.manual_seed(8)
    step(model, *batch_of(model))
    assert _state(model).reason == f"MemoryError: out of memory{' on rank 1' if rank == 0 else ''}"


@pytest.mark.parametrize("work", [_one_choice, _a_rank_that_cannot_measure])
def test_ranks_measure_together(tmp_path, work):
    _start(work, tmp_path, str(tmp_path))

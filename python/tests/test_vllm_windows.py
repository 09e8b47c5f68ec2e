"""Models of vLLM whose layers have windows, with groups of caches of their own: gpt-oss, Gemma 2 and 3."""
import importlib
import itertools
import logging
from types import SimpleNamespace

import pytest
import torch

import test_vllm_layers as of_layers
from test_vllm_layers import (MIXED, WITH_WINDOWS, attentions_of, batch_of, calls_of_layer, decoding, error,  # noqa: F401
                              expect_right, expect_vllms, lines_of, model_of, pack_linears, prompts, reasons, set_on,
                              stand_in, step, verifying, warm)


def with_stale_blocks(model, metadata, lengths):
    """The entries of blocks in front of a window name the null block, as vLLM leaves them; its values are nobody's."""
    for own in attentions_of(model):
        own.kv_cache[0] = 1e4
        for row, length in enumerate(lengths):
            seen = max(0, length - own.sliding_window) if own.sliding_window else 0
            metadata[own.layer_name].block_table[row, :seen // of_layers.BLOCK] = 0
    return metadata


@pytest.mark.parametrize("kind", WITH_WINDOWS)
def test_numbers(stand_in, monkeypatch, kind):
    """Each run of layers that are alike is one op."""
    model = warm(model_of(stand_in, kind))
    for lengths in ((5, 40, 1, 16), (48,)):
        calls = calls_of_layer(monkeypatch)
        metadata, positions = batch_of(model, lengths)
        expect_right(model, with_stale_blocks(model, metadata, lengths), positions)
        assert [one["window"] for one in calls] == [7, 0, 7]


@pytest.mark.parametrize("kind", WITH_WINDOWS)
def test_layers_of_one_window_in_several_groups(stand_in, monkeypatch, kind):
    """Gemma 3 has five layers with a window for each one without: vLLM makes groups of as many layers."""
    model = model_of(stand_in, kind)
    for own in attentions_of(model):
        own.sliding_window = 7
    in_one, in_two = (lambda place, own: 0), (lambda place, own: place % 2)
    for group, expected in ((in_one, 1 if kind != "gemma3" else 3), (in_two, 3)):
        warm(model)
        calls = calls_of_layer(monkeypatch)
        expect_right(model, *batch_of(model, group=group))
        assert len(calls) == expected, "Gemma 3 has other angles in the second layer"


def test_groups_that_share_memory(stand_in, monkeypatch):
    """vLLM gives a layer of each group the same memory, and each group blocks of its own."""
    monkeypatch.setattr(of_layers, "BLOCKS", 64)
    model = model_of(stand_in, "gpt_oss")
    apart = model_of(stand_in, "gpt_oss")
    first, second, _ = attentions_of(model)
    second.kv_cache = first.kv_cache
    warm(model), warm(apart)
    metadata, positions = batch_of(model, (5, 40, 33))
    of_second = metadata[second.layer_name]
    order = 32 + torch.arange(9).view(3, 3).int()
    of_first = metadata[first.layer_name].block_table % 32
    for own, table in ((of_second, order), (metadata[first.layer_name], of_first)):
        places = positions // of_layers.BLOCK
        own.block_table = table
        own.slot_mapping = table.long().gather(1, places[:, None])[:, 0] * of_layers.BLOCK + positions % of_layers.BLOCK
    for mine, other in zip(attentions_of(model), attentions_of(apart)):
        other.kv_cache = mine.kv_cache.clone()
    assert torch.equal(step(model, metadata, positions), step(apart, metadata, positions)) and model.calls == 0


@pytest.mark.parametrize("block", [16, 32])
def test_groups_with_blocks_of_other_sizes(stand_in, block):
    model = model_of(stand_in, "gemma3")
    own = attentions_of(model)[1]
    whole = torch.randn(of_layers.BLOCKS, block, 2, 32).bfloat16()
    own.kv_cache = (whole.transpose(1, 2) if own.kv_cache.dim() == 4 else
                    whole.unflatten(-1, (2, 16)).permute(0, 3, 1, 2, 4).contiguous())
    warm(model)
    metadata, positions = batch_of(model)
    of_own = metadata[own.layer_name]
    places = positions // block
    of_own.slot_mapping = of_own.block_table.long().gather(1, places[:, None])[:, 0] * block + positions % block
    caches = [one.kv_cache.clone() for one in attentions_of(model)]
    got = step(model, metadata, positions)
    assert model.calls == 0
    for one, cache in zip(attentions_of(model), caches):
        one.kv_cache = cache
    model.vllm_config.kv_transfer_config = object()
    importlib.import_module("fftune.vllm.layers")._states.clear()
    assert error(got, step(model, metadata, positions).double()) < 0.02 and model.calls == 1


@pytest.mark.parametrize("kind", WITH_WINDOWS)
def test_drafts(stand_in, kind):
    model = model_of(stand_in, kind)
    model.vllm_config.speculative_config = verifying(3)
    batch = (33, 40, 8, 17), 0, [4] * 4
    warm(model, *batch)
    expect_right(model, *batch_of(model, *batch))


def test_batches_with_prompts_of_gpt_oss(prompts, stand_in):
    model = warm(warm(model_of(stand_in, "gpt_oss")), *MIXED)
    expect_right(model, *batch_of(model, *MIXED))


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_batches_with_prompts_of_gemma_are_vllms(prompts, stand_in, kind):
    model = warm(warm(model_of(stand_in, kind)), *MIXED)
    step(model, *batch_of(model, *MIXED))
    assert model.calls == 1


@pytest.mark.parametrize("kind", WITH_WINDOWS)
def test_op_by_op(stand_in, monkeypatch, caplog, kind):
    """With batch invariance: layers with norms behind their parts are those of the op `layer` alone."""
    for home in ("fftune._run", "fftune.vllm.layers"):
        monkeypatch.setattr(f"{home}.BATCH_INVARIANT", True)
    importlib.import_module("fftune._run").forget_plans()
    try:
        model = model_of(stand_in, kind)
        if kind == "gpt_oss":
            expect_right(warm(model), *batch_of(model))
        else:
            assert reasons(stand_in, caplog, model) == "batch invariance, for layers that the op layer alone computes"
    finally:
        importlib.import_module("fftune._run").forget_plans()


@pytest.mark.parametrize("name, change", [
    ("window", lambda value: 16), ("window", lambda value: 0), ("softcap", lambda value: 0.02)])
def test_wrong_options_are_found(stand_in, monkeypatch, caplog, name, change):
    """The batch of the test has keys in front of the windows."""
    ops = importlib.import_module("fftune.ops")
    own = ops.layer
    monkeypatch.setattr(ops, "layer", lambda *a, **o: own(*a, **{**o, name: change(o[name])} if o["window"] else o))
    model = model_of(stand_in, "gemma2")
    with caplog.at_level(logging.INFO):
        expect_vllms(model, 2)
    assert "stay vLLM's: results differ" in lines_of(caplog)[0]


def test_sinks_that_are_loaded_again(stand_in):
    model = warm(model_of(stand_in, "gpt_oss"))
    for own in attentions_of(model):
        own.impl.sinks.data += 2
    expect_right(model, *batch_of(model))


@pytest.mark.parametrize("change", [
    set_on("mlp.experts.router.renormalize", False),
    set_on("mlp.experts.routed_experts.w2_bias", None),
    set_on("mlp.experts.routed_experts.activation", SimpleNamespace(value="silu")),
    set_on("mlp.experts.routed_experts.quant_method.experts_cls", object),
    set_on("mlp.router.out_dtype", torch.float32)])
def test_other_mixtures_are_vllms_blocks(stand_in, monkeypatch, change):
    model, calls = model_of(stand_in, "gpt_oss"), calls_of_layer(monkeypatch)
    change(model)
    model.forward = lambda ids, positions, *_, **__: torch.zeros(len(ids), 64).bfloat16()  # the test says nothing
    step(model, *batch_of(model))
    assert not calls


def test_packed_experts(decoding, stand_in, monkeypatch):
    """gpt-oss' mxfp4: attention is dense."""
    ops, model = importlib.import_module("fftune.ops"), model_of(stand_in, "gpt_oss")
    for layer in model.layers:
        routed = layer.mlp.experts.routed_experts
        count, d, h = routed.w2_weight.shape
        weights = [ops.pack_weight(torch.randint(0, 256, (n, k // 2), dtype=torch.uint8),
                                   torch.randint(121, 124, (n, k // 32), dtype=torch.uint8), k=k, group=32, format="mxfp4")
                   for n, k in ((count * h, d), (count * h, d), (count * d, h))]
        gate, up, down = (w.dense(torch.bfloat16).unflatten(0, (count, -1)) for w in weights)
        routed.w13_weight.data = torch.stack((gate, up), 2).flatten(1, 2).contiguous()
        routed.w2_weight.data = down.contiguous()
        own = routed.w13_bias.data
        routed._fftune_packed = SimpleNamespace(weights=weights, sizes=(count, h, d), biases=[
            own[:, 0::2].contiguous(), own[:, 1::2].contiguous(), routed.w2_bias.data])
    warm(model)
    calls = calls_of_layer(monkeypatch)
    expect_right(model, *batch_of(model))
    assert [one["act"] for one in calls] == ["swiglu-oai"] * 3
    step(model, *batch_of(model, *MIXED))
    assert model.calls == 1, "prompts stay vLLM's"


def test_packed_gemma(prompts, stand_in, monkeypatch):
    """The network of batches that `layer` does not run has Gemma's activation."""
    model = model_of(stand_in, "gemma3")
    for layer in model.layers:
        pack_linears(layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    warm(model)
    expect_right(model, *batch_of(model))
    expect_right(model, *batch_of(model, *MIXED), calls=1)


def test_rotary_tables_of_float32(stand_in):
    """gpt-oss' is rounded by vLLM when it is used."""
    rotary = stand_in.parts.RotaryEmbedding(16)
    exact = torch.rand(256, 16)
    rotary.cos_sin_cache = exact
    angles, _ = importlib.import_module("fftune.vllm.structure")._angles_of(rotary, 128)
    cos, sin = exact[:128].bfloat16().float().chunk(2, -1)
    torch.testing.assert_close(angles[:, :8], torch.atan2(sin, cos))

"""Whole layers in vLLM's decode batches: the numbers, what is written to the pages, and the batches
and models that stay vLLM's."""
import copy
import importlib
import itertools
import logging
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from fftune import Error

MODELS = {"llama": "LlamaModel", "mistral": "MistralModel", "qwen2": "Qwen2Model",
          "qwen3": "Qwen3Model", "qwen3_moe": "Qwen3MoeModel"}
WITH_WINDOWS = {"gpt_oss": "GptOssModel", "gemma2": "Gemma2Model", "gemma3": "Gemma3Model"}
BLOCK, BLOCKS = 16, 24


CACHES = {"0.24.0": lambda: torch.randn(BLOCKS, 2, BLOCK, 2, 16).bfloat16(),
          "0.33.0": lambda: torch.randn(BLOCKS, BLOCK, 2, 32).bfloat16().transpose(1, 2)}


@pytest.fixture
def prompts(vllm, monkeypatch):
    """Before stand_in: the plugin serves batches with prompts, all of them."""
    monkeypatch.setattr(importlib.import_module("fftune.vllm.plans"), "COMPILES_BESIDE", False)
    monkeypatch.setenv("FFTUNE_VLLM", "experts,layers,prompts")


@pytest.fixture
def decoding(vllm, monkeypatch):
    """Before stand_in: the plugin leaves batches with prompts to vLLM."""
    monkeypatch.setenv("FFTUNE_VLLM", "experts,layers")


@pytest.fixture
def ranks(vllm, monkeypatch):
    """Before stand_in: the plugin serves tensor parallelism."""
    monkeypatch.setenv("FFTUNE_VLLM", "layers,ranks")


@pytest.fixture(params=CACHES)
def stand_in(vllm, monkeypatch, request):
    """The stand-in's module of llama, with the plugin loaded, and caches of that version."""
    monkeypatch.setenv("STAND_IN_VERSION", request.param)
    monkeypatch.setattr(sys.modules[__name__], "cache_of", CACHES[request.param], raising=False)
    importlib.import_module("fftune.vllm").register()
    return importlib.import_module("vllm.model_executor.models.llama")


def module_of(name):
    return importlib.import_module(f"vllm.model_executor.models.{name}")


def model_of(stand_in, kind="llama", tp=1, rotary=None, classes=None, **changes):
    """A model with random weights of bfloat16 and random caches. No expert of a mixture is chosen, or left
    out, by rounding."""
    if kind in ("qwen3_moe", "gpt_oss"):
        torch.manual_seed(4)
    parts = stand_in.parts
    sizes = SimpleNamespace(d=64, h=96, heads=4, kv_heads=2, dim=16, layers=3, vocabulary=50, tp=tp,
                            rotary=rotary or parts.RotaryEmbedding(16))
    cls = classes or getattr(module_of(kind), (MODELS | WITH_WINDOWS)[kind])
    model = cls(vllm_config=stand_in.config_of(sizes, torch.bfloat16, **changes)).bfloat16()
    for own in attentions_of(model):
        own.kv_cache = cache_of()
    return model


def attentions_of(model):
    return [(layer.self_attn if hasattr(layer, "self_attn") else layer.attn).attn for layer in model.layers]


def by_window(place, attention):
    return attention.sliding_window


def batch_of(model, lengths=(5, 40, 1, 16), padded=0, queries=None, group=by_window):
    """Metadata of requests with as many keys, and their positions. Layers have one object for each group(place,
    attention), with blocks of its own."""
    numbers = [group(place, own) for place, own in enumerate(attentions_of(model))]
    found = {number: _metadata_of(lengths, padded, queries) for number in dict.fromkeys(numbers)}
    return ({own.layer_name: found[number][0] for own, number in zip(attentions_of(model), numbers)},
            next(iter(found.values()))[1])


def _metadata_of(lengths, padded, queries):
    """Padded rows have slot -1, length 0, block 0 and stale positions."""
    rows = len(lengths) + padded
    queries = queries or [1] * rows
    lengths = [*lengths, *[0] * padded]
    order = (torch.randperm(BLOCKS - 1) + 1)[:rows * 3].view(rows, 3).int()
    order[rows - padded:] = 0
    slots, positions = [], []
    for row, (length, count) in enumerate(zip(lengths, queries)):
        for place in range(length - count, length):
            slots.append(int(order[row, place // BLOCK]) * BLOCK + place % BLOCK if length else -1)
            positions.append(place if length else 33)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
    metadata = SimpleNamespace(
        num_actual_tokens=len(slots), max_query_len=max(queries), query_start_loc=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32), block_table=order,
        slot_mapping=torch.tensor(slots), use_cascade=False, causal=True, dcp_context_kv_lens=None,
        mm_prefix_range_tensor=None)
    return metadata, torch.tensor(positions)


def step(model, metadata, positions, ids=None, **named):
    from vllm.forward_context import set_forward_context

    ids = torch.arange(len(positions)) % 50 if ids is None else ids
    with torch.inference_mode(), set_forward_context(metadata):
        return model(ids.int(), positions, None, **named)


def numbers_of(cache):
    """Bytes are codes of e4m3."""
    return cache.view(torch.float8_e4m3fn).float() if cache.dtype is torch.uint8 else cache


def caches(model):
    return torch.stack([numbers_of(own.kv_cache) for own in attentions_of(model)])


def warm(model, *batch):
    """The model after the call that compares with vLLM's own result."""
    metadata, positions = batch_of(model, *batch)
    step(model, metadata, positions)
    model.calls = 0
    return model


MIXED = (5, 40, 33, 17), 0, [5, 1, 20, 1]  # a prompt, a chunk of one, and two that decode


def wide(model):
    """The same model and caches in float64, which stay vLLM's."""
    own = copy.deepcopy(model).double()
    for attention in attentions_of(own):
        attention.rounds_queries = False
        if attention.kv_cache.dtype is not torch.uint8:
            attention.kv_cache = attention.kv_cache.double()
    own.vllm_config.model_config.dtype = torch.float64
    # Such as the rotary embedding, whose table is no weight.
    for module in own.modules():
        if hasattr(module, "cos_sin_cache"):
            module.cos_sin_cache = module.cos_sin_cache.bfloat16()
    return own


def error(got, right):
    return ((got.double() - right).norm() / right.norm()).item()


def expect_right(model, metadata, positions, rows=slice(None), calls=0, cuts=False, **named):
    """That a step runs here, and has the result and the caches of float64, with at most one and a
    half times the error of vLLM's own computation. `calls`: how often vLLM's code runs. `cuts`: new keys and values are
    cut to e4m3, a few of them the other way."""
    model.calls = 0
    exact, plain = wide(model), copy.deepcopy(model)
    for network in (layer.mlp for layer in (*exact.layers, *plain.layers)):
        if hasattr(network, "fftune_0"):  # it is one op
            network.__class__ = type(network).__base__
    for one, other in zip(attentions_of(plain), attentions_of(model)):
        one.kv_cache = other.kv_cache.clone()
    plain.vllm_config.kv_transfer_config = object()
    before = caches(model).clone()
    got = step(model, metadata, positions, **named)
    assert model.calls == calls, "vLLM's ran"
    embeddings = named.get("inputs_embeds")
    right = step(exact, metadata, positions,
                 **({} if embeddings is None else {"inputs_embeds": embeddings.double()}))
    theirs = step(plain, metadata, positions, **named)
    assert exact.calls == plain.calls == 1
    assert got.shape == right.shape and got.dtype is torch.bfloat16
    assert error(got[rows], right[rows]) < 1.5 * error(theirs[rows], right[rows]) + 2e-3
    written = caches(exact) != before.double()
    if cuts:  # a number may have the code of the one before
        written = written.any(-1, keepdim=True).expand_as(written)
    assert torch.equal(caches(model)[~written], before[~written]), "other rows were written"
    if written.any():
        assert error(caches(model)[written], caches(exact)[written].double()) < 1.5 * error(
            caches(plain)[written], caches(exact)[written].double()) + (1e-2 if cuts else 2e-3)
    return got


@pytest.mark.parametrize("kind", MODELS)
def test_numbers(stand_in, kind):
    model = warm(model_of(stand_in, kind))
    expect_right(model, *batch_of(model))
    expect_right(model, *batch_of(model, (48,)))


SCALES = {"uncalibrated": (1.0, 1.0), "tensor": (0.03, 0.007), "head": ((0.02, 0.05), (0.01, 0.004)),
          "one": ((0.03,), (0.007,))}


def float8_of(model, scales, dtype="fp8"):
    """The same model with caches of e4m3 and these scales of keys and values."""
    for own in attentions_of(model):
        own.kv_cache_dtype = dtype
        own._k_scale, own._v_scale = (torch.tensor(scale) for scale in SCALES[scales])
        cache = own.kv_cache.float()
        parts = cache.unbind(1) if cache.dim() == 5 else cache.transpose(1, 2).split(16, -1)
        for part, scale in zip(parts, (own._k_scale, own._v_scale)):
            part.div_(scale.view(-1, 1))
        own.kv_cache = cache.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return model


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "gemma3"])
def test_caches_of_fp8(prompts, stand_in, monkeypatch, kind, scales):
    """One op for each run of layers, and op by op with prompts, if FFTUNE_VLLM names these."""
    model = mixtures_of(stand_in) if kind == "qwen3_moe" else model_of(stand_in, kind)
    warm(float8_of(model, scales, "fp8_e4m3" if scales == "head" else "fp8"))
    with monkeypatch.context() as patched:
        calls = calls_of_layer(patched)
        expect_right(model, *batch_of(model), cuts=True)
        expect_right(model, *batch_of(model, (48,)), cuts=True)
    assert len(calls) >= 2 or kind == "qwen3"  # its norms have two epsilons: it runs op by op
    if kind != "gemma3":
        warm(model, *MIXED)
        expect_right(model, *batch_of(model, *MIXED), cuts=True)


def test_layers_of_two_caches(stand_in, monkeypatch):
    """As kv_cache_dtype_skip_layers leaves them: each run of layers of one cache is a call."""
    model = model_of(stand_in)
    plain = attentions_of(model)[1]
    kept, kind = plain.kv_cache, plain.kv_cache_dtype
    float8_of(model, "tensor")
    plain.kv_cache, plain.kv_cache_dtype = kept, kind
    metadata, positions = batch_of(model)
    step(model, metadata, positions)
    calls = calls_of_layer(monkeypatch)
    model.calls = 0
    step(model, metadata, positions)
    assert len(calls) == 3 and model.calls == 0


def test_prompts_over_fp8_are_vllms_by_default(decoding, stand_in, monkeypatch):
    """Those of mixtures run here with caches of bfloat16; nothing has timed them with others."""
    monkeypatch.setattr(importlib.import_module("fftune.vllm.plans"), "COMPILES_BESIDE", False)
    for change, calls in ((lambda model: model, 0), (lambda model: float8_of(model, "tensor"), 1)):
        model = warm(change(mixtures_of(stand_in)), *MIXED)
        step(model, *batch_of(model, *MIXED))
        assert model.calls == calls


def test_bytes_are_compared_as_numbers(vllm):
    layers = importlib.import_module("fftune.vllm.layers")
    assert layers._numbers_of(torch.tensor([0x80, 0x38, 0xFE], dtype=torch.uint8)).tolist() == [0, 1, -448]


def test_scales_that_are_wrong_are_seen(stand_in, caplog, monkeypatch):
    """The comparison with vLLM's layers sees keys of another scale."""
    structure = importlib.import_module("fftune.vllm.structure")
    own = structure.Layer.cache_scales
    for at, factor in ((0, 3.0), (1, 2.0)):
        def other(self):
            scales = list(own.fget(self))
            scales[at] = scales[at] * factor
            return tuple(scales)

        with monkeypatch.context() as patched:
            patched.setattr(structure.Layer, "cache_scales", property(other))
            model = float8_of(model_of(stand_in), "tensor")
            caplog.clear()
            with caplog.at_level(logging.INFO):
                step(model, *batch_of(model))
        line, = (record.getMessage() for record in caplog.records)
        assert "stay vLLM's" in line and "differ from vLLM's by" in line


def set_on(path, value):
    """A change of all layers, by a path from the layer."""
    def change(model):
        for layer in model.layers:
            *homes, name = path.split(".")
            home = layer
            for part in homes:
                home = getattr(home, part)
            setattr(home, name, value)
    return change


def mixtures_of(stand_in):
    """Qwen3-MoE with one epsilon for all norms, as its checkpoints have."""
    model = model_of(stand_in, "qwen3_moe")
    for name in ("q_norm", "k_norm"):
        set_on(f"self_attn.{name}.variance_epsilon", model.layers[0].input_layernorm.variance_epsilon)(model)
    return model


def calls_of_layer(monkeypatch):
    """A list with an entry for each call of the op `layer` from now on."""
    ops, calls = importlib.import_module("fftune.ops"), []
    own = ops.layer
    monkeypatch.setattr(ops, "layer", lambda *a, **o: calls.append(o) or own(*a, **o))
    return calls


def test_mixtures_are_one_op(stand_in, monkeypatch):
    for renormalises in (True, False):
        model = mixtures_of(stand_in)
        set_on("mlp.experts.router.renormalize", renormalises)(model)
        warm(model)
        with monkeypatch.context() as patched:
            calls = calls_of_layer(patched)
            expect_right(model, *batch_of(model))
        one, = calls
        assert one["top_k"] == 2 and one["renormalise"] is renormalises


def with_other_routers(model):
    for layer in model.layers:
        router = layer.mlp.experts.router
        layer.mlp.experts.router = type("GroupedTopKRouter", (type(router),), {})(**vars(router))


@pytest.mark.parametrize("change", [
    set_on("mlp.experts.router.scoring_func", "sigmoid"),
    set_on("mlp.experts.router.eplb_state", 1),
    with_other_routers,
    set_on("mlp.experts.routed_experts.expert_map", torch.arange(4)),
    set_on("mlp.experts.routed_experts.swiglu_limit", 7.0),
    set_on("mlp.experts.routed_experts.apply_router_weight_on_input", True),
    set_on("mlp.experts.routed_experts.quant_method.experts_cls", object),
    lambda model: delattr(model.layers[1].mlp.experts.routed_experts, "quant_method"),
    lambda model: setattr(model.vllm_config.model_config, "enable_return_routed_experts", True),  # of 0.24
    lambda model: setattr(model.vllm_config, "aux_output_config", SimpleNamespace(enable_return_routed_experts=True)),
    set_on("mlp.experts.router.capture_fn", print),
    lambda model: setattr(model.layers[2].mlp.gate, "skip_bias_add", True),
    set_on("mlp.experts.shared_experts", torch.nn.Identity())])
def test_other_mixtures_are_vllms_blocks(stand_in, monkeypatch, change):
    """The attributes are read before the first batch alone, and the stand-in computes as ever."""
    model = mixtures_of(stand_in)
    change(model)
    calls = calls_of_layer(monkeypatch)
    expect_right(warm(model), *batch_of(model))
    assert not calls


class AutoGPTQLinearMethod:
    pass


def packed_of(shape, group=32, zeros=False):
    """A random weight [n, k] of 4 bits."""
    from fftune import ops

    n, k = shape
    scale = (torch.rand(n, k // group) / (5 * k**0.5)).bfloat16()
    return ops.pack_weight(torch.randint(0, 256, (n, k // 2), dtype=torch.uint8), scale,
                           torch.randint(0, 16, scale.shape, dtype=torch.uint8) if zeros else None, k=k, group=group)


def pack_linears(*linears, **options):
    """As the part linears leaves them; the stand-in computes with the same weights."""
    for linear in linears:
        linear.quant_method = AutoGPTQLinearMethod()
        linear._fftune_packed = packed_of(linear.weight.shape, **options)
        linear.weight.data = linear._fftune_packed.dense()


def packed_llama_of(stand_in, **options):
    model = model_of(stand_in, "llama")
    for layer in model.layers:
        own, network = layer.self_attn, layer.mlp
        pack_linears(own.qkv_proj, own.o_proj, network.gate_up_proj, network.down_proj, **options)
    return model


@pytest.mark.parametrize("zeros", [False, True])
def test_packed_layers_are_one_op(prompts, stand_in, monkeypatch, zeros):
    """And a network is one op in batches with prompts, which stay vLLM's."""
    model = packed_llama_of(stand_in, zeros=zeros)
    dense = [layer.mlp.gate_up_proj._fftune_packed.dense() for layer in model.layers]
    warm(model)
    for layer, both in zip(model.layers, dense):
        assert torch.equal(torch.cat([half.dense() for half in layer.mlp.gate_up_proj._fftune_packed]), both)
    calls = calls_of_layer(monkeypatch)
    expect_right(model, *batch_of(model))
    assert len(calls) == 1
    runs, run = [], type(model.layers[0].mlp).forward
    monkeypatch.setattr(type(model.layers[0].mlp), "forward", lambda *given: runs.append(given) or run(*given))
    expect_right(model, *batch_of(model, *MIXED), calls=1)
    assert len(calls) == 1 and len(runs) == len(model.layers)


def test_networks_take_over_weights_that_are_loaded_again(stand_in):
    """vLLM processes them anew. It keeps no buffers of modules without weights of their own (0.24)."""
    products = importlib.import_module("fftune.vllm.products")
    networks = importlib.import_module("fftune.vllm.networks")
    network, x = packed_llama_of(stand_in).layers[0].mlp, torch.randn(5, 64).bfloat16()
    down = network.down_proj._fftune_packed
    products.keep(network.down_proj, lambda packed: products.take_over(packed[:2], down[:2]) or products.take_over(
        down[:2], packed[:2]))
    networks.fuse(network, "silu", 64)
    halves, again = network.gate_up_proj._fftune_packed, packed_of((192, 64))
    places = [half.w.data_ptr() for half in halves]
    for linear, packed in ((network.gate_up_proj, again), (network.down_proj, packed_of((64, 96)))):
        network._buffers.clear()
        assert products.load_again(linear, lambda: None, lambda: (packed,))
    gate, up = (x.float() @ half.float().T for half in again.dense().chunk(2))
    right = (torch.nn.functional.silu(gate) * up) @ down.dense().float().T
    assert (network(x) - right).norm() < 0.02 * right.norm()
    assert [half.w.data_ptr() for half in network.gate_up_proj._fftune_packed] == places
    assert torch.equal(torch.cat([half.dense() for half in halves]), again.dense())
    with pytest.raises(RuntimeError, match="have another format than those that run. Start the engine anew"):
        products.load_again(network.gate_up_proj, lambda: None, lambda: (packed_of((64, 64)),))


def test_networks_of_one_kind_share_compiled_code(stand_in):
    from torch import nn

    networks, texts = importlib.import_module("fftune.vllm.networks"), []

    def backend(graph, inputs):
        texts.append(graph.code)
        return graph

    for layer in packed_llama_of(stand_in).layers[:2]:
        network, x = layer.mlp, torch.randn(5, 64).bfloat16()
        right = network(x)
        networks.fuse(network, "silu", 64)
        torch._dynamo.reset()
        y = torch.compile(nn.Sequential(network), fullgraph=True, backend=backend)(x)
        assert (y - right).float().norm() < 0.02 * right.float().norm() and torch.equal(network(x), y)
    assert len(texts) == 2 and texts[0] == texts[1] and texts[0].count("fftune_vllm.run") == 1


def packed_mixtures_of(stand_in):
    """Qwen3-MoE as the parts linears and packed-experts leave it; the stand-in computes with the same weights."""
    model = mixtures_of(stand_in)
    for layer in model.layers:
        pack_linears(layer.self_attn.qkv_proj, layer.self_attn.o_proj)
        routed = layer.mlp.experts.routed_experts
        count, d, h = routed.w2_weight.shape
        weights = [packed_of(shape) for shape in ((count * h, d), (count * h, d), (count * d, h))]
        gate, up, down = (w.dense().unflatten(0, (count, -1)) for w in weights)
        routed.w13_weight.data, routed.w2_weight.data = torch.cat((gate, up), 1), down.contiguous()
        routed._fftune_packed = SimpleNamespace(weights=weights, biases=None, sizes=(count, h, d))
    return model


def test_packed_mixtures_are_one_op(prompts, stand_in, monkeypatch):
    """Batches with prompts stay vLLM's."""
    model = warm(packed_mixtures_of(stand_in))
    calls = calls_of_layer(monkeypatch)
    expect_right(model, *batch_of(model))
    assert len(calls) == 1
    step(model, *batch_of(model, *MIXED))
    assert model.calls == 1 and len(calls) == 1


@pytest.mark.parametrize("kind, change, reason", [
    ("llama", lambda model: pack_linears(*[layer.mlp.gate_up_proj for layer in model.layers]),
     "quantised weights of a network in several formats"),
    ("llama", lambda model: setattr(model.layers[1].self_attn.o_proj, "_fftune_packed", packed_of((64, 64))),
     "quantised weights of a network in several formats"),
    ("qwen3_moe", lambda model: setattr(model.layers[0].mlp.experts.routed_experts._fftune_packed, "biases", 1),
     "quantised weights of layers that no one op computes")])
def test_quantised_layers_that_are_no_one_op(stand_in, caplog, kind, change, reason):
    model = packed_mixtures_of(stand_in) if kind == "qwen3_moe" else model_of(stand_in, kind)
    change(model)
    assert reasons(stand_in, caplog, model) == reason


@pytest.mark.parametrize("known", [True, False])
def test_rows_of_no_sequence_are_numbers_for_a_router(prompts, stand_in, monkeypatch, known):
    """Attention leaves them as they are in memory."""
    ops = importlib.import_module("fftune.ops")
    own = ops.attention

    def attention(q, *arguments, **options):
        y = own(q, *arguments, **options)
        if "offsets" in options:
            y[options["offsets"][-1]:] = float("nan")
        return y

    monkeypatch.setattr(ops, "attention", attention)
    model = model_of(stand_in, "qwen3_moe")
    if not known:
        set_on("mlp.experts.routed_experts.quant_method.experts_cls", object)(model)
    warm(warm(model), *MIXED)
    seen, route = [], ops.moe_route
    monkeypatch.setattr(ops, "moe_route", lambda x, *a, **o: known and seen.append(x) or route(x, *a, **o))
    for layer in model.layers:  # vLLM's blocks
        layer.mlp.register_forward_pre_hook(lambda _, given: None if known else seen.append(given[0]))
    expect_right(model, *batch_of(model, *MIXED))
    assert [len(x) for x in seen[:3]] == [64] * 3 and all(x.isfinite().all() for x in seen)


@pytest.mark.parametrize("kind", MODELS)
def test_prompts(prompts, stand_in, caplog, kind):
    with caplog.at_level(logging.INFO):
        model = warm(warm(model_of(stand_in, kind)), *MIXED)
    assert [line for line in lines_of(caplog) if line.endswith("batches with prompts")]
    expect_right(model, *batch_of(model, *MIXED))
    expect_right(model, *batch_of(model, (48,), queries=[48]))
    expect_right(model, *batch_of(model))


def test_prompts_with_tokens_behind(prompts, stand_in):
    model = warm(model_of(stand_in), *MIXED)
    metadata, positions = batch_of(model, *MIXED)
    more = torch.cat((positions, torch.zeros(5, dtype=torch.int64)))
    got = step(model, metadata, more)
    assert model.calls == 0 and got.shape == (32, 64)
    assert torch.equal(got[:27], step(model, metadata, positions)) and got[27:].eq(0).all()


def test_prompts_of_other_lengths_are_the_same_plans(prompts, stand_in, monkeypatch):
    model = warm(warm(model_of(stand_in)), *MIXED)
    ops = importlib.import_module("fftune.ops")
    own, rows = ops.attention, set()
    monkeypatch.setattr(ops, "attention", lambda q, *a, **o: rows.add(len(q)) or own(q, *a, **o))
    for queries in ([5, 1, 20, 1], [5, 1, 30, 1]):
        expect_right(model, *batch_of(model, (5, 40, 33, 17), 0, queries))
    assert rows == {64}


def test_plans_of_few_numbers_of_sequences(prompts, stand_in, monkeypatch):
    model = warm(warm(model_of(stand_in)), *MIXED)
    ops = importlib.import_module("fftune.ops")
    own, sequences = ops.attention, set()
    monkeypatch.setattr(ops, "attention",
                        lambda *a, **o: sequences.add(len(o["lengths"])) or own(*a, **o))
    monkeypatch.setattr(sys.modules[__name__], "BLOCKS", 64)
    for layer in model.layers:
        layer.self_attn.attn.kv_cache = cache_of()
    for count in (9, 10, 17, 19):
        expect_right(model, *batch_of(model, [9] * count, 0, [3] * count))
    assert sequences == {10, 20}


def test_plans_are_made_beside_the_engine(prompts, stand_in, monkeypatch):
    layers = importlib.import_module("fftune.vllm.layers")
    monkeypatch.setattr(layers.plans, "COMPILES_BESIDE", True)
    own, made, go = layers.Plan, [], threading.Event()
    monkeypatch.setattr(layers, "Plan",
                        lambda *given: go.wait(60) and made.append(given) or own(*given))
    run = importlib.import_module("fftune._run")
    run.forget_plans()  # those of other tests' batches
    model = model_of(stand_in, "qwen3_moe")
    metadata, positions = batch_of(model, *MIXED)
    step(model, metadata, positions)
    assert model.calls == 2, "vLLM's ran after the test, too"
    step(model, metadata, positions)
    assert model.calls == 3
    go.set()
    deadline = time.monotonic() + 60
    while not all(layers._states[model].plans.values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    ran = []
    monkeypatch.setattr(run, "_listeners", [lambda *given: ran.append(given)])
    with monkeypatch.context() as patched:
        patched.setattr(run, "Plan", lambda *given: pytest.fail(f"{given} is made a second time"))
        step(model, metadata, positions)
    assert model.calls == 3
    # The test of the first batch had as many rows, and other sequences.
    assert "attention" not in {dict(problem)["op"] for _, problem in run.prepared}
    assert {str(given) for given in ran} == {str(given) for given in made}
    count = len(made)
    step(model, *batch_of(model, (5, 40, 33), 0, [5, 1, 30]))  # as many rows for fewer sequences
    while not all(layers._states[model].plans.values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(layers._states[model].plans) == 2
    assert {given[1]["op"] for given in made[count:]} == {"attention"}
    go.clear()
    calls = model.calls  # the thread may have been faster than the engine
    step(model, *batch_of(model, (48,) * 5, 0, [48] * 5))
    assert model.calls == calls + 1, "a batch of other sizes"
    go.set()


def test_batches_of_many_rows_share_plans(prompts, stand_in, monkeypatch):
    """All ops but attention, whose plans have the number of sequences too."""
    layers, run = (importlib.import_module(f"fftune.{name}") for name in ("vllm.layers", "_run"))
    monkeypatch.setattr(layers.plans, "COMPILES_BESIDE", True)
    monkeypatch.setattr(layers.plans, "EXACT", 16)
    run.forget_plans()
    model = warm(model_of(stand_in, "qwen3_moe"))
    state = layers._states[model]

    def made():
        deadline = time.monotonic() + 60
        while not all(state.plans.values()) and time.monotonic() < deadline:
            time.sleep(0.01)

    try:
        step(model, *batch_of(model, *MIXED))  # tested, and vLLM's
        made()
        for queries in ([5, 1, 20, 1], [5, 1, 30, 1]):
            expect_right(model, *batch_of(model, (5, 40, 33, 17), 0, queries))
        step(model, *batch_of(model, (48,) * 4, 0, [48, 20, 1, 1]))
        made()
        expect_right(model, *batch_of(model, (48,) * 4, 0, [48, 20, 1, 1]))
        assert {dict(problem)["op"] for _, problem in state.made} == {"attention"}
        assert run.PlanAt in map(type, run._plans.values())
    finally:
        run.forget_plans()


def test_rows_have_the_same_bits_in_every_batch(prompts, stand_in, monkeypatch):
    run = importlib.import_module("fftune._run")
    for home in ("fftune._run", "fftune.vllm.layers"):
        monkeypatch.setattr(f"{home}.BATCH_INVARIANT", True)
    run.forget_plans()  # made without the option
    try:
        model = warm(warm(model_of(stand_in)), *MIXED)
        metadata, positions = batch_of(model, *MIXED)
        ids = torch.arange(len(positions)) % 50
        together = step(model, metadata, positions, ids)
        of_all = next(iter(metadata.values()))
        for i, (first, end) in enumerate(itertools.pairwise(of_all.query_start_loc.tolist())):
            alone = changed(metadata, num_actual_tokens=end - first, max_query_len=end - first,
                            query_start_loc=torch.tensor([0, end - first], dtype=torch.int32),
                            seq_lens=of_all.seq_lens[i:i + 1],
                            block_table=of_all.block_table[i:i + 1],
                            slot_mapping=of_all.slot_mapping[first:end])
            got = step(model, alone, positions[first:end], ids[first:end])
            assert torch.equal(got, together[first:end]), f"sequence {i}"
        assert model.calls == 0
    finally:
        run.forget_plans()


@pytest.mark.parametrize("invariant", [False, True])
def test_wrong_prompts_are_found(prompts, stand_in, monkeypatch, caplog, invariant):
    """The test of pure decoding does not see this error; the one of prompts does. Batches of decoding run on if
    their bits need not be those of prompts."""
    monkeypatch.setattr(importlib.import_module("fftune.vllm.layers"), "BATCH_INVARIANT", invariant)
    ops = importlib.import_module("fftune.ops")
    own = ops.attention
    monkeypatch.setattr(ops, "attention", lambda *a, **o: own(*a, **{**o, "causal": False}))
    with caplog.at_level(logging.INFO):
        model = warm(warm(model_of(stand_in)), *MIXED)
    what = "layers" if invariant else "batches with prompts"
    assert re.search(f"{what} of LlamaModel stay vLLM's: results differ", lines_of(caplog)[-1])
    for batch, runs_here in (((), not invariant), (MIXED, False)):
        model.calls = 0
        step(model, *batch_of(model, *batch))
        assert model.calls != runs_here


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_prompts_that_are_not_asked_for(decoding, stand_in, monkeypatch, kind):
    """Those of mixtures run here."""
    monkeypatch.setattr(importlib.import_module("fftune.vllm.plans"), "COMPILES_BESIDE", False)
    model = warm(warm(model_of(stand_in, kind)), *MIXED)
    step(model, *batch_of(model, *MIXED))
    assert model.calls == (kind == "llama")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_moe"])
def test_tensor_parallel(ranks, stand_in, kind):
    """The stand-in's all-reduce adds two equal summands: a residual that were added before it would
    count twice. The first batch is the warm-up of a capture, where vLLM's all-reduce does not sum."""
    from vllm.distributed import get_tp_group

    custom = get_tp_group().device_communicator.ca_comm
    custom._IS_CAPTURING = True
    model = warm(model_of(stand_in, kind, tp=2))
    assert custom._IS_CAPTURING
    custom._IS_CAPTURING = False
    expect_right(model, *batch_of(model))


def test_tensor_parallel_that_is_not_asked_for(decoding, stand_in, caplog):
    with caplog.at_level(logging.INFO):
        model = warm(model_of(stand_in, tp=2))
    assert lines_of(caplog) == ["fftune: layers of LlamaModel stay vLLM's: tensor parallelism, which "
                                "needs ranks in FFTUNE_VLLM"]
    expect_vllms(model, 1)


def test_output_bias(stand_in):
    attention = type("LlamaAttention", (stand_in.LlamaAttention,),
                     {"out_bias": True, "__module__": stand_in.__name__})
    layer = type("LlamaDecoderLayer", (stand_in.LlamaDecoderLayer,),
                 {"attention": attention, "__module__": stand_in.__name__})
    stand_in.LlamaModel.layer = layer
    for rank in (0, 1):
        model = model_of(stand_in)
        for own in model.layers:
            own.self_attn.o_proj.tp_rank = rank
            if rank:  # its bias is the first rank's
                linear = own.self_attn.o_proj
                linear.__class__ = type("RowParallelLinear", (type(linear),), {
                    "forward": lambda self, x: x @ self.weight.T})
        expect_right(warm(model), *batch_of(model)) if rank == 0 else \
            expect_same_result(warm(model))


def expect_same_result(model):
    metadata, positions = batch_of(model)
    mine = step(model, metadata, positions)
    assert model.calls == 0
    from vllm.forward_context import set_forward_context

    with torch.inference_mode(), set_forward_context(metadata):
        theirs = model.forward(torch.arange(len(positions)).int(), positions)
    assert error(mine, theirs.double()) < 2e-2


@pytest.mark.parametrize("options", [
    dict(dim=8), dict(dim=16, is_neox_style=False), dict(dim=16, factor=1.17)])
def test_rotations(stand_in, options):
    """A part of the features, pairs next to each other, and YaRN's factor."""
    rotary = stand_in.parts.RotaryEmbedding(**options)
    model = warm(model_of(stand_in, rotary=rotary))
    expect_right(model, *batch_of(model))


def test_padded_rows(stand_in):
    """Such rows of a captured batch neither write nor disturb others."""
    model = warm(model_of(stand_in))
    metadata, positions = batch_of(model, (5, 40), padded=2)
    got = expect_right(model, metadata, positions, slice(2))
    assert got.isfinite().all()
    alone = {name: batch_of(model, (5, 40))[0][name] for name in metadata}
    for one in alone.values():
        one.block_table, one.slot_mapping = (getattr(metadata[next(iter(metadata))], name)[:2]
                                             for name in ("block_table", "slot_mapping"))
    again = step(model, alone, positions[:2])
    assert error(got[:2], again.double()) < 1e-2


def test_tokens_behind_the_batch(stand_in):
    """Outside of graphs of whole steps, inputs are padded and the metadata is not."""
    model = warm(model_of(stand_in))
    metadata, positions = batch_of(model, (5, 40, 17))
    ids = torch.arange(8)
    got = step(model, metadata, torch.cat((positions, torch.zeros(5, dtype=torch.int64))), ids)
    assert model.calls == 0 and got.shape == (8, 64)
    assert torch.equal(got[:3], step(model, metadata, positions, ids[:3]))
    assert got[3:].eq(0).all()


def test_embeddings_that_are_given(stand_in):
    model = warm(model_of(stand_in))
    metadata, positions = batch_of(model)
    expect_right(model, metadata, positions, inputs_embeds=torch.randn(4, 64).bfloat16())


def test_slots_are_those_of_the_context(stand_in):
    model = warm(model_of(stand_in))
    metadata, positions = batch_of(model)
    slots = next(iter(metadata.values())).slot_mapping
    expect_right(model, changed(metadata, slot_mapping=slots * 0, slots_of_context=(slots,)), positions)


def test_a_cache_that_is_bound_again(stand_in):
    model = warm(model_of(stand_in))
    for layer in model.layers:
        layer.self_attn.attn.kv_cache = cache_of()
    expect_right(model, *batch_of(model))


def test_weights_that_are_loaded_again(stand_in):
    model = warm(model_of(stand_in))
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9
    expect_right(model, *batch_of(model))


def lines_of(caplog):
    """Without those of the models that stay vLLM's for comparison."""
    return [line for line in (record.getMessage() for record in caplog.records)
            if not line.endswith("a KV connector")]


def expect_vllms(model, calls):
    """That a step is vLLM's, in its result and in the caches, and that vLLM's code ran so often."""
    metadata, positions = batch_of(model)
    plain = copy.deepcopy(model)
    plain.vllm_config.kv_transfer_config = object()
    for one, other in zip(attentions_of(plain), attentions_of(model)):
        one.kv_cache = other.kv_cache.clone()
    model.calls = 0
    got = step(model, metadata, positions)
    assert model.calls == calls
    assert torch.equal(got, step(plain, metadata, positions))
    assert torch.equal(caches(model), caches(plain))


@pytest.mark.parametrize("kind", MODELS)
def test_first_batch(stand_in, caplog, kind):
    """It runs here, after a test that leaves no trace."""
    model = model_of(stand_in, kind)
    with caplog.at_level(logging.INFO):
        expect_right(model, *batch_of(model), calls=1)
    line, *_ = lines_of(caplog)
    assert line == (f"fftune: 3 layers of {MODELS[kind]} run by fftune's ops in batches of pure "
                    "decoding")
    expect_right(model, *batch_of(model))


def test_the_warm_up_of_a_capture_is_tested(stand_in):
    """vLLM's has lengths 1, slots -1, block 0 and positions 0, and caches of zeros."""
    model = model_of(stand_in)
    for layer in model.layers:
        layer.self_attn.attn.kv_cache.zero_()
    metadata, positions = batch_of(model)
    metadata = changed(metadata, seq_lens=torch.ones(4, dtype=torch.int32),
                       slot_mapping=torch.full((4,), -1),
                       block_table=torch.zeros(4, 3, dtype=torch.int32))
    step(model, metadata, positions * 0)
    assert model.calls == 1 and caches(model).eq(0).all()
    for layer in model.layers:
        layer.self_attn.attn.kv_cache.normal_()
    expect_right(model, *batch_of(model))


@pytest.mark.parametrize("queries, sequences", [(1, 1), (1, 20), (4, 3), (8, 30)])
def test_the_batch_of_a_test_is_one_that_vllm_gives(stand_in, queries, sequences):
    """The slots of new tokens are those of the last keys of their own sequences, in pages that no other one reads:
    a kernel for few sequences waits for no other sequence's keys."""
    layers = importlib.import_module("fftune.vllm.layers")
    model = model_of(stand_in)
    model.vllm_config.speculative_config = verifying(queries - 1) if queries > 1 else None
    state = layers._examine(model, False)
    table = torch.zeros(sequences, 5, dtype=torch.int32)
    batch = layers._Batch(sequences * queries, sequences * queries, torch.zeros(8), None, torch.zeros(1), torch.zeros(1).int(),
                          (layers._Group((0, 1, 2), torch.zeros(1).long(), table, SimpleNamespace()),), queries=queries)
    trial, real = layers._made_up(state, batch)
    assert trial.rows == sequences * queries and real == min(sequences, 8, BLOCKS) * queries
    written = []
    group, = trial.groups
    for row, slot in enumerate(group.slots.tolist()):
        sequence, token = divmod(row, queries)
        length = trial.lengths[sequence].item()
        if row >= real:
            assert slot == -1 and length == 0
            continue
        place = length - queries + token
        assert slot == group.table[sequence, place // BLOCK] * BLOCK + place % BLOCK and place == trial.positions[row]
        written.append(slot // BLOCK)
    assert len(set(written)) * queries == len(written), "a block of each sequence's own"


def swapped(attention, q, k, v, **options):
    return attention(q, v, k, **options)


def unmasked(attention, q, k, v, *, lengths, **options):
    return attention(q, k, v, lengths=torch.full_like(lengths, 9), **options)


@pytest.mark.parametrize("name, change, reason", [
    ("attention", swapped, "results differ"), ("attention", unmasked, "results differ"),
    ("qkv", lambda qkv, *a, **o: qkv(*a, **{**o, "positions": o["positions"] + 3}),
     "(results|keys and values) differ"),
    ("qkv", lambda qkv, *a, **o: qkv(*a, **{**o, "slots": o["slots"] + 1}), "keys and values differ"),
    ("ffn_block", lambda ffn, x, r, n, gate, up, down, **o: ffn(x, r, n, up, gate, down, **o),
     "results differ"),
    ("rmsnorm", lambda norm, *a, **o: -norm(*a, **o), "results differ"),
    ("linear", lambda linear, x, w, b, r: linear(x, w, b), "results differ")])
def test_wrong_computations_are_found(stand_in, monkeypatch, caplog, name, change, reason):
    ops = importlib.import_module("fftune.ops")
    own = getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda *a, **o: change(own, *a, **o))
    if name != "layer":
        monkeypatch.setattr("fftune.vllm.layers._is_one_op", lambda *_: False)
    model = model_of(stand_in)
    for layer in model.layers:
        layer.self_attn.attn.kv_cache.zero_()
    with caplog.at_level(logging.INFO):
        expect_vllms(model, 2)
        expect_vllms(model, 1)
    line, = lines_of(caplog)
    assert re.search(f"layers of LlamaModel stay vLLM's: {reason} from vLLM's by", line)


@pytest.mark.parametrize("change, reason", [
    (lambda layer, x, w, caches, *a, **o:
     layer(x, w, [pair[::-1] for pair in caches], *a, **o), "results differ"),
    (lambda layer, *a, **o: layer(*a, **{**o, "positions": o["positions"] + 3}),
     "(results|keys and values) differ"),
    (lambda layer, *a, **o: layer(*a, **{**o, "slots": o["slots"] + 1}),
     "keys and values differ")])
def test_wrong_computations_of_all_layers_are_found(stand_in, monkeypatch, caplog, change, reason):
    test_wrong_computations_are_found(stand_in, monkeypatch, caplog, "layer", change, reason)


def test_results_that_say_nothing(stand_in):
    """Weights of NaN, as of an engine that waits for its weights, are no test."""
    model = model_of(stand_in)
    weight = model.layers[1].self_attn.o_proj.weight
    good = weight.data.clone()
    weight.data.fill_(float("nan"))
    metadata, positions = batch_of(model)
    step(model, metadata, positions)
    step(model, metadata, positions)
    assert model.calls == 4
    weight.data.copy_(good)
    for layer in model.layers:
        layer.self_attn.attn.kv_cache.normal_()
    expect_right(warm(model), *batch_of(model))


def test_an_error_of_all_layers_is_left_to_vllm(stand_in, monkeypatch, caplog):
    model = warm(model_of(stand_in))

    def fails(*_, **__):
        raise Error("layer: no kernel")

    monkeypatch.setattr(importlib.import_module("fftune.ops"), "layer", fails)
    metadata, positions = batch_of(model)
    with caplog.at_level(logging.INFO):
        step(model, metadata, positions)
    step(model, metadata, positions)
    assert model.calls == 2
    assert caplog.text.count("stay vLLM's: Error: layer: no kernel") == 1


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_errors_are_left_to_vllm(stand_in, monkeypatch, caplog, kind):
    """Those of a later layer too: the counter of vLLM's experts begins anew."""
    ops = importlib.import_module("fftune.ops")
    monkeypatch.setattr("fftune.vllm.layers._is_one_op", lambda *_: False)
    model = warm(model_of(stand_in, kind))
    attention, calls = ops.attention, []

    def fails(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise Error("attention: no kernel")
        return attention(*arguments, **options)

    monkeypatch.setattr(ops, "attention", fails)
    metadata, positions = batch_of(model)
    plain = copy.deepcopy(model)
    plain.vllm_config.kv_transfer_config = object()
    for one, other in zip(attentions_of(plain), attentions_of(model)):
        one.kv_cache = other.kv_cache.clone()
    with caplog.at_level(logging.INFO):
        got = step(model, metadata, positions)
    assert torch.equal(got, step(plain, metadata, positions))
    assert model.calls == 1 and len(calls) == 2
    assert "stay vLLM's: Error: attention: no kernel" in caplog.text
    step(model, metadata, positions)
    assert model.calls == 2 and len(calls) == 2


def changed(metadata, **changes):
    one = SimpleNamespace(**{**vars(next(iter(metadata.values()))), **changes})
    return {name: one for name in metadata}


def test_other_batches(decoding, stand_in):
    """Prompts, mixed batches, and calls without metadata, such as vLLM's profile run."""
    model = warm(model_of(stand_in))
    metadata, positions = batch_of(model)
    prompt = batch_of(model, (7, 20), queries=[7, 1])
    others = [prompt, (None, positions), ([metadata], positions), ({}, positions),
              (changed(metadata, use_cascade=True), positions),
              (changed(metadata, causal=False), positions),
              (changed(metadata, dcp_context_kv_lens=torch.zeros(4)), positions),
              (changed(metadata, mm_prefix_range_tensor=torch.zeros(4)), positions),
              # The fields of a later version.
              (changed(metadata, windows_behind_a_prefix=torch.zeros(4)), positions),
              (changed(metadata, is_another_kind=True), positions)]
    # Layers of two batches.
    first = next(iter(metadata))
    others.append(({**metadata, first: changed(metadata, num_actual_tokens=3)[first]}, positions))
    model.forward = lambda *arguments, **named: "vLLM's"
    for given, places in others:
        assert step(model, given, places) == "vLLM's"
    assert step(model, metadata, torch.stack([positions] * 3)) == "vLLM's"  # of M-RoPE
    assert step(model, metadata, positions, t_cond=torch.zeros(4)) == "vLLM's"
    assert step(model, metadata, positions, t_cond=None).shape == (4, 64)


def reasons(stand_in, caplog, model):
    """The line that says why a model stays vLLM's."""
    metadata, positions = batch_of(model)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for calls in (1, 2):
            step(model, metadata, positions)
            assert model.calls == calls, "vLLM's ran once for each call"
    line, = (record.getMessage() for record in caplog.records)
    return line.split("stay vLLM's: ")[1]


@pytest.mark.parametrize("change, value, reason", [
    ("speculative_config", SimpleNamespace(enable_adaptive_verification=True),
     "verification of an adaptive number of drafts"),
    ("speculative_config", SimpleNamespace(num_speculative_tokens_per_batch_size=[(1, 8, 3)]),
     "verification of an adaptive number of drafts"),
    ("offload_config", SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=2.0)), "weights that are offloaded"),
    ("offload_config", SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=4)), "weights that are offloaded"),
    ("kv_transfer_config", 1, "a KV connector"),
    ("model_config__dtype", torch.float16, "elements of torch.float16"),
    ("parallel_config__pipeline_parallel_size", 2, "pipeline parallelism"),
    ("parallel_config__data_parallel_size", 2, "data parallelism"),
    ("parallel_config__decode_context_parallel_size", 2, "context parallelism"),
    ("parallel_config__enable_dbo", True, "batches that overlap"),
    ("parallel_config__use_ubatching", True, "batches that overlap"),
    ("compilation_config__pass_config", SimpleNamespace(enable_sp=True), "sequence parallelism"),
    ("parallel_config", None, "AttributeError: 'NoneType' object has no attribute "
                              "'pipeline_parallel_size'")])
def test_deployments(stand_in, caplog, change, value, reason):
    assert reasons(stand_in, caplog, model_of(stand_in, **{change: value})) == reason


@pytest.mark.parametrize("mode, serves", [
    ("FULL_AND_PIECEWISE", True), ("FULL_DECODE_ONLY", True), ("FULL", True), ("NONE", True),
    ("PIECEWISE", False)])
def test_modes_of_graphs(stand_in, caplog, mode, serves):
    model = model_of(stand_in,
                     compilation_config__cudagraph_mode=stand_in.parts.CUDAGraphMode(name=mode))
    if serves:
        expect_right(warm(model), *batch_of(model))
    else:
        assert reasons(stand_in, caplog, model).startswith("CUDA graphs of pieces only")


class Fp8LinearMethod:
    pass


class OtherMLP(torch.nn.Module):
    pass


@pytest.mark.parametrize("change, reason", [
    (set_on("self_attn.attn.kv_cache_dtype", "fp8_e5m2"), "a cache of fp8_e5m2"),
    (lambda model: set_on("self_attn.attn.calculate_kv_scales", True)(float8_of(model, "tensor")),
     "scales of the cache that vLLM computes from the first batch"),
    (lambda model: set_on("self_attn.attn._v_scale", torch.ones(2))(float8_of(model, "tensor")),
     "1 scales of keys and 2 of values, for 2 heads"),
    (lambda model: set_on("self_attn.attn._k_scale", 1.0)(float8_of(model, "tensor")),
     "scales of the cache that are no float32 of the tensor or of heads"),
    (set_on("self_attn.attn.kv_cache_dtype", "fp8"), "a cache of torch.bfloat16"),
    (set_on("self_attn.attn.attn_type", "encoder_only"), "attention that is not causal"),
    (set_on("self_attn.attn.kv_sharing_target_layer_name", "x"), "layers that share a cache"),
    (set_on("self_attn.attn.impl.alibi_slopes", torch.zeros(4)), "ALiBi"),
    (set_on("self_attn.attn.impl", SimpleNamespace(scale=0.25)),
     "the attention backend SimpleNamespace"),
    (set_on("self_attn.qkv_proj.quant_method", Fp8LinearMethod()),
     "quantised weights, QKVParallelLinear with Fp8LinearMethod"),
    (set_on("mlp.down_proj.reduce_results", False), "a row-parallel product that is not reduced"),
    (set_on("mlp.gate_up_proj.bias", torch.nn.Parameter(torch.zeros(192).bfloat16())),
     "biases of the network"),
    (set_on("mlp", OtherMLP()), "OtherMLP is not known"),
    (set_on("input_layernorm.variance_size_override", 3), "RMSNorm is not known"),
    (set_on("self_attn.do_llama_4_scaling", True), "queries that are scaled by position"),
    (set_on("ada_rms_norm_t_cond", 1), "a norm with a condition"),
    (set_on("self_attn.dual_chunk_attention_config", {}), "attention in two chunks"),
    (lambda model: setattr(model, "end_layer", 2), "it has a part of the layers"),
    (lambda model: model.layers[1].mlp.down_proj.register_forward_hook(lambda *given: None),
     "mlp.down_proj has hooks, or a forward of its own"),
    (lambda model: model.layers[2].register_forward_pre_hook(lambda *given: None),
     "LlamaDecoderLayer has hooks, or a forward of its own"),
    (lambda model: setattr(model.layers[0].self_attn, "forward", None), "self_attn has hooks, or a forward of its own"),
])
def test_structures(stand_in, caplog, change, reason):
    model = model_of(stand_in)
    model.forward = lambda *arguments: None
    change(model)
    assert reasons(stand_in, caplog, model) == reason


def test_other_rotary_embeddings(stand_in, caplog):
    class Phi3LongRoPEScaledRotaryEmbedding(stand_in.parts.RotaryEmbedding):
        pass

    model = model_of(stand_in, rotary=Phi3LongRoPEScaledRotaryEmbedding(16))
    assert reasons(stand_in, caplog, model) == "Phi3LongRoPEScaledRotaryEmbedding is not known"


ORDER = "a cache that is not contiguous, or has the heads of a block before its tokens"


@pytest.mark.parametrize("cache, reason", [
    (lambda: torch.randn(BLOCKS, 2, BLOCK, 32).bfloat16(), ORDER),
    (lambda: torch.randn(BLOCKS, 2, 2, BLOCK, 16).bfloat16().transpose(2, 3), ORDER),
    (lambda: torch.randn(BLOCKS, BLOCK, 2, 48).bfloat16().transpose(1, 2),
     "a cache of [24, 2, 16, 48]"),
    (lambda: torch.randn(BLOCKS, 2, 32).bfloat16(), "a cache of [24, 2, 32]"),
    (lambda: torch.randn(BLOCKS, 2, 24, 2, 16).bfloat16(), "blocks of 24 tokens"),
    (lambda: torch.randn(BLOCKS, 2, BLOCK, 2, 16), "a cache of torch.float32"),
    (lambda: torch.randn(2, BLOCKS, BLOCK, 2, 16).bfloat16(), "a cache of [2, 24, 16, 2, 16]"),
])
def test_caches(stand_in, caplog, cache, reason):
    model = model_of(stand_in)
    model.forward = lambda *arguments: None
    for layer in model.layers:
        layer.self_attn.attn.kv_cache = cache()
    assert reasons(stand_in, caplog, model) == reason


@pytest.mark.parametrize("block", [48, 272, 512])
def test_blocks_of_several_pages(stand_in, monkeypatch, block):
    """As vLLM makes them beside layers with states."""
    monkeypatch.setitem(globals(), "BLOCK", block)
    model = model_of(stand_in, model_config__max_model_len=2 * block)
    for layer in model.layers:
        layer.self_attn.rotary_emb.cos_sin_cache = stand_in.parts.RotaryEmbedding(16, 3 * block).cos_sin_cache
    warm(model)
    expect_right(model, *batch_of(model, (5, block + 9, block, 2 * block)))


def test_subclasses(stand_in):
    """A class of another module may compute something else, whatever its name is; its __call__ is
    that of its base."""
    other = type("LlamaModel", (stand_in.LlamaModel,),
                 {"forward": lambda self, *arguments, **named: "its own"})
    model = model_of(stand_in, classes=other)
    assert step(model, *batch_of(model)) == "its own"
    assert step(model, *batch_of(model)) == "its own"


def test_compilation(stand_in, monkeypatch):
    """A trace holds vLLM's own call."""
    model = warm(model_of(stand_in))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    step(model, *batch_of(model))
    assert model.calls == 1


def test_models_are_not_kept(stand_in):
    import gc
    import weakref

    model = warm(model_of(stand_in))
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


# graphs of vLLM

class Captured:
    """Whether the stand-in captures a graph now."""

    def __init__(self, monkeypatch):
        self.now = False
        monkeypatch.setattr("fftune.vllm.layers.is_capturing", lambda tensor: self.now)


def graphed(stand_in, kind="llama", **changes):
    """A model in an engine that captures graphs of up to 64 tokens."""
    return model_of(stand_in, kind, compilation_config__max_cudagraph_capture_size=64, **changes)


def step_in(mode, model, metadata, positions, descriptor=None):
    """A step whose context has this mode of graphs."""
    from vllm.forward_context import set_forward_context

    ids = torch.arange(len(positions)) % 50
    with torch.inference_mode(), set_forward_context(metadata) as context:
        context.cudagraph_runtime_mode = SimpleNamespace(name=mode)
        context.batch_descriptor = descriptor
        return model(ids.int(), positions, None)


def test_captures_of_pieces_are_vllms(stand_in, monkeypatch):
    """vLLM 0.33 captures its pieces with metadata that look like a batch of pure decoding, after a warm-up of their
    kernels. If a size were left out, vLLM would capture it in a running step, and end."""
    captured, model = Captured(monkeypatch), graphed(stand_in)
    metadata, positions = batch_of(model)
    for mode in ("NONE", "PIECEWISE"):
        model.calls = 0
        step_in(mode, model, metadata, positions)
        assert model.calls == (2 if mode == "NONE" else 1), "with the test of the first batch"
    for calls, now in ((1, False), (0, True)):  # the warm-up and the capture of a whole graph
        captured.now, model.calls = now, 0
        got = step_in("NONE", model, metadata, positions)
        assert model.calls == calls
    assert got.isfinite().all()
    captured.now, model.calls = False, 0
    step_in("PIECEWISE", model, metadata, positions)
    assert model.calls == 1


def test_batches_beyond_the_graphs_run_here(stand_in, monkeypatch):
    model = warm(model_of(stand_in, compilation_config__max_cudagraph_capture_size=2))
    expect_right(model, *batch_of(model))


def test_a_plan_is_made_before_its_capture(stand_in, monkeypatch):
    captured, model = Captured(monkeypatch), graphed(stand_in)
    step(model, *batch_of(model))
    run = importlib.import_module("fftune._run")
    metadata, positions = batch_of(model, (5, 40))
    step(model, metadata, positions)
    captured.now, model.calls = True, 0
    monkeypatch.setattr(run, "Plan", lambda *given: pytest.fail(f"{given} is made in a capture"))
    expect_right(model, metadata, positions)


@pytest.mark.parametrize("whole", [True, False])
def test_the_plans_of_all_captures_are_made_with_the_first(stand_in, monkeypatch, whole):
    if not whole:
        monkeypatch.setattr("fftune.vllm.layers._is_one_op", lambda *_: False)
    run = importlib.import_module("fftune._run")
    run.forget_plans()
    captured, model = Captured(monkeypatch), graphed(stand_in, compilation_config__cudagraph_capture_sizes=[1, 2, 6, 64])
    step(model, *batch_of(model))
    monkeypatch.setattr(run, "Plan", lambda *given: pytest.fail(f"{given} is made later"))
    for count in (1, 2, 6):
        metadata, positions = batch_of(model, (5,) * count)
        captured.now = True
        step(model, metadata, positions)
    assert importlib.import_module("fftune.vllm.layers")._states[model].reason == ""
    assert model.calls == 2, "the test and the first batch"
    run.forget_plans()


@pytest.mark.parametrize("mode", ["PIECEWISE", "NONE"])
def test_batch_invariant_batches_of_pieces(prompts, stand_in, monkeypatch, mode):
    """All batches run by the ops: those whose pieces vLLM captured already, too."""
    for home in ("fftune._run", "fftune.vllm.layers"):
        monkeypatch.setattr(f"{home}.BATCH_INVARIANT", True)
    importlib.import_module("fftune._run").forget_plans()
    model = warm(warm(model_of(stand_in)), *MIXED)
    metadata, positions = batch_of(model, *MIXED)
    for calls in (int(mode == "PIECEWISE"), 0):
        model.calls = 0
        step_in(mode, model, metadata, positions, "27 tokens")
        assert model.calls == calls
    for layer in model.layers:  # of another start: vLLM captures anew
        layer.self_attn.attn.kv_cache = cache_of()
    model.calls = 0
    step_in(mode, model, metadata, positions, "27 tokens")
    assert model.calls == int(mode == "PIECEWISE")
    importlib.import_module("fftune._run").forget_plans()


def test_caches_that_vllm_frees(stand_in):
    """vLLM profiles its memory on a small cache, which is gone before the one of requests is made."""
    import gc
    import weakref

    model = warm(model_of(stand_in))
    kept = weakref.ref(model.layers[0].self_attn.attn.kv_cache)
    storage = model.layers[0].self_attn.attn.kv_cache.untyped_storage()
    for layer in model.layers:
        layer.self_attn.attn.kv_cache = cache_of()
    gc.collect()
    assert kept() is None
    assert torch._C._storage_Use_Count(storage._cdata) == 1


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("batch", [((5, 40, 1, 16), 3), MIXED])
def test_rows_that_are_padding(prompts, stand_in, known, batch):
    """vLLM's routers take a mark for each row of a call, in the warm-up of a capture for padding alone."""
    from vllm.forward_context import set_forward_context

    model = mixtures_of(stand_in)
    if not known:
        set_on("mlp.experts.routed_experts.quant_method.experts_cls", object)(model)
    metadata, positions = batch_of(model, *batch)
    lengths = next(iter(metadata.values())).seq_lens
    padding = positions.new_zeros(len(positions), dtype=torch.bool)
    if len(lengths) == len(positions):
        padding |= lengths == 0
    ids = (torch.arange(len(positions)) % 50).int()

    def run(own, marks):
        with torch.inference_mode(), set_forward_context(metadata) as context:
            context.is_padding = marks
            y = own(ids, positions, None)
            assert context.is_padding is marks
            return y

    run(model, torch.ones_like(padding))  # the test
    model.calls = 0
    y = run(model, padding)
    assert model.calls == 0
    exact = wide(model)
    right = run(exact, padding)
    assert error(y[~padding], right[~padding]) < 0.02


# drafts

def verifying(drafts):
    return SimpleNamespace(num_speculative_tokens=drafts)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind, drafts", [("llama", 1), ("llama", 3), ("llama", 7), ("qwen3_moe", 1)])
def test_batches_that_verify_drafts(stand_in, monkeypatch, caplog, kind, drafts, whole):
    monkeypatch.setattr("fftune.vllm.plans.COMPILES_BESIDE", False)
    if not whole:
        monkeypatch.setattr("fftune.vllm.layers._is_one_op", lambda *_: False)
    model = (mixtures_of if kind == "qwen3_moe" else model_of)(stand_in)
    model.vllm_config.speculative_config = verifying(drafts)
    batch = (33, 40, 8, 17), 0, [1 + drafts] * 4
    calls = calls_of_layer(monkeypatch)
    with caplog.at_level(logging.INFO):
        warm(model, *batch)
    assert lines_of(caplog)[0].endswith(f"in batches that verify {drafts} drafts of each sequence")
    calls.clear()
    expect_right(model, *batch_of(model, *batch))
    assert len(calls) == whole
    warm(model)
    expect_right(model, *batch_of(model))  # of the draft model, or after a step without drafts


def test_drafts_of_some_sequences_are_vllms(decoding, stand_in):
    model = model_of(stand_in)
    model.vllm_config.speculative_config = verifying(3)
    warm(model, (33, 40, 8, 17), 0, [4] * 4)
    step(model, *batch_of(model, (33, 40, 8, 17), 0, [4, 4, 1, 4]))
    assert model.calls == 1


@pytest.mark.parametrize("marks", [(1,), (0, 2, 3), (0, 1, 2)])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("padded", [0, 2])
def test_hidden_states_of_single_layers(stand_in, monkeypatch, marks, whole, padded):
    """As EAGLE-3 reads them."""
    if not whole:
        monkeypatch.setattr("fftune.vllm.layers._is_one_op", lambda *_: False)
    model = model_of(stand_in)
    model.aux_hidden_state_layers = marks
    warm(model)
    metadata, positions = batch_of(model)
    exact, ids = wide(model), torch.arange(4) % 50
    given = torch.cat((positions, torch.zeros(padded, dtype=torch.int64)))
    y, hidden = step(model, metadata, given, torch.cat((ids, ids[:padded])))
    assert model.calls == 0
    right, states = step(exact, metadata, positions, ids)
    assert len(hidden) == len(states) == len(marks)
    for own, its in zip((y, *hidden), (right, *states)):
        assert own.shape == (4 + padded, 64) and error(own[:4], its) < 0.02
        assert own[4:].eq(0).all()


def test_wrong_hidden_states_are_found(stand_in, monkeypatch, caplog):
    layers = importlib.import_module("fftune.vllm.layers")
    own = layers._run_whole
    monkeypatch.setattr(layers, "_run_whole", lambda *given: (*own(*given)[:2], [-x for x in own(*given)[2]]))
    model = model_of(stand_in)
    model.aux_hidden_state_layers = (1,)
    with caplog.at_level(logging.INFO):
        step(model, *batch_of(model))
    assert "stay vLLM's: results differ" in lines_of(caplog)[0]


# adapters

class MergedColumnParallelLinearWithLoRA(torch.nn.Module):
    """vLLM's layer around a linear one, with an adapter that doubles results."""

    def __init__(self, base_layer, flag):
        super().__init__()
        self.base_layer = base_layer
        self.punica_wrapper = SimpleNamespace(token_mapping_meta=SimpleNamespace(no_lora_flag_cpu=flag))

    def forward(self, x):
        return self.base_layer(x) * (1 if self.punica_wrapper.token_mapping_meta.no_lora_flag_cpu[0] else 2)


def test_batches_without_adapters_run_here(stand_in):
    model, flag = model_of(stand_in), torch.tensor([True])
    model.vllm_config.lora_config = object()
    for layer in model.layers:
        for home, name in ((layer.self_attn, "qkv_proj"), (layer.self_attn, "o_proj"), (layer.mlp, "gate_up_proj"),
                           (layer.mlp, "down_proj")):
            setattr(home, name, MergedColumnParallelLinearWithLoRA(getattr(home, name), flag))
    flag[0] = False  # vLLM's dummy adapters come first
    metadata, positions = batch_of(model)
    step(model, metadata, positions)
    flag[0] = True
    warm(model)
    expect_right(model, metadata, positions)
    flag[0] = False
    expect_vllms(model, 1)


# errors

STEPS = ("_context", "_examine", "_batch_of", "_test", "_choose", "_run", "_made_up", "_pages_of", "has_adapters")


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("late", [False, True])
def test_an_error_in_any_step_leaves_vllms_result(stand_in, monkeypatch, caplog, name, late):
    """In the first batch, and in a later one."""
    def fails(*_, **__):
        raise RuntimeError(f"in {name}")

    model = model_of(stand_in)
    if late:
        warm(model)
    tested = not late and name in ("_test", "_choose", "_run")  # vLLM's layers ran for the test, too
    monkeypatch.setattr(f"fftune.vllm.layers.{name}", fails)
    metadata, positions = batch_of(model)
    plain = copy.deepcopy(model)
    for one, other in zip(attentions_of(plain), attentions_of(model)):
        one.kv_cache = other.kv_cache.clone()
    model.calls = 0
    with caplog.at_level(logging.INFO):
        got = step(model, metadata, positions)
        calls_of_step = model.calls
        step(model, metadata, positions)
    if late and name in ("_examine", "_test", "_made_up", "_pages_of"):  # not called again for such a batch
        return
    from vllm.forward_context import set_forward_context

    with torch.inference_mode(), set_forward_context(metadata):
        right = plain.forward((torch.arange(len(positions)) % 50).int(), positions, None)
    assert torch.equal(got, right)
    assert caplog.text.count(f"stay vLLM's: RuntimeError: in {name}") == 1
    assert calls_of_step <= 1 + tested

"""Whole layers of Qwen3-Next and Qwen3.5 in vLLM's decode batches: results, keys, states, and what stays vLLM's."""
import copy
import importlib
import logging
from types import SimpleNamespace

import pytest
import torch

MODELS = {"qwen3_next": "Qwen3NextModel", "qwen3_5": "Qwen3_5Model"}
GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
BLOCK, BLOCKS, KV_HEADS, DIM = 48, 40, 2, 16
PAGE = BLOCK * KV_HEADS * 2 * DIM * 2  # bytes of a block of keys and values; a sequence's states take less


@pytest.fixture
def stand_in(vllm, monkeypatch):
    """The stand-in's module of llama, with the plugin loaded."""
    monkeypatch.setenv("FFTUNE_VLLM", "experts,layers,states")
    monkeypatch.setenv("STAND_IN_VERSION", "0.33.0")
    importlib.import_module("fftune.vllm").register()
    return importlib.import_module("vllm.model_executor.models.llama")


@pytest.fixture(params=MODELS)
def model(stand_in, request):
    return model_of(stand_in, request.param)


def model_of(stand_in, kind, layers=4, rotary=None, **changes):
    """Random weights and caches. A token has all experts: rounding would choose others."""
    torch.manual_seed(7)
    sizes = SimpleNamespace(d=64, h=96, heads=4, kv_heads=KV_HEADS, dim=DIM, layers=layers, vocabulary=50, tp=1,
                            rotary=rotary or stand_in.parts.RotaryEmbedding(8))
    cls = getattr(importlib.import_module(f"vllm.model_executor.models.{kind}"), MODELS[kind])
    model = cls(vllm_config=stand_in.config_of(sizes, torch.bfloat16, **changes)).bfloat16()
    for layer in model.layers:
        if layer.layer_type == "linear_attention":
            layer.linear_attn.A_log.data = layer.linear_attn.A_log.data.float()
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.router.top_k = 4
    bind(model)
    return model


def deltas_of(model):
    return [layer.linear_attn for layer in model.layers if layer.layer_type == "linear_attention"]


def attentions_of(model):
    return [layer.self_attn.attn for layer in model.layers if layer.layer_type == "full_attention"]


def bind(model, shared=True, states=torch.float32, order="entries", drafts=0):
    """Caches. Four layers in succession, each of another group, share memory, as vLLM's have it."""
    blocks = BLOCKS
    model.memory = []
    for place, layer in enumerate(model.layers):
        if place % 4 == 0 or not shared:
            model.memory.append(torch.zeros(blocks * PAGE, dtype=torch.uint8))
        memory = model.memory[-1]
        if layer.layer_type == "full_attention":
            keys = memory.view(torch.bfloat16).view(blocks, BLOCK, KV_HEADS, 2 * DIM)
            layer.self_attn.attn.kv_cache = keys.transpose(1, 2)
            continue
        own = layer.linear_attn
        channels, _, width = own.conv1d.weight.shape
        shape = (width - 1 + drafts, channels) if order == "entries" else (channels, width - 1 + drafts)
        begin = -(-2 * shape[0] * shape[1] // 16) * 16
        state = own.num_v_heads, own.head_v_dim, own.head_k_dim
        inputs = memory.view(torch.bfloat16).as_strided((blocks, *shape), (PAGE // 2, shape[1], 1))
        strides = PAGE // states.itemsize, state[1] * state[2], state[2], 1
        cache = memory.view(states).as_strided((blocks, *state), strides, begin // states.itemsize)
        assert begin + cache[0].numel() * states.itemsize <= PAGE
        own.kv_cache = inputs, cache


def copied(model):
    """The same model with caches of its own, which stays vLLM's."""
    other = copy.deepcopy(model)
    memory = [one.clone() for one in model.memory]
    for own, mine in [*zip(attentions_of(other), attentions_of(model)), *zip(deltas_of(other), deltas_of(model))]:
        at = next(i for i, one in enumerate(model.memory) if one.untyped_storage().data_ptr() == of_storage(mine))

        def moved(t):
            place = t.storage_offset(), t.shape, t.stride()
            return torch.tensor([], dtype=t.dtype).set_(memory[at].untyped_storage(), *place)

        own.kv_cache = tuple(map(moved, mine.kv_cache)) if isinstance(mine.kv_cache, tuple) else moved(mine.kv_cache)
    other.memory, other.calls = memory, 0
    other.vllm_config = copy.copy(model.vllm_config)
    other.vllm_config.kv_transfer_config = object()
    return other


def of_storage(module):
    cache = module.kv_cache
    return (cache[0] if isinstance(cache, tuple) else cache).untyped_storage().data_ptr()


def batch_of(model, lengths=(5, 70, 1, 48), padded=0, groups=3, queries=1):
    """Metadata of requests with as many keys, and their positions. Linear layers are in so many groups; no block is of
    two groups. Keys and states are random, and all other bytes are no numbers."""
    for memory in model.memory:
        memory.fill_(255)
    rows = len(lengths) + padded
    order = (torch.randperm(BLOCKS - 1) + 1).int()
    table, rest = torch.zeros(rows, 2, dtype=torch.int32), order[2 * len(lengths):]
    table[:len(lengths)] = order[:2 * len(lengths)].view(-1, 2)
    lengths = [*lengths, *[0] * padded]
    positions = torch.tensor([max(length - 1, 0) if length else 3 for length in lengths])
    slots = [int(table[row, (length - 1) // BLOCK]) * BLOCK + (length - 1) % BLOCK if length else -1
             for row, length in enumerate(lengths)]
    starts = torch.arange(rows + 1, dtype=torch.int32)
    of_attention = SimpleNamespace(
        num_actual_tokens=rows, max_query_len=queries, query_start_loc=starts, block_table=table, causal=True,
        seq_lens=torch.tensor(lengths, dtype=torch.int32), slot_mapping=torch.tensor(slots))
    metadata = {own.layer_name: of_attention for own in attentions_of(model)}
    for own in attentions_of(model):
        fill(own.kv_cache, table[:len(table) - padded].flatten())
    made, count = {}, rows - padded
    for place, own in enumerate(deltas_of(model)):
        if place % groups not in made:
            blocks, rest = rest[:count], rest[count:]
            # vLLM gives a column of a table of blocks.
            indices = torch.full((rows, 2), 99, dtype=torch.int32)
            indices[:, 0] = torch.nn.functional.pad(blocks, (0, padded))
            made[place % groups] = importlib.import_module(GDN).GDNAttentionMetadata(
                num_prefills=0, num_prefill_tokens=0, num_spec_decodes=0, num_spec_decode_tokens=0, num_decodes=rows,
                num_decode_tokens=rows, num_actual_tokens=rows, non_spec_query_start_loc=starts,
                non_spec_state_indices_tensor=indices[:, 0])
        metadata[own.prefix] = made[place % groups]
        for cache in own.kv_cache:
            fill(cache, metadata[own.prefix].non_spec_state_indices_tensor[:count])
    return metadata, positions


def fill(cache, blocks):
    cache[blocks.long()] = (torch.randn(len(blocks), *cache.shape[1:]) * 0.5).to(cache.dtype)


def step(model, metadata, positions, **named):
    from vllm.forward_context import set_forward_context

    ids = torch.arange(positions.shape[-1]) * 7 % 50
    with torch.inference_mode(), set_forward_context(metadata):
        return model(ids.int(), positions, None, **named)


def lines_of(caplog):
    """Without those of the models that stay vLLM's here."""
    lines = [record.getMessage().removeprefix("fftune: ") for record in caplog.records]
    return [line for line in lines if not line.endswith("a KV connector")]


def expect_near(mine, right):
    assert mine.shape == right.shape and mine.dtype is right.dtype
    assert (mine.float() - right.float()).norm() < 2.5e-2 * right.float().norm()


def used_of(model, metadata):
    """The caches of the layers, each with the blocks that the batch has there."""
    for own in attentions_of(model):
        blocks = metadata[own.layer_name].block_table.flatten().unique()
        yield own.kv_cache, blocks[blocks > 0].long()
    for own in deltas_of(model):
        blocks = metadata[own.prefix].non_spec_state_indices_tensor
        yield from ((cache, blocks[blocks > 0].long()) for cache in own.kv_cache)


def expect_right(model, metadata, positions, rows=slice(None)):
    """That a step runs here, and has the results, the keys and the states of vLLM's computation; and writes nothing
    else."""
    other, before = copied(model), [one.clone() for one in model.memory]
    model.calls = 0
    got = step(model, metadata, positions)
    assert model.calls == 0, "vLLM's ran"
    right = step(other, metadata, positions)
    assert other.calls == 1
    expect_near(got[rows], right[rows])
    expect_states(model, other, metadata, before)
    return got


def expect_states(model, other, metadata, before):
    for (mine, blocks), (right, _) in zip(used_of(model, metadata), used_of(other, metadata)):
        expect_near(mine[blocks], right[blocks])
    # Blocks that vLLM's computation leaves alone.
    for mine, right, old in zip(model.memory, other.memory, before):
        same = (right == old).view(BLOCKS, -1).all(1)
        assert torch.equal(mine.view(BLOCKS, -1)[same], old.view(BLOCKS, -1)[same])


def warm(model, *batch, **named):
    """The model after the call that compares with vLLM's own result."""
    step(model, *batch_of(model, *batch, **named))
    model.calls = 0
    return model


def calls_of_layers(monkeypatch):
    """A list with the number of layers of each op from now on."""
    layers, calls = importlib.import_module("fftune.vllm.layers"), []
    own, of_attention = layers.delta_layers, layers.ops.layer
    monkeypatch.setattr(layers, "delta_layers", lambda x, w, *a, **o: calls.append(len(w)) or own(x, w, *a, **o))
    monkeypatch.setattr(layers.ops, "layer", lambda x, w, *a, **o: calls.append(-len(w)) or of_attention(x, w, *a, **o))
    return calls


def test_numbers(model, caplog, monkeypatch):
    """Layers that are alike and share a group are one op; none shares one here."""
    with caplog.at_level(logging.INFO):
        warm(model)
    assert lines_of(caplog) == [f"4 layers of {type(model).__name__} run by fftune's ops in batches of pure decoding"]
    calls = calls_of_layers(monkeypatch)
    for lengths in ((5, 70, 1, 48), (96,), (1, 2)):
        expect_right(model, *batch_of(model, lengths))
        assert calls[-4:] == [1, 1, 1, -1]


def test_the_comparison_leaves_no_trace(model):
    """Its blocks may be those of requests."""
    metadata, positions = batch_of(model)
    other, before = copied(model), [one.clone() for one in model.memory]
    mine, right = step(model, metadata, positions), step(other, metadata, positions)
    assert model.calls == 1, "the comparison's"
    expect_near(mine, right)
    expect_states(model, other, metadata, before)


@pytest.mark.parametrize("options", [
    dict(order="channels"), dict(states=torch.bfloat16), dict(drafts=1), dict(shared=False)])
def test_layouts(model, options):
    bind(model, **options)
    expect_right(warm(model), *batch_of(model))


def test_padding(model):
    """Rows of a graph that are no sequence's keep the null block."""
    bind(model, shared=False)
    warm(model, (5, 70, 1, 48), padded=3)
    expect_right(model, *batch_of(model, (5, 70, 1), padded=4), rows=slice(3))


def test_groups(stand_in, monkeypatch):
    """Layers of one group that follow each other are one op."""
    model = model_of(stand_in, "qwen3_next", layers=8)
    bind(model, shared=False)
    warm(model, groups=1)
    calls = calls_of_layers(monkeypatch)
    expect_right(model, *batch_of(model, groups=1))
    assert calls[-4:] == [3, -1, 3, -1]


def test_hidden_states(stand_in, monkeypatch):
    model = warm(model_of(stand_in, "qwen3_5"))
    model.aux_hidden_state_layers = (0, 2)
    metadata, positions = batch_of(model)
    other = copied(model)
    (y, hidden), (right, expected) = (step(one, metadata, positions) for one in (model, other))
    for mine, their in zip((y, *hidden), (right, *expected)):
        expect_near(mine, their)
    assert model.calls == 0 and len(hidden) == 2


def test_positions_on_three_axes(stand_in):
    model = model_of(stand_in, "qwen3_5", rotary=stand_in.parts.MRotaryEmbedding(8))
    metadata, positions = batch_of(model)
    step(model, metadata, positions.expand(3, -1))
    metadata, positions = batch_of(model)
    expect_right(model, metadata, positions.expand(3, -1))


def test_parameters_that_are_loaded_again(model):
    warm(model)
    for own in deltas_of(model):
        own.dt_bias.data += 1
        own.A_log.data -= 1
        own.in_proj_qkvz.weight.data *= 1.5
    expect_right(model, *batch_of(model))


def test_the_faster_one(model, monkeypatch, caplog, tmp_path):
    """Timed batches change the states of their own blocks alone, and these are restored."""
    layers, faster = (importlib.import_module(f"fftune.vllm.{name}") for name in ("layers", "faster"))
    monkeypatch.setenv("FFTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(layers, "_is_measured", lambda state: True)
    monkeypatch.setattr(faster, "BUDGET", 1e9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    calls, asked = calls_of_layers(monkeypatch), []

    def milliseconds(*runs, among=None, captured=True):
        runs[0]()
        calls.clear()
        runs[1]()
        asked.append(len(calls))
        return (1.0, 2.0) if len(asked) == 3 else (2.0, 1.0)  # four sequences are vLLM's

    monkeypatch.setattr(faster, "milliseconds", milliseconds)
    metadata, positions = batch_of(model)
    other, before = copied(model), [one.clone() for one in model.memory]
    with caplog.at_level(logging.INFO):
        step(model, metadata, positions)
    step(other, metadata, positions)
    expect_states(model, other, metadata, before)
    assert lines_of(caplog)[-1].endswith("by sequences: 1: 2.00, 2: 2.00, 4: 0.50 (vLLM)") and asked == [4, 4, 4]
    model.calls = 0
    step(model, *batch_of(model))
    assert model.calls == 1
    expect_right(model, *batch_of(model, (5, 70)))


def test_states_of_the_comparison_are_apart(stand_in, monkeypatch):
    """From those of other groups, and from blocks with keys: groups share memory."""
    layers = importlib.import_module("fftune.vllm.layers")
    own, seen = layers._batch_of_sequences, []
    monkeypatch.setattr(layers, "_batch_of_sequences", lambda *a: seen.append(a[5]) or own(*a))
    warm(model_of(stand_in, "qwen3_5"), (5, 70), padded=1)
    blocks = [block for one in seen[0] for block in one if block]
    assert len(blocks) == len({*blocks}) == 9 and min(blocks) == layers._BLOCKS and max(blocks) < BLOCKS


def test_memory_for_copies(stand_in, monkeypatch, caplog):
    layers = importlib.import_module("fftune.vllm.layers")
    monkeypatch.setattr(layers, "_is_measured", lambda state: True)
    monkeypatch.setattr(layers, "_has_memory", lambda state, sequences: False)
    assert reasons(model_of(stand_in, "qwen3_5"), caplog) == "no memory for copies of states while steps are timed"


def test_captures(stand_in, monkeypatch):
    """Warm-ups are vLLM's, and make the plans; a capture of a whole step runs here."""
    now = [False]
    monkeypatch.setattr("fftune.vllm.layers.is_capturing", lambda tensor: now[0])
    model = model_of(stand_in, "qwen3_next", compilation_config__max_cudagraph_capture_size=16)
    warm(model, (5, 70), padded=2)
    step(model, *batch_of(model, (5, 70), padded=2))
    assert model.calls == 1
    now[0] = True
    made = []
    monkeypatch.setattr(importlib.import_module("fftune._run"), "_new_plan", lambda *_: made.append(1))
    expect_right(model, *batch_of(model, (5, 70), padded=2), rows=slice(2))
    assert not made


def test_a_batch_with_prompts_is_vllms(model):
    warm(model)
    metadata, positions = batch_of(model, (5, 9))
    for name, own in metadata.items():
        if hasattr(own, "num_prefills"):
            metadata[name] = copy.copy(own)
            metadata[name].__dict__.update(num_prefills=1, num_prefill_tokens=1, num_decodes=1, num_decode_tokens=1,
                                           has_initial_state=torch.tensor([True, False]),
                                           prefill_query_start_loc=torch.tensor([0, 1]).int(),
                                           prefill_state_indices=own.non_spec_state_indices_tensor[1:],
                                           prefill_has_initial_state=torch.tensor([False]))
    step(model, metadata, positions)
    assert model.calls == 1


def reasons(model, caplog):
    caplog.clear()
    with caplog.at_level(logging.INFO):
        step(model, *batch_of(model))
        step(model, *batch_of(model))
    assert model.calls >= 2
    line, = lines_of(caplog)
    return line.removeprefix(f"layers of {type(model).__name__} stay vLLM's: ")


def on_deltas(path, value):
    def change(model):
        for own in deltas_of(model):
            *homes, name = path.split(".")
            for part in homes:
                own = getattr(own, part)
            setattr(own, name, value)
    return change


def on_layers(path, value):
    def change(model):
        for own in model.layers:
            *homes, name = path.split(".")
            for part in homes:
                own = getattr(own, part)
            setattr(own, name, value)
    return change


@pytest.mark.parametrize("change, reason", [
    (on_deltas("norm.activation", "sigmoid"), "RMSNormGated with sigmoid is not known"),
    (on_deltas("norm.norm_before_gate", False), "RMSNormGated with silu is not known"),
    (on_deltas("activation", "gelu"), "the activation gelu"),
    (on_deltas("conv1d.bias", torch.zeros(1)), "biases of QwenGatedDeltaNetAttention"),
    (on_deltas("in_proj_ba.quant_method", object()), "quantised weights, MergedColumnParallelLinear with object"),
    (on_deltas("out_proj._fftune_packed", SimpleNamespace(n=64, k=32)),
     "quantised weights of layers with gates or states"),
    (on_layers("layer_scale", True), "factors of what a layer adds"),
    (on_layers("use_attn_reduce_scatter_for_moe", True), "sequence parallelism"),
    (lambda model: setattr(model.vllm_config, "lora_config", object()), "LoRA in layers with gates or states"),
    (lambda model: setattr(model.vllm_config.model_config, "multimodal_config", SimpleNamespace(
        language_model_only=False)), "positions of images: --language-model-only has none")])
def test_models_that_stay_vllms(stand_in, caplog, change, reason):
    model = model_of(stand_in, "qwen3_5", rotary=stand_in.parts.MRotaryEmbedding(8))
    change(model)
    assert reasons(model, caplog) == reason


@pytest.mark.parametrize("change", [
    on_layers("mlp.replicate_shared_expert", True), on_layers("mlp.shared_expert.act_fn", None),
    on_layers("mlp.experts.shared_experts", None)])
def test_mixtures_that_are_not_known(stand_in, caplog, change):
    model = model_of(stand_in, "qwen3_next")
    change(model)
    model.forward = lambda ids, positions, *_, **__: torch.zeros(len(ids), 64).bfloat16()
    assert reasons(model, caplog) == "layers with states that no one op computes"


def test_states_need_a_name(vllm, monkeypatch, caplog):
    monkeypatch.setenv("FFTUNE_VLLM", "layers")
    monkeypatch.setenv("STAND_IN_VERSION", "0.33.0")
    importlib.import_module("fftune.vllm").register()
    model = model_of(importlib.import_module("vllm.model_executor.models.llama"), "qwen3_5")
    assert reasons(model, caplog) == "layers with states, which need states in FFTUNE_VLLM"


@pytest.mark.parametrize("name, change", [
    ("state_indices", lambda value: value.roll(1)), ("null_index", lambda value: -1), ("mixer_eps", lambda value: 1.0)])
def test_wrong_computations_are_found(stand_in, monkeypatch, caplog, name, change):
    layers = importlib.import_module("fftune.vllm.layers")
    own = layers.delta_layers

    def wrong(x, weights, states, indices, **options):
        if name == "state_indices":
            return own(x, weights, states, change(indices), **options)
        if name == "null_index":  # padded rows change the null block
            return own(x, weights, [tuple(t + 1 for t in pair) for pair in states], indices, **options)
        return own(x, weights, states, indices, **{**options, name: change(options[name])})

    monkeypatch.setattr(layers, "delta_layers", wrong)
    model = model_of(stand_in, "qwen3_5")
    assert "differ from vLLM's by" in reasons(model, caplog)


def test_an_error_behind_states_is_no_second_computation(stand_in, monkeypatch, caplog):
    """In front of the first layer with states vLLM computes the batch; behind it there are other states."""
    layers = importlib.import_module("fftune.vllm.layers")
    for fails_at, own in ((0, layers.delta_layers), (1, layers.delta_layers)):
        model, count = warm(model_of(stand_in, "qwen3_5")), [0]
        step(model, *batch_of(model))

        def failing(*arguments, **options):
            count[0] += 1
            if count[0] > fails_at:
                raise RuntimeError("no more")
            return own(*arguments, **options)

        metadata, positions = batch_of(model)
        other, model.calls = copied(model), 0
        with monkeypatch.context() as patched:
            patched.setattr(layers, "delta_layers", failing)
            if fails_at:
                with pytest.raises(RuntimeError, match="no more"):
                    step(model, metadata, positions)
                continue
            got = step(model, metadata, positions)
        assert model.calls == 1 and torch.equal(got, step(other, metadata, positions))


def test_few_blocks(stand_in, monkeypatch, caplog):
    """Each group needs a block of its own for the comparison, behind those with keys."""
    monkeypatch.setitem(globals(), "BLOCKS", 12)
    model = model_of(stand_in, "qwen3_5")
    with caplog.at_level(logging.INFO):
        step(model, *batch_of(model, (5,)))
    assert lines_of(caplog) == ["layers of Qwen3_5Model stay vLLM's: caches of 12 blocks"] and model.calls == 1

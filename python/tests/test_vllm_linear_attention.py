"""The cores of linear-attention layers in vLLM: the results over its caches of states, and what stays vLLM's."""
import importlib
import inspect
import logging
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fftune._declare import Into

MAMBA = "vllm.model_executor.layers.mamba"
BLOCKS = 24


@pytest.fixture
def linear(vllm, monkeypatch, tmp_path):
    """The plugin's module, with vLLM's layers changed by it, in an engine with graphs of up to 16 tokens."""
    monkeypatch.setenv("FFTUNE_VLLM", "linear-attention")
    monkeypatch.setenv("FFTUNE_CACHE", str(tmp_path))
    importlib.import_module("fftune.vllm").register()
    for home in ("gdn.qwen_gdn_linear_attn", "mamba_mixer2"):
        importlib.import_module(f"{MAMBA}.{home}")
    module = importlib.import_module("fftune.vllm.linear_attention")
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8), compilation_config=SimpleNamespace(
        cudagraph_mode=1, max_cudagraph_capture_size=16))
    monkeypatch.setattr(module, "current", lambda: config)
    return module


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


class Delta:
    """Layers of Qwen3-Next, and what vLLM gives them."""

    home, name = "gdn.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention"
    method, written = "_forward_core", "core_attn_out"
    words = "gated delta rules (2/4 heads of 16 x 8), states in float32,"
    ops = "causal-conv1d and gated-delta-rule"

    @staticmethod
    def state(layer):
        return layer.num_v_heads, layer.head_v_dim, layer.head_k_dim

    @staticmethod
    def arguments(layer, rows, wide):
        """Rows may have a gate behind q, k and v."""
        channels = layer.conv1d.weight.shape[0]
        b, a = (torch.randn(rows, layer.num_v_heads).bfloat16() for _ in range(2))
        return dict(mixed_qkv=torch.randn(rows, channels + wide).bfloat16()[:, :channels], b=b, a=a,
                    core_attn_out=torch.zeros(rows, layer.num_v_heads, layer.head_v_dim, dtype=torch.bfloat16))

    @staticmethod
    def metadata(**values):
        counts = dict.fromkeys(("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens",
                                "num_spec_decodes", "num_spec_decode_tokens", "num_actual_tokens"), 0)
        return importlib.import_module(f"{MAMBA}.{Delta.home}").GDNAttentionMetadata(**{**counts, **values})

    @staticmethod
    def decoding(*blocks):
        """One token of each sequence. vLLM gives a column of a table of blocks."""
        count, table = len(blocks), torch.stack([int32(*blocks), int32(*blocks) * 0 + 99], 1)
        return Delta.metadata(num_decodes=count, num_decode_tokens=count, num_actual_tokens=count,
                              non_spec_query_start_loc=torch.arange(count + 1, dtype=torch.int32),
                              non_spec_state_indices_tensor=table[:, 0])

    @staticmethod
    def prompts(lengths, blocks, known, first=0):
        """The first sequences decode; empty ones behind them are padding."""
        starts = int32(*[sum(lengths[:i]) for i in range(len(lengths) + 1)])
        indices, known = int32(*blocks), torch.tensor(known)
        return Delta.metadata(
            num_prefills=sum(length > 0 for length in lengths[first:]), num_decodes=first, num_decode_tokens=first,
            num_prefill_tokens=sum(lengths[first:]), num_actual_tokens=sum(lengths), non_spec_query_start_loc=starts,
            non_spec_state_indices_tensor=indices, has_initial_state=known,
            prefill_query_start_loc=starts[first:] - first, prefill_state_indices=indices[first:],
            prefill_has_initial_state=known[first:])

    @staticmethod
    def drafts_of(lengths, blocks, accepted, padded=0):
        """Tokens of sequences whose drafts are verified; the last `padded` ones are rows of a graph."""
        starts, count = [sum(lengths[:i]) for i in range(len(lengths) + 1)], len(lengths)
        return Delta.metadata(
            num_spec_decodes=count, num_spec_decode_tokens=starts[-1], num_actual_tokens=starts[-1],
            spec_sequence_masks=torch.tensor([True] * count),
            spec_query_start_loc=int32(*starts, *[starts[-1]] * padded),
            spec_state_indices_tensor=torch.tensor([*blocks, *[[0] * len(blocks[0])] * padded], dtype=torch.int32),
            num_accepted_tokens=int32(*accepted, *[1] * padded))

    left = dict(spec_sequence_masks=torch.tensor([True])), dict(flashinfer_checkpoint_plan=object())


class Mamba:
    """Mixers of Mamba-2, and what vLLM gives them."""

    home, name, method, written = "mamba_mixer2", "MambaMixer2", "conv_ssm_forward", "output"
    words, ops = "Mamba-2 (4 heads of 8 x 16, 2 groups), states in float32,", "causal-conv1d and ssd"

    @staticmethod
    def state(layer):
        return layer.num_heads, layer.head_dim, layer.ssm_state_size

    @staticmethod
    def arguments(layer, rows, wide):
        inner, channels = layer.tped_intermediate_size, layer.tped_conv_size
        return dict(projected_states=torch.randn(rows, inner + channels + layer.num_heads).bfloat16(),
                    output=torch.zeros(rows, inner, dtype=torch.bfloat16))

    @staticmethod
    def metadata(**values):
        counts = dict.fromkeys(("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens"), 0)
        return importlib.import_module(f"{MAMBA}.{Mamba.home}").Mamba2AttentionMetadata(**{**counts, **values})

    @staticmethod
    def decoding(*blocks):
        return Mamba.metadata(num_decodes=len(blocks), num_decode_tokens=len(blocks),
                              state_indices_tensor_d=torch.stack([int32(*blocks), int32(*blocks) * 0 + 99], 1)[:, :1])

    @staticmethod
    def prompts(lengths, blocks, known, first=0):
        count = sum(length > 0 for length in lengths)  # vLLM has no padding here
        lengths, blocks, known = lengths[:count], blocks[:count], known[:count]
        starts = int32(*[sum(lengths[first:i]) for i in range(first, count + 1)])
        return Mamba.metadata(
            num_prefills=count - first, num_prefill_tokens=sum(lengths[first:]), num_decodes=first,
            num_decode_tokens=first, has_initial_states_p=torch.tensor(known[first:]), query_start_loc_p=starts,
            state_indices_tensor_p=int32(*blocks[first:]), state_indices_tensor_d=int32(*blocks[:first])[:, None])

    @staticmethod
    def drafts_of(lengths, blocks, accepted, padded=0):
        starts, count = [sum(lengths[:i]) for i in range(len(lengths) + 1)], len(lengths)
        return Mamba.metadata(
            num_decodes=count, num_decode_tokens=starts[-1], query_start_loc_d=int32(*starts, *[starts[-1]] * padded),
            state_indices_tensor_d=torch.tensor([*blocks, *[[0] * len(blocks[0])] * padded], dtype=torch.int32),
            num_accepted_tokens=int32(*accepted, *[1] * padded))

    left = dict(checkpoint_chunk_idx=torch.tensor([0])),


@pytest.fixture(params=[Delta, Mamba])
def kind(request):
    return request.param


def caches(kind, layer, states=torch.float32, order="entries", drafts=0, blocks=BLOCKS):
    """Random caches as parts of vLLM's pages, which have other bytes behind them."""
    channels, _, width = layer.conv1d.weight.shape
    entries, state = width - 1 + drafts, kind.state(layer)
    begin = -(-2 * entries * channels // 16) * 16
    page = begin + state[0] * state[1] * state[2] * states.itemsize + 64
    memory = torch.zeros(blocks * page, dtype=torch.uint8)
    shape = (entries, channels) if order == "entries" else (channels, entries)
    inputs = memory.view(torch.bfloat16).as_strided((blocks, *shape), (page // 2, shape[1], 1))
    strides = page // states.itemsize, state[1] * state[2], state[2], 1
    of_states = memory.view(states).as_strided((blocks, *state), strides, begin // states.itemsize)
    for cache in (inputs, of_states):
        cache.copy_(torch.randn(cache.shape) * 0.5)
    layer.kv_cache = inputs, of_states
    layer.memory = memory


def layer_of(kind, **options):
    of_caches = {name: options.pop(name) for name in [*options] if name in inspect.signature(caches).parameters}
    layer = getattr(importlib.import_module(f"{MAMBA}.{kind.home}"), kind.name)(**options)
    caches(kind, layer, **of_caches)
    return layer


def rows_of(found):
    return found.num_prefill_tokens + found.num_decode_tokens + getattr(found, "num_spec_decode_tokens", 0)


@contextmanager
def context_of(layer, found):
    from vllm.forward_context import set_forward_context

    with set_forward_context({layer.prefix: found}):
        yield


def step(kind, layer, found, padded=0, wide=0):
    """Runs a batch, and compares the results and all of the memory with those of vLLM's. Whether it ran by fftune."""
    given = kind.arguments(layer, rows_of(found) + padded, wide)
    right = {name: value.clone() for name, value in given.items()}
    before, calls = layer.memory.clone(), layer.calls
    with context_of(layer, found):
        getattr(type(layer), kind.method)._fftune_original(layer, **right)
        expected, memory = [cache.clone() for cache in layer.kv_cache], layer.memory.clone()
        layer.memory.copy_(before)
        layer.calls = calls
        getattr(layer, kind.method)(**given)
    same(given[kind.written], right[kind.written])
    for mine, own in zip(layer.kv_cache, expected):
        same(mine, own)
    touched = (memory != before).view(BLOCKS, -1).any(1)
    assert torch.equal(layer.memory.view(BLOCKS, -1)[~touched], before.view(BLOCKS, -1)[~touched])
    return layer.calls == calls


def same(mine, right):
    mine, right = mine.double(), right.double()
    assert (mine - right).norm() <= 1e-2 * right.norm()
    assert torch.equal(mine[right == 0], right[right == 0])


def lines_of(caplog):
    return [record.getMessage().removeprefix("fftune: ") for record in caplog.records]


FORMS = [dict(states=states, order=order) for states in (torch.float32, torch.bfloat16)
         for order in ("entries", "channels")]


@pytest.mark.parametrize("options", [*FORMS, dict(drafts=2)])
def test_decoding(linear, kind, options, caplog):
    layer = layer_of(kind, **options)
    with caplog.at_level(logging.INFO):
        assert not step(kind, layer, kind.decoding(3, 5, 4)), "a test runs both"
    assert step(kind, layer, kind.decoding(3, 5, 4), wide=64) and step(kind, layer, kind.decoding(7))
    assert step(kind, layer, kind.decoding(6, 0, 0, 9), padded=3), "padding"
    line, = lines_of(caplog)
    assert line == f"decoding of {kind.words.replace('float32', str(layer.kv_cache[1].dtype)[6:])} runs by {kind.ops}"


@pytest.mark.parametrize("kind, sizes", [
    (Delta, dict(k_heads=3, v_heads=3, k_dim=24, v_dim=40)), (Delta, dict(k_heads=1, v_heads=8, width=3)),
    (Mamba, dict(heads=6, groups=1, dim=24, state_dim=40)), (Mamba, dict(heads=3, groups=3, width=3))],
    indirect=["kind"])
def test_sizes(linear, kind, sizes):
    layer = layer_of(kind, **sizes)
    for found in (kind.decoding(3, 5), kind.decoding(3, 5), kind.prompts([40, 2], [8, 9], [True, False])):
        step(kind, layer, found)
    assert step(kind, layer, kind.decoding(3, 5)) and step(kind, layer, kind.prompts([7], [3], [True]))


@pytest.mark.parametrize("options", [*FORMS, dict(drafts=1)])
def test_prompts(linear, kind, options):
    layer = layer_of(kind, **options)
    assert not step(kind, layer, kind.prompts([5, 40], [3, 4], [False, True])), "a test runs both"
    assert step(kind, layer, kind.prompts([5, 40], [3, 4], [False, True]), wide=64)
    assert step(kind, layer, kind.prompts([1, 1, 9, 1, 0], [3, 8, 4, 9, 0], [True, True, True, False, False], first=2),
                padded=4)
    assert step(kind, layer, kind.prompts([66], [2], [False]))
    assert not step(kind, layer, kind.decoding(2, 3)) and step(kind, layer, kind.decoding(2, 3))


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_verification_of_drafts(linear, kind, states, caplog):
    """A sequence begins with the state behind the last token that was kept, and leaves one behind each token."""
    drafts = [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
    layer = layer_of(kind, states=states, drafts=2)
    with caplog.at_level(logging.INFO):
        assert not step(kind, layer, kind.drafts_of([3, 3, 3], drafts, [1, 2, 3]))
    assert step(kind, layer, kind.drafts_of([3, 3, 3], drafts, [3, 1, 2]), wide=64)
    assert step(kind, layer, kind.drafts_of([3, 2, 1], drafts, [2, 3, 1], padded=2), padded=4)
    assert step(kind, layer, kind.drafts_of([3, 3], [[3, 4, 5], [0, 0, 0]], [2, 1]))
    with caplog.at_level(logging.INFO):
        assert not step(kind, layer, kind.drafts_of([2, 2], [[3, 4], [6, 7]], [1, 2])), "others have a test of their own"
    assert step(kind, layer, kind.drafts_of([2, 2], [[3, 4], [6, 7]], [1, 2]))
    assert [line.split(" ", 4)[:4] for line in lines_of(caplog)] == [
        ["verification", "of", "2", "drafts"], ["verification", "of", "1", "drafts"]]


def test_a_request_with_drafts(linear, kind):
    """From its prompt on, with tokens that are kept and others that are not."""
    layer, blocks = layer_of(kind, drafts=2), [[3, 4, 5]]
    for found in (kind.prompts([6], [9], [False]), kind.drafts_of([3], [[9, 10, 11]], [1])):
        step(kind, layer, found)
    assert step(kind, layer, kind.prompts([7], [3], [False]))
    for kept in (1, 3, 2, 1, 1, 3):
        assert step(kind, layer, kind.drafts_of([3], blocks, [kept]))


def test_drafts_beside_prompts_are_vllms(linear, kind):
    layer = layer_of(kind, drafts=1)
    found = kind.drafts_of([2], [[3, 4]], [1])
    found.num_prefills = 1
    assert linear._CORES[kind.name].batch_of(layer, found) is None


def test_prompts_alone_in_an_engine_with_drafts(linear):
    """vLLM's counts of accepted tokens are there, and those of no sequence."""
    layer, found = layer_of(Mamba, drafts=1), Mamba.prompts([5], [3], [False])
    step(Mamba, layer, found)
    found.num_accepted_tokens = int32()
    assert step(Mamba, layer, found)


def test_the_faster_one_of_drafts(linear, monkeypatch, caplog):
    layer = layer_of(Delta, drafts=2)
    asked = measured(linear, monkeypatch, lambda rows: (2.0, 1.0) if rows < 12 else (1.0, 1.5))
    with caplog.at_level(logging.INFO):
        step(Delta, layer, Delta.drafts_of([3], [[3, 4, 5]], [2]))
    assert {rows for rows, _ in asked} == {6, 9, 15}, "1, 2 and 4 sequences with 24 blocks"
    assert step(Delta, layer, Delta.drafts_of([3], [[3, 4, 5]], [2]))
    assert not step(Delta, layer, Delta.drafts_of([3] * 4, [[3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]], [1] * 4))
    assert lines_of(caplog)[0].endswith("by sequences: 1: 2.00, 2: 2.00, 4: 0.67 (vLLM)")


def test_sequences_without_tokens(linear, kind):
    """Rows of a graph's metadata behind those of the batch; and counts that do not go together are vLLM's."""
    layer, found = layer_of(kind), kind.decoding(3, 5, 0)
    step(kind, layer, kind.decoding(3, 5))
    found.num_decode_tokens = 2
    if kind is Delta:
        found.num_actual_tokens = 2
    assert step(kind, layer, found)
    found = kind.prompts([1, 5], [3, 4], [True, False], first=1)
    step(kind, layer, found)
    assert step(kind, layer, found)
    found.num_decode_tokens = 0
    with context_of(layer, found):
        core = linear._CORES[kind.name]
        assert core.batch_of(layer, found) is None


def test_requests_that_come_and_go(linear, kind):
    """The states of a sequence go on from its prompt, in parts of it, to its tokens."""
    layer = layer_of(kind)
    step(kind, layer, kind.decoding(20))
    step(kind, layer, kind.prompts([3], [21], [False]))
    for found in (kind.prompts([20, 9], [5, 6], [False, False]), kind.decoding(5, 6),
                  kind.prompts([1, 8, 4], [5, 6, 7], [True, True, False], first=1), kind.decoding(7, 5, 6),
                  kind.decoding(6), kind.prompts([1, 3], [6, 5], [True, False], first=1), kind.decoding(5, 6)):
        assert step(kind, layer, found)


def test_references(linear, kind, references):
    """With FFTUNE_DISABLE=1 the definitions in PyTorch run."""
    layer = layer_of(kind)
    with references():
        for found in (kind.decoding(2, 0, 3), kind.prompts([5, 3], [2, 4], [True, False])):
            step(kind, layer, found)
            assert step(kind, layer, found)


def test_a_state_that_kernels_cannot_take():
    """Into copies inputs, and no tensor that is written."""
    from fftune import Error

    x, w = torch.randn(2, 1, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    arguments = x, w, None, None, None, None, None
    state = torch.zeros(2, 8, 3).bfloat16().transpose(1, 2)
    with pytest.raises(Error, match="causal-conv1d: state is written in place: give it as the kernels take it"):
        Into("causal_conv1d_update", (*arguments, state, "silu", "entries", 0), (torch.empty_like(x),))
    y, wide = torch.empty_like(x), torch.zeros(2, 1, 16).bfloat16()[..., :8]
    wide.copy_(x)
    one = Into("causal_conv1d_update", (wide, *arguments[1:], state.contiguous(), "silu", "entries", 0), (y,))
    one.plan(), one.run()
    same(y, torch.nn.functional.silu(x.float() * w[:, -1].float()))


def test_captures(linear, kind, monkeypatch):
    """A capture waits for nothing: it runs here if a warm-up has."""
    layer, captures = layer_of(kind), []
    monkeypatch.setattr(linear, "is_capturing", lambda tensor: bool(captures))
    captures.append(1)
    assert not step(kind, layer, kind.decoding(0, 0)) and not linear._layers
    captures.clear()
    step(kind, layer, kind.decoding(0, 0))  # a warm-up has blocks of nobody
    for blocks in ((0, 0), (0, 0, 0)):
        captures.append(1)
        assert step(kind, layer, kind.decoding(*blocks)) == (len(blocks) == 2)
        captures.clear()
    assert step(kind, layer, kind.decoding(4, 5, 6))


def test_captures_of_pieces_decide_nothing(linear, kind, caplog):
    """Their batches have prompts of nobody."""
    layer = layer_of(kind)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert not step(kind, layer, kind.prompts([4, 4], [0, 0], [False, False]))
    assert not caplog.records
    step(kind, layer, kind.prompts([4, 4], [1, 2], [False, False]))
    assert step(kind, layer, kind.prompts([4, 4], [1, 2], [False, False]))


def test_the_cache_of_a_profile(linear, kind):
    layer = layer_of(kind)
    with context_of(layer, kind.decoding(1)):
        caches(kind, layer, blocks=8)
        getattr(layer, kind.method)(**kind.arguments(layer, 1, 0))
    assert not linear._kinds, "nothing is decided on a cache that vLLM throws away"
    caches(kind, layer)
    step(kind, layer, kind.decoding(1))
    assert step(kind, layer, kind.decoding(1))
    caches(kind, layer)  # bound anew
    assert step(kind, layer, kind.decoding(2)) and len(linear._caches) <= 2


def test_one_test_for_all_layers(linear, kind, caplog):
    layers = [layer_of(kind) for _ in range(3)]
    with caplog.at_level(logging.INFO):
        assert [step(kind, layer, kind.decoding(2, 9)) for layer in layers] == [False, True, True]
    assert len(caplog.records) == 1


def test_parameters_that_are_loaded_again(linear, kind):
    layer = layer_of(kind)
    step(kind, layer, kind.decoding(2))
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape).clamp(-1, -0.1))
    assert step(kind, layer, kind.decoding(2))


# what stays vLLM's

def left_alone(kind, layer, found, reason, caplog):
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert not step(kind, layer, found)
    assert [line for line in lines_of(caplog) if reason in line] == lines_of(caplog) and len(lines_of(caplog)) == 1


def test_drafts_and_states_within_prompts(linear, kind):
    layer, found = layer_of(kind), kind.prompts([5], [3], [False])
    step(kind, layer, kind.decoding(3)), step(kind, layer, found)
    for values in kind.left:
        changed = kind.prompts([5], [3], [False])
        vars(changed).update(values)
        assert not step(kind, layer, changed)
    assert step(kind, layer, found)


def test_other_layers(linear, kind, caplog):
    layer = layer_of(kind)
    layer.activation = "gelu"
    left_alone(kind, layer, kind.decoding(3), f"cores of {kind.name} stay vLLM's: the activation gelu", caplog)


def test_other_caches(linear, kind, caplog):
    layer = layer_of(kind, states=torch.float16)
    left_alone(kind, layer, kind.decoding(3), "in torch.float16", caplog)


def test_other_metadata(linear, kind, caplog):
    layer, found = layer_of(kind), kind.decoding(3)
    step(kind, layer, kind.decoding(3))
    caplog.clear()

    class Other:
        def __init__(self):
            vars(self).update({name: value for name, value in vars(found).items() if name not in (
                "checkpoint", "checkpoint_chunk_idx")})

    left_alone(kind, layer, Other(), "the metadata of this vLLM has no checkpoint", caplog)


def test_a_subclass(linear, kind):
    layer = layer_of(kind)
    layer.__class__ = type("Other", (type(layer),), {})
    assert not step(kind, layer, kind.decoding(3)) and not step(kind, layer, kind.decoding(3))


def test_an_engine_that_is_not_known(linear, kind, monkeypatch, caplog):
    monkeypatch.setattr(linear, "current", lambda: None)
    left_alone(kind, layer_of(kind), kind.decoding(3), "the engine's configuration is not known", caplog)


@pytest.mark.parametrize("what", ["results", "states", "states of convolutions"])
@pytest.mark.parametrize("found", ["decoding", "prompts"])
def test_wrong_results(linear, kind, monkeypatch, caplog, what, found):
    layer = layer_of(kind)
    own = Into.run

    def run(self):
        own(self)
        of_rule = self.outputs[0].shape[-1] != layer.conv1d.weight.shape[0]
        if what == "results" and of_rule:
            self.outputs[0].mul_(1.5)
        if what == "states" and of_rule:
            layer.kv_cache[1].add_(1)
        if what == "states of convolutions" and not of_rule:
            layer.kv_cache[0].mul_(2)

    monkeypatch.setattr(Into, "run", run)
    batch = kind.decoding(3, 4) if found == "decoding" else kind.prompts([9, 3], [3, 4], [True, False])
    before = layer.memory.clone()
    given = kind.arguments(layer, rows_of(batch), 0)
    with context_of(layer, batch), caplog.at_level(logging.INFO):
        getattr(layer, kind.method)(**given)
        calls, layer.calls = layer.calls, 0
        getattr(layer, kind.method)(**given)
    assert calls == 2 and layer.calls == 1
    line, = lines_of(caplog)
    assert line.startswith(f"{found} of {kind.words} stays vLLM's: {what} differ from vLLM's by ")
    assert before.shape == layer.memory.shape


def test_states_after_wrong_results(linear, kind, monkeypatch):
    """Those of requests are vLLM's."""
    layer, own = layer_of(kind), Into.run
    monkeypatch.setattr(Into, "run", lambda self: (own(self), [output.mul_(1.5) for output in self.outputs]))
    assert not step(kind, layer, kind.decoding(3, 4)) and not step(kind, layer, kind.prompts([9], [5], [True]))


# faults

def fail(*arguments, **named):
    raise RuntimeError("broken\nhere")


FAULTS = {
    "examination": lambda linear, kind: (linear._CORES[kind.name], "layer_of"),
    "batch": lambda linear, kind: (linear._CORES[kind.name], "batch_of"),
    "caches": lambda linear, kind: (linear, "states_of"),
    "ops": lambda linear, kind: (linear._CORES[kind.name], "runs_of"),
    "plan": lambda linear, kind: (Into, "plan"),
    "run": lambda linear, kind: (Into, "run"),
    "test": lambda linear, kind: (linear, "difference"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("captured", [False, True])
def test_faults(linear, kind, monkeypatch, caplog, fault, captured):
    """Faults of the first batch, of one of other sizes, and of a capture leave vLLM's results and states."""
    layer = layer_of(kind)
    with monkeypatch.context() as patch:
        patch.setattr(*FAULTS[fault](linear, kind), fail)
        if captured:
            patch.setattr(linear, "is_capturing", lambda tensor: True)
        with caplog.at_level(logging.INFO):
            for found in (kind.decoding(3, 5), kind.prompts([4], [3], [True]), kind.decoding(3, 5)):
                assert not step(kind, layer, found)
    assert all("stay" in line and line.endswith("RuntimeError: broken here") for line in lines_of(caplog))
    assert captured or caplog.records


@pytest.mark.parametrize("fault", ["batch", "ops", "plan", "run"])
@pytest.mark.parametrize("sizes", ["known", "new"])
@pytest.mark.parametrize("captured", [False, True])
def test_faults_of_a_later_batch(linear, kind, monkeypatch, caplog, fault, sizes, captured):
    """Also of a capture. No state is touched before the first launch, and none by the first run of new sizes."""
    layer = layer_of(kind)
    known, new = ((kind.decoding(3, 5), kind.prompts([4], [3], [True])),
                  (kind.decoding(3, 5, 4), kind.prompts([6], [3], [True])))
    for found in known:
        step(kind, layer, found)
    with monkeypatch.context() as patch:
        patch.setattr(*FAULTS[fault](linear, kind), fail)
        if captured:
            patch.setattr(linear, "is_capturing", lambda tensor: True)
        with caplog.at_level(logging.INFO):
            for found in (known if sizes == "known" else new) * 2:
                assert not step(kind, layer, found)
    if not captured or sizes == "known":
        assert caplog.records
    assert all("stay" in line for line in lines_of(caplog))


def test_too_little_memory(linear, kind, monkeypatch, caplog):
    """A batch whose workspace is not there runs by vLLM's kernels, and the next one here."""
    layer = layer_of(kind)
    step(kind, layer, kind.decoding(3, 5))
    with monkeypatch.context() as patch:
        def full(runs):
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(linear, "_prepare", full)
        assert not step(kind, layer, kind.decoding(3, 5))
    assert step(kind, layer, kind.decoding(3, 5))


# choices and plans

def measured(linear, monkeypatch, times):
    """Stands in for a device: both computations run, and take these times by the number of rows."""
    faster = importlib.import_module("fftune.vllm.faster")
    monkeypatch.setattr(linear, "_is_measured", lambda own: True)
    monkeypatch.setattr(faster, "BUDGET", 1e9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    asked = []

    def milliseconds(*runs, among=None, captured=True):
        for run in runs:
            run()
        asked.append((runs[0].args[1].rows, captured))
        return times(asked[-1][0])

    monkeypatch.setattr(faster, "milliseconds", milliseconds)
    return asked


def test_the_faster_one(linear, kind, monkeypatch, caplog):
    layer = layer_of(kind)
    asked = measured(linear, monkeypatch, lambda rows: (2.0, 1.0) if rows < 6 else (1.0, 1.5))
    with caplog.at_level(logging.INFO):
        assert not step(kind, layer, kind.decoding(3, 5)), "a test and a measurement run both"
    assert {rows for rows, _ in asked} == {2, 3, 5, 9, 17} and all(captured for _, captured in asked)
    assert step(kind, layer, kind.decoding(3, 5)) and step(kind, layer, kind.decoding(3, 4, 5, 6))
    assert not step(kind, layer, kind.decoding(*range(1, 9))), "vLLM is the faster one"
    line, = lines_of(caplog)
    assert line == (f"decoding of {kind.words} runs by {kind.ops} where they are faster; vLLM's time divided by "
                    "fftune's, by sequences: 1: 2.00, 2: 2.00, 4: 2.00, 8: 0.67 (vLLM), 16: 0.67 (vLLM)")


def test_the_faster_one_of_prompts(linear, kind, monkeypatch, caplog):
    """By their tokens, and whether it is one sequence: each class is measured by its first batch, outside of graphs."""
    layer = layer_of(kind)
    asked = measured(linear, monkeypatch, lambda rows: (2.0, 1.0) if rows < 32 else (1.0, 1.5))
    with caplog.at_level(logging.INFO):
        for lengths, served in (([20], True), ([24], True), ([40], False), ([50], False), ([10, 12], True),
                                ([11, 13], True)):
            blocks = range(3, 3 + len(lengths))
            for again in (False, True):
                found = kind.prompts(lengths, [*blocks], [True] * len(lengths))
                assert step(kind, layer, found) == (served and (again or lengths in ([24], [11, 13])))
    assert asked == [(20, False), (40, False), (22, False)]
    assert [line.rpartition(": ")[2] for line in lines_of(caplog)] == ["2.00", "0.67 (vLLM)", "2.00"]
    assert all(line.startswith(f"prompts of {kind.words} runs by {kind.ops} where") for line in lines_of(caplog))


def test_plans_are_made_beside_the_engine(linear, kind, monkeypatch):
    """Sizes that vLLM has no graph of: a thread makes their plans, unless vLLM may be capturing."""
    layer, begins, go, made = layer_of(kind), threading.Event(), threading.Event(), []
    step(kind, layer, kind.prompts([4], [3], [True]))
    own = linear.Plan

    def plan(device, problem):
        made.append(problem)
        begins.set()
        go.wait(60)
        return own(device, problem)

    monkeypatch.setattr(linear, "Plan", plan)
    assert step(kind, layer, kind.prompts([5], [3], [True])) and not made, "a warm-up waits for kernels"
    with monkeypatch.context() as patch:
        patch.setattr(linear, "is_capturing", lambda tensor: True)
        step(kind, layer, kind.prompts([5], [3], [True]))
    try:
        assert not step(kind, layer, kind.prompts([6], [3], [True])) and begins.wait(60) and len(made) == 1
        assert not step(kind, layer, kind.prompts([7], [3], [True])), "a thread is busy"
        go.set()
        deadline = time.monotonic() + 60
        while not step(kind, layer, kind.prompts([6], [3], [True])) and time.monotonic() < deadline:
            time.sleep(0.01)
        while any(thread.is_alive() for thread in linear._making.values()):
            time.sleep(0.01)
        monkeypatch.setattr(linear, "_PATIENCE", 60)
        assert step(kind, layer, kind.prompts([8], [3], [True])), "kernels that are compiled take no time"
    finally:
        go.set()


# which parts

@pytest.mark.parametrize("given, is_there", [("", True), ("1", True), ("linear-attention", True), ("layers", False)])
def test_it_is_a_part_of_the_default(vllm, monkeypatch, kind, given, is_there):
    monkeypatch.setenv("FFTUNE_VLLM", given)
    importlib.import_module("fftune.vllm").register()
    cls = getattr(importlib.import_module(f"{MAMBA}.{kind.home}"), kind.name)
    assert hasattr(getattr(cls, kind.method), "_fftune_original") == is_there


def test_batch_invariance_leaves_it_to_vllm(vllm, monkeypatch, caplog, kind):
    cls = getattr(importlib.import_module(f"{MAMBA}.{kind.home}"), kind.name)
    monkeypatch.setenv("FFTUNE_VLLM", "linear-attention")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with caplog.at_level(logging.INFO):
        importlib.import_module("fftune.vllm").register()
    assert not hasattr(getattr(cls, kind.method), "_fftune_original")
    line, = lines_of(caplog)
    assert line.startswith("linear-attention stay vLLM's: VLLM_BATCH_INVARIANT is set")


def test_other_interfaces(vllm, monkeypatch, caplog, kind):
    cls = getattr(importlib.import_module(f"{MAMBA}.{kind.home}"), kind.name)
    monkeypatch.setattr(cls, kind.method, lambda self, x: None)
    monkeypatch.setenv("FFTUNE_VLLM", "linear-attention")
    with caplog.at_level(logging.INFO):
        importlib.import_module("fftune.vllm").register()
    line, = lines_of(caplog)
    assert line.startswith(f"{MAMBA}.{kind.home} stays vLLM's: {kind.name}.{kind.method} of this vLLM takes (self, x)")
    assert not hasattr(getattr(cls, kind.method), "_fftune_original")

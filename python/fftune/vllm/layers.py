"""Whole decoder layers in batches of pure decoding, and in those with prompts.

`__call__` of vLLM's inner models, such as LlamaModel, is wrapped. The layers run by fftune's ops: qkv
into vLLM's pages, attention over them, linear with the residual, and the network with its norm and
residual. Where every request of a batch has one new token, the op `layer` runs all of them at once, or a run
of those that are alike and whose caches vLLM hands out together, if it computes them. Batches with prompts of
models without mixtures are vLLM's if FFTUNE_VLLM has no `prompts`, and so are all other calls. Layers with states
in the place of keys and values run with the others if FFTUNE_VLLM has `states`: vLLM's metadata says which entry of
its caches a sequence has. Under vLLM's capture of CUDA graphs this decides what a graph holds; a replay calls
nothing here.

Weights and pages are views of vLLM's tensors. Under tensor parallelism `layer` sums over the ranks
within its plan. The single ops add the residual after vLLM's all-reduce.
"""
import copy
import functools
import itertools
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .. import _run as running
from .. import ops
from .._library import Plan
from .._ops.layer import delta_layers
from .._run import BATCH_INVARIANT
from . import faster, linear_cores, plans, products, ranks
from .logs import Unfit, log, log_once, one_line, reason_of
from .structure import E4M3, DeltaLayer, Layer, Model, Pages, expect_known, has_adapters, pages_of, queries_of
from .trial import difference, is_capturing


_compilers = threading.Semaphore(4)


@dataclass
class _State:
    """The knowledge of a model: its description, or the reason why it stays vLLM's. `tested` has the
    kinds of batches whose results agreed with vLLM's own; `agreed` the kinds and rows of batches that
    all ranks of tensor parallelism have run; `problems` those of one batch with prompts, each with its
    device; `plans` whether plans for these numbers of rows and sequences were made; `made` the problems
    of those plans by key_of(): batches of other sizes share some of them. Batches of many rows share plans
    for any number of them."""

    model: Model | None = None
    reason: str = ""
    tested: set[str] = field(default_factory=set)
    without_prompts: bool = False  # batches with prompts stay vLLM's, because theirs did not agree
    # By vLLM's caches, which it frees after it has profiled its memory.
    pages: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    entries: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)  # the same of states
    agreed: set[tuple[str, int]] = field(default_factory=set)
    problems: list[tuple[int, dict]] = field(default_factory=list)
    decoding: dict[int, list[tuple[int, dict]]] = field(default_factory=dict)  # the same by tokens of each sequence
    plans: dict[tuple[int, int], bool] = field(default_factory=dict)
    made: set[tuple] = field(default_factory=set)
    most: int = 0  # rows of a batch
    graphed: int = 0  # tokens of vLLM's largest CUDA graph
    queries: int = 1  # of a sequence in pure decoding
    pieces: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)  # sizes that vLLM captured, by caches
    warm: set[tuple[int, int]] = field(default_factory=set)  # rows, and of each sequence, whose plans were made
    # By the tokens of each sequence: where batches of pure decoding are faster here, by their sequences.
    choices: dict[int, faster.Choice] = field(default_factory=dict)

    def serves(self, batch: "_Batch") -> bool:
        """Whether a batch of pure decoding runs here: where it is faster, or nothing was measured."""
        choice = self.choices.get(batch.queries)
        return choice is None or choice.is_faster(batch.rows // batch.queries)


_states: "weakref.WeakKeyDictionary[nn.Module, _State]" = weakref.WeakKeyDictionary()


def patch_model(cls: type, parts: tuple[str, ...] = ()) -> None:
    """Wraps the class' own __call__, once. `parts`: those that FFTUNE_VLLM turns on."""
    original = cls.__dict__.get("__call__")
    if original is None:
        raise Unfit(f"{cls.__name__} has no __call__ of its own")
    if hasattr(original, "_fftune_original"):
        return

    @functools.wraps(original)
    def __call__(self, *arguments, **named):
        # A subclass may compute something else. Traces hold vLLM's own call.
        if type(self) is not cls or torch.compiler.is_compiling():
            return original(self, *arguments, **named)
        return _call(original, self, arguments, named, parts)

    __call__._fftune_original = original
    cls.__call__ = __call__


def _call(original, model: nn.Module, arguments: tuple, named: dict, parts: tuple[str, ...]):
    """The one entry: no error of the plugin leaves it, because one would stop the engine."""
    try:
        run = _own_run(original, model, arguments, named, parts)
    except Exception as error:
        _leave(model, reason_of(error))
        run = None
    return original(model, *arguments, **named) if run is None else run()


def _own_run(original, model: nn.Module, arguments: tuple, named: dict, parts: tuple[str, ...]):
    """The computation of this call by fftune's ops; None if it stays vLLM's."""
    state = _states.get(model)
    if state is None:
        state = _states[model] = _examine(model, parts)
    if state.reason:
        return None
    context = _context()
    positions = arguments[1] if len(arguments) > 1 else named.get("positions")
    if positions is not None and not is_capturing(positions):
        state.model.refresh()
    # vLLM captures its compiled pieces in these calls, or replays them, which starts faster than op by op.
    of_pieces = _mode_of(context) == "PIECEWISE" and not (BATCH_INVARIANT and _has_pieces(state, context))
    batch = None if of_pieces or has_adapters(model) else _batch_of(state, *arguments, **named)
    if batch is None:
        return None
    if batch.offsets is not None and not _serves_prompts(state, parts) or _is_profiled(state, model):
        return None
    # A stream that is being captured cannot be waited for.
    is_captured = is_capturing(batch.positions)
    if batch.kind not in state.tested and not is_captured:
        _test(original, state, model, context, batch)
    if batch.kind not in state.tested:
        return None
    if batch.offsets is None and not is_captured:
        _choose(original, state, model, context, batch)
    if batch.tokens <= state.graphed and not is_captured:
        # A warm-up of vLLM's captures: requests get replays. Captures of its pieces need its own warm-up.
        if batch.offsets is None and state.serves(batch):
            _warm_up(state, model, context, batch)
        return None
    if batch.offsets is None and not state.serves(batch):
        return None
    if batch.offsets is not None and not _has_plans(state, batch):
        return None
    if state.model.has_states and not is_captured:
        _warm_up(state, model, context, batch)  # a step that is begun has to be ended
    return functools.partial(_run_or_leave, original, state, model, arguments, named, batch, is_captured)


def _run_or_leave(original, state: _State, model: nn.Module, arguments: tuple, named: dict, batch: "_Batch",
                  is_captured: bool):
    """The result by fftune's ops. After an error it is vLLM's, whose layers write the same keys and values again. An
    error behind a layer with states is raised: the states are those after the batch."""
    context = _context()
    # vLLM finds the experts of a layer by how many layers ran before it.
    counter = getattr(context, "moe_layer_index", None)
    known = (batch.kind, batch.rows) in state.agreed or is_captured
    try:
        if state.model.reduce is None or known:
            return _run(state, model, batch)
        y = _on_all(state, lambda: _run(state, model, batch))
        state.agreed.add((batch.kind, batch.rows))
        return y
    except Exception as error:
        if state.model.reduce is not None and known or batch.begun:
            raise  # the other ranks wait for this one, or states have changed
        _give_up(state, model, batch, reason_of(error))
    if counter is not None:
        context.moe_layer_index = counter
    return original(model, *arguments, **named)


def _mode_of(context) -> str:
    return getattr(getattr(context, "cudagraph_runtime_mode", None), "name", "NONE")


def _is_profiled(state: _State, model: nn.Module) -> bool:
    """Whether vLLM profiles its memory now: graphs are captured on a cache of a block for each sequence, and both are
    thrown away."""
    most = min(state.graphed, model.vllm_config.scheduler_config.max_num_seqs)
    return len(_cache_of(state.model.layers[0])) <= most


def _has_pieces(state: _State, context) -> bool:
    """Whether vLLM has captured its pieces for batches of this size: not before its first call for them, on the caches
    that it has now."""
    cache = _cache_of(state.model.layers[0])
    known = state.pieces.setdefault(cache, set())
    descriptor = getattr(context, "batch_descriptor", None)
    if descriptor in known:
        return True
    known.add(descriptor)
    return False


def _serves_prompts(state: _State, parts: tuple[str, ...]) -> bool:
    """Whether batches with prompts run here: those of mixtures, which are faster than vLLM's; others if FFTUNE_VLLM
    names `prompts`. Nothing times them, and prompts over caches of float8_e4m3fn have not been timed elsewhere."""
    model = state.model
    return model.has_ops and not state.without_prompts and (
        "prompts" in parts or not model.has_float8_cache and all(layer.experts is not None for layer in model.layers))


def _on_all(state: _State, run):
    """The result of run(). Under tensor parallelism it is Unfit on all ranks if it fails on one."""
    if state.model.reduce is None:
        return run()
    result, reason = None, ""
    try:
        result = run()
        if state.model.group is not None:
            if (result if isinstance(result, Tensor) else result[0]).is_cuda:
                torch.cuda.synchronize()
            state.model.group.check()
    except Exception as error:
        reason = reason_of(error)
        if state.model.group is not None:
            state.model.group.close()  # ends the peers' waits
    if reason := ranks.common_reason(reason):
        raise Unfit(reason)
    return result


def _leave(model: nn.Module, reason: str) -> None:
    """Leaves the model to vLLM for good."""
    state = _states.setdefault(model, _State())
    if not state.reason:
        state.reason = reason
        log(f"layers of {type(model).__name__} stay vLLM's: {reason}")


def _give_up(state: _State, model: nn.Module, batch: "_Batch", reason: str) -> None:
    """Leaves the model to vLLM. Where rows need not have the same bits in every batch, batches with prompts
    are left to it alone."""
    if batch.offsets is not None and not BATCH_INVARIANT:
        state.without_prompts = True
        log(f"batches {batch.kind} of {type(model).__name__} stay vLLM's: {reason}")
        return
    _leave(model, reason)


# the test

_SEQUENCES = 8  # of a batch that is made up, at most: each has its new keys in a block of its own
# Blocks behind those of the first sequence, which has keys outside of windows: earlier keys of it, and such keys.
_EARLIER, _UNSEEN = 8, 9
_BLOCKS = 10  # of the caches, in which a batch that is made up has its keys


@contextmanager
def _in_context_of(state: _State, context, trial: "_Batch"):
    """Gives begin(), which puts a batch that is made up into the context of vLLM's call, anew for each computation. The
    context is restored, and so are the first blocks of the caches: they may have keys of requests."""
    kept = vars(context).copy()
    caches = [(layer, _cache_of(layer)) for layer in state.model.layers if isinstance(layer, Layer)]
    entries = _entries_of(state, trial)
    # All copies are made first: layers of several groups may share memory.
    before = [cache[:_BLOCKS].clone() for _, cache in caches]
    before_entries = [cache.index_select(0, rows) for cache, rows in entries]
    generator = torch.Generator(_cache_of(state.model.layers[0]).device).manual_seed(0)
    states = [torch.randn((min(len(rows), _SEQUENCES), *cache.shape[1:]), device=cache.device, generator=generator)
              .mul_(0.5).to(cache.dtype) for cache, rows in entries]

    def fill_states() -> None:
        for (cache, rows), values in zip(entries, states):
            for some in rows.split(_SEQUENCES):
                cache.index_copy_(0, some, values[:len(some)])

    def begin(anew: bool = False) -> None:
        """`anew`: with the states of the first time."""
        vars(context).update(kept)
        context.attn_metadata = trial.by_layer(state, lambda group: group.metadata)
        slots = kept.get("slot_mapping")  # of layers with states, too
        context.slot_mapping = (slots if isinstance(slots, dict) else {}) | trial.by_layer(
            state, lambda group: group.slots, trial.of_attention)
        if anew:
            fill_states()
        _mark_padding(context, trial.rows, trial.tokens)
        if trial.offsets is not None:  # of other sizes than the graphs of this batch
            mode = getattr(context, "cudagraph_runtime_mode", None)
            context.cudagraph_runtime_mode = getattr(type(mode), "NONE", mode)

    try:
        for layer, cache in caches:
            _fill(cache[:_BLOCKS], layer, generator)
        fill_states()
        yield begin
    finally:
        vars(context).clear()
        vars(context).update(kept)
        for (_, cache), own in zip(caches, before):
            cache[:_BLOCKS].copy_(own)
        for (cache, rows), own in zip(entries, before_entries):
            cache.index_copy_(0, rows, own)


def _entries_of(state: _State, batch: "_Batch") -> list[tuple[Tensor, Tensor]]:
    """The caches of states, and the entries of the batch's sequences in them."""
    found = []
    for group in batch.of_states:
        rows = group.indices[group.indices > linear_cores.NULL].long()
        for place in group.places:
            own = _states_of(state, state.model.layers[place])
            found += [(own.inputs, rows), (own.states, rows)]
    return found


def _fill(cache: Tensor, layer: Layer, generator: torch.Generator) -> None:
    """Fills blocks of a cache with random keys and values."""
    values = cache if layer.cache_scales is None else torch.empty(cache.shape, device=cache.device)
    values.normal_(generator=generator)
    values[_UNSEEN:].mul_(100)  # a key that is seen nevertheless decides the result
    if layer.cache_scales is None:
        return
    # [blocks, block, kv heads, features] of each.
    parts = values.unbind(1) if values.dim() == 5 else values.transpose(1, 2).split(layer.dim, -1)
    for part, scale in zip(parts, layer.cache_scales):
        part.div_(scale[:, None])
    cache.view(E4M3).copy_(values.clamp_(-448, 448))


def _numbers_of(cache: Tensor) -> Tensor:
    """The numbers in a cache; bytes are codes of float8_e4m3fn."""
    return (cache.view(E4M3).float() if cache.dtype in (torch.uint8, E4M3) else cache).flatten()


def _mark_padding(context, rows: int, tokens: int) -> None:
    """Marks the rows behind the first `rows` of `tokens` as padding: vLLM's routers take one mark for each row."""
    given = getattr(context, "is_padding", None)
    if given is not None:
        context.is_padding = torch.arange(tokens, device=given.device) >= rows


def _together(result: Tensor | tuple[Tensor, list[Tensor]], rows: int | None = None) -> Tensor:
    """The first rows of a model's result, with those of the hidden states beside it."""
    return result[:rows] if isinstance(result, Tensor) else torch.cat([y[:rows] for y in (result[0], *result[1])])


def _arguments_of(trial: "_Batch") -> tuple:
    """As vLLM calls the model with them."""
    positions = trial.positions.long()
    return trial.ids, positions.expand(trial.axes, -1) if trial.axes else positions, None, trial.embeddings


def _test(original, state: _State, model: nn.Module, context, batch: "_Batch") -> None:
    """Compares both computations of a batch that is made up."""
    try:
        trial, real = _made_up(state, batch)
        with _in_context_of(state, context, trial) as begin:
            results, written, states = [], [], []
            for run in (lambda: _on_all(state, lambda: _recorded(state, model, trial)),
                        lambda: original(model, *_arguments_of(trial))):
                begin(anew=True)
                with ranks.summing():
                    results.append(_together(run(), real))
                written += [torch.cat([_numbers_of(_cache_of(layer)[:_SEQUENCES]).float()
                                       for layer in state.model.layers if isinstance(layer, Layer)])]
                states += [[cache.index_select(0, rows).flatten() for cache, rows in _entries_of(state, trial)]]
            reason = difference("results", *results) or difference("keys and values", *written)
            for mine, own in zip(*states):
                reason = reason or difference("states", mine, own)
            if reason == "" and any(layer.window and layer.mixture is None for layer in state.model.layers):
                # The first sequence has keys in front of windows. One whose experts are others by rounding says nothing.
                reason = difference("results", *(result[:batch.queries] for result in results))
    except Exception as error:
        reason = reason_of(error)
    if state.model.reduce is not None:
        reason = ranks.common_reason(reason)
    if reason:
        _give_up(state, model, batch, reason)
    elif reason is not None:
        state.tested.add(batch.kind)
        if batch.offsets is not None or not _is_measured(state):
            log(f"{_layers_of(state, model)} run by fftune's ops in batches {batch.kind}")


def _warm_up(state: _State, model: nn.Module, context, batch: "_Batch") -> None:
    """Makes the plan of a number of rows before a capture needs it; with the first, those of all graphs."""
    if (batch.rows, batch.queries) in state.warm:
        return
    if not any(queries == batch.queries for _, queries in state.warm):
        _make_plans_of_graphs(state, model.vllm_config, batch)
    trial, _ = _made_up(state, batch)
    with _in_context_of(state, context, trial) as begin:
        begin()
        _on_all(state, lambda: _run(state, model, trial))
    state.warm.add((batch.rows, batch.queries))


def _make_plans_of_graphs(state: _State, config, batch: "_Batch") -> None:
    """Compiles the kernels for all numbers of sequences that vLLM captures, side by side: each plan alone has few."""
    q = batch.queries
    most = min(state.graphed, config.scheduler_config.max_num_seqs * q)
    sizes = [rows for rows in getattr(config.compilation_config, "cudagraph_capture_sizes", None) or ()
             if rows <= most and rows % q == 0]

    def make(rows: int, device: int, problem: dict) -> None:
        own = {"layer": {"batch": rows // q}, "attention": {"b": rows // q}}.get(problem["op"], {"m": rows})
        running.prepared.setdefault(running.key_of(device, problem | own), Plan(device, problem | own))

    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
        made = [pool.submit(make, rows, *problem) for rows in sizes for problem in state.decoding.get(q, ())]
    for one in made:
        one.result()


# the choice

# Numbers of sequences for which both computations are timed; others follow from their neighbours.
_TIMED = (1, 64, 8, 256, 2, 4, 16, 32, 128, 512, 24, 48, 96)
_KEYS = 1024  # of a sequence


def _choose(original, state: _State, model: nn.Module, context, batch: "_Batch") -> None:
    """Measures for how many sequences fftune's ops are faster than vLLM's layers on this device, once."""
    config = model.vllm_config
    if not _is_measured(state) or batch.queries in state.choices:
        return
    caches = [_cache_of(state.model.layers[group.places[0]]) for group in batch.groups]
    # A sequence has a block at least, beside the one that vLLM gives to none; and one in each group with states.
    most = min(max(state.graphed, batch.rows) // batch.queries,
               *((len(cache) - 1) // max(1, len(batch.of_states)) for cache in caches))
    counts = [count for count in (*_TIMED, batch.rows // batch.queries) if count <= most and _has_memory(state, count)]
    if not counts:
        raise Unfit("no memory for copies of states while steps are timed")

    @contextmanager
    def both(count: int):
        trial = _timed(state, batch, count, _vocabulary(config))
        with _in_context_of(state, context, trial) as begin:
            def own():
                begin()
                with nullcontext() if is_capturing(trial.positions) else ranks.summing():
                    original(model, *_arguments_of(trial))

            def mine():
                begin()
                if is_capturing(trial.positions):
                    _run(state, model, trial)
                else:
                    with ranks.summing():
                        _on_all(state, lambda: _run(state, model, trial))

            yield own, mine

    among = faster.Alone() if state.model.reduce is None else ranks.Together()
    try:
        choice = faster.choice_of(f"layers of {type(model).__name__}", both, counts, _description(config),
                                  batch.queries, [cache.shape[1:] for cache in caches],
                                  *(["cache of e4m3"] if state.model.has_float8_cache else ()),
                                  outside=lambda: _outside(original, state, model, context, batch, among), among=among)
    except Exception as error:
        if state.model.reduce is not None and not isinstance(error, Unfit):
            if state.model.group is not None:
                state.model.group.close()  # ends the peers' waits
            among.fail(one_line(error))
        raise
    state.choices[batch.queries] = choice
    log(f"{_layers_of(state, model)} run by fftune's ops in batches {batch.kind} where they are faster; vLLM's time "
        f"divided by fftune's, by sequences: {choice.words()}")


_SHARE = 4  # of the free memory, the part that copies of states may take


def _has_memory(state: _State, sequences: int) -> bool:
    """Whether copies of the states of so many sequences are no danger for the engine."""
    size = sum(cache[0].numel() * cache.element_size() for layer in state.model.layers if isinstance(layer, DeltaLayer)
               for cache in layer.attention.kv_cache)
    device = _cache_of(state.model.layers[0]).device
    return device.type != "cuda" or sequences * size * _SHARE <= torch.cuda.mem_get_info(device)[0]


def _vocabulary(config) -> int:
    own = config.model_config
    return getattr(getattr(own, "hf_text_config", None) or own.hf_config, "vocab_size", 16)


def _is_measured(state: _State) -> bool:
    """Whether a measurement decides. With batch invariance one kind of kernels runs all batches."""
    return _cache_of(state.model.layers[0]).is_cuda and not BATCH_INVARIANT


def _layers_of(state: _State, model: nn.Module) -> str:
    return f"{len(state.model.layers)} layers of {type(model).__name__}"


def _description(config) -> list[tuple[str, str]]:
    """The configuration of the model and of its engine, as far as times depend on it."""
    own = config.model_config.hf_config
    values = own.to_dict() if hasattr(own, "to_dict") else vars(own)
    return sorted((name, str(value)) for name, value in (
        *values.items(), ("max_model_len", config.model_config.max_model_len),
        ("quantisation", getattr(config.model_config, "quantization", None))) if not name.startswith("_"))


def _outside(original, state: _State, model: nn.Module, context, batch: "_Batch", among: faster.Alone) -> float:
    """Milliseconds of the schedules that FlashAttention makes within a graph for a batch that is made up. vLLM makes
    one for all layers, outside of the graph."""
    if not any(getattr(group.metadata, "scheduler_metadata", None) is not None for group in batch.of_attention):
        return 0.0
    within = replace(batch, groups=tuple(replace(group, metadata=copy.copy(group.metadata)) for group in batch.groups))
    for group in within.of_attention:
        group.metadata.scheduler_metadata = None
    with _in_context_of(state, context, batch) as begin:
        def run(own: "_Batch") -> None:
            begin()
            context.attn_metadata = own.by_layer(state, lambda group: group.metadata)
            with nullcontext() if is_capturing(batch.positions) else ranks.summing():
                original(model, *_arguments_of(batch))

        runs = [functools.partial(run, own) for own in (within, batch)]
        for one in runs:
            one()
        longer, shorter = faster.milliseconds(*runs, among=among)
    return max(0.0, longer - shorter)


def _recorded(state: _State, model: nn.Module, batch: "_Batch") -> Tensor:
    """_run(), which tells the problems of the batch."""
    found = {}

    def listen(device: int, problem: dict) -> None:
        found[str(problem)] = device, problem

    running._listeners.append(listen)
    try:
        return _run(state, model, batch)
    finally:
        running._listeners.remove(listen)
        if batch.offsets is not None:
            state.problems = list(found.values())
        else:
            state.decoding[batch.queries] = list(found.values())


def _made_up(state: _State, batch: "_Batch") -> tuple["_Batch", int]:
    """A batch of the same kind, and how many of its rows belong to a sequence. Each of up to _SEQUENCES sequences has
    fewer keys than the one before, in a block of its own, and writes its last ones; the others are padded rows as
    vLLM has them. A batch of pure decoding keeps its rows; one with prompts has a sequence that decodes and a prompt
    of a block. Where layers have windows, the first sequence has keys before them."""
    blocks = [_pages_of(state, state.model.layers[group.places[0]]).block for group in batch.of_attention]
    block = min(blocks)
    queries = [batch.queries] * (batch.tokens // batch.queries) if batch.offsets is None else [1, block]
    caches = [len(_cache_of(state.model.layers[group.places[0]])) for group in batch.of_attention]
    real = min(len(queries), _SEQUENCES, *caches)
    # Groups may share memory. So the states of each group have blocks of their own, behind those with keys.
    rooms = [(len(_cache_of(state.model.layers[group.places[0]])) - _BLOCKS) // len(batch.of_states)
             for group in batch.of_states]
    real = min(real, *rooms, _SEQUENCES)
    if real < 1:
        raise Unfit(f"caches of {min(caches)} blocks")
    lengths = [max(own, block - i) for i, own in enumerate(queries[:real])]
    windows = [layer.window for layer in state.model.layers]
    long = max(windows) + queries[0] + 2 * max(blocks)
    if max(windows) and min(caches) >= _BLOCKS and long <= min(
            len(state.model.first_attention.angles),
            *(own * group.table.shape[1] for own, group in zip(blocks, batch.of_attention))):
        lengths[0] = long
    # The places of the new tokens in their sequences.
    places = [place for length, own in zip(lengths, queries) for place in range(length - own, length)]
    owners = [i for i, own in enumerate(queries[:real]) for _ in range(own)]
    rest = sum(queries[real:])

    def of_group(group: _Group, block: int) -> tuple[Tensor, list[int]]:
        table = torch.zeros(len(queries), group.table.shape[1], dtype=group.table.dtype)
        last = [(length - 1) // block for length in lengths]
        window = windows[group.places[0]]
        table[0, :last[0]] = _EARLIER
        if window:  # the first query sees no key of these blocks
            table[0, :max(0, lengths[0] - queries[0] - window + 1) // block] = _UNSEEN
        table[torch.arange(real), last] = torch.arange(real, dtype=table.dtype)
        return table, [i * block + place % block for i, place in zip(owners, places)] + [-1] * rest

    indices = [[_BLOCKS + number * real + i for i in range(real)] + [linear_cores.NULL] * (len(queries) - real)
               for number in range(len(batch.of_states))]
    made = _batch_of_sequences(batch, queries, lengths + [0] * (len(queries) - real), places + [3] * rest,
                               list(map(of_group, batch.of_attention, blocks)), indices)
    return made, len(places)


def _timed(state: _State, batch: "_Batch", count: int, vocabulary: int) -> "_Batch":
    """A batch of pure decoding of `count` sequences with up to _KEYS keys all over the caches. None is written. Each
    sequence has states of its own."""
    sizes = []
    for group in batch.of_attention:
        layer = state.model.layers[group.places[0]]
        sizes.append((_pages_of(state, layer).block, len(_cache_of(layer))))
    keys = min(_KEYS, *(size for group, (block, blocks) in zip(batch.of_attention, sizes)
                        for size in (group.table.shape[1] * block, (blocks - 1) // count * block)))
    rows = count * batch.queries

    def of_group(group: _Group, block: int, blocks: int) -> tuple[Tensor, list[int]]:
        own = -(-keys // block)
        table = torch.zeros(count, group.table.shape[1], dtype=group.table.dtype)
        table[:, :own] = 1 + torch.arange(count * own).view(count, own) % (blocks - 1)
        return table, [-1] * rows

    indices = [[1 + number * count + i for i in range(count)] for number in range(len(batch.of_states))]
    return _batch_of_sequences(batch, [batch.queries] * count, [keys] * count, [keys - 1] * rows,
                               [of_group(group, *size) for group, size in zip(batch.of_attention, sizes)], indices,
                               vocabulary)


def _batch_of_sequences(batch: "_Batch", queries: list[int], lengths: list[int], positions: list[int],
                        of_groups: list[tuple[Tensor, list[int]]], indices: list[list[int]], vocabulary: int = 16
                        ) -> "_Batch":
    """With the metadata of `batch`, and ids below `vocabulary`: many tokens choose many experts. `of_groups`: the tables
    and the slots of each group of layers with attention. `indices`: of states, in each of the other groups."""
    device, rows = batch.positions.device, len(positions)
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=device)
    groups, of_sequences = [], torch.tensor(lengths, dtype=batch.lengths.dtype, device=device)
    tables, of_states = iter(of_groups), iter(indices)
    for group in batch.groups:
        if isinstance(group, _StateGroup):
            own = torch.tensor(next(of_states), dtype=torch.int32, device=device)
            groups.append(_StateGroup(group.places, own, linear_cores.GatedDeltaNet().metadata_of(
                group.metadata, linear_cores.Batch(rows, rows, own))))
            continue
        table, slots = next(tables)
        metadata = copy.copy(group.metadata)
        metadata.num_actual_tokens = rows
        metadata.max_query_len, metadata.max_seq_len = max(queries), max(lengths)
        metadata.query_start_loc = starts
        metadata.slot_mapping = torch.tensor(slots, dtype=group.slots.dtype, device=device)
        metadata.seq_lens = of_sequences
        metadata.block_table = table.to(device)
        metadata.scheduler_metadata = None  # of other lengths
        groups.append(_Group(group.places, metadata.slot_mapping, metadata.block_table, metadata))
    embeddings = None if batch.embeddings is None else batch.embeddings[:1].repeat(rows, 1)
    ids = None if batch.ids is None else (torch.arange(rows, device=device) * 37 % vocabulary).to(batch.ids.dtype)
    return _Batch(rows, rows, ids, embeddings, torch.tensor(positions, dtype=torch.int32, device=device),
                  of_sequences, tuple(groups), None if batch.offsets is None else starts, queries=batch.queries,
                  axes=batch.axes)


def _examine(model: nn.Module, parts: tuple[str, ...]) -> _State:
    found, reason = None, ""
    try:
        products.decide()
        found = expect_known(model)
        if found.reduce is not None and "ranks" not in parts:
            raise Unfit("tensor parallelism, which needs ranks in FFTUNE_VLLM")
        if found.has_states and "states" not in parts:
            raise Unfit("layers with states, which need states in FFTUNE_VLLM")
        if BATCH_INVARIANT and not found.has_ops:
            raise Unfit("batch invariance, for layers that the op layer alone computes")
        if BATCH_INVARIANT and found.has_float8_cache:
            raise Unfit("batch invariance, with a cache of fp8")
    except Exception as error:  # another vLLM than the one that is known, if it is not Unfit
        reason = reason_of(error)
    reason = ranks.common_reason(reason)
    if reason:
        log(f"layers of {type(model).__name__} stay vLLM's: {reason}")
        return _State(reason=reason)
    if found.reduce is not None and found.is_one_op and not BATCH_INVARIANT:
        found.group = ranks.group_of(model.vllm_config.scheduler_config.max_num_seqs, model.norm.weight)
    if found.reduce is not None and found.group is None and not found.has_ops:  # on all ranks
        log(f"layers of {type(model).__name__} stay vLLM's: no group of ranks runs them by one op")
        return _State(reason="no group of ranks")
    config = model.vllm_config
    compilation = config.compilation_config
    graphed = (getattr(compilation, "max_cudagraph_capture_size", None) or 0) if compilation.cudagraph_mode else 0
    return _State(found, most=_rows(config.scheduler_config.max_num_batched_tokens), graphed=graphed,
                  queries=queries_of(config))


# a batch

@dataclass
class _Group:
    """Layers whose caches vLLM hands out together: a sequence has the same blocks in each."""

    places: tuple[int, ...]  # of its layers
    slots: Tensor      # of vLLM
    table: Tensor      # [sequences, blocks of a sequence], of vLLM
    metadata: object   # of vLLM


@dataclass
class _StateGroup:
    """Layers whose states vLLM hands out together."""

    places: tuple[int, ...]
    indices: Tensor  # [sequences], the entry of each
    metadata: object  # of vLLM


@dataclass
class _Batch:
    """New tokens, a row each: one of each sequence in pure decoding, else those of a sequence in
    succession."""

    rows: int
    tokens: int  # with padded ones, for which there are results that nobody reads
    ids: Tensor | None
    embeddings: Tensor | None
    positions: Tensor
    lengths: Tensor
    groups: tuple[_Group | _StateGroup, ...]
    offsets: Tensor | None = None  # int32 [sequences + 1] of rows; None in pure decoding
    queries: int = 1  # of each sequence in pure decoding: more than one where drafts are verified
    behind: int = 0  # rows of no sequence, the last ones
    axes: int = 0  # how often vLLM has the positions, one time for each axis of images; 0: once, as a vector
    begun: list[bool] = field(default_factory=list)  # an entry for each op that has changed states

    @property
    def of_attention(self) -> tuple[_Group, ...]:
        return tuple(group for group in self.groups if isinstance(group, _Group))

    @property
    def of_states(self) -> tuple[_StateGroup, ...]:
        return tuple(group for group in self.groups if isinstance(group, _StateGroup))

    def by_layer(self, state: _State, value, groups: tuple | None = None) -> dict[str, object]:
        """value(group) by the names of all layers, or of those in some groups, as vLLM has it."""
        groups = self.groups if groups is None else groups
        return {state.model.layers[place].name: value(group) for group in groups for place in group.places}

    @property
    def kind(self) -> str:
        if self.offsets is not None:
            return "with prompts"
        return "of pure decoding" if self.queries == 1 else f"that verify {self.queries - 1} drafts of each sequence"


def _context():
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return get_forward_context() if is_forward_context_available() else None


def _batch_of(state: _State, input_ids=None, positions=None, intermediate_tensors=None,
              inputs_embeds=None, **others) -> _Batch | None:
    """The batch of this call; None if it is one that the ops do not serve."""
    context = _context()
    metadata, axes = getattr(context, "attn_metadata", None), 0
    if positions is not None and positions.dim() == 2 and state.model.has_states:
        axes, positions = len(positions), positions[0]  # text has the same on all axes
    if not isinstance(metadata, dict) or intermediate_tensors is not None \
            or positions is None or positions.dim() != 1 \
            or any(value is not None for value in others.values()):
        return None
    # The layers of one group of caches have one object.
    places: dict[int, list[int]] = {}
    for place, layer in enumerate(state.model.layers):
        own = metadata.get(layer.name)
        if own is None or id(own) not in places and isinstance(layer, Layer) and not _is_served(own):
            return None
        places.setdefault(id(own), []).append(place)
    found = metadata[state.model.first_attention.name]
    rows, sequences, queries = found.num_actual_tokens, found.seq_lens.shape[0], found.max_query_len
    groups = []
    for own in places.values():
        layer = state.model.layers[own[0]]
        name = layer.name
        if isinstance(layer, DeltaLayer):
            indices = _indices_of(layer, metadata[name], rows) if queries == 1 else None
            if indices is None:
                return None
            groups.append(_StateGroup(tuple(own), indices, metadata[name]))
            continue
        # vLLM writes keys and values by these, not by those of the metadata.
        slots, one = context.slot_mapping.get(name), metadata[name]
        if slots is None or (one.num_actual_tokens, one.seq_lens.shape[0], one.max_query_len) != (rows, sequences, queries):
            return None
        groups.append(_Group(tuple(own), slots[:rows], one.block_table[:sequences], one))
    is_uniform = queries in (1, state.queries) and rows == sequences * queries
    offsets = None if is_uniform else found.query_start_loc
    if rows == 0 or queries == 1 and not is_uniform or offsets is not None and offsets.shape[0] != sequences + 1:
        return None
    part = lambda tensor: None if tensor is None else tensor[:rows]
    return _Batch(rows, positions.shape[0], part(input_ids), part(inputs_embeds), positions[:rows], found.seq_lens,
                  tuple(groups), offsets, queries=queries if is_uniform else 1, axes=axes)


def _indices_of(layer: DeltaLayer, metadata, rows: int) -> Tensor | None:
    """The entry of each sequence in the caches of states; None unless each has one new token."""
    batch = linear_cores.GatedDeltaNet().batch_of(layer.attention, metadata)
    if batch is None or batch.offsets is not None or batch.rows != rows:
        return None
    return batch.indices


# Tensors and switches of the metadata that the ops read, or do not need.
_METADATA = {"query_start_loc", "seq_lens", "block_table", "slot_mapping", "causal", "scheduler_metadata"}


def _is_served(metadata) -> bool:
    """Whether attention is that over pages, causal for all sequences. A version may have other kinds, with a tensor or a
    switch of their own: cascades, ranges of images, windows behind a prefix."""
    if metadata.causal is not True:
        return False
    others = [name for name, value in vars(metadata).items()
              if name not in _METADATA and (value is True or isinstance(value, Tensor))]
    if others:
        log_once(f"batches whose attention has {' and '.join(others)} stay vLLM's")
    return not others


# the layers

def _run(state: _State, module: nn.Module, batch: _Batch) -> Tensor | tuple[Tensor, list[Tensor]]:
    """The result of the final norm, [tokens, d]; rows behind the batch's are zeros. With it, as vLLM gives them, the
    hidden states before the layers that EAGLE-3 reads, where there are such."""
    rows, marks = batch.rows, tuple(getattr(module, "aux_hidden_state_layers", None) or ())
    context, given = _context(), getattr(_context(), "is_padding", None)
    batch = replace(batch, positions=batch.positions.to(torch.int32))
    if batch.offsets is not None:
        batch = _rounded(batch)
    x = module.embed_input_ids(batch.ids) if batch.embeddings is None else batch.embeddings
    own = _blocks_of(state, batch)
    whole = batch.offsets is None and _is_one_op(state.model)
    of_layers = _run_whole if whole else _run_ops
    try:
        if any(layer.mixture is not None and layer.experts is None for layer in state.model.layers):
            _mark_padding(context, rows, batch.rows)  # vLLM's blocks run the rows of this batch
        added, x, hidden = of_layers(state.model, own, batch, x, marks)
    finally:
        if given is not None:
            context.is_padding = given
    results = [_norm(added, x, module.norm, state.model.layers[0].convention)[0], *hidden]
    if batch.tokens != len(results[0]):
        results = [F.pad(y[:rows], (0, 0, 0, batch.tokens - rows)) for y in results]
    return (results[0], results[1:]) if marks else results[0]


def _rows(rows: int) -> int:
    """Rounded up."""
    return rows + -rows % max(64, (1 << rows.bit_length()) // 32)


def _sizes(batch: _Batch) -> tuple[int, int]:
    """Rows and sequences of a batch with prompts, rounded up."""
    sequences = batch.lengths.shape[0]
    return _rows(batch.rows), sequences + -sequences % max(1, (1 << sequences.bit_length()) // 8)


def _has_plans(state: _State, batch: _Batch) -> bool:
    """Whether the plans of a batch with prompts were made. If not, a thread makes them: a kernel takes
    seconds to compile, and vLLM can run the batch."""
    # Ranks have to take the same path, and their threads end at different times.
    if not plans.COMPILES_BESIDE or state.model.reduce is not None:
        return True
    sizes = _sizes(batch)
    if sizes not in state.plans:
        state.plans[sizes] = False
        threading.Thread(target=_make_plans, args=(state, sizes), daemon=True).start()
    return state.plans[sizes]


def _make_plans(state: _State, sizes: tuple[int, int]) -> None:
    """Makes those that were not made before, for the batch to take."""
    rows, sequences = sizes
    prepared = running.prepared
    with _compilers:
        try:
            for device, problem in state.problems:
                if problem["op"] != "attention" and rows > plans.EXACT:
                    plans.serve_any_rows(device, problem, state.most)
                    continue
                own = {"s": rows, "b": sequences} if problem["op"] == "attention" else {"m": rows}
                key = running.key_of(device, problem | own)
                if key not in state.made:
                    prepared[key] = Plan(device, problem | own)
                    state.made.add(key)
        except Exception as error:  # the batch will meet it, too
            log(f"plans of {rows} tokens were not made: {one_line(error)}")
    state.plans[sizes] = True


def _rounded(batch: _Batch) -> _Batch:
    """The batch with more rows, which write nothing and belong to no sequence, and more sequences, which
    are empty: the numbers of a batch with prompts are hardly ever the same twice, and each has a plan
    of its own."""
    rows, sequences = _sizes(batch)
    rows, sequences = rows - batch.rows, sequences - batch.lengths.shape[0]

    def longer(tensor: Tensor | None, more: int, value: int = 0) -> Tensor | None:
        return None if tensor is None else F.pad(
            tensor, (0, 0) * (tensor.dim() - 1) + (0, more), value=value)

    return replace(batch, rows=batch.rows + rows, behind=rows, ids=longer(batch.ids, rows),
                   embeddings=longer(batch.embeddings, rows), positions=longer(batch.positions, rows),
                   lengths=longer(batch.lengths, sequences),
                   groups=tuple(replace(group, slots=longer(group.slots, rows, -1), table=longer(group.table, sequences))
                                for group in batch.groups),
                   offsets=longer(batch.offsets, sequences, batch.rows))


def _is_one_op(model: Model) -> bool:
    """Whether the op `layer` computes the layers. It is not batch-invariant."""
    return model.is_one_op and not BATCH_INVARIANT and (model.reduce is None or model.group is not None)


@dataclass
class _Blocks:
    """The cache of a layer, and where the new keys and all keys of the sequences are in it."""

    group: int
    pages: Pages
    slots: Tensor
    table: Tensor


@dataclass
class _Entries:
    """The states of a layer, and the entry of each sequence."""

    group: int
    states: linear_cores.States
    indices: Tensor


def _blocks_of(state: _State, batch: _Batch) -> list[_Blocks | _Entries]:
    """By layer."""
    found: dict[int, _Blocks | _Entries] = {}
    for number, group in enumerate(batch.groups):
        if isinstance(group, _StateGroup):
            indices = group.indices.to(torch.int32).contiguous()
            found |= {place: _Entries(number, _states_of(state, state.model.layers[place]), indices)
                      for place in group.places}
            continue
        first, layers = _pages_of(state, state.model.layers[group.places[0]]), state.model.layers
        slots, table = first.slots(group.slots), first.table(group.table)
        found |= {place: _Blocks(number, _pages_of(state, layers[place]), slots, table) for place in group.places}
    return [found[place] for place in range(len(state.model.layers))]


def _run_whole(model: Model, blocks: list[_Blocks | _Entries], batch: _Batch, x: Tensor, marks: tuple[int, ...]
               ) -> tuple[None, Tensor, list[Tensor]]:
    """All layers at once if they are alike and have one group of caches; else each run of such layers. Where hidden
    states are read, another run begins."""
    of_sequences, hidden = (-1, batch.queries), []
    x, positions = x.unflatten(0, of_sequences), batch.positions.unflatten(0, of_sequences)
    int32 = {own.group: (own.slots.unflatten(0, of_sequences).int(), own.table.int()) for own in blocks
             if isinstance(own, _Blocks)}
    begins = {run.start for run in model.runs} | {place for place in range(1, len(blocks))
                                                  if blocks[place].group != blocks[place - 1].group}
    for begin, end in itertools.pairwise(sorted({0, *marks, *begins, len(blocks)})):
        if begin in marks:
            hidden.append(x.flatten(0, 1))
        first, places = blocks[begin], range(begin, end)
        if isinstance(first, _Entries):
            states = [(blocks[i].states.history, blocks[i].states.states) for i in places]
            x = delta_layers(x, [model.layers[i].weights() for i in places], states, first.indices,
                             **model.layers[begin].options())
            batch.begun.append(True)
            continue
        slots, table = int32[first.group]
        x = ops.layer(x, [model.layers[i].weights() for i in places], [blocks[i].pages.pages for i in places],
                      batch.lengths, slots=slots, pages=table, positions=positions, group=model.group,
                      **model.layers[begin].options())
    x = x.flatten(0, 1)
    return None, x, hidden + [x] * (len(blocks) in marks)


def _run_ops(model: Model, blocks: list[_Blocks], batch: _Batch, x: Tensor, marks: tuple[int, ...]
             ) -> tuple[Tensor | None, Tensor, list[Tensor]]:
    """The summand of the residual stream, that stream, and the hidden states that are read."""
    added, hidden = None, []  # what is to be added to x, the stream of the residual

    def note(place: int) -> None:
        if place in marks:
            hidden.append(x if added is None else x + added)

    for place, (layer, own) in enumerate(zip(model.layers, blocks)):
        note(place)
        normed, x = _norm(added, x, layer.attn_norm)
        scales = dict(zip(("k_scale", "v_scale"), layer.cache_scales or ()))
        q = ops.qkv(normed, layer.w_qkv, layer.heads, layer.kv_heads, bias=layer.b_qkv,
                    norms=layer.head_norms, eps=layer.head_eps, positions=batch.positions,
                    angles=layer.angles, rotation=layer.rotation, scale=layer.rope_scale,
                    rotary=layer.rotary, caches=own.pages.rows, slots=own.slots, **scales)
        of_batch = dict(pages=own.table, lengths=batch.lengths, scale=layer.scale, softcap=layer.softcap,
                        sinks=layer.sinks, **scales)
        if batch.offsets is None:
            y = ops.attention(q.unflatten(0, (-1, batch.queries)), *own.pages.pages,
                              causal=batch.queries > 1, window=layer.window, **of_batch)
            y = y.flatten(0, 1).flatten(1)
        else:
            y = ops.attention(q, *own.pages.pages, offsets=batch.offsets, causal=True, window=layer.window,
                              **of_batch).flatten(1)
            if batch.behind and layer.mixture is not None:
                y[-batch.behind:] = 0  # nothing was written, and routers need numbers
        if model.reduce is None:
            x, added = ops.linear(y, layer.w_o, layer.b_o, x), None
        else:
            added = model.reduce(ops.linear(y, layer.w_o, layer.b_o))
        if layer.mixture is not None:
            normed, x = _norm(added, x, layer.ffn_norm)
            added = _mixture(layer, normed)
        elif model.reduce is None:
            x = ops.ffn_block(x, None, layer.ffn_norm.weight, layer.w_gate, layer.w_up, layer.w_down, act=layer.act,
                              eps=layer.ffn_norm.variance_epsilon)
        else:
            normed, x = _norm(added, x, layer.ffn_norm)
            added = model.reduce(ops.ffn(normed, layer.w_gate, layer.w_up, layer.w_down, act=layer.act))
    note(len(model.layers))
    return added, x, hidden


def _mixture(layer: Layer, x: Tensor) -> Tensor:
    """The mixture's result; vLLM's block reduces its own."""
    own = layer.experts
    if own is None:
        return layer.mixture(x)
    weights = own.weights()
    ids, shares = ops.moe_route(ops.linear(x, weights["w_router"], weights["b_router"]), own.top_k, order=own.order,
                                renormalise=own.renormalise)
    return ops.moe_ffn(x, ids, shares, weights["w_gate_up"], None, weights["w_down"], biases=own.biases, act=own.act,
                       packing=own.packing)


def _norm(added: Tensor | None, x: Tensor, norm: nn.Module, convention: str = "llama") -> tuple[Tensor, Tensor]:
    """The norm of x (+ added), and that sum."""
    options = dict(eps=norm.variance_epsilon, convention=convention)
    if added is None:
        return ops.rmsnorm(x, norm.weight, **options), x
    return ops.add_rmsnorm(added, x, norm.weight, **options)


def _cache_of(layer: Layer | DeltaLayer) -> Tensor:
    cache = layer.attention.kv_cache
    if isinstance(layer, DeltaLayer):
        return cache[1]
    return cache[0] if isinstance(cache, (list, tuple)) else cache


def _states_of(state: _State, layer: DeltaLayer) -> linear_cores.States:
    """The views of the layer's states, made once for each cache that vLLM binds."""
    cache = _cache_of(layer)
    found = state.entries.get(cache)
    if found is None:
        found = state.entries[cache] = layer.states_of()
    return found


def _pages_of(state: _State, layer: Layer) -> Pages:
    """The views of the layer's cache, made once for each cache that vLLM binds."""
    cache = _cache_of(layer)
    found = state.pages.get(cache)
    if found is None:
        # Views of a tensor keep it: these are of one that shares its memory.
        found = state.pages[cache] = pages_of(
            cache.data, layer.kv_heads, layer.dim, *(() if layer.cache_scales is None else (E4M3,)))
    return found

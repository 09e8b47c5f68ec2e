"""The cores of linear-attention layers, in batches of pure decoding and in batches with prompts.

The method of vLLM's layer that computes its core is wrapped, and fftune's ops (linear_cores.py) run where their results
agree with vLLM's and they are faster. States are updated in place, so a computation must not be begun that is not
ended: all plans are made first, and new sizes run once with the index of padding for every sequence, which touches no
state.
"""
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .. import _run as running
from .._declare import Into
from .._library import Plan
from .._run import BATCH_INVARIANT
from . import faster
from .deployment import current
from .imports import wrap_methods
from .interfaces import LINEAR_ATTENTION
from .linear_cores import NULL, Batch, Core, GatedDeltaNet, Given, Layer, Mamba2, States, states_of
from .logs import Unfit, log, log_once, one_line, reason_of
from .trial import difference, is_capturing

_CORES: dict[str, Core] = {"QwenGatedDeltaNetAttention": GatedDeltaNet(), "MambaMixer2": Mamba2()}
_DECODING, _PROMPTS = "decoding", "prompts"


def patch_layers(module) -> None:
    for name in LINEAR_ATTENTION[module.__name__]:
        core = _CORES[name]
        wrap_methods(module, (name,), core.method, partial(_wrapped, core))
        wrap_methods(module, (name,), "__init__", _made)


def _made(cls: type, original):
    def __init__(self, *arguments, **named):
        original(self, *arguments, **named)
        _configs[self] = current()  # which is known while a model is made

    return __init__


def _wrapped(core: Core, cls: type, original):
    parameters = inspect.signature(original)

    def run_core(self, *arguments, **named):
        run = None
        if type(self) is cls:  # a subclass may compute something else
            try:
                given = parameters.bind(self, *arguments, **named).arguments
                run = _own_run(partial(original, self), core, self, {name: given[name] for name in [*given][1:]})
            except Exception as error:
                _leave(self, reason_of(error))
        return original(self, *arguments, **named) if run is None else run()

    return run_core


@dataclass
class _Kind:
    """Layers that are alike. Findings for one of them hold for all."""

    key: tuple
    words: str
    ops: str
    reasons: dict[str, str] = field(default_factory=dict)  # by what stays vLLM's
    agreed: set[str] = field(default_factory=set)          # whose results agreed with vLLM's
    # Measurements of decoding by its sequences, and of the verification of drafts by the slots of each.
    steps: dict[int, faster.Choice] = field(default_factory=dict)
    # By the size class of a batch with prompts.
    prompts: dict[tuple[int, bool], faster.Choice | None] = field(default_factory=dict)
    ran: set[tuple[int, ...]] = field(default_factory=set)  # sizes that have run


@dataclass
class _Call:
    """A call of vLLM's that fftune's ops can compute."""

    original: Callable  # of the arguments by their names
    core: Core
    layer: Layer
    own: States
    kind: _Kind

    def runs_of(self, given: Given, batch: Batch) -> list[Into]:
        return self.core.runs_of(self.layer, self.own, given, batch)

    def by_vllm(self, given: Given, batch: Batch) -> None:
        self.original(**given.arguments)

    def by_ops(self, given: Given, batch: Batch) -> None:
        runs = self.runs_of(given, batch)
        _prepare(runs)
        for one in runs:
            one.run()


_layers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of modules: a Layer, or the reason why one stays vLLM's
_caches: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by vLLM's tensors of states, which it frees after its profile
_configs: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of modules: vLLM's configuration
_kinds: dict[tuple, _Kind] = {}


def _leave(module: nn.Module, reason: str) -> None:
    """Leaves the layer to vLLM for good."""
    if not isinstance(_layers.get(module), str):
        _layers[module] = reason
        log_once(f"cores of {type(module).__name__} stay vLLM's: {reason}")


def _stay(kind: _Kind, what: str, reason: str) -> None:
    kind.reasons[what] = reason
    log(f"{what} of {kind.words} stays vLLM's: {reason}")


def _context():
    from vllm.forward_context import get_forward_context

    return get_forward_context()


def _what(batch: Batch) -> str:
    if batch.accepted is not None:
        return f"verification of {batch.slots - 1} drafts"
    return _DECODING if batch.offsets is None else _PROMPTS


def _states_of(layer: Layer) -> States:
    cache = layer.module.kv_cache
    if len(cache) != 2:
        raise Unfit(f"a cache of {len(cache)} tensors")
    found = _caches.get(cache[1])
    if found is None:
        # Views of a tensor keep it: these are of ones that share its memory.
        found = _caches[cache[1]] = states_of(layer, cache[0].data, cache[1].data)
    return found


def _kind_of(core: Core, layer: Layer, own: States) -> _Kind:
    key = (core.op, layer.words, layer.channels, layer.taps.shape[1], own.order, own.states.dtype, own.inputs.shape[1:],
           own.inputs.stride(), own.states.stride(), *(getattr(layer.module, name, None) for name in core.needs))
    if key not in _kinds:
        _kinds[key] = _Kind(key, f"{layer.words}, states in {str(own.states.dtype).removeprefix('torch.')},",
                            f"causal-conv1d and {core.op}")
    return _kinds[key]


def _graphed(config) -> int:
    """Tokens of vLLM's largest CUDA graph."""
    compilation = config.compilation_config
    return (getattr(compilation, "max_cudagraph_capture_size", None) or 0) if compilation.cudagraph_mode else 0


def _is_profiled(config, own: States) -> bool:
    """Whether vLLM profiles its memory now: graphs are captured on a cache of a block for each sequence, and both are
    thrown away."""
    return len(own.states) <= min(_graphed(config), config.scheduler_config.max_num_seqs)


# a call

def _prepare(runs: list[Into]) -> None:
    """Makes the plans, and has PyTorch keep the memory that they need: no run fails behind another's states."""
    for one in runs:
        one.plan()
    needed = max(one.workspace_bytes for one in runs)
    if needed:
        runs[0].outputs[0].new_empty(needed, dtype=torch.uint8)


def _own_run(original, core: Core, module: nn.Module, arguments: dict[str, Tensor]) -> Callable[[], None] | None:
    """The computation of this call by fftune's ops; None if it stays vLLM's."""
    metadata = getattr(_context(), "attn_metadata", None)
    metadata = metadata.get(module.prefix) if isinstance(metadata, dict) else None
    layer, is_captured = _layers.get(module), is_capturing(arguments[core.written])
    if metadata is None or isinstance(layer, str) or layer is None and is_captured:
        return None
    if layer is None:
        if BATCH_INVARIANT:
            raise Unfit("batch invariance")
        layer = _layers[module] = core.layer_of(module)
    if not is_captured:
        layer.refresh()
    batch = core.batch_of(module, metadata)
    if batch is None:
        return None
    given = core.given(layer, arguments)
    if given.x.dtype is not torch.bfloat16 or given.x.stride(1) != 1:
        raise Unfit(f"inputs in {given.x.dtype} with strides of {list(given.x.stride())}")
    own, config = _states_of(layer), _configs.get(module)
    if config is None:
        raise Unfit("the engine's configuration is not known")
    if _is_profiled(config, own):
        return None
    if is_captured:
        _has_graphs.set()
    call = _Call(original, core, layer, own, _kind_of(core, layer, own))
    what = _what(batch)
    try:
        if what in call.kind.reasons or not _serves(call, given, batch, is_captured, _graphed(config)):
            return None
        runs = call.runs_of(given, batch)
        _prepare(runs)
    except torch.OutOfMemoryError as error:  # of this batch
        log_once(f"a batch of {call.kind.words} ran by vLLM's kernels: {one_line(error)}")
        return None
    except Exception as error:
        _stay(call.kind, what, reason_of(error))
        return None

    return partial(_run_or_leave, call, what, given, runs)


def _run_or_leave(call: _Call, what: str, given: Given, runs: list[Into]) -> None:
    """Runs the ops. If the first one is not launched, vLLM computes the batch; behind it there are other states."""
    first, *others = runs
    try:
        first.run()
    except Exception as error:
        _stay(call.kind, what, reason_of(error))
        call.original(**given.arguments)
        return
    for one in others:
        one.run()


def _serves(call: _Call, given: Given, batch: Batch, is_captured: bool, graphed: int) -> bool:
    """Whether fftune's ops run the batch: their results agreed with vLLM's, they are faster, and there are plans."""
    kind, what = call.kind, _what(batch)
    if what not in kind.agreed:
        # A stream that is being captured cannot be waited for.
        if is_captured:
            return False
        (_test_prompts if what == _PROMPTS else _test_steps)(call, given, batch)
        if what not in kind.agreed:
            return False
    if what != _PROMPTS:
        if batch.slots not in kind.steps and _is_measured(call.own):
            if is_captured:
                return False
            _choose_steps(call, given, batch)
        choice = kind.steps.get(batch.slots)
        if choice is not None and not choice.is_faster(len(batch.indices)):
            return False
    else:
        size = _size_class(batch)
        if size not in kind.prompts and (is_captured or not _choose_prompts(call, given, batch)):
            return False
        choice = kind.prompts[size]
        if choice is not None and not any(map(choice.is_faster, choice.times)):
            return False
    if batch.sizes in kind.ran:
        return True
    if is_captured:
        return False
    # vLLM's warm-ups wait for kernels. While it captures graphs, no other thread may load any.
    is_warm_up = graphed and not _has_graphs.is_set() or what != _PROMPTS and batch.rows <= graphed
    if not is_warm_up and not _has_plans(kind, batch, call.runs_of(given, batch)):
        return False
    call.by_ops(call.core.apart(call.layer, given), batch.padded())  # touches no state
    kind.ran.add(batch.sizes)
    return True


# plans of batches that have no graph

_PATIENCE = 0.01  # seconds that a batch waits for plans, which take no longer if their kernels are compiled
_making: dict[tuple, threading.Thread] = {}
_has_graphs = threading.Event()  # whether vLLM has captured a step


def _has_plans(kind: _Kind, batch: Batch, runs: list[Into]) -> bool:
    """Whether the plans of a batch are there. If not, a thread makes them, and vLLM can run the batch: a kernel takes
    seconds to compile."""
    key = kind.key, batch.sizes
    thread = _making.get(key)
    if thread is None:
        is_busy = any(other.is_alive() for other in _making.values())
        problems = [found for found in (one.problem() for one in runs) if found is not None]
        thread = _making[key] = threading.Thread(target=_make_plans, args=(problems,), daemon=True)
        thread.start()
        if not is_busy:
            thread.join(_PATIENCE)
    if thread.is_alive():
        return False
    del _making[key]
    return True


def _make_plans(problems: list[tuple[int, dict]]) -> None:
    try:
        for device, problem in problems:
            running.prepared.setdefault(running.key_of(device, problem), Plan(device, problem))
    except Exception:  # the batch will meet it, too
        pass


# tests

_TESTED = 4  # sequences of a batch that is made up
_SHARE = 4   # of the free memory, the part that copies of states may take


@contextmanager
def _kept(own: States, indices: Tensor) -> Iterator[Callable[[], list[Tensor]]]:
    """Restores the states of these blocks in the end. Gives a function that copies them."""
    rows = indices.flatten().clamp(min=NULL).long()
    copies = lambda: [cache.index_select(0, rows) for cache in (own.states, own.inputs)]
    before = copies()
    try:
        yield copies
    finally:
        for cache, values in zip((own.states, own.inputs), before):
            cache.index_copy_(0, rows, values)


def _has_memory(own: States, sequences: int, copies: int) -> bool:
    """Whether copies of the states of so many sequences are no danger for the engine."""
    if not own.states.is_cuda:
        return True
    size = sum(cache[0].numel() * cache.element_size() for cache in (own.states, own.inputs))
    return copies * sequences * size * _SHARE <= torch.cuda.mem_get_info(own.states.device)[0]


@contextmanager
def _made_up(call: _Call, given: Given, like: Batch, count: int) -> Iterator[tuple[Given, Batch]]:
    """A batch of `count` sequences of one token, or as many as each has slots in `like`, with random states in the
    first blocks, and one of padding. vLLM's context has its metadata, and everything is restored."""
    context, own, prefix = _context(), call.own, call.layer.module.prefix
    kept, device = context.attn_metadata, own.states.device
    generator = torch.Generator(device).manual_seed(0)
    tokens, blocks = max(like.slots, 1), count * max(like.slots, 1)
    indices = torch.tensor([*range(1, blocks + 1), *[NULL] * tokens], dtype=torch.int32, device=device)
    batch = Batch(len(indices), len(indices), indices)
    if like.slots:
        offsets = torch.arange(count + 2, dtype=torch.int32, device=device) * tokens
        accepted = 1 + torch.arange(count + 1, dtype=torch.int32, device=device) % tokens
        batch = Batch(len(indices), 0, indices.view(-1, tokens), offsets, accepted=accepted)
    with _kept(own, indices):
        for cache in (own.states, own.inputs):
            cache[1:blocks + 1].normal_(0, 0.5, generator=generator)
        context.attn_metadata = {**kept, prefix: call.core.metadata_of(kept[prefix], batch)}
        try:
            yield call.core.drawn(call.layer, given, batch.rows, generator), batch
        finally:
            context.attn_metadata = kept


def _agreement(call: _Call, given: Given, batch: Batch, rows: int) -> str | None:
    """The reason why both computations differ in the first `rows` rows, or in the states that they leave; "" if they do
    not, None if this batch says nothing."""
    found = []
    for by in (call.by_ops, call.by_vllm):
        trial = call.core.copied(call.layer, given)
        with _kept(call.own, batch.indices) as copies:
            by(trial, batch)
            found.append([trial.out[:rows], *(values[batch.indices.flatten() > NULL] for values in copies())])
    reasons = [difference(name, *values) for name, values in zip(
        ("results", "states", "states of convolutions"), zip(*found))]
    return None if None in reasons else next(filter(None, reasons), "")


def _test_steps(call: _Call, given: Given, batch: Batch) -> None:
    tokens = max(batch.slots, 1)
    count = min(_TESTED, (len(call.own.states) - 1) // tokens)
    with _made_up(call, given, batch, count) as (trial, made):
        _judge(call, _what(batch), _agreement(call, trial, made, count * tokens))


def _test_prompts(call: _Call, given: Given, batch: Batch) -> None:
    """Compares the computations of a batch of requests, whose states are restored. Captures of vLLM's pieces have
    batches of padding alone."""
    padding = batch.indices <= NULL
    has_tokens = batch.offsets.diff() > 0
    if bool(padding.all()) or bool((padding & has_tokens).any()) or not _has_memory(call.own, len(batch.indices), 4):
        return
    _judge(call, _PROMPTS, _agreement(call, given, batch, int(batch.offsets[-1])))


def _judge(call: _Call, what: str, reason: str | None) -> None:
    if reason:
        _stay(call.kind, what, reason)
    elif reason is not None:
        call.kind.agreed.add(what)
        if not _is_measured(call.own):
            log(f"{what} of {call.kind.words} runs by {call.kind.ops}")


# choices

_TIMED = (1, 64, 8, 256, 2, 4, 16, 32, 128)  # sequences of decoding


def _is_measured(own: States) -> bool:
    """Whether a measurement decides."""
    return own.states.is_cuda


def _size_class(batch: Batch) -> tuple[int, bool]:
    """Batches with prompts of about as many tokens, of one sequence or of several, take about as long."""
    return batch.rows.bit_length(), len(batch.prompt_indices) == 1


def _choose_steps(call: _Call, given: Given, batch: Batch) -> None:
    @contextmanager
    def both(count: int):
        with _made_up(call, given, batch, count) as of_batch:
            yield partial(call.by_vllm, *of_batch), partial(call.by_ops, *of_batch)

    kind, what, tokens = call.kind, _what(batch), max(batch.slots, 1)
    counts = [count for count in _TIMED if count * tokens < len(call.own.states)
              and _has_memory(call.own, count * tokens, 2)]
    choice = faster.choice_of(f"{what} of {kind.words}", both, counts, repr(kind.key), batch.slots)
    kind.steps[batch.slots] = choice
    _say(kind, what, choice, "sequences")


def _choose_prompts(call: _Call, given: Given, batch: Batch) -> bool:
    """Measures batches of this size class by this one, if it has sequences. Whether the choice is made."""
    kind, size = call.kind, _size_class(batch)
    if not _is_measured(call.own):
        kind.prompts[size] = None
        return True
    if not bool((batch.prompt_indices > NULL).any()) or not _has_memory(call.own, len(batch.indices), 2):
        return False

    @contextmanager
    def both(count: int):
        with _kept(call.own, batch.indices):
            of_batch = call.core.copied(call.layer, given), batch
            yield partial(call.by_vllm, *of_batch), partial(call.by_ops, *of_batch)

    # vLLM runs them outside of graphs.
    choice = faster.choice_of(f"prompts of {kind.words}", both, [batch.rows], repr(kind.key), size, captured=False)
    kind.prompts[size] = choice
    _say(kind, _PROMPTS, choice, f"tokens of {'one sequence' if size[1] else 'several sequences'}")
    return True


def _say(kind: _Kind, what: str, choice: faster.Choice, by: str) -> None:
    log(f"{what} of {kind.words} runs by {kind.ops} where they are faster; vLLM's time divided by fftune's, by {by}: "
        f"{choice.words()}")

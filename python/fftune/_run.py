"""Runs a problem on tensors: plans by problem, addresses, workspace, stream.

A plan that was made is found by the shapes and types of the tensors and by the options. They are
checked, and strings and JSON are made, only for a plan that is new.
"""
import inspect
import math
import os
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ._checks import DTYPE_NAMES, TORCH_DTYPES, Kind, check_number, check_tensors
from ._description import has_option
from ._library import (Error, Plan, PlanAt, TokenPlan, _lock, check_status, destroy_idle, library,
                       on_two_devices)
from ._versions import current_device, is_capturing, raw_stream


# Whether the bits of a row are to be the same in every batch, for all ops that have the option.
BATCH_INVARIANT = any(os.environ.get(name, "0") not in ("", "0")
                      for name in ("FFTUNE_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT"))


@dataclass(frozen=True, eq=False)
class Form:
    """A forward pass of layers, whose tensors are as many as its options say, and not in the
    registry's table: what its problems share, and how a problem follows from a call.

    values(options, *inputs) gives the sizes and options by name, None for those that are left out.
    All of it is None for no tokens. Which tensors belong to these, the library says: expect_fits().
    """

    op: str
    kinds: Mapping[str, Kind]  # of the inputs by name
    shown: Callable[[str], str]  # what errors call a buffer of the library
    values: Callable[..., Mapping | None]
    typed: int = 0  # the place of the input whose type is that of the op
    strided = True  # inputs are as the kernels read them, which take their strides

    def problem(self, options: tuple, inputs: Sequence[Tensor | None]) -> dict | None:
        dtype = inputs[self.typed].dtype
        check_tensors(self.op, self.kinds, list(zip(self._names_of(len(inputs)), inputs)), dtype)
        values = self.values(options, *inputs)
        if values is None:
            return None
        problem = {"op": self.op, "pass": "fwd", "dtype": DTYPE_NAMES[dtype]}
        for name, value in values.items():
            if isinstance(value, float):
                # Numbers that are no sizes are options: strings.
                check_number(self.op, name, value)
                problem[name] = f"{value:.12g}"
            elif value is not None:
                problem[name] = value
        return problem

    def expect_fits(self, plan: Plan, inputs: Sequence[Tensor | None]) -> None:
        """That the tensors are those of the plan. One dimension in front may stand for several, as tokens do for
        batch and tokens of a sequence. Without pages a cache has heads behind the tokens in memory."""
        buffers = [b for b in plan.describe()["buffers"] if b["role"] != "output"]
        wanted = [self.shown(buffer["name"]) for buffer in buffers]
        given = dict(zip(self._names_of(len(inputs)), inputs))
        for name, tensor in given.items():
            if name != "tensors" and (tensor is None) == (name in wanted):
                raise Error(f"{self.op}: {name} is " + ("None: give a tensor" if tensor is None else
                                                        "of other layers: leave it out"))
        for name, buffer, tensor in zip(wanted, buffers, [t for t in inputs if t is not None], strict=True):
            shape, dtype = buffer["shape"], TORCH_DTYPES[buffer["dtype"]]
            if not any(_are_alike(extents, shape) for extents in _shapes(name, tensor, given["pages"] is not None)):
                raise Error(f"{self.op}: {name} is {list(tensor.shape)}, not {shape}")
            if tensor.dtype is not dtype:
                raise Error(f"{self.op}: {name} is {tensor.dtype}, not {dtype}")

    def _names_of(self, count: int) -> list[str]:
        """The names of the inputs: those that values() has for them."""
        _, *parameters = inspect.signature(self.values).parameters.values()
        names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
        rest = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
        return names[:count] + rest * (count - len(names))


def _shapes(name: str, tensor: Tensor, is_paged: bool) -> list[list[int]]:
    """The shapes by which the library may know the tensor. Caches and states may be parts of larger tensors, whose last
    extent is how far their rows lie apart."""
    if not name.startswith(("a cache", "a state")) or not tensor.numel():
        return [list(tensor.shape)]
    if name.startswith("a cache") and tensor.dim() == 4 and not is_paged:
        tensor = tensor.transpose(1, 2)
    shapes, behind = [list(tensor.shape)] if tensor.is_contiguous() else [], 1
    for at in reversed(range(tensor.dim())):
        if tensor.stride(at) != behind:
            return [*shapes, [*tensor.shape[:at + 1], tensor.stride(at)]]
        behind *= tensor.shape[at]
    return shapes


def _are_alike(extents: list[int], shape: list[int]) -> bool:
    dims = min(len(extents), len(shape))

    def folded(all_extents: list[int]) -> list[int]:
        front = len(all_extents) - dims + 1
        return [math.prod(all_extents[:front]), *all_extents[front:]]

    return folded(extents) == folded(shape)


class _Nothing:
    """The plan of a problem without tokens."""


# Plans in two generations: those made or found again since the last turn, and those before them.
# A turn, when the first is full, drops those of the second that were not found again. So a hit costs
# no bookkeeping, and a process that meets ever new shapes keeps at most PLANS.
PLANS = 4096
_plans: dict[tuple, Plan | type[_Nothing]] = {}
_older: dict[tuple, Plan | type[_Nothing]] = {}
# Plans of problems that another thread expects to be run, by key_of(). Each is taken once.
prepared: dict[tuple, Plan] = {}
# Plans for any number of rows, by key_of() of the problem without its rows, and the number up to which problems
# have plans of their own instead. None where an op has no such plan.
_any_rows: dict[tuple, tuple[int, TokenPlan] | None] = {}
_listeners: list[Callable[[int, dict], None]] = []  # of every problem that is run, while tune() runs


@contextmanager
def listening(found: dict):
    """Collects the problems that are run: text -> (device, problem)."""
    def listen(device, problem):
        found.setdefault(f"{device} {sorted(problem.items())}", (device, problem))

    _listeners.append(listen)
    try:
        yield
    finally:
        _listeners.remove(listen)


def problem_of(form: Form, options: tuple, inputs: Sequence[Tensor | None]) -> dict | None:
    """The problem of a call, as a plan takes it; None for no tokens."""
    problem = form.problem(options, inputs)
    if BATCH_INVARIANT and problem and has_option(form.op, problem["pass"], "batch-invariant"):
        problem["batch-invariant"] = "yes"
    return problem


def key_of(device: int, problem: dict) -> tuple:
    return device, frozenset(problem.items())


def _without_rows(problem: dict) -> dict:
    return {name: value for name, value in problem.items() if name != "m"}


def serve_any_rows(device: int, problem: dict, least: int, most: int) -> None:
    """Makes one plan for all problems like this one with more than `least` rows, up to `most`: their first runs
    compile nothing. The kernels are compiled now."""
    key = key_of(device, _without_rows(problem))
    if key in _any_rows:
        return
    try:
        _any_rows[key] = least, TokenPlan(device, _without_rows(problem), most)
    except Error:  # kernels for single numbers of rows
        _any_rows[key] = None


def is_served(device: int, problem: dict) -> bool:
    """Whether serve_any_rows() was done with the problem."""
    return key_of(device, _without_rows(problem)) in _any_rows


# Why PyTorch's kernels should be faster, by key_of() of the problems whose plans run by slower fallbacks; and the ops
# whose user was told.
_slower: dict[tuple, str] = {}
_told: set[str] = set()
_tells = True


def slower_fallback(device: int, problem: dict) -> str | None:
    """Why PyTorch's kernels should be faster for a problem that has run, one line; None if fftune's are."""
    return _slower.get(key_of(device, problem))


@contextmanager
def tried():
    """The problems that are run, as listening() has them. The user is told of no slower fallbacks meanwhile."""
    global _tells
    found: dict = {}
    before, _tells = _tells, False
    try:
        with listening(found):
            yield found
    finally:
        _tells = before


def _tell_of_fallback(device: int, problem: dict, plan: Plan) -> None:
    found = plan.describe().get("slower_fallback")  # an older library has none
    if not found:
        return
    op = problem["op"]
    sizes = ", ".join(f"{name}={value}" for name, value in problem.items() if name not in ("op", "pass"))
    text = (f"{' and '.join(found['stages'])} of {op} ({sizes}) run by fallback kernels, in about "
            f"{found['us']:.0f} us where PyTorch takes less than {found['pytorch_us']:.0f}")
    _slower[key_of(device, problem)] = text
    if _tells and op not in _told:
        _told.add(op)
        warnings.warn(f"fftune: {text}: fast kernels take bf16 and fp16. "
                      f"This is said once of {op}", RuntimeWarning, stacklevel=2)


def _new_plan(device: int, problem: dict) -> Plan:
    plan = prepared.pop(key_of(device, problem), None)
    if plan is None and _any_rows and "m" in problem:
        found = _any_rows.get(key_of(device, _without_rows(problem)))
        if found is not None and found[0] < problem["m"] <= found[1].most:
            plan = found[1].at(problem["m"])
    return plan or Plan(device, problem)


def _make_plan(key: tuple, form: Form, options: tuple, inputs: Sequence[Tensor | None],
               device: int) -> Plan | type[_Nothing]:
    with _lock:
        plan = _plans.get(key) or _older.pop(key, None)
        if plan is None:
            problem = problem_of(form, options, inputs)
            if problem is None:
                plan = _Nothing
            else:
                plan = _new_plan(device, problem)
                if isinstance(form, Form):
                    form.expect_fits(plan, inputs)
                if device >= 0 and type(plan) is Plan:
                    _tell_of_fallback(device, problem, plan)
            if device >= 0:
                _destroy_idle()
        _plans[key] = plan
        if len(_plans) >= PLANS // 2:
            _older.clear()
            _older.update(_plans)
            _plans.clear()
        return plan


def forget_plans() -> None:
    """From now on every problem gets a new plan."""
    global prepared
    with _lock:
        _plans.clear()
        _older.clear()
        _any_rows.clear()
        _slower.clear()
        prepared = {}  # a thread that makes one has the old presets
        _destroy_idle()


def _destroy_idle() -> None:
    # During a capture an event would become a part of the graph, and may not be asked for.
    if not torch.cuda.is_initialized() or not is_capturing():
        destroy_idle(_mark)


def _mark(device: int, stream: torch.cuda.Stream) -> Callable[[], bool]:
    """An event at the end of a stream's work. A stream that is being captured has none, nor one
    that its owner may have destroyed: there the whole device has to be idle."""
    with torch.cuda.device(device):
        if stream.stream_id == 0 or stream.stream_id & 1:  # PyTorch's own, which stay
            with torch.cuda.stream(stream):
                if not is_capturing():
                    return stream.record_event().query

    def idle() -> bool:
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:  # another thread captures
            return False
        return True
    return idle


# Plans of captured CUDA graphs are kept: a graph runs the kernels of plans that have no other
# owner.
_captured: set[Plan] = set()


def run(form: Form, options: tuple, inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor]) -> None:
    """Runs what the inputs and options say, on the current stream of their device. The op's buffers
    in order are the inputs that are there, then the outputs, which are contiguous. Inputs that are
    not are copied."""
    finish(find(form, options, inputs), outputs)


def find(form: Form, options: tuple, inputs: Sequence[Tensor | None]) -> tuple:
    """The first half of run(): the plan, for which a new problem is checked. finish() takes it."""
    device = -2
    strided = form.strided
    key = [form, options]
    pointers = []
    copies = None  # are kept until the run is enqueued
    for tensor in inputs:
        if tensor is None:
            key.append(None)
            continue
        if device == -2:
            device = tensor.get_device()
            key.append(device)
        elif tensor.get_device() != device:
            raise on_two_devices(form.op, inputs[0].device, tensor.device)
        key.append(tensor.shape)
        key.append(tensor.dtype)
        pointer = tensor.data_ptr()
        if not strided and not tensor.is_contiguous() or pointer & 15 and device >= 0:
            tensor = ready(tensor)
            copies = [tensor] if copies is None else [*copies, tensor]
            pointer = tensor.data_ptr()
        pointers.append(pointer)
    key = tuple(key)
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(key, form, options, inputs, device)
    if _listeners and plan is not _Nothing:
        for listener in _listeners:
            listener(device, problem_of(form, options, inputs))
    return plan, device, pointers, copies


def finish(found: tuple, outputs: Sequence[Tensor]) -> None:
    """Runs what find() gave."""
    plan, device, pointers, _ = found
    if plan is _Nothing:
        for tensor in outputs:
            tensor.zero_()
        return
    for tensor in outputs:
        pointers.append(tensor.data_ptr())
    if device >= 0 and plan not in _captured and is_capturing():
        _captured.add(plan)
    scratch = None
    if plan.workspace_bytes:
        # CUDA's allocator aligns to 512 bytes, the host's to 64.
        slack = 0 if device >= 0 else 256
        memory = outputs[0].new_empty(plan.workspace_bytes + slack, dtype=torch.uint8)
        scratch = (memory.data_ptr() + slack) & -256 if slack else memory.data_ptr()
    if device < 0:
        status = (plan.launch(pointers, scratch, None) if type(plan) is PlanAt else
                  _plan_run(plan.handle, plan.addresses(*pointers), plan.count, scratch, None))
    elif device == current_device():
        status = _enqueue(plan, pointers, scratch)
    else:  # a stream of 0 is that of the current device
        with torch.cuda.device(device):
            status = _enqueue(plan, pointers, scratch)
    if status:
        check_status(status)


def _enqueue(plan: Plan, pointers: list[int], scratch: int | None) -> int:
    stream = raw_stream(plan.device)
    if stream != plan.stream:
        plan.runs_on(stream, torch.cuda.current_stream(plan.device))
    if type(plan) is PlanAt:
        return plan.launch(pointers, scratch, stream)
    return _plan_run(plan.handle, plan.addresses(*pointers), plan.count, scratch, stream)


_plan_run = library().fftune_plan_run


def ready(tensor: Tensor) -> Tensor:
    """The tensor as the kernels read it: contiguous, and on a GPU aligned to 16 bytes."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.is_cuda and tensor.data_ptr() & 15:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor

"""Runs a problem on tensors: plans by problem, pointers, workspace, stream.

A plan that was made is found by a tuple of what tells problems apart: no string or JSON is made.
"""
from dataclasses import dataclass, field
from typing import Sequence

import torch

from ._library import Error, Plan, _lock, check_status, library

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "f32",
                torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True, eq=False)
class Form:
    """An op in one form: what all of its problems share, and the names of what they differ in."""

    op: str
    backward: bool
    names: tuple[str, ...]  # sizes and options, in the order of the values given to run()
    fixed: dict[str, str] = field(default_factory=dict)  # options

    def problem(self, dtype: torch.dtype, values: Sequence) -> dict:
        if dtype not in _DTYPE_NAMES:
            raise Error(f"{self.op}: no kernel for {dtype}: use one of "
                        f"{', '.join(map(str, _DTYPE_NAMES))}")
        problem = {"op": self.op, "pass": "bwd" if self.backward else "fwd",
                   "dtype": _DTYPE_NAMES[dtype], **self.fixed}
        for name, value in zip(self.names, values, strict=True):
            if value is None:
                continue
            problem[name] = f"{value:.12g}" if isinstance(value, float) else value
        return problem


_plans: dict[tuple, Plan] = {}
_record: list[dict] | None = None  # the problems that were run, while tune() collects them


def _make_plan(key: tuple) -> Plan:
    form, dtype, device, values = key
    problem = form.problem(dtype, values)
    with _lock:
        if key not in _plans:
            _plans[key] = Plan(device, problem)
        return _plans[key]


def run(form: Form, values: tuple, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Runs the problem on the current stream of the tensors' device. `tensors` are the op's buffers
    in order, contiguous but where the problem names strides; `dtype` is the problem's."""
    device = tensors[0].get_device()
    key = (form, dtype, device, values)
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(key)
    if _record is not None:
        _record.append(key)
    pointers = []
    for tensor in tensors:
        if tensor.get_device() != device:
            raise Error(f"{form.op}: tensors on {tensors[0].device} and on {tensor.device}: move "
                        "them to one device")
        pointers.append(tensor.data_ptr())
    scratch = None
    workspace = plan.workspace_bytes
    if workspace:
        # CUDA's allocator aligns to 512 bytes, the host's to 64.
        slack = 0 if device >= 0 else 256
        memory = torch.empty(workspace + slack, dtype=torch.uint8, device=tensors[0].device)
        scratch = memory.data_ptr()
        if slack:
            scratch = (scratch + 255) & ~255
    if device < 0:
        status = _plan_run(plan.handle, plan.array(*pointers), plan.count, scratch, None)
    else:
        stream = torch._C._cuda_getCurrentRawStream(device)
        if device == torch._C._cuda_getDevice():
            status = _plan_run(plan.handle, plan.array(*pointers), plan.count, scratch, stream)
        else:  # the default stream is that of the current device
            with torch.cuda.device(device):
                status = _plan_run(plan.handle, plan.array(*pointers), plan.count, scratch, stream)
    if status:
        check_status(status)


_plan_run = library().fftune_plan_run


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the kernels read it: contiguous, and on a GPU aligned to 16 bytes."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.data_ptr() & 15 and tensor.is_cuda:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor

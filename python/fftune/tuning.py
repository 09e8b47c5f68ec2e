"""tune(), check() and explain(): what the tool does, for the problems of a model."""
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from . import _library, _run
from .__main__ import tool_environment
from ._checks import device_of, expect_module, flag, folder_of, named
from ._custom import References
from ._library import Error, Plan, tool_path
from ._untouched import copy_of_arguments, copy_of_module, in_double, own, same_random_numbers
from .patching import patch, unpatch

@functools.cache
def _token_sizes() -> dict[str, str]:
    """For each op the size that a search takes a list of: m, n, s, b or batch."""
    done = subprocess.run([str(tool_path()), "ops", "--json"], env=tool_environment(), text=True,
                          capture_output=True)
    if done.returncode:
        raise Error(f"tune: {tool_path()} failed: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return {op["op"]: op["token_size"] for op in json.loads(done.stdout)}


def _device_name(device: int) -> str:
    return "cpu" if device < 0 else f"cuda:{device}"


def _device_number(device) -> int:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    given = device_of("device", device)
    return -1 if given.type == "cpu" else given.index


def device_line(device: str | torch.device | None = None) -> str:
    """The name of a device, as results should name it: "cpu: AMD EPYC, 2 cores"."""
    name = _device_name(_device_number(device))
    done = subprocess.run([str(tool_path()), "devices", "--json"], env=tool_environment(), text=True,
                          capture_output=True)
    if done.returncode:
        raise Error(f"device_line: {tool_path()} failed: {(done.stderr.strip().splitlines() or [''])[-1]}")
    for found in json.loads(done.stdout)["devices"]:
        if found["device"] == name:
            parts = "cores" if name == "cpu" else "multiprocessors"
            return f"{name}: {found['name']}, {found['multiprocessors']} {parts}"
    return name


class OtherWork:
    """How much other processes take of this one's cores, from its making until it is read: "" or a line that says
    so. Beside them times are too long."""

    def __init__(self):
        self.cores = sorted(os.sched_getaffinity(0))
        self.before = self._reading()

    def _reading(self) -> tuple[float, float, float]:
        """Seconds: of a clock, of the cores in use by anyone, and by this process."""
        own = os.times()
        busy = 0
        try:
            lines = Path("/proc/stat").read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            name, *counts = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in self.cores:
                user, nice, system, _, _, irq, soft_irq = map(int, counts[:7])
                busy += user + nice + system + irq + soft_irq
        return (time.monotonic(), busy / os.sysconf("SC_CLK_TCK"),
                own.user + own.system + own.children_user + own.children_system)

    def __str__(self) -> str:
        seconds, busy, used = (now - then for now, then in zip(self._reading(), self.before))
        # As the tool counts: a quiet system works a little too, and ticks are charged to others.
        quiet = 0.08 + 0.01 * len(self.cores) + 0.05 / max(seconds, 1e-9)
        others = (busy - used) / max(seconds, 1e-9)
        return "" if others <= quiet else (
            f"disturbed: other processes use {others:.2g} of its {len(self.cores)} cores: times are too long, and "
            "ratios uncertain")


def _call(model, example):
    if isinstance(example, dict):
        return model(**example)
    return model(*example) if isinstance(example, (tuple, list)) else model(example)


def _first_tensor(result) -> Tensor:
    """The tensor of floating point that a call gave, or the first of them."""
    if isinstance(result, Tensor):
        return result
    values = result.values() if hasattr(result, "values") else result
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise Error(f"there is no tensor in what the model gave: {type(result).__name__}")


def _text(problem: dict) -> str:
    rest = " ".join(f"{k}={v}" for k, v in problem.items() if k not in ("op", "pass", "dtype"))
    return f"{problem['op']}/{problem['pass']} {problem['dtype']} {rest}"


# tune

@dataclass
class TuneReport:
    """The problems of tune(), each as one line of text."""

    served: list[str] = field(default_factory=list)  # by an exact preset already
    searched: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)  # problem, reason
    presets: Path | None = None  # the folder of the new records

    def __str__(self) -> str:
        lines = [f"{len(self.served)} served by presets, {len(self.searched)} searched, "
                 f"{len(self.failed)} failed"]
        lines += [f"failed: {text}: {reason}" for text, reason in self.failed]
        return "\n".join(lines + ([f"presets: {self.presets}"] if self.searched else []))


def user_presets() -> Path:
    """The user's folder of presets, which the library searches."""
    data = os.environ.get("XDG_DATA_HOME", "")
    root = Path(data) if os.path.isabs(data) else Path.home() / ".local" / "share"
    return root / "fftune" / "presets"


def tune(model: nn.Module, example, *, budget: float = 60, train: bool = False,
         presets: str | os.PathLike | None = None, keep_undecided: bool = False) -> TuneReport:
    """Searches the problems of ``model(example)`` that no preset serves exactly, and writes presets.

    Later calls use the results. Models that were compiled or captured before keep their kernels.

    Args:
        model: A patched model, or any that uses fftune.
        example: Its input, or a tuple or dict of its inputs. The model and these stay as they are: a copy
            with the same weights runs, without the user's hooks.
        budget: Seconds for all searches together.
        train: Search the problems of the backward pass too.
        presets: Folder to write to; the user's folder by default.
        keep_undecided: Write results that other work on the machine left undecided too.

    Returns:
        A ``TuneReport``.

    Raises:
        Error: The model runs no op of fftune, or an argument is wrong.
    """
    expect_module("tune", model)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < math.inf:
        raise Error(f"tune: budget is {named(budget)}: give seconds")
    flag("tune", "train", train)
    flag("tune", "keep_undecided", keep_undecided)
    folder = Path(folder_of("tune: presets", presets)) if presets is not None else user_presets()
    found: dict[str, tuple[int, dict]] = {}
    copied = copy_of_module("tune", model)
    with _run.listening(found), same_random_numbers(), torch.set_grad_enabled(train):
        result = _call(copied, copy_of_arguments("tune", example))
        if train:
            with _without_gradients(model):  # of parameters that the copy shares
                _first_tensor(result).float().square().mean().backward()
    if not found:
        raise Error("tune: the model runs no op of fftune: patch it first")
    report = TuneReport(presets=folder)
    searches: dict[str, tuple[int, dict, list]] = {}  # problems that differ in their tokens alone
    for device, problem in found.values():
        described = Plan(device, problem).describe()
        preset = described["preset"]
        if preset and preset["exact_shape"] and preset["device_match"] in ("exact", "alias") \
                and not preset["stale"]:
            report.served.append(_text(problem))
            continue
        tokens = _token_sizes()[problem["op"]]
        rest = {name: value for name, value in problem.items() if name != tokens}
        entry = searches.setdefault(f"{device} {_text(rest)}", (device, rest, []))
        entry[2].append(problem[tokens])
    deadline = time.monotonic() + budget
    for i, (device, problem, tokens) in enumerate(searches.values()):
        left = max(deadline - time.monotonic(), 0.5)
        _search(report, device, problem, tokens, left / (len(searches) - i),
                f"{i + 1}/{len(searches)}", keep_undecided)
    if report.searched:
        forget_plans()
    return report


@contextmanager
def _without_gradients(model: nn.Module):
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _search(report: TuneReport, device: int, problem: dict, tokens: list[int], seconds: float,
            place: str, keep_undecided: bool = False) -> None:
    name = _token_sizes()[problem["op"]]
    text = f"{_text(problem)} {name}={','.join(map(str, sorted(tokens)))}"
    print(f"fftune: tuning {place}: {text}", file=sys.stderr, flush=True)
    command = [str(tool_path()), problem["op"], "--device", _device_name(device), "--out",
               str(report.presets), "--budget", f"{max(round(seconds * 1000), 1)}ms", "--json",
               f"--{name}", ",".join(map(str, sorted(tokens)))]
    if keep_undecided:
        command.append("--keep-undecided")
    for option, value in problem.items():
        if option != "op":
            command += [f"--{option}", str(value)]
    report.presets.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, env=tool_environment(), text=True, stdout=subprocess.PIPE,
                          stderr=None if sys.stderr.isatty() else subprocess.PIPE)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        lines = (done.stderr or "").strip().splitlines()
        report.failed.append((text, lines[-1] if lines else f"exit code {done.returncode}"))
    else:
        report.searched.append(text)


def forget_plans() -> None:
    """Reads presets again: problems that run from now on get new plans."""
    with _library._lock:
        _run.forget_plans()
        _library._contexts.clear()


# check

@dataclass
class CheckReport:
    """A module with and without the patch: relative errors against float64, and times in microseconds."""

    error: float
    eager_error: float
    microseconds: float
    eager_microseconds: float
    good: bool  # error <= 1.5 * eager_error + 4 roundings of the result's element type
    replaced: str
    disturbed: str = ""  # what other processes did meanwhile

    def __str__(self) -> str:
        lines = [f"{'good' if self.good else 'WRONG'}: error {self.error:.2e}, eager {self.eager_error:.2e}; "
                 f"{self.microseconds:.1f} µs, eager {self.eager_microseconds:.1f} µs",
                 self.disturbed, self.replaced]
        return "\n".join(filter(None, lines))


def check(module: nn.Module | None = None, example=None) -> CheckReport | bool:
    """Compares a module, or without one every preset of this device, with float64.

    Args:
        module: Patched or not; it runs with its own weights. fftune's ops that it calls itself run their
            PyTorch references in float64 and for the error of eager PyTorch.
        example: Its input, or a tuple or dict of its inputs. It and the module stay as they are.

    Returns:
        A ``CheckReport`` with the errors and times of the patched module and of eager PyTorch. Without a
        module: whether ``fftune check`` passed.
    """
    if module is None:
        return subprocess.run([str(tool_path()), "check"], env=tool_environment()).returncode == 0
    expect_module("check", module)
    with same_random_numbers(), torch.no_grad():
        eager, ours, exact = (copy_of_module("check", module) for _ in range(3))
        replaced = patch(ours)
        unpatch(eager)
        unpatch(exact).double()
        with _WideReferences():  # a module may call fftune's ops itself
            right, by_pytorch = _result(exact, example, in_double), _result(eager, example)
        errors = [_error(result, right) for result in (_result(ours, example), by_pytorch)]
        others = OtherWork()
        times = _times((ours, eager), example)
        disturbed = str(others)
    good = errors[0] <= 1.5 * errors[1] + 4 * torch.finfo(by_pytorch.dtype).eps
    return CheckReport(*errors, *times, good, str(replaced), disturbed)


class _WideReferences(References):
    """Products of experts run in float64 too, for which PyTorch has no kernel."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.__name__.partition(".")[0] == "_grouped_mm" and arguments[0].dtype is torch.float64:
            return _grouped_product(*arguments, **options or {})
        return super().__torch_dispatch__(function, types, arguments, options)


def _grouped_product(x: Tensor, weights: Tensor, offs: Tensor, bias=None, out_dtype=None) -> Tensor:
    """x [rows, k] by the weights [experts, k, n], whose rows end at `offs`."""
    y, first = x.new_zeros(len(x), weights.shape[-1]), 0
    for expert, end in enumerate(offs.tolist()):
        y[first:end] = x[first:end] @ weights[expert] + (0 if bias is None else bias[expert])
        first = end
    return y


def _result(module: nn.Module, example, change=own) -> Tensor:
    with same_random_numbers(0):
        return _first_tensor(_call(module, copy_of_arguments("check", example, change)))


def _error(result: Tensor, right: Tensor) -> float:
    return ((result.double() - right).norm() / right.norm()).item()


_LARGE = 1 << 26  # bytes of arguments, which are copied before they are timed


def _times(modules: tuple[nn.Module, ...], example) -> list[float]:
    """Microseconds of a call of each, interleaved: medians of rounds. Each call has arguments of its own."""
    cuda = torch.cuda.is_available()
    sizes: list[int] = []
    copy_of_arguments("check", example, lambda tensor: sizes.append(tensor.nbytes) or tensor)
    calls = 5 if sum(sizes) < _LARGE else 1
    rounds: list[list[float]] = [[] for _ in modules]
    for _ in range(9):
        for module, times in zip(modules, rounds):
            given = [copy_of_arguments("check", example) for _ in range(calls)]
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for own_example in given:
                _call(module, own_example)
            if cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / len(given) * 1e6)
    return [statistics.median(times[1:]) for times in rounds]


# explain

def explain(problem: dict, device: str | torch.device | None = None) -> dict:
    """Explains which kernels would run a problem on a device, and why.

    Args:
        problem: The fields of a problem, such as ``{"op": "ffn", "m": 16, "d": 2048, "h": 8192}``;
            ``fftune ops`` lists them.
        device: The current GPU by default, or the CPU without one.

    Returns:
        A dict: the variant of each stage with its parameters, the preset and the rule that chose it, the
        same in words as "reason", and the buffers in order with shapes and element types.
    """
    if not isinstance(problem, dict):
        raise Error(f"explain: problem is {named(problem)}: give a dict with \"op\" and sizes")
    return Plan(_device_number(device), problem).describe()

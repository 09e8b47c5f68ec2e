"""Measures which of two computations is the faster one on the user's device: vLLM's or fftune's.

Each is captured in a CUDA graph, as vLLM runs steps of decoding, and the graphs are replayed in turns. The times are
kept in fftune's cache for the next start.
"""
import functools
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from .._untouched import same_random_numbers
from .logs import log

# fftune's kernels run where they take at most this part of vLLM's time.
GAIN = 0.99
# Seconds of an engine's start that measurements of one kind may take.
BUDGET = 8.0
_ROUNDS = 5
_LEAST = 2e-3  # seconds of replays in a round


class Choice:
    """The times of both computations by the number of rows, in milliseconds: (vLLM's, fftune's)."""

    def __init__(self, times: dict[int, tuple[float, float]] | None = None):
        self.times = dict(times or {})

    def is_faster(self, rows: int) -> bool:
        """Whether fftune is the faster one: as measured for this number of rows, or for both neighbours of it."""
        if rows in self.times:
            near = [rows]
        else:
            near = [side for side in (max((known for known in self.times if known < rows), default=None),
                                      min((known for known in self.times if known > rows), default=None))
                    if side is not None]
        return bool(near) and all(mine <= GAIN * own for own, mine in map(self.times.__getitem__, near))

    def is_faster_everywhere(self) -> bool:
        """Whether fftune may serve all numbers of rows of a layer whose weight is in memory once: it is faster in the
        geometric mean, and nowhere slower by more than 3%."""
        return (math.prod(own / mine for own, mine in self.times.values()) > 1
                and all(mine <= 1.03 * own for own, mine in self.times.values()))

    def words(self) -> str:
        """Such as "1: 1.42, 16: 1.12, 64: 0.97 (vLLM's)", by rows: vLLM's time divided by fftune's."""
        return ", ".join(f"{rows}: {own / mine:.2f}{'' if self.is_faster(rows) else ' (vLLM)'}"
                         for rows, (own, mine) in sorted(self.times.items()))


class Alone:
    """A process that measures by itself. The ranks of tensor parallelism have another: they run in step."""

    def all(self, own) -> list:
        """The values of `own` on all ranks."""
        return [own]

    def capturing(self) -> AbstractContextManager:
        """The context of a capture."""
        return nullcontext()


def milliseconds(*runs: Callable[[], object], among: Alone = Alone(), captured: bool = True) -> list[float]:
    """The time of each run as a CUDA graph, or as it is: the median of rounds in turns. Each has run before, so nothing
    compiles."""
    replays = [_captured(run, among).replay if captured else run for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    repeats = [1] * len(runs)
    for turn in range(_ROUNDS + 1):
        for i, replay in enumerate(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats[i]):
                replay()
            end.record()
            end.synchronize()
            taken = begin.elapsed_time(end) / repeats[i]
            if turn:
                times[i].append(taken)
            else:  # the first turn warms up, and says how many replays a round takes
                repeats[i] = max(among.all(max(1, min(50, round(_LEAST * 1e3 / max(taken, 1e-3))))))
    return [sorted(own)[_ROUNDS // 2] for own in times]


def _captured(run: Callable[[], object], among: Alone) -> torch.cuda.CUDAGraph:
    # Without torch.cuda.graph(), which collects garbage first: that takes longer than the capture.
    graph, stream = torch.cuda.CUDAGraph(), _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with among.capturing(), torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# choices of earlier starts

def key_of(*parts: object) -> str:
    """The key of a kind of layers in this version of vLLM on this device."""
    import vllm

    from .._library import library_path

    # Kernels are built into the library, and a search writes presets.
    files = [library_path(), *_presets()]
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    own = torch.cuda.get_device_name(), torch.version.cuda, vllm.__version__, stamps
    return hashlib.sha256(repr((own, parts)).encode()).hexdigest()[:32]


def _home(variable: str, otherwise: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / otherwise) / "fftune"


def _presets() -> list[Path]:
    """The presets that the library reads besides its own: in the entries of FFTUNE_PRESETS, which are folders or files,
    and in the user's folder."""
    entries = [Path(entry) for entry in os.environ.get("FFTUNE_PRESETS", "").split(":") if entry]
    entries.append(_home("XDG_DATA_HOME", ".local/share") / "presets")
    return [file for entry in entries for file in ([entry] if entry.is_file() else sorted(entry.rglob("*.json")))]


def _file(key: str) -> Path:
    home = os.environ.get("FFTUNE_CACHE") or _home("XDG_CACHE_HOME", ".cache")
    return Path(home) / "vllm" / f"{key}.json"


def load(key: str) -> Choice | None:
    """The choice that an earlier start measured; None if there is none that can be read."""
    try:
        found = json.loads(_file(key).read_text())["milliseconds"]
        return Choice({int(rows): (float(own), float(mine)) for rows, (own, mine) in found.items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def store(key: str, what: str, choice: Choice) -> None:
    """Keeps the choice for the next start. A folder that cannot be written is no reason to fail."""
    path = _file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"what": what, "milliseconds": choice.times}, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        log(f"the choice for {what} is not kept for the next start: {error}")


@same_random_numbers()
def choice_of(what: str, both: Callable[[int], AbstractContextManager[tuple[Callable, Callable]]], rows: Iterable[int],
              *key: object, outside: Callable[[], float] = lambda: 0.0, among: Alone = Alone(),
              captured: bool = True) -> Choice:
    """The choice of an earlier start, or the times that are measured now.

    `both(rows)` gives the computations, vLLM's first. Numbers of rows for which no time is left are left out.
    `outside()` gives milliseconds of vLLM's time that are no part of its graphs; without `captured` they run outside of
    graphs, as vLLM runs prompts. Ranks of tensor parallelism make the
    same choice: the slowest of them counts."""
    name = key_of(what, *key)
    choice = load(name)
    kept = among.all(None if choice is None else choice.times)
    if choice is None or any(times != kept[0] for times in kept):
        choice, end, part = Choice(), time.monotonic() + BUDGET, None
        for count in dict.fromkeys(rows):
            if any(among.all(bool(choice.times) and time.monotonic() > end)):
                break
            with both(count) as runs:
                for run in runs:
                    run()  # compiles
                own, mine = map(max, zip(*among.all(tuple(milliseconds(*runs, among=among, captured=captured)))))
            part = max(among.all(outside())) if part is None else part
            choice.times[count] = max(own - part, 1e-6), mine
        store(name, what, choice)
    return choice

"""libfftune through ctypes: the library file, its errors, contexts, and plans by problem."""
import ctypes
import json
import os
import struct
import sys
import threading
from pathlib import Path
from typing import Callable

_ROOT = Path(__file__).resolve().parent


class Error(RuntimeError):
    """A call to fftune failed; the message is one line, whatever the caller's values hold."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


def on_two_devices(op: str, one, other) -> Error:
    return Error(f"{op}: tensors on {one} and on {other}: move them to one device")


def library_path() -> Path:
    """$FFTUNE_LIBRARY, for a library that was built elsewhere, else the one in this package."""
    given = os.environ.get("FFTUNE_LIBRARY")
    return Path(given) if given else next(iter((_ROOT / "lib").glob("libfftune.so.*")),
                                          _ROOT / "lib" / "libfftune.so")


def tool_path() -> Path:
    """$FFTUNE_TOOL, for a tool that was built elsewhere, else the one in this package."""
    given = os.environ.get("FFTUNE_TOOL")
    return Path(given) if given else _ROOT / "bin" / "fftune"


def nvrtc_folders() -> list[Path]:
    """Where PyTorch's own packages keep NVRTC and cuBLASLt, which the system may lack."""
    folders = []
    for entry in sys.path:
        root = Path(entry or ".") / "nvidia"
        for below in ("cu13/lib", "cuda_nvrtc/lib", "cublas/lib"):
            if (root / below).is_dir():
                folders.append(root / below)
    return folders


def _load_nvrtc() -> None:
    """Loads NVRTC from PyTorch's packages. The library opens it by its soname, for which the loader
    takes what is loaded already."""
    for soname in ("libnvrtc.so.13", "libnvrtc.so.12"):
        for folder in nvrtc_folders():
            if (folder / soname).exists():
                try:
                    ctypes.CDLL(str(folder / soname))
                    return
                except OSError:
                    continue


def _open() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Error(f"cannot load {path}: {error}: install the wheel again, or set FFTUNE_LIBRARY "
                    "to a libfftune.so") from None
    pointer, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    for name, result, *arguments in (
        ("fftune_version", text),
        ("fftune_last_error", text),
        ("fftune_context_create", ctypes.c_int, ctypes.c_int, text, pointer),
        ("fftune_context_destroy", None, pointer),
        ("fftune_plan_create", ctypes.c_int, pointer, text, pointer),
        ("fftune_plan_destroy", None, pointer),
        ("fftune_plan_buffer_count", size, pointer),
        ("fftune_plan_workspace_bytes", size, pointer),
        ("fftune_plan_describe", text, pointer),
        ("fftune_plan_run", ctypes.c_int, pointer, pointer, size, pointer, pointer),
        ("fftune_plan_launch", ctypes.c_int, pointer, pointer),
        ("fftune_group_create", ctypes.c_int, pointer, pointer, pointer),
        ("fftune_group_memory", pointer, pointer),
        ("fftune_group_place", ctypes.c_int, pointer, pointer, pointer),
        ("fftune_group_check", ctypes.c_int, pointer),
        ("fftune_group_tune_with", ctypes.c_int, pointer, text, pointer),
        ("fftune_group_destroy", None, pointer),
    ):
        try:
            function = getattr(library, name)
        except AttributeError:
            raise Error(f"{path} has no {name}: set FFTUNE_LIBRARY to a libfftune.so of this "
                        "version, or unset it") from None
        function.restype = result
        function.argtypes = arguments
    return library


_lock = threading.RLock()
# A fork waits for a plan that another thread makes: the child has no such thread to end it.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release,
                    after_in_child=_lock.release)
_opened: ctypes.CDLL | None = None


def library() -> ctypes.CDLL:
    global _opened
    if _opened is None:
        with _lock:
            if _opened is None:
                _opened = _open()
    return _opened


def library_version() -> str:
    return library().fftune_version().decode()


def check_status(status: int) -> None:
    if status != 0:
        raise Error(library().fftune_last_error().decode())


class Context:
    """A device: a CUDA ordinal, or the CPU for -1."""

    __slots__ = ("handle", "fork")

    def __init__(self, device: int):
        self.handle = None
        self.fork = _forks if device >= 0 else None
        if device >= 0:
            _load_nvrtc()
        handle = ctypes.c_void_p()
        check_status(library().fftune_context_create(device, None, ctypes.byref(handle)))
        self.handle = handle

    def __del__(self):
        if self.handle is not None and self.fork in (None, _forks) and not sys.is_finalizing():
            _opened.fftune_context_destroy(self.handle)


_contexts: dict[int, Context] = {}
_forks = 0  # between the first process and this one: what CUDA made belongs to one process


def context(device: int) -> Context:
    """The process's context of a device."""
    with _lock:
        found = _contexts.get(device)
        if found is None:
            found = _contexts[device] = Context(device)
        return found


class Plan:
    """A problem on a device, ready to run.

    A plan may not be destroyed while it runs. On the CPU run() returns when it is done, and the
    caller holds the plan. On a GPU the plan notes the streams that it ran on (`runs_on`), and its
    handle is kept until their work of that time is done (`destroy_idle`). The end of the process
    destroys no plan, nor does a forked child destroy its parent's plans on a GPU.
    """

    __slots__ = ("handle", "device", "fork", "count", "addresses", "workspace_bytes", "stream",
                 "streams")

    def __init__(self, device: int, problem: dict):
        self.handle = None
        self.device = device
        self.fork = _forks if device >= 0 else None
        self.stream = None  # the last one that it ran on
        self.streams: dict[int, object] = {}  # all of them: the handle -> what the caller gave
        handle = ctypes.c_void_p()
        owner = context(device)  # is not destroyed during the call
        try:
            text = json.dumps(problem).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise Error(f"problem: {error}: give sizes as integers and options as strings") from None
        check_status(library().fftune_plan_create(owner.handle, text, ctypes.byref(handle)))
        self.handle = handle
        self.count = library().fftune_plan_buffer_count(handle)
        # Bytes are made in a third of the time of an array of ctypes.
        self.addresses = struct.Struct(f"{self.count}P").pack
        self.workspace_bytes = library().fftune_plan_workspace_bytes(handle)

    def describe(self) -> dict:
        return json.loads(library().fftune_plan_describe(self.handle))

    def runs_on(self, stream: int, owner) -> None:
        self.streams.setdefault(stream, owner)
        self.stream = stream

    def __del__(self):
        if self.handle is None or self.fork not in (None, _forks) or sys.is_finalizing():
            return
        if self.streams:
            _retired.append((self.handle, self.device, self.streams))
        else:
            _opened.fftune_plan_destroy(self.handle)


class _Run(ctypes.Structure):
    """fftune_run of fftune.h."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("inputs", ctypes.c_void_p), ("input_count", ctypes.c_size_t),
                ("outputs", ctypes.c_void_p), ("output_count", ctypes.c_size_t), ("workspace", ctypes.c_void_p),
                ("stream", ctypes.c_void_p), ("tokens", ctypes.c_int64)]


class TokenPlan(Plan):
    """A problem with any number of tokens up to a limit. Its kernels are compiled when it is made; `at` one number
    it runs as a plan of that number does, with the workspace of the limit."""

    __slots__ = ("most", "inputs", "outputs")

    def __init__(self, device: int, problem: dict, most: int):
        super().__init__(device, {**problem, "m": {"max": most}})
        self.most = most
        roles = [tensor["role"] for tensor in self.describe()["buffers"]]
        self.inputs, updated, outputs = ([i for i, role in enumerate(roles) if role == wanted]
                                         for wanted in ("input", "updated", "output"))
        self.outputs = updated + outputs

    def at(self, tokens: int) -> "PlanAt":
        return PlanAt(self, tokens)


class PlanAt(Plan):
    """A TokenPlan at one number of tokens."""

    __slots__ = ("owner", "tokens")

    def __init__(self, owner: TokenPlan, tokens: int):
        self.owner, self.tokens, self.stream, self.streams = owner, tokens, None, {}
        for name in ("handle", "device", "fork", "count", "addresses", "workspace_bytes"):
            setattr(self, name, getattr(owner, name))

    def runs_on(self, stream: int, owner) -> None:
        self.owner.runs_on(stream, owner)
        self.stream = stream

    def launch(self, pointers: list[int], scratch: int | None, stream: int | None) -> int:
        inputs, outputs = ((ctypes.c_void_p * len(places))(*[pointers[i] for i in places])
                           for places in (self.owner.inputs, self.owner.outputs))
        run = _Run(ctypes.sizeof(_Run), ctypes.addressof(inputs), len(inputs), ctypes.addressof(outputs), len(outputs),
                   scratch, stream, self.tokens)
        return _opened.fftune_plan_launch(self.handle, ctypes.byref(run))

    def __del__(self):
        pass  # the handle is the owner's


# Handles of plans that nobody has any more, and the streams on which work of theirs may be left.
_retired: list[tuple[ctypes.c_void_p, int, dict[int, object]]] = []
# Handles of plans, and what says of each stream whether its work of the time is done.
_dying: list[tuple[list[ctypes.c_void_p], list[Callable[[], bool]]]] = []


def destroy_idle(mark: Callable[[int, object], Callable[[], bool]]) -> None:
    """Destroys the plans that nobody has and that no stream has work of. mark(device, stream) marks
    the end of a stream's work; its result says whether that was reached."""
    with _lock:
        retired = []
        while _retired:  # other threads, and the garbage collector, append to it
            retired.append(_retired.pop())
        if retired:
            streams = {(device, stream): owner for _, device, owners in retired
                       for stream, owner in owners.items()}
            _dying.append(([handle for handle, _, _ in retired],
                           [mark(device, owner) for (device, _), owner in streams.items()]))
        left = []
        for handles, marks in _dying:
            if all(reached() for reached in marks):
                for handle in handles:
                    _opened.fftune_plan_destroy(handle)
            else:
                left.append((handles, marks))
        _dying[:] = left


def _forget_parent() -> None:
    """In a forked child, where CUDA's streams, contexts and plans are not to be used."""
    global _forks
    _forks += 1
    _retired.clear()
    _dying.clear()
    for device in [device for device in _contexts if device >= 0]:
        del _contexts[device]


os.register_at_fork(after_in_child=_forget_parent)

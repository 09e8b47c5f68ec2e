"""libfftune through ctypes: the library file, its errors, contexts, and plans by problem."""
import ctypes
import json
import os
import struct
import sys
import threading
from pathlib import Path

_ROOT = Path(__file__).resolve().parent


class Error(RuntimeError):
    """A call to fftune failed; the message is the library's one line."""


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
        ("fftune_plan_create", ctypes.c_int, pointer, text, pointer),
        ("fftune_plan_destroy", None, pointer),
        ("fftune_plan_buffer_count", size, pointer),
        ("fftune_plan_workspace_bytes", size, pointer),
        ("fftune_plan_describe", text, pointer),
        ("fftune_plan_run", ctypes.c_int, pointer, pointer, size, pointer, pointer),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


_lock = threading.RLock()
_opened: ctypes.CDLL | None = None
_contexts: dict[int, ctypes.c_void_p] = {}


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


def context(device: int) -> ctypes.c_void_p:
    """The process's context of a CUDA ordinal, or of the CPU for -1."""
    with _lock:
        found = _contexts.get(device)
        if found is None:
            if device >= 0:
                _load_nvrtc()
            found = ctypes.c_void_p()
            check_status(library().fftune_context_create(device, None, ctypes.byref(found)))
            _contexts[device] = found
        return found


class Plan:
    """A problem on a device, ready to run."""

    __slots__ = ("handle", "count", "addresses", "workspace_bytes")

    def __init__(self, device: int, problem: dict):
        self.handle = None
        handle = ctypes.c_void_p()
        check_status(library().fftune_plan_create(context(device), json.dumps(problem).encode(),
                                                  ctypes.byref(handle)))
        self.handle = handle
        self.count = library().fftune_plan_buffer_count(handle)
        # Bytes are made in a third of the time of an array of ctypes.
        self.addresses = struct.Struct(f"{self.count}P").pack
        self.workspace_bytes = library().fftune_plan_workspace_bytes(handle)

    def describe(self) -> dict:
        return json.loads(library().fftune_plan_describe(self.handle))

    def __del__(self):
        if self.handle is not None and _opened is not None:
            _opened.fftune_plan_destroy(self.handle)

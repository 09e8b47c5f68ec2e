"""Groups of processes, or threads, and the collectives that run as fftune's kernels.

    torch.distributed.init_process_group("nccl")
    group = fftune.distributed.init_group()
    y, residual = fftune.ops.all_reduce_norm(x, w, residual=residual, group=group)

Ranks reach each other's memory: over NVLink or PCIe on GPUs, as shared pages on a CPU. Between hosts NCCL
sums. All ranks call the same collectives in the same order. If a rank dies, hangs or calls another
collective, every other rank gets an error within the timeout.
"""
import ctypes
import json
import math
import numbers
import os
import secrets
import socket
import sys
from typing import Callable, Mapping

import torch

from . import _run
from ._checks import device_of, expect_one_of, expect_tensor, flag, folder_of, named
from ._library import Error, check_status, context, library

__all__ = ["Group", "init_group", "slice_layer"]


class _Options(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("name", ctypes.c_char_p),
                ("rank", ctypes.c_int), ("ranks", ctypes.c_int), ("max_bytes", ctypes.c_size_t),
                ("timeout_milliseconds", ctypes.c_int64), ("nccl", ctypes.c_int)]


class _TuneOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("budget_milliseconds", ctypes.c_int64),
                ("preset_path", ctypes.c_char_p)]


class _Memory:
    """The group's memory in the form that torch.as_tensor takes."""

    def __init__(self, address: int, words: int):
        self.__cuda_array_interface__ = {"shape": (words,), "typestr": "<i8",
                                         "data": (address, False), "version": 2}


def _integer(what: str, value, least: int, most: int) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not least <= value <= most:
        raise Error(f"{what} is {named(value)}: give an integer from {least} to {most}")
    return int(value)


def _milliseconds(what: str, seconds) -> int:
    if not isinstance(seconds, numbers.Real) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise Error(f"{what} is {named(seconds)}: give a positive number of seconds")
    return min(max(1, round(seconds * 1000)), _MOST)


_MOST = 2**63 - 1  # what the library's integers hold


class Group:
    """A rank of a group: of this process, or of this thread with a GPU of its own.

    Args:
        name: The same on all ranks, and unique on this host. A name that begins with a slash is the path
            of a socket's file, for ranks in several containers. For ranks on several hosts:
            "tcp://host:port/word"; rank 0 listens there, and connections with another word are ignored.
        rank, ranks: This rank, from 0, and the number of ranks, 8 at most. None: those of this host's
            processes, from the environment of mpirun, torchrun or srun; the name must then be unique
            within that job.
        device: The rank's GPU, or the CPU.
        max_bytes: Bytes of the largest message. A rank's memory has 2 * ranks * max_bytes for data, the
            same again for words (at most 64 MB a message), and up to 2 MB per rank.
        timeout: Seconds that this call, and each later wait, waits for a rank before it raises Error.
        nccl: Also use NCCL, for all-reduce of messages larger than max_bytes. A group across hosts has
            NCCL alone.

    Raises:
        Error: A rank does not come in time, or options differ between ranks.
    """

    TABLE_WORDS = 18  # of the memory, all that a tensor shows

    def __init__(self, name: str, rank: int | None = None, ranks: int | None = None, *, device=None,
                 max_bytes: int = 1 << 26, timeout: float = 60, nccl: bool = False):
        self._handle = None
        if not isinstance(name, str) or "\0" in name or not _is_utf8(name):
            raise Error(f"a group's name is {name!r}: give a text without a zero")
        if (rank is None) != (ranks is None):
            raise Error(f"a group's rank is {rank} and its ranks are {ranks}: give both, or neither")
        if rank is not None:
            ranks = _integer("a group's number of ranks", ranks, 1, 8)
            rank = _integer("a group's rank", rank, 0, ranks - 1)
        max_bytes = _integer("a group's max_bytes", max_bytes, 1, _MOST)
        milliseconds = _milliseconds("a group's timeout", timeout)
        self.device = device_of("a group's device", "cpu" if device is None else device)
        self.max_bytes, self.timeout = max_bytes, timeout
        self.across_hosts = name.startswith("tcp://")
        self.nccl = flag("Group", "nccl", nccl) or self.across_hosts
        ordinal = self.device.index if self.device.type == "cuda" else -1
        if ordinal >= 0 and torch.cuda.is_available():
            torch.cuda.init()
        options = _Options(ctypes.sizeof(_Options), name.encode(), rank or 0, ranks or 0, max_bytes,
                           milliseconds, self.nccl)
        handle = ctypes.c_void_p()
        check_status(library().fftune_group_create(
            context(ordinal).handle, ctypes.byref(options), ctypes.byref(handle)))
        self._handle = handle
        place = ctypes.c_int(), ctypes.c_int()
        check_status(library().fftune_group_place(handle, *map(ctypes.byref, place)))
        self.rank, self.ranks = (number.value for number in place)
        address = library().fftune_group_memory(handle)
        if ordinal >= 0:
            self.memory = torch.as_tensor(_Memory(address, self.TABLE_WORDS), device=self.device)
        else:
            self.memory = torch.frombuffer((ctypes.c_int64 * self.TABLE_WORDS).from_address(address),
                                           dtype=torch.int64)

    def link(self, op: str, size: int) -> str:
        """The link of a message of `size` bytes, the same on all ranks: "peers" (each other's memory) or
        "nccl"."""
        if size <= self.max_bytes and not self.across_hosts:
            return "peers"
        if not self.nccl:
            raise Error(f"{op}: {size} bytes are more than the group's max_bytes, {self.max_bytes}: make it "
                        "with more, or with nccl=True")
        return "nccl"

    def expect_open(self) -> None:
        """Raises Error if this rank has closed the group: kernels would find no memory."""
        if self._handle is None:
            raise Error("the group is closed: make a new one")

    def check(self) -> None:
        """Raises Error if a rank died, or if a complete collective failed on this rank. Waits for nothing."""
        self.expect_open()
        check_status(library().fftune_group_check(self._handle))

    def tune(self, call: Callable[[], object], *, budget: float = 10,
             presets: str | os.PathLike | None = None) -> list[dict]:
        """Searches the plans of a call that need this group, on all ranks at once.

        All ranks give the same call and budget, and get the same variants. Later calls in this process use
        them. CUDA graphs that were captured before keep their kernels.

        Args:
            call: A function without arguments, which is called once.
            budget: Seconds for each plan. At least one candidate is tried.
            presets: Folder to which rank 0 writes records for later processes, such as
                `fftune.tuning.user_presets()`, which the library searches. All ranks give it, or none
                does. None: only this process uses the result.

        Returns:
            The problems that were searched.
        """
        milliseconds = _milliseconds("tune: budget", budget)
        if not callable(call):
            raise Error(f"tune: call is {named(call)}: give a function without arguments")
        folder = os.fsencode(folder_of("tune: presets", presets)) if presets is not None else None
        self.expect_open()
        found: dict[str, tuple[int, dict]] = {}
        with _run.listening(found):
            call()
        options = _TuneOptions(ctypes.sizeof(_TuneOptions), milliseconds, folder)
        problems = [problem for _, problem in found.values() if problem.get("link") == "peers"]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.check()
        for problem in problems:
            check_status(library().fftune_group_tune_with(
                self._handle, json.dumps(problem).encode(), ctypes.byref(options)))
        _run.forget_plans()
        return problems

    def close(self) -> None:
        """Ends this rank's part, once its collectives are complete."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        if self.device.type == "cuda" and not sys.is_finalizing():
            torch.cuda.synchronize(self.device)
        library().fftune_group_destroy(handle)

    def __copy__(self) -> "Group":
        """The group itself: a copy of a model has the group of the model."""
        return self

    def __deepcopy__(self, memo) -> "Group":
        return self

    def __reduce_ex__(self, protocol):
        raise Error("a group cannot be pickled: it is a rank of this process; make one where it is loaded")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if self._handle is not None and not sys.is_finalizing():
            self.close()


def _is_utf8(text: str) -> bool:
    return text.encode(errors="replace").decode() == text


def _part(tensor: torch.Tensor, axis: int, rank: int, ranks: int, name: str) -> torch.Tensor:
    if tensor.dim() < -axis:
        raise Error(f"slice_layer: {name} is {list(tensor.shape)}: give the tensor of a layer")
    size = tensor.shape[axis]
    if size % ranks:
        raise Error(f"slice_layer: {name} has {size} rows or columns, which {ranks} ranks do not divide")
    return tensor.narrow(axis, rank * (size // ranks), size // ranks).contiguous()


_OF_EXPERTS = ("w_gate", "w_up", "w_gate_up", "w_down", "b_gate", "b_up", "b_gate_up", "b_down")


def slice_layer(weights: Mapping[str, torch.Tensor], rank: int, ranks: int, heads: int, kv_heads: int, *,
                grouped: bool = False, packing: str = "halves",
                whole_experts: bool = False) -> dict[str, torch.Tensor]:
    """A rank's slice of the weights of a layer, by the names that `fftune.ops.layer` has for them.

    Ranks divide the rows of q, k, v, gate and up, and the columns of w_o and w_down. Rank 0 keeps b_o and
    b_down; its peers have zeros. Everything else is whole on every rank.

    Args:
        weights: Weights of the whole layer, unpacked.
        rank, ranks: This rank, from 0, and the number of ranks.
        heads, kv_heads, grouped, packing: As in `layer`, for the whole layer.
        whole_experts: Give each rank whole experts of a mixture, with their biases, instead of some
            features of all experts.

    Returns:
        The rank's weights, by the same names.
    """
    ranks = _integer("slice_layer: ranks", ranks, 1, _MOST)
    rank = _integer("slice_layer: rank", rank, 0, ranks - 1)
    heads, kv_heads = (_integer(f"slice_layer: {name}", count, 1, _MOST)
                       for name, count in (("heads", heads), ("kv_heads", kv_heads)))
    expect_one_of("slice_layer: packing", packing, ("halves", "interleaved"))
    flag("slice_layer", "grouped", grouped), flag("slice_layer", "whole_experts", whole_experts)
    if not isinstance(weights, Mapping):
        raise Error(f"slice_layer: weights is {named(weights)}: give tensors by the names of layer")
    for name, tensor in weights.items():
        expect_tensor("slice_layer", str(name), tensor)
    if heads % ranks or kv_heads % ranks:
        raise Error(f"slice_layer: {heads} heads of q and {kv_heads} of k: {ranks} ranks do not divide them")

    if whole_experts and "w_router" not in weights:
        raise Error("slice_layer: whole_experts without w_router: the layer is no mixture of experts")

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if whole_experts and name in _OF_EXPERTS:
            return _part(tensor, 0, rank, ranks, f"{name}'s experts")
        bias = name.startswith("b_")
        rows = -1 if bias else -2
        if name in ("w_qkv", "b_qkv") and not grouped:
            dim, rest = divmod(tensor.shape[rows], heads + 2 * kv_heads) if tensor.dim() >= -rows else (0, 1)
            if rest:
                raise Error(f"slice_layer: {name} is {list(tensor.shape)}, which {heads} heads of q and "
                            f"{kv_heads} of k and of v do not divide")
            parts = tensor.split([heads * dim, kv_heads * dim, kv_heads * dim], rows)
            return torch.cat([_part(p, rows, rank, ranks, name) for p in parts], rows)
        if name in ("w_gate_up", "b_gate_up") and packing == "halves":
            return torch.cat([_part(p, rows, rank, ranks, name) for p in tensor.chunk(2, rows)], rows)
        if name in ("b_o", "b_down"):
            return tensor if rank == 0 else torch.zeros_like(tensor)
        if name in ("w_o", "w_down", "w_shared_down", "sinks"):
            return _part(tensor, -1, rank, ranks, name)
        if name in ("w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "w_qkv", "b_qkv", "w_gate", "w_up", "b_gate",
                    "b_up", "w_gate_up", "b_gate_up", "w_shared_gate", "w_shared_up"):
            return _part(tensor, rows, rank, ranks, name)
        return tensor

    return {name: part(name, tensor) for name, tensor in weights.items()}


def host() -> str:
    """This host's boot and its network namespace, where the ranks of a group meet: the same in all
    processes there, and in no others."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read() + os.readlink("/proc/self/ns/net")


def _address(first: bool) -> str:
    """An address of this host by which others reach it, and a port that is free: as the way to the
    host on which torch.distributed's processes met, or that one."""
    master = os.environ.get("MASTER_ADDR", socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(master), 9))  # sends nothing
        host = master if first else probe.getsockname()[0]
    with socket.create_server((host, 0)) as free:
        return f"tcp://{host}:{free.getsockname()[1]}"


def _of_all(call: Callable[[], object]) -> None:
    """A call of torch.distributed, whose errors are one line."""
    try:
        call()
    except RuntimeError as error:
        raise Error(f"init_group: a rank died, or does not call it in the time of torch.distributed's process "
                    f"group: {error}") from error


def init_group(process_group=None, *, device=None, max_bytes: int = 1 << 26, timeout: float = 60,
               nccl: bool = False, address: str | None = None) -> Group:
    """A group of the ranks of a process group of torch.distributed.

    A group on several hosts has NCCL alone, and needs GPUs.

    Args:
        process_group: A process group of torch.distributed. None: all processes.
        device: This rank's device. None: the current CUDA device, or the CPU without one.
        max_bytes, timeout, nccl: As in `Group`.
        address: For several hosts, "tcp://host:port" where rank 0 listens. None: the address by which
            torch.distributed's MASTER_ADDR is reached, and a free port.

    Returns:
        A `Group`.

    Raises:
        Error: A rank does not come in time, or the ranks' devices cannot form a group.
    """
    import torch.distributed as dist
    if not dist.is_initialized():
        raise Error("init_group: call torch.distributed.init_process_group first, or make "
                    "fftune.distributed.Group with a name, a rank and the number of ranks")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise Error(f"init_group: process_group is {named(process_group)}: give one of torch.distributed of "
                    "which this process is a rank, or None for all processes")
    if address is not None and not isinstance(address, str):
        raise Error(f"init_group: address is {named(address)}: give 'tcp://host:port'")
    rank = dist.get_rank(process_group)
    names = [secrets.token_hex(16), host(), address]
    first = dist.get_global_rank(process_group, 0) if process_group is not None else 0
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = device_of("init_group: device", device)
    place = device if dist.get_backend(process_group) == "nccl" else None

    def share() -> None:
        _of_all(lambda: dist.broadcast_object_list(names, src=first, group=process_group, device=place))

    share()
    # The highest rank that is elsewhere, which all learn together.
    elsewhere = torch.tensor([rank if names[1] != host() else 0], device=place)
    _of_all(lambda: dist.all_reduce(elsewhere, op=dist.ReduceOp.MAX, group=process_group))
    if elsewhere.item() > 0:
        if device.type != "cuda":
            raise Error(f"init_group: rank {elsewhere.item()} is on another host than rank 0: on CPUs a group "
                        "has the ranks of one host; make one of each host's process group")
        why = ""
        if rank == 0 and address is None:
            try:
                names[2] = _address(first == 0)
            except OSError as error:
                why = str(error)
        names.append(why)
        share()
        if names[2] is None:
            raise Error(f"init_group: rank 0 found no address for ranks on several hosts ({names[3]}): give "
                        "address='tcp://host:port'")
        names[0] = f"{names[2]}/{names[0]}"
    return Group(names[0], rank, dist.get_world_size(process_group), device=device,
                 max_bytes=max_bytes, timeout=timeout, nccl=nccl)

"""Memory that this process may still take."""
from collections.abc import Iterator
from pathlib import Path

import torch

_NO_LIMIT = 1 << 60  # version 1 of control groups writes no limit as a number near 2^63


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is free, or that PyTorch keeps unused."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return free_of_host()


def free_of_host(root: Path = Path("/")) -> int:
    """The memory that the system has available, within the limit of each control group. Cached files count as free,
    as the system drops them where memory is needed."""
    meminfo = _fields(root / "proc/meminfo")
    free = 1024 * meminfo.get("MemAvailable:", meminfo.get("MemFree:", 0) + meminfo.get("Cached:", 0))
    for folder, names in _control_groups(root):
        limit, usage = (_number(folder / name) for name in names)
        if limit is not None and usage is not None and limit < _NO_LIMIT:
            free = min(free, max(limit - usage + _reclaimable(folder), 0))
    return free


def _reclaimable(group: Path) -> int:
    """Bytes of files; in version 1 the totals are those with the groups below it."""
    stat = _fields(group / "memory.stat")
    return sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))


def _control_groups(root: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """The folders of this process's groups and those above them, with the names of the limit and the usage. In a
    container the names may be those of the host, and the container's own group is the first folder."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, name = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = Path(name.lstrip("/"))
        for folder in (group, *group.parents):
            yield base / folder, names


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """The numbers of lines "name number", with a unit or without."""
    lines = (line.split() for line in _text(path).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}

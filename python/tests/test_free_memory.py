"""Memory that a process may still take, in containers too."""
import pytest

from fftune._memory import free_of_host

MIB = 1 << 20


def machine(root, cgroup: str = "", files: dict = {}, available: int = 8192):
    """A system with this many MiB available, and files below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable: {available << 10} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def group(version: int, folder: str, limit, usage: int, inactive: int = 0, active: int = 0) -> dict:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    # Version 1 has those of the group alone beside the totals.
    stat = f"anon 4096\ninactive_file {inactive}\nactive_file {active}" if version == 2 else (
        f"inactive_file 0\nactive_file 0\ntotal_inactive_file {inactive}\ntotal_active_file {active}")
    return {f"{folder}{names[0]}": limit, f"{folder}{names[1]}": usage, f"{folder}memory.stat": stat}


def test_without_groups(tmp_path):
    assert free_of_host(machine(tmp_path)) == 8192 * MIB


@pytest.mark.parametrize("version, line, base", [(2, "0::/app\n", ""), (1, "5:memory:/app\n", "memory/"),
                                                 (1, "4:cpu,memory:/app\n", "memory/")])
@pytest.mark.parametrize("folder", ["app/", ""])  # a container sees its own as the first
def test_cached_files_are_free(tmp_path, version, line, base, folder):
    own = group(version, base + folder, 1024 * MIB, 1020 * MIB, 600 * MIB, 300 * MIB)
    assert free_of_host(machine(tmp_path, line, own)) == 904 * MIB


@pytest.mark.parametrize("version, line, base, none", [(2, "0::/a/b\n", "", "max"),
                                                       (1, "5:memory:/a/b\n", "memory/", 2**63 - 4096)])
def test_the_least_of_all_groups_counts(tmp_path, version, line, base, none):
    files = group(version, f"{base}a/b/", none, 10 * MIB) | group(version, f"{base}a/", 100 * MIB, 60 * MIB, 5 * MIB)
    assert free_of_host(machine(tmp_path, line, files)) == 45 * MIB
    full = group(version, f"{base}", 100 * MIB, 120 * MIB)
    for name, text in full.items():
        (tmp_path / "sys/fs/cgroup" / name).write_text(f"{text}\n")
    assert free_of_host(tmp_path) == 0


def test_the_system_has_less_than_the_group(tmp_path):
    own = group(2, "app/", 4096 * MIB, 0)
    assert free_of_host(machine(tmp_path, "0::/app\n", own, available=512)) == 512 * MIB


def test_files_that_cannot_be_read_limit_nothing(tmp_path):
    files = group(2, "app/", "max", 0) | {"app/memory.current": "?"}
    assert free_of_host(machine(tmp_path, "0::/app\nno line\n\n", files)) == 8192 * MIB

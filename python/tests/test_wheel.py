"""The installed wheel by itself: in an environment without PyTorch, with an empty environment."""
import os
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import fftune
from fftune import _library

ROOT = Path(fftune.__file__).parent
needs_wheel = pytest.mark.skipif(not (ROOT / "lib").is_dir(), reason="not installed from a wheel")
# Libraries of glibc and of the compiler, which every manylinux system has.
SYSTEM = ("linux-vdso", "ld-linux", "libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so",
          "libstdc++.so", "libgcc_s.so")


@needs_wheel
def test_everything_is_inside():
    for part in ("bin/fftune", "include/fftune/fftune.h", "share/fftune/presets/schema.json",
                 "share/doc/fftune/cli.md", "py.typed", "_generated_ops.py",
                 "_op_table.json", "ops.pyi"):
        assert (ROOT / part).is_file(), part
    library, = (ROOT / "lib").iterdir()
    # Programs linked to it look for a file of this name.
    version = ".".join(fftune.__version__.split(".")[:2])
    assert library.name == f"libfftune.so.{version}"


@needs_wheel
def test_vllm_finds_its_plugin():
    own = [point for point in entry_points(group="vllm.general_plugins") if point.name == "fftune"]
    assert callable(own[0].load())


@needs_wheel
@pytest.mark.parametrize("part", ["lib/libfftune.so.*", "bin/fftune"])
def test_only_glibc_and_libstdcxx_are_needed(part):
    file, = ROOT.glob(part)
    listing = subprocess.run(["ldd", file], capture_output=True, text=True, check=True).stdout
    outside = [line.strip() for line in listing.splitlines()
               if "fftune.libs" not in line and not any(name in line for name in SYSTEM)]
    assert not outside


@pytest.mark.skipif("FFTUNE_EMPTY_VENV" not in os.environ, reason="there is no empty environment")
def test_the_tool_and_an_op_without_pytorch(tmp_path):
    venv = Path(os.environ["FFTUNE_EMPTY_VENV"])
    bare = {"HOME": str(tmp_path), "PATH": "/nowhere"}

    def run(*command):
        done = subprocess.run(command, env=bare, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert fftune.__version__ in run(venv / "bin" / "fftune", "--version")
    assert "cpu" in run(venv / "bin" / "fftune", "devices")
    program = Path(__file__).with_name("rmsnorm_by_hand.py")
    assert run(venv / "bin" / "python", program).strip() == "2.0"


def test_nvrtc_of_pytorch_packages_is_found(tmp_path, monkeypatch):
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert folder in _library.nvrtc_folders()
    from fftune.__main__ import tool_environment

    monkeypatch.setenv("LD_LIBRARY_PATH", "/first")
    assert tool_environment()["LD_LIBRARY_PATH"].startswith(f"/first:{folder}")

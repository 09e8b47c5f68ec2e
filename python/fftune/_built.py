"""Sees to the files that a build generates. A wheel has them; a checkout has them from a build, and else they
are made here, by the tool."""
import subprocess
import sys
from pathlib import Path

from ._library import tool_path

_FILES = [Path(__file__).with_name(name) for name in ("_op_table.json", "_generated_ops.py")]
_GENERATOR = Path(__file__).parents[1] / "generator"

for _file in _FILES:
    if _file.exists():
        continue
    if not _GENERATOR.exists():
        raise ImportError(f"{_file} is missing: install the wheel again")
    if subprocess.run([sys.executable, _GENERATOR, tool_path()], stderr=subprocess.DEVNULL).returncode:
        raise ImportError(f"{_file} is missing, and {tool_path()} could not write it: run "
                          "`ninja -C build/ci python_files`")

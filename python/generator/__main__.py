"""Writes the generated files of the Python package (the build's target `python_files`).

usage: python3 python/generator TOOL

    fftune/_op_table.json       what the registry says of each op: the output of `TOOL --op-table`
    fftune/_generated_ops.py    the kernels and fake kernels of the custom ops that fftune/_ops declares
    fftune/ops.pyi              the type stubs of fftune.ops
"""
import json
import os
import subprocess
import sys

from stubs import PACKAGE, stubs
from without_torch import declared_forms


def write(name: str, text: str) -> None:
    new = PACKAGE / f"{name}.{os.getpid()}"  # whole or not at all: others may read the package meanwhile
    new.write_text(text)
    new.replace(PACKAGE / name)


def main(tool: str) -> None:
    table = subprocess.run([tool, "--op-table"], check=True, stdout=subprocess.PIPE, text=True).stdout
    write("_op_table.json", table)
    write("ops.pyi", stubs(json.loads(table)))
    forms = declared_forms()  # by the table
    from kernels import generated_ops  # which takes the package's modules as declared_forms() made them
    write("_generated_ops.py", generated_ops(forms))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python3 python/generator TOOL")
    main(sys.argv[1])

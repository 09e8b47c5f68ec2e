"""docs/examples/*.py run, with tiny sizes."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example):
    done = subprocess.run([sys.executable, example, "--tiny"], capture_output=True, text=True,
                          env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stdout


def test_there_are_examples():
    assert len(EXAMPLES) == 4

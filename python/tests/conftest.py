import os

# Before PyTorch is loaded: two pools of threads on a few cores get into each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)


@pytest.fixture
def run_python():
    """Runs a program in a Python of its own: what it printed."""
    import subprocess
    import sys
    import textwrap

    def run(program: str, **environment: str) -> str:
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], text=True,
                              capture_output=True, env={**os.environ, **environment})
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run

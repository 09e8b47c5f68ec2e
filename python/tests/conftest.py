import os

# Before PyTorch is loaded: two pools of threads on a few cores get into each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


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

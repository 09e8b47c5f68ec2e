import os
import sys

# Before PyTorch is loaded: two pools of threads on a few cores get into each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor's kernels without vector instructions are compiled in half the time, and headers in a third.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--all-cases", action="store_true", help="run also the cases that others stand for")


def pytest_configure(config):
    config.addinivalue_line("markers", "further: a case that another one stands for; run with --all-cases")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all-cases"):
        items[:] = [item for item in items if not item.get_closest_marker("further")]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """Whatever other tests have compiled: a function that was compiled too often runs as it is, or is an error."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture
def run_python():
    """Runs a program in a Python of its own: what it printed."""
    import subprocess
    import textwrap

    def run(program: str, **environment: str) -> str:
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], text=True,
                              capture_output=True, env={**os.environ, **environment})
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture
def references():
    """A context in which every op runs its definition in PyTorch, as FFTUNE_DISABLE=1 makes it do when the
    package is imported."""
    import contextlib
    import warnings

    from fftune import _custom, ops  # noqa: F401: it defines the ops

    def register(op, kernel):
        op.kernel = kernel
        with warnings.catch_warnings():  # that it had another
            warnings.simplefilter("ignore", UserWarning)
            for backend in ("CPU", "CUDA"):
                _custom._library.impl(op.name, kernel, backend, allow_override=True)

    @contextlib.contextmanager
    def of_pytorch():
        kernels = {op: op.kernel for op in vars(_custom.OPS).values()}
        _custom._DISABLED = True
        for op in kernels:
            register(op, _custom._by_reference(op.name))
        try:
            yield
        finally:
            _custom._DISABLED = False
            for op, kernel in kernels.items():
                register(op, kernel)

    return of_pytorch


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in for vLLM, importable and not imported yet, and fftune's plugin not loaded yet."""
    from pathlib import Path

    def forget():
        if products := sys.modules.get("fftune.vllm.products"):
            products._library._destroy()  # its op is defined anew
        for name in list(sys.modules):
            if name.split(".")[0] == "vllm" or name.startswith("fftune.vllm"):
                del sys.modules[name]
        sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != "fftune.vllm.imports"]

    monkeypatch.setenv("FFTUNE_VLLM", "1")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))
    forget()
    yield
    forget()

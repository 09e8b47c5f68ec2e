"""docs/examples/*.py run with tiny sizes, and as docs/python.md quotes them."""
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
QUOTED = re.findall(r"^python3 (docs/examples/\S+\.py)", (ROOT / "docs" / "python.md").read_text(),
                    re.M)
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}
CORES, MOST_SECONDS, MOST_SILENCE = 2, 20, 5


# They also run as they are quoted, below.
@pytest.mark.parametrize("example", [EXAMPLES[0], *(pytest.param(example, marks=pytest.mark.further)
                                                    for example in EXAMPLES[1:])], ids=lambda path: path.stem)
def test_example(example):
    done = subprocess.run([sys.executable, example, "--tiny"], capture_output=True, text=True,
                          env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stdout


def cpu_seconds(process) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the bound is for two cores without a GPU")
@pytest.mark.parametrize("example", QUOTED)
def test_example_as_quoted(example):
    """Ends within 20 s on two cores and is never silent for long, by the CPU time that it takes: a
    busy machine makes it slower, not wrong. Imports take up to twice the longest silence."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen([sys.executable, example], cwd=ROOT, stdout=subprocess.PIPE,
                               text=True, env=ENVIRONMENT)
    spent, silences = 0.0, []
    for line in process.stdout:
        assert "WRONG" not in line
        now = cpu_seconds(process.pid)
        silences.append((now - spent) / CORES)
        spent = now
    assert process.wait() == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    silences.append((total - spent) / CORES)
    assert total / CORES < MOST_SECONDS
    # The first line says that PyTorch is being imported.
    assert max(silences[:2]) < 2 * MOST_SILENCE and max(silences[2:]) < MOST_SILENCE, silences


def test_every_example_is_quoted():
    assert len(EXAMPLES) == 4
    assert sorted(QUOTED) == [str(path.relative_to(ROOT)) for path in EXAMPLES]

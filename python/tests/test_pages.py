"""The pages' numbers of whole models: their labels are those of the configurations that
bench/models.py builds, and a table of results names its GPU, its day and its command."""
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "measurements").glob("*.md"))]
sys.path.insert(0, str(ROOT / "bench"))

import model_sizes  # noqa: E402

LAYERS_OF_REAL_MODELS = {"Llama-3.2-1B": 16, "Llama-3.1-8B": 32, "Qwen2.5-7B": 28,
                         "Phi-3-mini": 32, "OLMo-2-1B": 16, "Mixtral-8x7B": 32,
                         "Qwen3-30B-A3B": 48}
MODELS = {**model_sizes.DENSE, **model_sizes.MIXTURES}


def test_titles_say_how_many_layers_are_left():
    assert model_sizes.title("qwen3-30b-a3b/12") == "Qwen3-30B-A3B (4 of 48 layers)"
    assert model_sizes.title("mixtral-8x7b/16") == "Mixtral-8x7B (2 of 32 layers)"
    assert model_sizes.title("llama-1b") == "Llama-3.2-1B"
    for name, model in MODELS.items():
        assert model.all_layers == LAYERS_OF_REAL_MODELS[model.name]
        if "/" in name:  # the number behind the slash divides the layers
            assert model.layers * int(name.split("/")[1]) == model.all_layers
        if found := re.search(r"-(\d+)-layers$", name):
            assert model.layers == int(found[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_labels_of_rows_are_titles_of_models(page):
    """A row such as "| Qwen3-30B-A3B (4 of 48 layers), 1 × 2048 |"."""
    titles = {model_sizes.title(name) for name in MODELS}
    cut = {model.name for model in MODELS.values() if model.layers < model.all_layers}
    for row in re.findall(r"^\| ([^|]+), \d+ × \d+ \|", page.read_text(), re.M):
        if row.split(" (")[0] in cut or re.search(r"\(\d+ (of \d+ )?layers\)", row):
            assert row in titles


def rows_of(page: Path, heading: str) -> dict:
    """The rows of the first table below a heading, by their first cell."""
    text = page.read_text()
    table = text[text.index(f"\n{heading}\n"):].split("\n\n|", 1)[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.split("\n")]
    return {row[0]: row[1:] for row in rows[2:]}


@pytest.mark.parametrize("part, heading, labels", [
    ("forward", "## Forward", ("eager", "eager+patch", "compile", "compile+patch")),
    ("whole", "## Decoding with whole layers",
     ("eager", "compile", None, "eager+whole", "compile+whole"))])
def test_tables_of_whole_models_are_the_recorded_numbers(part, heading, labels):
    folder = ROOT / "docs" / "measurements"
    recorded = json.loads((folder / "h200" / "models.json").read_text())[part]
    rows = rows_of(folder / "models.md", heading)
    assert len(rows) == len(recorded)
    for case, times in recorded.items():
        name, shape = case.split(" ")
        row = rows[f"{model_sizes.title(name)}, {shape.replace('x', ' × ')}"]
        for cell, label in zip(row, labels):
            assert label is None or int(cell) == round(times[label]), (case, label)


def test_every_table_of_results_in_the_readme_names_gpu_day_and_command():
    text = (ROOT / "README.md").read_text()
    results = text[text.index("\n## Results\n"):].split("\n## ")[1]
    tables = re.findall(r"([^\n]+)\n\n(\|[^\n]+(?:\n\|[^\n]+)*)", results)
    assert len(tables) == 3
    for lead, table in tables:
        assert re.search(r"\b[AH]\d00\b", lead)
        assert re.search(r"\b\d+ (to \d+ )?\w+ber 2026\b", lead)
        commands = re.findall(r"`((?:python3|fftune) [^`]+)`", lead + table)
        assert len(commands) == 1 or len(commands) == table.count("\n") - 1
        for command in commands:
            if script := re.search(r"\S+\.py", command):
                assert (ROOT / script[0]).is_file()

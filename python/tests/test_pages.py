"""The pages' numbers of whole models: their labels are those of the configurations that
bench/models.py builds, and a table of results names its GPU, its day and its command."""
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fftune._library import tool_path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "measurements").glob("*.md"))]
sys.path.append(str(ROOT / "bench"))  # behind the tests, whose modules have some of its names

import model_sizes  # noqa: E402

LAYERS_OF_REAL_MODELS = {"Llama-3.2-1B": 16, "Llama-3.1-8B": 32, "Qwen2.5-7B": 28,
                         "Phi-3-mini": 32, "OLMo-2-1B": 16, "Mixtral-8x7B": 32,
                         "Qwen3-8B": 36, "Qwen3-30B-A3B": 48}
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


README = (ROOT / "README.md").read_text()
MEASUREMENTS = ROOT / "docs" / "measurements"
RESULTS = MEASUREMENTS / "results.md"


def read(path: Path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("page, count", [(ROOT / "README.md", 1), (RESULTS, 6)], ids=["README", "results"])
def test_every_table_of_numbers_names_gpu_day_and_command(page, count):
    tables = re.findall(r"([^\n]+)\n\n(\|[^\n]+(?:\n\|[^\n]+)*)", page.read_text())
    measured = [table for table in tables if re.search(r"(?<![\w.])\d+\.\d|\d µs|TFLOP", table[1])]
    assert len(measured) == count
    for lead, table in measured:
        days = re.findall(r"November 2026", lead + table)
        assert re.search(r"\b[AH]\d00\b", lead + table) and days
        commands = re.findall(r"`((?:python3|fftune) [^`]+)`", lead + table)
        rows = table.count("\n") - 1
        assert len(commands) in (1, 2) or len(commands) == rows
        for command in commands:
            if script := re.search(r"\S+\.py", command):
                assert (ROOT / script[0]).is_file()


def cells_of(heading: str) -> list[list[str]]:
    """The rows below the head of the first table behind a heading of the page of results."""
    return [[name, *cells] for name, cells in rows_of(RESULTS, heading).items()]


def test_h100_beside_h200_is_what_was_recorded():
    rows = cells_of("## H100 beside H200")
    h200, h100 = read(MEASUREMENTS / "h200" / "models.json"), MEASUREMENTS / "h100"
    decoding, training, memory, *experts = rows
    for recorded, cells in ((h200["whole"]["llama-1b 16x2048"], decoding[1:4]),
                            (read(h100 / "whole-layers.json")["whole"]["llama-1b 16x2048"],
                             decoding[4:])):
        before, now = recorded["compile"], recorded["compile+whole"]
        assert cells == [f"{before:.0f}", f"{now:.0f}", f"{before / now:.2f}"]
    for recorded, times, sizes in (
            (h200["train"]["llama-1b 4x2048"], training[1:4], memory[1:4]),
            (read(h100 / "training.json")["train"]["llama-1b 4x2048"], training[4:], memory[4:])):
        before, now = recorded["compile"] / 1e3, recorded["compile+patch"] / 1e3
        assert times == [f"{before:.1f}", f"{now:.1f}", f"{before / now:.2f}"]
        before, now = recorded["compile GB"], recorded["compile+patch GB"]
        assert sizes == [f"{before:.1f}", f"{now:.1f}", f"{before / now:.2f}"]
    assert len(experts) == 5
    for device, at in (("nvidia-h200", 2), ("nvidia-h100-80gb-hbm3", 5)):
        records = read(ROOT / "presets" / device / "moe-ffn.json")["records"]
        for row in experts:
            tokens = int(re.search(r"(\d+) tokens?", row[0])[1])
            verdict, = [record["verdict"] for record in records
                        if (record["problem"]["m"], record["problem"]["d"],
                            record["problem"]["experts"], record["problem"]["dtype"]) ==
                        (tokens, 2048, 128, "bf16")]
            assert float(row[at]) == float(f"{verdict['median_us']:.3g}")
            assert row[at + 1] == f"{100 * verdict['roofline_fraction']:.0f}%"


def test_tables_of_an_h100_are_the_recorded_numbers():
    page, folder = MEASUREMENTS / "h100.md", MEASUREMENTS / "h100"
    recorded = read(folder / "whole-layers.json")["whole"]
    rows = rows_of(page, "## Decoding in transformers")
    assert len(rows) == len(recorded)
    for case, times in recorded.items():
        name, shape = case.split(" ")
        *cells, ratio = rows[f"{model_sizes.title(name)}, {shape.replace('x', ' x ')}"]
        labels = ("eager", "compile", "compile+patch", "eager+whole", "compile+whole")
        assert [int(cell) for cell in cells] == [round(times[label]) for label in labels]
        best = min(time for label, time in times.items()
                   if label in ("compile+patch", "eager+whole", "compile+whole"))
        assert float(ratio) == round(times["compile"] / best, 2)
    training = read(folder / "training.json")["train"]["llama-1b 4x2048"]
    text = (MEASUREMENTS / "training.md").read_text()
    for label, title in (("eager", "eager"), ("eager+patch", "eager, patch"),
                         ("compile", "`torch.compile`"), ("compile+patch", "`torch.compile`, patch"),
                         ("eager+patch+recompute", "eager, patch with recompute")):
        assert f"| {title} | {training[label] / 1e3:.1f} | {training[label + ' GB']:.1f} |" in text


def test_untuned_and_tuned_is_what_the_presets_say():
    """For each op, pass and kind of weights the records of presets/, how many are decided, and the
    time of the untuned choice over the winner's: mean, least and most."""
    kinds = {}
    for path in sorted((ROOT / "presets" / "nvidia-h100-80gb-hbm3").glob("*.json")):
        for record in json.loads(path.read_text())["records"]:
            problem = record["problem"]
            words = [f"`{problem['op']}`", "backward" if problem["pass"] == "bwd" else "",
                     problem["dtype"] if problem["dtype"] == "fp8" else "",
                     {"same": ""}.get(problem.get("weights"), problem.get("weights")),
                     f"quantise={problem['quantise']}" if "quantise" in problem else ""]
            kinds.setdefault(", ".join(filter(None, words)), []).append(record["verdict"])
    expected = {}
    for kind, verdicts in kinds.items():
        ratios = [verdict["untuned_ratio"] for verdict in verdicts if "untuned_ratio" in verdict]
        mean = f"{sum(ratios) / len(ratios):.3f}" if ratios else ""
        ends = [f"{min(ratios):.3f}", f"{max(ratios):.3f}"] if len(ratios) > 1 else ["", ""]
        decided = sum(verdict.get("decided", False) for verdict in verdicts)
        expected[kind] = [str(len(verdicts)), str(decided), mean, *ends]
    page = ROOT / "docs" / "measurements" / "h100.md"
    rows = rows_of(page, "## Untuned and tuned")
    table = "\n".join(f"| {kind} | {' | '.join(cells)} |" for kind, cells in expected.items())
    assert rows == expected, f"the table should be\n{table}"
    undecided = sum(int(records) - int(decided) for records, decided, *_ in expected.values())
    total = sum(int(records) for records, *_ in expected.values())
    assert f"{total} records, {total - undecided} of them decided" in page.read_text()


def test_layers_searched_are_what_the_presets_say():
    """For each model of --model that was searched its layer's time, share of the roofline, and the time of the untuned
    choice over the winner's, with 1, 16 and 64 sequences."""
    def key(problem: dict) -> str:
        problem = {"kv-heads": problem["heads"], **problem}  # as many, if left out
        return json.dumps(problem, sort_keys=True)

    records = {key(record["problem"]): record["verdict"] for record in
               read(ROOT / "presets" / "nvidia-h200" / "layer.json")["records"]}
    fftune = tool_path()
    usage = subprocess.run([fftune, "layer", "--help"], capture_output=True, text=True, check=True)
    option = re.search(r"--model NAME (.*?)\n +--", usage.stdout, re.S)[1]
    expected = {}
    for name in "".join(option.partition("given:")[2].split()).split(","):
        cache = "1024" if name == "gpt2" else "2048"  # as many as it has places for
        listed = subprocess.run(
            [fftune, "list", "layer", "--model", name, "--cache", cache, "--batch", "1,16,64",
             "--dtype", "bf16", "--arch", "sm_90a", "--json"],
            capture_output=True, text=True)
        if listed.returncode:  # layers with states
            assert "cache=2048 is of mixer=" in listed.stderr, listed.stderr
            continue
        verdicts = [records.get(key(of["problem"])) for of in json.loads(listed.stdout)["problems"]]
        if not any(verdicts):
            continue
        assert all(verdicts), name
        assert all(verdict["decided"] for verdict in verdicts)
        expected[f"`{name}`"] = [
            f"{v['median_us']:.{max(0, 2 - int(math.log10(v['median_us'])))}f}, "
            f"{100 * v['roofline_fraction']:.0f}%, {v['untuned_ratio']:.3f}" for v in verdicts]
    rows = rows_of(MEASUREMENTS / "layers.md", "## Layers of models, searched")
    table = "\n".join(f"| {name} | {' | '.join(cells)} |" for name, cells in expected.items())
    assert rows == expected, f"the table should be\n{table}"


def test_headline_numbers_of_an_h100_are_those_of_their_sections():
    """Each time of the first table is in the section or page that its row, or one above, links to;
    ratios and shares are those of the times. Rows with a raw file are those of the file."""
    page = MEASUREMENTS / "h100.md"
    text = page.read_text()
    sections = {heading.lower().replace("'", "").replace(" ", "-"): body for heading, body in
                re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.M | re.S)}
    table = sections["headline-numbers"].strip().split("\n\n")[0].split("\n")[2:]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    assert len(rows) > 20
    source = None
    machete = []
    for work, size, ours, peer, ratio, share, day, command in rows:
        if link := re.search(r"\]\(([^)]+)\)", work):
            file, _, anchor = link[1].partition("#")
            source = (page.parent / file).read_text() if file else sections[anchor]
        numbers = source.replace(",", "")
        times = [re.findall(r"\d[\d,.]*", re.sub(r", [\d.]+ GB", "", cell))[-1].replace(",", "")
                 for cell in (ours, peer) if cell]
        for time in times:
            assert re.search(rf"(?<![\d.]){re.escape(time)}(?![\d]|\.\d)", numbers), (work, size, time)
        assert bool(peer) == bool(ratio) and day in ("25", "26", "27", "28") and command
        if ratio:
            assert abs(float(times[1]) / float(times[0]) - float(ratio)) < 0.011, (work, size)
        if share:
            assert re.fullmatch(r"\d\d%", share)
        if peer.startswith("Machete"):
            machete.append([size, times])
    recorded = {row["m"]: row for row in read(MEASUREMENTS / "h100" / "vllm-int4-linears.json")["rows"]
                if (row["k"], row["n"]) == (4096, 28672)}
    for size, times in machete:
        row = recorded[int(size.split(" ")[0].replace(",", ""))]
        assert times == [f"{row[name]:.{1 if row[name] < 100 else 0}f}"
                         for name in ("fftune", "machete")]
    assert len(machete) == 3


def test_served_requests_are_what_was_recorded():
    """The ratios of 512 requests, by the last recorded run without FFTUNE_VLLM."""
    results, page = RESULTS.read_text(), (MEASUREMENTS / "vllm.md").read_text()
    served = {row["model"]: row["own"] / row["mine"]
              for row in read(MEASUREMENTS / "h100" / "vllm-kinds.json")["rows"]
              if row["work"] == "serve" and row["parts"] == "default"}
    for model, ratio in served.items():
        title = next(title for title, name in vllm_titles().items() if name == model)
        assert re.search(rf"^\| {re.escape(title)}, not set.* {ratio:.2f} \|", page, re.M), title
    assert f"| {served['llama-3.1-8b']:.2f} times as fast; target 1.08 |" in results


def test_missed_targets_of_an_h100_are_those_of_the_pages():
    """Each number of a result, percentages apart, is on a page of measurements, rounded or not."""
    pages = "".join(path.read_text() for path in (MEASUREMENTS / "h100.md", MEASUREMENTS / "training.md",
                                                  MEASUREMENTS / "vllm.md", ROOT / "docs" / "distributed.md"))
    number = r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w%]|[.,]\d)"
    known = {float(text.replace(",", "")) for text in re.findall(number, pages)}
    rows = [row for row in cells_of("## Missed targets") if "H100" in row[0]]
    assert len(rows) > 5
    for name, result, _ in rows:
        for text in re.findall(number, result):
            decimals = len(text.partition(".")[2])
            given = float(text.replace(",", ""))
            assert any(round(each, decimals) == given for each in known), (name, text)


def vllm_titles() -> dict[str, str]:
    """The titles of bench/vllm_beside.py's models, by the numbers of layers of its configurations."""
    text = (ROOT / "bench" / "vllm_beside.py").read_text()
    titles = {}
    for name, layers in re.findall(r'^    "([\w.-]+)": sized\(\w+, \d+, \d+, (\d+),', text, re.M):
        real = next(real for real in LAYERS_OF_REAL_MODELS if name.startswith(real.lower()))
        full = LAYERS_OF_REAL_MODELS[real]
        cut = "" if int(layers) == full else f" ({layers} of {full} layers)"
        titles[real + cut] = name
    return titles


def test_vllm_is_what_was_recorded():
    page, titles = (MEASUREMENTS / "vllm.md").read_text(), vllm_titles()

    def recorded(folder):
        return {(row["model"], row["batch"], row["time"]): (row["own"], row["mine"])
                for row in read(MEASUREMENTS / folder / "vllm.json")["rows"] if row["work"] == "decode"}

    def rows(heading):
        table = page[page.index(heading):].split("\n\n")[0].split("\n")[2:]
        return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]

    times, found = recorded("h200"), cells_of("## Inside vLLM")
    assert len(found) == 2
    for title, *ratios in found:
        assert ratios == [f"{own / mine:.2f}" for own, mine in (times[titles[title], batch, "gpu"] for batch in (1, 16, 64))]
    assert len(rows("| model, 2,048 to 2,330 keys")) == 6
    for title, batch, *cells, _ in rows("| model, 2,048 to 2,330 keys"):
        for kind, (own, mine, ratio), digits in (("gpu", cells[:3], 3), ("wall", cells[3:], 2)):
            a, b = times[titles[title], int(batch), kind]
            assert [own, mine, ratio.rstrip(" †")] == [f"{a:.{digits}f}", f"{b:.{digits}f}", f"{a / b:.2f}"]
    times = recorded("h100")
    assert len(rows("| model, 2,048 keys")) == 9
    for title, batch, *cells in rows("| model, 2,048 keys"):
        for kind, given in (("gpu", cells[:3]), ("wall", cells[3:])):
            own, mine = times[titles[title], int(batch), kind]
            assert given == [f"{1e3 * own:,.0f}", f"{1e3 * mine:,.0f}", f"{own / mine:.2f}"]


def test_gains_of_the_readme_are_those_of_other_pages():
    results, models = RESULTS.read_text(), MEASUREMENTS / "models.md"
    forward = [float(row[-1]) for row in cells_of("## Whole models") if "training" not in row[0]]
    assert f"| {min(forward):.2f} to {max(forward):.2f} times" in README
    whole = results[results.index("whole_layers=True)`, on one H200"):].split("\n\n")[1]
    ratios = [float(row.strip("|").split("|")[-1]) for row in whole.split("\n")[2:]]
    assert f"| {min(ratios):.2f} to {max(ratios):.2f} times" in README
    prefill = [row[-1] for row in rows_of(models, "## Prefill with whole layers").values()]
    assert f"512 and 4 × 1,024 tokens, against `torch.compile` | {' and '.join(prefill)} times |" in README
    t5 = re.findall(r"^\| (?:20|128) tokens \|.* ([\d.]+) \|$", models.read_text(), re.M)
    assert f"20 and 128 tokens, against eager PyTorch | {' and '.join(t5)} times |" in README
    vllm = [float(ratio) for row in cells_of("## Inside vLLM") for ratio in row[1:]]
    assert f"| {min(vllm):.2f} to {max(vllm):.2f} times" in README
    training, memory = cells_of("## H100 beside H200")[1:3]
    assert f"| {training[3]} times; peak memory of {memory[2]} GB instead of {memory[1]} |" in README
    errors = re.search(r"relative error is (\S+ to \S+) everywhere, that of the others (\S+ to [\d.e-]+\d)",
                       (MEASUREMENTS / "h200.md").read_text())
    assert f"relative error of {errors[1]}, where PyTorch's has [{errors[2]}]" in README


def test_results_of_one_h100_are_those_of_its_page():
    text = RESULTS.read_text()
    training, memory = cells_of("## H100 beside H200")[1:3]
    assert f"| {training[6]} times; peak memory of {memory[5]} GB instead of {memory[4]} |" in text
    h100 = (MEASUREMENTS / "h100.md").read_text()
    assert "| `linear` | k 4096, n 28672 | 1 | 25.6 | 33.2 | 85.3 | 1.29 | 25.1 | 20.1 |" in h100
    assert f"| 25.1 µs, {20.1 / 25.1:.0%} of the roofline; vLLM's Machete takes 1.29 times as long |" in text
    assert "| Llama-3.1-8B | 1 | 2,048 | 5,318 | 95% |" in h100
    assert "| 5.3 ms, 95% of the roofline |" in text


def test_table_of_ops_is_that_of_the_package():
    """docs/python.md names every function of fftune.ops, with arguments that it has."""
    import inspect

    from fftune import ops

    text = (ROOT / "docs" / "python.md").read_text()
    text = text[text.index("\n## Ops\n"):].split("\n## ")[1]
    table = re.findall(r"^\| (`[^|]+) \|", text, re.M)
    calls = re.findall(r"`(\w+)(?:\(([^`]*)\))?`", "\n".join(table))
    for name, arguments in calls:
        has = inspect.signature(getattr(ops, name)).parameters
        for argument in filter(None, arguments.split(", ")):
            assert argument == "…" or argument.rstrip("=") in has, (name, argument)
    functions = {name for name, value in vars(ops).items()
                 if inspect.isfunction(value) and not name.startswith("_")}
    assert len(functions) > 30
    assert functions == {name for name in functions if f"`{name}`" in text or f"`{name}(" in text}


def test_contributing_has_every_preset_of_cmake():
    presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
    names = {preset["name"] for preset in presets if not preset.get("hidden")}
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = text[text.index("\n## CMake presets\n"):].split("\n## ")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", listed, re.M)) == names


def test_other_pages_repeat_the_ratios_of_whole_layers():
    recorded = read(MEASUREMENTS / "h200" / "models.json")
    ratios = {case: f"{times['compile'] / times['compile+whole']:.2f}"
              for case, times in recorded["whole"].items()}
    layers = (MEASUREMENTS / "layers.md").read_text()
    for case, ratio in ratios.items():
        name, shape = case.split(" ")
        assert f"| {model_sizes.title(name)}, {shape.replace('x', ' × ')} | {ratio} |" in layers
    summary = (MEASUREMENTS / "h200.md").read_text()
    assert (f"| {ratios['llama-1b 1x128']} at 128 keys, {ratios['llama-1b 1x2048']} at 2048 |"
            in summary)
    assert f"one token | `torch.compile` | {ratios['llama-8b/4 1x2048']} |" in summary
    prefill = [f"{times['compile'] / times['eager+whole']:.2f}"
               for times in recorded["prefill"].values()]
    assert f"| {' and '.join(prefill)} |" in summary

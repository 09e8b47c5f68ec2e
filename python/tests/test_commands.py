"""The commands that pages quote: the tool takes them, scripts have their options, tests their cases."""
import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fftune._library import tool_path
from fftune.__main__ import tool_environment

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"),
         *(ROOT / "docs" / "measurements").glob("*.md")]
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
PREFIX = r"(?:[A-Z_]+=\S+ )*"  # variables of the environment
# Commands whose options are read, and whose device is opened before anything else is done.
RUN = ("bench", "check", "list")


def quoted(start: str) -> list[tuple[str, str]]:
    """Page and text of what begins with this, in code spans and at the start of lines of blocks."""
    found = []
    for page in PAGES:
        text = page.read_text()
        calls = re.findall(rf"`{PREFIX}({start}[^`\n]*)`", text)
        for block in re.findall(r"^```.*?^```", text, re.M | re.S):
            block = block.replace("\\\n", " ")
            calls += re.findall(rf"^(?:\$ )?{PREFIX}({start}[^#\n]*)", block, re.M)
        # In a block a description may follow behind two spaces.
        found += [(page.name, re.split(r"\s{2,}| [|>&]+ ", call.strip())[0]) for call in calls]
    return sorted(set(found))


def tool_calls() -> list[tuple[str, str]]:
    return (quoted(r"fftune ")
            + [(page, call.replace("./dev run", "fftune")) for page, call in quoted(r"\./dev run ")])


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """The options of each command, by its help text."""
    page = subprocess.run([tool_path(), "--reference"], check=True, text=True, capture_output=True).stdout
    sections = re.findall(r"^## `([^`]+)`\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    return {name: set(OPTION.findall(text)) for name, text in sections}


def test_commands_of_pages_have_their_options(options):
    calls = tool_calls()
    for page, call in calls:
        words = call.split()
        command = max((name for name in options if words[:len(name.split())] == name.split()),
                      key=len, default="fftune")
        own = options[command]
        if command in ("fftune", "fftune list", "fftune bench"):  # OP, or the op of an example
            own = own.union(*options.values())
        assert not set(OPTION.findall(call)) - own, (page, call)
    assert len(calls) > 100


def complete(call: str, ops: set[str]) -> list[str] | None:
    """The words of a search, `bench`, `check` or `list` that can be run as it is quoted, on a GPU that is
    not there. A capital stands for a number; a command that names a file or leaves words out is none."""
    call = re.sub(r"(?<= )(?:M|B|S|DIM|KV)\b", "64", call.replace(" --out DIR", ""))
    words = call.split()[1:]
    if "--" not in call or "--help" in call or "…" in call or "..." in call or "relu" in words or re.search(r" [A-Z]{2,}\b", call):
        return None
    if words[0] not in RUN and words[0] not in ops or "--weights model" in call:
        return None
    if "--device" in words:
        at = words.index("--device")
        words[at:at + 2] = []
    return [*words, "--device", "cuda:0"]


def test_the_tool_takes_commands_of_pages():
    """It reads a whole command, sizes and words of options too, before it says that there is no GPU."""
    environment = {**tool_environment(), "CUDA_VISIBLE_DEVICES": ""}

    def run(words: list[str]) -> subprocess.CompletedProcess:
        return subprocess.run([str(tool_path()), *words], env=environment, cwd=ROOT, text=True, capture_output=True)

    ops = {op["op"] for op in json.loads(run(["ops", "--json"]).stdout)}
    calls = [(page, call, words) for page, call in tool_calls() if (words := complete(call, ops))]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        results = zip(calls, threads.map(run, [words for *_, words in calls]))
    wrong = [(page, call, done.stderr) for (page, call, _), done in results
             if done.returncode != 3 or "cuda:0" not in done.stderr]
    assert not wrong
    assert len(calls) > 50


def test_commands_of_dev_are_those_of_its_usage():
    usage = (ROOT / "dev").read_text().split("TEXT")[1]
    commands = set(re.findall(r"^  (\w+) ", usage, re.M))
    calls = quoted(r"\./dev ")
    for page, call in calls:
        assert call.split()[1] in commands | {"help"}, (page, call)
    assert len(calls) > 20


def test_scripts_of_pages_have_their_options():
    """An option of a script of bench/ is in its text, or in that of a module beside it that it imports."""
    calls = quoted(r"(?:python3? )?bench/\S+\.py")
    for page, call in calls:
        script = ROOT / re.search(r"bench/\S+\.py", call)[0]
        assert script.is_file(), (page, call)
        text = script.read_text()
        for name in re.findall(r"^(?:from|import) (\w+)", text, re.M):
            module = script.parent / f"{name}.py"
            text += module.read_text() if module.is_file() else ""
        for option in OPTION.findall(call):
            assert f'"{option}"' in text, (page, call, option)
        for option in re.findall(r'add_argument\("(--\w+)"[^\n]*required=True', text):
            assert option in call or not call.startswith("python"), (page, call, option)
    assert len(calls) > 40


def test_cases_of_pages_are_those_of_tests():
    """A test program that a page runs is a folder of tests, and the filter names a tag or a case of it."""
    calls = quoted(r"(?:build/\S+/)?test_\w+ \"")
    wrong = []
    for page, call in calls:
        folder, case = re.search(r"test_(\w+) \"([^\"]+)\"", call).groups()
        sources = f"{folder}/*.cpp" if folder != "OP" else "support/*_cases.hpp"
        texts = "".join(path.read_text() for path in (ROOT / "tests").glob(sources))
        if f'"{case.rstrip("*")}' not in texts and case not in texts:
            wrong.append((page, call))
    assert not wrong
    assert len(calls) > 10

#!/usr/bin/env python3
"""Finds sentences that have to be read twice, by their form, in pages, comments, docstrings and
help texts.

usage: prose.py [--most PERCENT] [--since REVISION] [PATH ...]

Three forms are flagged:
  inverted   begins with "Of", "What", "Whose", "By what" or "By how" and is no question
  of which   hangs a clause on "of which" or "what of"
  long       has more than 40 words; a code span is one word

PATH is a file, or a folder for the tracked files in it; without one, all tracked files are read. With
--since, only sentences on lines that were added after that revision count. The exit code is 1 if more than
PERCENT of the sentences are flagged, and only then are they listed: the gate in `./dev lint`.
"""
import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

MOST_WORDS = 40
HELP_PAGE = "cli.md"  # the output of fftune --reference, which a build has
INVERTED = re.compile(r"(?:Of|What|Whose|By what|By how)\s")
HANGING = re.compile(r"(?<![\"'`])\b(?:of which|what of)\b")  # unless quoted

# A line is (number, column of its text, text). Lines of one comment are adjacent.
Line = tuple[int, int, str]

TOKENS_OF_C = re.compile(r'''
    (?P<raw>R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)")
  | (?P<string>"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+')
  | (?P<line>//[^\n]*)
  | (?P<block>/\*.*?\*/)''', re.VERBOSE | re.DOTALL)

# Two or more spaces after a short term divide a row of a list: "rows     how many rows there are".
GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
# A picture or a formula: box corners, columns between bars, arrows of more than one dash.
PICTURE = re.compile(r"\+-|-\+|--+>|<--+|={3,}|-{4,}|^\||\|$| \| .* \| ")
BULLET = re.compile(r"(?:[*+-]|\d+[.)])\s+")
SENTENCE_END = re.compile(r"(?<=[.;:!?])[\"')]*\s+(?=[\"'(]*[A-Z`])")


@dataclass
class Sentence:
    path: str
    line: int
    last_line: int
    text: str

    def forms(self) -> list[str]:
        found = []
        if INVERTED.match(self.text) and not self.text.endswith("?"):
            found.append("inverted")
        if HANGING.search(self.text):
            found.append("of which")
        if len(self.text.split()) > MOST_WORDS:
            found.append("long")
        return found


# Paragraphs: lists of (line, text)

def laid_out(lines: list[Line]) -> Iterator[list[tuple[int, str]]]:
    """Paragraphs of a comment, a docstring or a help text. A row of a list begins a paragraph of
    its own, which lines continue that are indented as deep as its description; rows of a picture
    are none."""
    paragraph: list[tuple[int, str]] = []
    margin = 0  # the column that the paragraph's next line has at least
    before = -1
    for number, column, text in lines:
        start = column
        ends = not text or PICTURE.search(text) or number > before + 1
        gap = None if ends else last_gap(text)
        bullet = BULLET.match(text)
        if ends or gap or bullet or start < margin or (paragraph and start > margin + 1
                                                       and not in_row):
            if paragraph:
                yield paragraph
            paragraph = []
        before = number
        if not text or PICTURE.search(text):
            continue
        gap = last_gap(text)
        in_row = gap is not None or (bool(paragraph) and in_row)
        if gap is not None:
            margin = start + gap
            text = text[gap:]
        elif bullet:
            margin = start + bullet.end()
            text = text[bullet.end():]
        elif not paragraph:
            margin = start
        paragraph.append((number, text))
    if paragraph:
        yield paragraph


def last_gap(text: str) -> int | None:
    """Where the description of a row begins; a double space after a sentence is no gap."""
    gaps = [match for match in GAP.finditer(text) if text[match.start() - 1] not in ".!?"]
    return gaps[-1].end() if gaps else None


def lines_of_block(text: str, number: int, column: int, marks: str) -> list[Line]:
    """The lines of a block of text, without the marks that each begins with."""
    found = []
    for i, line in enumerate(text.split("\n")):
        bare = line.lstrip(" \t" + marks)
        found.append((number + i, (column if i == 0 else 0) + len(line) - len(bare), bare.rstrip()))
    return found


def comments_of_c(source: str) -> Iterator[list[Line]]:
    found: list[Line] = []
    for match in TOKENS_OF_C.finditer(source):
        if match["line"] is None and match["block"] is None:
            continue
        number = source.count("\n", 0, match.start()) + 1
        begin = source.rfind("\n", 0, match.start()) + 1
        column = match.start() - begin
        if match["block"] is not None:
            yield found
            found = []
            yield lines_of_block(match["block"][:-2], number, column, "/*!<")
            continue
        text = match["line"]
        bare = text.lstrip("/!<").lstrip()
        trailing = bool(source[begin:match.start()].strip())
        # The text of a trailing comment goes on in lines that have nothing else.
        if found and (trailing or found[-1][0] + 1 != number):
            yield found
            found = []
        found.append((number, column + len(text) - len(bare), bare.rstrip()))
    yield found


def comments_of_hash(source: str) -> Iterator[list[Line]]:
    """Shell, CMake, Dockerfiles."""
    found: list[Line] = []
    for number, line in enumerate(source.split("\n"), 1):
        match = re.match(r"\s*#+(?!!)(?P<own>.*)$|.*\s#\s(?P<trailing>[^\"'`$]*)$", line)
        if match is None or match["trailing"] is not None:
            yield found
            found = []
        if match is not None:
            text = match["own"] if match["own"] is not None else match["trailing"]
            found.append((number, len(line) - len(text.lstrip()), text.strip()))
    yield found


def text_of_python(source: str) -> Iterator[list[Line]]:
    """Comments, docstrings, and the texts that argparse prints."""
    found: list[Line] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith("#!"):
            continue
        number, column = token.start
        if found and (token.line[:column].strip() or found[-1][0] + 1 != number):
            yield found
            found = []
        bare = token.string.lstrip("#").lstrip()
        found.append((number, column + len(token.string) - len(bare), bare))
    yield found
    for node in ast.walk(ast.parse(source)):
        texts = []
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr):
                texts.append(first.value)
        elif isinstance(node, ast.Call):
            texts = [each.value for each in node.keywords if each.arg in ("help", "description")]
        for text in texts:
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield lines_of_block(text.value, text.lineno, text.col_offset, "")


def paragraphs_of_page(source: str, is_help: bool) -> Iterator[list[tuple[int, str]]]:
    """A Markdown page: items of lists apart, without tables, headings, HTML and code. The code
    blocks of cli.md are help texts."""
    paragraph: list[tuple[int, str]] = []
    block: list[Line] = []
    code = False
    for number, line in enumerate(source.split("\n"), 1):
        text = line.strip()
        if text.startswith("```"):
            code = not code
            if is_help:
                yield from laid_out(block)
            block, text = [], ""
        elif code:
            block.append((number, len(line) - len(line.lstrip()), text))
            text = ""
        elif text.startswith(("|", "#", "<", "![")):
            text = ""
        bullet = BULLET.match(text)
        if not text or bullet:
            if paragraph:
                yield paragraph
            paragraph = []
        if text:
            paragraph.append((number, text[bullet.end():] if bullet else text))
    if paragraph:
        yield paragraph


def paragraphs(path: str, source: str) -> Iterator[list[tuple[int, str]]]:
    kind = kind_of(path, source)
    if kind == "page":
        yield from paragraphs_of_page(source, path.endswith(HELP_PAGE))
        return
    comments = {"c": comments_of_c, "hash": comments_of_hash, "python": text_of_python}[kind]
    for lines in comments(source):
        yield from laid_out(lines)


def kind_of(path: str, source: str) -> str | None:
    name = Path(path).name
    suffix = Path(path).suffix
    if suffix == ".md":
        return "page"
    if suffix in (".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".inc"):
        return "c"
    if suffix == ".py" or re.match(r"#!.*python", source):
        return "python"
    if suffix in (".sh", ".cmake", ".Dockerfile") or name == "CMakeLists.txt" \
            or re.match(r"#!.*\b(ba)?sh\b", source):
        return "hash"
    return None


# Sentences

def sentences(path: str, source: str) -> Iterator[Sentence]:
    if kind_of(path, source) is None:
        return
    for paragraph in paragraphs(path, source):
        text = ""
        starts = []  # where each line begins in the text
        for number, line in paragraph:
            text += " " if text else ""
            starts.append((len(text), number))
            text += line
        line_at = lambda at: max(number for start, number in starts if start <= at)
        begin = 0
        ends = [match.span() for match in SENTENCE_END.finditer(without_emphasis(text))]
        for end, following in [*ends, (len(text), len(text))]:
            words = bare_words(text[begin:end])
            if len(words.split()) > 2:
                yield Sentence(path, line_at(begin), line_at(max(begin, end - 1)), words)
            begin = following


def without_emphasis(text: str) -> str:
    """As long as the text: emphasis is blank, so that "**Word.** Next" has an end; the inside of
    code spans holds no end."""
    text = re.sub(r"\*\*(?=\s|$)|(?<=\s)\*\*(?=\S)|^\*\*", "  ", text)
    text = re.sub(r"(?<=[.;:!?])  (?=\s)", "  ", text)
    return re.sub(r"`[^`]*`", lambda span: "`" + "x" * (len(span[0]) - 2) + "`", text)


def bare_words(text: str) -> str:
    text = re.sub(r"`[^`]*`", lambda span: span[0].replace(" ", "·"), text)
    text = re.sub(r"\[([^\]]*)\]\([^)\s]*\)", r"\1", text)  # the text of a link
    return " ".join(text.replace("**", "").split())


# The command

def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, errors="replace",
                          check=True).stdout


def added_lines(revision: str) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    lines: set[int] = set()
    for line in git("diff", "-U0", "--no-color", revision).split("\n"):
        if line.startswith("+++ "):
            lines = found.setdefault(line[6:], set())
        elif match := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            first = int(match[1])
            lines.update(range(first, first + int(match[2] or 1)))
    return found


def files(paths: list[str]) -> list[str]:
    """The tracked files, and those that a path names itself."""
    tracked = git("ls-files", "-z", "--", *paths).split("\0")
    return [*tracked, *(path for path in paths if path not in tracked and Path(path).is_file())]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=float, metavar="PERCENT", help="exit with 1 above this share")
    parser.add_argument("--since", metavar="REVISION", help="only lines that were added after it")
    parser.add_argument("paths", nargs="*", metavar="PATH")
    options = parser.parse_args(arguments)
    added = added_lines(options.since) if options.since else None
    count, flagged = 0, []
    help_texts = set()  # every op's help repeats the texts of the options that ops share
    for path in files(options.paths):
        if not path or (added is not None and path not in added) or not Path(path).is_file():
            continue
        try:
            source = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        for sentence in sentences(path, source):
            if added is not None and added[path].isdisjoint(
                    range(sentence.line, sentence.last_line + 1)):
                continue
            if path.endswith(HELP_PAGE):
                if sentence.text in help_texts:
                    continue
                help_texts.add(sentence.text)
            count += 1
            if sentence.forms():
                flagged.append(sentence)
    share = 100 * len(flagged) / max(count, 1)
    too_many = options.most is not None and share > options.most
    for each in flagged if too_many or options.most is None else ():
        print(f"{each.path}:{each.line}: {', '.join(each.forms())}: {each.text}")
    print(f"{len(flagged)} of {count} sentences ({share:.1f}%)")
    if too_many:
        print(f"prose: more than {options.most:g}% are flagged", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

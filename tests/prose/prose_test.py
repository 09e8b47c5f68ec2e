#!/usr/bin/env python3
"""Tests of prose.py: which text counts as a sentence, and which sentences are flagged."""
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import prose

LONG = "The " + "quick " * 39 + "fox."  # 41 words


def found(path: str, source: str) -> list[str]:
    return [sentence.text for sentence in prose.sentences(path, source)]


def flagged(path: str, source: str) -> list[tuple[int, list[str]]]:
    return [(sentence.line, sentence.forms()) for sentence in prose.sentences(path, source)
            if sentence.forms()]


class Forms(unittest.TestCase):
    def test_each_form_is_flagged(self):
        for text, form in (("Of several stages each has one.", "inverted"),
                           ("What needs no memory comes first.", "inverted"),
                           ("Whose rows are sorted is first.", "inverted"),
                           ("By what part it is longer is printed.", "inverted"),
                           ("There are tables of which one is read.", "of which"),
                           (LONG, "long")):
            self.assertEqual(flagged("page.md", text), [(1, [form])], text)

    def test_other_sentences_are_not(self):
        for text in ("What does a record hold, and why?", "Whatever happens, it is written.",
                     "Often nothing is left.", "It does not begin with \"Of\" and has no \"of which\".",
                     "The " + "quick " * 38 + "fox.",  # 40 words
                     "The `" + "a b " * 30 + "` span is one word."):
            self.assertEqual(flagged("page.md", text), [], text)

    def test_a_sentence_within_a_line_is_found_at_its_line(self):
        text = "All is well here. Nothing to see\nhere. What follows is not\nwell at all. It ends so."
        self.assertEqual(flagged("page.md", text), [(2, ["inverted"])])


class Pages(unittest.TestCase):
    def test_code_tables_and_headings_are_not_prose(self):
        page = ("# What is here not\n\n```\nOf code nothing is read.\n```\n"
                "| Of tables neither is. | b |\n\n<p>Of HTML neither is.</p>\n\nA sentence is here.\n")
        self.assertEqual(found("page.md", page), ["A sentence is here."])

    def test_items_of_a_list_are_apart(self):
        page = "* " + "word " * 30 + "\n* " + "word " * 30 + "\n  and on.\n1. The third item.\n"
        self.assertEqual(len(found("page.md", page)), 3)
        self.assertEqual(flagged("page.md", page), [])

    def test_a_label_in_bold_is_a_sentence_of_its_own(self):
        self.assertEqual(found("page.md", "**The two labels.** What comes is flagged."),
                         ["The two labels.", "What comes is flagged."])

    def test_code_blocks_of_the_command_line_page_are_help(self):
        page = ("## Page\n\n```\nOptions:\n  --device TEXT      What is searched goes\n"
                "                     here, as always\n  --out DIR          the folder of it\n```\n")
        self.assertEqual(found("build/ci/cli.md", page),
                         ["What is searched goes here, as always", "the folder of it"])
        self.assertEqual(found("docs/other.md", page), [])


class Comments(unittest.TestCase):
    def test_cpp(self):
        source = ('// Of lines that are\n// joined one is flagged.\n'
                  'auto a = "// Of strings none is."; int b;  // What trails is flagged.\n'
                  'auto c = R"(// Of raw strings none is.)";\n'
                  "/* Whose block is\n * this: flagged. */\n"
                  "auto d = '\"';  // It is a quote, and this is read.\n"
                  "const int big = 1'000'000;  // Of numbers, too, what follows is.\n")
        self.assertEqual([line for line, _ in flagged("a.cpp", source)], [1, 3, 5, 8])

    def test_each_trailing_comment_is_apart(self):
        source = "".join(f"int a{i};  // {'word ' * 15}\n" for i in range(4))
        self.assertEqual(flagged("a.hpp", source), [])
        joined = f"int a;  // {'word ' * 25}\n        // {'word ' * 25}\n"
        self.assertEqual([forms for _, forms in flagged("a.hpp", joined)], [["long"]])

    def test_rows_of_a_list_are_apart_and_pictures_are_none(self):
        source = ("// rows      " + "word " * 25 + "\n//           " + "word " * 10 + "\n"
                  "// columns   " + "word " * 25 + "\n")
        self.assertEqual([len(text.split()) for text in found("a.cu", source)], [35, 25])
        picture = "// +-------+   +------+\n// | Of a  |-->| b is |\n// +-------+   +------+\n"
        self.assertEqual(found("a.cu", picture), [])

    def test_shell_cmake_and_dockerfiles(self):
        script = "#!/bin/sh\n# What is set here stays.\nx=\"# Of no use.\"\nrun  # Of this, too, one.\n"
        self.assertEqual([line for line, _ in flagged("run", script)], [2, 4])
        for path in ("CMakeLists.txt", "a.cmake", "cpu.Dockerfile"):
            self.assertEqual(len(flagged(path, "# Of these the last is first.\n")), 1, path)

    def test_python(self):
        source = ('"""What a module does is here.\n\nOf a second paragraph, too.\n"""\n'
                  '# Whose comment is flagged.\ntext = "# Of a string nothing is."\n'
                  'def f():\n    """Of a function\'s words all."""\n'
                  'parser.add_argument("--a", help="What is printed is read.")\n')
        self.assertEqual(sorted(line for line, _ in flagged("a.py", source)), [1, 3, 5, 8, 9])


class Command(unittest.TestCase):
    """In a repository of its own."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.git("init", "-q")
        self.write("good.md", "One sentence is good. " * 98)
        self.commit()

    def git(self, *words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
                       cwd=self.folder.name, check=True, capture_output=True)

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x")

    def write(self, name, text):
        (Path(self.folder.name) / name).write_text(text)

    def run_prose(self, *arguments):
        return subprocess.run([sys.executable, os.path.abspath(prose.__file__), *arguments],
                              cwd=self.folder.name, capture_output=True, text=True)

    def test_it_fails_above_the_share_and_not_at_it(self):
        self.write("bad.md", "What is bad is one.\n\nWhat is bad is two.\n")
        self.commit()
        done = self.run_prose("--most", "2")
        self.assertEqual((done.returncode, done.stdout.split("\n")[-2]),
                         (0, "2 of 100 sentences (2.0%)"))
        self.write("worse.md", "What is bad is three.\n")
        self.commit()
        done = self.run_prose("--most", "2")
        self.assertEqual(done.returncode, 1)
        self.assertIn("worse.md:1: inverted: What is bad is three.", done.stdout)
        self.assertEqual(self.run_prose("--most", "2", "good.md").returncode, 0)

    def test_only_added_lines_count(self):
        self.write("page.md", "What was there is old.\n\nIt stays as it is.\n")
        self.commit()
        self.write("page.md", "What was there is old.\n\nIt stays as it is.\n\nWhat is new is bad.\n")
        done = self.run_prose("--since", "HEAD")
        self.assertEqual(done.stdout, "page.md:5: inverted: What is new is bad.\n"
                                      "1 of 1 sentences (100.0%)\n")


if __name__ == "__main__":
    unittest.main()

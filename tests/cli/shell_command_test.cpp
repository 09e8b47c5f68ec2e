// Whatever a command is shown with, a shell that is given it runs that and nothing else.
#include "apps/fftune/terminal/text.hpp"

#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "apps/fftune/report/report.hpp"
#include "registry/catalog.hpp"
#include "store/record.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;
using namespace fftune::tool;

namespace {

/// The words that a shell makes of the line, each with a NUL behind it.
std::string words_of(const std::string& line, const std::filesystem::path& folder) {
  const auto script = folder / "script";
  {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(script.c_str(), "wb"),
                                                               std::fclose);
    const std::string text =
        "cd " + folder.string() + "\nfftune() { printf '%s\\0' fftune \"$@\"; }\n" + line + "\n";
    std::fwrite(text.data(), 1, text.size(), file.get());
  }
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(
      ::popen(("bash " + script.string() + " 2>&1").c_str(), "r"), ::pclose);
  std::string words;
  char block[4096];
  while (const std::size_t got = std::fread(block, 1, sizeof block, pipe.get()))
    words.append(block, got);
  return words;
}

}  // namespace

TEST_CASE("a word of any bytes comes out of a shell as it went in") {
  const fftune::testing::TemporaryFolder folder;
  std::mt19937 random(7);
  std::vector<std::string> words{"fftune",
                                 "",
                                 "a b",
                                 "'",
                                 "''",
                                 "it's",
                                 "$(touch OWNED)",
                                 "`id`",
                                 "~",
                                 "=ls",
                                 "a;b",
                                 "#c",
                                 "!x",
                                 "a\nb",
                                 "\x1b[31m",
                                 "\xff\xfe",
                                 "\x01"
                                 "0",
                                 "\\",
                                 "-n",
                                 "*",
                                 "{a,b}",
                                 "é",
                                 "a\tb",
                                 "x\x7f"};
  const std::string letters("abc019 '\"\\$`;&|<>(){}[]*?~#!=%^\n\t\r\x1b\x7f\xc3\xa9\xff-");
  for (int i = 0; i < 400; ++i) {
    std::string word;
    for (auto length = random() % 12; length > 0; --length)
      word += letters[random() % letters.size()];
    words.push_back(word);
  }
  ShellCommand command({words.front()});
  std::string expected = words.front() + '\0';
  for (std::size_t i = 1; i < words.size(); ++i) {
    command.word(words[i]);
    expected += words[i] + '\0';
  }
  const std::string line = command.text();
  CHECK(shown(line) == line);  // nothing in it that a terminal would not show
  CHECK(words_of(line, folder.path()) == expected);
  CHECK(shell_word("presets/a-b_c.d") == "presets/a-b_c.d");
}

TEST_CASE("what a terminal would not show as it is is escaped") {
  for (const char* text :
       {"\x1b", "\n", "\x7f", "\xc2\x9b", "\xe0\x80\x9b", "\xed\xa0\x80", "\xf0\x80\x80\x9b",
        "\xf4\x90\x80\x80", "\xe2\x80\xae", "\xe2\x81\xa6", "\xef\xbf\xbf", "\xff", "\xe2\x80"}) {
    const std::string line = shown(text);
    CAPTURE(line);
    CHECK(line.starts_with("\\x"));
    CHECK(line.size() == 4 * std::string(text).size());
  }
  for (const char* text : {"a", "\xc3\xa9", "\xc2\xb5s", "\xe2\x96\xbc", "\xf0\x9f\x98\x80"})
    CHECK(shown(text) == text);
}

TEST_CASE("the command of a record runs no more than fftune, whatever the record says") {
  const fftune::testing::TemporaryFolder folder;
  Verdict verdict;
  verdict.strategy = "guided; touch OWNED";
  Problem problem{"ffn|touch OWNED", "bwd$(touch OWNED)", DType::bf16, {}, {}};
  problem.sizes["m;touch OWNED"] = 1;
  problem.options["routing"] = "file:x; touch OWNED; #";
  problem.options["`touch OWNED`"] = "--out";
  const std::string line = search_command(problem, verdict, {}, builtin_catalog());
  const std::string words = words_of(line, folder.path());
  CHECK(!std::filesystem::exists(folder.path() / "OWNED"));
  for (const char* word : {"ffn|touch OWNED", "bwd$(touch OWNED)", "file:x; touch OWNED; #",
                           "--`touch OWNED`=--out", "--m;touch OWNED", "guided; touch OWNED"})
    CHECK(words.find(std::string(1, '\0') + word + std::string(1, '\0')) != std::string::npos);
}

// Terminal output: tables that fit, bars with the time left, verdicts, and pages that explain every
// column.
#include "apps/fftune/terminal/text.hpp"

#include <algorithm>
#include <cctype>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "apps/fftune/terminal/progress.hpp"
#include "sandbox.hpp"
#include "support/catch.hpp"
#include "support/json.hpp"

using namespace fftune::testing;
using fftune::tool::display_width;
using nlohmann::json;

namespace {

const std::string preset_path = FFTUNE_SOURCE_DIR "/presets";

Finished in_columns(const Sandbox& sandbox, int columns, const std::string& words) {
  return sandbox.start_by({}, words, {"COLUMNS=" + std::to_string(columns)})->wait();
}

/// Lines that could have been broken between words and were not.
std::vector<std::string> too_wide(const std::string& text, std::size_t columns) {
  std::vector<std::string> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t start = std::min(line.find_first_not_of(' '), line.size());
    const bool one_word = line.find(' ', start) == line.npos;
    if (display_width(line) > columns && !one_word) found.push_back(line);
  }
  return found;
}

/// Times of every record times `factor`, with intervals of 0.1%.
std::string scaled(const std::string& path, double factor) {
  json file = json_of(text_of(path));
  for (json& record : file["records"]) {
    json& verdict = record["verdict"];
    const double us = verdict["median_us"].get<double>() * factor;
    verdict["median_us"] = us;
    verdict["interval_low_us"] = us * 0.999;
    verdict["interval_high_us"] = us * 1.001;
  }
  return file.dump();
}

}  // namespace

TEST_CASE("every page and table fits into the columns that are there") {
  const Sandbox sandbox;
  REQUIRE_FALSE(sandbox.tuned("1").empty());
  const std::vector<std::string> commands{
      "",
      "--help",
      "ffn --help",
      "check --help",
      "ops",
      "devices",
      "list ffn --d 1024 --h 2048 --arch sm_90a",
      "list ffn --d 1001 --h 2048 --m 16 --arch sm_80 --explain",
      "presets show " + preset_path,
      "presets diff presets " + preset_path,
      "ffn --d 32 --h 64 --m 1,2 --device cpu --budget 4s --max-variants 4",
      "bench ffn --d 32 --h 64 --m 1 --device cpu --samples 3 --budget 1s",
      "check --device cpu --presets presets"};
  for (const int columns : {60, 80})
    for (const std::string& words : commands) {
      const Finished done = in_columns(sandbox, columns, words);
      CAPTURE(columns, words, done.err);
      CHECK(done.code == 0);
      CHECK_FALSE(done.out.empty());
      CHECK(too_wide(done.out, static_cast<std::size_t>(columns)) == std::vector<std::string>{});
    }
}

namespace {

/// The text that a terminal shows in the end, and the lines that were wider than it at any time:
/// it would have broken them.
struct Screen {
  Screen(const std::string& printed, std::size_t columns) {
    std::string line;
    for (std::size_t i = 0; i < printed.size(); ++i) {
      if (printed[i] == '\033') {  // a colour, or the end of the line is cleared
        while (i < printed.size() && std::isalpha(static_cast<unsigned char>(printed[i])) == 0) ++i;
      } else if (printed[i] == '\r') {
        if (i + 1 < printed.size() && printed[i + 1] == '\n') continue;
        line.clear();  // as what is printed next clears it
      } else if (printed[i] == '\n') {
        text += line + "\n";
        line.clear();
      } else {
        line += printed[i];
        if (display_width(line) == columns + 1) broken.push_back(line);
      }
    }
    text += line;
  }

  std::string text;
  std::vector<std::string> broken;
};

}  // namespace

TEST_CASE("no line on a terminal is wider than it, of no command and no warning") {
  const Sandbox sandbox;
  REQUIRE_FALSE(sandbox.tuned("1").empty());
  const std::vector<std::string> commands{
      "",
      "--help",
      "ffn --help",
      "list ffn --d 1024 --h 2048 --arch sm_90a",
      "devices",
      "presets show presets " + preset_path,
      "ffn --d 32 --h 64 --m 1,2 --device cpu --budget 0.1s --max-variants 4 -v",
      "ffn --d 32 --h 64 --m 1,2 --device cpu --budget 4s --max-variants 4 --resume -v",
      "bench ffn --d 32 --h 64 --m 1 --device cpu --samples 3 --budget 1s",
      "check --device cpu --presets presets",
      "report presets --out page.html",
      "tune-vllm no/such/model/in/any/folder/that/this/process/could/read --device cpu",
      "ffn --d 32 --h 64 --strategy no-strategy-of-this-name --device cpu",
      "ffn --d 32"};
  for (const int columns : {70, 100})
    for (const std::string& words : commands) {
      const Screen screen(sandbox.on_terminal(columns, words).out,
                          static_cast<std::size_t>(columns));
      CAPTURE(columns, words, screen.text);
      CHECK_FALSE(screen.text.empty());
      CHECK(screen.broken == std::vector<std::string>{});
    }
}

TEST_CASE("words on a terminal are the words of a wide one") {
  const Sandbox sandbox;
  const auto words_of = [](const std::string& text) {
    std::istringstream stream(text);
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    return words;
  };
  for (const char* const words :
       {"ffn --d 32", "ffn --d 32 --h 64 --strategy none --device cpu", "list rmsnorm --bad 7"}) {
    const auto wide = words_of(Screen(sandbox.on_terminal(10000, words).out, 10000).text);
    CHECK(wide.size() > 8);
    CHECK(words_of(Screen(sandbox.on_terminal(40, words).out, 40).text) == wide);
  }
}

TEST_CASE("help has commands before ops, and the ops by what they are for") {
  const Sandbox sandbox;
  const std::string help = sandbox.fftune("--help").out;
  CHECK(help.find("Commands:") < help.find("Ops for "));
  CHECK(help.find("Other ops") == std::string::npos);
  const auto place = [&](const std::string& op) { return help.find("\n  " + op + " "); };
  const auto heading = [&](const std::string& op) {
    REQUIRE(place(op) != std::string::npos);
    const auto begin = help.rfind("\nOps for ", place(op));
    return help.substr(begin + 1, help.find(':', begin) - begin - 1);
  };
  CHECK(heading("ffn") == heading("moe-ffn"));
  CHECK(heading("qkv") == heading("masked-softmax"));
  CHECK(heading("ffn") != heading("qkv"));
  CHECK(place("decode") != std::string::npos);
}

TEST_CASE("help of an op has what governs it first, and one meaning for each option") {
  const Sandbox sandbox;
  for (const char* const op : {"ffn", "linear", "attention", "layer", "cross-entropy"}) {
    const std::string help = sandbox.fftune(std::string(op) + " --help").out;
    CAPTURE(op);
    const auto problem = help.find("\nProblem:\n");
    REQUIRE(problem != std::string::npos);
    CHECK(help.find("--pass WORD") == help.find("--", problem));
    CHECK(help.find("--device NAME") < help.find("--json"));
  }
  const std::string help = sandbox.fftune("ffn --help").out;
  const auto weights = help.find("--weights WORD");
  const std::string own = help.substr(weights, help.find("--group", weights) - weights);
  CHECK(own.find("saved model") == std::string::npos);
}

TEST_CASE("fftune alone prints its help") {
  const Sandbox sandbox;
  const Finished alone = sandbox.fftune("");
  CHECK(alone.code == 0);
  CHECK(alone.err.empty());
  CHECK(alone.out == sandbox.fftune("--help").out);
  CHECK(alone.out.find("Commands:") != std::string::npos);
}

TEST_CASE("list shows what can run, and what cannot only where it is asked why") {
  const Sandbox sandbox;
  const std::string words = "list ffn --d 1001 --h 2048 --m 16 --arch sm_80";
  const std::string brief = sandbox.fftune(words).out;
  CHECK(brief.find("refused: ") == std::string::npos);
  CHECK(brief.find("1001") == std::string::npos);
  CHECK(brief.find("--explain says why") != std::string::npos);
  // Families of other passes are nobody's question.
  CHECK(brief.find("gate_up_sm80") != std::string::npos);
  CHECK(brief.find("d_hidden_sm80") == std::string::npos);
  CHECK(sandbox.fftune(words + " --explain").out.find("refused: ") != std::string::npos);
  // Those that can run come first.
  bool refused = false;
  const json document = json_of(sandbox.fftune(words + " --json").out);
  for (const json& family : document["problems"][0]["families"]) {
    if (!family["refusal"].is_null() && !family["refusal"].get<std::string>().empty())
      refused = true;
    else
      CHECK_FALSE(refused);
  }
  CHECK(refused);
}

TEST_CASE("a bar shows a share") {
  CHECK(fftune::tool::bar_text(0) == "[----------------]");
  CHECK(fftune::tool::bar_text(0.5) == "[########--------]");
  CHECK(fftune::tool::bar_text(7) == "[################]");
  CHECK(fftune::tool::bar_text(-1) == "[----------------]");
}

TEST_CASE("bench and check show a bar; what is left is known after the first step") {
  const Sandbox sandbox;
  REQUIRE_FALSE(sandbox.tuned("1").empty());
  const Finished bench = sandbox.fftune(
      "bench ffn --d 32 --h 64 --m 1,2 --device cpu --samples 3 --budget 1s --progress plain");
  INFO(bench.err);
  CHECK(bench.err.find("bench [----------------] 0/2: ffn/fwd") != std::string::npos);
  CHECK(bench.err.find("1/2, ") != std::string::npos);
  CHECK(bench.err.find(" left: ffn/fwd") != std::string::npos);
  const Finished check = sandbox.fftune("check --device cpu --presets presets --progress plain");
  INFO(check.err);
  CHECK(check.err.find("check [----------------] 0/") != std::string::npos);
  CHECK(check.err.find("checking 1 record, 1 of them this device's: about ") != std::string::npos);
}

TEST_CASE("check --quick takes one problem of a form, and --budget leaves the rest") {
  const Sandbox sandbox;
  REQUIRE_FALSE(sandbox.tuned("1,4").empty());
  const std::string words = "check --device cpu --presets presets --json";
  CHECK(json_of(sandbox.fftune(words).out)["records"].size() == 2);
  const Finished quick = sandbox.fftune(words + " --quick");
  CHECK(quick.code == 0);
  CHECK(json_of(quick.out)["records"].size() == 1);
  const Finished none = sandbox.fftune("check --device cpu --presets presets --budget 0");
  CHECK(none.code == 2);
}

TEST_CASE("a check that ran out of time states no error of what it did not run") {
  const Sandbox sandbox;
  const Finished done =
      sandbox.fftune("check --device cpu --op rmsnorm --budget 1ms --presets " + preset_path);
  INFO(done.out);
  std::istringstream lines(done.out);
  int not_run = 0;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("rmsnorm/") || line.find("not run") == std::string::npos) continue;
    ++not_run;
    CHECK(line.find("m=1,") == std::string::npos);
    CHECK(line.find("0.0e+00") == std::string::npos);
  }
  CHECK(not_run > 0);
}

TEST_CASE("bench --against and presets diff give the verdict of the intervals") {
  const Sandbox sandbox;
  const std::string words = "bench ffn --d 32 --h 64 --m 1 --device cpu --samples 3 --budget 1s";
  const Finished first = sandbox.fftune(words + " --json");
  REQUIRE(first.code == 0);
  json before = json_of(first.out);
  const auto against = [&](double us) {
    json& own = before["problems"][0]["entries"][0];
    own["median_us"] = us;
    own["low_us"] = us * 0.99;
    own["high_us"] = us * 1.01;
    write_text(sandbox.folder() / "before.json", before.dump());
    return sandbox.fftune(words + " --against before.json");
  };
  const Finished faster = against(1e9);
  INFO(faster.out);
  CHECK(faster.code == 0);
  CHECK(faster.out.find("1 FASTER, 0 SLOWER") != std::string::npos);
  const Finished slower = against(1e-3);
  INFO(slower.out);
  CHECK(slower.code == 1);
  CHECK(slower.out.find("▼") != std::string::npos);
  CHECK(slower.out.find("1 SLOWER") != std::string::npos);
  const Finished others = sandbox.fftune(
      "bench ffn --d 32 --h 64 --m 2 --device cpu --samples 3 --budget 1s --against before.json");
  CHECK(others.code == 2);
  CHECK(others.err.find("give the same sizes as then") != std::string::npos);

  for (const auto& [name, factor] : std::vector<std::pair<std::string, double>>{
           {"before", 1}, {"slower", 1.5}, {"faster", 0.5}, {"same", 1.0005}})
    write_text(sandbox.folder() / (name + ".json"),
               scaled(preset_path + "/nvidia-h200/rmsnorm.json", factor));
  const std::string diff = "presets diff --exit-code before.json ";
  CHECK(sandbox.fftune(diff + "slower.json").code == 1);
  CHECK(sandbox.fftune("presets diff before.json slower.json").code == 0);
  CHECK(sandbox.fftune(diff + "faster.json").code == 0);
  const Finished same = sandbox.fftune(diff + "same.json");
  CHECK(same.code == 0);
  CHECK(same.out.find("SAME") != std::string::npos);
}

// The report of a search that found nothing, and the advice after one on a busy machine.
#include "apps/fftune/search/sweep_report.hpp"

#include <string>

#include "apps/fftune/terminal/text_table.hpp"

#include "support/catch.hpp"
#include "support/json.hpp"
#include "tuning/decide/merged_texts.hpp"

using namespace fftune;
using namespace fftune::tool;

namespace {

Outcome failed(const std::string& id, OutcomeKind kind, const std::string& reason) {
  Outcome outcome;
  outcome.id = id;
  outcome.kind = kind;
  outcome.reason = reason;
  return outcome;
}

nlohmann::json parsed(const tool::Json& document) {
  return fftune::testing::json_of(json_line(document));
}

}  // namespace

TEST_CASE("a search in which nothing verified has its first failure and the number of each kind") {
  TuneResult result;
  result.problem = {"ffn", "fwd", DType::f32, {{"m", 1}, {"d", 32}, {"h", 64}}, {{"act", "silu"}}};
  result.outcomes = {failed("cpu_plain/a=1", OutcomeKind::verify_failed, "y[3] is 0.5"),
                     failed("cpu_plain/a=2", OutcomeKind::verify_failed, "y[4] is 0.5"),
                     failed("cpu_plain/a=4", OutcomeKind::compile_failed, "no space")};
  const auto problem = parsed(sweep_json({result})).at(0);
  CHECK(problem.at("record").is_null());
  CHECK(problem.at("first_failure").at("variant") == "cpu_plain/a=1");
  CHECK(problem.at("first_failure").at("kind") == "verify_failed");
  CHECK(problem.at("first_failure").at("reason") == "y[3] is 0.5");
  CHECK(problem.at("outcomes").at("verify_failed") == 2);
  CHECK(problem.at("outcomes").at("compile_failed") == 1);
  CHECK(failure_text(result.outcomes[0]) == "cpu_plain/a=1: verify failed: y[3] is 0.5");
  result.outcomes.clear();
  CHECK(parsed(sweep_json({result})).at(0).at("first_failure").is_null());
}

TEST_CASE("the last line of a search has no bar of a phase that was cut short") {
  Progress progress;
  progress.problem = {"ffn", "fwd", DType::f32, {{"m", 1}}, {}};
  progress.done = 1, progress.total = 4, progress.phase = Phase::combine;
  CHECK(progress_text(progress, "m", 200).find("combine [####") != std::string::npos);
  progress.phase = Phase::done;
  CHECK(progress_text(progress, "m", 200).find("done, 0 compiled") != std::string::npos);
}

TEST_CASE("the status line of a search fits, and keeps the time left") {
  Progress progress;
  progress.problem = {"ffn", "fwd", DType::bf16, {{"m", 4096}}, {}};
  progress.problem_index = 5, progress.problem_count = 17;
  progress.group = "gate_up+down";
  progress.phase = Phase::screen;
  progress.done = 1045, progress.total = 1800, progress.compiled = 1260, progress.failed = 212;
  progress.best_us = 1234, progress.roofline = 0.61, progress.gain_left = 0.034;
  progress.seconds_left = 3724;
  CHECK(progress_text(progress, "m", 300).find("1260 compiled, 212 failed") != std::string::npos);
  for (const double waits : {0.0, 8.0})
    for (std::size_t width : {60, 70, 80, 99, 120}) {
      progress.waits = waits;
      const std::string text = progress_text(progress, "m", width);
      CAPTURE(text);
      CHECK(display_width(text) <= width);
      CHECK(text.find("m=4096 bf16 (6/17)") == 0);
      CHECK(text.ends_with(" left"));
      if (waits > 0 && width >= 80)
        CHECK(text.find("waits for a quiet machine, 8s at most") != std::string::npos);
    }
}

TEST_CASE("a ratio that is not known to a factor of two is printed as its interval") {
  TuneResult result;
  result.problem = {"ffn", "fwd", DType::f32, {{"m", 1}}, {}};
  result.ratios = {{"unfused", {190.72, 1.4, 210}}, {"untuned", {1.31, 1.2, 1.4}}};
  const auto problem = parsed(sweep_json({result})).at(0);
  CHECK(problem.at("ratios").at("unfused").at("high") == 210);
  CHECK(ratio_cell(result.ratios.at("unfused"), 2).text == "1.40-210.00x");
  CHECK(ratio_cell(result.ratios.at("untuned"), 2).text == "1.31x");
  CHECK_FALSE(result.ratios.at("unfused").is_known());
}

TEST_CASE("texts that differ in numbers alone are one, with their ranges") {
  const auto texts = [](const std::vector<std::string>& given) {
    std::vector<std::string> merged;
    for (const MergedText& each : merged_texts(given)) merged.push_back(each.text);
    return merged;
  };
  using Texts = std::vector<std::string>;
  CHECK(texts({}) == Texts{});
  CHECK(texts({"a 2.5% of 3", "b", "a 10% of 3", "a 1.25% of 3"}) ==
        Texts{"a 1.25 to 10% of 3", "b"});
  CHECK(texts({"the same", "the same"}) == Texts{"the same"});
  CHECK(texts({"(7 of 9), 2.50x:", "(8 of 9), 0.70x:"}) == Texts{"(7 to 8 of 9), 0.70 to 2.50x:"});
  // Names, ids and sizes are no numbers.
  const Texts names{"f/rows=2 ran", "f/rows=3 ran", "sm90 is", "sm80 is",
                    "2x3 is",       "2x4 is",       "1.2.3",   "1.2.4"};
  CHECK(texts(names) == names);
}

TEST_CASE("notes of several problems that say the same are one line") {
  const auto result = [](std::int64_t m, DType dtype, std::vector<std::string> notes) {
    TuneResult found;
    found.problem = {"ffn", "fwd", dtype, {{"m", m}, {"d", 32}, {"h", 64}}, {}};
    found.notes = std::move(notes);
    return found;
  };
  using Lines = std::vector<std::string>;
  CHECK(note_lines({result(1, DType::f32, {"undecided: the noise floor of 3.1% is high", "alone"}),
                    result(16, DType::f32, {"undecided: the noise floor of 9.3% is high"})},
                   "m", false) ==
        Lines{"m=1,16: undecided: the noise floor of 3.1 to 9.3% is high", "m=1: alone"});
  CHECK(note_lines({result(1, DType::f32, {"busy", "busy"}), result(1, DType::bf16, {"busy"})}, "m",
                   false) == Lines{"m=1 f32,1 bf16: busy"});
}

TEST_CASE("undecided problems of a busy machine have one line that says what to do") {
  const auto result = [](std::int64_t m, bool decided, double noise, bool disturbed) {
    TuneResult found;
    found.problem = {"ffn", "fwd", DType::f32, {{"m", m}, {"d", 32}, {"h", 64}}, {}};
    found.record.emplace();
    found.record->verdict.decided = decided;
    found.record->verdict.noise = noise;
    if (disturbed) found.record->verdict.disturbances = {"other processes use 1 of its 2 cores"};
    return found;
  };
  CHECK(busy_advice({result(1, true, 0.3, true), result(2, false, 0.001, false)}, "m").empty());
  const std::string advice =
      busy_advice({result(64, false, 0.3, false), result(16, false, 0, true), TuneResult(),
                   result(16, false, 0.3, true), result(1, true, 0, true)},
                  "m");
  CHECK(advice.find("--m 16,64,") != std::string::npos);
  CHECK(advice.find("--wait") != std::string::npos);
}

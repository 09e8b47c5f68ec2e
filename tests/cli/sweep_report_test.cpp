// The report of a search that found nothing, and the advice after one on a busy machine.
#include "apps/fftune/search/sweep_report.hpp"

#include <string>

#include "support/catch.hpp"
#include "support/json.hpp"

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
  CHECK(progress_text(progress, "m").find("combine [####") != std::string::npos);
  progress.phase = Phase::done;
  CHECK(progress_text(progress, "m").find("done, 0 compiled") != std::string::npos);
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

// The report of a search that found nothing.
#include "apps/fftune/search/sweep_report.hpp"

#include <nlohmann/json.hpp>
#include <string>

#include "support/catch.hpp"

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

nlohmann::json parsed(const Json& document) {
  return nlohmann::json::parse(json_line(document));
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

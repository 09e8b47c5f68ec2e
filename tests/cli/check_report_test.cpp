#include "apps/fftune/check/check.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include "apps/fftune/terminal/text.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;
using namespace fftune::tool;

namespace {

Problem problem_at(std::int64_t tokens) {
  return {"ffn", "fwd", DType::f32, {{"m", tokens}, {"d", 32}, {"h", 64}}, {{"act", "silu"}}};
}

CheckOutcome outcome_of(CheckState state, double error, const std::string& reason = "") {
  CheckOutcome outcome;
  outcome.state = state;
  outcome.recipe = "a/b=1";
  outcome.rule = "default";
  outcome.error = error;
  outcome.tolerance = 1e-3;
  outcome.reason = reason;
  return outcome;
}

/// The text that `work` writes to stdout.
template <typename Work>
std::string printed(const Work& work) {
  const fftune::testing::TemporaryFolder folder;
  const auto path = folder.path() / "stdout";
  std::fflush(stdout);
  const int before = ::dup(STDOUT_FILENO);
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT, 0600);
  REQUIRE((before >= 0 && file >= 0 && ::dup2(file, STDOUT_FILENO) >= 0));
  work();
  std::fflush(stdout);
  ::dup2(before, STDOUT_FILENO);
  ::close(file);
  ::close(before);
  std::ifstream text(path);
  return {std::istreambuf_iterator<char>(text), {}};
}

}  // namespace

TEST_CASE("a record's row has the largest share of a tolerance, and the rule at its own tokens") {
  CheckOutcomes outcomes;
  outcomes[problem_at(1)] = outcome_of(CheckState::passed, 9e-4);
  outcomes[problem_at(3)] = outcome_of(CheckState::passed, 4e-3);
  outcomes[problem_at(3)].tolerance = 1e-2;
  outcomes[problem_at(4)] = outcome_of(CheckState::passed, 1e-4);
  outcomes[problem_at(4)].rule = "the preset's";
  outcomes[problem_at(5)] = outcome_of(CheckState::passed, 2e-4);
  const std::string text = printed([&] {
    print_checks({{problem_at(4), {1, 3, 4, 5}, false, ""}}, outcomes, builtin_catalog(),
                 Output({}, Environment()));
  });
  CAPTURE(text);
  CHECK(text.find(error_text(9e-4)) != text.npos);
  CHECK(text.find(error_text(1e-3)) != text.npos);
  CHECK(text.find(error_text(4e-3)) == text.npos);
  CHECK(text.find("the preset's") != text.npos);
  CHECK(text.find("default") == text.npos);
}

TEST_CASE("a record fails with any of its problems") {
  const Catalog& catalog = builtin_catalog();
  const Output output({true, false, false},
                      Environment());  // with --json nothing is printed as text
  const std::vector<CheckedRecord> records{{problem_at(4), {1, 4}, false, ""},
                                           {problem_at(8), {1, 8}, false, ""},
                                           {problem_at(16), {}, false, "no such dtype"},
                                           {problem_at(32), {32}, false, ""}};
  CheckOutcomes outcomes;
  outcomes[problem_at(1)] = outcome_of(CheckState::passed, 1e-4);
  outcomes[problem_at(4)] = outcome_of(CheckState::passed, 2e-4);
  outcomes[problem_at(8)] = outcome_of(CheckState::failed, 1, "wrong");
  outcomes[problem_at(32)] = outcome_of(CheckState::not_run, 0);
  const CheckCounts counts = print_checks(records, outcomes, catalog, output);
  CHECK(counts.passed == 1);
  CHECK(counts.failed == 1);
  CHECK(counts.skipped == 1);
  CHECK(counts.not_run == 1);
}

TEST_CASE("JUnit's counts add up and its text is escaped") {
  const std::vector<CheckedRecord> records{{problem_at(4), {4}, false, ""},
                                           {problem_at(16), {}, false, "no <dtype>"}};
  CheckOutcomes outcomes;
  outcomes[problem_at(4)] =
      outcome_of(CheckState::failed, 1, "a < b & \"c\"\n\x01\xff\xef\xbf\xbf");
  const std::string xml = junit_text("the 'device'", records, outcomes);
  CHECK(xml.find("tests=\"2\" failures=\"1\" errors=\"0\" skipped=\"1\"") != std::string::npos);
  CHECK(xml.find("a &lt; b &amp; &quot;c&quot;\\x0a\\x01\\xff\\xef\\xbf\\xbf\"") !=
        std::string::npos);
  CHECK(xml.find("no &lt;dtype&gt;") != std::string::npos);
  CHECK(xml.find("the &apos;device&apos;") != std::string::npos);
}

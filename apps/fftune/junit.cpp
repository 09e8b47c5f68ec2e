// JUnit's XML, as CI systems read it: https://llg.cubic.org/docs/junit/
#include <fmt/format.h>

#include "apps/fftune/check_report.hpp"
#include "apps/fftune/terminal.hpp"

namespace fftune::tool {

namespace {

/// XML 1.0 text: the five escapes; bytes and characters that it cannot hold as a terminal shows
/// them.
std::string escaped(const std::string& text) {
  std::string result;
  for (const char letter : shown(text)) {
    switch (letter) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\'':
        result += "&apos;";
        break;
      default:
        result += letter;
    }
  }
  return result;
}

std::string case_text(const Problem& problem, const CheckOutcome& outcome) {
  std::string body;
  switch (outcome.state) {
    case CheckState::passed:
      break;
    case CheckState::failed:
      body = fmt::format("      <failure message=\"{}\"/>\n", escaped(outcome.reason));
      break;
    case CheckState::skipped:
    case CheckState::not_run:
      body = fmt::format("      <skipped message=\"{}\"/>\n",
                         escaped(outcome.reason.empty() ? "not run" : outcome.reason));
  }
  if (!outcome.recipe.empty())
    body +=
        fmt::format("      <system-out>{}</system-out>\n",
                    escaped(fmt::format("{}; {}; error {:.3e}, tolerance {:.3e}", outcome.recipe,
                                        outcome.rule, outcome.error, outcome.tolerance)));
  return fmt::format(
      "    <testcase classname=\"check.{}\" name=\"{}\" time=\"{:.3f}\">\n{}    "
      "</testcase>\n",
      escaped(problem.op), escaped(problem.text()), outcome.seconds, body);
}

}  // namespace

std::string junit_text(const std::string& device, const std::vector<CheckedRecord>& records,
                       const CheckOutcomes& outcomes) {
  CheckOutcomes all = outcomes;
  for (const CheckedRecord& record : records) {
    if (record.skipped.empty()) continue;
    CheckOutcome& outcome = all[record.problem];
    outcome.state = CheckState::skipped;
    outcome.reason = record.skipped;
  }
  std::string cases;
  std::size_t failed = 0;
  std::size_t skipped = 0;
  double seconds = 0;
  for (const auto& [problem, outcome] : all) {
    cases += case_text(problem, outcome);
    failed += outcome.state == CheckState::failed ? 1 : 0;
    skipped += outcome.state == CheckState::skipped || outcome.state == CheckState::not_run ? 1 : 0;
    seconds += outcome.seconds;
  }
  return fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n  <testsuite name=\"{}\" "
      "tests=\"{}\" failures=\"{}\" errors=\"0\" skipped=\"{}\" time=\"{:.3f}\">\n{}  "
      "</testsuite>\n</testsuites>\n",
      escaped("fftune check on " + device), all.size(), failed, skipped, seconds, cases);
}

}  // namespace fftune::tool

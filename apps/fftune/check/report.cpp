#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "apps/fftune/check/check.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/lookup.hpp"

namespace fftune::tool {

namespace {

struct Row {
  CheckState state = CheckState::passed;
  double error = 0;
  double tolerance = 0;
  std::vector<std::int64_t> checked;  // numbers of tokens: neither skipped nor not run
  std::string rule;                   // at the record's own tokens, or the most that were checked
  std::string reason;                 // of the first that did not pass
};

bool was_checked(const CheckOutcome& outcome) {
  return outcome.state == CheckState::passed || outcome.state == CheckState::failed;
}

Row row_of(const CheckedRecord& record, const CheckOutcomes& outcomes,
           const std::string& token_size) {
  Row row;
  const std::int64_t own = record.problem.size(token_size);
  for (const std::int64_t count : record.tokens) {
    const CheckOutcome& outcome = outcomes.at(record.problem.with_size(token_size, count));
    if (count == own || row.rule.empty() || record.capped) row.rule = outcome.rule;
    if (was_checked(outcome)) row.checked.push_back(count);
    // The largest share of its own tolerance is the one to show.
    if (outcome.error * row.tolerance >= row.error * outcome.tolerance) {
      row.error = outcome.error;
      row.tolerance = outcome.tolerance;
    }
    const bool worse = outcome.state == CheckState::failed ||
                       (row.state == CheckState::passed && outcome.state != CheckState::passed);
    if (!worse || row.state == CheckState::failed) continue;
    row.state = outcome.state;
    row.reason =
        outcome.reason.empty() ? "" : fmt::format("{}={}: {}", token_size, count, outcome.reason);
  }
  return row;
}

void count(CheckState state, CheckCounts& counts) {
  switch (state) {
    case CheckState::passed:
      ++counts.passed;
      return;
    case CheckState::failed:
      ++counts.failed;
      return;
    case CheckState::skipped:
      ++counts.skipped;
      return;
    case CheckState::not_run:
      ++counts.not_run;
  }
}

void print_each(const CheckOutcomes& outcomes, const Output& output) {
  TextTable table({{"problem"},
                   {"error", Align::right},
                   {"tolerance", Align::right},
                   {""},
                   {"recipe"},
                   {"rule"}});
  for (const auto& [problem, outcome] : outcomes)
    table.row({problem.text(),
               was_checked(outcome) ? error_text(outcome.error) : "-",
               was_checked(outcome) ? error_text(outcome.tolerance) : "-",
               {state_name(outcome.state), state_style(outcome.state)},
               outcome.recipe,
               outcome.rule});
  output.line("");
  output.table(table);
}

}  // namespace

std::string state_name(CheckState state) {
  using enum CheckState;
  return value_of<CheckState, std::string>(
      state, {{passed, "passed"}, {failed, "FAILED"}, {skipped, "skipped"}, {not_run, "not run"}});
}

Style state_style(CheckState state) {
  if (state == CheckState::passed) return Style::good;
  return state == CheckState::failed ? Style::bad : Style::caution;
}

CheckCounts print_checks(const std::vector<CheckedRecord>& records, const CheckOutcomes& outcomes,
                         const Catalog& catalog, const Output& output) {
  CheckCounts counts;
  TextTable table({{"record"},
                   {"checked at"},
                   {"error", Align::right},
                   {"tolerance", Align::right},
                   {""},
                   {"loaded here by, or why not"}});
  for (const CheckedRecord& record : records) {
    if (!record.skipped.empty()) {
      ++counts.skipped;
      table.row(
          {record.problem.text(), "-", "-", "-", {"skipped", Style::caution}, record.skipped});
      continue;
    }
    const std::string tokens(catalog.op(record.problem.op).token_size());
    const Row row = row_of(record, outcomes, tokens);
    count(row.state, counts);
    const bool any = !row.checked.empty();
    table.row({record.problem.text(),
               any ? fmt::format("{}={}{}", tokens, fmt::join(row.checked, ","),
                                 record.capped ? " (capped)" : "")
                   : "-",
               any ? error_text(row.error) : "-",
               any ? error_text(row.tolerance) : "-",
               {state_name(row.state), state_style(row.state)},
               row.reason.empty() ? row.rule : row.reason});
  }
  output.table(table);
  if (output.verbose()) print_each(outcomes, output);
  output.line(fmt::format("{}: {} passed, {} failed, {} skipped{}",
                          counted(records.size(), "record"), counts.passed, counts.failed,
                          counts.skipped,
                          counts.not_run == 0 ? "" : fmt::format(", {} not run", counts.not_run)));
  return counts;
}

Json checks_json(const std::vector<CheckedRecord>& records, const CheckOutcomes& outcomes) {
  Json json = {{"records", Json::Array()}, {"checks", Json::Array()}};
  for (const CheckedRecord& record : records)
    json["records"].push_back({{"problem", to_json(record.problem)},
                               {"tokens", record.tokens},
                               {"capped", record.capped},
                               {"skipped", record.skipped}});
  for (const auto& [problem, outcome] : outcomes)
    json["checks"].push_back({{"problem", to_json(problem)},
                              {"state", state_name(outcome.state)},
                              {"recipe", outcome.recipe},
                              {"rule", outcome.rule},
                              {"error", outcome.error},
                              {"tolerance", outcome.tolerance},
                              {"reason", outcome.reason},
                              {"seconds", outcome.seconds}});
  return json;
}

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

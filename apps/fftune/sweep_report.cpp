#include "apps/fftune/sweep_report.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <map>
#include <utility>

#include "apps/fftune/numbers.hpp"
#include "store/preset_file.hpp"

namespace fftune::tool {

namespace {

std::string ties_text(const StageRecord& stage) {
  return fmt::format("{}/{}", stage.ties.size(), stage.measured);
}

void add_record(TextTable& table, const std::string& tokens, const std::string& dtype,
                const PresetRecord& record) {
  const Verdict& verdict = record.verdict;
  bool first = true;
  for (const StageRecord& stage : record.stages) {
    const std::string name = fmt::format("{}", fmt::join(stage.stages, "+"));
    if (std::exchange(first, false))
      table.row({tokens,
                 dtype,
                 {microseconds_text(verdict.median_us), Style::bold},
                 limit_share_text(verdict.roofline_fraction),
                 verdict.limit,
                 verdict.unfused_ratio > 0 ? ratio_text(verdict.unfused_ratio) : "-",
                 name,
                 microseconds_text(stage.median_us),
                 ties_text(stage),
                 stage.variant.id()});
    else
      table.row({"", "", "", "", "", "", name, microseconds_text(stage.median_us), ties_text(stage),
                 stage.variant.id()});
  }
}

}  // namespace

bool was_refused(const TuneResult& result) {
  return !result.record && result.outcomes.empty() && !result.cancelled;
}

void print_sweep(const std::vector<TuneResult>& results, const std::string& token_size,
                 const Output& output) {
  TextTable table({{token_size, Align::right},
                   {"dtype"},
                   {"median µs", Align::right},
                   {"roofline", Align::right},
                   {"limit"},
                   {"vs unfused", Align::right},
                   {"stage"},
                   {"µs", Align::right},
                   {"ties/ran", Align::right},
                   {"winner"}});
  for (const TuneResult& result : results) {
    const std::string tokens = fmt::format("{}", result.problem.size(token_size));
    const std::string dtype(dtype_name(result.problem.dtype));
    if (result.record)
      add_record(table, tokens, dtype, *result.record);
    else
      table.row({tokens,
                 dtype,
                 "-",
                 "-",
                 "-",
                 "-",
                 "-",
                 "-",
                 "-",
                 {result.stopped.empty() ? "nothing worked" : result.stopped, Style::bad}});
  }
  output.table(table);
  if (output.quiet()) return;
  for (const TuneResult& result : results) {
    const auto say = [&](const std::string& text) {
      output.line(fmt::format("{}={}: {}", token_size, result.problem.size(token_size), text));
    };
    if (result.record && !result.stopped.empty()) say("ended early: " + result.stopped);
    for (const std::string& note : result.notes) say(note);
  }
}

Json sweep_json(const std::vector<TuneResult>& results) {
  Json problems = Json::array();
  for (const TuneResult& result : results) {
    std::map<std::string, int> kinds;
    for (const Outcome& outcome : result.outcomes)
      ++kinds[std::string(outcome_kind_name(outcome.kind))];
    Json baselines = Json::array();
    for (const Timed& baseline : result.baselines)
      baselines.push_back({{"name", baseline.id}, {"median_us", baseline.median_us}});
    problems.push_back(
        {{"problem", to_json(result.problem)},
         {"record", result.record ? Json::parse(record_json(*result.record)) : Json()},
         {"outcomes", kinds},
         {"baselines", baselines},
         {"notes", result.notes},
         {"stopped", result.stopped},
         {"cancelled", result.cancelled},
         {"device_lost", result.device_lost},
         {"seconds", result.seconds}});
  }
  return problems;
}

}  // namespace fftune::tool

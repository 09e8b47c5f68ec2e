#include "apps/fftune/search/sweep_report.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "apps/fftune/terminal/progress.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "store/preset_file.hpp"
#include "tuning/decide/merged_texts.hpp"

namespace fftune::tool {

std::string progress_text(const Progress& progress, const std::string& token_size,
                          std::size_t width) {
  // Behind the place in the sweep, by importance: what does not fit any more is left out.
  struct Part {
    int importance;
    std::string text;
  };
  std::vector<Part> parts;
  const auto add = [&](int importance, std::string text) {
    parts.push_back({importance, std::move(text)});
  };
  add(9, fmt::format("{}={} {} ({}/{})", token_size, progress.problem.size(token_size),
                     dtype_name(progress.problem.dtype), progress.problem_index + 1,
                     progress.problem_count));
  if (!progress.group.empty()) add(6, " " + progress.group);
  add(8, fmt::format(" {}", phase_name(progress.phase)));
  // In the end the last phase's bar, which may have been cut short, says nothing.
  if (progress.total > 0 && progress.phase != Phase::done)
    add(3, fmt::format(" {} {}/{}", bar_text(static_cast<double>(progress.done) / progress.total),
                       progress.done, progress.total));
  add(1, fmt::format(", {} compiled, {} failed", progress.compiled, progress.failed));
  if (progress.best_us > 0)
    add(5, fmt::format(", best {} µs", microseconds_text(progress.best_us)));
  if (progress.best_us > 0 && progress.roofline > 0)
    add(2, fmt::format(" (roofline {})", limit_share_text(progress.roofline)));
  if (progress.gain_left >= 0)
    add(4, fmt::format(", at most {} to gain", percent_text(progress.gain_left)));
  if (progress.waits > 0)
    add(7, fmt::format(", waits for a quiet machine, {} at most", seconds_text(progress.waits)));
  if (progress.seconds_left > 0)
    add(8, fmt::format(", {} left", seconds_text(progress.seconds_left)));
  const auto whole = [&] {
    std::string text;
    for (const Part& part : parts) text += part.text;
    return text;
  };
  while (parts.size() > 1 && display_width(whole()) > width)
    parts.erase(std::min_element(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
      return a.importance < b.importance;
    }));
  return whole();
}

void SweepProgress::update(const Progress& progress) {
  const std::string step =
      fmt::format("{}/{}/{}", progress.problem_index, progress.group, phase_name(progress.phase));
  const bool new_step = told_.insert(step).second;
  if (!new_step && !line_.due()) return;
  line_.update(progress_text(progress, token_size_, line_.width()), new_step);
}

namespace {

std::string ties_text(const StageRecord& stage) {
  return fmt::format("{}/{}", stage.ties.size(), stage.measured);
}

void add_record(TextTable& table, const std::string& tokens, const std::string& dtype,
                const TuneResult& result) {
  const PresetRecord& record = *result.record;
  const Verdict& verdict = record.verdict;
  const auto ratio = [&](const char* name, double recorded) {
    const auto measured = result.ratios.find(name);
    return measured == result.ratios.end() ? ratio_cell(recorded) : ratio_cell(measured->second, 2);
  };
  bool first = true;
  for (const StageRecord& stage : record.stages) {
    const std::string name = fmt::format("{}", fmt::join(stage.stages, "+"));
    if (std::exchange(first, false))
      table.row({tokens,
                 dtype,
                 {microseconds_text(verdict.median_us), Style::bold},
                 limit_share_text(verdict.roofline_fraction),
                 verdict.limit,
                 ratio("unfused", verdict.unfused_ratio),
                 ratio("untuned", verdict.untuned_ratio.value_or(0)),
                 name,
                 microseconds_text(stage.median_us),
                 ties_text(stage),
                 stage.variant.id()});
    else
      table.row({"", "", "", "", "", "", "", name, microseconds_text(stage.median_us),
                 ties_text(stage), stage.variant.id()});
  }
}

/// The reason why a problem has no record.
std::string why_nothing(const TuneResult& result) {
  const auto failure = first_failure(result.outcomes);
  if (!failure) return result.stopped.empty() ? "nothing worked" : result.stopped;
  return fmt::format("{}: {}", result.stopped.empty() ? "nothing worked" : result.stopped,
                     failure_text(*failure));
}

std::map<std::string, int> kinds_of(const TuneResult& result) {
  std::map<std::string, int> kinds;
  for (const Outcome& outcome : result.outcomes)
    ++kinds[std::string(outcome_kind_name(outcome.kind))];
  return kinds;
}

/// Each kind of failure with its number and its first reason.
void say_failures(const TuneResult& result, const std::function<void(const std::string&)>& say) {
  const auto kinds = kinds_of(result);
  std::set<OutcomeKind> told;
  for (const Outcome& outcome : result.outcomes)
    if (outcome.failed() && told.insert(outcome.kind).second)
      say(fmt::format("{} of {} variants, such as {}",
                      kinds.at(std::string(outcome_kind_name(outcome.kind))),
                      result.outcomes.size(), failure_text(outcome)));
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
                   {"vs untuned", Align::right},
                   {"stage"},
                   {"µs", Align::right},
                   {"ties/ran", Align::right},
                   {"winner"}});
  for (const TuneResult& result : results) {
    const std::string tokens = fmt::format("{}", result.problem.size(token_size));
    const std::string dtype(dtype_name(result.problem.dtype));
    if (result.record)
      add_record(table, tokens, dtype, result);
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
                 "-",
                 {why_nothing(result), Style::bad}});
  }
  output.table(table);
  if (output.quiet()) return;
  for (const std::string& line : note_lines(results, token_size, output.verbose()))
    output.line(line);
  if (const std::string advice = busy_advice(results, token_size); !advice.empty())
    output.line(advice);
}

std::vector<std::string> note_lines(const std::vector<TuneResult>& results,
                                    const std::string& token_size, bool verbose) {
  std::vector<std::string> notes;
  std::vector<const TuneResult*> subjects;  // of the notes
  for (const TuneResult& result : results) {
    const auto say = [&](const std::string& text) {
      notes.push_back(text);
      subjects.push_back(&result);
    };
    if (result.record && !result.stopped.empty()) say("ended early: " + result.stopped);
    for (const std::string& note : result.notes) say(note);
    if (verbose) say_failures(result, say);
  }
  std::set<DType> dtypes;
  for (const TuneResult& result : results) dtypes.insert(result.problem.dtype);
  std::vector<std::string> lines;
  for (const MergedText& note : merged_texts(notes)) {
    std::vector<std::string> names;
    for (const std::size_t i : note.from) {
      const Problem& problem = subjects[i]->problem;
      std::string name = fmt::format("{}", problem.size(token_size));
      if (dtypes.size() > 1) name += fmt::format(" {}", dtype_name(problem.dtype));
      if (std::find(names.begin(), names.end(), name) == names.end())
        names.push_back(std::move(name));
    }
    lines.push_back(fmt::format("{}={}: {}", token_size, fmt::join(names, ","), note.text));
  }
  return lines;
}

std::string busy_advice(const std::vector<TuneResult>& results, const std::string& token_size) {
  std::set<std::int64_t> busy;
  for (const TuneResult& result : results) {
    if (!result.record || result.record->verdict.decided.value_or(true)) continue;
    const Verdict& verdict = result.record->verdict;
    if (!verdict.disturbances.empty() || verdict.noise > TuneOptions().tie_band)
      busy.insert(result.problem.size(token_size));
  }
  if (busy.empty()) return "";
  return fmt::format(
      "the machine was busy: end what else runs, then search again with --{} {}, or wait longer "
      "for "
      "a quiet moment with --wait 60s",
      token_size, fmt::join(busy, ","));
}

Json sweep_json(const std::vector<TuneResult>& results) {
  Json problems = Json::Array();
  for (const TuneResult& result : results) {
    const auto failure = first_failure(result.outcomes);
    Json baselines = Json::Array();
    for (const Timed& baseline : result.baselines)
      baselines.push_back({{"name", baseline.id}, {"median_us", baseline.median_us}});
    Json ratios = Json::Object();
    for (const auto& [name, ratio] : result.ratios)
      ratios[name] = {{"median", ratio.median}, {"low", ratio.low}, {"high", ratio.high}};
    problems.push_back({{"problem", to_json(result.problem)},
                        {"record", result.record ? to_json(*result.record) : Json()},
                        {"outcomes", kinds_of(result)},
                        {"first_failure", failure ? Json{{"variant", failure->id},
                                                         {"kind", outcome_kind_name(failure->kind)},
                                                         {"reason", failure->reason}}
                                                  : Json()},
                        {"baselines", baselines},
                        {"ratios", ratios},
                        {"notes", result.notes},
                        {"stopped", result.stopped},
                        {"cancelled", result.cancelled},
                        {"device_lost", result.device_lost},
                        {"seconds", result.seconds},
                        {"prepared_seconds", result.prepared_seconds}});
  }
  return problems;
}

}  // namespace fftune::tool

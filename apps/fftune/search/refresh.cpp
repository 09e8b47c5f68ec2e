// fftune refresh: times the variants of stale records again, and keeps or replaces their winners.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/device_option.hpp"
#include "apps/fftune/command_line/problem_options.hpp"
#include "apps/fftune/command_line/progress_option.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/presets/records.hpp"
#include "apps/fftune/search/sweep_device.hpp"
#include "apps/fftune/search/sweep_report.hpp"
#include "apps/fftune/search/tune.hpp"
#include "apps/fftune/terminal/interrupt.hpp"
#include "apps/fftune/terminal/json.hpp"
#include "apps/fftune/terminal/progress.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "tuning/journal/outcome.hpp"
#include "tuning/journal/quarantine.hpp"
#include "tuning/log.hpp"
#include "tuning/tuner.hpp"

namespace fftune::tool {
namespace {

struct RefreshOptions {
  ProblemFilter filter;
  SearchOptions search;
  bool all = false;
};

/// A record that is to be looked at again.
struct Stale {
  PresetRecord record;
  std::string reason;
  std::string refusal;  // why it cannot be; empty if it can
};

std::string refusal_of(const Op& op, const Problem& problem, DeviceKind kind) {
  if (needs_group(problem)) return "link=" + needs_group_words(problem);
  return fault_of_recorded(op, problem, kind);
}

std::vector<Stale> stale_records(const Op& op, const RefreshOptions& options,
                                 const PresetDevice& device, const DeviceFacts& facts,
                                 const Session& session) {
  std::vector<Stale> found;
  for (const auto& [compared, record] : own_records(options.search.out, device, op)) {
    if (!admits(options.filter, record.problem)) continue;
    const auto changes = changes_since(record, session.catalog, facts);
    if (changes.empty() && !options.all) continue;
    found.push_back({record,
                     changes.empty() ? "asked for" : fmt::format("{}", fmt::join(changes, ", ")),
                     refusal_of(op, record.problem, facts.kind)});
  }
  return found;
}

struct Refreshed {
  Stale stale;
  TuneResult result;
};

std::string verdict_text(const Refreshed& outcome) {
  if (!outcome.result.record) {
    if (!outcome.result.stopped.empty()) return outcome.result.stopped;
    const auto failure = first_failure(outcome.result.outcomes);
    return fmt::format("nothing of it works: search anew{}",
                       failure ? fmt::format("; {}", failure_text(*failure)) : "");
  }
  const Recipe now = outcome.result.record->recipe();
  return same_variants(outcome.stale.record.recipe(), now) ? "kept"
                                                           : "demoted for " + recipe_text(now);
}

void print(const std::vector<Refreshed>& outcomes, const Output& output) {
  TextTable table({{"problem"},
                   {"before µs", Align::right},
                   {"now µs", Align::right},
                   {"winner"},
                   {"because of"}});
  for (const Refreshed& outcome : outcomes) {
    const auto& record = outcome.result.record;
    table.row({outcome.stale.record.problem.text(),
               microseconds_text(outcome.stale.record.verdict.median_us),
               record ? microseconds_text(record->verdict.median_us) : "-",
               {verdict_text(outcome), record ? Style::plain : Style::bad},
               outcome.stale.reason});
  }
  output.table(table);
}

Json outcomes_json(const std::vector<Refreshed>& outcomes) {
  Json all = Json::Array();
  for (const Refreshed& outcome : outcomes)
    all.push_back({{"problem", to_json(outcome.stale.record.problem)},
                   {"because", outcome.stale.reason},
                   {"before", to_json(outcome.stale.record)},
                   {"now", outcome.result.record ? to_json(*outcome.result.record) : Json()},
                   {"verdict", verdict_text(outcome)},
                   {"seconds", outcome.result.seconds}});
  return all;
}

int run(const RefreshOptions& options, const Session& session) {
  TuneOptions tuning = options.search.tuning;
  // Few are left, and all of them were good once: none is screened out.
  tuning.strategy = "exhaustive";
  if (std::error_code error; !std::filesystem::is_directory(options.search.out, error))
    throw Error(ErrorKind::invalid_input,
                fmt::format("--out {} is not a folder: give one that holds <device>/<op>.json",
                            options.search.out));
  const std::string name = device_named(options.search.device, session.environment);
  StatusLine status(progress_mode(options.search.progress, session.output));
  const Interrupt interrupt;
  tuning.cancel = &interrupt.requested();
  SweepDevice device({name}, {.seed = tuning.seed, .cancel = tuning.cancel},
                     options.search.in_process, session);
  const DeviceFacts& facts = device.evaluator().facts();
  const PresetDevice preset = preset_device(facts);
  Quarantine quarantine(session.environment.state_folder, facts);
  tuning.quarantine = &quarantine;

  Recorder recorder(
      session.catalog, options.search.out, preset,
      {.strict = options.search.strict, .keep_undecided = options.search.keep_undecided},
      lock_wait(&interrupt.requested()));
  std::vector<Refreshed> outcomes;
  // All files before any measurement: one of them may be damaged.
  std::vector<std::pair<const Op*, std::vector<Stale>>> of_ops;
  for (const Op* op : session.catalog.ops) {
    auto stale = stale_records(*op, options, preset, facts, session);
    if (stale.empty()) continue;
    require_out(options.search.out, preset, std::string(op->name()),
                lock_wait(&interrupt.requested()));
    of_ops.emplace_back(op, std::move(stale));
  }
  for (const auto& [op, stale] : of_ops) {
    if (interrupt.requested()) break;
    SweepProgress progress(status, std::string(op->token_size()));
    tuning.progress = &progress;
    std::vector<const Stale*> asked;
    std::vector<Problem> problems;
    for (const Stale& each : stale) {
      if (!each.refusal.empty()) {
        TuneResult refused;
        refused.stopped = each.refusal;
        outcomes.push_back({each, std::move(refused)});
        continue;
      }
      asked.push_back(&each);
      problems.push_back(each.record.problem);
      tuning.on_record[each.record.problem] = {each.record.recipe()};
      tuning.only[each.record.problem] = refreshed_variants(each.record, session.catalog, facts);
    }
    std::size_t next = 0;
    tune_all(session.catalog, device.evaluator(), problems, tuning, [&](TuneResult result) {
      const Stale& before = *asked[next++];
      if (result.record) {
        result.record = refreshed(*result.record, before.record);
        recorder.write(result);
      }
      outcomes.push_back({before, std::move(result)});
    });
  }
  status.clear();
  recorder.finish();

  session.output.heading(fmt::format("refresh on {} ({})", name, facts.name));
  if (of_ops.empty())
    session.output.line(fmt::format("no record of it in {} is stale", options.search.out));
  else
    print(outcomes, session.output);
  for (const std::string& file : recorder.files()) session.output.line("wrote " + file);
  session.output.document(
      {{"device", name}, {"records", outcomes_json(outcomes)}, {"files", recorder.files()}});
  if (!device.evaluator().lost().empty()) {
    logging::error("{}", device.evaluator().lost());
    return exit_lacking;
  }
  if (interrupt.requested()) return exit_interrupted;
  const bool good = std::all_of(outcomes.begin(), outcomes.end(), [](const Refreshed& outcome) {
    return outcome.result.record.has_value();
  });
  return std::max(good ? exit_good : exit_check_failed, recorder.code());
}

}  // namespace

void add_refresh(CommandLine& line) {
  auto [command, options] = line.add<RefreshOptions>(
      line.root(), "refresh",
      "time the variants of a device's stale records again: winners, ties and runners-up; a "
      "record is stale if the kernel's sources, the driver or the toolkit have changed",
      run);
  add_device_option(command, options.search.device, false);
  command.flag("--all", options.all, "records that are not stale as well");
  command.option("--out DIR", options.search.out, "folder of presets that is read and written");
  command.option("--seed N", seed(options.search.tuning.seed), "seed of the data");
  add_disturbance_options(command, options.search, default_group, false);
  command.flag("--in-process", options.search.in_process, "run variants in this process");
  add_progress_option(command, options.search.progress);
  add_problem_filter(command, line.catalog().ops, options.filter);
}

}  // namespace fftune::tool

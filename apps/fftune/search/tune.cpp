// fftune OP: searches this device for the op's fastest variants, and writes presets.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/device_option.hpp"
#include "apps/fftune/command_line/problem_options.hpp"
#include "apps/fftune/command_line/progress_option.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/command_line/values.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/presets/records.hpp"
#include "apps/fftune/saved/weight_options.hpp"
#include "apps/fftune/search/sweep_device.hpp"
#include "apps/fftune/search/sweep_report.hpp"
#include "apps/fftune/search/tune.hpp"
#include "apps/fftune/terminal/interrupt.hpp"
#include "apps/fftune/terminal/progress.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "runtime/choice.hpp"
#include "tuning/journal/journal.hpp"
#include "tuning/journal/quarantine.hpp"
#include "tuning/log.hpp"
#include "tuning/strategies/strategy.hpp"
#include "tuning/tuner.hpp"

namespace fftune::tool {
namespace {

struct OpOptions {
  ProblemOptions problem;
  SavedValues weights;
  SearchOptions search;
};

struct Sweep {
  std::string device;
  std::vector<TuneResult> results;
  std::set<std::string> files;
  std::string journal;
  int code = exit_good;  // of what was written
};

/// The spaces of a CPU are small enough to try all of them.
std::string usual_strategy(DeviceKind kind) {
  return kind == DeviceKind::cpu ? "halving" : "guided";
}

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const Strategy* each : strategies()) names.emplace_back(each->name());
  return names;
}

/// The strategy is empty where it depends on the device.
TuneOptions tune_options(const SearchOptions& options) {
  TuneOptions tuning = options.tuning;
  tuning.strategy = options.strategy;
  if (!options.min_gain) return tuning;
  if (tuning.strategy.empty()) tuning.strategy = "guided";
  if (tuning.strategy != "guided")
    throw Error(ErrorKind::invalid_input,
                fmt::format("--min-gain is of --strategy guided, not {}: leave one of them out",
                            tuning.strategy));
  tuning.least_gain = *options.min_gain;
  return tuning;
}

/// Where a search begins besides the families' defaults.
struct Beginnings {
  std::map<Problem, std::vector<Recipe>> own;  // by problem
  Recipe parts;  // of an op made of ops: what records name for its parts
};

/// The variants that the library runs on this device, from the folder `out` or its own, so that a
/// short search gives nothing slower; before them those that the problem is named with.
Beginnings beginnings_of(const SearchedOp& searched, const std::string& out,
                         const DeviceFacts& facts, const Session& session) {
  const Op& op = *searched.op;
  Beginnings result;
  auto folders = session.environment.preset_folders;
  if (std::filesystem::is_directory(out)) folders.insert(folders.begin(), out);
  const PresetLibrary presets = load_presets(folders);
  for (const Problem& repeated : searched.problems) {
    const Problem problem = unrepeated(op, repeated);  // what records are of
    std::vector<Recipe>& first = result.own[problem];
    if (const auto named = searched.named.find(problem); named != searched.named.end())
      first = named->second;
    try {
      if (auto choice = choose(session.catalog, op, problem, facts, presets); choice.preset)
        first.push_back(std::move(choice.recipe));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unavailable) throw;
    }
    if (op.parts(problem).empty()) continue;
    for (Variant& variant : recorded_in_parts(session.catalog, op, problem, facts, presets))
      result.parts.push_back(std::move(variant));
  }
  return result;
}

void require_winners(const std::map<Problem, Recipe>& on_record, const Op& op,
                     const std::vector<Problem>& problems, const std::string& out,
                     const PresetDevice& device) {
  for (const Problem& problem : problems)
    if (!on_record.contains(unrepeated(op, problem)))
      throw Error(ErrorKind::invalid_input,
                  fmt::format("--same-bits: {} has no record of {} for {}: tune it without first",
                              out, problem.text(), device.slug));
}

/// Identifies the contents of the inputs: outcomes of an earlier search with other inputs do not
/// apply.
std::string data_text(std::uint64_t seed, const SavedInputs* saved) {
  return fmt::format("seed {}{}{}", seed, saved ? " " : "",
                     fmt::join(saved ? words_of(*saved) : std::vector<std::string>(), " "));
}

/// Searches one op on one device, or on several of one model together, and writes each record as
/// soon as it is there.
Sweep sweep(const SearchedOp& searched, Evaluator& evaluator,
            const std::vector<std::string>& devices, const SearchOptions& options,
            TuneOptions tuning, const SavedInputs* saved, StatusLine& status,
            const Session& session) {
  const Op& op = *searched.op;
  const std::vector<Problem>& problems = searched.problems;
  const DeviceFacts& facts = evaluator.facts();
  if (tuning.strategy.empty()) tuning.strategy = usual_strategy(facts.kind);
  const PresetDevice preset = preset_device(facts);
  const std::string op_name(op.name());
  // Time of a problem whatever the budget: its data, its reference, and a first variant.
  constexpr double least_seconds = 0.1;
  const auto least = least_seconds * static_cast<double>(problems.size());
  if (tuning.budget_seconds > 0 && least > tuning.budget_seconds)
    logging::warn(
        "--budget {}s is too short for {}: each takes {} s or more, so at least {:.1f} s together",
        options.tuning.budget_seconds, counted(problems.size(), "problem"), least_seconds, least);
  const LockWait wait = lock_wait(tuning.cancel);
  require_out(options.out, preset, op_name, wait);
  Beginnings beginnings = beginnings_of(searched, options.out, facts, session);
  tuning.try_first = std::move(beginnings.parts);
  auto winners = present_winners(options.out, preset, op, problems);
  for (const auto& [problem, winner] : winners) tuning.on_record[problem] = {winner};
  tuning.on_record.merge(beginnings.own);
  if (options.same_bits) {
    require_winners(winners, op, problems, options.out, preset);
    tuning.same_bits_as = std::move(winners);
  }
  Journal journal = Journal::open(session.environment.state_folder, facts, op_name, options.resume,
                                  data_text(tuning.seed, saved));
  if (options.resume)
    logging::info("resuming from {}: {} outcomes are known, {} variants were in flight",
                  journal.path().string(), journal.known_count(), journal.interrupted().size());
  if (!journal.damaged_lines().empty())
    logging::warn("{}: damaged and skipped: {}; what they told is measured again",
                  journal.path().string(), line_numbers(journal.damaged_lines()));
  Quarantine quarantine(session.environment.state_folder, facts);
  SweepProgress progress(status, std::string(op.token_size()));
  tuning.progress = &progress;
  tuning.journal = &journal;
  tuning.quarantine = &quarantine;

  Sweep done{fmt::format("{}", fmt::join(devices, ",")), {}, {}, journal.path().string()};
  Recorder recorder(session.catalog, options.out, preset,
                    {.strict = options.strict, .keep_undecided = options.keep_undecided}, wait);
  tune_all(session.catalog, evaluator, problems, tuning, [&](const TuneResult& result) {
    if (result.record)
      recorder.write(result);
    else if (!result.stopped.empty() && !result.cancelled)
      logging::error("{}: {}", result.problem.text(), result.stopped);
    done.results.push_back(result);
  });
  status.clear();
  recorder.finish();
  done.files = recorder.files();
  done.code = recorder.code();
  return done;
}

void print(const Sweep& done, const Op& op, const Output& output) {
  output.heading(fmt::format("{} on {}", op.name(), done.device));
  print_sweep(done.results, std::string(op.token_size()), output);
  for (const std::string& file : done.files) output.line("wrote " + file);
  if (output.verbose()) output.line("journal " + done.journal);
}

bool was_lost(const std::vector<TuneResult>& results) {
  return std::any_of(results.begin(), results.end(),
                     [](const TuneResult& result) { return result.device_lost; });
}

int code_of(const std::vector<TuneResult>& results) {
  int code = exit_good;
  for (const TuneResult& result : results) {
    if (result.device_lost || was_refused(result)) return exit_lacking;
    if (!result.record && !result.cancelled) code = exit_check_failed;
  }
  return code;
}

/// The devices of the other ranks, on rank 0, which keeps its own part of `devices`; on the other
/// ranks nothing, once rank 0 has ended.
std::optional<std::vector<MultiDeviceEvaluator::Device>> other_devices(
    std::vector<std::string>& devices, const SweepData& data) {
  std::optional<Listener> listener;
  const MpiRank self = join_by_mpi([&] { return listener.emplace().invitation(); });
  devices = part_of_host(self, devices);
  if (self.rank == 0) return gather_devices(*listener, self.count);
  serve_devices(self, devices, data);
  return {};
}

/// Throws Error(invalid_input) for options that exclude each other.
void check_places(const SearchOptions& options) {
  if (!options.launcher.empty() && options.in_process)
    throw Error(ErrorKind::invalid_input, "--in-process and --launcher exclude each other");
}

int run(const Op& op, OpOptions& options, const Session& session) {
  check_places(options.search);
  const auto saved = saved_inputs(session.catalog, op, options.problem, options.weights);
  const SavedInputs* const values = saved.get();
  return search(
      [&](const std::string& device) {
        return std::vector{
            SearchedOp{&op, saved_problems(op, options.problem, values, kind_of_device(device))}};
      },
      options.search, values, session);
}

std::string strategy_help() {
  std::vector<std::string> lines;
  for (const Strategy* each : strategies())
    lines.push_back(fmt::format("{}: {}", each->name(), each->summary()));
  return fmt::format("{} (default: {} on a GPU, {} on a CPU)", fmt::join(lines, "; "),
                     usual_strategy(DeviceKind::cuda), usual_strategy(DeviceKind::cpu));
}

}  // namespace

int list_problems(const std::vector<SearchedOp>& ops, const Session& session) {
  Json document = Json::Array();
  for (const SearchedOp& each : ops)
    for (const Problem& problem : each.problems) {
      session.output.line(problem.text());
      document.push_back(to_json(problem));
    }
  session.output.document(document);
  return exit_good;
}

int search(const std::function<std::vector<SearchedOp>(const std::string&)>& searched,
           const SearchOptions& options, const SavedInputs* saved, const Session& session) {
  TuneOptions tuning = tune_options(options);
  StatusLine status(progress_mode(options.progress, session.output));
  std::vector<std::pair<std::vector<std::string>, std::vector<SearchedOp>>> plans;
  const std::string named =
      options.device.empty() && !options.launcher.empty() ? "all" : options.device;
  for (const auto& devices : devices_by_model(named, session.environment)) {
    if (options.in_process && devices.size() > 1)
      throw Error(ErrorKind::invalid_input,
                  fmt::format("--in-process takes one device at a time, not {}: leave it out, or "
                              "give one",
                              fmt::join(devices, ",")));
    plans.emplace_back(devices, searched(devices.front()));
  }

  std::vector<MultiDeviceEvaluator::Device> others;
  if (!options.launcher.empty()) {
    if (plans.size() != 1)
      throw Error(ErrorKind::invalid_input,
                  "--launcher needs devices of one model: name them by --device");
    auto gathered = other_devices(plans.front().first, {.seed = tuning.seed, .saved = saved});
    if (!gathered) return exit_good;
    others = std::move(*gathered);
  }

  const Interrupt interrupt;
  tuning.cancel = &interrupt.requested();
  Json document = Json::Array();
  int code = exit_good;
  bool wrote = false;
  for (const auto& [devices, ops] : plans) {
    std::size_t all = 0;
    for (const SearchedOp& each : ops) all += each.problems.size();
    // One for all ops: to open a device and to measure its limits takes seconds.
    std::optional<SweepDevice> opened;
    for (const SearchedOp& each : ops) {
      if (interrupt.requested()) break;
      if (!opened)
        opened.emplace(devices,
                       SweepData{.seed = tuning.seed, .saved = saved, .cancel = tuning.cancel},
                       options.in_process, session, others);
      TuneOptions own = tuning;
      own.budget_seconds *= static_cast<double>(each.problems.size()) / static_cast<double>(all);
      const Sweep done =
          sweep(each, opened->evaluator(), devices, options, own, saved, status, session);
      if (was_lost(done.results)) opened.reset();
      print(done, *each.op, session.output);
      wrote = wrote || !done.files.empty();
      document.push_back({{"device", done.device},
                          {"problems", sweep_json(done.results)},
                          {"files", done.files},
                          {"journal", done.journal}});
      code = std::max({code, code_of(done.results), done.code});
    }
  }
  if (wrote && !session.output.quiet())
    if (const auto hint = how_to_install(options.out, session.environment); !hint.empty())
      session.output.line(hint);
  session.output.document(document);
  if (!interrupt.requested()) return code;
  logging::warn("interrupted: what was known is written; --resume goes on from there");
  return exit_interrupted;
}

void add_disturbance_options(Command& command, SearchOptions& options, const char* group,
                             bool shown) {
  command.option("--wait TIME", duration(options.tuning.patience_seconds, true),
                 "for a disturbed device to be left alone, for each problem; 0s: not at all",
                 group);
  command.flag("--strict", options.strict,
               "write no record that was measured while the device was disturbed", group);
  command.flag("--keep-undecided", options.keep_undecided,
               "write undecided records of a disturbed device too; without it they are reported, "
               "and the exit code is 1",
               shown ? group : "");
}

void add_search_options(Command& command, SearchOptions& options, bool several_hosts) {
  const char* group = "Search";
  add_device_option(command, options.device, true);
  command.option("--strategy NAME", choice(options.strategy, strategy_names()), strategy_help(),
                 group);
  command.option(
      "--budget TIME", duration(options.tuning.budget_seconds),
      "time for all problems of a device together, waits for a quiet machine included, "
      "such as 500ms, 60s, 2m; what has begun to run ends first (default: by the size of "
      "the problems)",
      group);
  command.option(
      "--min-gain PERCENT", percent(options.min_gain),
      fmt::format("guided ends when the expected gain of all untried variants is less, or when a "
                  "tenth of the variants was tried; half the gain tries twice as many "
                  "(default: {}%)",
                  100 * options.tuning.least_gain),
      group);
  command.option("--max-variants N", whole(options.tuning.max_variants, 0, 1'000'000'000),
                 "variants of each stage timed at most; 0 is no limit", group);
  command.option("--seed N", seed(options.tuning.seed), "seed of the data and of random choices",
                 group);
  command.flag("--resume", options.resume,
               "go on with the newest journal of this device and op: its outcomes for the same "
               "data are not measured again",
               group);
  command.flag("--retry-quarantined", options.tuning.retry_quarantined,
               "try variants again that killed a worker process in an earlier sweep", group);
  if (several_hosts)
    command.option("--launcher NAME", choice(options.launcher, {"mpi"}),
                   "mpi: run by mpirun, as in mpirun --enable-recovery --map-by node; each process "
                   "gives its host's devices (or its part of them, where several share a host) to "
                   "the one search of rank 0",
                   group);
  command.flag("--in-process", options.in_process,
               "run variants in this process, for debuggers and profilers: one that crashes or "
               "hangs takes the sweep with it",
               group);
  command.flag("--same-bits", options.same_bits,
               "only variants that agree bit for bit with the winner on record in --out may win, "
               "so that "
               "a faster preset changes no result",
               group);
  add_disturbance_options(command, options, group, true);
  command.option("--out DIR", options.out,
                 "folder of presets that <device>/<op>.json is written in");
  add_progress_option(command, options.progress);
}

void add_tune(CommandLine& line) {
  for (const Op* op : line.catalog().ops) {
    auto [command, options] = line.add<OpOptions>(line.root(), *op, run);
    command.group = ops_group;
    add_problem_options(command, *op, Sizes::required, options.problem);
    add_weight_options(command, options.weights);
    add_search_options(command, options.search, true);
  }
}

}  // namespace fftune::tool

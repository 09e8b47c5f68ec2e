// fftune check: validates on a device what the library would load for every preset's problem.
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "apps/fftune/check_report.hpp"
#include "apps/fftune/check_run.hpp"
#include "apps/fftune/command.hpp"
#include "apps/fftune/commands/all.hpp"
#include "apps/fftune/device_option.hpp"
#include "apps/fftune/exit_code.hpp"
#include "apps/fftune/interrupt.hpp"
#include "apps/fftune/numbers.hpp"
#include "apps/fftune/preset_folders.hpp"
#include "apps/fftune/problem_options.hpp"
#include "apps/fftune/values.hpp"
#include "apps/fftune/writable.hpp"
#include "core/error.hpp"
#include "cpu/machine.hpp"

namespace fftune::tool {

namespace {

/// About a second for a few cores: a plan is run twice for every seed and number of tokens.
constexpr double max_flops_on_cpu = 5e10;
/// --quick is done in less than a minute on a laptop.
constexpr double quick_flops_on_cpu = 5e9;
constexpr double quick_bytes_on_cpu = 2e7;
constexpr double quick_seconds = 45;

struct Options {
  ProblemFilter filter;
  std::string device;
  std::string presets;
  std::string seeds;
  std::string max_flops;
  std::string budget;
  bool quick = false;
  std::string report;
  std::string progress;
};

bool has_records(const PresetLibrary& presets) {
  return std::any_of(presets.files().begin(), presets.files().end(),
                     [](const PresetFile& file) { return !file.records.empty(); });
}

/// "checking 87 records, 20 of them this device's: about 2m05s".
std::string announcement(const std::vector<CheckedRecord>& records, const Catalog& catalog,
                         DeviceKind kind, const CheckSettings& settings) {
  double seconds = 0;
  std::size_t checked = 0;
  std::size_t own = 0;
  for (const CheckedRecord& record : records) {
    if (!record.skipped.empty()) continue;
    ++checked;
    own += record.own ? 1 : 0;
    const Op& op = catalog.op(record.problem.op);
    for (const std::int64_t count : record.tokens)
      seconds += settings.seeds *
                 estimated_seconds(
                     op, record.problem.with_size(std::string(op.token_size()), count), kind);
  }
  const bool bounded = settings.budget_seconds > 0 && settings.budget_seconds < seconds;
  return fmt::format(
      "checking {}, {} of them this device's: about {}{}", counted(checked, "record"), own,
      seconds_text(seconds),
      bounded ? fmt::format(", of which {} are given", seconds_text(settings.budget_seconds)) : "");
}

int run(const Options& options, const Session& session) {
  const std::string device = device_named(options.device, session.environment);
  const DeviceKind kind = kind_of_device(device);
  CheckSettings settings;
  settings.seeds = options.quick ? 1 : 2;
  if (!options.seeds.empty())
    settings.seeds = static_cast<int>(parse_whole(options.seeds, "--seeds", 1, 1000));
  if (options.quick) settings.budget_seconds = quick_seconds;
  if (!options.budget.empty()) settings.budget_seconds = parse_duration(options.budget, "--budget");
  const double max_flops = !options.max_flops.empty()
                               ? parse_amount(options.max_flops, "--max-flops")
                           : kind != DeviceKind::cpu ? 0
                           : options.quick           ? quick_flops_on_cpu
                                                     : max_flops_on_cpu;
  StatusLine status(progress_mode(options.progress, session.output));
  settings.status = &status;
  if (!options.report.empty()) require_writable_file(options.report, "--report");

  const PresetLibrary presets = load_presets(options.presets, session);
  const auto& ops = session.catalog.ops;
  auto records =
      checked_records(presets, session.catalog, kind, max_flops,
                      [&](const Problem& problem) { return admits(options.filter, ops, problem); });
  if (records.empty())
    throw Error(ErrorKind::invalid_input,
                presets.files().empty()
                    ? "there are no presets to check: tune first, or give --presets DIR"
                : !has_records(presets)
                    ? "no record of the presets can be read: repair or leave out their files"
                    : "no preset names a problem that the options admit: give fewer of them");

  const auto backend = open_named(device, session);
  const std::string name = backend->facts().name;
  put_own_first(presets, backend->facts(), records);
  if (options.quick)
    keep_quick(session.catalog, kind == DeviceKind::cpu ? quick_bytes_on_cpu : 0, records);
  skip_too_large(session.catalog, backend->free_bytes(),
                 static_cast<std::size_t>(available_bytes()), records);
  if (!session.output.quiet())
    session.output.line(announcement(records, session.catalog, kind, settings));
  const Interrupt interrupt;
  settings.cancel = &interrupt.requested();
  const CheckOutcomes outcomes = run_checks(records, session.catalog, *backend, presets, settings);

  // Before anything is printed: standard output may be full or closed.
  if (!options.report.empty()) replace_file(options.report, junit_text(name, records, outcomes));
  session.output.heading(fmt::format("check on {} ({})", device, name));
  const CheckCounts counts = print_checks(records, outcomes, session.catalog, session.output);
  Json document = checks_json(records, outcomes);
  document["device"] = to_json(backend->facts());
  session.output.document(document);
  if (interrupt.requested()) return exit_interrupted;
  // What the budget left out is said; that nothing was checked is no success.
  const bool as_asked = counts.not_run == 0 || (settings.budget_seconds > 0 && counts.passed > 0);
  return counts.failed == 0 && as_asked ? exit_good : exit_check_failed;
}

}  // namespace

void add_check(CommandLine& line) {
  auto options = std::make_shared<Options>();
  CLI::App& command = line.add(
      line.root(), "check",
      "validate on this device, against the float64 reference, what the library would load for "
      "every problem that any preset names; exit 1 on any failure",
      [options](const Session& session) { return run(*options, session); });
  add_device_option(command, options->device, false);
  add_presets_option(command, options->presets);
  command.add_flag("--quick", options->quick,
                   "on new hardware, in less than a minute: of each op, pass and dtype one record, "
                   "at its own number of tokens, with one draw of the data");
  command
      .add_option("--budget", options->budget,
                  "begin no further layer after this time; what is left is said to be not run "
                  "(default: none; 45s with --quick)")
      ->type_name("TIME");
  command
      .add_option("--seeds", options->seeds,
                  "how many draws of the data (default: 2; 1 with --quick)")
      ->type_name("N");
  command
      .add_option(
          "--max-flops", options->max_flops,
          "lower a problem's tokens until one run of it takes no more floating-point "
          "operations, and say so (default: 5e10 on the CPU, 5e9 with --quick, no bound on a GPU)")
      ->type_name("N");
  command.add_option("--report", options->report, "write the outcomes as JUnit's XML too")
      ->type_name("FILE");
  add_progress_option(command, options->progress);
  add_problem_filter(command, line.catalog().ops, options->filter);
}

}  // namespace fftune::tool

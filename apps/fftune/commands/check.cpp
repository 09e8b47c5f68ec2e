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
#include "apps/fftune/preset_folders.hpp"
#include "apps/fftune/problem_options.hpp"
#include "apps/fftune/values.hpp"
#include "apps/fftune/writable.hpp"
#include "core/error.hpp"

namespace fftune::tool {

namespace {

/// About a second for a few cores: a plan is run twice for every seed and number of tokens.
constexpr double max_flops_on_cpu = 5e10;

struct Options {
  ProblemFilter filter;
  std::string device;
  std::string presets;
  std::string seeds = "2";
  std::string max_flops;
  std::string report;
  std::string progress;
};

bool has_records(const PresetLibrary& presets) {
  return std::any_of(presets.files().begin(), presets.files().end(),
                     [](const PresetFile& file) { return !file.records.empty(); });
}

int run(const Options& options, const Session& session) {
  const std::string device = device_named(options.device, session.environment);
  const DeviceKind kind = kind_of_device(device);
  CheckSettings settings;
  settings.seeds = static_cast<int>(parse_whole(options.seeds, "--seeds", 1, 1000));
  const double max_flops = !options.max_flops.empty()
                               ? parse_amount(options.max_flops, "--max-flops")
                           : kind == DeviceKind::cpu ? max_flops_on_cpu
                                                     : 0;
  StatusLine status(progress_mode(options.progress, session.output));
  settings.status = &status;
  if (!options.report.empty()) require_writable_file(options.report, "--report");

  const PresetLibrary presets = load_presets(options.presets, session);
  const auto& ops = session.catalog.ops;
  const auto records =
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
  return counts.failed == 0 && counts.not_run == 0 ? exit_good : exit_check_failed;
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
  command.add_option("--seeds", options->seeds, "how many draws of the data (default: 2)")
      ->type_name("N");
  command
      .add_option("--max-flops", options->max_flops,
                  "lower a problem's tokens until one run of it takes no more floating-point "
                  "operations, and say so (default: 5e10 on the CPU, no bound on a GPU)")
      ->type_name("N");
  command.add_option("--report", options->report, "write the outcomes as JUnit's XML too")
      ->type_name("FILE");
  add_progress_option(command, options->progress);
  add_problem_filter(command, line.catalog().ops, options->filter);
}

}  // namespace fftune::tool

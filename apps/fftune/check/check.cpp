// fftune check: validates on a device the plans that the library would load for every preset.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "apps/fftune/check/check.hpp"
#include "apps/fftune/check/invariance.hpp"
#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/device_option.hpp"
#include "apps/fftune/command_line/problem_options.hpp"
#include "apps/fftune/command_line/progress_option.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/presets/records.hpp"
#include "apps/fftune/saved/weight_options.hpp"
#include "apps/fftune/terminal/interrupt.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "runtime/devices.hpp"
#include "tuning/log.hpp"

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
  SavedValues weights;
  std::string device;
  std::string presets;
  int seeds = 0;  // 0: by --quick, like the next two
  double max_flops = 0;
  double budget_seconds = 0;
  bool quick = false;
  bool batch_invariance = false;
  std::int64_t most = 0;  // 0: by the device
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
      bounded ? fmt::format(", and {} are given", seconds_text(settings.budget_seconds)) : "");
}

/// The problems of a saved layer, and where their values are.
struct SavedLayer {
  std::vector<SavedInputs> inputs;  // one for each op
  std::vector<Problem> problems;
  std::vector<std::string> left_out = {};  // ops that cannot be checked, and why
};

/// The tokens that are checked where none are given, as far as they are affordable.
constexpr const char* usual_tokens = "1,16";

void add_op(const Op& op, const Options& options, const Catalog& catalog, DeviceKind kind,
            double max_flops, SavedLayer& layer) {
  SavedInputs saved(catalog, op, options.weights);
  const bool is_named = !options.filter.ops.empty();
  if (!is_named && !saved.has_weights()) return;
  if (const std::string why = saved.why_not(); !is_named && !why.empty()) {
    layer.left_out.push_back(fmt::format("{} is not checked: {}", op.name(), why));
    return;
  }
  ProblemOptions given;
  given.dtypes = fmt::format("{}", fmt::join(options.filter.dtypes, ","));
  for (const SizeField& field : op.sizes())
    if (const auto size = options.filter.sizes.find(field.name); size != options.filter.sizes.end())
      given.sizes[field.name] = fmt::format("{}", fmt::join(size->second, ","));
  const std::string token_size(op.token_size());
  // Sizes that no model gives are chosen by the test: how many keys a cache has.
  for (const SizeField& field : op.sizes())
    if (std::string& text = given.sizes[field.name]; text.empty() && !field.rare &&
                                                     field.name != token_size &&
                                                     !saved.tells(field.name) && !is_named)
      text = fmt::format("{}", field.example);
  const bool capped = given.sizes[token_size].empty();
  if (capped) given.sizes[token_size] = usual_tokens;
  for (const Problem& problem : saved_problems(op, given, &saved, kind))
    if (!capped || max_flops <= 0 || problem.size(token_size) == 1 ||
        cost_of(op, problem).flops <= max_flops)
      layer.problems.push_back(problem);
  layer.inputs.push_back(std::move(saved));
}

/// Whether saved models have the op's weights in each layer.
bool is_of_a_layer(std::string_view op) {
  const SavedOp* const known = find_saved_op(op);
  return known != nullptr && !known->is_of_model;
}

SavedLayer saved_layer(const Options& options, const Catalog& catalog, DeviceKind kind,
                       double max_flops) {
  check_weight_options(options.weights);
  SavedLayer layer;
  const std::vector<std::string>& names = options.filter.ops;
  if ((!options.weights.map.empty() || options.weights.weights.empty()) && names.size() != 1)
    throw Error(ErrorKind::invalid_input,
                "--map and --input name the inputs of one op: give it by --op");
  for (const Op* op : catalog.ops) {
    const bool wanted = names.empty()
                            ? is_of_a_layer(op->name())
                            : std::find(names.begin(), names.end(), op->name()) != names.end();
    if (wanted) add_op(*op, options, catalog, kind, max_flops, layer);
  }
  if (layer.inputs.empty() && !layer.left_out.empty())
    throw Error(ErrorKind::invalid_input, fmt::format("{}", fmt::join(layer.left_out, "; ")));
  if (layer.inputs.empty())
    throw Error(ErrorKind::invalid_input,
                fmt::format("{} has weights of no op by names that are known: give --op, and --map "
                            "for each of its weights",
                            options.weights.weights));
  return layer;
}

int run_saved(const Options& options, const std::string& device, double max_flops,
              CheckSettings settings, const Session& session) {
  const SavedLayer layer = saved_layer(options, session.catalog, kind_of_device(device), max_flops);
  for (const std::string& line : layer.left_out) logging::warn("{}", line);
  const PresetLibrary presets = load_presets(options.presets, session);
  const auto backend = open_named(device, session);
  const Interrupt interrupt;
  settings.cancel = &interrupt.requested();
  const auto checks =
      check_saved(layer.problems, layer.inputs, session.catalog, *backend, presets, settings);
  const CheckOutcomes outcomes = outcomes_of(checks);
  if (!options.report.empty()) {
    std::vector<CheckedRecord> records;
    for (const Problem& problem : layer.problems)
      records.push_back({.problem = problem,
                         .tokens = {problem.size(session.catalog.op(problem.op).token_size())}});
    replace_file(options.report, junit_text(backend->facts().name, records, outcomes));
  }
  session.output.heading(fmt::format("check of {} on {} ({})", layer.inputs.front().text(), device,
                                     backend->facts().name));
  print_saved(checks, session.output);
  Json document = saved_json(checks);
  document["device"] = to_json(backend->facts());
  document["left_out"] = layer.left_out;
  session.output.document(document);
  if (interrupt.requested()) return exit_interrupted;
  const bool bounded = settings.budget_seconds > 0;
  const bool good = std::all_of(outcomes.begin(), outcomes.end(), [&](const auto& entry) {
    return entry.second.state == CheckState::passed || entry.second.state == CheckState::skipped ||
           (bounded && entry.second.state == CheckState::not_run);
  });
  return good ? exit_good : exit_check_failed;
}

/// Powers of two, and a number beside each: there are 2048 of them, and a CPU is slow.
std::vector<std::int64_t> sampled_counts(std::int64_t most) {
  std::vector<std::int64_t> counts;
  for (std::int64_t count = 1; count <= most; count *= 2)
    for (const std::int64_t each : {count, count + 1 + count / 3})
      if (each <= most && (counts.empty() || each > counts.back())) counts.push_back(each);
  return counts;
}

int run_invariance(const Options& options, const std::string& device, const Session& session) {
  const DeviceKind kind = kind_of_device(device);
  constexpr std::int64_t most_on_gpu = 2048, most_on_cpu = 80;
  const std::int64_t most = options.most > 0           ? options.most
                            : kind == DeviceKind::cuda ? most_on_gpu
                                                       : most_on_cpu;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(most));
  std::iota(counts.begin(), counts.end(), 1);
  if (kind == DeviceKind::cpu) counts = sampled_counts(most);
  std::vector<Problem> problems = invariance_problems(session.catalog, kind);
  std::erase_if(problems, [&](const Problem& problem) { return !admits(options.filter, problem); });
  if (problems.empty())
    throw Error(ErrorKind::invalid_input,
                "no problem of --batch-invariance is among those that the options admit: give "
                "fewer of them");
  const PresetLibrary presets = load_presets(options.presets, session);
  const auto backend = open_named(device, session);
  const Interrupt interrupt;
  session.output.heading(fmt::format("batch invariance on {} ({}), up to {} tokens", device,
                                     backend->facts().name, most));
  TextTable table(
      {{"problem"}, {"numbers of tokens", Align::right}, {"recipes", Align::right}, {""}});
  Json document = Json::Array();
  bool good = true;
  for (const Problem& problem : problems) {
    const InvarianceResult result =
        check_invariance(session.catalog, *backend, presets, problem, most, counts,
                         [&] { return interrupt.requested().load(); });
    if (interrupt.requested()) return exit_interrupted;
    const bool same = result.difference.empty();
    good = good && same;
    table.row({problem.text(),
               fmt::format("{}", counts.size()),
               fmt::format("{}", result.recipes),
               {same ? "same bits" : result.difference, same ? Style::good : Style::bad}});
    document.push_back({{"problem", to_json(problem)},
                        {"tokens", counts.size()},
                        {"recipes", result.recipes},
                        {"difference", result.difference}});
  }
  session.output.table(table);
  session.output.document(document);
  return good ? exit_good : exit_check_failed;
}

int run(const Options& options, const Session& session) {
  const std::string device = device_named(options.device, session.environment);
  const DeviceKind kind = kind_of_device(device);
  if (options.batch_invariance) return run_invariance(options, device, session);
  CheckSettings settings;
  settings.seeds = options.seeds > 0 ? options.seeds : options.quick ? 1 : 2;
  settings.budget_seconds = options.budget_seconds > 0 ? options.budget_seconds
                            : options.quick            ? quick_seconds
                                                       : 0;
  const double max_flops = options.max_flops > 0     ? options.max_flops
                           : kind != DeviceKind::cpu ? 0
                           : options.quick           ? quick_flops_on_cpu
                                                     : max_flops_on_cpu;
  const ProgressMode mode = progress_mode(options.progress, session.output);
  StatusLine status(mode);
  settings.status = &status;
  if (!options.report.empty()) require_writable_file(options.report, "--report");
  check_weight_options(options.weights);
  if (options.weights.given()) return run_saved(options, device, max_flops, settings, session);

  const PresetLibrary presets = load_presets(options.presets, session);
  auto records =
      checked_records(presets, session.catalog, kind, max_flops,
                      [&](const Problem& problem) { return admits(options.filter, problem); });
  if (records.empty())
    throw Error(ErrorKind::invalid_input,
                presets.files().empty()
                    ? "there are no presets to check: tune first, or give --presets DIR"
                : !has_records(presets)
                    ? "no record of the presets can be read: repair or leave out their files"
                    : "no preset names a problem that the options admit: give fewer of them");

  const auto backend = open_named(device, session);
  const std::string name = backend->facts().name;
  put_own_first(presets.files(), backend->facts(), records);
  if (options.quick)
    keep_quick(session.catalog, kind == DeviceKind::cpu ? quick_bytes_on_cpu : 0, records);
  skip_too_large(session.catalog, backend->facts(), presets,
                 {.device = backend->free_bytes(), .host = free_host_bytes()}, records);
  // To stderr, as progress is: the report is written before anything is printed.
  if (mode != ProgressMode::none)
    logging::info("{}", announcement(records, session.catalog, kind, settings));
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
  // The checks that the budget left out are named; that nothing was checked is no success.
  const bool as_asked = counts.not_run == 0 || (settings.budget_seconds > 0 && counts.passed > 0);
  // Records that cannot be read were not checked either; each was named as it was skipped.
  const bool whole = presets.complaints().empty();
  return counts.failed == 0 && as_asked && whole ? exit_good : exit_check_failed;
}

}  // namespace

void add_check(CommandLine& line) {
  auto [command, options] = line.add<Options>(
      line.root(), "check",
      "validate the plans that the library would load on this device against the float64 "
      "reference: "
      "for every problem that any preset names, or with --weights for the ops of a saved "
      "layer; exit "
      "1 on any failure",
      run);
  add_device_option(command, options.device, false);
  add_presets_option(command, options.presets);
  command.flag("--quick", options.quick,
               "on new hardware, in less than a minute: one record of each op, pass and dtype, "
               "at its own number of tokens, with one draw of the data");
  command.option("--budget TIME", duration(options.budget_seconds),
                 "begin no further layer after this time; the others are reported as not run "
                 "(default: none; 45s with --quick)");
  command.option("--seeds N", whole(options.seeds, 1, 1000),
                 "number of draws of the data (default: 2; 1 with --quick)");
  command.option(
      "--max-flops N", amount(options.max_flops),
      "limit of floating-point operations of one run; problems above it are checked with fewer "
      "tokens, and a line says so (default: 5e10 on the CPU, 5e9 with --quick, none on a GPU)");
  command.flag(
      "--batch-invariance", options.batch_invariance,
      "check instead that with batch-invariant=yes the bits of a row do not depend on other "
      "rows: for each number of tokens on a GPU, for some on the CPU");
  command
      .option("--most N", whole(options.most, 1, 1 << 20),
              "the most tokens of --batch-invariance (default: 2048 on a GPU, 80 on the CPU)")
      .needs = "--batch-invariance";
  command.option("--report FILE", options.report, "also write the outcomes as JUnit XML");
  add_progress_option(command, options.progress);
  add_weight_options(command, options.weights);
  add_problem_filter(command, line.catalog().ops, options.filter);
}

}  // namespace fftune::tool

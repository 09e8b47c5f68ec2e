// fftune bench OP: the library's plan beside the roofline and the pipelines a user would write.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "apps/fftune/bench/bench_run.hpp"
#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/device_option.hpp"
#include "apps/fftune/command_line/problem_options.hpp"
#include "apps/fftune/command_line/progress_option.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/saved/weight_options.hpp"
#include "apps/fftune/terminal/interrupt.hpp"
#include "apps/fftune/terminal/json.hpp"
#include "apps/fftune/terminal/progress.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "tuning/decide/verdict.hpp"
#include "tuning/evaluate/local_evaluator.hpp"
#include "tuning/log.hpp"

namespace fftune::tool {

namespace {

struct Options {
  ProblemOptions problem;
  SavedValues weights;
  std::string device;
  std::string presets;
  TimeRequest request{.samples = 50, .seconds = 5};
  std::uint64_t seed = 0;
  bool stages = false;
  std::string against;
  std::string progress;
};

/// How it compares with fftune's plan, unless that is within the noise.
Cell verdict_cell(const BenchEntry& entry, double own) {
  if (entry.name == "fftune") return ratio_cell(own > 0 ? 1 : 0);
  if (entry.ratio.median > 0 && entry.ratio.is_in_noise()) return "in the noise";
  return ratio_cell(entry.ratio, 1.1);
}

/// One problem on one kind of values, which are named where there are several kinds.
struct OnValues {
  std::string values;
  BenchResult result;
};

TextTable table_for(const std::string& token_size, bool has_saved) {
  std::vector<Column> columns{{token_size, Align::right}, {"dtype"}};
  if (has_saved) columns.insert(columns.end(), {{"values"}, {"error", Align::right}});
  columns.insert(columns.end(), {{"what"},
                                 {"median µs", Align::right},
                                 {"95% interval", Align::right},
                                 {"roofline", Align::right},
                                 {"of fftune's", Align::right},
                                 {"how"}});
  return TextTable(std::move(columns));
}

void add_rows(TextTable& table, const std::string& token_size, const OnValues& measured) {
  const BenchResult& result = measured.result;
  std::string tokens = fmt::format("{}", result.problem.size(token_size));
  std::string dtype(dtype_name(result.problem.dtype));
  std::string values = measured.values;
  const auto add = [&](std::vector<Cell> cells, const std::string& error = "") {
    if (!measured.values.empty()) cells.insert(cells.begin() + 2, {values, error});
    table.row(std::move(cells));
  };
  if (!result.refusal.empty()) {
    add({tokens, dtype, "-", "-", "-", "-", "-", {result.refusal, Style::bad}});
    return;
  }
  const double own = result.entries.front().microseconds.median;
  for (const BenchEntry& entry : result.entries) {
    const double time = entry.microseconds.median;
    const std::string error = entry.tolerance > 0 ? error_text(entry.error) : "-";
    if (!entry.failure.empty())
      add({tokens, dtype, entry.name, "-", "-", "-", "-", {entry.failure, Style::bad}}, error);
    else
      add({tokens, dtype, entry.name, microseconds_text(time),
           fmt::format("{}-{}", microseconds_text(entry.microseconds.low),
                       microseconds_text(entry.microseconds.high)),
           limit_share_text(
               time > 0 ? (entry.floor_us > 0 ? entry.floor_us : result.floor_us) / time : 0),
           verdict_cell(entry, own), entry.summary},
          error);
    for (std::string* const shown_once : {&tokens, &dtype, &values}) shown_once->clear();
  }
  add({"", "", "floor", microseconds_text(result.floor_us), "", "100.0%",
       own > 0 ? ratio_text(result.floor_us / own) : "-", "roofline: " + result.limit + " bound"});
  for (const std::string& disturbance : result.disturbances)
    add({"", "", "disturbed", "-", "", "-", "-", {disturbance, Style::bad}});
  if (result.kept_bytes > 0)
    add({"", "", "kept", "-", "", "-", "-",
         bytes_text(static_cast<double>(result.kept_bytes)) +
             " of the forward pass are kept for this one"});
}

/// Why fftune's plan is above the limit, if it is.
void print_beyond_limit(const Op& op, const BenchResult& result, const DeviceFacts& facts,
                        const Output& output) {
  if (result.entries.empty()) return;
  const double own = result.entries.front().microseconds.median;
  if (own > 0 && result.floor_us / own > most_share_of_limit)
    output.line(fmt::format("{}={}: {}", op.token_size(),
                            result.problem.size(std::string(op.token_size())),
                            beyond_limit(op, result.problem, facts, result.limit)));
}

Json result_json(const OnValues& measured) {
  const BenchResult& result = measured.result;
  Json entries = Json::Array();
  for (const BenchEntry& entry : result.entries)
    entries.push_back({{"name", entry.name},
                       {"summary", entry.summary},
                       {"median_us", entry.microseconds.median},
                       {"low_us", entry.microseconds.low},
                       {"high_us", entry.microseconds.high},
                       {"samples", entry.microseconds.samples},
                       {"ratio", entry.ratio.median},
                       {"ratio_low", entry.ratio.low},
                       {"ratio_high", entry.ratio.high},
                       {"error", entry.error},
                       {"tolerance", entry.tolerance},
                       {"floor_us", entry.floor_us > 0 ? entry.floor_us : result.floor_us},
                       {"failure", entry.failure}});
  return {{"problem", to_json(result.problem)},
          {"values", measured.values.empty() ? "random" : measured.values},
          {"rule", result.rule},
          {"far", !result.far.empty()},
          {"refusal", result.refusal},
          {"floor_us", result.floor_us},
          {"limit", result.limit},
          {"entries", entries},
          {"kept_bytes", result.kept_bytes},
          {"disturbances", result.disturbances}};
}

/// Whether anything of it failed to run: the machine lacks memory, or a candidate is wrong.
int code_of(const BenchResult& result) {
  if (!result.refusal.empty()) return exit_lacking;
  for (const BenchEntry& entry : result.entries)
    if (!entry.failure.empty()) return exit_check_failed;
  return exit_good;
}

/// Says so where making the data and the float64 reference takes long enough to wonder.
void announce(const Op& op, const Problem& problem) {
  constexpr double flops_of_core = 4e9, bytes_of_core = 2e8;  // in a second, at least
  const Cost cost = cost_of(op, problem);
  const double cores = std::max(1u, std::thread::hardware_concurrency());
  const double seconds = (cost.flops / flops_of_core + cost.bytes / bytes_of_core) / cores;
  if (seconds > 10)
    logging::warn("{}: its data and reference take about {} before anything is timed",
                  problem.text(),
                  seconds > 60 ? fmt::format("{:.0f} minutes", std::ceil(seconds / 60))
                               : fmt::format("{:.0f} s", std::ceil(seconds)));
}

/// Seconds, roughly: the reference, and samples that last longer for larger problems.
double weight_of(const Op& op, const Problem& problem) {
  const Cost cost = cost_of(op, problem);
  return 1 + cost.flops / 1e11 + cost.bytes / 1e9;
}

Against against_of(const Options& options, const std::vector<Problem>& problems,
                   const DeviceFacts& facts, const Catalog& catalog) {
  Against against(options.against, facts, catalog);
  if (!options.against.empty() &&
      std::none_of(problems.begin(), problems.end(),
                   [&](const Problem& problem) { return against.knows(problem); }))
    throw Error(ErrorKind::invalid_input,
                fmt::format("--against {} has no time of {}{}: give the same sizes as then",
                            options.against, problems.front().text(),
                            problems.size() > 1 ? " or the others" : ""));
  return against;
}

int run(const Op& op, Options& options, const Session& session) {
  const std::string device = device_named(options.device, session.environment);
  const TimeRequest& request = options.request;
  StatusLine status(progress_mode(options.progress, session.output));
  const auto saved = saved_inputs(session.catalog, op, options.problem, options.weights);
  const auto problems = saved_problems(op, options.problem, saved.get(), kind_of_device(device));
  const PresetLibrary presets = load_presets(options.presets, session);
  const auto backend = open_named(device, session);
  Against against = against_of(options, problems, backend->facts(), session.catalog);

  const std::string token_size(op.token_size());
  const Interrupt interrupt;
  std::vector<std::vector<OnValues>> all(problems.size());
  std::string lost;
  std::vector<const SavedInputs*> kinds{nullptr};
  if (saved) kinds.push_back(saved.get());
  double weight = 0;
  for (const Problem& problem : problems) weight += weight_of(op, problem);
  const auto kind_count = static_cast<double>(kinds.size());
  std::size_t measured = 0;
  ProgressBar progress(status, "bench", problems.size() * kinds.size(), weight * kind_count);
  for (const SavedInputs* const kind : kinds) {
    LocalEvaluator evaluator(*backend, session.catalog, {options.seed, kind}, -1,
                             {&interrupt.requested(), &interrupt.requested()});
    const std::string values = !saved ? "" : kind ? "saved" : "random";
    for (std::size_t i = 0; i < problems.size(); ++i) {
      if (interrupt.requested() || !lost.empty()) break;
      progress.show(fmt::format("{}{}{}", problems[i].text(), saved ? ", values: " : "", values),
                    true);
      announce(op, problems[i]);
      auto result = bench(session.catalog, op, problems[i], presets, evaluator, request,
                          bursts_for(evaluator.facts().kind, request.seconds),
                          interrupt.requested(), options.stages && !op.repetition(problems[i]));
      lost = evaluator.lost();
      if (!result) break;
      ++measured;
      all[i].push_back({values, std::move(*result)});
      if (const auto& far = all[i].back().result.far; !far.empty() && !kind)
        logging::warn("{}: the preset is of a shape far away: {}: tune this one",
                      problems[i].text(), far);
      progress.step(weight_of(op, problems[i]), "");
    }
  }
  TextTable table = table_for(token_size, saved != nullptr);
  Json document = {{"device", to_json(backend->facts())}, {"problems", Json::Array()}};
  int code = exit_good;
  for (const auto& of_problem : all)
    for (const OnValues& each : of_problem) {
      add_rows(table, token_size, each);
      Json row = result_json(each);
      // Earlier times are of random values.
      if (!options.against.empty() && each.values != "saved")
        row["against"] = against.add(token_size, each.result);
      document["problems"].push_back(std::move(row));
      code = std::max(code, code_of(each.result));
    }
  status.clear();

  session.output.heading(fmt::format("{} on {} ({})", op.name(), device, backend->facts().name));
  session.output.table(table);
  if (saved) session.output.line("saved: " + saved->text());
  const Limits limits = backend->limits(problems.front().dtype);
  session.output.line("floor by: " + limits.method);
  for (const auto& of_problem : all)
    for (const OnValues& each : of_problem)
      print_beyond_limit(op, each.result, backend->facts(), session.output);
  against.print(session.output);
  if (against.any_slower()) code = std::max<int>(code, exit_check_failed);
  document["limits"] = {{"bytes_per_second", limits.bytes_per_second},
                        {"flops_per_second", limits.flops_per_second},
                        {"method", limits.method}};
  session.output.document(document);
  if (!lost.empty()) {
    logging::error("{}", lost);
    return exit_lacking;
  }
  if (!interrupt.requested()) return code;
  logging::warn("interrupted with {} of {} timed: run the command again for the rest", measured,
                counted(problems.size() * kinds.size(), "problem"));
  return exit_interrupted;
}

}  // namespace

void add_bench(CommandLine& line) {
  Command& group = line.add_group(
      line.root(), "bench", "the library's plan beside the roofline and the unfused pipelines");
  for (const Op* op : line.catalog().ops) {
    auto [command, options] = line.add<Options>(group, *op, run);
    add_problem_options(command, *op, Sizes::required, options.problem);
    add_weight_options(command, options.weights);
    add_device_option(command, options.device, false);
    add_presets_option(command, options.presets);
    command.option("--samples N", whole(options.request.samples, 1, 1'000'000),
                   "samples of each contender, interleaved; on the CPU in bursts apart in time");
    command.option("--budget TIME", duration(options.request.seconds),
                   "time for each problem's samples");
    command.option("--seed N", seed(options.seed), "seed of the data");
    command.flag(
        "--stages", options.stages,
        "time each kernel of the plan by itself too, and the first ones in a row: where the "
        "time goes");
    command.option("--against FILE", options.against,
                   "compare with earlier times (the output of bench --json, or presets) by their "
                   "intervals: FASTER, SLOWER, SAME or UNDECIDED; exit 1 if any is SLOWER");
    add_progress_option(command, options.progress);
  }
}

}  // namespace fftune::tool

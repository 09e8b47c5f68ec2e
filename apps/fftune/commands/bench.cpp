// fftune bench OP: the library's plan beside the roofline and the pipelines a user would write.
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "apps/fftune/bench_run.hpp"
#include "apps/fftune/command.hpp"
#include "apps/fftune/commands/all.hpp"
#include "apps/fftune/comparison.hpp"
#include "apps/fftune/device_option.hpp"
#include "apps/fftune/earlier_times.hpp"
#include "apps/fftune/exit_code.hpp"
#include "apps/fftune/interrupt.hpp"
#include "apps/fftune/json.hpp"
#include "apps/fftune/numbers.hpp"
#include "apps/fftune/preset_folders.hpp"
#include "apps/fftune/problem_options.hpp"
#include "apps/fftune/progress_bar.hpp"
#include "apps/fftune/status_line.hpp"
#include "apps/fftune/values.hpp"
#include "core/error.hpp"
#include "tuning/evaluate/local_evaluator.hpp"

namespace fftune::tool {

namespace {

struct Options {
  ProblemOptions problem;
  std::string device;
  std::string presets;
  std::string samples = "50";
  std::string budget = "5s";
  std::string seed = "0";
  std::string against;
  std::string progress;
};

void add_rows(TextTable& table, const std::string& token_size, const BenchResult& result) {
  std::string tokens = fmt::format("{}", result.problem.size(token_size));
  std::string dtype(dtype_name(result.problem.dtype));
  if (!result.refusal.empty()) {
    table.row({tokens, dtype, "-", "-", "-", "-", "-", {result.refusal, Style::bad}});
    return;
  }
  const double own = result.entries.front().microseconds.median;
  for (const BenchEntry& entry : result.entries) {
    const double time = entry.microseconds.median;
    if (!entry.failure.empty())
      table.row({tokens, dtype, entry.name, "-", "-", "-", "-", {entry.failure, Style::bad}});
    else
      table.row({tokens, dtype, entry.name, microseconds_text(time),
                 fmt::format("{}-{}", microseconds_text(entry.microseconds.low),
                             microseconds_text(entry.microseconds.high)),
                 limit_share_text(time > 0 ? result.floor_us / time : 0),
                 ratio_cell(own > 0 ? time / own : 0), entry.summary});
    tokens.clear();
    dtype.clear();
  }
  table.row({"", "", "floor", microseconds_text(result.floor_us), "", "100.0%",
             ratio_cell(own > 0 ? result.floor_us / own : 0),
             "roofline: " + result.limit + " bound"});
  if (result.kept_bytes > 0)
    table.row({"", "", "kept", "-", "", "-", "-",
               bytes_text(static_cast<double>(result.kept_bytes)) +
                   " of the forward pass are kept for this one"});
}

Json result_json(const BenchResult& result) {
  Json entries = Json::array();
  for (const BenchEntry& entry : result.entries)
    entries.push_back({{"name", entry.name},
                       {"summary", entry.summary},
                       {"median_us", entry.microseconds.median},
                       {"low_us", entry.microseconds.low},
                       {"high_us", entry.microseconds.high},
                       {"samples", entry.microseconds.samples},
                       {"failure", entry.failure}});
  return {
      {"problem", to_json(result.problem)}, {"rule", result.rule},   {"refusal", result.refusal},
      {"floor_us", result.floor_us},        {"limit", result.limit}, {"entries", entries},
      {"kept_bytes", result.kept_bytes}};
}

/// fftune's times beside earlier ones.
class Against {
 public:
  Against(const std::string& path, const DeviceFacts& facts) {
    if (!path.empty()) times_ = earlier_times(path, facts);
  }

  bool knows(const Problem& problem) const { return times_.contains(problem); }

  /// The part of --json; null where there is no earlier time, or none now.
  Json add(const std::string& token_size, const BenchResult& result) {
    const auto before = times_.find(result.problem);
    if (before == times_.end() || result.entries.empty()) return nullptr;
    const Summary& now = result.entries.front().microseconds;
    const Comparison verdict = compare(before->second, {now.median, now.low, now.high});
    counts_.add(verdict);
    const auto interval = [](double low, double high) {
      return fmt::format("{}-{}", microseconds_text(low), microseconds_text(high));
    };
    table_.row({fmt::format("{}={}", token_size, result.problem.size(token_size)),
                std::string(dtype_name(result.problem.dtype)),
                microseconds_text(before->second.median_us),
                interval(before->second.low_us, before->second.high_us),
                microseconds_text(now.median),
                interval(now.low, now.high),
                ratio_cell(now.median > 0 ? before->second.median_us / now.median : 0),
                {std::string(comparison_name(verdict)), comparison_style(verdict)}});
    return {{"median_us", before->second.median_us},
            {"low_us", before->second.low_us},
            {"high_us", before->second.high_us},
            {"verdict", comparison_name(verdict)}};
  }

  void print(const std::string& path, const Output& output) const {
    if (table_.empty()) return;
    output.line("");
    output.heading("against " + path);
    output.table(table_);
    output.line(counts_.text());
  }

  bool any_slower() const { return counts_.slower > 0; }

 private:
  std::map<Problem, Measured> times_;
  ComparisonCounts counts_;
  TextTable table_{{{""},
                    {"dtype"},
                    {"before µs", Align::right},
                    {"95% interval", Align::right},
                    {"now µs", Align::right},
                    {"95% interval", Align::right},
                    {"before / now", Align::right},
                    {"verdict"}}};
};

/// Whether anything of it failed to run: the machine lacks memory, or a candidate is wrong.
int code_of(const BenchResult& result) {
  if (!result.refusal.empty()) return exit_lacking;
  for (const BenchEntry& entry : result.entries)
    if (!entry.failure.empty()) return exit_check_failed;
  return exit_good;
}

/// Says so where making the data and the float64 reference takes more than a minute.
void announce(const Op& op, const Problem& problem) {
  constexpr double flops_of_core = 4e9, bytes_of_core = 2e8;  // in a second, at least
  const Cost cost = cost_of(op, problem);
  const double cores = std::max(1u, std::thread::hardware_concurrency());
  const double seconds = (cost.flops / flops_of_core + cost.bytes / bytes_of_core) / cores;
  if (seconds > 60)
    spdlog::warn("{}: its data and reference take about {:.0f} minutes before anything is timed",
                 problem.text(), std::ceil(seconds / 60));
}

/// Seconds, roughly: the reference, and samples that last longer for larger problems.
double weight_of(const Op& op, const Problem& problem) {
  const Cost cost = cost_of(op, problem);
  return 1 + cost.flops / 1e11 + cost.bytes / 1e9;
}

int run(const Op& op, const Options& options, const Session& session) {
  const std::string device = device_named(options.device, session.environment);
  TimeRequest request;
  request.samples = static_cast<int>(parse_whole(options.samples, "--samples", 1, 1'000'000));
  request.seconds = parse_duration(options.budget, "--budget");
  const std::uint64_t seed = parse_seed(options.seed, "--seed");
  StatusLine status(progress_mode(options.progress, session.output));
  const auto problems = problems_of(op, options.problem, Sizes::required, kind_of_device(device));
  const PresetLibrary presets = load_presets(options.presets, session);
  const auto backend = open_named(device, session);
  LocalEvaluator evaluator(*backend, session.catalog, seed);

  Against against(options.against, backend->facts());
  if (!options.against.empty() &&
      std::none_of(problems.begin(), problems.end(),
                   [&](const Problem& problem) { return against.knows(problem); }))
    throw Error(ErrorKind::invalid_input,
                fmt::format("--against {} has no time of {}{}: give the same sizes as then",
                            options.against, problems.front().text(),
                            problems.size() > 1 ? " or the others" : ""));

  const std::string token_size(op.token_size());
  TextTable table({{token_size, Align::right},
                   {"dtype"},
                   {"what"},
                   {"median µs", Align::right},
                   {"95% interval", Align::right},
                   {"roofline", Align::right},
                   {"of fftune's", Align::right},
                   {"how"}});
  Json document = {{"device", to_json(backend->facts())}, {"problems", Json::array()}};
  double weight = 0;
  for (const Problem& problem : problems) weight += weight_of(op, problem);
  ProgressBar progress(status, "bench", problems.size(), weight);
  const Interrupt interrupt;
  int code = exit_good;
  for (const Problem& problem : problems) {
    if (interrupt.requested() || !evaluator.lost().empty()) break;
    progress.show(problem.text(), true);
    announce(op, problem);
    const BenchResult result = bench(session.catalog, op, problem, presets, evaluator, request);
    add_rows(table, token_size, result);
    document["problems"].push_back(result_json(result));
    if (!options.against.empty())
      document["problems"].back()["against"] = against.add(token_size, result);
    progress.step(weight_of(op, problem), "");
    code = std::max(code, code_of(result));
  }
  status.clear();

  session.output.heading(fmt::format("{} on {} ({})", op.name(), device, backend->facts().name));
  session.output.table(table);
  const Limits limits = backend->limits(problems.front().dtype);
  session.output.line("floor by: " + limits.method);
  against.print(options.against, session.output);
  if (against.any_slower()) code = std::max<int>(code, exit_check_failed);
  document["limits"] = {{"bytes_per_second", limits.bytes_per_second},
                        {"flops_per_second", limits.flops_per_second},
                        {"method", limits.method}};
  session.output.document(document);
  if (!evaluator.lost().empty()) {
    spdlog::error("{}", evaluator.lost());
    return exit_lacking;
  }
  return interrupt.requested() ? exit_interrupted : code;
}

}  // namespace

void add_bench(CommandLine& line) {
  CLI::App& group = line.add_group(
      line.root(), "bench", "the library's plan beside the roofline and the unfused pipelines");
  for (const Op* op : line.catalog().ops) {
    auto options = std::make_shared<Options>();
    CLI::App& command =
        line.add(group, std::string(op->name()), std::string(op->summary()),
                 [op, options](const Session& session) { return run(*op, *options, session); });
    add_problem_options(command, *op, Sizes::required, options->problem);
    add_device_option(command, options->device, false);
    add_presets_option(command, options->presets);
    command.add_option("--samples", options->samples, "of each, interleaved (default: 50)")
        ->type_name("N");
    command
        .add_option("--budget", options->budget, "time for each problem's samples (default: 5s)")
        ->type_name("TIME");
    command.add_option("--seed", options->seed, "of the data (default: 0)")->type_name("N");
    command
        .add_option("--against", options->against,
                    "compare with earlier times, what bench --json printed or presets, by their "
                    "intervals: FASTER, SLOWER, SAME or UNDECIDED; exit 1 if any is SLOWER")
        ->type_name("FILE");
    add_progress_option(command, options->progress);
  }
}

}  // namespace fftune::tool

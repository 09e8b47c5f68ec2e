#include "apps/fftune/bench/bench_run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/terminal/json.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "core/file_access.hpp"
#include "measure/roofline.hpp"
#include "store/preset_library.hpp"

namespace fftune::tool {

namespace {

constexpr int most_attempts = 3;

/// The roofline's floor, from the measured rates of a copy and a GEMM.
void add_floor(const Op& op, const Limits& limits, BenchResult& result) {
  const Cost cost = cost_of(op, result.problem);
  const double compute = floor_seconds({cost.flops, 0}, limits);
  const double memory = floor_seconds({0, cost.bytes}, limits);
  result.floor_us = 1e6 * std::max(compute, memory);
  result.limit = compute > memory ? "compute" : "memory";
}

/// The least time of a run of stages by itself, in microseconds.
double floor_of(const std::vector<StageSpec>& stages, std::size_t first, std::size_t count,
                const Limits& limits) {
  return 1e6 * floor_seconds(cost_of_stages(stages, first, count), limits);
}

}  // namespace

std::optional<BenchResult> bench(const Catalog& catalog, const Op& op, const Problem& problem,
                                 const PresetLibrary& presets, Evaluator& evaluator,
                                 const TimeRequest& request, const BurstPlan& plan,
                                 const std::atomic<bool>& cancel, bool stages) {
  BenchResult result;
  result.problem = problem;
  const DeviceFacts& facts = evaluator.facts();
  const Choice choice = choose(catalog, op, problem, facts, presets);
  result.rule = choice.reason;
  result.far = choice.far;
  result.refusal = evaluator.begin(problem).refusal;
  if (cancel) return std::nullopt;
  if (!result.refusal.empty()) return result;

  Candidates candidates{{0, choice.recipe, ""}};
  result.entries.push_back({.name = "fftune", .summary = recipe_text(choice.recipe)});
  const Recipe untuned = default_recipe(op, problem, facts);
  if (untuned != choice.recipe) {
    candidates.push_back({0, untuned, ""});
    result.entries.push_back({.name = "untuned", .summary = recipe_text(untuned)});
  }
  if (stages) {
    std::size_t first = 0;
    for (const Variant& variant : choice.recipe) {
      const auto own = family_of(op, variant.family).stages();
      candidates.push_back({first, {variant}, ""});
      result.entries.push_back({.name = fmt::format("{}", fmt::join(own, "+")),
                                .summary = variant.id(),
                                .floor_us = floor_of(op.stages(problem), first, own.size(),
                                                     evaluator.limits(problem.dtype))});
      first += own.size();
    }
    // A kernel's time behind the others may be less than its time by itself, because it starts
    // while they drain, or more. It is the difference of two of these times.
    for (std::size_t count = 2; count < choice.recipe.size(); ++count) {
      const Recipe begin(choice.recipe.begin(), choice.recipe.begin() + std::ptrdiff_t(count));
      std::size_t covered = 0;
      for (const Variant& variant : begin) covered += family_of(op, variant.family).stages().size();
      candidates.push_back({0, begin, ""});
      result.entries.push_back(
          {.name = "up to " + family_of(op, begin.back().family).stages().back(),
           .summary = fmt::format("the first {} kernels in a row", count),
           .floor_us = floor_of(op.stages(problem), 0, covered, evaluator.limits(problem.dtype))});
    }
  }
  for (const Baseline& baseline : op.baselines(problem, facts)) {
    candidates.push_back({0, {}, baseline.name});
    result.entries.push_back({.name = baseline.name, .summary = baseline.summary});
  }

  // Nothing of ours is timed before it is validated; the tests hold the baselines to the reference.
  Candidates sound;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (cancel) return std::nullopt;
    if (candidates[i].baseline.empty()) {
      const Verified verified = evaluator.verify(candidates[i]);
      if (verified.cancelled) return std::nullopt;
      result.entries[i].failure = verified.failure;
      result.entries[i].error = verified.error;
      result.entries[i].tolerance = verified.tolerance;
    }
    if (!result.entries[i].failure.empty()) continue;
    sound.push_back(candidates[i]);
    places.push_back(i);
  }
  std::vector<BurstTiming> timings;
  evaluator.disturbances();  // those of what came before
  for (int attempt = 0; attempt < most_attempts; ++attempt) {
    if (cancel && attempt == 0) return std::nullopt;
    if (cancel) break;  // what was measured stands, disturbed as it is
    timings = time_in_bursts(evaluator, sound, request, plan);
    result.disturbances = evaluator.disturbances();
    if (result.disturbances.empty() || !evaluator.lost().empty()) break;
  }
  for (std::size_t i = 0; i < timings.size(); ++i) {
    BenchEntry& entry = result.entries[places[i]];
    entry.failure = timings[i].last.failure;
    if (!entry.failure.empty()) continue;
    entry.microseconds = summarise_bursts(timings[i].bursts);
    if (places.front() == 0 && timings.front().last.failure.empty())
      entry.ratio = ratio_of(timings[i].bursts, timings.front().bursts);
  }
  add_floor(op, evaluator.limits(problem.dtype), result);
  result.kept_bytes = kept_bytes(op.tensors(problem));
  return result;
}

namespace {

/// The document of a bench; nothing for anything else.
std::optional<Json> bench_document(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return std::nullopt;
  std::string text;
  try {
    text = read_whole_file(path);
  } catch (const Error& unreadable) {
    throw Error(unreadable.kind(), fmt::format("--against {} {}", path, unreadable.what()));
  }
  try {
    Json document = parse_json(text);
    if (document.find("problems") == nullptr) return std::nullopt;
    return document;
  } catch (const Error&) {
    return std::nullopt;  // no JSON
  }
}

struct TimedProblem {
  std::string problem;  // JSON
  Measured measured;
};

/// fftune's own times; throws Error(invalid_input) for a document that lacks some.
std::vector<TimedProblem> own_times(const Json& document) {
  std::vector<TimedProblem> times;
  for (const Json& row : array_in(document, "problems")) {
    const Json::Array& entries = array_in(row, "entries");
    // Only the values that bench draws are the same every time.
    if (text_in(row, "values", "random") != "random" || entries.empty()) continue;
    const Json& own = entries.front();
    if (!(number_in(own, "median_us") > 0)) continue;
    const Json* const problem = row.find("problem");
    times.push_back({.problem = problem ? json_line(*problem) : "",
                     .measured = {.median_us = number_in(own, "median_us"),
                                  .low_us = number_in(own, "low_us"),
                                  .high_us = number_in(own, "high_us")}});
  }
  return times;
}

std::map<Problem, Measured> times_of_bench(const Json& document, const std::string& path) {
  std::vector<TimedProblem> all;
  try {
    all = own_times(document);
  } catch (const Error&) {
    throw Error(ErrorKind::invalid_input,
                fmt::format("--against {} has problems without times: give what `fftune bench "
                            "--json` printed, or presets",
                            path));
  }
  std::map<Problem, Measured> times;
  for (const TimedProblem& each : all)
    times[problem_from_json(each.problem).problem] = each.measured;
  return times;
}

std::map<Problem, Measured> times_of_presets(const std::string& path, const DeviceFacts& facts) {
  std::map<Problem, Measured> own, other;
  for (const PresetFile& file : whole_preset_files({path}, "compared")) {
    const bool here = device_match(file.device, facts) == DeviceMatch::exact;
    for (const PresetRecord& record : file.records)
      (here ? own : other)[record.problem] = measured_of(record.verdict);
  }
  return own.empty() ? other : own;
}

std::map<Problem, Measured> earlier_times(const std::string& path, const DeviceFacts& facts) {
  if (path.empty()) return {};
  std::error_code error;
  if (!std::filesystem::exists(path, error))
    throw Error(ErrorKind::invalid_input,
                fmt::format("--against {} is not there: give what `fftune bench --json` printed, "
                            "or presets",
                            path));
  const auto document = bench_document(path);
  return document ? times_of_bench(*document, path) : times_of_presets(path, facts);
}

std::string interval_text(double low, double high) {
  return fmt::format("{}-{}", microseconds_text(low), microseconds_text(high));
}

}  // namespace

Against::Against(std::string path, const DeviceFacts& facts, const Catalog& catalog)
    : catalog_(catalog),
      path_(std::move(path)),
      table_({{""},
              {"dtype"},
              {"before µs", Align::right},
              {"95% interval", Align::right},
              {"now µs", Align::right},
              {"95% interval", Align::right},
              {"before / now", Align::right},
              {"verdict"}}) {
  for (const auto& [problem, measured] : earlier_times(path_, facts))
    times_[compared(problem)] = measured;
}

Problem Against::compared(const Problem& problem) const {
  return compared_part(problem, comparison_of(catalog_, problem.op));
}

Json Against::add(const std::string& token_size, const BenchResult& result) {
  const auto before = times_.find(compared(result.problem));
  if (before == times_.end() || result.entries.empty()) return nullptr;
  const Measured& then = before->second;
  const Summary& now = result.entries.front().microseconds;
  const Comparison verdict = compare(then, {now.median, now.low, now.high});
  counts_.add(verdict);
  table_.row({fmt::format("{}={}", token_size, result.problem.size(token_size)),
              std::string(dtype_name(result.problem.dtype)),
              microseconds_text(then.median_us),
              interval_text(then.low_us, then.high_us),
              microseconds_text(now.median),
              interval_text(now.low, now.high),
              ratio_cell(now.median > 0 ? then.median_us / now.median : 0),
              {std::string(comparison_name(verdict)), comparison_style(verdict)}});
  return {{"median_us", then.median_us},
          {"low_us", then.low_us},
          {"high_us", then.high_us},
          {"verdict", comparison_name(verdict)}};
}

void Against::print(const Output& output) const {
  if (table_.empty()) return;
  output.line("");
  output.heading("against " + path_);
  output.table(table_);
  output.line(counts_.text());
}

}  // namespace fftune::tool

#include "apps/fftune/bench_run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace fftune::tool {

namespace {

constexpr int most_attempts = 3;

/// The roofline's floor, from the measured rates of a copy and a GEMM.
void add_floor(const Op& op, const Limits& limits, BenchResult& result) {
  const Cost cost = cost_of(op, result.problem);
  const double compute = limits.flops_per_second > 0 ? cost.flops / limits.flops_per_second : 0;
  const double memory = limits.bytes_per_second > 0 ? cost.bytes / limits.bytes_per_second : 0;
  result.floor_us = 1e6 * std::max(compute, memory);
  result.limit = compute > memory ? "compute" : "memory";
}

/// The least time of a run of stages by itself, each of whose inputs is read once.
double floor_of(const std::vector<StageSpec>& stages, std::size_t first, std::size_t count,
                const Limits& limits) {
  double bytes = 0, flops = 0;
  for (std::size_t i = first; i < first + count; ++i) {
    bytes += stages[i].bytes;
    flops += stages[i].flops;
  }
  const double compute = limits.flops_per_second > 0 ? flops / limits.flops_per_second : 0;
  const double memory = limits.bytes_per_second > 0 ? bytes / limits.bytes_per_second : 0;
  return 1e6 * std::max(compute, memory);
}

}  // namespace

BenchResult bench(const Catalog& catalog, const Op& op, const Problem& problem,
                  const PresetLibrary& presets, Evaluator& evaluator, const TimeRequest& request,
                  const BurstPlan& plan, bool stages) {
  BenchResult result;
  result.problem = problem;
  const DeviceFacts& facts = evaluator.facts();
  const Choice choice = choose(catalog, op, problem, facts, presets);
  result.rule = choice.reason;
  result.far = choice.far;
  result.refusal = evaluator.begin(problem).refusal;
  if (!result.refusal.empty()) return result;

  std::vector<Candidate> candidates{{0, choice.recipe, ""}};
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
  std::vector<Candidate> sound;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].baseline.empty()) {
      const Verified verified = evaluator.verify(candidates[i]);
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

}  // namespace fftune::tool

#include "apps/fftune/bench_run.hpp"

#include <algorithm>

namespace fftune::tool {

namespace {

/// The roofline's floor, by what a copy and a GEMM reached here.
void add_floor(const Op& op, const Limits& limits, BenchResult& result) {
  const Cost cost = cost_of(op, result.problem);
  const double compute = limits.flops_per_second > 0 ? cost.flops / limits.flops_per_second : 0;
  const double memory = limits.bytes_per_second > 0 ? cost.bytes / limits.bytes_per_second : 0;
  result.floor_us = 1e6 * std::max(compute, memory);
  result.limit = compute > memory ? "compute" : "memory";
}

}  // namespace

BenchResult bench(const Catalog& catalog, const Op& op, const Problem& problem,
                  const PresetLibrary& presets, Evaluator& evaluator, const TimeRequest& request) {
  BenchResult result;
  result.problem = problem;
  const DeviceFacts& facts = evaluator.facts();
  const Choice choice = choose(catalog, op, problem, facts, presets);
  result.rule = choice.reason;
  result.far = choice.far;
  result.refusal = evaluator.begin(problem).refusal;
  if (!result.refusal.empty()) return result;

  std::vector<Candidate> candidates{{0, choice.recipe, ""}};
  result.entries.push_back({"fftune", recipe_text(choice.recipe), {}, ""});
  const Recipe untuned = default_recipe(op, problem, facts);
  if (untuned != choice.recipe) {
    candidates.push_back({0, untuned, ""});
    result.entries.push_back({"untuned", recipe_text(untuned), {}, ""});
  }
  for (const Baseline& baseline : op.baselines(problem, facts)) {
    candidates.push_back({0, {}, baseline.name});
    result.entries.push_back({baseline.name, baseline.summary, {}, ""});
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
  const std::vector<Timing> timings = evaluator.time(sound, request);
  for (std::size_t i = 0; i < timings.size(); ++i) {
    BenchEntry& entry = result.entries[places[i]];
    entry.failure = timings[i].failure;
    if (entry.failure.empty()) entry.microseconds = summarise(timings[i].samples_us);
  }
  add_floor(op, evaluator.limits(problem.dtype), result);
  result.kept_bytes = kept_bytes(op.tensors(problem));
  return result;
}

}  // namespace fftune::tool

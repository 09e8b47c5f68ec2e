#include "ranks/rank_record.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "measure/roofline.hpp"
#include "measure/statistics.hpp"

namespace fftune {
namespace {

constexpr int verdict_samples = 32, stage_samples = 9;

/// A recipe whose results are right on all ranks, with its times in microseconds.
struct Contender {
  Plan plan;
  Verification verified;
  std::vector<double> samples_us = {};
};

std::vector<double> microseconds(std::vector<double> seconds) {
  for (double& value : seconds) value *= 1e6;
  return seconds;
}

/// Those of the recipes that are different and right, timed in turns.
std::vector<Contender> contenders_of(Lockstep& ranks, const std::vector<Recipe>& recipes) {
  std::vector<Contender> all;
  for (const Recipe& recipe : recipes) {
    const bool known = std::any_of(all.begin(), all.end(), [&](const Contender& other) {
      return other.plan.recipe() == recipe;
    });
    if (known || !ranks.all_have(recipe_text(recipe))) continue;
    auto plan = ranks.plan(recipe);
    if (!plan) continue;
    auto verified = ranks.verify(plan->executables());
    if (verified.passed) all.push_back({std::move(*plan), std::move(verified)});
  }
  std::vector<Executables> executables;
  for (const Contender& contender : all) executables.push_back(contender.plan.executables());
  const auto times = ranks.time(executables, verdict_samples);
  for (std::size_t i = 0; i < all.size(); ++i) all[i].samples_us = microseconds(times[i]);
  return all;
}

std::vector<StageRecord> stages_of(Lockstep& ranks, const Catalog& catalog, const Plan& plan) {
  ranks.compute_intermediates(plan);
  std::vector<Executables> alone;
  for (const auto& executable : plan.executables()) alone.push_back({executable});
  const auto times = ranks.time(alone, stage_samples);
  std::vector<StageRecord> stages;
  for (std::size_t i = 0; i < plan.recipe().size(); ++i) {
    const Variant& variant = plan.recipe()[i];
    const Family& family = family_of(ranks.op(), variant.family);
    stages.push_back({.stages = family.stages(),
                      .variant = variant,
                      .source_hash = catalog.sources->hash(family.sources()),
                      .median_us = median(microseconds(times[i])),
                      .feasible = 1,
                      .measured = 1,
                      .failed = 0});
  }
  return stages;
}

/// On a CPU the peers themselves are other processes on its cores, which says nothing.
std::vector<std::string> disturbances_of(const Lockstep& ranks) {
  if (ranks.facts().kind == DeviceKind::cpu) return {};
  auto own = ranks.backend().disturbances();
  if (ranks.group().largest(own.empty() ? 0 : 1) > 0 && own.empty())
    own.emplace_back("a rank's device was disturbed");
  return own;
}

}  // namespace

PresetRecord record_on_ranks(Lockstep& ranks, const Catalog& catalog, const RankSearchResult& found,
                             const std::vector<Recipe>& present,
                             const std::vector<StageCounts>& counts) {
  const Op& op = ranks.op();
  const Problem& problem = ranks.problem();
  const Recipe untuned = default_recipe(op, problem, ranks.facts());
  std::vector<Recipe> recipes{found.recipe};
  recipes.insert(recipes.end(), present.begin(), present.end());
  recipes.push_back(untuned);
  const auto contenders = contenders_of(ranks, recipes);
  if (contenders.empty())
    throw Error(ErrorKind::unavailable,
                fmt::format("{}: no recipe was right twice: search again", problem.text()));
  const auto winner = std::min_element(contenders.begin(), contenders.end(),
                                       [](const Contender& a, const Contender& b) {
                                         return median(a.samples_us) < median(b.samples_us);
                                       });
  PresetRecord record{.problem = problem,
                      .stages = stages_of(ranks, catalog, winner->plan),
                      .error = winner->verified.error,
                      .tolerance = winner->verified.tolerance,
                      .provenance = provenance_now(ranks.facts(), Lockstep::seed)};
  if (winner->plan.recipe() == found.recipe)
    for (std::size_t i = 0; i < std::min(counts.size(), record.stages.size()); ++i) {
      record.stages[i].feasible = counts[i].feasible;
      record.stages[i].measured = counts[i].measured;
      record.stages[i].failed = counts[i].failed;
    }

  Verdict& verdict = record.verdict;
  const Summary summary = summarise(winner->samples_us);
  verdict.median_us = summary.median;
  verdict.interval_low_us = summary.low;
  verdict.interval_high_us = summary.high;
  verdict.noise = noise_floor(winner->samples_us);
  const Cost cost = cost_of(op, problem);
  const Limits limits = ranks.backend().limits(problem.dtype);
  verdict.roofline_fraction = floor_seconds(cost, limits) * 1e6 / verdict.median_us;
  verdict.limit = limit_of(cost, limits);
  verdict.strategy = "ranks";
  verdict.complete = found.complete;
  for (const Contender& contender : contenders)
    if (contender.plan.recipe() == untuned)
      verdict.untuned_ratio = ratio_of({contender.samples_us}, {winner->samples_us}).median;
  verdict.disturbances = disturbances_of(ranks);
  return record;
}

}  // namespace fftune

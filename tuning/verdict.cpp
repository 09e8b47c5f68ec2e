#include "tuning/verdict.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <limits>
#include <utility>

#include "tuning/combine.hpp"
#include "tuning/decide.hpp"
#include "tuning/enumerate.hpp"
#include "tuning/measure.hpp"

namespace fftune {
namespace {

/// Combinations that are timed whole: sums of stage medians are off by what stages do to each
/// other's caches, and by how far the second may start early, which is less than this.
constexpr double combination_band = 1.25;
constexpr std::size_t most_combinations = 16;
constexpr int combination_samples = 9;
constexpr int verdict_samples = 32;
constexpr std::size_t most_runners_up = 3;

struct Whole {
  Combination combination;
  Candidate candidate;
  Verified verified;
  int registers = 0;
  double median_us = std::numeric_limits<double>::infinity();
};

std::vector<Contestant> contestants(const Group& group, const std::vector<std::size_t>& indices) {
  std::vector<Contestant> all;
  for (const auto index : indices) {
    const auto& outcome = group.outcome(index);
    all.push_back({outcome.id, outcome.median_us, outcome.registers});
  }
  return all;
}

/// Those that decide the group: the finalists that work, or all that were timed.
std::vector<std::size_t> deciders(const Searched& searched) {
  auto indices = searched.finalists;
  std::erase_if(
      indices, [&](std::size_t index) { return !std::isfinite(searched.group->median_us(index)); });
  if (indices.empty()) indices = searched.group->timed();
  return indices;
}

/// The fastest of every family that has no choice yet: what a stage gives or takes in the company
/// of the others shows only when they are timed together.
void add_other_families(const Group& group, std::size_t place, GroupChoices& result) {
  auto indices = group.timed();
  std::sort(indices.begin(), indices.end(),
            [&](auto a, auto b) { return group.median_us(a) < group.median_us(b); });
  for (const auto index : indices) {
    const auto& family = group.variants()[index].family;
    const bool present = std::any_of(
        result.choices.begin(), result.choices.end(),
        [&](const auto& choice) { return group.variants()[choice.variant].family == family; });
    if (!present) result.choices.push_back({place, index, group.median_us(index)});
  }
}

/// The winner by the tie-break, the fastest, the next by preference, and the best of each other
/// family.
GroupChoices choices_of(const Searched& searched, std::size_t place, double tie_band,
                        std::size_t stage_count) {
  const Group& group = *searched.group;
  const auto indices = deciders(searched);
  GroupChoices result{group.span(), {}};
  if (indices.empty()) return result;
  const auto all = contestants(group, indices);
  auto order = by_preference(all, tie_band);
  const auto fastest = std::min_element(order.begin(), order.end(), [&](auto a, auto b) {
    return all[a].median_us < all[b].median_us;
  });
  if (fastest != order.begin()) std::rotate(order.begin() + 1, fastest, fastest + 1);
  // What covers the whole op was timed whole already: its winner stands.
  order.resize(
      std::min<std::size_t>(order.size(), group.span().stage_count == stage_count ? 1 : 3));
  for (const auto at : order) result.choices.push_back({place, indices[at], all[at].median_us});
  if (group.span().stage_count != stage_count) add_other_families(group, place, result);
  return result;
}

/// Fills up the runners-up from those that did not come into the finals.
void add_runners_up(const Group& group, const std::vector<std::size_t>& finalists,
                    std::size_t winner, StageRecord& record) {
  auto others = group.timed();
  std::erase_if(others, [&](std::size_t index) {
    return index == winner ||
           std::find(finalists.begin(), finalists.end(), index) != finalists.end();
  });
  const auto all = contestants(group, others);
  for (const auto at : by_preference(all, 0))
    if (record.runners_up.size() < most_runners_up)
      record.runners_up.push_back({all[at].id, all[at].median_us});
}

StageRecord stage_record(const Session& session, const Searched& searched, std::size_t variant) {
  const Group& group = *searched.group;
  StageRecord record;
  const auto stages = session.op().stages(session.problem());
  for (std::size_t i = 0; i < group.span().stage_count; ++i)
    record.stages.push_back(stages[group.span().first_stage + i].name);
  record.variant = group.variants()[variant];
  const auto& family = family_of(session.op(), record.variant.family);
  record.source_hash = session.catalog().sources->hash(family.sources());
  record.median_us = group.median_us(variant);

  const auto indices = deciders(searched);
  const auto all = contestants(group, indices);
  const auto ties = tied(all, session.options().tie_band);
  const auto order = by_preference(all, session.options().tie_band);
  for (std::size_t rank = 0; rank < order.size(); ++rank) {
    if (indices[order[rank]] == variant) continue;
    const Timed timed{all[order[rank]].id, all[order[rank]].median_us};
    if (rank < ties)
      record.ties.push_back(timed);
    else if (record.runners_up.size() < most_runners_up)
      record.runners_up.push_back(timed);
  }
  add_runners_up(group, indices, variant, record);
  record.feasible = static_cast<int>(group.variants().size());
  for (std::size_t i = 0; i < group.variants().size(); ++i) {
    record.measured += group.outcome(i).kind == OutcomeKind::measured;
    record.failed += group.outcome(i).failed();
  }
  return record;
}

Provenance provenance(const Session& session, const DeviceFacts& facts) {
  Provenance provenance;
  provenance.fftune = FFTUNE_VERSION;
  provenance.device = facts.name;
  provenance.driver = facts.driver;
  provenance.toolkit = facts.toolkit;
  provenance.clock_mhz = facts.clock_hz / 1e6;
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[sizeof "2026-11-21T14:03:22Z"];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  provenance.date = text;
  provenance.seed = session.options().seed;
  return provenance;
}

/// Verifies the combinations as whole recipes; those that fail are outcomes.
std::vector<Whole> verified_wholes(Session& session, const std::vector<Searched>& groups,
                                   const std::vector<Combination>& combinations,
                                   TuneResult& result) {
  std::vector<Whole> wholes;
  for (const auto& combination : combinations) {
    // Out of time, one that works is enough: they come fastest first.
    if (!wholes.empty() && !session.stop_reason().empty()) break;
    if (!session.evaluator().lost().empty()) break;
    Whole whole{combination, {}, {}};
    for (const auto& part : combination.parts) {
      const Group& group = *groups[part.group].group;
      whole.candidate.recipe.push_back(group.variants()[part.variant]);
      whole.registers += group.outcome(part.variant).registers;
    }
    session.launch({whole.candidate});
    whole.verified = session.evaluator().verify(whole.candidate);
    session.progress().done++;
    session.tell();
    if (whole.verified.passed) {
      wholes.push_back(std::move(whole));
      continue;
    }
    Outcome outcome;
    outcome.id = whole.candidate.id();
    outcome.kind = whole.verified.device_fault ? OutcomeKind::device_fault
                   : whole.verified.fatal      ? OutcomeKind::crashed
                                               : OutcomeKind::verify_failed;
    outcome.reason = whole.verified.failure;
    outcome.error = whole.verified.error;
    session.record("", outcome);
    result.outcomes.push_back(outcome);
  }
  return wholes;
}

/// Times them in turn and drops those that fail; nothing to time if there is but one.
void time_wholes(Session& session, std::vector<Whole>& wholes, TuneResult& result) {
  if (wholes.size() < 2) return;
  std::vector<Candidate> candidates;
  for (const auto& whole : wholes) candidates.push_back(whole.candidate);
  TimeRequest request;
  session.launch(candidates);
  request.samples = combination_samples;
  request.seconds = std::clamp(session.seconds_left() * 0.4, 0.1, 3.0);
  const auto timings = session.evaluator().time(candidates, request);
  for (std::size_t i = 0; i < wholes.size(); ++i) {
    const auto& timing = timings[i];
    Outcome outcome;
    outcome.id = candidates[i].id();
    outcome.registers = wholes[i].registers;
    outcome.error = wholes[i].verified.error;
    outcome.finalist = true;
    if (timing.failure.empty() && !timing.samples_us.empty()) {
      const auto summary = summarise(timing.samples_us);
      wholes[i].median_us = summary.median;
      outcome.kind = OutcomeKind::measured;
      outcome.samples = summary.samples;
      outcome.median_us = summary.median;
      outcome.low_us = summary.low;
      outcome.high_us = summary.high;
    } else {
      outcome.kind = timing.device_fault ? OutcomeKind::device_fault
                     : timing.fatal      ? OutcomeKind::crashed
                                         : OutcomeKind::launch_failed;
      outcome.reason = timing.failure;
    }
    session.record("", outcome);
    result.outcomes.push_back(outcome);
  }
  std::erase_if(wholes, [](const Whole& whole) { return !std::isfinite(whole.median_us); });
}

const Whole& winner_of(const std::vector<Whole>& wholes, double tie_band) {
  std::vector<Contestant> all;
  for (const auto& whole : wholes)
    all.push_back({whole.candidate.id(), whole.median_us, whole.registers});
  return wholes[by_preference(all, tie_band).front()];
}

/// Times the winner with fresh samples beside the baselines; false if that failed.
bool time_winner(Session& session, const Whole& winner, Verdict& verdict, TuneResult& result) {
  std::vector<Candidate> candidates{winner.candidate};
  if (session.options().baselines && !session.cancelled())
    for (const auto& baseline :
         session.op().baselines(session.problem(), session.evaluator().facts()))
      candidates.push_back({0, {}, baseline.name});
  TimeRequest request;
  session.launch(candidates);
  request.samples = verdict_samples;
  request.seconds = session.cancelled() ? 0.3 : std::clamp(session.seconds_left() * 0.5, 0.3, 3.0);
  const auto timings = session.evaluator().time(candidates, request);
  const auto& own = timings.front();
  if (!own.failure.empty() || own.samples_us.empty()) {
    result.notes.push_back(fmt::format("{} could not be timed: {}", winner.candidate.id(),
                                       own.failure.empty() ? "no samples" : own.failure));
    return false;
  }
  const auto summary = summarise(own.samples_us);
  verdict.median_us = summary.median;
  verdict.interval_low_us = summary.low;
  verdict.interval_high_us = summary.high;
  verdict.noise = noise_floor(own.samples_us);
  for (std::size_t i = 1; i < candidates.size(); ++i) {
    if (!timings[i].failure.empty() || timings[i].samples_us.empty()) {
      result.notes.push_back(fmt::format("the baseline '{}' could not be timed: {}",
                                         candidates[i].baseline, timings[i].failure));
      continue;
    }
    result.baselines.push_back({candidates[i].baseline, median(timings[i].samples_us)});
  }
  // "unfused" by name: what verdict.unfused_ratio speaks of.
  for (const auto& baseline : result.baselines)
    if (baseline.id == "unfused") verdict.unfused_ratio = baseline.median_us / verdict.median_us;
  return true;
}

}  // namespace

bool have_cover(const std::vector<Searched>& groups, std::size_t stage_count) {
  std::vector<Span> spans;
  for (const auto& searched : groups)
    if (!searched.group->timed().empty()) spans.push_back(searched.group->span());
  return covers(spans, stage_count);
}

void conclude(Session& session, const std::vector<Searched>& groups, TuneResult& result) {
  if (!session.evaluator().lost().empty()) return;
  const std::size_t stage_count = session.op().stages(session.problem()).size();
  std::vector<GroupChoices> choices;
  for (std::size_t i = 0; i < groups.size(); ++i)
    choices.push_back(choices_of(groups[i], i, session.options().tie_band, stage_count));
  const auto combinations = combine(choices, stage_count, combination_band, most_combinations);

  auto& progress = session.progress();
  progress.phase = Phase::combine;
  progress.group.clear();
  progress.done = 0;
  progress.total = static_cast<int>(combinations.size());
  session.tell();

  auto wholes = verified_wholes(session, groups, combinations, result);
  time_wholes(session, wholes, result);
  if (wholes.empty()) {
    if (!combinations.empty()) result.notes.push_back("no whole recipe worked: see the outcomes");
    return;
  }
  const Whole& winner = winner_of(wholes, session.options().tie_band);

  PresetRecord record;
  record.problem = session.problem();
  if (!time_winner(session, winner, record.verdict, result)) return;
  for (const auto& part : winner.combination.parts)
    record.stages.push_back(stage_record(session, groups[part.group], part.variant));
  const double floor = session.floor_us(0, stage_count);
  record.verdict.roofline_fraction = floor / record.verdict.median_us;
  record.verdict.limit = session.compute_bound() ? "compute" : "memory";
  record.verdict.strategy = session.options().strategy;
  record.error = winner.verified.error;
  record.tolerance = winner.verified.tolerance;
  record.provenance = provenance(session, session.evaluator().facts());

  progress.best_us = record.verdict.median_us;
  progress.best_id = winner.candidate.id();
  progress.roofline = record.verdict.roofline_fraction;
  result.record = std::move(record);
}

}  // namespace fftune

#include "tuning/decide/end_to_end.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "measure/statistics.hpp"

namespace fftune {
namespace {

void extend(const std::vector<GroupChoices>& groups, std::size_t stage, std::size_t stage_count,
            const Combination& so_far, std::vector<Combination>& all) {
  if (stage == stage_count) {
    all.push_back(so_far);
    return;
  }
  for (const auto& group : groups) {
    if (group.span.first_stage != stage) continue;
    for (const auto& choice : group.choices) {
      Combination longer = so_far;
      longer.parts.push_back(choice);
      longer.sum_us += choice.median_us;
      extend(groups, stage + group.span.stage_count, stage_count, longer, all);
    }
  }
}

}  // namespace

bool same(const Combination& a, const Combination& b) {
  return std::equal(a.parts.begin(), a.parts.end(), b.parts.begin(), b.parts.end(),
                    [](const Part& left, const Part& right) {
                      return left.group == right.group && left.variant == right.variant;
                    });
}

std::vector<Combination> combine(const std::vector<GroupChoices>& groups, std::size_t stage_count,
                                 double band, std::size_t count) {
  std::vector<Combination> all;
  extend(groups, 0, stage_count, {}, all);
  std::stable_sort(all.begin(), all.end(),
                   [](const Combination& a, const Combination& b) { return a.sum_us < b.sum_us; });
  std::size_t kept = 0;
  while (kept < std::min(count, all.size()) && all[kept].sum_us <= all.front().sum_us * band)
    ++kept;
  all.resize(kept);
  return all;
}

namespace {

/// Samples of each, and how many times as many again while some are not told apart.
constexpr int combination_samples = 9;
constexpr int most_extensions = 3;

/// The last outcome of a candidate stands.
void take(Session& session, const Outcome& outcome, TuneResult& result) {
  session.record("", outcome);
  auto& all = result.outcomes;
  const auto old = std::find_if(all.begin(), all.end(),
                                [&](const Outcome& other) { return other.id == outcome.id; });
  if (old != all.end())
    *old = outcome;
  else
    all.push_back(outcome);
}

/// Adds the samples, or makes it a failure without a time.
void take(Session& session, EndToEnd& contender, const Timing& timing, TuneResult& result) {
  Outcome outcome;
  outcome.id = contender.candidate.id();
  outcome.registers = contender.registers;
  outcome.error = contender.verified.error;
  outcome.finalist = true;
  if (timing.failure.empty() && !timing.samples_us.empty()) {
    contender.samples_us.insert(contender.samples_us.end(), timing.samples_us.begin(),
                                timing.samples_us.end());
    const auto summary = summarise(contender.samples_us);
    contender.median_us = outcome.median_us = summary.median;
    contender.low_us = outcome.low_us = summary.low;
    contender.high_us = outcome.high_us = summary.high;
    outcome.kind = OutcomeKind::measured;
    outcome.samples = summary.samples;
  } else {
    contender.median_us = std::numeric_limits<double>::infinity();
    outcome.kind = timing.device_fault ? OutcomeKind::device_fault
                   : timing.fatal      ? OutcomeKind::crashed
                                       : OutcomeKind::launch_failed;
    outcome.reason = timing.failure;
  }
  take(session, outcome, result);
}

}  // namespace

std::vector<EndToEnd> verified_end_to_end(Session& session, const std::vector<Searched>& groups,
                                          const std::vector<Combination>& combinations,
                                          const std::vector<EndToEnd>& verified,
                                          TuneResult& result) {
  std::vector<EndToEnd> contenders;
  const auto required = session.required_bits({0, session.op().stages(session.problem()).size()});
  for (const auto& combination : combinations) {
    if (!session.evaluator().lost().empty()) break;
    // Out of time, one that works is enough, as they come fastest first, beside those that the
    // winner must not be slower than.
    const bool needed = combination.on_record || (combination.expected && !session.cancelled());
    if (!contenders.empty() && !session.stop_reason().empty() && !needed) continue;
    const auto known = std::find_if(verified.begin(), verified.end(), [&](const EndToEnd& other) {
      return same(other.combination, combination);
    });
    if (known != verified.end()) {
      contenders.push_back({combination, known->candidate, known->verified, known->registers});
      continue;
    }
    EndToEnd contender{combination, {}, {}};
    for (const auto& part : combination.parts) {
      const VariantGroup& group = *groups[part.group].group;
      contender.candidate.recipe.push_back(group.variants()[part.variant]);
      contender.registers += group.outcome(part.variant).registers;
    }
    session.launch({contender.candidate});
    contender.verified = session.evaluator().verify(contender.candidate);
    session.progress().done++;
    session.tell();
    if (contender.verified.cancelled) break;
    const bool other_bits = !required.empty() && contender.verified.bits != required;
    if (contender.verified.passed && !other_bits) {
      contenders.push_back(std::move(contender));
      continue;
    }
    Outcome outcome;
    outcome.id = contender.candidate.id();
    outcome.kind = contender.verified.passed         ? OutcomeKind::other_bits
                   : contender.verified.device_fault ? OutcomeKind::device_fault
                   : contender.verified.fatal        ? OutcomeKind::crashed
                                                     : OutcomeKind::verify_failed;
    outcome.reason = contender.verified.passed
                         ? "its results differ in some bits from the present winner's"
                         : contender.verified.failure;
    outcome.error = contender.verified.error;
    take(session, outcome, result);
  }
  return contenders;
}

void time_end_to_end(Session& session, std::vector<EndToEnd>& contenders, TuneResult& result) {
  if (contenders.size() < 2) return;
  for (int more = 0; more <= most_extensions && contenders.size() > 1; ++more) {
    Candidates candidates;
    for (const auto& contender : contenders) candidates.push_back(contender.candidate);
    TimeRequest request;
    session.launch(candidates);
    request.samples = combination_samples;
    request.seconds =
        session.cancelled() ? 0.3 : std::clamp(session.seconds_left() * 0.4, 0.1, 3.0);
    const auto timings = session.evaluator().time(candidates, request);
    for (std::size_t i = 0; i < contenders.size(); ++i)
      take(session, contenders[i], timings[i], result);
    std::erase_if(contenders,
                  [](const EndToEnd& contender) { return !std::isfinite(contender.median_us); });
    const double band = session.options().tie_band;
    if (!tied(finalists_of(contenders), band).is_open(band)) break;
    if (!session.stop_reason().empty()) break;
  }
}

std::vector<Finalist> finalists_of(const std::vector<EndToEnd>& contenders) {
  std::vector<Finalist> all;
  for (const auto& contender : contenders)
    all.push_back({contender.candidate.id(), contender.median_us, contender.registers,
                   contender.low_us, contender.high_us, contender.samples_us});
  return all;
}

}  // namespace fftune

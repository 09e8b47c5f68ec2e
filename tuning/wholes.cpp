#include "tuning/wholes.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "tuning/measure.hpp"

namespace fftune {
namespace {

constexpr int combination_samples = 9;

}  // namespace

std::vector<Whole> verified_wholes(Session& session, const std::vector<Searched>& groups,
                                   const std::vector<Combination>& combinations,
                                   TuneResult& result) {
  std::vector<Whole> wholes;
  const auto required = session.required_bits({0, session.op().stages(session.problem()).size()});
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
    const bool other_bits = !required.empty() && whole.verified.bits != required;
    if (whole.verified.passed && !other_bits) {
      wholes.push_back(std::move(whole));
      continue;
    }
    Outcome outcome;
    outcome.id = whole.candidate.id();
    outcome.kind = whole.verified.passed         ? OutcomeKind::other_bits
                   : whole.verified.device_fault ? OutcomeKind::device_fault
                   : whole.verified.fatal        ? OutcomeKind::crashed
                                                 : OutcomeKind::verify_failed;
    outcome.reason = whole.verified.passed
                         ? "its results differ in some bits from the present winner's"
                         : whole.verified.failure;
    outcome.error = whole.verified.error;
    session.record("", outcome);
    result.outcomes.push_back(outcome);
  }
  return wholes;
}

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
      wholes[i].low_us = summary.low;
      wholes[i].high_us = summary.high;
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

std::vector<Contestant> contestants(const std::vector<Whole>& wholes) {
  std::vector<Contestant> all;
  for (const auto& whole : wholes)
    all.push_back(
        {whole.candidate.id(), whole.median_us, whole.registers, whole.low_us, whole.high_us});
  return all;
}

}  // namespace fftune

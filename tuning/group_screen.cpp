// How a group tries its variants for the first time: one by one, or on several devices at once.
#include <set>

#include "tuning/estimate.hpp"
#include "tuning/group.hpp"

namespace fftune {
namespace {

/// A variant is screened by at most this many samples, and by one if that takes this long.
constexpr int screening_samples = 3;
constexpr double screening_seconds = 0.004;

}  // namespace

double Group::estimate_us(std::size_t index) const {
  const auto& variant = spec_.variants[index];
  return estimated_us(family_of(session_.op(), variant.family), problem(), facts(), variant.config,
                      floor_us_);
}

std::vector<double> Group::traits(std::size_t index) const {
  const auto& variant = spec_.variants[index];
  return launch_traits(family_of(session_.op(), variant.family), problem(), facts(),
                       variant.config);
}

void Group::screen(std::size_t index, double abandon_us) {
  auto& entry = entries_[index];
  // Tried before, here or in the journal: what is known of it stands.
  const bool done = entry.outcome.kind != OutcomeKind::not_tried;
  if (!done && ready(index)) {
    TimeRequest request;
    request.samples = screening_samples;
    request.seconds = screening_seconds;
    request.abandon_above_us = abandon_us;
    take_screened(index, session_.evaluator().time({candidate(index)}, request).front());
  }
  count_screen(index);
}

void Group::take_screened(std::size_t index, const Timing& timing) {
  const auto& entry = entries_[index];
  take_timing(index, timing);
  ++tried_;
  if (entry.outcome.failed()) return;
  session_.record(entry.source_hash, entry.outcome);
  session_.quarantine(entry.source_hash, entry.outcome, false);
}

std::vector<std::size_t> Group::screen_all(const std::vector<std::size_t>& indices, double band,
                                           int samples) {
  std::vector<std::size_t> reached, wanted;
  std::vector<Candidate> candidates;
  for (const auto index : indices) {
    if (entries_[index].outcome.kind != OutcomeKind::not_tried) {
      count_screen(index);
      reached.push_back(index);
      continue;
    }
    wanted.push_back(index);
    candidates.push_back(candidate(index));
  }
  std::set<std::size_t> running;  // of `candidates`
  TrialCalls calls;
  calls.begins = [&](std::size_t i) {
    running.insert(i);
    std::vector<Candidate> in_flight;
    for (const auto each : running) in_flight.push_back(candidates[each]);
    session_.launch(in_flight);
  };
  calls.request = [&] {
    TimeRequest request;
    request.samples = samples;
    if (samples <= screening_samples) request.seconds = screening_seconds;
    request.abandon_above_us = best_us_ * band;
    return request;
  };
  calls.ends = [&](std::size_t i, const Verified& verified, const Timing& timing) {
    running.erase(i);
    if (take_verified(wanted[i], verified)) take_screened(wanted[i], timing);
    count_screen(wanted[i]);
    reached.push_back(wanted[i]);
    return !stopped() && !enough();
  };
  session_.evaluator().try_each(candidates, calls);
  return reached;
}

}  // namespace fftune

#include "tuning/evaluate/evaluator.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace fftune {
namespace {

/// A scheduler lets others run for some milliseconds, and a few of them in a row at worst.
constexpr double longest_stall_us = 0.25e6;

}  // namespace

std::string Candidate::id() const {
  return baseline.empty() ? recipe_text(recipe) : baseline;
}

std::vector<Compiled> not_started(std::size_t candidates) {
  Compiled one;
  one.failure = "not started";
  return std::vector<Compiled>(candidates, one);
}

bool GuardedSink::operator()(std::size_t index, const Compiled& compiled) {
  if (thrown_) return false;
  try {
    return sink_(index, compiled);
  } catch (...) {
    thrown_ = std::current_exception();
    return false;
  }
}

void Evaluator::try_each(const Candidates& candidates, const TrialCalls& calls) {
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    calls.begins(i);
    const auto verified = verify(candidates[i]);
    Timing timing;
    if (verified.passed) timing = std::move(time({candidates[i]}, calls.request()).front());
    if (!calls.ends(i, verified, timing)) return;
  }
}

bool is_hopeless(const std::vector<double>& samples_us, double limit_us) {
  int above = 0;
  for (const double sample : samples_us) {
    if (sample > limit_us + longest_stall_us) return true;
    above += sample > limit_us;
  }
  return above > 1;
}

bool is_doubtful(const std::vector<double>& samples_us, double limit_us) {
  return samples_us.size() < 3 && !is_hopeless(samples_us, limit_us) &&
         std::any_of(samples_us.begin(), samples_us.end(),
                     [&](double sample) { return sample > limit_us; });
}

namespace {

/// From six on the range of the bursts' medians covers 95%; of eight it covers more than 99%.
constexpr int cpu_bursts = 8;
/// Apart by more than a scheduler's or a quota's period, and in all by the usual length of other
/// work.
constexpr double longest_pause = 0.1;
constexpr double warm_up = 0.01;
constexpr int least_samples = 3;
constexpr int most_warm_up_samples = 100;

void rest(const BurstPlan& plan) {
  if (plan.pause_seconds <= 0) return;
  if (plan.sleep)
    plan.sleep(plan.pause_seconds);
  else
    std::this_thread::sleep_for(std::chrono::duration<double>(plan.pause_seconds));
}

}  // namespace

BurstPlan bursts_for(DeviceKind kind, double seconds) {
  if (kind != DeviceKind::cpu) return {};
  const double pause = std::clamp(seconds / (2 * (cpu_bursts - 1)), 0.0, longest_pause);
  return {.bursts = cpu_bursts, .pause_seconds = pause, .warm_up_seconds = warm_up};
}

std::vector<double> BurstTiming::samples_us() const {
  std::vector<double> all;
  for (const auto& burst : bursts) all.insert(all.end(), burst.begin(), burst.end());
  return all;
}

std::vector<BurstTiming> time_in_bursts(Evaluator& evaluator, const Candidates& candidates,
                                        const TimeRequest& request, const BurstPlan& plan) {
  std::vector<BurstTiming> timings(candidates.size());
  TimeRequest part = request;
  part.samples = std::max((request.samples + plan.bursts - 1) / plan.bursts,
                          std::min(request.samples, least_samples));
  part.seconds = request.seconds / plan.bursts;
  TimeRequest warm_up = part;
  warm_up.samples = most_warm_up_samples;
  warm_up.seconds = plan.warm_up_seconds;
  for (int burst = 0; burst < plan.bursts; ++burst) {
    if (burst > 0) rest(plan);
    std::vector<std::size_t> places;
    Candidates live;
    for (std::size_t i = 0; i < candidates.size(); ++i)
      if (timings[i].last.failure.empty()) {
        places.push_back(i);
        live.push_back(candidates[i]);
      }
    if (live.empty() || !evaluator.lost().empty()) break;
    if (plan.warm_up_seconds > 0) evaluator.time({live.front()}, warm_up);
    const auto taken = evaluator.time(live, part);
    for (std::size_t i = 0; i < taken.size(); ++i) {
      auto& timing = timings[places[i]];
      timing.last = taken[i];
      if (taken[i].failure.empty() && !taken[i].samples_us.empty())
        timing.bursts.push_back(taken[i].samples_us);
    }
  }
  return timings;
}

}  // namespace fftune

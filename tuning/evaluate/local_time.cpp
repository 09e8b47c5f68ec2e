// How a LocalEvaluator takes samples of several candidates in turn.
#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "measure/runner.hpp"
#include "tuning/evaluate/local_state.hpp"

namespace fftune {
namespace {

/// A first pass this long is a sample: what it found cold no longer matters.
constexpr double telling_seconds = 5e-3;
/// A first pass this long is not mistaken by more than a few percent, a shorter one may be by a
/// factor.
constexpr double trusted_seconds = 1e-3;
constexpr double doubt = 3;

}  // namespace

std::vector<Timing> LocalEvaluator::time(const Candidates& candidates, const TimeRequest& request) {
  using Clock = std::chrono::steady_clock;
  const auto began = Clock::now();
  auto& state = *state_;
  std::vector<Timing> timings(candidates.size());
  std::vector<std::optional<Runner>> runners(candidates.size());
  const auto try_for = [&](std::size_t i, const auto& body) {
    if (const auto failure = state.attempt(body)) {
      timings[i].failure = failure->text;
      timings[i].device_fault = failure->device_fault;
      runners[i].reset();
    }
  };
  const auto take = [&](std::size_t i, double seconds) {
    timings[i].samples_us.push_back(seconds * 1e6);
    timings[i].abandoned = is_hopeless(timings[i].samples_us, request.abandon_above_us);
    state.pass_seconds[candidates[i].id()] = seconds;
  };

  const auto sample = [&](std::size_t i) {
    const double pass = state.pass_seconds.at(candidates[i].id());
    state.announce(i, candidates[i], pass * runners[i]->passes());
    return runners[i]->sample();
  };

  const auto doubtful = [&](const Timing& timing) {
    return timing.failure.empty() && is_doubtful(timing.samples_us, request.abandon_above_us);
  };

  // One workspace serves all, and must not move once a sequence is captured.
  std::vector<Executables> all(candidates.size());
  for (std::size_t i = 0; i < candidates.size(); ++i)
    try_for(i, [&] {
      all[i] = state.timed_executables(candidates[i]);
      state.reserve_workspace(all[i]);
      runners[i].emplace(state.backend, Pass{}, state.rotation);
    });
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (!runners[i]) continue;
    try_for(i, [&] {
      runners[i].emplace(state.backend,
                         Pass{all[i], state.tensors_of(candidates[i]),
                              state.workspace ? state.workspace->data() : nullptr},
                         state.rotation);
      const auto known = state.pass_seconds.find(candidates[i].id());
      if (known == state.pass_seconds.end()) {
        state.announce(i, candidates[i], 0);
        const double first = runners[i]->probe();
        const double limit = request.abandon_above_us * 1e-6;
        const bool hopeless = first > limit * (first < trusted_seconds ? doubt : 1);
        if (first >= telling_seconds || hopeless) take(i, first);
        state.pass_seconds[candidates[i].id()] = first;
      }
      if (timings[i].abandoned) return;
      const double expected = state.pass_seconds.at(candidates[i].id());
      runners[i]->plan(expected);
      // The first run of a captured sequence uploads it.
      if (expected < trusted_seconds) sample(i);
    });
  }

  for (int round = 0; round < request.samples; ++round) {
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      const bool sampled = timings[i].samples_us.size() > static_cast<std::size_t>(round);
      if (!runners[i] || timings[i].abandoned || sampled) continue;
      try_for(i, [&] { take(i, sample(i)); });
    }
    const std::chrono::duration<double> spent = Clock::now() - began;
    if (spent.count() >= request.seconds && std::none_of(timings.begin(), timings.end(), doubtful))
      break;
  }
  return timings;
}

}  // namespace fftune

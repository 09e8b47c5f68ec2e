#include "tuning/evaluate/evaluator.hpp"

#include <algorithm>
#include <utility>

namespace fftune {
namespace {

/// A scheduler lets others run for some milliseconds, and a few of them in a row at worst.
constexpr double longest_stall_us = 0.25e6;

}  // namespace

std::string Candidate::id() const {
  return baseline.empty() ? recipe_text(recipe) : baseline;
}

void Evaluator::try_each(const std::vector<Candidate>& candidates, const TrialCalls& calls) {
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

}  // namespace fftune

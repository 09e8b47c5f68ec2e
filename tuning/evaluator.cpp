#include "tuning/evaluator.hpp"

#include <utility>

namespace fftune {

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

}  // namespace fftune

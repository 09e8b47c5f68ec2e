#include "tuning/evaluator.hpp"

namespace fftune {

std::string Candidate::id() const {
  return baseline.empty() ? recipe_text(recipe) : baseline;
}

}  // namespace fftune

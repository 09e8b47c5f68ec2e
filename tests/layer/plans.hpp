// Plans of layers against the float64 reference.
#pragma once

#include "layer/problems.hpp"
#include "runtime/plan.hpp"
#include "support/verify_variants.hpp"

namespace fftune::test {

/// The default recipe's plan, of any number of layers.
inline void verify_plan(Backend& backend, const Problem& problem) {
  const Recipe recipe = default_recipe(layer_op(), problem, backend.facts());
  const Plan plan(backend, layer_op(), problem, recipe);
  CAPTURE(problem.text(), recipe_text(recipe));
  Verifier verifier(backend, layer_op(), problem, 1);
  const auto result = verifier.verify(0, layer_op().stages(problem).size(), plan.executables());
  CAPTURE(result.failure, result.error, result.tolerance);
  CHECK(result.passed);
}

}  // namespace fftune::test

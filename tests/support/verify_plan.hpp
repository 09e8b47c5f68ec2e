// Verifying a plan of a whole problem on a device.
#pragma once

#include "registry/catalog.hpp"
#include "runtime/plan.hpp"
#include "support/catch.hpp"
#include "verify/verifier.hpp"

namespace fftune::test {

/// By the recipe that serves the problem untuned.
inline void verify_plan(Backend& backend, const Op& op, const Problem& problem,
                        std::uint64_t seed) {
  const Recipe recipe = default_recipe(op, problem, backend.facts());
  const Plan plan(backend, op, problem, recipe);
  CAPTURE(problem.text(), recipe_text(recipe));
  Verifier verifier(backend, op, problem, seed);
  const auto result = verifier.verify(0, op.stages(problem).size(), plan.executables());
  CAPTURE(result.failure, result.error, result.tolerance);
  CHECK(result.passed);
}

}  // namespace fftune::test

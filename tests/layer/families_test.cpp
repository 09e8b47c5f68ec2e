// Layers of every small model against the float64 reference: families one by one, recipes, and
// several layers in one plan.
#include <random>

#include "layer/problems.hpp"
#include "runtime/plan.hpp"
#include "support/op_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// A model's problem in decode or prefill.
Problem problem_of(const SmallModel& model, DeviceKind kind, DType dtype, Sizes more,
                   Options options = {}) {
  Sizes sizes = model.sizes;
  for (const auto& [name, value] : more) sizes[name] = value;
  for (const auto& [name, value] : model.options) options[name] = value;
  return layer_problem(kind, dtype, std::move(sizes), std::move(options));
}

/// Decoding and prefill, with sequences of one length and of several.
struct Use {
  Sizes sizes;
  const char* lengths;
};
std::vector<Use> uses() {
  return {{{{"batch", 1}, {"cache", 33}}, "full"},
          {{{"batch", 5}, {"cache", 40}}, "ragged"},
          {{{"batch", 2}, {"s", 13}, {"cache", 13}}, "full"},
          {{{"batch", 3}, {"s", 7}, {"cache", 29}}, "ragged"}};
}

void verify_plan(Backend& backend, const Problem& problem, std::uint64_t seed) {
  const Recipe recipe = default_recipe(layer_op(), problem, backend.facts());
  const Plan plan(backend, layer_op(), problem, recipe);
  CAPTURE(problem.text(), recipe_text(recipe));
  Verifier verifier(backend, layer_op(), problem, seed);
  const auto result = verifier.verify(0, layer_op().stages(problem).size(), plan.executables());
  CAPTURE(result.failure, result.error, result.tolerance);
  CHECK(result.passed);
}

void verify_model(Backend& backend, const SmallModel& model, DType dtype, int more) {
  const DeviceKind kind = backend.facts().kind;
  std::mt19937_64 random(1);
  for (const Use& use : uses()) {
    const Problem problem = problem_of(model, kind, dtype, use.sizes, {{"lengths", use.lengths}});
    CHECK(verify_variants(backend, layer_op(), problem, random, more) > 0);
    verify_plan(backend, problem, 1);
    Sizes several = use.sizes;
    several["layers"] = 3;
    verify_plan(backend, problem_of(model, kind, dtype, several, {{"lengths", use.lengths}}), 2);
  }
}

}  // namespace

TEST_CASE("layers of every model are right on the CPU, in decode and prefill") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  for (const SmallModel& model : small_models()) DYNAMIC_SECTION(model.name) {
      for (const DType dtype : layer_op().dtypes(DeviceKind::cpu))
        verify_model(*backend, model, dtype, 1);
    }
}

TEST_CASE("layers of every model are right on the GPU, in decode and prefill", "[gpu]") {
  const auto backend = open_first_cuda();
  if (!backend) FFTUNE_SKIP("there is no CUDA device here");
  for (const SmallModel& model : small_models()) DYNAMIC_SECTION(model.name) {
      for (const DType dtype : {DType::bf16, DType::fp16, DType::f32})
        verify_model(*backend, model, dtype, dtype == DType::bf16 ? 1 : 0);
    }
}

// A mixture on a GPU gives the same bits in every run: sums over choices, over the rows of experts
// and over the parts of k all have a fixed order.
#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "moe/problems.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

using Outputs = std::map<std::string, std::vector<std::byte>>;

Outputs outputs_of(OpRun& run, const Problem& problem) {
  Outputs outputs;
  for (const TensorSpec& spec : moe_ffn_op().tensors(problem))
    if (spec.role == Role::output) outputs[spec.name] = run.bytes(spec.name);
  return outputs;
}

}  // namespace

TEST_CASE("a thousand runs of a mixture give the same bits", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const Op& op = moe_ffn_op();
  const DeviceKind cuda = DeviceKind::cuda;
  std::vector<Problem> problems;
  // One launch, two, tiles of gathered rows and tiles of copied ones.
  for (const std::int64_t m : {1, 5, 64, 700})
    problems.push_back(moe_problem({m, 256, 384, 16, 4, 1}, DType::bf16, cuda));
  for (const std::int64_t m : {1, 300})
    problems.push_back(moe_problem({m, 256, 384, 16, 4}, DType::fp8, cuda, {{"scales", "block"}}));
  problems.push_back(moe_problem({200, 256, 384, 16, 4}, DType::bf16, cuda, {}, "bwd"));
  for (const Problem& problem : problems) {
    const Recipe recipe = default_recipe(op, problem, backend->facts());
    CAPTURE(problem.text(), recipe_text(recipe));
    OpRun run(*backend, op, problem);
    const auto executables = run.compile(op, problem, recipe);
    run.run(executables);
    const Outputs first = outputs_of(run, problem);
    for (int i = 1; i < 1000; ++i) {
      run.run(executables);
      REQUIRE(outputs_of(run, problem) == first);
    }
  }
}

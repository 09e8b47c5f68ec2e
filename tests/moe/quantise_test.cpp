// Mixtures of experts with tokens that the op quantises to e4m3.
#include <random>
#include <string>
#include <vector>

#include "cpu/open.hpp"
#include "moe/problems.hpp"
#include "support/op_reference.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

std::vector<Options> quantised_forms() {
  return {{{"quantise", "token"}},
          {{"quantise", "block"}, {"bias", "all"}, {"residual", "yes"}},
          {{"quantise", "token"}, {"gate-up", "halves"}, {"weigh", "before"}}};
}

}  // namespace

TEST_CASE("experts with quantised tokens are those of fp8, behind a stage of their own",
          "[quantise]") {
  const Problem problem =
      moe_problem({4, 256, 128, 8, 2}, DType::bf16, DeviceKind::cuda, {{"quantise", "token"}});
  std::vector<std::string> stages;
  for (const StageSpec& stage : moe_ffn_op().stages(problem)) stages.push_back(stage.name);
  CHECK(stages == std::vector<std::string>{"route", "quantise", "gate_up", "down", "combine"});
}

TEST_CASE("experts with quantised tokens are right on the CPU", "[quantise]") {
  verify_experts(quantised_forms(), {{1, 33, 64, 3, 2}, {20, 160, 130, 4, 2, 1}});
}

TEST_CASE("experts with quantised tokens are right on a GPU", "[quantise][gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(2);
  std::vector<Problem> problems;
  for (const Options& options : quantised_forms())
    for (const MoeSizes& sizes :
         {MoeSizes{1, 256, 128, 8, 4}, {70, 272, 384, 8, 2}, {300, 512, 256, 6, 3, 1}})
      problems.push_back(moe_problem(sizes, DType::bf16, DeviceKind::cuda, options));
  verify_families(*backend, moe_ffn_op(), problems, random, 1);
}

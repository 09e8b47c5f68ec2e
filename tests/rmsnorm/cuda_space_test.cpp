// The CUDA families' spaces: never empty, defaults feasible, launches legal, for any problem and
// architecture.
#include <random>

#include "cuda/launch_limits.hpp"
#include "rmsnorm/problems.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("every problem has a CUDA family, with a default that its space allows") {
  std::mt19937_64 random(4);
  for (int i = 0; i < 600; ++i) {
    const auto facts = facts_of_architecture(known_architectures()[random() % 6]);
    const Problem problem = random_rmsnorm(DeviceKind::cuda, random, std::int64_t{1} << 30);
    bool served = false;
    for (const Family* family : rmsnorm_op().families()) {
      if (family->device_kind() != DeviceKind::cuda) continue;
      CAPTURE(problem.text(), family->name(), facts.arch);
      if (family->refusal(problem, facts)) {
        const bool other_pass =
            family->stages().front() != rmsnorm_op().stages(problem).front().name;
        CHECK((other_pass || !family->is_fallback()));
        continue;
      }
      served = true;
      const Space space = family->space(problem, facts);
      const Config config = family->default_config(problem, facts);
      CAPTURE(config.text());
      CHECK(space.violations(config).empty());
      for (const auto& step : family->program(problem, facts, config).steps)
        CHECK(cuda::launch_failure(std::get<KernelLaunch>(step), {}, facts).empty());
    }
    CHECK(served);
  }
}

TEST_CASE("the widths of models have rows in registers, with a choice of variants") {
  for (const auto& arch : known_architectures())
    for (const auto& pass : {"fwd", "bwd"})
      for (const std::int64_t d : {64, 128, 768, 2048, 4096, 5120, 8192}) {
        const auto facts = facts_of_architecture(arch);
        const Problem problem = rmsnorm_problem(DeviceKind::cuda, pass, DType::bf16, 4096, d);
        const Family& family =
            family_of(rmsnorm_op(), std::string(pass) == "fwd" ? "forward_rows" : "backward_rows");
        CAPTURE(problem.text(), arch);
        REQUIRE_FALSE(family.refusal(problem, facts));
        CHECK(family.space(problem, facts).feasible().size() >= 40);
      }
}

TEST_CASE("the widest rows are spread over a cluster where there are clusters") {
  const auto facts = facts_of_architecture("sm_90a");
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const auto& pass : {"fwd", "bwd"}) {
      const Problem problem = rmsnorm_problem(DeviceKind::cuda, pass, dtype, 100, 65536);
      const Family& family =
          family_of(rmsnorm_op(), std::string(pass) == "fwd" ? "forward_rows" : "backward_rows");
      CAPTURE(problem.text());
      const auto refusal = family.refusal(problem, facts);
      CAPTURE(refusal.value_or(""));
      REQUIRE_FALSE(refusal);
      const Config config = family.default_config(problem, facts);
      CHECK((config.at("cluster") > 1 || (dtype == DType::bf16 && std::string(pass) == "fwd")));
    }
}

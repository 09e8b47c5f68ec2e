// The CUDA families' spaces: never empty, defaults feasible, launches legal, for any problem and
// architecture.
#include "norm/problems.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("rmsnorm: the widths of models have rows in registers, with a choice of variants") {
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

TEST_CASE("rmsnorm: the widest rows are spread over a cluster where there are clusters") {
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

TEST_CASE("layernorm: many wide rows have blocks enough on an SM to fill the waits for each row") {
  const auto facts = facts_of_architecture("sm_90a");
  const Family& family = family_of(layernorm_op(), "forward_rows");
  const auto group_of = [&](DType dtype, std::int64_t m, std::int64_t d) {
    const Problem problem = layernorm_problem(DeviceKind::cuda, "fwd", dtype, m, d);
    const Config config = family.default_config(problem, facts);
    CAPTURE(problem.text(), config.text());
    CHECK(family.space(problem, facts).violations(config).empty());
    return config.at("group");
  };
  // Registers as ptxas has them: 43 for 2 vectors of 8 elements, 57 for 3, 64 for 4, 77 for 5.
  CHECK(group_of(DType::bf16, 9369, 4096) == 256);
  CHECK(group_of(DType::bf16, 9369, 8192) == 256);   // four blocks of 16 KB, and not two
  CHECK(group_of(DType::bf16, 9369, 9920) == 256);   // three of 19 KB, and not one
  CHECK(group_of(DType::bf16, 9369, 12288) == 512);  // two of 24 KB
  CHECK(group_of(DType::bf16, 9369, 16384) == 512);
  CHECK(group_of(DType::bf16, 100, 9920) == 1024);  // few rows: each as fast as it can be
  for (const DType dtype : {DType::bf16, DType::f32})
    for (std::int64_t d = 2056; d <= 16384; d += 344) CHECK(group_of(dtype, 20000, d) <= 1024);
}

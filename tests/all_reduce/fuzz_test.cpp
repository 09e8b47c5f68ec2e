// A rank that plays its peers, against the float64 reference, on every family of a device.
#include "all_reduce/problems.hpp"
#include "cuda/launch_limits.hpp"
#include "device/facts.hpp"
#include "support/fuzz_cases.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("all-reduce is in the catalog, and adds by hand") {
  check_registration(all_reduce_op());
  const Problem problem = all_reduce_problem(DeviceKind::cpu, DType::f32, 3, 1, 2,
                                             {{"norm", "t5"}, {"residual", "yes"}, {"eps", "0"}});
  const auto tensors =
      run_reference(problem, {{"x", {1, 2}}, {"residual", {0, 1}}, {"w", {10, 1}}});
  CHECK(tensors.at("sum") == std::vector<double>{3, 7});
  CHECK(tensors.at("y")[0] == Approx(30 / std::sqrt(29.0)));
  CHECK(tensors.at("y")[1] == Approx(7 / std::sqrt(29.0)));
}

TEST_CASE("all-reduce by NCCL: legal launches behind the library's sum, on no CPU") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  const Family& family = family_of(all_reduce_op(), "all_reduce_nccl");
  Draw draw(4);
  for (int i = 0; i < 100; ++i) {
    Problem problem = random_all_reduce(DeviceKind::cuda, draw, std::int64_t{1} << 30);
    problem.options["link"] = "nccl";
    problem = canonical(all_reduce_op(), std::move(problem), DeviceKind::cuda);
    CAPTURE(problem.text());
    REQUIRE_FALSE(family.refusal(problem, facts));
    const Program program = family.program(problem, facts, {});
    REQUIRE_FALSE(program.steps.empty());
    CHECK(std::holds_alternative<LibrarySum>(program.steps[0]));
    for (std::size_t step = 1; step < program.steps.size(); ++step)
      CHECK(cuda::launch_failure(std::get<KernelLaunch>(program.steps[step]), {}, facts).empty());
  }
  for (const bool more : {false, true}) {
    const Problem problem =
        all_reduce_problem(DeviceKind::cuda, DType::bf16, 8, 20000, 4096,
                           {{"link", "nccl"}, {"residual", more ? "yes" : "no"}, {"norm", "none"}});
    const Recipe recipe = default_recipe(all_reduce_op(), problem, facts);
    REQUIRE(recipe.size() == 1);
    CHECK(recipe[0].family == "all_reduce_nccl");
    const Program program = family.program(problem, facts, recipe[0].config);
    REQUIRE(program.steps.size() == (more ? 2 : 1));
    CHECK(std::get<LibrarySum>(program.steps[0]).elements == 20000 * 4096);
    if (more) CHECK_FALSE(std::get<KernelLaunch>(program.steps[1]).programmatic);
  }
  // Layers have it too.
  const Problem layers = small_layer(DeviceKind::cuda, DType::bf16, 2, "nccl");
  int sums = 0;
  for (const Variant& variant : default_recipe(layer_op(), layers, facts)) {
    if (!variant.family.ends_with(".all_reduce_nccl")) continue;
    ++sums;
    const Program program =
        family_of(layer_op(), variant.family).program(layers, facts, variant.config);
    REQUIRE(program.steps.size() == 2);
    CHECK_FALSE(std::get<KernelLaunch>(program.steps[1]).programmatic);
  }
  CHECK(sums == 2);
  const Problem problem =
      all_reduce_problem(DeviceKind::cpu, DType::f32, 2, 3, 64, {{"link", "nccl"}});
  DeviceFacts cpu;
  cpu.kind = DeviceKind::cpu;
  for (const Family* other : all_reduce_op().families()) CHECK(other->refusal(problem, cpu));
  CHECK_THROWS_WITH(default_recipe(all_reduce_op(), problem, cpu),
                    ContainsSubstring("NCCL is for GPUs"));
}

const FuzzCases<all_reduce_op, random_all_reduce,
                FuzzCounts{.small = 2000, .larger = 0, .gpu = 100}>
    all_reduce_cases;

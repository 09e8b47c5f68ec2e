// Tensors that a mixture's kernels read before they wait for the preceding launch, and that they do
// not if that launch writes them.
#include <cstddef>
#include <string>
#include <variant>
#include <vector>

#include "device/facts.hpp"
#include "moe/problems.hpp"
#include "registry/catalog.hpp"
#include "runtime/plan.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// The untuned variant of a family.
Variant untuned(const std::string& family, const Problem& problem, const DeviceFacts& facts) {
  return {family, family_of(moe_ffn_op(), family).default_config(problem, facts)};
}

const KernelLaunch& launch_of(const Program& program, std::size_t step = 0) {
  return std::get<KernelLaunch>(program.steps.at(step));
}

/// How a GEMM's kernel gets the groups, and the tensor that it reads early.
struct GroupsOfKernel {
  std::string ready, early;
  bool operator==(const GroupsOfKernel&) const = default;
};
GroupsOfKernel groups_of_kernel(const Variant& variant, const Problem& problem,
                                const DeviceFacts& facts) {
  const Program program =
      family_of(moe_ffn_op(), variant.family).program(problem, facts, variant.config);
  const KernelLaunch& launch = launch_of(program, program.steps.size() - 1);
  const std::string& kernel = program.kernels.at(launch.kernel).expression;
  GroupsOfKernel groups;
  for (const char* ready : {"settled", "counted"})
    if (kernel.find(std::string("groups_ready::") + ready) != kernel.npos) groups.ready = ready;
  for (const TensorArgument& tensor : launch.read_early)
    groups.early += moe_ffn_op().tensors(problem).at(tensor.tensor).name;
  return groups;
}

}  // namespace

TEST_CASE("down has its groups at once, and gate and up count few ids") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  const auto of = [&](const char* family, std::int64_t m, const char* pass = "fwd",
                      std::map<std::string, std::string> options = {}) {
    const Problem problem =
        moe_problem({m, 2048, 768, 128, 8}, DType::bf16, DeviceKind::cuda, options, pass);
    Variant variant = untuned(family, problem, facts);
    if (variant.config.contains("pre_permute")) {
      variant.config.set("pre_permute", 0);
      variant.config.set("a_reuse", 1);
    }
    return groups_of_kernel(variant, problem, facts);
  };
  const GroupsOfKernel settled{"settled", "offsets"}, counted{"counted", "ids"}, awaited;
  CHECK(of("down_sm90", 16) == settled);
  CHECK(of("down_sm90", 4096) == settled);
  CHECK(of("gate_up_sm90", 16) == counted);
  CHECK(of("gate_up_sm90", 512) == counted);
  CHECK(of("gate_up_sm90", 513) == awaited);
  CHECK(of("d_hidden_sm90", 64, "bwd") == counted);
  CHECK(of("d_hidden_sm90", 4096, "bwd") == awaited);
  CHECK(of("d_hidden_sm90", 64, "bwd", {{"save", "input"}}) == settled);
  CHECK(of("d_x_sm90", 4096, "bwd") == settled);
  CHECK(of("d_down_sm90", 4096, "bwd") == settled);

  // The copy of the rows waits for the sort, and nothing is read before it.
  const Problem problem = moe_problem({64, 2048, 768, 128, 8}, DType::bf16, DeviceKind::cuda);
  Variant copied = untuned("gate_up_sm90", problem, facts);
  copied.config.set("pre_permute", 1);
  CHECK(groups_of_kernel(copied, problem, facts) == GroupsOfKernel{"settled", ""});
}

TEST_CASE("a launch waits for one that writes what it would read early") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  const Problem problem = moe_problem({1, 2048, 768, 128, 8}, DType::bf16, DeviceKind::cuda);
  const auto at = [&](const char* family) { return untuned(family, problem, facts); };
  const auto is_programmatic = [&](const Recipe& recipe, std::size_t place) {
    return launch_of(program_in(recipe, place, moe_ffn_op(), problem, facts)).programmatic;
  };
  // The decode kernel of gate and up sorts the choices, too.
  const Recipe tiles{at("route_sort"), at("gate_up_sm90"), at("down_sm90"), at("combine_rows")};
  const Recipe mixed{at("gate_up_decode"), at("down_sm90"), at("combine_rows")};
  for (std::size_t place = 0; place < tiles.size(); ++place) CHECK(is_programmatic(tiles, place));
  CHECK(is_programmatic(mixed, 0));
  CHECK_FALSE(is_programmatic(mixed, 1));
  CHECK(is_programmatic(mixed, 2));
}

TEST_CASE("kernels of both kinds make one mixture on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  if (backend->facts().compute_capability != 90) FFTUNE_SKIP("it is not of sm_90");
  for (const std::int64_t m : {1, 3, 16}) {
    const Problem problem = moe_problem({m, 512, 384, 16, 4, 1}, DType::bf16, DeviceKind::cuda);
    const auto at = [&](const char* family) { return untuned(family, problem, backend->facts()); };
    std::vector<std::vector<float>> results;
    for (const Recipe& recipe :
         {Recipe{at("route_fallback"), at("gate_up_fallback"), at("down_fallback"),
                 at("combine_fallback")},
          Recipe{at("gate_up_decode"), at("down_sm90"), at("combine_rows")},
          Recipe{at("route_sort"), at("gate_up_sm80"), at("down_sm90"), at("combine_rows")},
          Recipe{at("route_sort"), at("gate_up_fallback"), at("down_sm90"), at("combine_rows")},
          Recipe{at("route_sort"), at("gate_up_sm90"), at("down_decode")}}) {
      CAPTURE(problem.text(), recipe_text(recipe));
      OpRun run(*backend, moe_ffn_op(), problem);
      const auto executables = run.compile(moe_ffn_op(), problem, recipe);
      run.run(executables);
      results.push_back(run.values("y"));
      CHECK(relative_difference(results.back(), results.front()) < 0.01);
      const auto first = run.bytes("y");
      for (int i = 0; i < 100; ++i) {
        run.run(executables);
        REQUIRE(run.bytes("y") == first);
      }
    }
  }
}

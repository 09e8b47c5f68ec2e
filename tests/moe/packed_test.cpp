// Mixtures of experts with packed weights: every family against the float64 reference.
#include <cmath>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.hpp"
#include "cpu/open.hpp"
#include "moe/problems.hpp"
#include "support/error_of.hpp"
#include "support/op_reference.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

using Names = std::vector<std::string>;

/// gpt-oss' experts, and other formats with and without biases.
std::vector<Options> packed_forms() {
  return {{{"weights", "mxfp4"}, {"act", "swiglu-oai"}, {"bias", "all"}},
          {{"weights", "int4"}, {"group", "32"}, {"zeros", "yes"}, {"weigh", "before"}},
          {{"weights", "fp8"}, {"group", "row"}, {"residual", "yes"}},
          {{"weights", "mxfp4"}, {"save", "preact"}},
          {{"weights", "nvfp4"}, {"act", "swiglu-oai"}, {"bias", "all"}},
          {{"weights", "int8"}, {"group", "32"}, {"bias", "all"}}};
}

Names default_families(const MoeSizes& sizes, const char* arch) {
  const DeviceFacts facts = facts_of_architecture(arch);
  const Problem problem =
      moe_problem(sizes, DType::bf16, DeviceKind::cuda, {{"weights", "mxfp4"}, {"bias", "all"}});
  Names names;
  for (const Variant& variant : default_recipe(moe_ffn_op(), problem, facts))
    names.push_back(variant.family);
  return names;
}

std::string complaint(const MoeSizes& sizes, DType dtype, const Options& options) {
  return error_of([&] { moe_problem(sizes, dtype, DeviceKind::cuda, options); });
}

/// Rows of an expert that a pass of the decode kernel serves, as its type says.
int rows_of_pass(const Family& family, const Problem& problem, const DeviceFacts& facts) {
  const Program program = family.program(problem, facts, family.default_config(problem, facts));
  const auto& launch = std::get<KernelLaunch>(program.steps.at(0));
  const std::string& kernel = program.kernels.at(launch.kernel).expression;
  const std::string type = "packed_config{.tokens = ";
  return std::stoi(kernel.substr(kernel.find(type) + type.size()));
}

/// The probability of more than `most` where `mean` are expected, by Poisson's distribution.
double more_than(int most, double mean) {
  double one = std::exp(-mean), all = one;
  for (int i = 1; i <= most; ++i) all += one *= mean / i;
  return 1 - all;
}

}  // namespace

TEST_CASE("one pass over an expert's packed weights serves the rows that nearly all have") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  for (const MoeSizes& sizes : {MoeSizes{1, 2880, 2880, 32, 4}, {1, 2048, 768, 128, 8}})
    for (const std::int64_t m : {1, 4, 16, 32, 48, 64, 96, 128, 200})
      for (const char* name : {"gate_up_packed", "down_packed"}) {
        MoeSizes all = sizes;
        all.m = m;
        const auto experts = static_cast<double>(all.experts);
        const double rows = static_cast<double>(m * all.choices) / experts;
        const int pass = rows_of_pass(
            family_of(moe_ffn_op(), name),
            moe_problem(all, DType::bf16, DeviceKind::cuda, {{"weights", "mxfp4"}}), facts);
        CAPTURE(name, m, rows, pass);
        CHECK((pass == 64 || more_than(pass, rows) < 0.05));
      }
}

TEST_CASE("a block counts up to 32 ids itself, while the launch before sorts them") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  const Family& family = family_of(moe_ffn_op(), "gate_up_packed");
  for (const auto& [m, shared, counts] :
       {std::tuple<int, int, bool>{1, 0, true}, {8, 0, true}, {9, 0, false}, {1, 1, false}}) {
    CAPTURE(m, shared);
    const Problem problem = moe_problem({m, 128, 64, 16, 4, shared}, DType::bf16, DeviceKind::cuda,
                                        {{"weights", "mxfp4"}});
    const Program program = family.program(problem, facts, family.default_config(problem, facts));
    const auto& launch = std::get<KernelLaunch>(program.steps.at(0));
    const std::string& kernel = program.kernels.at(launch.kernel).expression;
    CHECK((kernel.find("groups_ready::counted") != kernel.npos) == counts);
    // A launch that writes ids or x must be complete before this one begins.
    const auto tensors = moe_ffn_op().tensors(problem);
    std::vector<std::string> early;
    for (const TensorArgument& tensor : launch.read_early)
      early.push_back(tensors.at(tensor.tensor).name);
    CHECK(early == (counts ? Names{"ids", "x"} : Names{}));
  }
}

TEST_CASE("experts with packed weights have their tensors, and a stage before each product") {
  const Problem problem = moe_problem({3, 64, 32, 4, 2}, DType::bf16, DeviceKind::cuda,
                                      {{"weights", "int4"}, {"group", "32"}, {"zeros", "yes"}});
  Names names, stages;
  const auto tensors = moe_ffn_op().tensors(problem);
  for (const TensorSpec& tensor : tensors)
    if (tensor.role != Role::intermediate) names.push_back(tensor.name);
  CHECK(names == Names{"x", "ids", "weights", "w_gate", "w_up", "w_down", "w_gate_scale",
                       "w_gate_zero", "w_up_scale", "w_up_zero", "w_down_scale", "w_down_zero",
                       "y"});
  CHECK(tensors[tensor_index(tensors, "w_gate")].shape ==
        std::vector<std::int64_t>{1 + 4 * 2, 512});
  for (const StageSpec& stage : moe_ffn_op().stages(problem)) stages.push_back(stage.name);
  CHECK(stages == Names{"route", "expand_gate_up", "gate_up", "expand_down", "down", "combine"});
}

TEST_CASE("packed experts are expanded where no kernel reads them for so many tokens") {
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const Names few = default_families({4, 2880, 2880, 32, 4}, arch);
    REQUIRE(few.size() == 4);
    CHECK(few[1] == "gate_up_packed");
    CHECK(few[2] == "down_packed");
  }
  CHECK(default_families({4096, 2880, 2880, 32, 4}, "sm_80").size() == 6);
  const Names many = default_families({4096, 2880, 2880, 32, 4}, "sm_90a");
  REQUIRE(many.size() == 4);
  CHECK(many[1] == "gate_up_packed_sm90");
  CHECK(many[2] == "down_packed_sm90");
}

TEST_CASE("packed weights that experts cannot have are refused in one line") {
  const MoeSizes sizes{3, 64, 32, 4, 2};
  CHECK(complaint(sizes, DType::bf16, {{"weights", "int4"}}) ==
        "moe-ffn: groups of 128 do not divide d=64: give group=row or another size");
  CHECK(complaint(sizes, DType::bf16, {{"weights", "mxfp4"}, {"gate-up", "halves"}}) ==
        "moe-ffn: gate-up=halves with weights=mxfp4: give gate and up a packed weight each");
  CHECK(complaint(sizes, DType::fp8, {{"weights", "mxfp4"}}) ==
        "moe-ffn: weights=mxfp4 is for x of bf16, fp16 and f32, not fp8");
  CHECK(complaint({3, 64, 40, 4, 2}, DType::bf16, {{"weights", "fp8"}, {"group", "row"}}) ==
        "moe-ffn: h=40 with weights=fp8: give a multiple of 16, the rows of a tile");
  CHECK(complaint(sizes, DType::bf16, {{"weights", "mxfp4"}}) == "");
}

TEST_CASE("the kernel of experts with packed weights has legal launches") {
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const DeviceFacts facts = facts_of_architecture(arch);
    for (const char* name : {"gate_up_packed", "down_packed"}) {
      const Family& family = family_of(moe_ffn_op(), name);
      for (const Options& options : packed_forms()) {
        const Problem problem =
            moe_problem({5, 256, 128, 8, 2}, DType::bf16, DeviceKind::cuda, options);
        CAPTURE(problem.text(), name);
        REQUIRE_FALSE(family.refusal(problem, facts).has_value());
        const Space space = family.space(problem, facts);
        CHECK(space.violations(family.default_config(problem, facts)).empty());
        for (const Config& config : space.feasible()) {
          REQUIRE(config.get("split_k") == 1);
          const Program program = family.program(problem, facts, config);
          const auto& launch = std::get<KernelLaunch>(program.steps.at(0));
          REQUIRE(launch.shared_bytes <= facts.shared_bytes_per_block);
          REQUIRE(launch.grid.x % 8 == 0);  // a group of blocks for each expert
        }
      }
      // Groups of more rows than a kernel has sums for are expanded.
      CHECK(family.refusal(moe_problem({1000, 256, 128, 8, 2}, DType::bf16, DeviceKind::cuda,
                                       {{"weights", "mxfp4"}}),
                           facts));
    }
  }
}

TEST_CASE("experts with packed weights are right on the CPU") {
  verify_experts(packed_forms(), {{1, 32, 64, 3, 2}, {20, 64, 32, 4, 2, 1}});
}

TEST_CASE("experts with packed weights are right on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(2);
  std::vector<Problem> problems;
  // One token; a few; groups of more rows than one pass has; and a shared expert.
  const std::pair<MoeSizes, const char*> all[] = {{{1, 96, 160, 8, 4}, "uniform"},
                                                  {{9, 160, 96, 16, 2}, "zipf:1.5"},
                                                  {{70, 64, 96, 8, 2}, "zipf:2"},
                                                  {{13, 96, 64, 6, 3, 1}, "uniform"}};
  std::size_t turn = 0;
  for (Options options : packed_forms())
    for (const auto& [sizes, routing] : all) {
      options["routing"] = routing;
      problems.push_back(moe_problem(sizes, turn++ % 3 == 2 ? DType::fp16 : DType::bf16,
                                     DeviceKind::cuda, options));
    }
  verify_families(*backend, moe_ffn_op(), problems, random, 1, reads_packed_weights);
}

TEST_CASE("experts with nvfp4 weights are right on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(4);
  std::vector<Problem> problems;
  for (const MoeSizes& sizes : {MoeSizes{3, 80, 48, 6, 2}, {70, 64, 96, 8, 2}})
    problems.push_back(moe_problem(sizes, DType::bf16, DeviceKind::cuda,
                                   {{"weights", "nvfp4"}, {"act", "swiglu-oai"}, {"bias", "all"}}));
  verify_families(*backend, moe_ffn_op(), problems, random, 1);
}

TEST_CASE("experts of gpt-oss' sizes are right on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(3);
  std::vector<Problem> problems;
  for (const std::int64_t m : {1, 16, 64})
    problems.push_back(moe_problem({m, 2880, 2880, 8, 4}, DType::bf16, DeviceKind::cuda,
                                   {{"weights", "mxfp4"}, {"act", "swiglu-oai"}, {"bias", "all"}}));
  verify_families(*backend, moe_ffn_op(), problems, random, 1, reads_packed_weights);
}

TEST_CASE("tiles of every height of experts' rows are right on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const Problem problem =
      moe_problem({150, 96, 192, 3, 2}, DType::bf16, DeviceKind::cuda, {{"weights", "mxfp4"}});
  Verifier verifier(*backend, moe_ffn_op(), problem, 8);
  int heights = 0;
  for (const auto& [name, stage] : {std::pair{"gate_up_packed_sm90", 1}, {"down_packed_sm90", 3}}) {
    const Family& family = family_of(moe_ffn_op(), name);
    if (family.refusal(problem, backend->facts())) FFTUNE_SKIP("the device has no wgmma");
    const Space space = family.space(problem, backend->facts());
    for (int tokens = 24; tokens <= 152; tokens += 8) {
      Config config = family.default_config(problem, backend->facts());
      for (const char* one : {"tiles", "row_groups", "k_groups", "k_blocks", "ctas", "split_k"})
        config.set(one, 1);
      config.set("tokens", tokens);
      CAPTURE(name, tokens);
      REQUIRE(space.violations(config).empty());
      const auto compiled = backend->compile(family.program(problem, backend->facts(), config));
      REQUIRE(compiled.report.failure == "");
      CHECK(verifier.verify(stage, family.stages().size(), {compiled.executable}).passed);
      ++heights;
    }
  }
  CHECK(heights == 34);
}

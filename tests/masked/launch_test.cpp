// The CUDA families' launches, without a device.
#include <algorithm>
#include <cstdint>
#include <string>
#include <variant>

#include "core/error.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/masked/masked.hpp"
#include "masked/problems.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "support/tensor_maps.hpp"

using namespace fftune;

namespace {

Problem block_problem(const Op& op, std::int64_t m, std::int64_t first, std::int64_t second,
                      const std::string& pass = "fwd") {
  return test::masked_problem(op, DeviceKind::cuda, DType::bf16, m, {first, second}, "block:0.33",
                              pass);
}

bool groups_rows(const Family& family, const Problem& problem) {
  for (const GemmStage& stage : masked::gemm_stages(problem))
    if (stage.name == family.stages().front())
      return stage.gemm(problem).groups.by == Grouping::rows;
  return false;
}

/// Every feasible variant's launch holds the device's limits; returns how many there are.
int check_launches(const Op& op, const Problem& problem, const DeviceFacts& facts) {
  int launches = 0;
  for (const Family* family : op.families()) {
    if (family->device_kind() != DeviceKind::cuda || family->refusal(problem, facts)) continue;
    const Space space = family->space(problem, facts);
    REQUIRE(space.violations(family->default_config(problem, facts)).empty());
    for (const Config& config : space.feasible()) {
      const Program program = family->program(problem, facts, config);
      const auto& launch = std::get<KernelLaunch>(program.steps.back());
      const std::string id = Variant{std::string(family->name()), config}.id();
      CAPTURE(problem.text(), id, launch.shared_bytes, launch.grid.x);
      REQUIRE(launch.shared_bytes <= facts.shared_bytes_per_block);
      REQUIRE(launch.block.x <= 1024);
      REQUIRE(launch.grid.x % launch.cluster.x == 0);
      REQUIRE(launch.grid.x > 0);
      // Each is a call of the driver in every run that has other addresses.
      REQUIRE(test::tensor_maps_of(launch).size() <= 12);
      const bool is_sm90 = program.kernels.back().file == "gemm/sm90/gemm.cu";
      if (is_sm90 && groups_rows(*family, problem) && config.at("split_k") > 1) {
        // A cluster has one tile: there is one for each that any mask may lead to.
        const std::int64_t m = problem.size("m");
        const std::int64_t rows = (m + config.at("bm") - 1) / config.at("bm") + (m > 1 ? 1 : 0);
        REQUIRE(launch.grid.x / config.at("split_k") >= rows);
      }
      ++launches;
    }
  }
  return launches;
}

}  // namespace

TEST_CASE("grouped launches fit the device") {
  for (const char* arch : {"sm_80", "sm_90a"})
    for (const std::int64_t m : {1, 63, 1024, 20000})
      for (const Op* op : {&masked_linear_op(), &masked_ffn_op()})
        for (const char* pass : {"fwd", "bwd"})
          CHECK(check_launches(*op, block_problem(*op, m, 1024, 2048, pass),
                               facts_of_architecture(arch)) > 0);
}

TEST_CASE("untuned, a mask that marks every token takes the tiles of the plain layer") {
  const auto facts = facts_of_architecture("sm_90a");
  const Problem plain =
      canonical(ffn_op(), {"ffn", "fwd", DType::bf16, {{"m", 1024}, {"d", 1024}, {"h", 2048}}, {}},
                DeviceKind::cuda);
  Problem masked = block_problem(masked_ffn_op(), 1024, 1024, 2048);
  for (const char* family : {"gate_up_sm90", "down_sm90"}) {
    const Config usual = family_of(ffn_op(), family).default_config(plain, facts);
    const auto same_tile = [&](const char* mask) {
      masked.options["mask"] = mask;
      const Config own = family_of(masked_ffn_op(), family).default_config(masked, facts);
      return own.at("bm") == usual.at("bm") && own.at("bn") == usual.at("bn");
    };
    CAPTURE(family);
    CHECK(same_tile("all"));
    CHECK(same_tile("none"));
    CHECK_FALSE(same_tile("block:0.33"));  // nine rows of such tiles, and a second wave
  }
}

TEST_CASE("tiles are as high as the groups of the problem's mask fill them") {
  const auto facts = facts_of_architecture("sm_90a");
  const Family& family = family_of(masked_ffn_op(), "down_sm90");
  const auto may_be = [&](const char* mask, int height) {
    Problem problem = block_problem(masked_ffn_op(), 1024, 4096, 14336);
    problem.options["mask"] = mask;
    const auto feasible = family.space(problem, facts).feasible();
    return std::any_of(feasible.begin(), feasible.end(),
                       [&](const Config& config) { return config.at("bm") == height; });
  };
  // 338 and 686 tokens: two and four tiles of 176, where lower ones are more and higher ones no
  // fewer.
  CHECK(may_be("block:0.33", 176));
  CHECK_FALSE(may_be("block:0.33", 168));
  CHECK_FALSE(may_be("block:0.33", 184));
  CHECK(may_be("block:0.33", 128));
  // 1024 tokens of one group: six tiles of 176 and of 184, seven of 168 and of 152.
  CHECK(may_be("all", 176));
  CHECK_FALSE(may_be("all", 184));
  CHECK(may_be("all", 152));
  CHECK_FALSE(may_be("all", 168));
  // The groups of a random mask may be larger than expected: 354 tokens are three of 168.
  CHECK(may_be("random:0.33", 184));
}

TEST_CASE("tiles of a height that was not timed must be ahead of others by the model's error") {
  const auto facts = facts_of_architecture("sm_90a");
  const Family& family = family_of(masked_ffn_op(), "gate_up_sm90");
  Problem problem = block_problem(masked_ffn_op(), 4096, 4096, 14336);
  problem.options["mask"] = "random:0.33";
  const auto seconds = [&](const Config& config) {
    return family.estimate(problem, facts, config).value();
  };
  const Config chosen = family.default_config(problem, facts);
  CHECK(chosen.at("bm") == 128);
  double least = seconds(chosen);
  for (const Config& config : family.space(problem, facts).feasible())
    least = std::min(least, seconds(config));
  CHECK(seconds(chosen) > least);
  CHECK(seconds(chosen) <= 1.03 * least);
}

TEST_CASE("gradients of the weights take memory beside the tensors only to sort scattered tokens") {
  const auto facts = facts_of_architecture("sm_90a");
  Problem problem = block_problem(masked_linear_op(), 4096, 1024, 2048, "bwd");
  const Family& family = family_of(masked_linear_op(), "dw_sm90");
  const auto program_of = [&](const Config& config) {
    return family.program(problem, facts, config);
  };
  Config config = family.default_config(problem, facts);
  CHECK_FALSE(config.contains("pre_permute"));
  CHECK_FALSE(config.contains("gather_warps"));
  CHECK(program_of(config).scratch.empty());
  CHECK(program_of(config).steps.size() == 1);
  problem.options["mask"] = "random:0.33";
  config.set("gather_warps", 2);
  config.set("pre_permute", 0);
  CHECK(program_of(config).scratch.empty());
  CHECK(program_of(config).steps.size() == 1);
  config.set("pre_permute", 1);
  CHECK(program_of(config).scratch.size() == 2);
  CHECK(program_of(config).scratch[0].bytes == 4096 * 2048 * 2);
  CHECK(program_of(config).scratch[1].bytes == 4096 * 1024 * 2);
  CHECK(program_of(config).steps.size() == 2);
}

TEST_CASE("untuned, four warps of another warpgroup gather the scattered tokens of a gradient") {
  const auto facts = facts_of_architecture("sm_90a");
  const Family& family = family_of(masked_linear_op(), "dw_sm90");
  for (const std::int64_t m : {4096, 16384}) {
    Problem problem = block_problem(masked_linear_op(), m, 1024, 1024, "bwd");
    problem.options["mask"] = "random:0.33";
    Config config = family.default_config(problem, facts);
    CAPTURE(config.text());
    CHECK(config.at("pre_permute") == 0);
    CHECK(config.at("gather_warps") == 4);
    const auto threads = [&] {
      const Program program = family.program(problem, facts, config);
      return std::get<KernelLaunch>(program.steps.back()).block.x;
    };
    CHECK(threads() == 512);
    config.set("gather_warps", 2);
    CHECK(threads() == 384);
  }
}

TEST_CASE("blocks that share the tokens of a gradient have the tiles of both experts") {
  const auto facts = facts_of_architecture("sm_90a");
  const Problem problem = block_problem(masked_linear_op(), 4096, 1024, 1024, "bwd");
  const Family& family = family_of(masked_linear_op(), "dw_sm90");
  Config config = family.default_config(problem, facts);
  CAPTURE(config.text());
  CHECK(config.at("split_k") == 2);
  const Problem longer = block_problem(masked_linear_op(), 16384, 1024, 1024, "bwd");
  CHECK(family.default_config(longer, facts).at("split_k") == 2);
  const auto blocks = [&] {
    const Program program = family.program(problem, facts, config);
    return std::get<KernelLaunch>(program.steps.back()).grid.x;
  };
  config.set("bm", 128);
  config.set("bn", 128);
  CHECK(blocks() == 2 * 64);
  config.set("split_k", 1);
  CHECK(blocks() == 2 * 64);
}

TEST_CASE("families refuse what they cannot compute") {
  const auto facts = facts_of_architecture("sm_90a");
  const Op& op = masked_linear_op();
  const auto refusal = [&](const char* family, const Problem& problem) {
    return family_of(op, family).refusal(problem, facts).value_or("");
  };
  CHECK(refusal("linear_sm90", block_problem(op, 64, 72, 64)).empty());
  CHECK(refusal("linear_sm90", block_problem(op, 64, 71, 64)).find("multiples of 8") !=
        std::string::npos);
  CHECK(refusal("linear_sm90", block_problem(op, (1 << 19) + 1, 64, 64)).find("524288") !=
        std::string::npos);
  CHECK(refusal("linear_sm80", block_problem(op, 64, 72, 64)).empty());
  CHECK_FALSE(refusal("linear_sm80", block_problem(op, 65, 72, 64)).empty());
  CHECK(refusal("linear_fallback", block_problem(op, 64, 71, 63)).empty());
  Problem backward = block_problem(op, 64, 72, 64);
  backward.pass = "bwd";
  CHECK(refusal("linear_sm90", backward) == "the pass bwd has no stage linear here");
  for (const char* family : {"dx_sm90", "dw_sm90", "dx_fallback", "dw_fallback"})
    CHECK(refusal(family, backward).empty());
  backward.sizes["k"] = 71;
  CHECK(refusal("dw_sm90", backward).find("multiples of 8") != std::string::npos);
}

// A-tile reuse: blocks that compute several tiles of the same gathered tokens.
#include <algorithm>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "kernels/masked/masked.hpp"
#include "masked/problems.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem gpu_problem(const Op& op, std::int64_t m, std::int64_t inner, std::int64_t outer,
                    const std::string& mask, const std::string& pass = "fwd",
                    const Options& options = {}) {
  return masked_problem(op, DeviceKind::cuda, DType::bf16, m, {inner, outer}, mask, pass, options);
}

/// `count` variants of the family that reuse A tiles.
std::vector<Config> with_reuse(const Family& family, const Problem& problem,
                               const DeviceFacts& facts, std::mt19937_64& random, int count) {
  std::vector<Config> configs;
  for (const Config& config : family.space(problem, facts).feasible())
    if (config.at("a_reuse") > 1) configs.push_back(config);
  std::shuffle(configs.begin(), configs.end(), random);
  configs.resize(std::min<std::size_t>(configs.size(), static_cast<std::size_t>(count)));
  return configs;
}

}  // namespace

TEST_CASE("A tiles are reused where tokens are gathered, and there alone") {
  const auto facts = facts_of_architecture("sm_90a");
  const Op& op = masked_ffn_op();
  const auto has_reuse = [&](const char* family, const std::string& mask) {
    const auto space = family_of(op, family).space(gpu_problem(op, 4096, 1024, 2048, mask), facts);
    return space.feasible().front().contains("a_reuse");
  };
  CHECK(has_reuse("gate_up_sm90", "random:0.33"));
  CHECK(has_reuse("gate_up_sm90", "even:0.5"));
  CHECK_FALSE(has_reuse("gate_up_sm90", "block:0.33"));
  CHECK_FALSE(has_reuse("gate_up_sm90", "all"));
  CHECK_FALSE(has_reuse("down_sm90", "random:0.33"));  // hidden is in the order of the mask
}

TEST_CASE("the rows that are reused are one copy of the tokens, in whole tiles of each expert") {
  const auto facts = facts_of_architecture("sm_90a");
  const Op& op = masked_linear_op();
  const Problem problem = gpu_problem(op, 16384, 1024, 1024, "random:0.33");
  const Family& family = family_of(op, "linear_sm90");
  Config config = family.default_config(problem, facts);
  for (const auto& [name, value] :
       {std::pair{"bm", 128}, {"bn", 256}, {"mma_warpgroups", 2}, {"cluster_m", 1}, {"stages", 3}})
    config.set(name, value);
  config.set("schedule", "cooperative");
  config.set("a_reuse", 1);
  const auto launch_of = [&] {
    return std::get<KernelLaunch>(family.program(problem, facts, config).steps.back());
  };
  CHECK(family.program(problem, facts, config).scratch.empty());
  CHECK(launch_of().grid.x == 132);
  config.set("a_reuse", 4);
  const Program program = family.program(problem, facts, config);
  REQUIRE(program.scratch.size() == 1);
  CHECK(program.scratch[0].bytes == (16384 + 128) * 1024 * 2);
  CHECK(launch_of().grid.x == 129);  // rows of tiles at most, each with four tiles
}

TEST_CASE("reused A tiles are right under every mask", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  std::mt19937_64 random(1);
  const auto verify = [&](const Op& op, const char* name, std::int64_t m, std::int64_t inner,
                          std::int64_t outer, const std::string& pass, const Options& options) {
    const Family& family = family_of(op, name);
    const Problem scattered = gpu_problem(op, m, inner, outer, "random:0.5", pass, options);
    const std::size_t first = first_stage_of(family, op.stages(scattered));
    std::vector<CompileResult> compiled;
    const auto configs = with_reuse(family, scattered, facts, random, 5);
    REQUIRE(!configs.empty());
    for (const Config& config : configs)
      compiled.push_back(backend->compile(family.program(scattered, facts, config)));
    // Tiles that are gathered, and between them ones that are copied.
    for (const char* mask :
         {"random:0.5", "random:0.02", "random:0.9", "even:0.5", "block:0.4", "all", "none"}) {
      const Problem problem = gpu_problem(op, m, inner, outer, mask, pass, options);
      Verifier verifier(*backend, op, problem, random());
      for (std::size_t i = 0; i < configs.size(); ++i)
        verify_variant(verifier, {&family, configs[i], first, 1}, compiled[i]);
    }
  };
  // One K block, as many as sm90_late_k_blocks, a few more, many.
  for (const std::int64_t inner : {64, 136, 192, 328, 1024})
    verify(masked_linear_op(), "linear_sm90", 2049, inner, 1000, "fwd", {});
  verify(masked_linear_op(), "linear_sm90", 515, 256, 4096, "fwd", {});
  verify(masked_linear_op(), "dx_sm90", 1030, 1000, 328, "bwd", {});
  verify(masked_ffn_op(), "gate_up_sm90", 1030, 200, 1400, "fwd", {});
  verify(masked_ffn_op(), "gate_up_sm90", 1030, 328, 1400, "fwd", {{"save", "preact"}});
}

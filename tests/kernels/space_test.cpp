// The spaces of the GEMM engines: large enough, legal, and never empty.
#include <algorithm>

#include "kernels/ffn/families.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/decode.hpp"
#include "kernels/gemm/mma_sync.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

std::vector<GemmShape> shapes_of(std::int64_t m, std::int64_t d, std::int64_t h) {
  return {{m, h, d, 2}, {m, d, h, 1}};
}

}  // namespace

TEST_CASE("an A100 has at least 150 tensor-core variants a stage", "[kernels]") {
  const auto facts = facts_of_architecture("sm_80");
  for (const auto& shape : shapes_of(4096, 1024, 2048))
    CHECK(mma_sync_space(shape, facts).feasible().size() >= 150);
  for (const auto& shape : shapes_of(64, 1024, 2048))
    CHECK(mma_sync_space(shape, facts).feasible().size() >= 150);
}

TEST_CASE("the decode engine has at least 30 variants", "[kernels]") {
  for (const auto& arch : known_architectures())
    for (const std::int64_t m : {1, 16})
      for (const auto& shape : shapes_of(m, 1024, 2048))
        CHECK(decode_space(shape, facts_of_architecture(arch)).feasible().size() >= 30);
}

TEST_CASE("every product has a default, and it is feasible", "[kernels]") {
  for (const auto& arch : known_architectures()) {
    const auto facts = facts_of_architecture(arch);
    for (const std::int64_t m : {1, 2, 7, 16, 17, 33, 64, 100, 256, 1023, 4096, 100000})
      for (const auto& [d, h] : {std::pair{8, 8}, {8, 40}, {1024, 2048}, {4096, 14336}, {104, 8}})
        for (const auto& shape : shapes_of(m, d, h)) {
          CAPTURE(arch, m, d, h, shape.products);
          const Config tile = mma_sync_default(shape, facts);
          CHECK(mma_sync_space(shape, facts).violations(tile).empty());
          if (m > decode_max_tokens) continue;
          CHECK(decode_space(shape, facts).violations(decode_default(shape, facts)).empty());
        }
  }
}

TEST_CASE("constraints read no parameter but those they name", "[kernels]") {
  // feasible() judges a constraint as soon as what it names is known; violations() judges all of a
  // whole configuration.
  const auto facts = facts_of_architecture("sm_90a");
  for (const auto& shape : shapes_of(64, 1024, 2048)) {
    const Space space = mma_sync_space(shape, facts);
    const auto feasible = space.feasible();
    std::size_t legal = 0;
    space.for_each(
        [&](const Config& config) { legal += space.violations(config).empty() ? 1 : 0; });
    CHECK(feasible.size() == legal);
    for (const Config& config : feasible) REQUIRE(space.violations(config).empty());
  }
}

TEST_CASE("no feasible tile asks for more shared memory than a block can have", "[kernels]") {
  for (const auto& arch : known_architectures()) {
    const auto facts = facts_of_architecture(arch);
    for (const auto& shape : shapes_of(64, 1024, 2048))
      for (const Config& config : mma_sync_space(shape, facts).feasible()) {
        Program program;
        program.kernels.push_back({});
        mma_sync_launch(program, shape, facts, config, {}, {});
        REQUIRE(std::get<KernelLaunch>(program.steps[0]).shared_bytes <=
                facts.shared_bytes_per_block);
      }
  }
}

TEST_CASE("splits meet in a cluster from sm_90 on, in a zeroed workspace before", "[kernels]") {
  const GemmShape shape{64, 2048, 1024, 2};
  const Config config{{"bm", 64},     {"bn", 64},    {"bk", 64},     {"warps_m", 2},
                      {"warps_n", 2}, {"stages", 3}, {"split_k", 2}, {"group_m", 1}};
  for (const auto& arch : known_architectures()) {
    CAPTURE(arch);
    const auto facts = facts_of_architecture(arch);
    Program program;
    program.kernels.push_back({});
    mma_sync_launch(program, shape, facts, config, {}, {64, 1024, 2048});
    const auto& launch = std::get<KernelLaunch>(program.steps[0]);
    CHECK(launch.grid.x == 32);
    CHECK(launch.grid.y == 2);
    if (facts.compute_capability >= 90) {
      CHECK(launch.cluster.y == 2);
      CHECK(program.scratch.empty());
      CHECK(std::get<std::int64_t>(launch.arguments[0]) == 0);
    } else {
      CHECK(launch.cluster.y == 1);
      REQUIRE(program.scratch.size() == 2);
      CHECK(program.scratch[0].bytes == 32 * 4);
      CHECK(program.scratch[0].zeroed);
      CHECK(program.scratch[1].bytes == std::size_t{32} * 2 * 2 * 64 * 64 * 4);
      CHECK_FALSE(program.scratch[1].zeroed);
    }
  }
}

TEST_CASE("one launch for both stages is for few tokens, and for weights that registers hold",
          "[kernels]") {
  const auto facts = facts_of_architecture("sm_90a");
  const auto refusal = [&](std::int64_t m, std::int64_t d, std::int64_t h) {
    Problem problem;
    problem.op = "ffn";
    problem.pass = "fwd";
    problem.dtype = DType::bf16;
    problem.sizes = {{"m", m}, {"d", d}, {"h", h}};
    return ffn::ffn_decode_family()
        .refusal(canonical(ffn_op(), problem, facts.kind), facts)
        .value_or("");
  };
  const auto refused_for = [&](std::int64_t m, std::int64_t d, std::int64_t h, const char* word) {
    return refusal(m, d, h).find(word) != std::string::npos;
  };
  CHECK(refusal(1, 1024, 2048).empty());
  CHECK(refusal(8, 1024, 2048).empty());
  CHECK(refused_for(16, 1024, 2048, "intermediate"));
  CHECK(refused_for(17, 1024, 2048, "m=17"));
  CHECK(refused_for(1, 4096, 14336, "registers"));
}

// The engines on products of a backward pass: operands that lie transposed, two terms, two results,
// and the gradients of a gate.
#include <utility>
#include <variant>
#include <vector>

#include "kernels/ffn/backward.hpp"
#include "kernels/gemm/mma_sync.hpp"
#include "kernels/gemm/product_families.hpp"
#include "kernels/gemm/wgmma.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

const DeviceFacts& hopper() {
  static const DeviceFacts facts = facts_of_architecture("sm_90a");
  return facts;
}

Problem problem_of(std::int64_t m, std::int64_t d, std::int64_t h,
                   std::map<std::string, std::string> options = {}) {
  return canonical(ffn_op(),
                   {"ffn", "bwd", DType::bf16, {{"m", m}, {"d", d}, {"h", h}}, std::move(options)},
                   DeviceKind::cuda);
}

std::vector<GemmShape> shapes_of(const Problem& problem) {
  return {ffn::d_hidden_product(problem).shape, ffn::d_x_product(problem).shape,
          ffn::d_gate_up_product(problem).shape, ffn::d_down_product(problem).shape};
}

std::vector<TensorMapArgument> maps_of(const Program& program) {
  std::vector<TensorMapArgument> maps;
  for (const auto& argument : std::get<KernelLaunch>(program.steps.at(0)).arguments)
    if (const auto* map = std::get_if<TensorMapArgument>(&argument)) maps.push_back(*map);
  return maps;
}

}  // namespace

TEST_CASE("every product of a backward pass has a default in every engine", "[kernels]") {
  for (const std::int64_t m : {1, 2, 7, 17, 64, 100, 1023, 4096, 100000})
    for (const auto& [d, h] : {std::pair{8, 8}, {8, 40}, {1024, 2048}, {4096, 14336}, {104, 8}})
      for (const GemmShape& shape : shapes_of(problem_of(m, d, h))) {
        CAPTURE(m, d, h, shape.m, shape.n, shape.k);
        const Config wide = wgmma_default(shape, hopper());
        CHECK(wgmma_space(shape, hopper()).violations(wide).empty());
        const auto ampere = facts_of_architecture("sm_80");
        const Config tile = mma_sync_default(shape, ampere);
        CHECK(mma_sync_space(shape, ampere).violations(tile).empty());
      }
}

TEST_CASE("transposed operands come in slabs of 64, and are never swapped", "[kernels]") {
  for (const std::int64_t m : {16, 1000, 4096})
    for (const GemmShape& shape : shapes_of(problem_of(m, 1024, 2048))) {
      const auto feasible = wgmma_space(shape, hopper()).feasible();
      CHECK(feasible.size() >= 10);
      for (const Config& config : feasible) {
        INFO(config.text());
        const WgmmaTile tile(config);
        REQUIRE_FALSE(tile.swapped());
        REQUIRE(tile.bn / tile.cluster_m % 64 == 0);
        if (shape.a_transposed) REQUIRE(tile.bm / tile.cluster_n % 64 == 0);
        if (shape.box_buffers > 1) REQUIRE(tile.split_k == 1);
        REQUIRE(tile.shared_bytes(1, shape.box_buffers) <= hopper().shared_bytes_per_block);
      }
    }
}

TEST_CASE("a launch maps transposed operands as they lie in memory", "[kernels]") {
  const Problem problem = problem_of(300, 1024, 2048);
  const auto launch = [&](const ProductStage& stage) {
    const WgmmaProduct family(stage, "family", "");
    return family.program(problem, hopper(), family.default_config(problem, hopper()));
  };
  const auto down = maps_of(launch({ffn::stage_d_down, "bwd", ffn::d_down_product}));
  REQUIRE(down.size() == 3);
  CHECK((down[0].rows == 300 && down[0].columns == 1024));  // dy
  CHECK((down[1].rows == 300 && down[1].columns == 2048));  // hidden
  for (const std::size_t at : {0, 1})
    CHECK((down[at].box_rows == 64 && down[at].box_columns == 64));
  CHECK((down[2].rows == 1024 && down[2].columns == 2048));

  const auto x = maps_of(launch({ffn::stage_d_x, "bwd", ffn::d_x_product}));
  REQUIRE(x.size() == 5);  // two terms, dx
  CHECK((x[0].rows == 300 && x[0].columns == 2048));
  CHECK((x[2].rows == 2048 && x[2].columns == 1024));
  CHECK(maps_of(launch({ffn::stage_d_gate_up, "bwd", ffn::d_gate_up_product})).size() == 7);
  CHECK(maps_of(launch({ffn::stage_d_hidden, "bwd", ffn::d_hidden_product})).size() == 7);
}

TEST_CASE("two results double the tiles, and two terms the k tiles", "[kernels]") {
  const Problem problem = problem_of(4096, 1024, 2048);
  const Config config{{"bm", 128},           {"bn", 256},      {"schedule", "cooperative"},
                      {"mma_warpgroups", 2}, {"cluster_m", 2}, {"cluster_n", 1},
                      {"split_k", 1},        {"stages", 4},    {"epilogue_stages", 1},
                      {"group_m", 8}};
  const WgmmaTile tile(config);
  CHECK(tile.tiles(ffn::d_gate_up_product(problem).shape) == 2 * (2048 / 128) * (1024 / 256));
  CHECK(tile.k_tiles(ffn::d_x_product(problem).shape) == 2 * 2048 / 64);
}

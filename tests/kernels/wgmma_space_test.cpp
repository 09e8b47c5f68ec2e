// The space of the wgmma engine: rich where it should be, legal, never empty; and its host twin.
#include <algorithm>
#include <random>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/gemm/wgmma.hpp"
#include "kernels/gemm/wgmma_tile.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

std::vector<GemmShape> shapes_of(std::int64_t m, std::int64_t d, std::int64_t h) {
  return {{m, h, d, 2}, {m, d, h, 1}};
}

const DeviceFacts& hopper() {
  static const DeviceFacts facts = facts_of_architecture("sm_90a");
  return facts;
}

}  // namespace

TEST_CASE("the wgmma space has the tiles that are known to win", "[kernels]") {
  const auto feasible = wgmma_space({4096, 2048, 1024, 2}, hopper()).feasible();
  CHECK(feasible.size() >= 100);
  CHECK(feasible.size() <= 600);
  const Config winner{{"bm", 128},           {"bn", 128},      {"schedule", "cooperative"},
                      {"mma_warpgroups", 2}, {"cluster_m", 2}, {"cluster_n", 1},
                      {"split_k", 1},        {"stages", 4},    {"epilogue_stages", 2},
                      {"group_m", 8}};
  CHECK(std::find(feasible.begin(), feasible.end(), winner) != feasible.end());
}

TEST_CASE("constraints of the wgmma space read no parameter but those they name", "[kernels]") {
  // feasible() judges a constraint as soon as what it names is known, whatever the rest is then.
  std::mt19937 random(1);
  for (const std::int64_t m : {16, 77, 333, 4096})
    for (const auto& shape : shapes_of(m, 2304, 9216))
      for (const Space& space :
           {wgmma_space(shape, hopper()), wgmma_fp8_space(shape, hopper(), {true, true})}) {
        const auto draw = [&](const Parameter& parameter) {
          return parameter.values[random() % parameter.values.size()];
        };
        for (int round = 0; round < 300; ++round) {
          Config config, other;
          for (const auto& parameter : space.parameters())
            config.set(parameter.name, draw(parameter));
          for (const auto& constraint : space.constraints()) {
            if (constraint.reads.empty()) continue;
            for (const auto& parameter : space.parameters()) {
              const auto& reads = constraint.reads;
              const bool read =
                  std::find(reads.begin(), reads.end(), parameter.name) != reads.end();
              other.set(parameter.name, read ? config.value(parameter.name) : draw(parameter));
            }
            INFO(constraint.reason << ": " << config.text() << ", " << other.text());
            REQUIRE(constraint.holds(config) == constraint.holds(other));
          }
        }
      }
}

TEST_CASE("every product has a wgmma default, and it is feasible", "[kernels]") {
  for (const std::int64_t m : {1, 2, 7, 16, 17, 33, 64, 100, 256, 1023, 4096, 100000})
    for (const auto& [d, h] : {std::pair{8, 8}, {8, 40}, {1024, 2048}, {4096, 14336}, {104, 8}})
      for (const auto& shape : shapes_of(m, d, h)) {
        CAPTURE(m, d, h, shape.products);
        const Config config = wgmma_default(shape, hopper());
        CHECK(wgmma_space(shape, hopper()).violations(config).empty());
      }
}

TEST_CASE("every product has a wgmma default in fp8, and its sums fit the registers", "[kernels]") {
  for (const std::int64_t m : {1, 17, 64, 256, 4096, 100000})
    for (const auto& [d, h] : {std::pair{16, 16}, {1024, 2048}, {4096, 14336}, {112, 16}})
      for (const auto& shape : shapes_of(m, d, h)) {
        CAPTURE(m, d, h, shape.products);
        const Config config = wgmma_fp8_default(shape, hopper());
        const Space space = wgmma_fp8_space(shape, hopper());
        CHECK(space.violations(config).empty());
        const WgmmaTile tile(config);
        CHECK(tile.sums(shape.products) + tile.columns() / 2 <= 192);
      }
  const auto feasible = wgmma_fp8_space({4096, 14336, 4096, 2}, hopper()).feasible();
  CHECK(feasible.size() >= 50);
}

TEST_CASE("an fp8 launch loads k tiles of 128 elements, and takes its scales", "[kernels]") {
  const GemmShape shape{300, 1024, 2048, 1};
  WgmmaOperands operands{TensorArgument{0}, {TensorArgument{1}}, {TensorArgument{2}}};
  operands.dtype = DType::fp8;
  operands.scales = {TensorArgument{3}, TensorArgument{4}};
  Program program;
  program.kernels.push_back({});
  wgmma_launch(program, shape, hopper(), wgmma_fp8_default(shape, hopper()), operands, {1, 2, 3},
               false);
  const auto& arguments = std::get<KernelLaunch>(program.steps[0]).arguments;
  REQUIRE(arguments.size() == 3 + 2 + 3 + 1);
  for (const std::size_t at : {0, 1}) {
    const auto& map = std::get<TensorMapArgument>(arguments[at]);
    CHECK(map.dtype == DType::fp8);
    CHECK(map.box_columns == 128);
    CHECK(map.columns == 2048);
  }
  CHECK(std::get<TensorMapArgument>(arguments[2]).dtype == DType::bf16);
  CHECK(std::get<TensorArgument>(arguments[3]).tensor == 3);
}

TEST_CASE("a wgmma launch maps each output, and what is added to it", "[kernels]") {
  const GemmShape shape{300, 1024, 2048, 1};
  const Config config = wgmma_default(shape, hopper());
  const auto arguments_of = [&](const WgmmaOperands& operands) {
    Program program;
    program.kernels.push_back({});
    wgmma_launch(program, shape, hopper(), config, operands, {300, 1024, 2048}, false);
    return std::get<KernelLaunch>(program.steps[0]).arguments;
  };
  WgmmaOperands operands{TensorArgument{0}, {TensorArgument{1}}, {TensorArgument{2}}};
  const auto plain = arguments_of(operands);
  operands.c = {TensorArgument{2}, TensorArgument{3}, TensorArgument{4}};
  CHECK(arguments_of(operands).size() == plain.size() + 2);
  operands.c.resize(1);
  operands.bias = TensorArgument{5};
  auto adding = arguments_of(operands);
  REQUIRE(adding.size() == plain.size() + 2);
  const auto matrix = [&](std::size_t at) {
    return std::get<TensorArgument>(std::get<TensorMapArgument>(adding[at]).matrix).tensor;
  };
  CHECK(matrix(3) == 2);  // there is no residual: y's map fills its place
  CHECK(std::get<TensorArgument>(adding[4]).tensor == 5);
  operands.bias.reset();
  operands.residual = TensorArgument{6};
  adding = arguments_of(operands);
  CHECK(matrix(3) == 6);
  CHECK(std::get<std::int64_t>(adding[4]) == 0);
}

TEST_CASE("a wgmma launch fits the device and covers the output", "[kernels]") {
  for (const std::int64_t m : {1, 64, 300, 4096})
    for (const auto& shape : shapes_of(m, 1024, 2048))
      for (const Config& config : wgmma_space(shape, hopper()).feasible()) {
        const WgmmaTile tile(config);
        Program program;
        program.kernels.push_back({});
        const WgmmaOperands operands{TensorArgument{0},
                                     std::vector<Pointer>(shape.products, TensorArgument{1}),
                                     {TensorArgument{2}},
                                     {},
                                     {},
                                     DType::bf16};
        wgmma_launch(program, shape, hopper(), config, operands, {m, 1024, 2048}, false);
        const auto& launch = std::get<KernelLaunch>(program.steps[0]);
        INFO(config.text());
        REQUIRE(launch.shared_bytes <= hopper().shared_bytes_per_block);
        REQUIRE(launch.grid.x % launch.cluster.x == 0);
        REQUIRE(launch.block.x <= 512);
        // Boxes of a consumer tile its share of the output.
        const std::int64_t stored = std::int64_t{tile.box_tokens()} * tile.box_features() *
                                    tile.boxes() * tile.row_consumers() * tile.owners();
        REQUIRE(stored == std::int64_t{tile.bm} * tile.bn);
        for (const auto& argument : launch.arguments)
          if (const auto* map = std::get_if<TensorMapArgument>(&argument)) {
            REQUIRE(map->box_rows <= 256);
            REQUIRE((map->box_columns == 64 || map->box_columns == 32 || map->box_columns == 16));
          }
      }
}

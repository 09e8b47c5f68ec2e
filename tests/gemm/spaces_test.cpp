// The spaces and launches of the CUDA engines, without a device: rich where they should be, legal,
// never empty.
#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "gemm/cases.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/sm90/space.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "support/space_reads.hpp"
#include "support/tensor_maps.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem problem_of(const std::string& pass, std::int64_t m, std::int64_t d, std::int64_t h,
                   DType dtype = DType::bf16, std::map<std::string, std::string> options = {}) {
  return canonical(ffn_op(),
                   {"ffn", pass, dtype, {{"m", m}, {"d", d}, {"h", h}}, std::move(options)},
                   DeviceKind::cuda);
}

/// The GEMMs of ffn's forward pass: one of two B operands, and one of one.
std::vector<GemmProblem> forward_gemms(std::int64_t m, std::int64_t d, std::int64_t h,
                                       DType dtype = DType::bf16, const char* scales = "tensor") {
  const Problem problem = dtype == DType::fp8
                              ? problem_of("fwd", m, d, h, dtype, {{"scales", scales}})
                              : problem_of("fwd", m, d, h, dtype);
  return {ffn::gate_up_gemm(problem), ffn::down_gemm(problem)};
}

std::vector<GemmProblem> backward_gemms(std::int64_t m, std::int64_t d, std::int64_t h) {
  const Problem problem = problem_of("bwd", m, d, h);
  return {ffn::d_hidden_gemm(problem), ffn::d_x_gemm(problem), ffn::d_gate_up_gemm(problem),
          ffn::d_down_gemm(problem)};
}

Program program_of(const Engine& engine, const GemmProblem& gemm, const DeviceFacts& facts,
                   const Config& config) {
  Program program;
  engine.append(program, {gemm}, TensorPlaces(tensors_of(gemm)), facts, config);
  return program;
}

Program default_program(const Engine& engine, const GemmProblem& gemm, const DeviceFacts& facts) {
  return program_of(engine, gemm, facts, engine.search.default_config({gemm}, facts));
}

const KernelLaunch& last_launch(const Program& program) {
  return std::get<KernelLaunch>(program.steps.back());
}

/// The launch's map of a tensor.
TensorMapArgument map_of(const Program& program, const GemmProblem& gemm, std::string_view name) {
  const TensorPlaces places(tensors_of(gemm));
  for (const TensorMapArgument& map : tensor_maps_of(last_launch(program)))
    if (std::get<TensorArgument>(map.matrix).tensor == places.at(name)) return map;
  FAIL("no map of " << name);
  return {};
}

constexpr std::pair<int, int> sizes[] = {{8, 8}, {8, 40}, {1024, 2048}, {4096, 14336}, {104, 8}};

}  // namespace

TEST_CASE("the sm90 space has the tiles that are known to win") {
  const auto feasible =
      sm90_engine.search.space({forward_gemms(4096, 1024, 2048)[0]}, hopper()).feasible();
  CHECK(feasible.size() >= 100);
  CHECK(feasible.size() <= 600);
  const Config winner{{"bm", 128},           {"bn", 128},      {"schedule", "cooperative"},
                      {"mma_warpgroups", 2}, {"cluster_m", 2}, {"cluster_n", 1},
                      {"split_k", 1},        {"stages", 4},    {"epilogue_stages", 2},
                      {"group_m", 8}};
  CHECK(std::find(feasible.begin(), feasible.end(), winner) != feasible.end());
}

TEST_CASE("constraints of the sm90 space read no parameter but those they name") {
  std::mt19937 random(1);
  for (const std::int64_t m : {16, 77, 333, 4096})
    for (const auto& gemms :
         {forward_gemms(m, 2304, 9216), forward_gemms(m, 2304, 9216, DType::fp8, "block")})
      for (const GemmProblem& gemm : gemms)
        require_named_reads(sm90_engine.search.space({gemm}, hopper()), 300, random);
}

TEST_CASE("every GEMM has a default on sm_90a, and it is feasible") {
  for (const std::int64_t m : {1, 2, 7, 16, 17, 33, 64, 100, 256, 1023, 4096, 100000})
    for (const auto& [d, h] : sizes)
      for (const auto& gemms : {forward_gemms(m, d, h), backward_gemms(m, d, h)})
        for (const GemmProblem& gemm : gemms) {
          CAPTURE(m, d, h, gemm.m, gemm.n, gemm.k);
          const Config config = sm90_engine.search.default_config({gemm}, hopper());
          CHECK(sm90_engine.search.space({gemm}, hopper()).violations(config).empty());
        }
}

TEST_CASE("every GEMM has an sm90 default in fp8, and its accumulators fit the registers") {
  for (const std::int64_t m : {1, 17, 64, 256, 4096, 100000})
    for (const auto& [d, h] : {std::pair{16, 16}, {1024, 2048}, {4096, 14336}, {112, 16}})
      for (const GemmProblem& gemm : forward_gemms(m, d, h, DType::fp8)) {
        CAPTURE(m, d, h, gemm.b_operands());
        const Config config = sm90_engine.search.default_config({gemm}, hopper());
        CHECK(sm90_engine.search.space({gemm}, hopper()).violations(config).empty());
        const sm90::Workload work(gemm);
        const sm90_plan plan = sm90_plan_of(work.form, sm90::Tile(config));
        CHECK(plan.total_accumulators(work.form) + plan.columns / 2 <= 192);
      }
  CHECK(sm90_engine.search.space({forward_gemms(4096, 4096, 14336, DType::fp8)[0]}, hopper())
            .feasible()
            .size() >= 50);
}

TEST_CASE("an fp8 launch of sm90 loads K blocks of 128 elements, and takes its scales") {
  const GemmProblem gemm = forward_gemms(300, 1024, 2048, DType::fp8)[1];
  const Program program = default_program(sm90_engine, gemm, hopper());
  REQUIRE(tensor_maps_of(last_launch(program)).size() == 3);
  for (const char* name : {"hidden", "w_down"}) {
    const TensorMapArgument map = map_of(program, gemm, name);
    CHECK(map.dtype == DType::fp8);
    CHECK(map.box_columns == 128);
    CHECK(map.columns == 2048);
  }
  CHECK(map_of(program, gemm, "y").dtype == DType::bf16);
  const TensorPlaces places(tensors_of(gemm));
  for (const char* name : {"hidden_scale", "w_down_scale"}) {
    const auto& fields = last_launch(program).parameters->fields;
    CHECK(std::count_if(fields.begin(), fields.end(), [&](const auto& field) {
            const auto* tensor = std::get_if<TensorArgument>(&field.value);
            return tensor != nullptr && tensor->tensor == places.at(name);
          }) == 1);
  }
}

TEST_CASE("an sm90 launch maps each output, and the source, and nothing that it does without") {
  const auto maps = [&](std::map<std::string, std::string> options, std::size_t stage) {
    const Problem problem = problem_of("fwd", 300, 1024, 2048, DType::bf16, std::move(options));
    const GemmProblem gemm = ffn::gemm_stages(problem).at(stage).gemm(problem);
    return tensor_maps_of(last_launch(default_program(sm90_engine, gemm, hopper()))).size();
  };
  CHECK(maps({}, 0) == 4);
  CHECK(maps({{"save", "preact"}}, 0) == 6);
  CHECK(maps({}, 1) == 3);
  CHECK(maps({{"bias", "down"}}, 1) == 3);
  CHECK(maps({{"residual", "yes"}}, 1) == 4);
}

TEST_CASE("an sm90 launch fits the device and covers the output") {
  for (const std::int64_t m : {1, 64, 300, 4096})
    for (const GemmProblem& gemm : forward_gemms(m, 1024, 2048))
      for (const Config& config : sm90_engine.search.space({gemm}, hopper()).feasible()) {
        const Program program = program_of(sm90_engine, gemm, hopper(), config);
        const KernelLaunch& launch = last_launch(program);
        INFO(config.text());
        REQUIRE(launch.shared_bytes <= hopper().shared_bytes_per_block);
        REQUIRE(launch.grid.x % launch.cluster.x == 0);
        REQUIRE(launch.block.x <= 512);
        // The subtiles of the MMA warpgroups cover their CTA's share of the tile.
        const sm90::Tile tile(config);
        const sm90_plan plan = sm90_plan_of(sm90::Workload(gemm).form, tile);
        const std::int64_t stored = std::int64_t{plan.subtile_m} * plan.subtile_n * plan.subtiles *
                                    (tile.pingpong() ? 1 : tile.mma_warpgroups) * plan.reducers;
        REQUIRE(stored == std::int64_t{tile.bm} * tile.bn);
        for (const TensorMapArgument& map : tensor_maps_of(launch)) {
          REQUIRE(map.box_rows <= 256);
          REQUIRE((map.box_columns == 64 || map.box_columns == 32 || map.box_columns == 16));
        }
      }
}

TEST_CASE("MN-major operands come in slabs of 64, and have no swap-AB") {
  for (const std::int64_t m : {16, 1000, 4096})
    for (const GemmProblem& gemm : backward_gemms(m, 1024, 2048)) {
      const auto feasible = sm90_engine.search.space({gemm}, hopper()).feasible();
      CHECK(feasible.size() >= 10);
      const gemm_form form = sm90::Workload(gemm).form;
      for (const Config& config : feasible) {
        INFO(config.text());
        const sm90::Tile tile(config);
        REQUIRE_FALSE(tile.swap_ab());
        REQUIRE(tile.bn / tile.cluster_m % 64 == 0);
        if (gemm.a_major == Major::mn) REQUIRE(tile.bm / tile.cluster_n % 64 == 0);
        if (gemm.tensors_per_stage() > 1) REQUIRE(tile.split_k == 1);
        REQUIRE(sm90_plan_of(form, tile).shared_bytes <= hopper().shared_bytes_per_block);
      }
    }
}

TEST_CASE("an sm90 launch maps MN-major operands as they lie in memory") {
  const auto gemms = backward_gemms(300, 1024, 2048);
  const auto launch = [&](std::size_t stage) {
    return default_program(sm90_engine, gemms[stage], hopper());
  };
  const auto count = [&](std::size_t stage) {
    return tensor_maps_of(last_launch(launch(stage))).size();
  };
  const Program down = launch(3);
  REQUIRE(count(3) == 3);
  const auto dy = map_of(down, gemms[3], "dy"), hidden = map_of(down, gemms[3], "hidden"),
             dw = map_of(down, gemms[3], "dw_down");
  CHECK((dy.rows == 300 && dy.columns == 1024));
  CHECK((hidden.rows == 300 && hidden.columns == 2048));
  for (const auto& map : {dy, hidden}) CHECK((map.box_rows == 64 && map.box_columns == 64));
  CHECK((dw.rows == 1024 && dw.columns == 2048));

  const Program x = launch(1);
  REQUIRE(count(1) == 5);  // two pairs, dx
  const auto d_gate = map_of(x, gemms[1], "d_gate"), w_gate = map_of(x, gemms[1], "w_gate");
  CHECK((d_gate.rows == 300 && d_gate.columns == 2048));
  CHECK((w_gate.rows == 2048 && w_gate.columns == 1024));
  CHECK(count(2) == 5);  // d_gate, d_up, x, dw_gate, dw_up
  CHECK(count(0) == 7);  // dy, w_down, gate, up, d_gate, d_up, hidden
}

TEST_CASE("two outputs double the tiles, and K-concatenated operands the K blocks") {
  const auto gemms = backward_gemms(4096, 1024, 2048);
  const sm90::Tile tile(Config{{"bm", 128},
                               {"bn", 256},
                               {"schedule", "cooperative"},
                               {"mma_warpgroups", 2},
                               {"cluster_m", 2},
                               {"cluster_n", 1},
                               {"split_k", 1},
                               {"stages", 4},
                               {"epilogue_stages", 1},
                               {"group_m", 8}});
  CHECK(sm90::Workload(gemms[2]).with(tile).tiles(tile) == 2 * (2048 / 128) * (1024 / 256));
  CHECK(sm90::Workload(gemms[1]).with(tile).k_blocks(tile) == 2 * 2048 / 64);
}

TEST_CASE("an A100 has at least 150 tensor-core variants a stage") {
  const auto facts = facts_of_architecture("sm_80");
  for (const std::int64_t m : {4096, 64})
    for (const GemmProblem& gemm : forward_gemms(m, 1024, 2048))
      CHECK(sm80_engine.search.space({gemm}, facts).feasible().size() >= 150);
}

TEST_CASE("the decode engine has at least 30 variants") {
  for (const auto& arch : known_architectures())
    for (const std::int64_t m : {1, 16})
      for (const GemmProblem& gemm : forward_gemms(m, 1024, 2048))
        CHECK(decode_engine.search.space({gemm}, facts_of_architecture(arch)).feasible().size() >=
              30);
}

TEST_CASE("every GEMM has a default in sm80 and decode, and it is feasible") {
  const auto check = [](const Engine& engine, const GemmProblem& gemm, const DeviceFacts& facts) {
    CAPTURE(engine.name, facts.arch, gemm.m, gemm.n, gemm.k);
    const Config config = engine.search.default_config({gemm}, facts);
    CHECK(engine.search.space({gemm}, facts).violations(config).empty());
  };
  for (const auto& arch : known_architectures()) {
    const auto facts = facts_of_architecture(arch);
    for (const std::int64_t m : {1, 2, 7, 16, 17, 33, 64, 100, 256, 1023, 4096, 100000})
      for (const auto& [d, h] : sizes) {
        for (const GemmProblem& gemm : forward_gemms(m, d, h)) {
          check(sm80_engine, gemm, facts);
          if (m <= 16) check(decode_engine, gemm, facts);
        }
        for (const GemmProblem& gemm : backward_gemms(m, d, h)) check(sm80_engine, gemm, facts);
      }
  }
}

TEST_CASE("constraints of the sm80 space read no parameter but those they name") {
  // feasible() judges a constraint as soon as what it names is known; violations() judges all of a
  // whole configuration.
  for (const GemmProblem& gemm : forward_gemms(64, 1024, 2048)) {
    const Space space = sm80_engine.search.space({gemm}, hopper());
    const auto feasible = space.feasible();
    std::size_t legal = 0;
    space.for_each(
        [&](const Config& config) { legal += space.violations(config).empty() ? 1 : 0; });
    CHECK(feasible.size() == legal);
    for (const Config& config : feasible) REQUIRE(space.violations(config).empty());
  }
}

TEST_CASE("no feasible tile of sm80 asks for more shared memory than a block can have") {
  for (const auto& arch : known_architectures()) {
    const auto facts = facts_of_architecture(arch);
    for (const GemmProblem& gemm : forward_gemms(64, 1024, 2048))
      for (const Config& config : sm80_engine.search.space({gemm}, facts).feasible())
        REQUIRE(last_launch(program_of(sm80_engine, gemm, facts, config)).shared_bytes <=
                facts.shared_bytes_per_block);
  }
}

TEST_CASE("splits of sm80 meet in a cluster from sm_90 on, in a zeroed workspace before") {
  const GemmProblem gemm = forward_gemms(64, 1024, 2048)[0];
  const Config config{{"bm", 64},     {"bn", 64},    {"bk", 64},     {"warps_m", 2},
                      {"warps_n", 2}, {"stages", 3}, {"split_k", 2}, {"group_m", 1}};
  for (const auto& arch : known_architectures()) {
    CAPTURE(arch);
    const auto facts = facts_of_architecture(arch);
    const Program program = program_of(sm80_engine, gemm, facts, config);
    const KernelLaunch& launch = last_launch(program);
    CHECK(launch.grid.x == 32);
    CHECK(launch.grid.y == 2);
    if (facts.compute_capability >= 90) {
      CHECK(launch.cluster.y == 2);
      CHECK(program.scratch.empty());
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

TEST_CASE("one launch for both stages is for few tokens, and for weights that registers hold") {
  const Family& family = family_of(ffn_op(), "ffn_decode");
  const auto refusal = [&](std::int64_t m, std::int64_t d, std::int64_t h) {
    return family.refusal(problem_of("fwd", m, d, h), hopper()).value_or("");
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

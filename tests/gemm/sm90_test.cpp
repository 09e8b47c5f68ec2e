// The host side of the sm90 engine: its plan of shared memory and registers, its space, its cost
// model, and its launches.
#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.hpp"
#include "cuda/open.hpp"
#include "gemm/cases.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/sm90/config.cuh"
#include "kernels/gemm/sm90/space.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "support/ptx.hpp"
#include "support/space_reads.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

GemmProblem plain_gemm(std::int64_t m, std::int64_t n, std::int64_t k) {
  GemmProblem gemm{.m = m, .n = n, .k = k};
  gemm.a = {{"a0"}};
  gemm.b = {{"b0"}};
  gemm.c = {{"c0"}};
  return gemm;
}

GemmProblem gated(std::int64_t m, std::int64_t n, std::int64_t k) {
  GemmProblem gemm = plain_gemm(m, n, k);
  gemm.form = GemmForm::dual_b;
  gemm.b.push_back({"b1"});
  gemm.epilogue = {.kind = EpilogueKind::gated, .activation = Activation::silu};
  return gemm;
}

GemmProblem in_fp8(GemmProblem gemm, Scaling scaling) {
  gemm.dtype = DType::fp8;
  gemm.quantisation = {.scaling = scaling, .a_scale = "a_scale", .b_scale = {"b0_scale"}};
  if (gemm.form != GemmForm::dual_b) return gemm;
  gemm.c_dtype = DType::fp8;
  gemm.quantisation.b_scale.push_back("b1_scale");
  gemm.quantisation.c_scale = "c_scale";
  return gemm;
}

/// Two groups are by a mask, and have matrices of their own; more are by offsets.
GemmProblem grouped(GemmProblem gemm, Grouping by, std::int64_t groups) {
  const bool sums = by == Grouping::reduction;
  if (sums) gemm.a_major = gemm.b_major = Major::mn;
  gemm.groups = {.by = by, .count = groups, .scattered = true};
  if (groups == 2) {
    gemm.groups.mask = "mask";
    for (TensorNames& names : sums ? gemm.c : gemm.b)
      names = sums ? TensorNames{"c_true", "c_false"} : TensorNames{"b_true", "b_false"};
  } else {
    gemm.groups.offsets = "offsets";
    gemm.groups.permutation = "permutation";
  }
  return gemm;
}
GemmProblem grouped_rows(const GemmProblem& gemm, std::int64_t groups) {
  return grouped(gemm, Grouping::rows, groups);
}
GemmProblem grouped_reduction(const GemmProblem& gemm, std::int64_t groups) {
  return grouped(gemm, Grouping::reduction, groups);
}

std::vector<GemmProblem> grouped_kinds(std::int64_t m, std::int64_t n, std::int64_t k) {
  const GemmProblem plain = plain_gemm(m, n, k), pair = gated(m, n, k);
  return {grouped_rows(plain, 2), grouped_rows(pair, 2), grouped_rows(plain, 40),
          grouped_reduction(plain, 2), grouped_reduction(plain, 40)};
}

/// GEMMs of every kind.
std::vector<GemmProblem> kinds(std::int64_t m, std::int64_t n, std::int64_t k) {
  const GemmProblem plain = plain_gemm(m, n, k), pair = gated(m, n, k);
  std::vector<GemmProblem> gemms = grouped_kinds(m, n, k);
  for (const GemmProblem& gemm : {plain, pair}) {
    gemms.push_back(gemm);
    gemms.push_back(in_fp8(gemm, Scaling::tensor));
    gemms.push_back(in_fp8(gemm, Scaling::block));
  }
  return gemms;
}

struct Launched {
  Program program;
  KernelLaunch launch;  // the last one
  TensorPlaces places;

  const Argument* field(std::size_t offset) const {
    for (const auto& field : launch.parameters->fields)
      if (field.offset == offset) return &field.value;
    return nullptr;
  }
  const TensorMapArgument& map(std::size_t array, std::size_t index = 0) const {
    const Argument* value = field(array + index * sizeof(tensor_map));
    REQUIRE(value != nullptr);
    return std::get<TensorMapArgument>(*value);
  }
  bool has_map(std::size_t array, std::size_t index) const {
    return field(array + index * sizeof(tensor_map)) != nullptr;
  }
  bool is_of(const TensorMapArgument& map, const char* tensor) const {
    const auto* place = std::get_if<TensorArgument>(&map.matrix);
    return place != nullptr && place->tensor == places.at(tensor);
  }
};

Launched launch_of(const GemmProblem& gemm, const Config& config) {
  Launched launched{{}, {}, TensorPlaces(tensors_of(gemm))};
  sm90_engine.append(launched.program, {gemm}, launched.places, hopper(), config);
  launched.launch = std::get<KernelLaunch>(launched.program.steps.back());
  return launched;
}

template <typename Predicate>
Config first_config(const GemmProblem& gemm, const Predicate& predicate) {
  const std::vector<Config> configs = sm90::space(gemm, hopper()).feasible();
  const auto found = std::find_if(configs.begin(), configs.end(), [&](const Config& config) {
    return predicate(sm90::Tile(config));
  });
  REQUIRE(found != configs.end());
  return *found;
}

/// Without NVRTC the test skips.
template <typename Check>
void check_ptx(const GemmProblem& gemm, const Config& config, const Check& check) {
  std::string ptx;
  try {
    ptx = ptx_of(launch_of(gemm, config).program, *builtin_catalog().sources);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unavailable) throw;
    FFTUNE_SKIP(error.what());
  }
  CAPTURE(template_argument(form_of(gemm)));
  check(ptx);
}

}  // namespace

TEST_CASE("sm90 kernels have a proxy fence between what threads write and TMA or wgmma reads") {
  const GemmProblem plain = plain_gemm(256, 256, 256);
  GemmProblem gradient = plain;
  gradient.epilogue = {.kind = EpilogueKind::activation_gradient,
                       .activation = Activation::silu,
                       .gate = "gate",
                       .up = "up",
                       .d_up = "d_up"};
  GemmProblem sorted = grouped_reduction(plain, 40);
  sorted.a_sorted = sorted.b_sorted = true;
  // Results by TMA; by TMA and by threads, of rows that are gathered; operands whose last rows are
  // set to zero, gathered or not; results with a scale for each block; two results.
  for (const GemmProblem& gemm :
       {plain, grouped_rows(plain, 2), grouped_rows(plain, 40), grouped_reduction(plain, 2), sorted,
        in_fp8(gated(256, 256, 256), Scaling::block), gradient}) {
    check_ptx(gemm, sm90_engine.search.default_config({gemm}, hopper()), [&](const auto& ptx) {
      CHECK(ptx.find("wgmma.mma_async") != ptx.npos);
      CHECK(ptx.find("fence.proxy.async.shared") != ptx.npos);
      // A tile of grouped rows is gathered or not, and stored whole or not.
      const bool conditional = gemm.groups.by == Grouping::rows;
      CHECK(unfenced_reads(ptx, {.follows_branches = !conditional}) == std::vector<std::string>());
    });
  }
}

TEST_CASE("CTAs that multicast to each other end when their stages are released") {
  const GemmProblem plain = plain_gemm(512, 512, 256);
  GemmProblem sorted = grouped_reduction(plain, 40);
  sorted.a_sorted = sorted.b_sorted = true;
  // Operands by TMA, with B by itself, and of a grouped reduction, gathered or not.
  for (const GemmProblem& gemm :
       {plain, gated(512, 512, 256), grouped_rows(plain, 2), grouped_reduction(plain, 2), sorted}) {
    const auto is_cluster = [](const sm90::Tile& tile) {
      return tile.cluster_m * tile.cluster_n > 1;
    };
    check_ptx(gemm, first_config(gemm, is_cluster), [](const auto& ptx) {
      CHECK(ptx.find(".multicast::cluster") != ptx.npos);
      CHECK(waits_behind_loads(ptx));
    });
  }
}

TEST_CASE("rows that are stored to be loaded again have a proxy fence in between") {
  const GemmProblem gemm = grouped_rows(plain_gemm(512, 512, 256), 2);
  const auto reuses = [](const sm90::Tile& tile) { return tile.a_reuse > 1; };
  check_ptx(gemm, first_config(gemm, reuses),
            [](const auto& ptx) { CHECK(ptx.find("fence.proxy.async.global") != ptx.npos); });
}

TEST_CASE("the shared-memory plan is in order, each part aligned", "[gemm]") {
  constexpr sm90_config config{.bm = 128,
                               .bn = 128,
                               .schedule = sm90_schedule::cooperative,
                               .mma_warpgroups = 2,
                               .stages = 4,
                               .epilogue_stages = 2};
  constexpr gemm_form pair{.operands = gemm_operands::dual_b, .epilogue = epilogue_kind::gated};
  constexpr sm90_plan plan = sm90_plan_of(pair, config);
  STATIC_REQUIRE(plan.stage_bytes == (128 + 2 * 128) * 128);
  STATIC_REQUIRE(plan.total_accumulators(pair) == 128);
  STATIC_REQUIRE(plan.fused_b);
  STATIC_REQUIRE(plan.wgmma_columns == 256);
  STATIC_REQUIRE(plan.reduction_at == 4 * plan.stage_bytes);
  STATIC_REQUIRE(plan.reduction_bytes == 0);
  STATIC_REQUIRE(plan.subtile_m == 64);
  STATIC_REQUIRE(plan.subtile_n == 64);
  STATIC_REQUIRE(plan.subtiles == 2);
  STATIC_REQUIRE(plan.threads == 384);
  STATIC_REQUIRE(plan.producer_registers == 40);
  STATIC_REQUIRE(plan.mma_registers == 232);
  STATIC_REQUIRE(plan.shared_bytes == 1024 + 4 * 49152 + 2 * 2 * 8192 + 4 * 16 + 4 * 8 + 8);
  for (const GemmProblem& gemm : kinds(512, 1024, 1024))
    for (const Config& candidate : sm90::space(gemm, hopper()).feasible()) {
      const sm90::Tile tile(candidate);
      const gemm_form form = form_of(gemm);
      const sm90_plan own = sm90_plan_of(form, tile);
      INFO(candidate.text());
      REQUIRE(own.epilogue_at % 1024 == 0);
      REQUIRE(own.subtile_bytes % 128 == 0);
      REQUIRE(own.full_barriers_at % 8 == 0);
      REQUIRE(own.reduction_barrier_at + 8 <= own.shared_bytes - 1024);
      REQUIRE(sm90_registers_fit(own, tile));
      if (form.groups == grouping::none) continue;
      REQUIRE(own.groups_at >= own.reduction_barrier_at + 8);
      REQUIRE(own.row_indices_at >= own.group_tiles_at);
      REQUIRE(own.row_indices_at % 16 == 0);
    }
}

TEST_CASE("constraints of sm90 spaces of groups read no parameter but those they name", "[gemm]") {
  std::mt19937 random(1);
  for (const std::int64_t m : {16, 77, 333, 4096})
    for (const GemmProblem& gemm : grouped_kinds(m, 2304, 9216))
      require_named_reads(sm90::space(gemm, hopper()), 100, random);
}

TEST_CASE("every grouped GEMM has an sm90 default, and it is feasible", "[gemm]") {
  for (const std::int64_t m : {1, 2, 7, 16, 17, 33, 64, 100, 256, 1023, 4096, 100000})
    for (const auto& [n, k] : {std::pair{16, 16}, {48, 16}, {2048, 1024}, {4096, 14336}, {112, 16}})
      for (const GemmProblem& gemm : {plain_gemm(m, n, k), gated(m, n, k)})
        for (const GemmProblem& one : {grouped_rows(gemm, 2), grouped_rows(gemm, 64)}) {
          CAPTURE(m, n, k, one.b_operands(), one.groups.count);
          const Config config = sm90::default_config(one, hopper());
          CHECK(sm90::space(one, hopper()).violations(config).empty());
        }
  for (const std::int64_t tokens : {1, 100, 4096, 100000})
    for (const std::int64_t groups : {2, 300}) {
      CAPTURE(tokens, groups);
      const GemmProblem gemm = grouped_reduction(plain_gemm(1024, 2048, tokens), groups);
      CHECK(sm90::space(gemm, hopper()).violations(sm90::default_config(gemm, hopper())).empty());
    }
}

TEST_CASE("the sm90 default is the least cost of the whole space", "[gemm]") {
  std::vector<GemmProblem> gemms;
  for (const std::int64_t m : {1, 24, 77, 256, 1000, 5000}) {
    for (const GemmProblem& gemm : grouped_kinds(m, 2304, 9216)) gemms.push_back(gemm);
    for (const GemmProblem& gemm : {plain_gemm(m, 4096, 1024), gated(m, 768, 2048)}) {
      gemms.push_back(gemm);
      gemms.push_back(grouped_rows(gemm, 2));
      gemms.back().groups.random = true;
      gemms.push_back(in_fp8(gemm, Scaling::block));
      gemms.push_back(grouped_rows(in_fp8(gemm, Scaling::block), 64));
    }
  }
  for (const GemmProblem& gemm : gemms) {
    sm90::CostModel model(gemm, hopper());
    const Config least = least_cost(sm90::space(gemm, hopper()), "sm90", [&](const Config& config) {
      const sm90::Tile tile(config);
      const sm90_plan plan = sm90_plan_of(form_of(gemm), tile);
      const double cost = sm90::cycles(gemm, hopper(), config);
      // The model of many configurations forgets those before.
      REQUIRE(model.least_cycles(tile, plan) <= cost);
      REQUIRE(model.cycles(tile, plan) == cost);
      return std::pair(cost, -config.at("stages"));
    });
    CAPTURE(gemm.m, gemm.n, gemm.k, gemm.groups.count);
    REQUIRE(sm90::default_config(gemm, hopper()).text() == least.text());
  }
}

TEST_CASE("every GEMM that sm90 can implement has a default, tokens scattered or not", "[gemm]") {
  for (const bool scattered : {false, true})
    for (GemmCase one : gemm_cases(DType::bf16, 8)) {
      one.gemm.groups.scattered = scattered && one.gemm.groups.any();
      if (sm90_engine.can_implement({one.gemm}, hopper())) continue;
      INFO(one.name);
      CHECK_FALSE(sm90::space(one.gemm, hopper()).feasible().empty());
    }
  for (GemmCase one : quantised_gemm_cases()) {
    one.gemm.n = ceil_div(one.gemm.n, 16) * 16;  // rows of 16 bytes
    one.gemm.k = ceil_div(one.gemm.k, 16) * 16;
    INFO(one.name);
    REQUIRE(!sm90_engine.can_implement({one.gemm}, hopper()));
    CHECK_FALSE(sm90::space(one.gemm, hopper()).feasible().empty());
  }
}

TEST_CASE("the sm90 cost model prefers what an H200 does", "[gemm]") {
  Config config{{"bm", 128},           {"bn", 256},      {"schedule", "cooperative"},
                {"mma_warpgroups", 2}, {"cluster_m", 1}, {"cluster_n", 1},
                {"split_k", 1},        {"stages", 4},    {"epilogue_stages", 1},
                {"group_m", 8}};
  const auto cost = [&](const GemmProblem& gemm, const char* parameter, std::int64_t value) {
    Config changed = config;
    changed.set(parameter, value);
    return sm90::cycles(gemm, hopper(), changed);
  };
  const GemmProblem large = plain_gemm(8192, 8192, 8192);
  CHECK(cost(large, "stages", 4) < cost(large, "stages", 2));
  const GemmProblem few = plain_gemm(128, 2048, 8192);
  CHECK(cost(few, "split_k", 4) < cost(few, "split_k", 1));
  // Gathered rows cost more than sorted ones, and less where several tiles use them.
  GemmProblem gathered = grouped_rows(large, 2), sorted = gathered;
  sorted.a_sorted = true;
  CHECK(cost(gathered, "a_reuse", 1) > cost(sorted, "a_reuse", 1));
  CHECK(cost(gathered, "a_reuse", 4) < cost(gathered, "a_reuse", 1));
}

TEST_CASE("warpgroups share the tiles of a large gradient of weights on sm90", "[gemm]") {
  // With 128,256 rows and the gradient of x, tiles of 192 x 128 in ping-pong take 6,449 us, and
  // those of 256 x 128 and 128 x 256 5,739 to 5,787.
  for (const std::int64_t n : {2048, 4096})
    for (const std::int64_t m : {32768, 128256}) {
      GemmProblem gemm = plain_gemm(m, n, 4096);
      gemm.a_major = gemm.b_major = Major::mn;
      const Config config = sm90::default_config(gemm, hopper());
      CAPTURE(config.text());
      CHECK(config.word("schedule") == "cooperative");
      CHECK(config.at("mma_warpgroups") > 1);
      if (m > 100000) CHECK(config.at("bm") * config.at("bn") == 256 * 128);
    }
}

TEST_CASE("an sm90 launch maps each matrix in use, of groups each or their stack", "[gemm]") {
  GemmProblem gemm = gated(300, 1024, 2048);
  gemm.epilogue.gate = "gate";
  gemm.epilogue.up = "up";
  const Config config = sm90::default_config(gemm, hopper());
  const Launched stored = launch_of(gemm, config);
  CHECK(stored.is_of(stored.map(offsetof(sm90_params, b), 1), "b1"));
  CHECK(stored.is_of(stored.map(offsetof(sm90_params, out), 0), "c0"));
  CHECK(stored.is_of(stored.map(offsetof(sm90_params, out), 1), "gate"));
  CHECK(stored.is_of(stored.map(offsetof(sm90_params, out), 2), "up"));
  CHECK_FALSE(stored.has_map(offsetof(sm90_params, out), 3));
  CHECK_FALSE(stored.has_map(offsetof(sm90_params, source), 0));
  CHECK_FALSE(stored.has_map(offsetof(sm90_params, a), 1));

  GemmProblem adding = plain_gemm(300, 1024, 2048);
  adding.epilogue.source = {{"before"}};
  const Launched added = launch_of(adding, sm90::default_config(adding, hopper()));
  CHECK(added.is_of(added.map(offsetof(sm90_params, source), 0), "before"));
  CHECK(added.launch.parameters->bytes == sizeof(sm90_params));

  // Two groups by a mask have a tensor map each; more are stacked in one of three dimensions.
  const GemmProblem masked = grouped_rows(plain_gemm(300, 1024, 2048), 2);
  const Launched two = launch_of(masked, sm90::default_config(masked, hopper()));
  CHECK(two.is_of(two.map(offsetof(sm90_params, b), 0), "b_true"));
  CHECK(two.is_of(two.map(offsetof(sm90_params, b), 2), "b_false"));
  CHECK(two.map(offsetof(sm90_params, b), 0).matrices == 0);
  const GemmProblem routed = grouped_rows(plain_gemm(300, 1024, 2048), 40);
  const Launched forty = launch_of(routed, sm90::default_config(routed, hopper()));
  CHECK(forty.map(offsetof(sm90_params, b), 0).matrices == 40);
  CHECK(forty.map(offsetof(sm90_params, out), 0).matrices == 0);
  const GemmProblem weights = grouped_reduction(plain_gemm(1024, 2048, 300), 40);
  const Launched sums = launch_of(weights, sm90::default_config(weights, hopper()));
  CHECK(sums.map(offsetof(sm90_params, out), 0).matrices == 40);
  CHECK(sums.map(offsetof(sm90_params, b), 0).matrices == 0);
}

TEST_CASE("an sm90 launch with pre_permute gathers no tokens", "[gemm]") {
  const GemmProblem gemm = grouped_reduction(plain_gemm(1024, 2048, 4096), 2);
  Config config = sm90::default_config(gemm, hopper());
  config.set("gather_warps", 2);
  config.set("pre_permute", 1);
  const Launched sorted = launch_of(gemm, config);
  REQUIRE(sorted.program.steps.size() == 2);
  CHECK(sorted.program.scratch.size() == 2);
  CHECK(sorted.launch.programmatic);
  CHECK(std::holds_alternative<ScratchArgument>(sorted.map(offsetof(sm90_params, a)).matrix));
  CHECK(std::holds_alternative<ScratchArgument>(sorted.map(offsetof(sm90_params, b)).matrix));
  CHECK(sorted.program.kernels.back().expression.find("a_sorted = true") != std::string::npos);
  config.set("pre_permute", 0);
  const Launched gathered = launch_of(gemm, config);
  CHECK(gathered.program.steps.size() == 1);
  CHECK(gathered.program.scratch.empty());
}

TEST_CASE("an sm90 launch loads the tokens' rows where a token has several", "[gemm]") {
  GemmProblem gemm = grouped_rows(plain_gemm(4096, 1024, 2048), 40);
  gemm.groups.choices = 8;
  gemm.c_sorted = true;
  Config config = sm90::default_config(gemm, hopper());
  config.set("a_reuse", 1);
  config.set("pre_permute", 0);
  const Launched gathered = launch_of(gemm, config);
  REQUIRE(gathered.program.steps.size() == 1);
  CHECK(gathered.map(offsetof(sm90_params, a)).rows == 512);
  CHECK(gathered.map(offsetof(sm90_params, out)).rows == 4096);
  config.set("pre_permute", 1);
  const Launched copied = launch_of(gemm, config);
  REQUIRE(copied.program.steps.size() == 2);
  CHECK(copied.map(offsetof(sm90_params, a)).rows == 4096);
  CHECK(std::holds_alternative<ScratchArgument>(copied.map(offsetof(sm90_params, a)).matrix));
  CHECK(copied.is_of(copied.map(offsetof(sm90_params, b)), "b0"));
  CHECK(copied.program.scratch.at(0).bytes == std::size_t{4096} * 2048 * 2);
  CHECK(copied.launch.programmatic);

  GemmProblem sums = grouped_reduction(plain_gemm(1024, 2048, 4096), 40);
  sums.groups.choices = 8;
  sums.a_sorted = true;
  const Launched reduction = launch_of(sums, sm90::default_config(sums, hopper()));
  CHECK(reduction.map(offsetof(sm90_params, a)).rows == 4096);
  const bool permutes = reduction.program.steps.size() == 2;
  CHECK(reduction.map(offsetof(sm90_params, b)).rows == (permutes ? 4096 : 512));
}

TEST_CASE("the sm90 cost model adds up the tiles that groups should need", "[gemm]") {
  GemmProblem gemm = grouped_rows(plain_gemm(4096, 1024, 2048), 64);
  const auto tiles = [&](std::vector<ExpectedRows> expected, std::int64_t height) {
    gemm.groups.expected_rows = std::move(expected);
    return sm90::Workload(gemm).row_tiles(height);
  };
  // At 64 rows each, about half of the groups have more.
  CHECK(tiles({}, 64) == Approx(64 * 1.48).margin(3));
  CHECK(tiles({{64, 64}}, 128) == 64);
  CHECK(tiles({{64, 64}}, 8) == Approx(64 * 8.5).margin(4));
  // One group has nearly all.
  CHECK(tiles({{1, 4000}, {63, 1.5}}, 128) == Approx(31.75 + 63 * 0.777).margin(2));
  gemm.groups.expected_rows = {{64, 0.05}};
  CHECK(sm90::Workload(gemm).groups_with_rows() == 3);
}

TEST_CASE("with uneven groups the sm90 cost model adds the cost of a few more tiles", "[gemm]") {
  // Rows of eight experts by Zipf's law. Tiles of 160 rows should be 16, which fill two waves; with
  // one more there is a third. With tiles of 176 rows there are 15.
  GemmProblem gemm = grouped_rows(plain_gemm(2048, 4096, 7168), 8);
  gemm.a_sorted = gemm.c_sorted = true;
  gemm.groups.scattered = false;
  gemm.groups.expected_rows = {{1, 635}, {1, 400}, {1, 280}, {1, 210},
                               {1, 165}, {1, 135}, {1, 118}, {1, 105}};
  CHECK(sm90::default_config(gemm, hopper()).get("bm") == 176);
  sm90::Workload work(gemm);
  REQUIRE(work.has_uneven_groups());
  const std::int64_t expected = work.row_tiles(160);
  work.more_tiles = 1.5;
  CHECK(work.row_tiles(160) > expected);
  work.more_tiles = -1.5;
  CHECK(work.row_tiles(160) < expected);
  gemm.groups.expected_rows = {{8, 256}};
  CHECK_FALSE(sm90::Workload(gemm).has_uneven_groups());
}

TEST_CASE("level tiles of uneven groups share either operand, or none", "[gemm]") {
  for (const GemmCase& one : uneven_gemm_cases(DType::bf16)) {
    INFO(one.name);
    std::set<std::vector<int>> clusters;
    for (const Config& config : sm90::space(one.gemm, hopper()).feasible())
      if (config.word("schedule") == "swap_ab" && config.get("bm") == 144)
        clusters.insert({config.get("cluster_m"), config.get("cluster_n")});
    CHECK(clusters == std::set<std::vector<int>>{{1, 1}, {1, 2}, {2, 1}});
  }
}

TEST_CASE("an sm90 launch of groups fits the device and covers C", "[gemm]") {
  for (const std::int64_t m : {1, 64, 300, 4096})
    for (const GemmProblem& gemm : grouped_kinds(m, 1024, 2048)) {
      const Space space = sm90::space(gemm, hopper());
      const auto feasible = space.feasible();
      for (std::size_t i = 0; i < feasible.size(); i += 7) {
        const Config& config = feasible[i];
        const sm90::Tile tile(config);
        const Launched launched = launch_of(gemm, config);
        const KernelLaunch& launch = launched.launch;
        INFO(config.text() << " in " << launched.program.kernels.back().expression);
        REQUIRE(launch.shared_bytes <= hopper().shared_bytes_per_block);
        REQUIRE(launch.grid.x % launch.cluster.x == 0);
        REQUIRE(launch.block.x <= 512);
        const TensorMapArgument& c = launched.map(offsetof(sm90_params, out));
        // Subtiles of a warpgroup tile its share of C.
        const int warpgroups = tile.pingpong() ? 1 : tile.mma_warpgroups;
        const std::int64_t tile_elements = std::int64_t{tile.bm} * tile.bn;
        REQUIRE(tile_elements % (std::int64_t{c.box_rows} * c.box_columns * warpgroups) == 0);
        for (const auto& field : launch.parameters->fields) {
          REQUIRE(field.offset + argument_bytes(field.value) <= sizeof(sm90_params));
          if (const auto* map = std::get_if<TensorMapArgument>(&field.value)) {
            REQUIRE(map->box_rows <= 256);
            REQUIRE(map->box_columns * dtype_bytes(map->dtype) <= 128);
            REQUIRE(field.offset % 64 == 0);
          }
        }
      }
    }
}

namespace {

/// The most tiles of `height` rows that any way to give `rows` rows to `groups` groups takes.
std::int64_t most_tiles_of_any(std::int64_t groups, std::int64_t rows, std::int64_t height) {
  if (groups == 1) return ceil_div(rows, height);
  std::int64_t most = 0;
  for (std::int64_t own = 0; own <= rows; ++own)
    most =
        std::max(most, ceil_div(own, height) + most_tiles_of_any(groups - 1, rows - own, height));
  return most;
}

}  // namespace

TEST_CASE("as many tiles as rows can take, however groups share them", "[gemm]") {
  for (std::int64_t groups = 1; groups <= 5; ++groups)
    for (std::int64_t rows = 1; rows <= 12; ++rows)
      for (std::int64_t height = 1; height <= 6; ++height) {
        CAPTURE(groups, rows, height);
        CHECK(Groups{.by = Grouping::rows, .count = groups}.most_tiles(rows, height) ==
              most_tiles_of_any(groups, rows, height));
      }
}

TEST_CASE("an sm90 launch that splits k has clusters for tiles that can be, of few rows few",
          "[gemm]") {
  // One token's 8 choices of 128 experts: 8 tiles of rows, of 2 x 64 of 768 columns each.
  GemmProblem gemm = grouped_rows(plain_gemm(8, 768, 2048), 128);
  gemm.a_sorted = gemm.c_sorted = true;
  gemm.groups.scattered = false;
  bool splits = false;
  for (const Config& config : sm90::space(gemm, hopper()).feasible()) {
    if (config.get("bm") != 8 || config.get("bn") != 64 || config.get("split_k") == 1) continue;
    splits = true;
    const std::int64_t ctas = launch_of(gemm, config).launch.grid.x;
    CHECK(ctas == 8 * 12 * config.at("split_k"));
  }
  CHECK(splits);
}

TEST_CASE("sm90 says why it cannot implement a GEMM", "[gemm]") {
  const auto reason = [](const GemmProblem& gemm, const char* arch = "sm_90a") {
    return sm90_engine.can_implement({gemm}, facts_of_architecture(arch)).value_or("");
  };
  GemmProblem gemm = plain_gemm(64, 128, 256);
  CHECK(reason(gemm).empty());
  CHECK(reason(gemm, "sm_80").find("compute capability 9.0") != std::string::npos);
  CHECK(reason(plain_gemm(64, 128, 260)).find("16-byte aligned") != std::string::npos);
  gemm.dtype = gemm.c_dtype = gemm.wide_dtype = DType::f32;
  CHECK(reason(gemm).find("not f32") != std::string::npos);
  GemmProblem groups = grouped_rows(plain_gemm(64, 128, 256), 2000);
  CHECK(reason(groups).find("2000 groups") != std::string::npos);
  groups = grouped_rows(plain_gemm(64, 128, 256), 3);
  CHECK(reason(groups).empty());
  groups.epilogue.row(row_broadcast::bias) = "bias";
  CHECK(reason(groups).find("bias") != std::string::npos);
}

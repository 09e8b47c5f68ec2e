#include "kernels/gemm/sm80/space.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/least_cost.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/gemm/launch.hpp"

namespace fftune::sm80 {
namespace {

/// Input of the space and the cost model: the results of m x n x k that a launch computes. Groups
/// count as if each had its equal share of the tokens; two groups of rows by a mask count as one.
struct Shape : GemmSize {
  int b_operands, k_pairs;
  std::int64_t results;
  bool a_mn_major;
  gemm_form form;

  explicit Shape(const GemmProblem& gemm)
      : GemmSize(gemm),
        b_operands(gemm.b_operands()),
        k_pairs(gemm.k_pairs()),
        results(gemm.outputs()),
        a_mn_major(gemm.a_major == Major::mn),
        form(form_of(gemm)) {
    const Groups& groups = gemm.groups;
    if (groups.by == Grouping::reduction) {
      k = ceil_div(k, groups.count);
      results *= groups.count;
    } else if (groups.by == Grouping::rows && groups.mask.empty()) {
      const auto with_rows = static_cast<std::int64_t>(std::ceil(groups.with_rows()));
      m = ceil_div(m, with_rows);
      results *= with_rows;
    }
  }

  std::int64_t tiles(const Tile& tile) const {
    return tile.tiles_m(m) * ceil_div(n, tile.bn) * results;
  }
};

constexpr sm80_config largest_tile{
    .bm = 256, .bn = 256, .bk = 128, .warps_m = 4, .warps_n = 4, .stages = 6};

using Tiles = TypedSpace<Tile>;

std::vector<std::int64_t> splits_of(const GemmProblem& gemm) {
  if (gemm.batch_invariant) return {1};
  return {1, 2, 4, max_split_k};
}

void add_tile_constraints(Tiles& space, const Shape& shape, const DeviceFacts& facts) {
  const int b_operands = shape.b_operands;
  gemm_form ungrouped = shape.form;
  ungrouped.groups = grouping::none;
  space.constraint("a warp's tile consists of 16 x 16 blocks, which one ldmatrix.x4 loads",
                   {"bm", "bn", "warps_m", "warps_n"}, [](const Tile& t) {
                     return t.bm % (16 * t.warps_m) == 0 && t.bn % (16 * t.warps_n) == 0;
                   });
  space.constraint(
      "an SM has four schedulers: 4 or 8 warps keep them busy, and 2 only where a "
      "tile has no room for 4",
      {"bm", "bn", "warps_m", "warps_n"}, [](const Tile& t) {
        return t.warps() == 4 || t.warps() == 8 || (t.warps() == 2 && t.bm * t.bn <= 512);
      });
  space.constraint("255 registers a thread hold 128 fp32 accumulators and two sets of fragments",
                   {"bm", "bn", "warps_m", "warps_n"}, [=](const Tile& t) {
                     return t.accumulators(b_operands) <= 128 && t.warp_m() <= 64 &&
                            t.warp_n() * b_operands <= 128;
                   });
  space.constraint(
      "a tile of 64 x 64 or more is no faster on warp tiles below 32 x 32: the fragments each "
      "warp loads from shared memory cost more than their MMAs",
      {"bm", "bn", "warps_m", "warps_n"}, [=](const Tile& t) {
        return t.bm < 64 || t.bn * b_operands < 64 ||
               (t.warp_m() >= 32 && t.warp_n() * b_operands >= 32);
      });
  space.constraint(
      "8 warps pay where each has 32 x 32 accumulators or more; below, 4 warps load fewer "
      "fragments",
      {"bm", "bn", "warps_m", "warps_n"},
      [=](const Tile& t) { return t.warps() < 8 || t.accumulators(b_operands) >= 32; });
  space.constraint(
      "4 to 16 k16 steps in flight cover the latency of memory, and a deeper pipeline only fills "
      "later",
      {"bk", "stages"}, [](const Tile& t) {
        const int ahead = (t.stages - 1) * t.bk;
        return ahead >= 64 && ahead <= 256;
      });
  space.constraint(
      "K blocks of 128 pay where a block has little work per tile, so only for tiles of up to 32 "
      "tokens",
      {"bm", "bk"}, [](const Tile& t) { return t.bk < 128 || t.bm <= 32; });
  // Beside the tables of grouped rows, those of the largest tile.
  const bool in_clusters = splits_in_clusters(facts);
  const std::int64_t most = facts.shared_bytes_per_block - largest_tile.table_bytes(shape.form);
  space.constraint(
      fmt::format("stages * bk * 2 bytes * (bm + {} bn), and the exchange of split-K, must fit "
                  "in the {} bytes of shared memory that a block can have",
                  b_operands, most),
      {"bm", "bn", "bk", "stages", "split_k"}, [=](const Tile& t) {
        return t.shared_bytes(ungrouped, t.split_k > 1 && in_clusters) <= most;
      });
}

void add_problem_constraints(Tiles& space, const Shape& shape, const DeviceFacts& facts) {
  const int least_bm = shape.a_mn_major ? 32 : 16;
  const std::int64_t k = shape.k * shape.k_pairs;
  space.constraint("more than half of a tile would be padding", {"bm", "bn"}, [=](const Tile& t) {
    return (t.bm == least_bm || t.bm < 2 * shape.m) && t.bn < shape.n + 32;
  });
  space.constraint("the swizzle of an MN-major A takes rows of 64 bytes or more", {"bm"},
                   [=](const Tile& t) { return t.bm >= least_bm; });
  space.constraint(
      "every row of tiles reads the weights again: at most two rows of tiles, or tiles of 64 rows "
      "or more",
      {"bm"},
      [=](const Tile& t) { return t.bm >= std::min<std::int64_t>(64, ceil_div(shape.m, 2)); });
  space.constraint(
      "with 1024 tokens or more, a tile of fewer than 64 columns reads the tokens too often",
      {"bn"}, [=](const Tile& t) {
        return shape.m < 1024 || t.bn * shape.b_operands >= 64 || t.bn >= shape.n;
      });
  space.constraint("a pipeline longer than the main loop is never full",
                   {"bk", "stages", "split_k"}, [=](const Tile& t) {
                     return t.stages == 2 ||
                            t.stages - 1 <= ceil_div(k, std::int64_t{t.bk} * t.split_k);
                   });
  space.constraint("more than half of a K block would be padding", {"bk"},
                   [=](const Tile& t) { return t.bk <= 64 || t.bk < 2 * shape.k; });
  space.constraint(
      "split-K pays only for fewer tiles than SMs, with at most two blocks for each SM",
      {"bm", "bn", "split_k"}, [=](const Tile& t) {
        return t.split_k == 1 || (shape.tiles(t) < facts.multiprocessors &&
                                  shape.tiles(t) * t.split_k <= 2 * facts.multiprocessors);
      });
  space.constraint("a split needs at least four K blocks to be worth its share of the reduction",
                   {"bk", "split_k"}, [=](const Tile& t) {
                     return t.split_k == 1 || k >= std::int64_t{4} * t.bk * t.split_k;
                   });
  space.constraint(
      "group_m above 1 needs that many rows of tiles, and more tiles than SMs: otherwise their "
      "order does not matter",
      {"bm", "bn", "group_m"}, [=](const Tile& t) {
        return t.group_m == 1 ||
               (t.group_m <= t.tiles_m(shape.m) && shape.tiles(t) > facts.multiprocessors);
      });
}

void add_heads(Tiles& space, const QkvHeads& qkv) {
  space.constraint("a tile needs whole heads, all of q, all of k or all of v", {"bn"},
                   [qkv](const Tile& t) { return qkv.fits_heads(t.bn); });
  space.constraint("the 16-byte chunks of a K block must divide evenly among the threads",
                   {"bn", "bk", "warps_m", "warps_n"},
                   [](const Tile& t) { return t.bn * t.bk / 8 % t.threads() == 0; });
}

Tiles tiles_of(const GemmProblem& gemm, const Shape& shape, const DeviceFacts& facts) {
  Tiles space{Tile()};
  space
      .parameter("bm", "rows of the output tile of a block", Tiles::to<&Tile::bm>,
                 {16, 32, 64, 128, 256})
      .parameter("bn", "columns of the output tile of a block", Tiles::to<&Tile::bn>,
                 shape.form.is_qkv() ? std::vector<std::int64_t>{32, 64, 96, 128, 160, 192, 256}
                                     : std::vector<std::int64_t>{32, 64, 128, 256})
      .parameter("bk", "elements of k in a stage", Tiles::to<&Tile::bk>, {32, 64, 128})
      .parameter("warps_m", "warps along the rows of the tile", Tiles::to<&Tile::warps_m>,
                 {1, 2, 4})
      .parameter("warps_n", "warps along the columns of the tile", Tiles::to<&Tile::warps_n>,
                 {1, 2, 4})
      .parameter("stages", "K blocks that shared memory holds", Tiles::to<&Tile::stages>,
                 {2, 3, 4, 5, 6})
      .parameter("split_k", "blocks that share the k of a tile", Tiles::to<&Tile::split_k>,
                 splits_of(gemm))
      .parameter("group_m", "tile rows in a band of the raster order", Tiles::to<&Tile::group_m>,
                 {1, 8});
  add_tile_constraints(space, shape, facts);
  add_problem_constraints(space, shape, facts);
  if (shape.form.is_qkv()) add_heads(space, gemm.epilogue.qkv);
  return space;
}

/// Clock cycles of a configuration.
double cycles_of(const Shape& shape, const DeviceFacts& facts, const Tile& tile) {
  // Rates of one SM per clock: multiply-adds of mma.sync, bytes of shared memory, and
  // its part of L2. From the A100 and H100 whitepapers, rounded.
  constexpr double multiply_adds = 1024, shared_rate = 128, l2_rate = 40;
  constexpr double start_cycles = 2000, split_cycles = 2500, exchange_rate = 32;
  const double b_operands = shape.b_operands;
  const double operands = tile.bm + b_operands * tile.bn;
  const double warp_operands = tile.warps() * (tile.warp_m() + b_operands * tile.warp_n());
  const double step =
      std::max({b_operands * tile.bm * tile.bn * 16 / multiply_adds,
                (warp_operands + operands) * 32 / shared_rate, operands * 32 / l2_rate});
  const double k_blocks =
      static_cast<double>(ceil_div(ceil_div(shape.k, tile.bk) * shape.k_pairs, tile.split_k));
  const double block = k_blocks * tile.bk / 16 * step;
  const auto blocks = shape.tiles(tile) * tile.split_k;
  const auto per_sm = ceil_div(blocks, std::max(facts.multiprocessors, 1));
  const double waves = static_cast<double>(per_sm);
  const double band = tile.group_m == 1 ? 1.0 : 0.98;  // neighbours share what they read in L2
  const double split =
      tile.split_k == 1 ? 0
                        : split_cycles + static_cast<double>(tile.split_k - 1) *
                                             tile.exchange_bytes(shape.b_operands) / exchange_rate;
  return waves * band * block + start_cycles + split;
}

}  // namespace

Tile::Tile(const Config& config)
    : sm80_config{.bm = config.get("bm"),
                  .bn = config.get("bn"),
                  .bk = config.get("bk"),
                  .warps_m = config.get("warps_m"),
                  .warps_n = config.get("warps_n"),
                  .stages = config.get("stages")},
      split_k(config.get("split_k")),
      group_m(config.get("group_m")) {}

Config Tile::config() const {
  return {{"bm", bm},           {"bn", bn},         {"bk", bk},           {"warps_m", warps_m},
          {"warps_n", warps_n}, {"stages", stages}, {"split_k", split_k}, {"group_m", group_m}};
}

std::string template_argument(const sm80_config& config) {
  return StructText("sm80_config", "bm", config.bm, "bn", config.bn, "bk", config.bk, "warps_m",
                    config.warps_m, "warps_n", config.warps_n, "stages", config.stages);
}

Space space(const GemmProblem& gemm, const DeviceFacts& facts) {
  return tiles_of(gemm, Shape(gemm), facts).space();
}

bool has_tiles(const GemmProblem& gemm, const DeviceFacts& facts) {
  return !tiles_of(gemm, Shape(gemm), facts).is_empty();
}

Config default_config(const GemmProblem& gemm, const DeviceFacts& facts) {
  // The usual shapes from the most tokens to the fewest; the last is feasible for most.
  constexpr std::array<sm80_config, 14> shapes{{{128, 256, 32, 2, 4, 3},
                                                {256, 128, 32, 4, 2, 3},
                                                {128, 128, 64, 2, 4, 3},
                                                {128, 128, 32, 2, 2, 4},
                                                {128, 64, 64, 2, 2, 3},
                                                {128, 64, 32, 2, 2, 4},
                                                {64, 128, 64, 2, 2, 3},
                                                {64, 64, 64, 2, 2, 4},
                                                {64, 32, 64, 2, 2, 4},
                                                {32, 64, 64, 2, 2, 4},
                                                {32, 32, 64, 2, 2, 4},
                                                {16, 64, 64, 1, 4, 4},
                                                {16, 32, 64, 1, 2, 4},
                                                {16, 32, 64, 1, 2, 2}}};
  const Shape shape(gemm);
  const Tiles all = tiles_of(gemm, shape, facts);
  std::optional<Tile> best;
  double least = std::numeric_limits<double>::infinity();
  for (const sm80_config& usual : shapes)
    for (const std::int64_t split_k : splits_of(gemm))
      for (const int group_m : {8, 1}) {
        Tile tile(usual, static_cast<int>(split_k), group_m);
        const double cost = cycles_of(shape, facts, tile);
        if (cost >= least) continue;
        // A short k has no K blocks for as many stages.
        while (tile.stages > 2 && !all.holds(tile)) --tile.stages;
        if (!all.holds(tile)) continue;
        least = cost;
        best = tile;
      }
  if (best) return best->config();
  // A handful of tiles cannot suit every GEMM; the space itself has the last word.
  return least_cost(all, "sm80", [&](const Tile& tile) { return cycles_of(shape, facts, tile); });
}

double cycles(const GemmProblem& gemm, const DeviceFacts& facts, const Config& config) {
  return cycles_of(Shape(gemm), facts, Tile(config));
}

}  // namespace fftune::sm80

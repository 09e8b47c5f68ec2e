#include "kernels/gemm/mma_sync.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "core/error.hpp"
#include "kernels/gemm/split_k.hpp"

namespace fftune {
namespace {

struct Tile {
  int bm, bn, bk, warps_m, warps_n, stages, split_k, group_m;

  explicit Tile(const Config& config)
      : bm(config.get("bm")),
        bn(config.get("bn")),
        bk(config.get("bk")),
        warps_m(config.get("warps_m")),
        warps_n(config.get("warps_n")),
        stages(config.get("stages")),
        split_k(config.get("split_k")),
        group_m(config.get("group_m")) {}

  int warps() const { return warps_m * warps_n; }
  int warp_m() const { return bm / warps_m; }
  int warp_n() const { return bn / warps_n; }
  std::int64_t tiles_m(const GemmShape& shape) const { return ceil_div(shape.m, bm); }
  std::int64_t tiles(const GemmShape& shape) const {
    return tiles_m(shape) * ceil_div(shape.n, bn) * shape.results;
  }
  std::int64_t share_bytes(int products) const { return std::int64_t{4} * products * bm * bn; }
  /// fp32 sums that a thread holds.
  int sums(int products) const { return products * warp_m() * warp_n() / 32; }
};

/// What the kernel keeps in shared memory beside the tiles: mma_sync_gemm::kept_bytes.
constexpr std::int64_t kept_bytes = 128;

std::int64_t shared_bytes(const Tile& tile, const GemmShape& shape, const DeviceFacts& facts) {
  const std::int64_t ring =
      std::int64_t{2} * tile.stages * tile.bk * (tile.bm + shape.products * tile.bn);
  const std::int64_t output = std::int64_t{tile.bm} * (tile.bn * 2 + 16);
  const std::int64_t exchange =
      tile.split_k > 1 && splits_in_clusters(facts) ? tile.share_bytes(shape.products) : 0;
  return kept_bytes + std::max({ring, output, exchange});
}

/// A constraint whose predicate takes a Tile and looks at the parameters `reads` alone.
template <class Holds>
void limit(Space& space, std::string reason, std::vector<std::string> reads, Holds holds) {
  space.constraint(
      std::move(reason), [holds](const Config& config) { return holds(Tile(config)); },
      std::move(reads));
}

void add_tile_constraints(Space& space, const GemmShape& shape, const DeviceFacts& facts) {
  const int products = shape.products;
  limit(space, "a warp's tile is made of 16 x 16 blocks, what one ldmatrix.x4 loads",
        {"bm", "bn", "warps_m", "warps_n"},
        [](const Tile& t) { return t.bm % (16 * t.warps_m) == 0 && t.bn % (16 * t.warps_n) == 0; });
  limit(space,
        "a multiprocessor has four schedulers: 4 or 8 warps keep them busy, and 2 only where a "
        "tile has no room for 4",
        {"bm", "bn", "warps_m", "warps_n"}, [](const Tile& t) {
          return t.warps() == 4 || t.warps() == 8 || (t.warps() == 2 && t.bm * t.bn <= 512);
        });
  limit(space, "128 fp32 sums and two sets of fragments are what 255 registers a thread hold",
        {"bm", "bn", "warps_m", "warps_n"}, [=](const Tile& t) {
          return t.sums(products) <= 128 && t.warp_m() <= 64 && t.warp_n() * products <= 128;
        });
  limit(space,
        "a tile of 64 x 64 or more is no faster on warp tiles below 32 x 32: the fragments each "
        "warp loads from shared memory cost more than their products",
        {"bm", "bn", "warps_m", "warps_n"}, [=](const Tile& t) {
          return t.bm < 64 || t.bn * products < 64 ||
                 (t.warp_m() >= 32 && t.warp_n() * products >= 32);
        });
  limit(space,
        "8 warps pay where each has 32 x 32 sums or more; below, 4 warps load fewer fragments",
        {"bm", "bn", "warps_m", "warps_n"},
        [=](const Tile& t) { return t.warps() < 8 || t.sums(products) >= 32; });
  limit(
      space,
      "4 to 16 k16 steps in flight cover the latency of memory, and a deeper ring only fills later",
      {"bk", "stages"}, [](const Tile& t) {
        const int ahead = (t.stages - 1) * t.bk;
        return ahead >= 64 && ahead <= 256;
      });
  limit(space,
        "k tiles of 128 pay where a block has little work per tile, so only for tiles of up to 32 "
        "tokens",
        {"bm", "bk"}, [](const Tile& t) { return t.bk < 128 || t.bm <= 32; });
  const std::int64_t most = facts.shared_bytes_per_block;
  limit(space,
        fmt::format("stages * bk * 2 bytes * (bm + {} bn), and the exchange of split-K, must fit "
                    "in the {} bytes of shared memory that a block can have",
                    products, most),
        {"bm", "bn", "bk", "stages", "split_k"},
        [=](const Tile& t) { return shared_bytes(t, shape, facts) <= most; });
}

void add_problem_constraints(Space& space, const GemmShape& shape, const DeviceFacts& facts) {
  const int least_bm = shape.a_transposed ? 32 : 16;
  const std::int64_t k = shape.k * shape.terms;
  limit(space, "more than half of a tile would be padding", {"bm", "bn"}, [=](const Tile& t) {
    return (t.bm == least_bm || t.bm < 2 * shape.m) && t.bn < shape.n + 32;
  });
  limit(space, "the swizzle of a transposed operand takes rows of 64 bytes or more", {"bm"},
        [=](const Tile& t) { return t.bm >= least_bm; });
  limit(space,
        "every row of tiles reads the weights again: at most two of them, or tiles of 64 rows",
        {"bm"},
        [=](const Tile& t) { return t.bm >= std::min<std::int64_t>(64, ceil_div(shape.m, 2)); });
  limit(space,
        "with 1024 tokens or more, a tile of fewer than 64 columns reads the tokens too often",
        {"bn"}, [=](const Tile& t) {
          return shape.m < 1024 || t.bn * shape.products >= 64 || t.bn >= shape.n;
        });
  limit(space, "a ring longer than the loop over k is never full", {"bk", "stages", "split_k"},
        [=](const Tile& t) {
          return t.stages == 2 || t.stages - 1 <= ceil_div(k, std::int64_t{t.bk} * t.split_k);
        });
  limit(space, "a k tile that is mostly past the end of k", {"bk"},
        [=](const Tile& t) { return t.bk <= 64 || t.bk < 2 * shape.k; });
  limit(space,
        "splitting k pays only while there are fewer tiles than multiprocessors, and up to two "
        "blocks for each",
        {"bm", "bn", "split_k"}, [=](const Tile& t) {
          return t.split_k == 1 || (t.tiles(shape) < facts.multiprocessors &&
                                    t.tiles(shape) * t.split_k <= 2 * facts.multiprocessors);
        });
  limit(space, "a split needs at least four k tiles to be worth its share of the closing sum",
        {"bk", "split_k"},
        [=](const Tile& t) { return t.split_k == 1 || k >= std::int64_t{4} * t.bk * t.split_k; });
  limit(space,
        "a band of tile rows higher than the output is the whole output, and without several waves "
        "the order does not matter",
        {"bm", "bn", "group_m"}, [=](const Tile& t) {
          return t.group_m == 1 ||
                 (t.group_m <= t.tiles_m(shape) && t.tiles(shape) > facts.multiprocessors);
        });
}

Config make_config(const std::array<int, 6>& tile, int split_k, int group_m) {
  return {{"bm", tile[0]},      {"bn", tile[1]},     {"bk", tile[2]},      {"warps_m", tile[3]},
          {"warps_n", tile[4]}, {"stages", tile[5]}, {"split_k", split_k}, {"group_m", group_m}};
}

}  // namespace

Space mma_sync_space(const GemmShape& shape, const DeviceFacts& facts) {
  Space space;
  space.parameter("bm", "rows of the output tile of a block", {16, 32, 64, 128, 256})
      .parameter("bn", "columns of the output tile of a block", {32, 64, 128, 256})
      .parameter("bk", "elements of k in a stage", {32, 64, 128})
      .parameter("warps_m", "warps along the rows of the tile", {1, 2, 4})
      .parameter("warps_n", "warps along the columns of the tile", {1, 2, 4})
      .parameter("stages", "k tiles that shared memory holds", {2, 3, 4, 5, 6})
      .parameter("split_k", "blocks that share the sum of a tile", {1, 2, 4, max_split_k})
      .parameter("group_m", "tile rows in a band of the raster order", {1, 8});
  add_tile_constraints(space, shape, facts);
  add_problem_constraints(space, shape, facts);
  return space;
}

Config mma_sync_default(const GemmShape& shape, const DeviceFacts& facts) {
  // The usual shapes from the most tokens to the fewest; the last is feasible for every product.
  constexpr std::array<std::array<int, 6>, 14> tiles{{{128, 256, 32, 2, 4, 3},
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
  const Space space = mma_sync_space(shape, facts);
  Config best;
  double least = std::numeric_limits<double>::infinity();
  for (const auto& tile : tiles) {
    for (const int split_k : {1, 2, 4, max_split_k}) {
      for (const int group_m : {8, 1}) {
        const Config config = make_config(tile, split_k, group_m);
        const double cost = mma_sync_cost(shape, facts, config);
        if (cost < least && space.violations(config).empty()) {
          least = cost;
          best = config;
        }
      }
    }
  }
  if (best.entries().empty()) {
    // A handful of tiles cannot suit every sum; the space itself has the last word.
    const auto feasible = space.feasible();
    if (feasible.empty()) throw Error(ErrorKind::internal, "the space of mma_sync is empty");
    best = feasible.front();
  }
  return best;
}

double mma_sync_cost(const GemmShape& shape, const DeviceFacts& facts, const Config& config) {
  // Rates of one multiprocessor per clock: multiply-adds of mma.sync, bytes of shared memory, and
  // its part of L2. From the A100 and H100 whitepapers, rounded.
  constexpr double multiply_adds = 1024, shared_rate = 128, l2_rate = 40;
  constexpr double start_cycles = 2000, split_cycles = 2500, exchange_rate = 32;
  const Tile tile(config);
  const double products = shape.products;
  const double operands = tile.bm + products * tile.bn;
  const double warp_operands = tile.warps() * (tile.warp_m() + products * tile.warp_n());
  const double step =
      std::max({products * tile.bm * tile.bn * 16 / multiply_adds,
                (warp_operands + operands) * 32 / shared_rate, operands * 32 / l2_rate});
  const double k_tiles =
      static_cast<double>(ceil_div(ceil_div(shape.k, tile.bk) * shape.terms, tile.split_k));
  const double block = k_tiles * tile.bk / 16 * step;
  const auto blocks = tile.tiles(shape) * tile.split_k;
  const auto per_multiprocessor = ceil_div(blocks, std::max(facts.multiprocessors, 1));
  const double waves = static_cast<double>(per_multiprocessor);
  const double band = tile.group_m == 1 ? 1.0 : 0.98;  // neighbours share what they read in L2
  const double split = tile.split_k == 1
                           ? 0
                           : split_cycles + static_cast<double>(tile.split_k - 1) *
                                                tile.share_bytes(shape.products) / exchange_rate;
  return waves * band * block + start_cycles + split;
}

std::int64_t mma_sync_shared_bytes(const Config& config, int products) {
  const GemmShape shape{1, 1, 1, products};
  return shared_bytes(Tile(config), shape, {});
}

std::string mma_sync_template_arguments(const Config& config) {
  const Tile tile(config);
  return fmt::format("{}, {}, {}, {}, {}, {}", tile.bm, tile.bn, tile.bk, tile.warps_m,
                     tile.warps_n, tile.stages);
}

void mma_sync_launch(Program& program, const GemmShape& shape, const DeviceFacts& facts,
                     const Config& config, std::vector<Argument> tensors,
                     const std::vector<std::int64_t>& sizes) {
  const Tile tile(config);
  KernelLaunch launch;
  launch.kernel = program.kernels.size() - 1;
  launch.grid.x = static_cast<std::uint32_t>(tile.tiles(shape));
  launch.block.x = static_cast<std::uint32_t>(tile.warps() * 32);
  launch.shared_bytes = static_cast<std::uint32_t>(mma_sync_shared_bytes(config, shape.products));
  launch.arguments = std::move(tensors);
  split_launch(program, launch, facts, tile.split_k, tile.share_bytes(shape.products), kept_bytes);
  for (const std::int64_t size : sizes)
    launch.arguments.emplace_back(static_cast<std::int32_t>(size));
  launch.arguments.emplace_back(std::int32_t{tile.split_k});
  launch.arguments.emplace_back(std::int32_t{tile.group_m});
  program.steps.emplace_back(std::move(launch));
}

}  // namespace fftune

#include "kernels/gemm/wgmma.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "kernels/gemm/wgmma_tile.hpp"

namespace fftune {
namespace {

/// Whether output features may take the 64-row side.
bool swaps(const GemmShape& shape) {
  return !shape.a_transposed && !shape.b_transposed && shape.box_buffers == 1;
}

/// Whether many problems are served by tiles of so many tokens. Those between are for one number of
/// tokens each.
bool is_usual(int bm) {
  return bm == 8 || bm == 16 || bm == 32 || bm % 64 == 0;
}

/// Whether so many tiles are few enough to share the k of each.
bool may_split(std::int64_t tiles, int split_k, int processors) {
  return split_k == 1 || (tiles < processors && tiles * split_k <= 2 * processors);
}

std::int64_t tiles_of(const GemmShape& shape, int bm, int bn) {
  return shape.row_tiles(bm) * ceil_div(shape.n, bn) * shape.results;
}

/// What the busiest multiprocessor computes, in elements of the output.
double busiest(const GemmShape& shape, int processors, int bm, int bn, int split_k) {
  return double(ceil_div(tiles_of(shape, bm, bn) * split_k, processors)) * bm * bn / split_k;
}

/// The least of that by usual tiles that registers can hold and that are not too low for L2.
double busiest_usual(const GemmShape& shape, int processors) {
  double least = std::numeric_limits<double>::infinity();
  for (const int bm : {64, 128, 192, 256})
    for (const int bn : {64, 96, 128, 192, 256})
      for (const int split_k : {1, 2, 4})
        if ((bm > 64 || shape.m <= 128) && bm * bn * shape.products <= 128 * 384 &&
            may_split(tiles_of(shape, bm, bn), split_k, processors))
          least = std::min(least, busiest(shape, processors, bm, bn, split_k));
  return least;
}

/// A function that adds to `space` what has to hold of a tile: why, the parameters that it reads,
/// and whether it does.
auto tile_constraints(Space& space, const GemmShape& shape) {
  return [&space, one = shape.one_owner](std::string reason, std::vector<std::string> reads,
                                         auto holds) {
    space.constraint(
        std::move(reason), [holds, one](const Config& c) { return holds(WgmmaTile(c, one)); },
        std::move(reads));
  };
}

void add_tile_constraints(Space& space, const GemmShape& shape, const DeviceFacts& facts) {
  const int products = shape.products;
  const auto add = tile_constraints(space, shape);
  add("wgmma takes 64 rows for each warpgroup: tokens, or output features when swapped",
      {"bm", "bn", "schedule", "mma_warpgroups"},
      [](const WgmmaTile& t) { return t.rows() % (64 * t.row_consumers()) == 0; });
  add("the narrow side of the tile is one wgmma wide", {"bm", "bn", "schedule"},
      [](const WgmmaTile& t) {
        if (!t.swapped()) return t.bm >= 64;
        return is_usual(t.bm) ? t.bm <= 128 && t.bn <= 128 : true;
      });
  add("ping-pong is two warpgroups in turn", {"schedule", "mma_warpgroups"},
      [](const WgmmaTile& t) { return !t.ping_pong() || t.consumers == 2; });
  add("more than 64 rows a warpgroup and accumulators of both products must fit beside the "
      "operands in 232 registers a thread, or 160 with three consumers",
      {"bm", "bn", "schedule", "mma_warpgroups"},
      [=](const WgmmaTile& t) { return t.sums(products) <= (t.consumers == 3 ? 128 : 192); });
  add("a third warpgroup pays only where two cannot hold the tile, and four leave a thread the 128 "
      "registers that no wgmma of 256 columns fits",
      {"bm", "bn", "schedule", "mma_warpgroups"}, [=](const WgmmaTile& t) {
        return t.consumers < 3 || (t.rows() == 192 && t.sums(products) >= 64 && t.columns() <= 192);
      });
  add("tiles of 64 x 64 or less leave the tensor cores waiting for shared memory unless tokens "
      "are few",
      {"bm", "bn", "schedule"},
      [=](const WgmmaTile& t) { return shape.m <= 512 || t.bm * t.bn * products >= 64 * 128; });
  add("blocks share operands along m or along n, and either do that or share k",
      {"cluster_m", "cluster_n", "split_k"}, [](const WgmmaTile& t) {
        return (t.cluster_m > 1) + (t.cluster_n > 1) + (t.split_k > 1) <= 1;
      });
  add("a ping-pong block has more than one tile, a split one exactly one", {"schedule", "split_k"},
      [](const WgmmaTile& t) { return !t.ping_pong() || t.split_k == 1; });
  const bool aligned = starts_lines(shape.k);
  add("of swapped tiles an operand is worth sharing only where it costs two lines for each of its "
      "rows, and there are more than a few tokens",
      {"bm", "schedule", "cluster_m", "cluster_n"}, [=](const WgmmaTile& t) {
        const bool shares = t.cluster_m * t.cluster_n > 1;
        return !t.swapped() || !shares || (!aligned && !is_usual(t.bm));
      });
  add("blocks share an operand in whole swizzle atoms of 8 rows",
      {"bm", "bn", "cluster_m", "cluster_n"}, [](const WgmmaTile& t) {
        return t.bm % (8 * t.cluster_n) == 0 && t.bn % (8 * t.cluster_m) == 0;
      });
  add("a slab of 64 of its rows is what the copy engine and wgmma take of a transposed operand",
      {"bm", "bn", "cluster_m", "cluster_n"}, [=](const WgmmaTile& t) {
        return (!shape.a_transposed || t.bm / t.cluster_n % 64 == 0) &&
               (!shape.b_transposed || t.bn / t.cluster_m % 64 == 0);
      });
  add("neither transposed operands nor the gradients of a gate come with swapped tiles",
      {"schedule"}, [=](const WgmmaTile& t) { return !t.swapped() || swaps(shape); });
  add("gate and up are read by the block that has the whole sum", {"split_k"},
      [=](const WgmmaTile& t) { return t.split_k == 1 || shape.box_buffers == 1; });
  add("no more buffers for the output than it has boxes",
      {"bm", "bn", "schedule", "mma_warpgroups", "split_k", "epilogue_stages"},
      [=](const WgmmaTile& t) { return t.output_boxes <= t.boxes(); });
  const std::int64_t limit = facts.shared_bytes_per_block;
  add(fmt::format("stages * 128 bytes * (bm + {} bn), the output boxes and the exchange of split-K "
                  "must fit in the {} bytes of shared memory that a block can have",
                  products, limit),
      {"bm", "bn", "schedule", "mma_warpgroups", "split_k", "stages", "epilogue_stages"},
      [=](const WgmmaTile& t) { return t.shared_bytes(products, shape.box_buffers) <= limit; });
  add("a ring of fewer k tiles than fit, by a third or more, only waits longer for memory",
      {"bm", "bn", "schedule", "mma_warpgroups", "split_k", "stages", "epilogue_stages"},
      [=](const WgmmaTile& t) {
        return t.stages >= t.k_tiles(shape) ||
               t.shared_bytes(products, shape.box_buffers) * 3 > limit * 2 || t.stages >= 12;
      });
}

void add_problem_constraints(Space& space, const GemmShape& shape, const DeviceFacts& facts) {
  const auto add = tile_constraints(space, shape);
  const int processors = std::max(facts.multiprocessors, 1);
  add("tiles of fewer than 64 features read the tokens more often, for the sake of processors that "
      "would have no tile",
      {"bm", "bn"}, [=](const WgmmaTile& t) {
        return t.bn >= 64 || shape.row_tiles(t.bm) * ceil_div(shape.n, 64) < processors;
      });
  add("widths of wgmma between multiples of 32 are for tiles that are whole and only stored: "
      "groups end in parts of tiles, and boxes that are read too have 32 features or 64",
      {"bm", "bn", "schedule", "mma_warpgroups"}, [=](const WgmmaTile& t) {
        const int width = t.instruction_columns(shape.products);
        const bool plain = !shape.grouped && shape.box_buffers == 1;
        return plain || t.swapped() || width <= 32 || width % 32 == 0;
      });
  add("widths between the usual ones are for waves that they fill better", {"bm", "bn", "split_k"},
      [=](const WgmmaTile& t) {
        if (t.bn != 80 && t.bn != 112 && t.bn != 160 && t.bn != 224) return true;
        const int less = t.bn == 80 ? 64 : t.bn == 112 ? 96 : t.bn == 160 ? 128 : 192;
        const int more = t.bn == 80 ? 96 : t.bn == 112 ? 128 : t.bn == 160 ? 192 : 256;
        const auto work = [&](int bn) { return busiest(shape, processors, t.bm, bn, t.split_k); };
        return work(t.bn) < work(less) && work(t.bn) < work(more);
      });
  const double usual = busiest_usual(shape, processors);
  add("tiles of other numbers of tokens are for rows and waves that no usual tile fills as well: "
      "tokens then take the side of wgmma that comes in steps of 8",
      {"bm", "bn", "schedule", "split_k"}, [=](const WgmmaTile& t) {
        if (is_usual(t.bm)) return true;
        const auto rows = shape.row_tiles(t.bm);
        const bool narrowest = shape.row_tiles(t.bm - 8) > rows;
        if (!t.swapped() || shape.m <= 64 || t.bn < 64 || !narrowest) return false;
        // Few tokens leave the tensor cores idle: what counts is what is copied in vain.
        if (shape.m <= 128) return rows * t.bm < ceil_div(shape.m, 32) * 32;
        return busiest(shape, processors, t.bm, t.bn, t.split_k) < usual;
      });
  add("more than half of a tile would be padding", {"bm", "bn"}, [=](const WgmmaTile& t) {
    return (t.bm == (swaps(shape) ? 8 : 64) || t.bm < 2 * shape.m) &&
           (t.bn <= 64 || t.bn < 2 * shape.n);
  });
  add("every row of tiles reads the weights again: at most four, or tiles of 80 tokens", {"bm"},
      [=](const WgmmaTile& t) { return t.bm >= std::min<std::int64_t>(80, ceil_div(shape.m, 4)); });
  add("swapped tiles of the usual numbers of tokens pay up to 256 of them", {"bm", "schedule"},
      [=](const WgmmaTile& t) { return !t.swapped() || !is_usual(t.bm) || shape.m <= 256; });
  add("blocks that share an operand need a tile each", {"bm", "bn", "cluster_m", "cluster_n"},
      [=](const WgmmaTile& t) {
        return shape.row_tiles(t.bm) >= t.cluster_m && ceil_div(shape.n, t.bn) >= t.cluster_n;
      });
  add("splitting k pays only while there are fewer tiles than multiprocessors, and up to two "
      "blocks for each",
      {"bm", "bn", "split_k"},
      [=](const WgmmaTile& t) { return may_split(t.tiles(shape), t.split_k, processors); });
  add("a split needs at least two k tiles", {"split_k"}, [=](const WgmmaTile& t) {
    return t.split_k == 1 || shape.k * shape.terms >= std::int64_t{128} * t.split_k;
  });
  add("a ring longer than the loop over k is never full", {"split_k", "stages"},
      [=](const WgmmaTile& t) { return t.stages == 2 || t.stages <= t.k_tiles(shape) + 1; });
  add("without several waves the order of the tiles does not matter", {"bm", "bn", "group_m"},
      [=](const WgmmaTile& t) {
        return t.group_m == 8 || (t.tiles(shape) > processors && shape.row_tiles(t.bm) > 8);
      });
}

}  // namespace

Space wgmma_space(const GemmShape& shape, const DeviceFacts& facts) {
  Space space;
  std::vector<std::int64_t> tokens;
  for (int bm = 8; bm <= 256; bm += 8) tokens.push_back(bm);
  space.parameter("bm", "tokens of a tile", tokens)
      .parameter("bn", "output features of a tile",
                 {16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 256})
      .parameter(
          "schedule",
          "cooperative: the MMA warpgroups share a tile; pingpong: each has its own; swap_ab: "
          "cooperative, with the weights as operand A",
          {"cooperative", "pingpong", "swap_ab"})
      .parameter("mma_warpgroups", "warpgroups that issue wgmma", {1, 2, 3})
      .parameter("cluster_m", "blocks along m that share weights by multicast", {1, 2})
      .parameter("cluster_n", "blocks along n that share tokens by multicast", {1, 2})
      .parameter("split_k", "blocks of a cluster that share the sum of a tile", {1, 2, 4, 8})
      .parameter("stages", "stages of the shared-memory pipeline, K blocks of 64",
                 {2, 3, 4, 5, 6, 8, 12, 16})
      .parameter("epilogue_stages",
                 "shared-memory buffers of an MMA warpgroup between registers and TMA stores",
                 {1, 2, 4})
      .parameter("group_m", "tile rows in a band of the raster order", {8, 16});
  add_tile_constraints(space, shape, facts);
  add_problem_constraints(space, shape, facts);
  return space;
}

std::int64_t wgmma_shared_bytes(const Config& config, int products, int box_buffers) {
  return WgmmaTile(config).shared_bytes(products, box_buffers);
}

std::string wgmma_template_arguments(const Config& config, int products, int box_buffers,
                                     bool one_owner) {
  const WgmmaTile t(config, one_owner);
  return fmt::format("fftune::wgmma_tile{{{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}}}, {}", t.bm,
                     t.bn, t.stages, t.consumers, t.ping_pong(), t.swapped(), t.cluster_m,
                     t.cluster_n, t.split_k, t.output_boxes, t.one_owner,
                     t.shared_bytes(products, box_buffers));
}

KernelLaunch wgmma_geometry(const Program& program, const GemmShape& shape,
                            const DeviceFacts& facts, const Config& config, bool programmatic) {
  const WgmmaTile t(config, shape.one_owner);
  const std::int64_t clusters = t.clusters(shape);
  const std::int64_t resident = std::max(facts.multiprocessors / t.cluster_blocks(), 1);
  KernelLaunch launch;
  launch.kernel = program.kernels.size() - 1;
  launch.grid.x = static_cast<std::uint32_t>(
      (t.split_k > 1 ? clusters : std::min(clusters, resident)) * t.cluster_blocks());
  launch.block.x = static_cast<std::uint32_t>((t.consumers + 1) * 128);
  launch.cluster.x = static_cast<std::uint32_t>(t.cluster_blocks());
  launch.shared_bytes =
      static_cast<std::uint32_t>(t.shared_bytes(shape.products, shape.box_buffers));
  launch.programmatic = programmatic;
  return launch;
}

WgmmaMaps::WgmmaMaps(const GemmShape& shape, const Config& config, DType dtype, DType c_dtype)
    : shape_(shape), tile_(config, shape.one_owner), dtype_(dtype), c_dtype_(c_dtype) {}

TensorMapArgument WgmmaMaps::operand(const Pointer& matrix, bool transposed, std::int64_t rows,
                                     int share) const {
  const auto bk = static_cast<std::uint32_t>(128 / dtype_bytes(dtype_));
  if (transposed) return {matrix, dtype_, shape_.k, rows, bk, 64};
  return {matrix, dtype_, rows, shape_.k, static_cast<std::uint32_t>(share), bk};
}

TensorMapArgument WgmmaMaps::a(const Pointer& matrix) const {
  return operand(matrix, shape_.a_transposed, shape_.m, tile_.bm / tile_.cluster_n);
}

TensorMapArgument WgmmaMaps::b(const Pointer& matrix) const {
  return operand(matrix, shape_.b_transposed, shape_.n, tile_.bn / tile_.cluster_m);
}

TensorMapArgument WgmmaMaps::c(const Pointer& matrix) const {
  return c(matrix, c_dtype_);
}

TensorMapArgument WgmmaMaps::c(const Pointer& matrix, DType dtype) const {
  return {matrix,
          dtype,
          shape_.m,
          shape_.n,
          static_cast<std::uint32_t>(tile_.box_tokens()),
          static_cast<std::uint32_t>(tile_.box_features())};
}

void wgmma_launch(Program& program, const GemmShape& shape, const DeviceFacts& facts,
                  const Config& config, const WgmmaOperands& operands,
                  const std::vector<std::int64_t>& sizes, bool programmatic) {
  const WgmmaMaps maps(shape, config, operands.dtype, operands.c_dtype);
  KernelLaunch launch = wgmma_geometry(program, shape, facts, config, programmatic);
  launch.arguments.emplace_back(maps.a(operands.a));
  for (const Pointer& b : operands.b) launch.arguments.emplace_back(maps.b(b));
  for (std::size_t i = 0; i < operands.c.size(); ++i)
    launch.arguments.emplace_back(
        maps.c(operands.c[i], i == 0 ? operands.c_dtype : operands.sums_dtype));
  if (operands.residual || operands.bias) {
    launch.arguments.emplace_back(maps.c(operands.residual.value_or(operands.c.front())));
    launch.arguments.push_back(operands.bias ? argument_of(*operands.bias)
                                             : Argument{std::int64_t{0}});
  }
  launch.arguments.insert(launch.arguments.end(), operands.scales.begin(), operands.scales.end());
  wgmma_append_sizes(launch, config, sizes);
  program.steps.emplace_back(std::move(launch));
}

void wgmma_append_sizes(KernelLaunch& launch, const Config& config,
                        const std::vector<std::int64_t>& sizes) {
  for (const std::int64_t size : sizes)
    launch.arguments.emplace_back(static_cast<std::int32_t>(size));
  launch.arguments.emplace_back(std::int32_t{config.get("group_m")});
}

}  // namespace fftune

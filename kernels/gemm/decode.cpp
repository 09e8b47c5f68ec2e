#include "kernels/gemm/decode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/error.hpp"
#include "kernels/gemm/split_k.hpp"

namespace fftune {
namespace {

struct Block {
  int rows, warps, unroll, split_k;

  explicit Block(const Config& config)
      : rows(config.get("rows")),
        warps(config.get("warps")),
        unroll(config.get("unroll")),
        split_k(config.get("split_k")) {}

  int threads() const { return warps * 32; }
  std::int64_t blocks(const GemmShape& shape) const { return ceil_div(shape.n, rows) * split_k; }
  /// 16-byte loads of weights that a thread has in flight.
  int loads(const GemmShape& shape) const { return shape.products * rows / 8 * unroll; }
};

int tokens(const GemmShape& shape) {
  return shape.m <= 8 ? 8 : 16;
}

/// What a thread holds: weights and tokens in flight, sums, and about 28 for addresses and loops.
int registers(const Block& block, const GemmShape& shape) {
  return 4 * block.loads(shape) + tokens(shape) / 2 * block.unroll +
         shape.products * block.rows / 2 + 28;
}

}  // namespace

Space decode_space(const GemmShape& shape, const DeviceFacts& facts) {
  Space space;
  space.parameter("rows", "rows of each weight that a block takes", {8, 16, 32})
      .parameter("warps", "warps of a block, which share the sum over k", {2, 4, 8, 16})
      .parameter("unroll", "16-byte loads of a row that a thread issues at once", {1, 2, 4, 8})
      .parameter("split_k", "blocks that share the sum over k", {1, 2, 4, max_split_k});
  const auto add = [&space](const char* reason, auto holds) {
    space.constraint(reason, [holds](const Config& config) { return holds(Block(config)); });
  };
  add("the closing sum gives every group of 8 rows a warp of its own",
      [](const Block& b) { return b.rows / 8 <= b.warps; });
  add("the loads in flight are held in registers: 255 a thread, and 65,536 a multiprocessor",
      [=](const Block& b) { return registers(b, shape) <= std::min(255, 65536 / b.threads()); });
  add("2 to 16 loads in flight: one a thread does not cover the latency of memory, and more than "
      "16 only start later",
      [=](const Block& b) {
        return (b.loads(shape) >= 2 || shape.k <= 64) && b.loads(shape) <= 16;
      });
  add("every warp needs a share of k, 32 * unroll elements at the least", [=](const Block& b) {
    return (b.warps == 2 && b.unroll == 1 && b.split_k == 1) ||
           shape.k > std::int64_t{32} * b.unroll * (b.warps * b.split_k - 1);
  });
  add("more than half of the rows would be padding",
      [=](const Block& b) { return b.rows == 8 || b.rows < 2 * shape.n; });
  add("splitting k pays only while there are fewer blocks of rows than multiprocessors",
      [=](const Block& b) {
        return b.split_k == 1 || b.blocks(shape) / b.split_k < facts.multiprocessors;
      });
  return space;
}

Config decode_default(const GemmShape& shape, const DeviceFacts& facts) {
  // Memory delivers at full speed once each multiprocessor has about latency * bandwidth in flight:
  // 0.7 us * 33 GB/s, some 24 KiB on an H200, and less on others. Tokens are read by every block.
  constexpr double wanted_bytes = 24 * 1024;
  const auto feasible = decode_space(shape, facts).feasible();
  if (feasible.empty()) throw Error(ErrorKind::internal, "the space of decode is empty");
  const double multiprocessors = std::max(facts.multiprocessors, 1);
  double least = std::numeric_limits<double>::infinity();
  const Config* best = nullptr;
  for (const Config& config : feasible) {
    const Block block(config);
    const double blocks = static_cast<double>(block.blocks(shape));
    const double each = std::ceil(blocks / multiprocessors);
    const double resident = std::min(each, 2048.0 / block.threads());
    const double in_flight = resident * block.threads() * 16 * block.loads(shape);
    const double imbalance = each * multiprocessors / blocks;
    const double tokens_read = 1 + static_cast<double>(shape.m) / (block.rows * shape.products);
    // Short rounds wait for memory more often, and a block of 8 warps is large enough to share the
    // tokens in L1 and small enough to start early.
    const double rounds =
        1 + 0.15 / block.loads(shape) + 0.02 * std::abs(std::log2(block.warps / 8.0));
    const double cost = rounds * imbalance * std::max(1.0, wanted_bytes / in_flight) *
                        (0.9 + 0.1 * tokens_read) * (block.split_k > 1 ? 1.3 : 1.0);
    if (cost < least) {
      least = cost;
      best = &config;
    }
  }
  return *best;
}

std::string decode_template_arguments(const GemmShape& shape, const Config& config) {
  const Block block(config);
  return fmt::format("{}, {}, {}, {}", tokens(shape), block.rows, block.warps, block.unroll);
}

void decode_launch(Program& program, const GemmShape& shape, const DeviceFacts& facts,
                   const Config& config, std::vector<Argument> tensors,
                   const std::vector<std::int64_t>& sizes) {
  const Block block(config);
  KernelLaunch launch;
  launch.kernel = program.kernels.size() - 1;
  launch.grid.x = static_cast<std::uint32_t>(ceil_div(shape.n, block.rows));
  launch.block.x = static_cast<std::uint32_t>(block.threads());
  launch.shared_bytes = static_cast<std::uint32_t>(shape.products * block.rows / 8 *
                                                   std::max(block.warps * tokens(shape) * 32, 512));
  launch.arguments = std::move(tensors);
  split_launch(program, launch, facts, block.split_k,
               std::int64_t{64} * shape.products * block.rows);
  for (const std::int64_t size : sizes)
    launch.arguments.emplace_back(static_cast<std::int32_t>(size));
  launch.arguments.emplace_back(std::int32_t{block.split_k});
  program.steps.emplace_back(std::move(launch));
}

}  // namespace fftune

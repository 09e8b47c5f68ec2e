// What a configuration of the wgmma engine should cost, and the choice that follows untuned.
//
// The constants were fitted to the times of 3,200 variants of ffn's and masked-ffn's stages on an
// H200 (docs/measurements/landscapes) and of the records of its presets: the cheapest of those of a
// landscape is within 1.1% of the fastest in the mean, and within 7%.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.hpp"
#include "kernels/gemm/wgmma.hpp"
#include "kernels/gemm/wgmma_tile.hpp"

namespace fftune {
namespace {

/// What two kinds of work take that overlap, but less so the more they are alike.
double overlapped(double first, double second, double sharpness) {
  return std::pow(std::pow(first, sharpness) + std::pow(second, sharpness), 1 / sharpness);
}

/// Of the memory of the whole device.
double bytes_a_clock(const DeviceFacts& facts) {
  const double clock = facts.clock_hz > 0 ? facts.clock_hz : 1.7e9;
  const double bandwidth = facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12;
  return bandwidth / clock;
}

/// Rows of 128 bytes that a block asks the L2 for, for each k tile. What is multicast is asked for
/// once. A row that begins within a line touches two, whose requests do not join those of the rows
/// beside it as whole lines' do.
double rows_asked(const WgmmaTile& t, const GemmShape& shape) {
  const auto cost = [](std::int64_t extent) { return starts_lines(extent) ? 1 : 1.9; };
  return t.bm * cost(shape.a_transposed ? shape.m : shape.k) / t.cluster_n +
         double(shape.products) * t.bn * cost(shape.b_transposed ? shape.n : shape.k) / t.cluster_m;
}

/// Clocks of adding up the partial sums of fp8, of one step: a warpgroup waits for its products, a
/// part and a product at a time, and only another one has the tensor cores meanwhile.
double promotion_cycles(const WgmmaTile& t, const GemmShape& shape) {
  if (!shape.promoted) return 0;
  return (t.row_consumers() > 1 ? 150.0 : 220.0) / 4 * t.parts() * shape.products;
}

/// Clocks in which a block takes in the bytes of one step of 16 of k, and waits for them where the
/// ring is short. `busy`: the share of the multiprocessors that have a block.
double intake_cycles(const WgmmaTile& t, const GemmShape& shape, double busy) {
  constexpr double block_rate = 73;     // bytes a clock, into one multiprocessor
  constexpr double device_rate = 52;    // and into each where all of them ask
  constexpr double load_latency = 500;  // clocks from a slot that is free to one that is full,
  constexpr double row_latency = 5.2;   // and for each row of 128 bytes
  const double rows = t.bm + double(shape.products) * t.bn;
  // Blocks that share tokens wait for the slowest of them.
  const double sharing = t.cluster_n > 1 ? 1.12 : 1;
  const double intake =
      sharing * 32 *
      std::max(rows / block_rate, busy * std::max(rows, rows_asked(t, shape)) / device_rate);
  const double latency = (load_latency + row_latency * rows) / 4 / std::max(t.stages - 1, 1);
  return overlapped(intake, latency, 4);
}

/// How much longer a step takes where few blocks ask for the same lines at about the same time:
/// those with a share of k each, unless they have the tiles of two groups (one_owner), and those of
/// a group with a single row of tiles, whose weights no other row reads. The more of the device is
/// busy, the more the others wait for these.
double unshared(const WgmmaTile& t, const GemmShape& shape, double busy) {
  constexpr double longer = 0.3;
  if (t.split_k > 1) return shape.one_owner ? 1 : 1 + longer;
  const bool alone = shape.groups() == 2 && shape.fewest_row_tiles(t.bm) == 1;
  return alone ? 1 + longer * busy : 1;
}

/// Clocks of one step of 16 of k in a block whose operands are copied in tiles.
double step_cycles(const WgmmaTile& t, const GemmShape& shape, double busy) {
  constexpr double shared_rate = 128;  // bytes a clock
  constexpr double efficiency = 0.75;  // of the tensor cores under load, at a clock that yields
  const int products = shape.products;
  // wgmma m64nNk16 takes N/2 clocks and reads 2 KiB + 32 N bytes.
  const double width = t.instruction_columns(products);
  const double instructions = double(t.rows()) / 64 * products * t.columns() / width;
  const double wgmma = std::max(width / 2 / efficiency, (2048 + 32 * width) / shared_rate);
  const double intake = intake_cycles(t, shape, busy);
  // What the L2 delivers takes power from the products.
  return unshared(t, shape, busy) * (overlapped(instructions * wgmma, intake, 8) + 0.02 * intake) +
         promotion_cycles(t, shape);
}

/// The same where rows are gathered, and kept for other turns if there are several.
double gathering_step_cycles(const WgmmaTile& t, const GemmShape& shape, double copied) {
  // Sums gather two operands, and more neighbouring bytes of each row.
  const bool sum = shape.a_transposed && shape.b_transposed;
  const double rate = sum ? 36 : 18;  // bytes a clock, by cp.async
  // Each 32 bytes take a cycle of shared memory, of which the products leave about half.
  const double gathering = shape.gatherers == 4 ? 0.26 : sum ? 0.4 : 0.45;
  constexpr double keeping = 0.35;
  const double rows =
      (shape.a_gathered ? t.bm : 0) + (shape.b_gathered ? shape.products * t.bn : 0);
  if (rows == 0) return copied;
  // With few slots the copies and the products take turns.
  return std::max(copied + (shape.turns > 1 ? gathering + keeping : gathering) * rows,
                  rows * 32 / rate + copied / std::max(t.stages - 1, 1));
}

/// Clocks in which all blocks at once read and keep their first turn's rows.
double keeping_cycles(const WgmmaTile& t, const GemmShape& shape, const DeviceFacts& facts) {
  constexpr double efficiency = 0.6;  // of the memory, by scattered reads and writes
  if (shape.turns == 1) return 0;
  const double blocks = std::min<double>(static_cast<double>(t.row_runs(shape)),
                                         static_cast<double>(facts.multiprocessors));
  const double rows = blocks * static_cast<double>(shape.row_tiles(t.bm)) /
                      static_cast<double>(t.row_runs(shape)) * t.bm;
  return rows * static_cast<double>(shape.k) * 2 * 2 / (efficiency * bytes_a_clock(facts));
}

/// Clocks until each block of a split has the sums that the others made for it. An only owner has
/// them while it is busy.
double exchange_cycles(const WgmmaTile& t, const GemmShape& shape) {
  constexpr double rate = 16;  // bytes a clock, into a block
  if (shape.one_owner) return 0;
  return double(t.split_k - 1) * t.rows() * t.owned_columns() * shape.products * 4 / rate;
}

/// How many clusters run at once. Those of more than two blocks do not fill every GPC: an H200 has
/// 30 of 4 and 15 of 8.
std::int64_t clusters_at_once(const WgmmaTile& t, const DeviceFacts& facts) {
  const std::int64_t whole = facts.multiprocessors / t.cluster_blocks();
  return std::max<std::int64_t>(t.cluster_blocks() > 2 ? whole * 91 / 100 : whole, 1);
}

/// Clocks of reading and writing everything once, of each group its own weights. A memory-bound
/// kernel needs most of the device loading at once, and blocks of other tokens of a group load no
/// other weights. With many rows of tiles there is more to compute than to read.
double memory_cycles(const WgmmaTile& t, const GemmShape& shape, const DeviceFacts& facts,
                     double busy) {
  const double rate = 0.95 * bytes_a_clock(facts);
  const int weights = shape.grouped ? shape.groups() : 1;
  const double bytes = (double(shape.n) * shape.k * shape.products * shape.terms * weights +
                        double(shape.m) * shape.k * shape.terms * shape.results +
                        double(shape.m) * shape.n * shape.results * shape.box_buffers) *
                       2;
  const auto rows = std::min<std::int64_t>(shape.row_tiles(t.bm), 4);
  const double loading = busy * (0.1 + 0.9 / static_cast<double>(rows));
  return bytes / (rate * std::min(1.0, loading * 2.5));
}

double cost_of_groups(const GemmShape& shape, const DeviceFacts& facts, const Config& config) {
  constexpr double start_cycles = 4000;
  constexpr double cluster_cycles = 1300;  // of blocks that wait for each other
  constexpr double split_cycles = 300;
  constexpr double output_rate = 20;  // bytes a clock, through shared memory
  constexpr double exposed = 0.4;     // of the epilogue in ping-pong
  constexpr double waiting = 1.5;     // times longer, for boxes that are read
  const WgmmaTile t(config);
  const bool waits = shape.box_buffers > 1 && (shape.grouped || !t.reads_ahead());
  const double blocks = static_cast<double>(t.row_runs(shape) * t.cluster_blocks());
  const double busy = std::min(1.0, blocks / std::max(facts.multiprocessors, 1));
  const double output =
      double(t.bm) * t.bn * 2 * shape.box_buffers / output_rate * (waits ? waiting : 1);
  const double steps = 4.0 * static_cast<double>(t.k_tiles(shape));
  const double copied = step_cycles(t, shape, busy);
  const double first =
      std::max(steps * gathering_step_cycles(t, shape, copied), keeping_cycles(t, shape, facts));
  const double turn = (first + (shape.turns - 1) * steps * copied) / shape.turns;
  const double tile = turn + (t.ping_pong() ? exposed * output : output);
  // A cluster's blocks start together, and those that lie beyond the matrix idle.
  const auto waves = ceil_div(t.row_runs(shape), clusters_at_once(t, facts)) * shape.turns;
  const double together = t.split_k > 1            ? split_cycles + exchange_cycles(t, shape)
                          : t.cluster_blocks() > 1 ? cluster_cycles
                                                   : 0;
  return start_cycles + together +
         overlapped(static_cast<double>(waves) * tile, memory_cycles(t, shape, facts, busy), 3);
}

}  // namespace

double wgmma_cost(const GemmShape& shape, const DeviceFacts& facts, const Config& config) {
  const double expected = cost_of_groups(shape, facts, config);
  if (shape.deviation <= 0) return expected;
  // One row more than the tiles of a wave hold costs another wave. So what is expected of the cost
  // counts, which the cost of the expected number is not: half of all draws are about as expected,
  // and a quarter on each side about 1.5 deviations away.
  double cost = expected / 2;
  for (const double side : {-1.5, 1.5}) {
    GemmShape drawn = shape;
    drawn.marked = std::clamp<std::int64_t>(
        std::llround(static_cast<double>(shape.marked) + side * shape.deviation), 0, shape.m);
    cost += cost_of_groups(drawn, facts, config) / 4;
  }
  return cost;
}

Config wgmma_cheapest(const Space& space, const std::function<double(const Config&)>& cost_of) {
  const auto feasible = space.feasible();
  if (feasible.empty()) throw Error(ErrorKind::internal, "a space of wgmma is empty");
  const Config* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Config& config : feasible) {
    const double cost = cost_of(config);
    if (cost > least || (cost == least && config.at("stages") <= best->at("stages"))) continue;
    least = cost;
    best = &config;
  }
  return *best;
}

Config wgmma_cheapest(const Space& space, const GemmShape& shape, const DeviceFacts& facts) {
  return wgmma_cheapest(space,
                        [&](const Config& config) { return wgmma_cost(shape, facts, config); });
}

Config wgmma_default(const GemmShape& shape, const DeviceFacts& facts) {
  return wgmma_cheapest(wgmma_space(shape, facts), shape, facts);
}

}  // namespace fftune

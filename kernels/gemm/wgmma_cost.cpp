// What a configuration of the wgmma engine should cost, and the choice that follows untuned.
//
// The constants were fitted to the times of 2,080 variants of ffn's stages on an H200
// (docs/measurements/landscapes): there the cheapest of those timed is within 5% of the fastest.
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

/// Rows of 128 bytes that a block asks the L2 for, for each k tile. What is multicast is asked for
/// once. A row that begins within a line touches two, whose requests do not join those of the rows
/// beside it as whole lines' do: it costs as much as 2.4 rows.
double rows_asked(const WgmmaTile& t, const GemmShape& shape) {
  const auto cost = [](std::int64_t extent) { return starts_lines(extent) ? 1 : 2.4; };
  return t.bm * cost(shape.a_transposed ? shape.m : shape.k) / t.cluster_n +
         double(shape.products) * t.bn * cost(shape.b_transposed ? shape.n : shape.k) / t.cluster_m;
}

/// Clocks of one step of 16 of k in a block: of its products, or of the bytes that a multiprocessor
/// takes in for it and of waiting for them where the ring is short. `busy`: the share of the
/// multiprocessors that have a block.
double step_cycles(const WgmmaTile& t, const GemmShape& shape, double busy) {
  constexpr double shared_rate = 128;   // bytes a clock
  constexpr double intake_rate = 57;    // bytes a clock, from the L2
  constexpr double gather_rate = 18;    // bytes a clock, by cp.async
  constexpr double efficiency = 0.82;   // of the tensor cores under load, at a clock that yields
  constexpr double load_latency = 750;  // clocks from a slot that is free to one that is full,
  constexpr double row_latency = 4.6;   // and for each row of 128 bytes
  const int products = shape.products;
  // wgmma m64nNk16 takes N/2 clocks and reads 2 KiB + 32 N bytes.
  const double width = t.instruction_columns(products);
  const double instructions = double(t.rows()) / 64 * products * t.columns() / width;
  const double wgmma = std::max(width / 2 / efficiency, (2048 + 32 * width) / shared_rate);
  const double rows = std::max(t.bm + double(products) * t.bn, busy * rows_asked(t, shape));
  const double intake = rows * 32 / intake_rate;
  const double latency = (load_latency + row_latency * rows) / 4 / std::max(t.stages - 1, 1);
  // Blocks that share wait for the slowest of them.
  const double sharing = (t.cluster_m > 1 ? 1.03 : 1) * (t.cluster_n > 1 ? 1.05 : 1);
  const double gathered = (shape.a_gathered ? t.bm : 0) + (shape.b_gathered ? products * t.bn : 0);
  // What the L2 delivers takes power from the products.
  const double copied =
      sharing * (std::max(instructions * wgmma, overlapped(intake, latency, 4)) + 0.05 * intake);
  if (gathered == 0) return copied;
  // With few slots the copies and the products take turns.
  return std::max(copied, gathered * 32 / gather_rate + copied / std::max(t.stages - 1, 1));
}

/// Clocks until each block of a split has the sums that the others made for it.
double exchange_cycles(const WgmmaTile& t, const GemmShape& shape) {
  constexpr double rate = 6;  // bytes a clock, into a block
  return double(t.split_k - 1) * t.rows() * t.owned_columns() * shape.products * 4 / rate;
}

/// How many clusters run at once. Those of more than two blocks do not fill every GPC: an H200 has
/// 30 of 4 and 15 of 8.
std::int64_t clusters_at_once(const WgmmaTile& t, const DeviceFacts& facts) {
  const std::int64_t whole = facts.multiprocessors / t.cluster_blocks();
  return std::max<std::int64_t>(t.cluster_blocks() > 2 ? whole * 91 / 100 : whole, 1);
}

/// Clocks of reading and writing everything once. A memory-bound kernel needs most of the device
/// loading at once.
double memory_cycles(const GemmShape& shape, const DeviceFacts& facts, double blocks) {
  const double processors = std::max(facts.multiprocessors, 1);
  const double clock = facts.clock_hz > 0 ? facts.clock_hz : 1.7e9;
  const double bandwidth = facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12;
  // Of the whole device; what it takes beyond that the sum with the work has.
  const double rate = 1.1 * bandwidth / clock;
  const double bytes = (double(shape.n) * shape.k * shape.products * shape.terms +
                        double(shape.m) * shape.k * shape.terms * shape.results +
                        double(shape.m) * shape.n * shape.results * shape.box_buffers) *
                       2;
  const double busy = std::min(blocks, processors) / processors;
  return bytes / (rate * std::min(1.0, busy * 1.3));
}

}  // namespace

double wgmma_cost(const GemmShape& shape, const DeviceFacts& facts, const Config& config) {
  constexpr double start_cycles = 2300;
  constexpr double cluster_cycles = 2000;  // of blocks that wait for each other
  constexpr double output_rate = 10;       // bytes a clock, through shared memory
  constexpr double exposed = 0.5;          // of the epilogue in ping-pong
  const WgmmaTile t(config);
  const double blocks = static_cast<double>(t.clusters(shape) * t.cluster_blocks());
  const double busy = std::min(1.0, blocks / std::max(facts.multiprocessors, 1));
  const double output = double(t.bm) * t.bn * 2 * shape.box_buffers / output_rate;
  const double tile = 4.0 * static_cast<double>(t.k_tiles(shape)) * step_cycles(t, shape, busy) +
                      (t.ping_pong() ? exposed * output : output);
  // A cluster's blocks start together, and those that lie beyond the matrix idle.
  const auto waves = ceil_div(t.clusters(shape), clusters_at_once(t, facts));
  const double together = t.split_k > 1            ? exchange_cycles(t, shape)
                          : t.cluster_blocks() > 1 ? cluster_cycles
                                                   : 0;
  return start_cycles + together +
         overlapped(static_cast<double>(waves) * tile, memory_cycles(shape, facts, blocks), 2);
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

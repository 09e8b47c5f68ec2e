// What a configuration of the wgmma engine should cost, and the choice that follows untuned.
//
// The constants were fitted to the times of 1,850 variants of ffn's stages on an H200
// (docs/measurements/landscapes): there the cheapest of a problem is within 3.4% of its fastest.
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

/// Clocks of one step of 16 of k in a block: of its products, of the bytes that a multiprocessor
/// takes in for it, multicast or not, or of waiting for them where the ring is short.
double step_cycles(const WgmmaTile& t, const GemmShape& shape) {
  constexpr double shared_rate = 128;    // bytes a clock
  constexpr double intake_rate = 58;     // bytes a clock, from the L2
  constexpr double gather_rate = 18;     // bytes a clock, by cp.async
  constexpr double efficiency = 0.7;     // of the tensor cores under load, at a clock that yields
  constexpr double load_latency = 2000;  // clocks from a slot that is free to one that is full
  const int products = shape.products;
  // wgmma m64nNk16 takes N/2 clocks and reads 2 KiB + 32 N bytes.
  const double width = t.instruction_columns(products);
  const double instructions = double(t.rows()) / 64 * products * t.columns() / width;
  const double wgmma = std::max(width / 2 / efficiency, (2048 + 32 * width) / shared_rate);
  const double intake = (t.bm + double(products) * t.bn) * 32 / intake_rate;
  const double latency = load_latency / 4 / std::max(t.stages - 1, 1);
  const double multicast = t.cluster_m * t.cluster_n > 1 ? 0.99 : 1;
  const double gathered = (shape.a_gathered ? t.bm : 0) + (shape.b_gathered ? products * t.bn : 0);
  const double copied = multicast * std::max(overlapped(instructions * wgmma, intake, 12), latency);
  if (gathered == 0) return copied;
  // With few slots the copies and the products take turns.
  return std::max(copied, gathered * 32 / gather_rate + copied / std::max(t.stages - 1, 1));
}

/// Clocks of reading and writing everything once. A memory-bound kernel needs most of the device
/// loading at once.
double memory_cycles(const GemmShape& shape, const DeviceFacts& facts, double blocks) {
  const double processors = std::max(facts.multiprocessors, 1);
  const double clock = facts.clock_hz > 0 ? facts.clock_hz : 1.7e9;
  const double bandwidth = facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12;
  const double rate = 0.9 * bandwidth / clock;  // of the whole device
  const double bytes = (double(shape.n) * shape.k * shape.products * shape.terms +
                        double(shape.m) * shape.k * shape.terms * shape.results +
                        double(shape.m) * shape.n * shape.results * shape.box_buffers) *
                       2;
  const double busy = std::min(blocks, processors) / processors;
  return bytes / (rate * std::min(1.0, busy * 1.3));
}

}  // namespace

double wgmma_cost(const GemmShape& shape, const DeviceFacts& facts, const Config& config) {
  constexpr double start_cycles = 2500;
  constexpr double cluster_cycles = 800;  // of blocks that wait for each other
  constexpr double split_cycles = 700;    // for each block of a cluster that shares k
  constexpr double output_rate = 16;      // bytes a clock, through shared memory
  constexpr double exposed = 0.75;        // of the epilogue in ping-pong
  constexpr double waiting = 1.5;         // times longer, for boxes that are read
  const WgmmaTile t(config);
  const bool waits = shape.box_buffers > 1 && (shape.grouped || !t.reads_ahead(shape.box_buffers));
  const double output =
      double(t.bm) * t.bn * 2 * shape.box_buffers / output_rate * (waits ? waiting : 1);
  const double tile = 4.0 * static_cast<double>(t.k_tiles(shape)) * step_cycles(t, shape) +
                      (t.ping_pong() ? exposed * output : output);
  // A cluster's blocks start together, and those that lie beyond the matrix idle.
  const auto at_once = std::max<std::int64_t>(facts.multiprocessors / t.cluster_blocks(), 1);
  const double work = static_cast<double>(ceil_div(t.clusters(shape), at_once)) * tile;
  const double memory =
      memory_cycles(shape, facts, static_cast<double>(t.clusters(shape) * t.cluster_blocks()));
  const double together = t.split_k > 1            ? split_cycles * t.split_k
                          : t.cluster_blocks() > 1 ? cluster_cycles
                                                   : 0;
  return start_cycles + together + overlapped(work, memory, 4);
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

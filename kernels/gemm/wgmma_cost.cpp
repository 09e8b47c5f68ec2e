// What a configuration of the wgmma engine should cost, and the choice that follows untuned.
#include <algorithm>
#include <array>
#include <limits>

#include "core/error.hpp"
#include "kernels/gemm/wgmma.hpp"
#include "kernels/gemm/wgmma_tile.hpp"

namespace fftune {
namespace {

/// The deepest ring that fits, from the values of the space.
Config with_deepest_ring(const Space& space, Config config) {
  for (const int stages : {16, 12, 8, 6, 5, 4, 3, 2}) {
    config.set("stages", stages);
    if (space.violations(config).empty()) return config;
  }
  return {};
}

}  // namespace

double wgmma_cost(const GemmShape& shape, const DeviceFacts& facts, const Config& config) {
  // Rates of one multiprocessor per clock: bytes of shared memory, and its parts of the L2's and
  // the memory's bandwidth. wgmma m64nNk16 takes N/2 clocks and reads 2 KiB + 32 N bytes.
  constexpr double shared_rate = 128, l2_rate = 40, start_cycles = 2500;
  constexpr double split_cycles =
      700;  // for each block of a cluster that shares k, measured on an H200
  constexpr double epilogue_rate = 24;  // bytes of output a clock, through shared memory
  const WgmmaTile t(config);
  const double processors = std::max(facts.multiprocessors, 1);
  const double clock = facts.clock_hz > 0 ? facts.clock_hz : 1.7e9;
  const double bandwidth = facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12;
  const double memory_rate = 0.9 * bandwidth / clock;  // of the whole device

  const double width = t.instruction_columns(shape.products);
  const double instructions =
      double(t.rows()) / 64 * shape.products * t.columns() / width;  // a k16
  const double wgmma = std::max(width / 2, (2048 + 32 * width) / shared_rate);
  const double multicast = t.cluster_m > 1   ? t.bm + shape.products * t.bn / 2.0
                           : t.cluster_n > 1 ? t.bm / 2.0 + shape.products * t.bn
                                             : t.bm + double(shape.products) * t.bn;
  const double step = std::max(instructions * wgmma, multicast * 32 / l2_rate);
  const double k_steps = 4.0 * static_cast<double>(t.k_tiles(shape));
  const double output = double(t.bm) * t.bn * 2 * shape.box_buffers / epilogue_rate;
  const double tile = k_steps * step + (t.ping_pong() ? output / 4 : output);
  const double tiles = static_cast<double>(t.tiles(shape)) * t.split_k;
  const auto waves =
      static_cast<double>(ceil_div(t.tiles(shape) * t.split_k, std::max(facts.multiprocessors, 1)));
  const double bytes = (double(shape.n) * shape.k * shape.products * shape.terms +
                        double(shape.m) * shape.k * shape.terms * shape.results +
                        double(shape.m) * shape.n * shape.results * shape.box_buffers) *
                       2;
  const double busy = std::min(tiles, processors) / processors;
  // A memory-bound kernel needs most of the device loading at once.
  const double memory = bytes / (memory_rate * std::min(1.0, busy * 1.15));
  const double split = t.split_k == 1 ? 0 : split_cycles * t.split_k;
  return start_cycles + std::max(waves * tile, memory) + split;
}

Config wgmma_cheapest(const Space& space, const GemmShape& shape, const DeviceFacts& facts) {
  const auto feasible = space.feasible();
  if (feasible.empty()) throw Error(ErrorKind::internal, "a space of wgmma is empty");
  const Config* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Config& config : feasible) {
    const double cost = wgmma_cost(shape, facts, config);
    if (cost > least || (cost == least && config.at("stages") <= best->at("stages"))) continue;
    least = cost;
    best = &config;
  }
  return *best;
}

Config wgmma_default(const GemmShape& shape, const DeviceFacts& facts) {
  // bm, bn, schedule, consumers, cluster_m, cluster_n, output_boxes
  constexpr std::array<std::array<int, 7>, 24> tiles{
      {{128, 256, 0, 2, 2, 1, 1}, {256, 128, 0, 2, 1, 2, 1}, {192, 128, 0, 3, 2, 1, 2},
       {128, 128, 0, 2, 2, 1, 1}, {128, 128, 0, 2, 1, 1, 2}, {128, 128, 1, 2, 2, 1, 1},
       {128, 96, 1, 2, 2, 1, 1},  {128, 112, 0, 2, 1, 1, 1}, {128, 80, 0, 2, 1, 1, 1},
       {128, 64, 0, 2, 1, 1, 1},  {64, 128, 0, 1, 1, 1, 2},  {64, 64, 0, 1, 1, 1, 1},
       {64, 32, 0, 1, 1, 1, 1},   {64, 16, 0, 1, 1, 1, 1},   {128, 32, 0, 2, 1, 1, 1},
       {128, 128, 2, 2, 1, 1, 1}, {64, 128, 2, 2, 1, 1, 1},  {64, 64, 2, 1, 1, 1, 1},
       {32, 128, 2, 2, 1, 1, 1},  {32, 64, 2, 1, 1, 1, 1},   {16, 128, 2, 2, 1, 1, 1},
       {16, 64, 2, 1, 1, 1, 1},   {8, 128, 2, 2, 1, 1, 1},   {8, 64, 2, 1, 1, 1, 1}}};
  const Space space = wgmma_space(shape, facts);
  Config best;
  double least = std::numeric_limits<double>::infinity();
  for (const auto& tile : tiles) {
    for (const int split_k : {1, 2, 4, 8}) {
      const Config config = with_deepest_ring(space, {{"bm", tile[0]},
                                                      {"bn", tile[1]},
                                                      {"schedule", tile[2]},
                                                      {"consumers", tile[3]},
                                                      {"cluster_m", tile[4]},
                                                      {"cluster_n", tile[5]},
                                                      {"split_k", split_k},
                                                      {"stages", 2},
                                                      {"output_boxes", tile[6]},
                                                      {"group_m", 8}});
      if (config.entries().empty()) continue;
      const double cost = wgmma_cost(shape, facts, config);
      if (cost < least) {
        least = cost;
        best = config;
      }
    }
  }
  if (!best.entries().empty()) return best;
  // A handful of tiles cannot suit every product; the space itself has the last word.
  const auto feasible = space.feasible();
  if (feasible.empty()) throw Error(ErrorKind::internal, "the space of wgmma is empty");
  return feasible.front();
}

}  // namespace fftune

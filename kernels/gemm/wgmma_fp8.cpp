// The wgmma engine's space for fp8.
#include <limits>

#include "core/error.hpp"
#include "kernels/gemm/wgmma.hpp"
#include "kernels/gemm/wgmma_tile.hpp"

namespace fftune {
namespace {

/// In units of two bytes, as the engine's space and cost count k.
GemmShape in_pairs(GemmShape shape) {
  shape.k = ceil_div(shape.k, 2);
  return shape;
}

}  // namespace

Space wgmma_fp8_space(const GemmShape& shape, const DeviceFacts& facts) {
  Space space = wgmma_space(in_pairs(shape), facts);
  const int products = shape.products;
  space.constraint(
      "the sums, and beside them those of one k tile on their way there, must fit in 232 registers "
      "a thread, or 160 with three consumers",
      [=](const Config& config) {
        const WgmmaTile tile(config);
        const int held = tile.sums(products) + tile.columns() / 2;
        return held <= (tile.consumers == 3 ? 112 : 192);
      },
      {"bm", "bn", "schedule", "consumers"});
  space.constraint("a row of a box to store has 32 bytes or more",
                   [](const Config& c) { return WgmmaTile(c).box_features() >= 32; },
                   {"bm", "bn", "schedule", "split_k"});
  return space;
}

Config wgmma_fp8_default(const GemmShape& shape, const DeviceFacts& facts) {
  const auto feasible = wgmma_fp8_space(shape, facts).feasible();
  if (feasible.empty()) throw Error(ErrorKind::internal, "the space of wgmma in fp8 is empty");
  const Config* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Config& config : feasible) {
    const double cost = wgmma_cost(in_pairs(shape), facts, config);
    // Of equal cost the deeper ring.
    if (cost > least || (cost == least && config.at("stages") <= best->at("stages"))) continue;
    least = cost;
    best = &config;
  }
  return *best;
}

}  // namespace fftune

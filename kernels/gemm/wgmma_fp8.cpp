// The wgmma engine's space for fp8.
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
  return wgmma_cheapest(wgmma_fp8_space(shape, facts), in_pairs(shape), facts);
}

}  // namespace fftune

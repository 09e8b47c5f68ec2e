// The wgmma engine's space for fp8.
#include "kernels/gemm/wgmma.hpp"
#include "kernels/gemm/wgmma_tile.hpp"

namespace fftune {
namespace {

/// In units of two bytes, as the engine's space and cost count k.
GemmShape in_pairs(GemmShape shape) {
  shape.k = ceil_div(shape.k, 2);
  shape.promoted = true;
  return shape;
}

void add_block_constraints(Space& space, Fp8Scales scales) {
  if (!scales.blocks) return;
  space.constraint(
      "all features of a tile share one scale of the weights: 128 is a multiple of them",
      [](const Config& c) {
        const WgmmaTile tile(c);
        return tile.swapped() || scale_block % tile.bn == 0;
      },
      {"bn", "schedule"});
  space.constraint(
      "a thread holds the scale of each of its tokens, and where the next one is: 64 "
      "tokens at most",
      [](const Config& c) {
        const WgmmaTile tile(c);
        return !tile.swapped() || tile.bm <= 64;
      },
      {"bm", "schedule"});
  if (!scales.output_blocks) return;
  space.constraint("a consumer has all 128 features of a token that share a scale of the output",
                   [](const Config& c) {
                     const WgmmaTile tile(c);
                     if (tile.swapped()) return tile.consumer_rows() % scale_block == 0;
                     return tile.bn == scale_block && tile.split_k == 1;
                   },
                   {"bn", "schedule", "mma_warpgroups", "split_k"});
}

}  // namespace

Space wgmma_fp8_space(const GemmShape& shape, const DeviceFacts& facts, Fp8Scales scales) {
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
      {"bm", "bn", "schedule", "mma_warpgroups"});
  space.constraint("a row of a box to store has 32 bytes or more",
                   [](const Config& c) { return WgmmaTile(c).box_features() >= 32; },
                   {"bm", "bn", "schedule", "split_k"});
  add_block_constraints(space, scales);
  return space;
}

double wgmma_fp8_cost(const GemmShape& shape, const DeviceFacts& facts, const Config& config) {
  return wgmma_cost(in_pairs(shape), facts, config);
}

Config wgmma_fp8_default(const GemmShape& shape, const DeviceFacts& facts, Fp8Scales scales) {
  return wgmma_cheapest(wgmma_fp8_space(shape, facts, scales), in_pairs(shape), facts);
}

}  // namespace fftune

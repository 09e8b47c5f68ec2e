// The shape of one block's work in the wgmma engine, and what follows from it.
#pragma once

#include "common/types.cuh"

namespace fftune {

struct wgmma_tile {
  int bm, bn;      // tokens and output features of a tile
  int stages;      // k tiles in shared memory
  int consumers;   // multiplying warpgroups
  bool ping_pong;  // each consumer owns whole tiles in turn, instead of a share of every tile
  bool swapped;    // output features take the 64-row side of wgmma, tokens the narrow one: for few
                   // tokens
  int cluster_m, cluster_n;  // blocks that share operands by multicast
  int split_k;               // blocks of a cluster that share the k of one tile
  int output_boxes;          // buffers between the registers and the store, for each consumer
  bool one_owner = false;    // a tile that blocks share is finished by one of them alone
};

// Consumers, and one warpgroup of producers.
__host__ __device__ constexpr int wgmma_threads(const wgmma_tile& tile) {
  return (tile.consumers + 1) * 128;
}

// With small accumulators two blocks fit a multiprocessor, and the next kernel's first blocks start
// while the last of this one's run; then registers need not move between warpgroups either. Beside
// its accumulators, those of `products` tiles, a thread needs about 64 registers.
__host__ __device__ constexpr int wgmma_blocks_per_multiprocessor(const wgmma_tile& tile,
                                                                  int products) {
  const int rows = tile.swapped ? tile.bn : tile.bm, columns = tile.swapped ? tile.bm : tile.bn;
  const int parts = (tile.ping_pong ? rows : rows / tile.consumers) / 64;
  return products * parts * columns / 2 + 64 <= 65536 / 2 / wgmma_threads(tile) ? 2 : 1;
}

// Whether a consumer's threads and the producer's may have so many registers: a block moves what it
// starts with, as many a thread as are there for all, in eights, and would wait for more for ever.
__host__ __device__ constexpr bool wgmma_registers_fit(const wgmma_tile& tile, int consumer,
                                                       int producer) {
  const int at_start = 65536 / wgmma_threads(tile) / 8 * 8;
  return tile.consumers * consumer + producer <= (tile.consumers + 1) * at_start;
}

// `box_buffers`: matrices that are stored together, or read and then stored over.
template <wgmma_tile tile, int products, int box_buffers = 1>
struct wgmma_layout {
  static constexpr int row_bytes = 128;  // of a k tile: the widest swizzle
  // Rows: the 64-row side. Columns: the other.
  static constexpr int rows = tile.swapped ? tile.bn : tile.bm;
  static constexpr int columns = tile.swapped ? tile.bm : tile.bn;
  static constexpr int consumer_rows = tile.ping_pong ? rows : rows / tile.consumers;
  static constexpr int parts = consumer_rows / 64;
  static_assert(consumer_rows % 64 == 0, "a warpgroup multiplies 64 rows at a time");
  static_assert(!tile.ping_pong || (tile.consumers == 2 && tile.split_k == 1));

  static constexpr int cluster_blocks = tile.cluster_m * tile.cluster_n * tile.split_k;
  static_assert(tile.split_k == 1 || tile.cluster_m * tile.cluster_n == 1);
  static_assert(tile.bn % (8 * tile.cluster_m) == 0 && tile.bm % (8 * tile.cluster_n) == 0);

  static constexpr int a_bytes = tile.bm * row_bytes;
  static constexpr int b_bytes = tile.bn * row_bytes;
  static constexpr int stage_bytes = a_bytes + products * b_bytes;
  static constexpr int ring_bytes = tile.stages * stage_bytes;

  // Both products in one instruction: their tiles of B lie one after the other, and so do their
  // sums. Three consumers leave ptxas the registers for 192 columns.
  static constexpr bool side_by_side =
      !tile.swapped && products * tile.bn <= (tile.consumers == 3 ? 192 : 256);

  // The blocks of a split each finish a share of the columns, if the shares are whole boxes; else
  // one does all.
  static constexpr int granule = tile.swapped ? 8 : 32;
  static constexpr int owners =
      !tile.one_owner && columns % (granule * tile.split_k) == 0 ? tile.split_k : 1;
  static constexpr int owned_columns = columns / owners;
  static constexpr int exchange_bytes =
      tile.split_k == 1
          ? 0
          : (tile.split_k - 1) * tile.consumers * 128 * products * parts * owned_columns / 2 * 4;

  // Boxes of the output, as the tensor map must have them: tokens x features. The copy engine takes
  // as long for a row of 32 features as for one of 64.
  static constexpr int box_features = tile.swapped || owned_columns % 64 == 0 ? 64
                                      : owned_columns % 32 == 0               ? 32
                                                                              : 16;
  static constexpr int box_tokens = tile.swapped ? owned_columns : consumer_rows;
  static constexpr int box_bytes = box_tokens * box_features * 2;
  static constexpr int boxes = tile.swapped ? parts : owned_columns / box_features;
  static constexpr int consumer_output_bytes = tile.output_boxes * box_buffers * box_bytes;
  static constexpr int output_bytes = tile.consumers * consumer_output_bytes;
  static_assert(tile.output_boxes >= 1 && tile.output_boxes <= boxes);

  // A barrier for each buffer, which says that what is added to the output has arrived there.
  static constexpr int output_barriers = tile.consumers * tile.output_boxes;

  static constexpr int threads = wgmma_threads(tile);
  static constexpr bool light = wgmma_blocks_per_multiprocessor(tile, products) == 2;
  // Places in shared memory: the ring, what the others' sums are sent to, the output, then
  // barriers: full and empty of each stage, those of the output, and that of the sums.
  static constexpr int exchange_at = ring_bytes;
  static constexpr int output_at = exchange_at + exchange_bytes;
  static constexpr int barriers_at = output_at + output_bytes;
  static constexpr int output_barriers_at = barriers_at + tile.stages * 16;
  static constexpr int sums_barrier_at = output_barriers_at + output_barriers * 8;
  static constexpr int shared_bytes = 1024 + sums_barrier_at + 8;
};

}  // namespace fftune

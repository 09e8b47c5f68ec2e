// The tiles of a block among sums over the rows of each of two groups (row_groups.cuh), and which k
// tiles of them it adds up: `height` tokens of one group each.
//
// The tiles of the group with more tokens come first, as they take longer. Blocks that share k have
// the tiles of both groups at each place of C instead, and each as many of all k tiles there, in
// that order of the groups: the same work under every mask, and most of them have k tiles of one
// tile alone. The first block finishes the longer group's tile, the last one the other's.
#pragma once

#include "gemm/row_groups.cuh"
#include "gemm/wgmma_ring.cuh"

namespace fftune {

// A tile of C, of which group and result, and what a block adds up of it.
struct token_task {
  tile_position at;
  int group;
  bool second;
  k_range range;
  u32 owner, senders;  // the block that finishes it, and a bit for each other that has a part

  __device__ __forceinline__ int k_tiles() const { return range.last - range.first; }
};

template <wgmma_tile tile, int height, int results>
class token_tasks : wgmma_schedule<tile> {
  using schedule = wgmma_schedule<tile>;
  static constexpr bool shares = tile.split_k > 1;
  static constexpr u32 blocks = tile.split_k;
  int part_ = 0;  // where k is shared: 0 is the longer group's tile, 1 the other's

  static __device__ __forceinline__ u32 result_rows(int m) {
    return ceil_div(static_cast<u32>(m), static_cast<u32>(tile.bm * tile.cluster_m)) *
           tile.cluster_m;
  }
  static __device__ __forceinline__ int k_tiles_of(const row_groups& groups, int group) {
    return ceil_div(groups.count(group), height);
  }
  // What a block has of `longer` and then `shorter` k tiles: those of part 0 or 1.
  static __device__ __forceinline__ k_range part_range(int longer, int shorter, int part,
                                                       u32 block) {
    const u32 all = longer + shorter;
    const int first = ceil_div(all * block, blocks), last = ceil_div(all * (block + 1), blocks);
    if (part == 0) return {smaller(first, longer), smaller(last, longer)};
    return {larger(first - longer, 0), larger(last - longer, 0)};
  }

 public:
  // Each C is shape.m x shape.n.
  __device__ __forceinline__ explicit token_tasks(const wgmma_gemm_shape& shape)
      : schedule({static_cast<int>((shares ? 1 : 2) * results * result_rows(shape.m) * tile.bm),
                  shape.n, shape.k, shape.group_m}) {}

  using schedule::pending;
  __device__ __forceinline__ void advance(u32 turns) {
    if (shares) part_ ^= 1;
    if (part_ == 0) schedule::advance(turns);
  }

  // The tile of the block `rank`, which may have no k tile of it; but an owner without one has one
  // past the last, which is all zeros.
  __device__ __forceinline__ token_task current(const row_groups& groups,
                                                const wgmma_gemm_shape& shape, u32 rank) const {
    token_task own{schedule::position(rank), 0, false, {}, rank, 0};
    const u32 rows = result_rows(shape.m);
    const u32 result = own.at.m / rows;
    own.at.m -= result * rows;
    const int longer = 2 * groups.marked() >= shape.k ? 0 : 1;
    own.group = (shares ? part_ == 0 : result < results) ? longer : 1 - longer;
    own.second = results == 2 && result % 2 == 1;
    const int k_tiles = k_tiles_of(groups, own.group);
    own.range = {0, k_tiles};
    if constexpr (shares) {
      const int most = k_tiles_of(groups, longer), least = k_tiles_of(groups, 1 - longer);
      own.range = part_range(most, least, part_, rank);
      own.owner = part_ == 0 ? 0 : blocks - 1;
#pragma unroll
      for (u32 block = 0; block < blocks; ++block) {
        const k_range range = part_range(most, least, part_, block);
        if (block != own.owner && range.first < range.last) own.senders |= 1u << block;
      }
    }
    if (rank == own.owner && own.k_tiles() == 0) own.range = {k_tiles, k_tiles + 1};
    return own;
  }
};

}  // namespace fftune

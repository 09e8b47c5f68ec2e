// The ring of k tiles between the copy engine and the multiplying warpgroups, and the order of the
// tiles.
#pragma once

#include "common/tma.cuh"
#include "gemm/tile_order.cuh"
#include "gemm/wgmma_tile.cuh"

namespace fftune {

struct wgmma_gemm_shape {
  int m, n, k;
  int group_m;  // in clusters of tiles
};

// A place in the ring: each slot has a barrier that says full and one that says empty.
template <int stages, int stage_bytes>
struct wgmma_ring {
  u32 slots, full, empty;
  u32 index = 0, parity = 0;

  __device__ __forceinline__ u32 slot() const { return slots + index * stage_bytes; }
  __device__ __forceinline__ u32 full_barrier() const { return full + index * 8; }
  __device__ __forceinline__ u32 empty_barrier() const { return empty + index * 8; }
  __device__ __forceinline__ void advance() {
    if (++index == stages) {
      index = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void skip(u32 count) {
    parity ^= (index + count) / stages & 1;
    index = (index + count) % stages;
  }
};

// The tiles of this block. Clusters take them round-robin; with split-k a cluster has one tile, and
// each of its blocks a share of k.
template <wgmma_tile tile>
struct wgmma_schedule {
  static constexpr u32 blocks = tile.cluster_m * tile.cluster_n * tile.split_k;
  u32 clusters_m, clusters_n, group_m, index, step, count;

  __device__ __forceinline__ wgmma_schedule(const wgmma_gemm_shape& shape) {
    clusters_m = ceil_div(static_cast<u32>(shape.m), static_cast<u32>(tile.bm * tile.cluster_m));
    clusters_n = ceil_div(static_cast<u32>(shape.n), static_cast<u32>(tile.bn * tile.cluster_n));
    group_m = shape.group_m;
    index = blockIdx.x / blocks;
    step = gridDim.x / blocks;
    count = clusters_m * clusters_n;
  }
  __device__ __forceinline__ bool pending() const { return index < count; }
  __device__ __forceinline__ void advance(u32 turns) { index += turns * step; }
  __device__ __forceinline__ tile_position position(u32 rank) const {
    const tile_position at = grouped_tile(index, clusters_m, clusters_n, group_m);
    if constexpr (tile.split_k > 1) return at;
    return {at.m * tile.cluster_m + rank / tile.cluster_n,
            at.n * tile.cluster_n + rank % tile.cluster_n};
  }
};

// The k tiles [first, last) of a block; a tile has `bk` elements.
struct k_range {
  int first, last;
};

template <wgmma_tile tile, u32 bk>
__device__ __forceinline__ k_range wgmma_k_range(int k, u32 rank) {
  const u32 tiles = ceil_div(static_cast<u32>(k), bk);
  if constexpr (tile.split_k == 1) return {0, static_cast<int>(tiles)};
  return {static_cast<int>(tiles * rank / tile.split_k),
          static_cast<int>(tiles * (rank + 1) / tile.split_k)};
}

}  // namespace fftune

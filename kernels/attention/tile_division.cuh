// The division of a cache's keys among groups of CTAs: the tiles of all sequences, counted one
// after the other, in equal shares. Attention over a cache and latent attention have it. Where a
// sequence is cut, its groups add up their results of its rows (partial_row).
#pragma once

#include "attention/softmax.cuh"
#include "common/types.cuh"

namespace fftune {

struct tile_division {
  int tiles, groups;

  // Products are less than 2^32: the host sees to it.
  __device__ __forceinline__ int begin(int group) const {
    return static_cast<int>(static_cast<u32>(tiles) * group / static_cast<u32>(groups));
  }
  // The group that has tile `tile`.
  __device__ __forceinline__ int group_of(int tile) const {
    return static_cast<int>((static_cast<u32>(tile + 1) * groups - 1) / static_cast<u32>(tiles));
  }
};

// Where a tile is: in sequence `index`, which has `before` tiles before it.
struct sequence_tile {
  int index, before;
};

// Among gridDim.y groups; all lanes of a warp. tiles_of(i): the tiles of sequence i, the same of
// all sequences without `lengths`.
template <bool lengths, class Tiles>
__device__ __forceinline__ tile_division divide_tiles(const int& batch, const Tiles& tiles_of) {
  int tiles = 0;
  if constexpr (lengths) {
    for (int index = threadIdx.x % 32; index < batch; index += 32) tiles += tiles_of(index);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      tiles += __shfl_xor_sync(~0u, tiles, distance);
    }
  } else {
    tiles = tiles_of(0) * batch;
  }
  return {tiles, smaller(tiles, static_cast<int>(gridDim.y))};
}

// All lanes of a warp.
template <bool lengths, class Tiles>
__device__ __forceinline__ sequence_tile find_tile(const int& batch, int tile,
                                                   const Tiles& tiles_of) {
  if constexpr (lengths) {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int base = 0;; base += 32) {
      const int mine = base + lane < batch ? tiles_of(base + lane) : 0;
      int up_to = mine;  // and with this lane's sequence
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, up_to, distance);
        if (lane >= distance) up_to += other;
      }
      const u32 beyond = __ballot_sync(~0u, before + up_to > tile);
      if (beyond != 0 || base + 32 >= batch) {
        const int found = beyond != 0 ? __ffs(static_cast<int>(beyond)) - 1 : 31;
        return {base + found, before + __shfl_sync(~0u, up_to - mine, found)};
      }
      before += __shfl_sync(~0u, up_to, 31);
    }
  } else {
    const int each = tiles_of(0);
    return {tile / each, tile / each * each};
  }
}

// Results of some keys of a row: the state of its softmax, and four elements of the row of O.
struct partial_row {
  softmax_row softmax;
  float4 o = {};

  // Adds the results of other keys: all at once, for short chains of dependent instructions. The
  // values of those that are not `counted` do not matter; their sum is 0.
  template <int count, class Counted>
  __device__ __forceinline__ void add(const softmax_row (&other)[count],
                                      const float4 (&other_o)[count], const Counted& counted) {
    float largest = other[0].reference;
#pragma unroll
    for (int i = 1; i < count; ++i) largest = fmaxf(largest, other[i].reference);
    const float mine = softmax.rescale(largest);
    o = {o.x * mine, o.y * mine, o.z * mine, o.w * mine};
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (!counted(i)) continue;
      const float its = approximate_exp2(other[i].reference - softmax.offset());
      softmax.sum += other[i].sum * its;
      o = {o.x + other_o[i].x * its, o.y + other_o[i].y * its, o.z + other_o[i].z * its,
           o.w + other_o[i].w * its};
    }
  }
  template <int count>
  __device__ __forceinline__ void add(const softmax_row (&other)[count],
                                      const float4 (&other_o)[count]) {
    add(other, other_o, [](int) { return true; });
  }
};

}  // namespace fftune

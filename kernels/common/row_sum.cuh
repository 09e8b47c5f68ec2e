// Sums over the threads that share a row: lanes of a warp, several warps of a block, or all blocks
// of a cluster; and what joins like them, such as the largest. The order of every sum is fixed, so
// that the bits are too.
#pragma once

#include "common/cluster.cuh"

namespace fftune {

// How two values become one; 0 changes nothing.
struct addition {
  static __device__ __forceinline__ float join(float first, float second) { return first + second; }
};
struct larger_magnitude {  // of values that are magnitudes
  static __device__ __forceinline__ float join(float first, float second) {
    return fmaxf(first, second);
  }
};

// `group` threads (a power of two) share a row and a block has `groups` of them, at least a warp
// together; in a cluster of more than one block, all of a block's threads are one group and the
// blocks share the row. `values` sums are made at once.
template <int values, int group, int groups, int cluster, class Join = addition>
struct row_sum {
  static constexpr int group_warps = group > 32 ? group / 32 : 1;
  static constexpr int block_warps = group * groups / 32;
  static_assert(group * groups % 32 == 0 && (cluster == 1 || groups == 1));

  // Two of each: a sum is written while late threads still read the one before.
  struct memory {
    float4 block[2][values];
    float warp[2][values][block_warps];
  };

  // Leaves in every thread of the row the sum over them all. To be called by all threads of the
  // block, with `turn` 0 and 1 alternating.
  static __device__ __forceinline__ void apply(float (&value)[values], memory& shared, int turn) {
    if constexpr (values == 2) {
      sum_both(value, shared, turn);
    } else {
      sum_each(value, shared, turn);
    }
    if constexpr (cluster > 1) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int v = 0; v < values; ++v) {
          shared.block[turn][v] = make_float4(value[v], 0.0f, 0.0f, 0.0f);
        }
      }
      cluster_barrier();
#pragma unroll
      for (int v = 0; v < values; ++v) {
        const u32 address = shared_address(&shared.block[turn][v]);
        value[v] = 0.0f;
#pragma unroll
        for (u32 rank = 0; rank < cluster; ++rank) {
          value[v] = Join::join(value[v], load_cluster(cluster_address(address, rank)).x);
        }
      }
    }
  }

  // After the last sum: no block may leave while others read its shared memory.
  static __device__ __forceinline__ void finish() {
    if constexpr (cluster > 1) cluster_barrier();
  }

 private:
  static __device__ __forceinline__ void sum_each(float (&value)[values], memory& shared,
                                                  int turn) {
#pragma unroll
    for (int v = 0; v < values; ++v) {
#pragma unroll
      for (int distance = (group < 32 ? group : 32) / 2; distance > 0; distance /= 2) {
        value[v] = Join::join(value[v], __shfl_xor_sync(0xffffffffu, value[v], distance));
      }
    }
    if constexpr (group_warps > 1) {
      const int warp = static_cast<int>(threadIdx.x) / 32;
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int v = 0; v < values; ++v) shared.warp[turn][v][warp] = value[v];
      }
      __syncthreads();
      const int first = warp / group_warps * group_warps;
#pragma unroll
      for (int v = 0; v < values; ++v) {
        value[v] = 0.0f;
#pragma unroll
        for (int i = 0; i < group_warps; ++i) {
          value[v] = Join::join(value[v], shared.warp[turn][v][first + i]);
        }
      }
    }
  }

  // Half of the lanes that share a sum have the first of the two, half the second: little more than
  // the work of one.
  static __device__ __forceinline__ void sum_both(float (&value)[values], memory& shared,
                                                  int turn) {
    constexpr int half = (group < 32 ? group : 32) / 2;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int second = (lane & half) != 0 ? 1 : 0;
    float own = second ? value[1] : value[0];
    own = Join::join(own, __shfl_xor_sync(0xffffffffu, second ? value[0] : value[1], half));
#pragma unroll
    for (int distance = half / 2; distance > 0; distance /= 2) {
      own = Join::join(own, __shfl_xor_sync(0xffffffffu, own, distance));
    }
    if constexpr (group_warps > 1) {
      const int warp = static_cast<int>(threadIdx.x) / 32;
      if (lane % half == 0) shared.warp[turn][second][warp] = own;
      __syncthreads();
      const int first = warp / group_warps * group_warps;
      constexpr int readers = group_warps < half ? group_warps : half;
      const int reader = lane % readers;
      own = shared.warp[turn][second][first + reader];
      if constexpr (group_warps > half) {
        own = Join::join(own, shared.warp[turn][second][first + half + reader]);
      }
#pragma unroll
      for (int distance = readers / 2; distance > 0; distance /= 2) {
        own = Join::join(own, __shfl_xor_sync(0xffffffffu, own, distance));
      }
    }
    const float other = __shfl_xor_sync(0xffffffffu, own, half);
    value[0] = second ? other : own;
    value[1] = second ? own : other;
  }
};

}  // namespace fftune

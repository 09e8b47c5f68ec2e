// Reductions (sum, maximum) over the threads that share a row: lanes of a warp, several warps of a
// block, or all blocks of a cluster. The order is fixed, so results are bitwise reproducible.
#pragma once

#include "common/cluster.cuh"

namespace fftune {

// A reduction operator, as larger_magnitude (quantise.cuh) is one; 0 is the identity of each.
struct addition {
  static __device__ __forceinline__ float join(float first, float second) { return first + second; }
};

// `group` threads (a power of two) share a row; a block has `groups` groups and at least 32
// threads. In a cluster of more than one block, each block is one group and the blocks share the
// row. `values` reductions are done together.
template <int values, int group, int groups, int cluster, class Join = addition>
struct row_sum {
  static constexpr int group_warps = group > 32 ? group / 32 : 1;
  static constexpr int block_warps = group * groups / 32;
  static_assert(group * groups % 32 == 0 && (cluster == 1 || groups == 1));

  // Double-buffered: a sum is written while slower threads still read the one before.
  struct memory {
    float4 block[2][values];
    float warp[2][values][block_warps];
  };

  // Every thread of the row gets the reduced values. All threads of the block call this, with
  // `buffer` 0 and 1 in alternation.
  static __device__ __forceinline__ void apply(float (&value)[values], memory& shared, int buffer) {
    if constexpr (values == 2) {
      sum_both(value, shared, buffer);
    } else {
      sum_each(value, shared, buffer);
    }
    if constexpr (cluster > 1) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int v = 0; v < values; ++v) {
          shared.block[buffer][v] = make_float4(value[v], 0.0f, 0.0f, 0.0f);
        }
      }
      cluster_barrier();
#pragma unroll
      for (int v = 0; v < values; ++v) {
        const u32 address = shared_address(&shared.block[buffer][v]);
        value[v] = 0.0f;
#pragma unroll
        for (u32 rank = 0; rank < cluster; ++rank) {
          value[v] = Join::join(value[v], load_cluster(cluster_address(address, rank)).x);
        }
      }
    }
  }

  // After the last reduction: no block may exit while others read its shared memory.
  static __device__ __forceinline__ void finish() {
    if constexpr (cluster > 1) cluster_barrier();
  }

 private:
  static __device__ __forceinline__ void sum_each(float (&value)[values], memory& shared,
                                                  int buffer) {
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
        for (int v = 0; v < values; ++v) shared.warp[buffer][v][warp] = value[v];
      }
      __syncthreads();
      const int first = warp / group_warps * group_warps;
#pragma unroll
      for (int v = 0; v < values; ++v) {
        value[v] = 0.0f;
#pragma unroll
        for (int i = 0; i < group_warps; ++i) {
          value[v] = Join::join(value[v], shared.warp[buffer][v][first + i]);
        }
      }
    }
  }

  // Two reductions at little more than the cost of one: half of the lanes reduce the first value,
  // the other half the second.
  static __device__ __forceinline__ void sum_both(float (&value)[values], memory& shared,
                                                  int buffer) {
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
      if (lane % half == 0) shared.warp[buffer][second][warp] = own;
      __syncthreads();
      const int first = warp / group_warps * group_warps;
      constexpr int readers = group_warps < half ? group_warps : half;
      const int reader = lane % readers;
      own = shared.warp[buffer][second][first + reader];
      if constexpr (group_warps > half) {
        own = Join::join(own, shared.warp[buffer][second][first + half + reader]);
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

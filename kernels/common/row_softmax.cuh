// The reductions of a softmax over the threads that share a row: the largest score with the sum of
// powers relative to it, in one pass, and sums. The threads of a row are lanes of a warp, several
// warps of a block, or all blocks of a cluster. The order is fixed, so results are bitwise
// reproducible.
#pragma once

#include "common/cluster.cuh"

namespace fftune {

__device__ __forceinline__ float lowest_score() {
  return __uint_as_float(0xff800000u);  // -inf
}

__device__ __forceinline__ float power_of_two(float exponent) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
  return result;
}

// The sum of 2^(score - most) over some scores. That of no score is 0, with `most` -inf.
struct softmax_sum {
  float most, sum;

  // The factor that converts sums relative to `most` to sums relative to `reference`, which is not
  // less.
  static __device__ __forceinline__ float factor(float most, float reference) {
    return most == lowest_score() ? 0.0f : power_of_two(most - reference);
  }
  static __device__ __forceinline__ softmax_sum join(const softmax_sum& a, const softmax_sum& b) {
    const float most = fmaxf(a.most, b.most);
    return {most, a.sum * factor(a.most, most) + b.sum * factor(b.most, most)};
  }
  static __device__ __forceinline__ softmax_sum shuffle(const softmax_sum& value, int distance) {
    return {__shfl_xor_sync(~0u, value.most, distance), __shfl_xor_sync(~0u, value.sum, distance)};
  }
  static __device__ __forceinline__ softmax_sum nothing() { return {lowest_score(), 0.0f}; }
};

// A plain sum, in the same form.
struct plain_sum {
  float sum, unused;

  static __device__ __forceinline__ plain_sum join(const plain_sum& a, const plain_sum& b) {
    return {a.sum + b.sum, 0.0f};
  }
  static __device__ __forceinline__ plain_sum shuffle(const plain_sum& value, int distance) {
    return {__shfl_xor_sync(~0u, value.sum, distance), 0.0f};
  }
  static __device__ __forceinline__ plain_sum nothing() { return {0.0f, 0.0f}; }
};

// `group` threads (a power of two) share a row; a block has `groups` groups and at least 32
// threads. In a cluster of more than one block each block is one group.
template <class Value, int group, int groups, int cluster>
struct row_reduction {
  static constexpr int group_warps = group > 32 ? group / 32 : 1;
  static constexpr int block_warps = group * groups / 32;
  static_assert(group * groups % 32 == 0 && (cluster == 1 || groups == 1));

  struct memory {
    float4 block;
    Value warp[block_warps];
  };

  // Every thread of the row gets the result. All threads of the block call this, once.
  static __device__ __forceinline__ Value apply(Value value, memory& shared) {
#pragma unroll
    for (int distance = (group < 32 ? group : 32) / 2; distance > 0; distance /= 2) {
      value = Value::join(value, Value::shuffle(value, distance));
    }
    if constexpr (group_warps > 1) {
      const int warp = static_cast<int>(threadIdx.x) / 32;
      if (threadIdx.x % 32 == 0) shared.warp[warp] = value;
      __syncthreads();
      const int first = warp / group_warps * group_warps;
      value = shared.warp[first];
#pragma unroll
      for (int i = 1; i < group_warps; ++i) value = Value::join(value, shared.warp[first + i]);
    }
    if constexpr (cluster > 1) {
      const float* const words = reinterpret_cast<const float*>(&value);
      if (threadIdx.x == 0) shared.block = make_float4(words[0], words[1], 0.0f, 0.0f);
      cluster_barrier();
      const u32 address = shared_address(&shared.block);
      value = Value::nothing();
#pragma unroll
      for (u32 rank = 0; rank < cluster; ++rank) {
        const float4 other = load_cluster(cluster_address(address, rank));
        value = Value::join(value, Value{other.x, other.y});
      }
      cluster_barrier();  // no block may exit while others read its shared memory
    }
    return value;
  }
};

}  // namespace fftune

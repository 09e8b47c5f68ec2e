// Reductions over the threads that share a row: sums, softmax, RMS normalisation. The threads of a
// row are lanes of a warp, several warps of a block, or all blocks of a cluster. The order is
// fixed, so results are bitwise reproducible.
#pragma once

#include "common/async.cuh"
#include "common/numerics.cuh"

namespace fftune {

// --- Sums and maxima ---

// A reduction operator, as larger_magnitude (numerics.cuh) is one; 0 is the identity of each.
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

// --- Softmax ---
//
// The largest score with the sum of powers relative to it, in one pass, and sums.

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

// --- RMS normalisation ---
//
// The conventions of RMS normalisation on the device, each a type. They are defined in
// kernels/norm/norm.hpp.

struct llama_norm {  // x̂ is rounded to the dtype before it is multiplied
  template <class T>
  static __device__ __forceinline__ float normalised(float value) {
    return to_float(from_float<T>(value));
  }
  static __device__ __forceinline__ float factor(float weight) { return weight; }
};

struct gemma_norm {  // w is stored as weight - 1
  template <class T>
  static __device__ __forceinline__ float normalised(float value) {
    return value;
  }
  static __device__ __forceinline__ float factor(float weight) { return 1.0f + weight; }
};

struct t5_norm {
  template <class T>
  static __device__ __forceinline__ float normalised(float value) {
    return value;
  }
  static __device__ __forceinline__ float factor(float weight) { return weight; }
};

// 1 / sqrt(the mean of d squares + eps)
__device__ __forceinline__ float reciprocal_deviation(float squares, int d, float eps) {
  return rsqrtf(squares / static_cast<float>(d) + eps);
}

// dx = r(g − x̂·mean(g x̂)) for a row of one element: g·r·(1 − x̂²) = g·r·eps·r². The difference
// 1 − x̂² itself would cancel all digits.
__device__ __forceinline__ float lone_gradient(float gradient, float r, float eps) {
  return gradient * r * (eps * r * r);
}

}  // namespace fftune

// The backward pass of a choice's weight: d_weight = Σ d_up ⊙ up over its row, and the row of
// d_gate, d_up and hidden times the weight.
//
// A block has a choice; its threads take the row's columns in turn, 16 bytes at a time or, where
// rows are not 16-byte aligned, one element. They add up their sums in a fixed order: a warp's by
// shuffles, then the warps'.
//
// Grid: min(choices, 2^31 - 1). Block: 256 threads.
#include "common/dependency.cuh"
#include "common/float16.cuh"
#include "common/vector.cuh"

namespace fftune {

// Two 16-bit elements, or one of f32.
template <class T>
__device__ __forceinline__ u32 times(float weight, u32 word) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(weight * __uint_as_float(word));
  } else {
    float first, second;
    unpack<T>(word, first, second);
    return pack<T>(weight * first, weight * second);
  }
}
template <class T>
__device__ __forceinline__ float dot(u32 one, u32 other) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(one) * __uint_as_float(other);
  } else {
    float a[2], b[2];
    unpack<T>(one, a[0], a[1]);
    unpack<T>(other, b[0], b[1]);
    return a[0] * b[0] + a[1] * b[1];
  }
}

template <class T, bool aligned>
__global__ void __launch_bounds__(256)
    weigh_rows(const T* d_gate, const T* d_up, const T* hidden, const T* up, const float* weights,
               const int* places, float* d_weights, T* weighted_d_gate, T* weighted_d_up,
               T* weighted_hidden, i64 choices, i64 columns) {
  constexpr int threads = 256, elements = aligned ? 16 / static_cast<int>(sizeof(T)) : 1;
  __shared__ float sums[threads / 32];
  launch_dependents();
  wait_for_dependencies();
  for (i64 choice = blockIdx.x; choice < choices; choice += gridDim.x) {
    const int place = places[choice];
    const float weight = weights[choice];
    float sum = 0;
    for (i64 column = threadIdx.x * elements; column < columns && place >= 0;
         column += threads * elements) {
      const i64 at = place * columns + column;
      if constexpr (aligned) {
        vector16 of_gate = load_dependent(d_gate + at), of_up = load_dependent(d_up + at),
                 of_hidden = load_dependent(hidden + at);
        const vector16 ups = load_dependent(up + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum += dot<T>(of_up.word[i], ups.word[i]);
          of_gate.word[i] = times<T>(weight, of_gate.word[i]);
          of_up.word[i] = times<T>(weight, of_up.word[i]);
          of_hidden.word[i] = times<T>(weight, of_hidden.word[i]);
        }
        store(weighted_d_gate + at, of_gate);
        store(weighted_d_up + at, of_up);
        store(weighted_hidden + at, of_hidden);
      } else {
        const float own = to_float(d_up[at]);
        sum += own * to_float(up[at]);
        weighted_d_gate[at] = from_float<T>(weight * to_float(d_gate[at]));
        weighted_d_up[at] = from_float<T>(weight * own);
        weighted_hidden[at] = from_float<T>(weight * to_float(hidden[at]));
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      float total = 0;
#pragma unroll
      for (int warp = 0; warp < threads / 32; ++warp) total += sums[warp];
      d_weights[choice] = total;
    }
    __syncthreads();
  }
}

}  // namespace fftune

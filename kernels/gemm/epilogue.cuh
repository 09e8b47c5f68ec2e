// What becomes of the fp32 sums before their one rounding: the policies that make one engine serve
// both stages.
#pragma once

#include "common/activation.cuh"

namespace fftune {

// One product, stored as it is.
struct plain_epilogue {
  static constexpr int products = 1;
  static __device__ __forceinline__ float apply(const float (&sum)[1]) { return sum[0]; }
};

// Two products of the same rows, act(first) * second.
template <class Activation>
struct gated_epilogue {
  static constexpr int products = 2;
  static __device__ __forceinline__ float apply(const float (&sum)[2]) {
    return Activation::apply(sum[0]) * sum[1];
  }
};

}  // namespace fftune

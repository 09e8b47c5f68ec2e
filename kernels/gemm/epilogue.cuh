// What becomes of the fp32 sums before their one rounding: the policies that make one engine serve
// every stage.
//
// `products` is how many sums an element has, `outputs` how many values are stored of it: the first
// is what apply() makes of the sums; in the training form the sums themselves follow.
#pragma once

#include "common/activation.cuh"

namespace fftune {

// The most outputs that an epilogue has; a kernel takes as many pointers, the rest unused.
constexpr int most_outputs = 3;

// One product, stored as it is.
struct plain_epilogue {
  static constexpr int products = 1, outputs = 1;
  static __device__ __forceinline__ float apply(const float (&sum)[1]) { return sum[0]; }
};

// Two products of the same rows, act(first) * second.
template <class Activation>
struct gated_epilogue {
  static constexpr int products = 2, outputs = 1;
  static __device__ __forceinline__ float apply(const float (&sum)[2]) {
    return Activation::apply(sum[0]) * sum[1];
  }
};

// The same, and both products beside it: what a backward pass needs.
template <class Activation>
struct saving_epilogue : gated_epilogue<Activation> {
  static constexpr int outputs = 3;
};

// Output number `output` of an element.
template <class Epilogue, int output>
__device__ __forceinline__ float output_of(const float (&sum)[Epilogue::products]) {
  if constexpr (output == 0) {
    return Epilogue::apply(sum);
  } else {
    return sum[output - 1];
  }
}

}  // namespace fftune

// The norm behind a sum, and its output: of the sum's type, or quantised.
#pragma once

#include "common/all_reduce.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"

namespace fftune {

enum class norm_output {
  same,        // of the sum's type
  fp8,         // with a scale of the row, written
  fp8_static,  // with a given scale of all rows
};

// One row, whose squares add up to `squares`.
template <class T, class Convention, norm_output output>
struct normed_rows {
  static constexpr bool quantises = output != norm_output::same;
  const all_reduce_params& params;
  float r;

  __device__ __forceinline__ normed_rows(float squares, const all_reduce_params& all)
      : params(all), r(reciprocal_deviation(squares, all.d, all.eps)) {}

  template <int count>
  __device__ __forceinline__ void weigh(const aligned_vector<T, count>& sum,
                                        const aligned_vector<T, count>& weights,
                                        float (&value)[count]) const {
    float weight[count];
    to_floats(sum, value);
    to_floats(weights, weight);
#pragma unroll
    for (int e = 0; e < count; ++e) {
      // A quantised value is rounded only once.
      const float normalised =
          quantises ? value[e] * r : Convention::template normalised<T>(value[e] * r);
      value[e] = normalised * Convention::factor(weight[e]);
    }
  }
  template <int count>
  __device__ __forceinline__ void join_largest(float& largest, const aligned_vector<T, count>& sum,
                                               const aligned_vector<T, count>& weights) const {
    float value[count];
    weigh(sum, weights, value);
#pragma unroll
    for (int e = 0; e < count; ++e) largest = larger_magnitude::join(largest, fabsf(value[e]));
  }
  // The scale of a row with this largest magnitude; 1 if y is not quantised.
  __device__ __forceinline__ float scale(float largest) const {
    if constexpr (output == norm_output::fp8) return scale_of<fp8>(largest);
    if constexpr (output == norm_output::fp8_static) return *params.scales;
    return 1;
  }
  template <int count>
  __device__ __forceinline__ void store(i64 at, const aligned_vector<T, count>& sum,
                                        const aligned_vector<T, count>& weights, float scale,
                                        u64 policy) const {
    float value[count];
    weigh(sum, weights, value);
    if constexpr (quantises) {
      const float factor = 1.0f / scale;
#pragma unroll
      for (int e = 0; e < count; ++e) value[e] *= factor;
      if constexpr (count == 1) {
        static_cast<fp8*>(params.y)[at].bits = static_cast<u8>(quantised<fp8>(value[0]));
      } else {
        store_once(static_cast<fp8*>(params.y) + at, quantise<fp8>(value), policy);
      }
    } else {
      store_once(static_cast<T*>(params.y) + at, from_floats<T>(value), policy);
    }
  }
};

}  // namespace fftune

// What becomes of the fp32 sums before their one rounding: the policies that make one engine serve
// every stage.
//
// `products` is how many sums an element has, `outputs` how many values are stored of it: the first
// is what apply() makes of the sums; in the training form the sums themselves follow. What a linear
// layer adds to its product, a vector to every row or a matrix of C's size, is added in fp32 too.
#pragma once

#include "common/activation.cuh"

namespace fftune {

// The most outputs that an epilogue has; a kernel takes as many pointers, the rest unused.
constexpr int most_outputs = 3;

// One product, and what is added to it.
template <bool bias, bool residual>
struct linear_epilogue {
  static constexpr int products = 1, outputs = 1;
  static constexpr bool adds_bias = bias, adds_residual = residual;
  static __device__ __forceinline__ float apply(const float (&sum)[1]) { return sum[0]; }
};

// Two products of the same rows, act(first) * second.
template <class Activation>
struct gated_epilogue {
  static constexpr int products = 2, outputs = 1;
  static constexpr bool adds_bias = false, adds_residual = false;
  static __device__ __forceinline__ float apply(const float (&sum)[2]) {
    return Activation::value(sum[0]) * sum[1];
  }
};

// The same, and both products beside it: what a backward pass needs.
template <class Activation>
struct saving_epilogue : gated_epilogue<Activation> {
  static constexpr int outputs = 3;
};

// Stored in fp8, each 128 outputs of a row in units of a scale that is found from them.
template <class Epilogue>
struct block_quantised : Epilogue {};

// Of a product dc in the backward pass of act(gate) * up, where gate and up are at hand: d_gate,
// d_up and, where that was not stored, the product act(gate) * up itself.
template <class Activation, bool hidden>
struct gated_gradient {
  static constexpr int products = 1, outputs = hidden ? 3 : 2;
  static constexpr bool adds_bias = false, adds_residual = false;
  static __device__ __forceinline__ void apply(float dc, float gate, float up,
                                               float (&result)[outputs]) {
    float value, slope;
    Activation::value_and_slope(gate, value, slope);
    result[0] = dc * up * slope;
    result[1] = dc * value;
    if constexpr (hidden) result[2] = value * up;
  }
};
template <class Epilogue>
inline constexpr bool is_gradient = false;
template <class Activation, bool hidden>
inline constexpr bool is_gradient<gated_gradient<Activation, hidden>> = true;

// Output number `output` of an element.
template <class Epilogue, int output>
__device__ __forceinline__ float output_of(const float (&sum)[Epilogue::products]) {
  if constexpr (output == 0) {
    return Epilogue::apply(sum);
  } else {
    return sum[output - 1];
  }
}

// What an epilogue adds to C [m, n]; null where it does not.
template <class T>
struct addends {
  const T* bias = nullptr;      // [n]
  const T* residual = nullptr;  // [m, n]

  // Added to one element, and to two neighbours of one row, for n that is even.
  template <class Epilogue>
  __device__ __forceinline__ float add(float value, i64 row, i64 column, int n) const {
    if constexpr (Epilogue::adds_bias) value += to_float(bias[column]);
    if constexpr (Epilogue::adds_residual) value += to_float(residual[row * n + column]);
    return value;
  }
  template <class Epilogue>
  __device__ __forceinline__ void add(float& first, float& second, int row, int column,
                                      int n) const {
    if constexpr (Epilogue::adds_bias) {
      add_pair<T>(first, second, *reinterpret_cast<const u32*>(bias + column));
    }
    if constexpr (Epilogue::adds_residual) {
      const T* const place = residual + static_cast<i64>(row) * n + column;
      add_pair<T>(first, second, *reinterpret_cast<const u32*>(place));
    }
  }
};

}  // namespace fftune

// The conventions of RMS normalisation on the device, each a type. They are defined in
// kernels/norm/norm.hpp.
#pragma once

#include "common/float16.cuh"

namespace fftune {

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

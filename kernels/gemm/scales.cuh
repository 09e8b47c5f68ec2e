// What makes numbers of the elements of a quantised product.
#pragma once

#include "common/types.cuh"

namespace fftune {

// The elements are the numbers.
struct no_scales {
  static constexpr bool present = false;
};

// One scale for each tensor: a number is its element times the scale.
struct tensor_scales {
  static constexpr bool present = true;
  const float* a;
  const float* b[2];  // the second is unused with one product
  const float* c;     // of the output, if that is quantised; else null

  // What makes a sum of element products the product.
  __device__ __forceinline__ float of_product(int product) const { return *a * *b[product]; }
  // What makes an output an element.
  __device__ __forceinline__ float of_output() const { return c != nullptr ? 1.0f / *c : 1.0f; }
};

}  // namespace fftune

// Per-row quantisation to one byte an element: value = element * scale. The scale maps the row's
// largest magnitude to the largest number of the type. It is 1 for a row with no magnitude above
// 2^-100, whose quotients would overflow a float, and NaN for a row with a NaN.
#pragma once

#include "common/aligned_vector.cuh"
#include "common/float8.cuh"

namespace fftune {

struct i8 {
  u8 bits;
};

// The reduction operator of magnitudes; NaN if either is NaN, which fmaxf would drop.
struct larger_magnitude {
  static __device__ __forceinline__ float join(float first, float second) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(first), "f"(second));
    return result;
  }
};

template <class Q>
__device__ __forceinline__ float scale_of(float largest) {
  constexpr float limit = is_same<Q, fp8> ? 448.0f : 127.0f;
  return largest <= 0x1p-100f ? 1.0f : largest / limit;
}

// Rounds to nearest, ties to even; saturates.
template <class Q>
__device__ __forceinline__ u32 quantised(float value) {
  if constexpr (is_same<Q, fp8>) {
    return from_float<fp8>(value).bits;
  } else {
    const int nearest = __float2int_rn(value);
    return static_cast<u32>(nearest < -127 ? -127 : nearest > 127 ? 127 : nearest) & 0xff;
  }
}

// Two of them, the first in the lower byte.
template <class Q>
__device__ __forceinline__ u32 quantised_pair(float first, float second) {
#if __CUDA_ARCH__ >= 890
  if constexpr (is_same<Q, fp8>) return pack_fp8(first, second);
#endif
  return quantised<Q>(first) | quantised<Q>(second) << 8;
}

template <class Q, int count>
__device__ __forceinline__ aligned_vector<Q, count> quantise(const float (&from)[count]) {
  aligned_vector<Q, count> result = {};
#pragma unroll
  for (int i = 0; i < count; i += 2) {
    result.word[i / 4] |= quantised_pair<Q>(from[i], from[i + 1]) << (i % 4 * 8);
  }
  return result;
}

}  // namespace fftune

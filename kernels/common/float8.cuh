// fp8, which is e4m3 (OCP 8-bit floating point): 4 exponent bits, 3 of mantissa, no infinity, 448
// the largest number. Larger magnitudes saturate to it.
#pragma once

#include "common/float16.cuh"

namespace fftune {

struct fp8 {
  u8 bits;
};

// In integers, for any architecture: the conversions of PTX need compute capability 8.9. As the low
// bits of a float's exponent and the high ones of its mantissa, the number is 2^-120 of itself.
__device__ __forceinline__ float to_float(fp8 value) {
  const u32 magnitude = value.bits & 0x7f;
  const u32 sign = static_cast<u32>(value.bits & 0x80) << 24;
  if (magnitude == 0x7f) return __uint_as_float(0x7fffffff);
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 20) * 0x1p120f));
}

template <>
__device__ __forceinline__ fp8 from_float<fp8>(float value) {
  const u32 bits = __float_as_uint(value);
  const u32 sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  u32 result;
  if (magnitude > 0x7f800000) {
    result = 0x7f;
  } else if (magnitude >= 0x43e00000) {  // 448
    result = 0x7e;
  } else if (magnitude < 0x3c800000) {  // below 2^-6: a multiple of 2^-9
    result = __float2int_rn(__uint_as_float(magnitude) * 512.0f);
  } else {  // to nearest, ties to even
    result = (magnitude + 0x7ffff + (magnitude >> 20 & 1) - 0x3c000000) >> 20;
  }
  return {static_cast<u8>(sign | result)};
}

// Two values in 16 bits, the first in the lower byte: the order of memory. From compute capability
// 8.9 on.
__device__ __forceinline__ u16 pack_fp8(float first, float second) {
  u16 result;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(second), "f"(first));
  return result;
}

}  // namespace fftune

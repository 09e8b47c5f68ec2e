// Element types with their conversions (bf16, fp16, fp8, int8), special functions, sine and cosine.
// Every arithmetic value is a float.
#pragma once

#include "common/types.cuh"

namespace fftune {

// --- bf16 and fp16: conversions are single PTX instructions ---

struct bf16 {
  u16 bits;
};

struct fp16 {
  u16 bits;
};

__device__ __forceinline__ float to_float(float value) {
  return value;
}

__device__ __forceinline__ float to_float(bf16 value) {
  return __uint_as_float(static_cast<u32>(value.bits) << 16);  // bf16 is the upper half of a float
}

__device__ __forceinline__ float to_float(fp16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

// Rounds to nearest even, as every store in the library does.
template <class T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else {
    T result;
    if constexpr (is_same<T, bf16>) {
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    } else {
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    }
    return result;
  }
}

// Two values in one register, the first in the lower half: the order of memory.
template <class T>
__device__ __forceinline__ u32 pack(float first, float second) {
  u32 result;
  if constexpr (is_same<T, bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  }
  return result;
}

template <class T>
__device__ __forceinline__ void unpack(u32 pair, float& first, float& second) {
  first = to_float(T{static_cast<u16>(pair)});
  second = to_float(T{static_cast<u16>(pair >> 16)});
}

template <class T>
__device__ __forceinline__ void add_pair(float& first, float& second, u32 pair) {
  float more_first, more_second;
  unpack<T>(pair, more_first, more_second);
  first += more_first;
  second += more_second;
}

// The logit of a blocked token.
template <class T>
__device__ __forceinline__ T negative_infinity() {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(0xff800000u);
  } else if constexpr (is_same<T, bf16>) {
    return T{0xff80};
  } else {
    return T{0xfc00};
  }
}

// --- Special functions: one instruction each, subnormal arguments and results are zero ---

__device__ __forceinline__ float approximate_exp2(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ float approximate_reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// --- fp8 ---
//
// e4m3 (OCP 8-bit floating point): 4 exponent bits, 3 mantissa bits, no infinity. The largest
// number is 448; larger magnitudes saturate to it.

struct fp8 {
  u8 bits;
};

// The device's type of an element.
template <element type>
using element_type = typename type_at<static_cast<int>(type), float, bf16, fp16, fp8>::type;

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

// --- Quantisation ---
//
// Each row has one scale, and an element takes one byte: value = element * scale. The scale maps
// the row's largest magnitude to the largest number of the type. It is 1 for a row with no
// magnitude above 2^-100, whose quotients would overflow a float, and NaN for a row with a NaN.

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

// --- Sine and cosine ---
//
// Sine and cosine without a slow path or a stack: as good as the type they are asked in.
//
// The angle is reduced to within pi/4 of a multiple of pi/2. In float64 this works up to angles of
// 2^31, where a float has no fractional digits left. For a result in float and angles up to 2^18 it
// is done in float: two parts of pi/2 and fused products leave an error below 1e-7, without
// conversions, which are as slow as the rest together. The Taylor series follows, up to the term
// that rounding hides: at pi/4 the next one is 2e-9 of the sine and 3e-8 of the cosine in float,
// and below 1e-17 of both in double.

__device__ __forceinline__ void sine_and_cosine_within(float r, float& sine, float& cosine) {
  const float square = r * r;
  float s = 1.0f / 362880;
  s = fmaf(s, square, -1.0f / 5040);
  s = fmaf(s, square, 1.0f / 120);
  s = fmaf(s, square, -1.0f / 6);
  sine = fmaf(s * square, r, r);
  float c = 1.0f / 40320;
  c = fmaf(c, square, -1.0f / 720);
  c = fmaf(c, square, 1.0f / 24);
  c = fmaf(c, square, -0.5f);
  cosine = fmaf(c, square, 1.0f);
}

__device__ __forceinline__ void sine_and_cosine_within(double r, double& sine, double& cosine) {
  const double square = r * r;
  double s = 1.0 / 355687428096000;  // 17!
  s = fma(s, square, -1.0 / 1307674368000);
  s = fma(s, square, 1.0 / 6227020800);
  s = fma(s, square, -1.0 / 39916800);
  s = fma(s, square, 1.0 / 362880);
  s = fma(s, square, -1.0 / 5040);
  s = fma(s, square, 1.0 / 120);
  s = fma(s, square, -1.0 / 6);
  sine = fma(s * square, r, r);
  double c = 1.0 / 20922789888000;  // 16!
  c = fma(c, square, -1.0 / 87178291200);
  c = fma(c, square, 1.0 / 479001600);
  c = fma(c, square, -1.0 / 3628800);
  c = fma(c, square, 1.0 / 40320);
  c = fma(c, square, -1.0 / 720);
  c = fma(c, square, 1.0 / 24);
  c = fma(c, square, -0.5);
  cosine = fma(c, square, 1.0);
}

// Applies the quadrant to the two values.
template <class Real>
__device__ __forceinline__ void turn_by_quadrant(int quadrant, Real s, Real c, Real& sine,
                                                 Real& cosine) {
  const bool swapped = quadrant & 1;
  sine = swapped ? c : s;
  cosine = swapped ? s : c;
  if (quadrant & 2) sine = -sine;
  if ((quadrant + 1) & 2) cosine = -cosine;
}

// Real is float or double.
template <class Real>
__device__ __forceinline__ void sine_and_cosine(float angle, Real& sine, Real& cosine) {
  Real s, c;
  if constexpr (sizeof(Real) == sizeof(float)) {
    constexpr float half_pi = 1.57079637f;           // pi/2 rounded to float
    constexpr float half_pi_rest = -4.37113883e-8f;  // and what that leaves
    constexpr float shift = 12582912.0f;  // 1.5 * 2^23: a sum's low bits are the nearest integer
    if (fabsf(angle) <= 262144.0f) {
      const float shifted = fmaf(angle, 0.636619772f, shift);  // quarters of a turn: 2/pi
      const float turns = shifted - shift;
      float r = fmaf(-turns, half_pi, angle);
      r = fmaf(-turns, half_pi_rest, r);
      sine_and_cosine_within(r, s, c);
      turn_by_quadrant(static_cast<int>(__float_as_uint(shifted)), s, c, sine, cosine);
      return;
    }
  }
  constexpr double half_pi = 1.5707963267948966;
  constexpr double half_pi_rest = 6.123233995736766e-17;
  const double wide = angle;
  const double turns = rint(wide * 0.63661977236758134);
  double r = fma(-turns, half_pi, wide);
  r = fma(-turns, half_pi_rest, r);
  sine_and_cosine_within(static_cast<Real>(r), s, c);
  turn_by_quadrant(static_cast<int>(turns), s, c, sine, cosine);
}

}  // namespace fftune

// Sine and cosine without a slow path or a stack: as good as the type they are asked in.
//
// The angle is reduced to within pi/4 of a multiple of pi/2. In float64 this works up to angles of
// 2^31, where a float has no fractional digits left. For a result in float and angles up to 2^18 it
// is done in float: two parts of pi/2 and fused products leave an error below 1e-7, without
// conversions, which are as slow as the rest together. The Taylor series follows, up to the term
// that rounding hides: at pi/4 the next one is 2e-9 of the sine and 3e-8 of the cosine in float,
// and below 1e-17 of both in double.
#pragma once

#include "common/types.cuh"

namespace fftune {

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

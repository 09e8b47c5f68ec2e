// The activations of the gated MLP, in fp32, each a type so that a kernel takes it as a template
// argument.
//
// Sigmoid is one ex2.approx and one rcp.approx: about 2 ulp of fp32, far below the one rounding to
// 16 bits that follows. tanh.approx is not used: its 2^-11 relative error is as large as an fp16
// rounding.
#pragma once

#include "common/float16.cuh"

namespace fftune {

// 1 / (1 + e^-value); the limits are right too, because ex2 saturates to infinity and rcp(infinity)
// is 0.
__device__ __forceinline__ float sigmoid(float value) {
  constexpr float log2_e = 1.4426950408889634f;
  float exponential, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(-value * log2_e));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + exponential));
  return result;
}

struct silu {
  static __device__ __forceinline__ float apply(float value) { return value * sigmoid(value); }
};

struct gelu {  // the exact form, with erf
  static __device__ __forceinline__ float apply(float value) {
    constexpr float sqrt_half = 0.70710678118654752f;
    return 0.5f * value * (1.0f + erff(value * sqrt_half));
  }
};

struct gelu_tanh {  // 0.5 x (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
  static __device__ __forceinline__ float apply(float value) {
    constexpr float sqrt_two_over_pi = 0.79788456080286536f;
    const float inner = sqrt_two_over_pi * (value + 0.044715f * value * value * value);
    return value * sigmoid(2.0f * inner);
  }
};

struct relu {
  static __device__ __forceinline__ float apply(float value) { return value > 0.0f ? value : 0.0f; }
};

struct none {
  static __device__ __forceinline__ float apply(float value) { return value; }
};

}  // namespace fftune

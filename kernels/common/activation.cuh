// The activations with their derivatives, in fp32, each a type that kernels take as a template
// argument. To add one, add a struct here with its enumerator and its place in activation_of, and
// one in activation.hpp, which names it.
//
// Each takes two special-function instructions and about ten others. value() is within 3e-7 |x|,
// the derivative within 4e-7: less than the 8 units of 2^-24 that the tolerance of f32 grants to an
// activation (docs/precision.md), and far below one rounding to 16 bits. tanh.approx is not used:
// its relative error of 2^-11 is as large as an fp16 rounding.
//
// NaN and infinities give what PyTorch's activations give: x · 0 is NaN where x is infinite. ex2
// and rcp reach infinity and 0, so the products of the formulas do that by themselves.
#pragma once

#include "common/numerics.cuh"

namespace fftune {

// max(value, 0); NaN stays NaN.
__device__ __forceinline__ float positive_part(float value) {
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(value));
  return result;
}

// x Φ(x), the exact form, Φ the normal distribution. Its tail is e^(-z²) times a polynomial in
// 1 / (1 + p z), z = |x|/√2: Abramowitz and Stegun 1964, 7.1.26, within 7.5e-8 of Φ. Taken from the
// tail's side, the result keeps its digits where Φ is near 0.
struct gelu {
  static __device__ __forceinline__ void parts(float x, float& magnitude, float& tail,
                                               float& exponential) {
    constexpr float p_by_root_two = 0.3275911f * 0.70710678118654752f;
    constexpr float root_half_log2_e = 0.84932180028801904f;
    magnitude = fminf(fabsf(x), 14.0f);  // e^(-z²) is 0 in fp32 beyond
    const float t = approximate_reciprocal(1.0f + p_by_root_two * magnitude);
    const float scaled = root_half_log2_e * magnitude;
    exponential = approximate_exp2(-scaled * scaled);
    float polynomial = 0.5f * 1.061405429f;
    polynomial = polynomial * t - 0.5f * 1.453152027f;
    polynomial = polynomial * t + 0.5f * 1.421413741f;
    polynomial = polynomial * t - 0.5f * 0.284496736f;
    polynomial = polynomial * t + 0.5f * 0.254829592f;
    tail = polynomial * t * exponential;
  }
  // max(x, 0), but NaN at -infinity.
  static __device__ __forceinline__ float upper_part(float x) {
    const float half = 0.5f * x;
    return half + fabsf(half);
  }
  static __device__ __forceinline__ float value(float x) {
    float magnitude, tail, exponential;
    parts(x, magnitude, tail, exponential);
    return upper_part(x) - magnitude * tail;
  }
  static __device__ __forceinline__ void value_and_slope(float x, float& value, float& slope) {
    constexpr float reciprocal_root_two_pi = 0.39894228040143268f;
    float magnitude, tail, exponential;
    parts(x, magnitude, tail, exponential);
    value = upper_part(x) - magnitude * tail;
    slope = (x > 0.0f ? 1.0f - tail : tail) + x * (exponential * reciprocal_root_two_pi);
  }
};

// x/2 (1 + tanh u) = x sigmoid(2u), u = √(2/π) (x + 0.044715 x³)
struct gelu_tanh {
  static constexpr float two_root_two_by_pi = 1.5957691216057308f;
  static __device__ __forceinline__ float sigmoid(float x, float square) {
    constexpr float scale = -two_root_two_by_pi * 1.4426950408889634f;
    const float exponent = x * (scale + scale * 0.044715f * square);
    return approximate_reciprocal(1.0f + approximate_exp2(exponent));
  }
  static __device__ __forceinline__ float value(float x) { return x * sigmoid(x, x * x); }
  static __device__ __forceinline__ void value_and_slope(float x, float& value, float& slope) {
    const float square = x * x;
    const float s = sigmoid(x, square);
    value = x * s;
    const float inner = two_root_two_by_pi + two_root_two_by_pi * 3.0f * 0.044715f * square;
    slope = s + value * (1.0f - s) * inner;
  }
};

// x / (1 + e^-x). The limits are right: ex2 saturates to infinity, and rcp(infinity) is 0.
struct silu {
  static __device__ __forceinline__ float sigmoid(float x) {
    return approximate_reciprocal(1.0f + approximate_exp2(x * -1.4426950408889634f));
  }
  static __device__ __forceinline__ float value(float x) { return x * sigmoid(x); }
  static __device__ __forceinline__ void value_and_slope(float x, float& value, float& slope) {
    const float s = sigmoid(x);
    value = x * s;
    slope = s + value * (1.0f - s);
  }
};

struct none {
  static __device__ __forceinline__ float value(float x) { return x; }
  static __device__ __forceinline__ void value_and_slope(float x, float& value, float& slope) {
    value = x;
    slope = 1.0f;
  }
};

struct relu {
  static __device__ __forceinline__ float value(float x) { return positive_part(x); }
  static __device__ __forceinline__ void value_and_slope(float x, float& value, float& slope) {
    value = positive_part(x);
    slope = x <= 0.0f ? 0.0f : 1.0f;
  }
  static __device__ __forceinline__ float gradient(float x, float d, float) {
    return x <= 0.0f ? 0.0f : d;
  }
};

// Activation of gpt-oss: the gate is limited to 7 from above, and up to 7 from both sides
// (gated_product).
struct swiglu_oai {
  static constexpr float limit = 7.0f, alpha = 1.702f;
  static __device__ __forceinline__ float at_most_limit(float x) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(limit));
    return result;
  }
  static __device__ __forceinline__ float value(float x) {
    x = at_most_limit(x);
    return x * approximate_reciprocal(1.0f + approximate_exp2(x * (alpha * -1.4426950408889634f)));
  }
  static __device__ __forceinline__ void value_and_slope(float x, float& value, float& slope) {
    const float near = at_most_limit(x);
    const float s =
        approximate_reciprocal(1.0f + approximate_exp2(near * (alpha * -1.4426950408889634f)));
    value = near * s;
    slope = s + value * (1.0f - s) * alpha;
  }
  static __device__ __forceinline__ float gradient(float x, float d, float slope) {
    return x <= limit ? d * slope : 0.0f;
  }
  static __device__ __forceinline__ float up_factor(float up) {
    return 1.0f - at_most_limit(-at_most_limit(up));
  }
  // PyTorch's clamp has no gradient at NaN.
  static __device__ __forceinline__ float up_gradient(float up, float d) {
    return fabsf(up) <= limit ? d : 0.0f;
  }
};

// d times the derivative, `slope` of value_and_slope(), at x. Activations that cut their argument
// off have a gradient() that selects 0 there, as PyTorch does, whatever d is.
template <class activation>
__device__ __forceinline__ float activation_gradient(float x, float d, float slope) {
  return d * slope;
}
template <>
__device__ __forceinline__ float activation_gradient<relu>(float x, float d, float slope) {
  return relu::gradient(x, d, slope);
}
template <>
__device__ __forceinline__ float activation_gradient<swiglu_oai>(float x, float d, float slope) {
  return swiglu_oai::gradient(x, d, slope);
}

// act(gate) ⊙ up of a gated layer.
template <class activation>
__device__ __forceinline__ float gated_product(float gate, float up) {
  return activation::value(gate) * up;
}
template <>
__device__ __forceinline__ float gated_product<swiglu_oai>(float gate, float up) {
  return swiglu_oai::value(gate) * swiglu_oai::up_factor(up);
}

// Activations of a gemm_form (gemm/form.cuh): each is the type at its place in the list.
enum class activation_kind : int { silu, gelu, gelu_tanh, relu, none, swiglu_oai };
template <activation_kind kind>
using activation_of =
    typename type_at<static_cast<int>(kind), silu, gelu, gelu_tanh, relu, none, swiglu_oai>::type;

}  // namespace fftune

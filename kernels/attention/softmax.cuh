// The online softmax, in powers of two: scores are scaled by log2(e), since ex2 is the instruction.
#pragma once

#include "attention/form.cuh"
#include "attention/params.cuh"
#include "common/numerics.cuh"

namespace fftune {

constexpr float log2_e = 1.44269504088896340736f;
constexpr float natural_log_of_2 = 0.69314718055994530942f;
// Above the largest power of two that a probability may have before its row is rescaled, so that
// the product with the values is rescaled rarely. fp16 holds 2^15, and sums are fp32.
constexpr float rescale_threshold = 8.0f;

__device__ __forceinline__ float minus_infinity() {
  return __int_as_float(0xff800000);
}

__device__ __forceinline__ float approximate_log2(float value) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// By way of the exponential: tanh.approx has 11 bits, too few for what is exponentiated next.
__device__ __forceinline__ float tanh_by_exp2(float value) {
  return 1.0f - 2.0f * approximate_reciprocal(approximate_exp2(value * (2.0f * log2_e)) + 1.0f);
}

// Transforms products of q and k before they are exponentiated: form.softcap takes scores through
// cap(), form.bias adds; the result times factor() is a power of two.
template <attention_form form>
struct score_scaling {
  float inner;  // of the argument of tanh
  float outer;  // to powers of two

  __device__ __forceinline__ explicit score_scaling(const attention_params& params)
      : inner(form.softcap ? params.scale / params.softcap : 1.0f),
        outer((form.softcap ? params.softcap : params.scale) * log2_e) {}

  // Products with keys that are `by` times as large.
  __device__ __forceinline__ void scale_keys(float by) { (form.softcap ? inner : outer) *= by; }

  __device__ __forceinline__ float cap(float score) const {
    if constexpr (form.softcap) return tanh_by_exp2(score * inner);
    return score;
  }
  __device__ __forceinline__ float add_bias(float score, float bias) const {
    return score * outer + bias * log2_e;
  }
  // With a bias the scores have been scaled when it was added.
  __device__ __forceinline__ float factor() const { return form.bias ? 1.0f : outer; }
};

// Scales of a head of k and of v: 1 of those of q's type, which have no `cache`.
template <attention_form form>
__device__ __forceinline__ float k_scale_of(const attention_cache_params* cache, int kv_head) {
  if constexpr (form.e4m3) return cache->k_scale[cache->scale_of_head != 0 ? kv_head : 0];
  return 1.0f;
}
template <attention_form form>
__device__ __forceinline__ float v_scale_of(const attention_cache_params* cache, int kv_head) {
  if constexpr (form.e4m3) return cache->v_scale[cache->scale_of_head != 0 ? kv_head : 0];
  return 1.0f;
}

// The backward pass: the probability of a masked pair, or of one with padding. Its sign tells it
// from a probability that underflows.
constexpr float masked_probability = -0.0f;

// dS of a pair from its probability and dP - delta. A masked pair has 0, even where dP or delta is
// NaN or infinite.
__device__ __forceinline__ float score_gradient(float probability, float d_probability) {
  return __float_as_int(probability) < 0 ? 0.0f : probability * d_probability;
}

// The state of one row, or of a thread's part of it: probabilities are 2^(score - reference), and
// `sum` adds them up. The reference is the largest score so far, or up to rescale_threshold less.
struct softmax_row {
  float reference = minus_infinity();
  float sum = 0;

  // Whether a row with this score would have to be rescaled; not if all scores are minus infinity.
  __device__ __forceinline__ bool exceeded_by(float score) const {
    return score - reference > rescale_threshold;
  }
  // The offset to subtract from scores. If all scores so far are minus infinity it is 0, for a
  // probability of 0 instead of NaN.
  __device__ __forceinline__ float offset() const {
    return reference == minus_infinity() ? 0.0f : reference;
  }
  // Takes a larger reference; returns the factor of what was computed with the one before.
  __device__ __forceinline__ float rescale(float score) {
    const float largest = fmaxf(reference, score);
    const float factor = largest == minus_infinity() ? 1.0f : approximate_exp2(reference - largest);
    reference = largest;
    sum *= factor;
    return factor;
  }
  // rescale() if the score exceeds the reference, else 1. A row decides for itself, though its warp
  // rescales together: its bits do not depend on the rows beside it.
  __device__ __forceinline__ float rescale_if_exceeded(float score) {
    return exceeded_by(score) ? rescale(score) : 1.0f;
  }
};

// A finished row: what its sums of values are multiplied by, and its log-sum-exp in powers of two.
struct softmax_result {
  float factor;  // 0 of a row that sees no key
  float lse;
};

// `sink`: a logit that joins the denominator, or minus infinity.
__device__ __forceinline__ softmax_result finish_softmax(softmax_row row, float sink) {
  float scale = 1.0f;
  if (sink != minus_infinity()) {
    const float power = sink * log2_e;
    scale = row.rescale(power);
    row.sum += approximate_exp2(power - row.reference);
  }
  const bool any = row.sum != 0;  // NaN stays
  return {any ? __fdividef(scale, row.sum) : 0.0f,
          any ? row.reference + approximate_log2(row.sum) : minus_infinity()};
}

}  // namespace fftune

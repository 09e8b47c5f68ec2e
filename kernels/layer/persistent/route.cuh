// The choice of a token's experts in the persistent form of layers. The producer of every CTA makes
// the same one, from the router's logits. It is one long function of steps that follow each other:
// each takes the scores and ranks that a lane has in registers.
#pragma once

#include "layer/persistent/cta.cuh"

namespace fftune {

// Waits for the logits of each token, and chooses its experts (moe_route/moe_route.hpp). A lane
// has the logits of experts lane, lane + 32 and so on; of equal ones the first is chosen.
// `idle` runs while it waits.
template <class T, persistent_config c, class Idle>
__device__ __forceinline__ void choose_experts(const persistent_cta<T, c>& cta,
                                               const float* choice_bias, int layer,
                                               [[maybe_unused]] Idle& idle) {
  constexpr float minus_infinity = persistent_cta<T, c>::minus_infinity;
  constexpr int each = ceil_div(c.experts, 32);
  const int lane = threadIdx.x % 32;
  const float* const logits =
      reinterpret_cast<const float*>(cta.set_of(layer) + c.router_at(cta.p.cache));
#pragma unroll 1
  for (int token = 0; token < c.tokens; ++token) {
    u32 raw[each];
    bool missing;
    int spins = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) raw[i] = i * 32 + lane < c.experts ? 0 : 1;
    do {
      missing = false;
#pragma unroll
      for (int i = 0; i < each; ++i)
        if (raw[i] == 0)
          raw[i] = load_relaxed_word(logits + token * c.router_rows() + i * 32 + lane);
#pragma unroll
      for (int i = 0; i < each; ++i) missing = missing || raw[i] == 0;
      if constexpr (c.ahead > 0) {
        missing = __any_sync(~0u, missing);
        if (missing) idle();
      }
      count_spin(spins);
    } while (missing);
    __syncwarp();
    float score[each];
    u32 rank[each];  // 0: none, or chosen
    float largest = minus_infinity, sum = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      score[i] = i * 32 + lane < c.experts ? __uint_as_float(~raw[i]) : minus_infinity;
      largest = fmaxf(largest, score[i]);
    }
    largest = warp_largest(largest);
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const bool exists = i * 32 + lane < c.experts;
      float by = score[i];
      if constexpr (c.score == persistent_score::sigmoid) {
        score[i] = 1 / (1 + __expf(-score[i]));
        by = score[i];
      } else if constexpr (c.score == persistent_score::softmax_of_all) {
        score[i] = exists ? __expf(score[i] - largest) : 0;
        sum += score[i];
      }
      if (c.choice_bias && exists) {
        if (c.score == persistent_score::softmax_of_all) by = score[i];
        by += choice_bias[i * 32 + lane];
      }
      rank[i] = exists ? order_of(by) : 0;
    }
    if constexpr (c.score == persistent_score::softmax_of_all) {
      sum = 1 / warp_total(sum);
#pragma unroll
      for (int i = 0; i < each; ++i) score[i] *= sum;
    }
    // Lane i has choice i.
    int expert = c.experts + lane - c.choices;  // of shared ones
    float weight = 1;
#pragma unroll 1
    for (int choice = 0; choice < c.choices; ++choice) {
      u32 own = 0;
#pragma unroll
      for (int i = 0; i < each; ++i) own = rank[i] > own ? rank[i] : own;
      const u32 best = largest_of_warp(own);
      int first = c.experts;
#pragma unroll
      for (int i = each - 1; i >= 0; --i)
        if (rank[i] == best) first = i * 32 + lane;
      first = static_cast<int>(smallest_of_warp(static_cast<u32>(first)));
      float value = 0;
#pragma unroll
      for (int i = 0; i < each; ++i)
        if (i * 32 + lane == first) {
          rank[i] = 0;
          value = score[i];
        }
      value = __shfl_sync(~0u, value, first % 32);
      if (lane == choice) {
        expert = first;
        weight = value;
      }
    }
    const bool is_choice = lane < c.choices;
    if constexpr (c.score == persistent_score::softmax_of_chosen) {
      const float most = warp_largest(is_choice ? weight : minus_infinity);
      if (is_choice) weight = __expf(weight - most);
    }
    if constexpr (c.renormalises || c.score == persistent_score::softmax_of_chosen) {
      const float added = c.score == persistent_score::sigmoid ? 1e-20f : 0;
      const float all = warp_total(is_choice ? weight : 0) + added;
      if (is_choice) weight /= all;
    }
    if (is_choice) weight *= cta.p.route_scale;
    if constexpr (c.own_gate) {
      const float gate = wait_for_float(logits + token * c.router_rows() + c.experts);
      if (lane >= c.choices + c.shared) weight = 1 / (1 + __expf(-gate));
    }
    if (lane < c.of_token()) {
      const int slot = token * c.of_token() + lane;
      write_value(cta.shared + c.choices_at() + slot * 4, expert);
      write_value(cta.shared + c.weights_at() + slot * 4, weight);
    }
  }
  __syncwarp();
}

}  // namespace fftune

// A token's gates, and the place and the state of a sequence, as the kernels of gated-delta-rule
// read them.
#pragma once

#include "common/bisect.cuh"
#include "common/numerics.cuh"
#include "common/vectors.cuh"
#include "gated_delta_rule/chunk_params.cuh"

namespace fftune {

// --- Sequences ---

// The state at a place of the indices; -1 for padding.
__device__ __forceinline__ int entry_at(const delta_rule_params& p, i64 place) {
  const int state = p.state_indices[place];
  return state <= p.null_index || state >= p.states ? -1 : state;
}

__device__ __forceinline__ delta_rule_sequence sequence_of(const delta_rule_params& p, int index) {
  delta_rule_sequence sequence{0, 0, index};
  if (p.offsets != nullptr) {
    const int first = p.offsets[index], end = p.offsets[index + 1];
    sequence.first = first < 0 ? 0 : smaller(first, p.tokens);
    sequence.end = end < sequence.first ? sequence.first : smaller(end, p.tokens);
  } else {
    sequence.end = p.tokens;
  }
  if (p.state_indices != nullptr) {
    i64 place = index;
    if (p.accepted != nullptr) {
      const int accepted = smaller(p.accepted[index], p.slots);
      place = place * p.slots + (accepted < 1 ? 0 : accepted - 1);
    }
    sequence.state = entry_at(p, place);
  }
  return sequence;
}

// The row of a sequence's first token among all tokens.
__device__ __forceinline__ i64 first_row(const delta_rule_params& p,
                                         const delta_rule_sequence& sequence, int index) {
  return p.offsets != nullptr ? sequence.first : static_cast<i64>(index) * p.tokens;
}

// The first slot of a sequence's chunks (chunk_params.cuh).
__device__ __forceinline__ i64 first_slot(const delta_rule_params& p, int index) {
  const i64 row =
      p.offsets != nullptr ? sequence_of(p, index).first : static_cast<i64>(index) * p.tokens;
  return row / delta_chunk + index;
}

// The chunk of a slot. Offsets that do not ascend may leave a slot without one.
__device__ __forceinline__ delta_chunk_place chunk_of_slot(const delta_rule_params& p, int slot) {
  const int index = last_before(p.batch, [&](int i) { return first_slot(p, i) <= slot; });
  const delta_rule_sequence sequence = sequence_of(p, index);
  const int chunk = static_cast<int>(slot - first_slot(p, index));
  const int left = sequence.end - sequence.first - chunk * delta_chunk;
  return {first_row(p, sequence, index) + chunk * delta_chunk,
          sequence.state < 0 || chunk < 0 ? 0 : smaller(left, delta_chunk)};
}

// With offsets: whether a row is a token of some sequence.
__device__ __forceinline__ bool is_of_sequence(const delta_rule_params& p, i64 row) {
  return row >= p.offsets[0] && row < p.offsets[p.batch];
}

// --- Gates ---

__device__ __forceinline__ float logistic(float x) {
  return 1.0f / (1.0f + expf(-x));
}
__device__ __forceinline__ float softplus(float x) {
  // fmaxf would drop a NaN.
  return (x > 0.0f ? x : x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x)));
}

// The head of q and k of a value head.
__device__ __forceinline__ int head_of_keys(const delta_rule_params& p, int head) {
  return static_cast<unsigned>(head) * p.heads / static_cast<unsigned>(p.v_heads);
}
// Where a token's row has the beta of a value head, and its gate if that is one number.
__device__ __forceinline__ int gate_of_head(const delta_rule_params& p, int head) {
  return head + head_of_keys(p, head) * p.gate_gap;
}

// Gates of a value head: parameters of its decays, loaded once.
template <delta_rule_form form>
struct delta_rule_gates {
  using T = element_type<form.type>;
  static constexpr bool given = form.gate == delta_gate::log;
  using Raw = typename choose_type<given, float, T>::type;
  using RawBeta = typename choose_type<form.sigmoid, T, float>::type;

  float rate = 0.0f;  // exp(A_log)
  float beta_scale, bound;

  __device__ __forceinline__ delta_rule_gates(const delta_rule_params& p, int head)
      : beta_scale(p.beta_scale), bound(p.gate_bound) {
    if constexpr (!given) rate = expf(p.A_log[head]);
  }

  // The log of the decay from g or a, with dt_bias.
  __device__ __forceinline__ float log_decay(float raw, float bias) const {
    if constexpr (given) {
      return raw;
    } else if constexpr (form.gate == delta_gate::softplus) {
      return -rate * softplus(raw + bias);
    } else {
      return bound * logistic(rate * (raw + bias));
    }
  }
  __device__ __forceinline__ float beta(float raw) const {
    return form.sigmoid ? beta_scale * logistic(raw) : raw;
  }
};

}  // namespace fftune

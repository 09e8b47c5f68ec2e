// Rows of the states of ssd in the registers of a warp (gated_delta_rule/recurrent_tile.cuh), from
// a sequence's first token to its last.
#pragma once

#include "gated_delta_rule/recurrent_walk.cuh"
#include "ssd/params.cuh"

namespace fftune {

// Infinities of steps and of results are NaN: the recurrence and chunks differ in which they have.
__device__ __forceinline__ float number(float value) {
  return fmaf(value, 0.0f, value);
}

// A token's step, and its derivative by the input.
struct ssd_step {
  float dt, slope;
};

// A head's parameters, loaded once. `Params`: ssd_params or ssd_backward_params.
template <ssd_form form>
struct ssd_head {
  float A, bias = 0.0f, D = 0.0f, dt_min, dt_max;

  template <class Params>
  __device__ __forceinline__ ssd_head(const Params& p, const delta_rule_params& layer, int head)
      : A(form.given ? layer.A_log[head] : -expf(layer.A_log[head])),
        dt_min(p.dt_min),
        dt_max(p.dt_max) {
    if constexpr (form.bias) bias = layer.dt_bias[head];
    if constexpr (form.skip) D = p.D[head];
  }
  __device__ __forceinline__ ssd_step step(float input) const {
    const float x = input + bias;
    ssd_step step{x, 1.0f};
    if constexpr (form.softplus) step = {softplus(x), logistic(x)};
    if (step.dt < dt_min) step = {dt_min, 0.0f};
    if (step.dt > dt_max) step = {dt_max, 0.0f};
    step.dt = number(step.dt);
    return step;
  }
};

template <ssd_form form, delta_recurrent_config c>
struct ssd_tile : recurrent_tile<form.states(), c> {
  using Rows = recurrent_tile<form.states(), c>;
  using T = typename Rows::T;
  using Rows::features;
  using Rows::k_steps;
  using Rows::state;
  static_assert(c.v_vector == 1);

  // A token's values as they are in memory.
  struct token {
    aligned_vector<T, c.k_vector> B[k_steps], C[k_steps];
    T x[c.rows], dt;
  };
  static __device__ __forceinline__ token load_token(const delta_rule_params& p, i64 row,
                                                     int head) {
    const int group = head_of_keys(p, head) * form.state_dim;
    const T* const B = static_cast<const T*>(p.k) + row * p.k_row + group;
    const T* const C = static_cast<const T*>(p.q) + row * p.q_row + group;
    const T* const x =
        static_cast<const T*>(p.v) + row * p.v_row + static_cast<i64>(head) * form.dim;
    token token;
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      const int n = Rows::k_at(step);
      token.B[step] = load_through_l1<T, c.k_vector>(B + n, Rows::has_k(n));
      token.C[step] = load_through_l1<T, c.k_vector>(C + n, Rows::has_k(n));
    }
#pragma unroll
    for (int i = 0; i < c.rows; ++i) {
      const int v = Rows::v_at(i);
      token.x[i] = Rows::has_v(v) ? x[v] : from_float<T>(0.0f);
    }
    token.dt = static_cast<const T*>(p.gate)[row * p.g_row + head];
    return token;
  }

  // A token's values as numbers.
  struct values {
    float B[features], C[features], x[c.rows], decay;
    ssd_step step;

    __device__ __forceinline__ values(const token& token, const ssd_head<form>& head)
        : step(head.step(to_float(token.dt))) {
      decay = expf(step.dt * head.A);
#pragma unroll
      for (int i = 0; i < k_steps; ++i) {
        float some[c.k_vector];
        to_floats(token.B[i], some);
#pragma unroll
        for (int e = 0; e < c.k_vector; ++e) B[i * c.k_vector + e] = some[e];
        to_floats(token.C[i], some);
#pragma unroll
        for (int e = 0; e < c.k_vector; ++e) C[i * c.k_vector + e] = some[e];
      }
#pragma unroll
      for (int i = 0; i < c.rows; ++i) x[i] = to_float(token.x[i]);
    }
  };

  // The state behind the token.
  __device__ __forceinline__ void write(const values& token) {
#pragma unroll
    for (int row = 0; row < c.rows; ++row) {
      const float x = token.step.dt * token.x[row];
#pragma unroll
      for (int i = 0; i < features; ++i)
        state[row][i] = token.decay * state[row][i] + x * token.B[i];
    }
  }
  // `out` of the rows.
  __device__ __forceinline__ void read(const values& token, float D, float (&out)[c.rows]) const {
#pragma unroll
    for (int row = 0; row < c.rows; ++row) {
      out[row] = 0.0f;
#pragma unroll
      for (int i = 0; i < features; ++i) out[row] += state[row][i] * token.C[i];
    }
    Rows::sum_over_row(out, c.rows);
#pragma unroll
    for (int row = 0; row < c.rows; ++row) {
      out[row] = number(out[row]);
      if constexpr (form.skip) out[row] += D * token.x[row];
    }
  }
  // Infinities become NaN, as it leaves.
  __device__ __forceinline__ void check() {
#pragma unroll
    for (int row = 0; row < c.rows; ++row) {
#pragma unroll
      for (int i = 0; i < features; ++i) state[row][i] = number(state[row][i]);
    }
  }
};

}  // namespace fftune

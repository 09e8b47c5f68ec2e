// Rows of the states of gated-delta-rule in the registers of a warp, from a sequence's first token
// to its last.
//
// Rows of a state do not depend on each other. A warp has rows of one value head of a sequence:
// lanes_k lanes share a row, each with its features of k, and a lane has `rows` rows. With
// state-layout=vk a vector of a state has neighbouring features of k, with kv neighbouring rows.
//
//            lane_k = 0        1       ..  lanes_k - 1 | 0 ..
//   vk  v0   k0..k3            k4..k7                     next lane_v
//            and every lanes_k * k_vector features further
//
// A token takes one reduction over the lanes of a row: of S k, S q, k q, and the squares of k and
// q. With the decayed S, delta = beta (v - S k), and behind the write S q + delta k q is what is
// read.
#pragma once

#include "common/vectors.cuh"
#include "gated_delta_rule/token.cuh"

namespace fftune {

struct delta_recurrent_config {
  int warps = 4;
  int lanes_k = 8;        // lanes that share a row
  int rows = 4;           // of a lane
  int k_vector = 4;       // neighbouring features of k that a lane has
  int v_vector = 1;       // neighbouring rows that a lane has
  bool prefetch = false;  // of the states to L2, before the kernels before this one are complete
};

template <delta_rule_form form, delta_recurrent_config c>
struct recurrent_tile {
  using T = element_type<form.type>;
  using State = element_type<form.state>;
  using Gates = delta_rule_gates<form>;
  static constexpr int lanes_v = 32 / c.lanes_k;
  static constexpr int k_steps = ceil_div(form.dim, c.lanes_k* c.k_vector);
  static constexpr int rows = c.rows, features = k_steps * c.k_vector;  // of a lane
  static constexpr int v_steps = c.rows / c.v_vector;
  static constexpr int warp_rows = lanes_v * c.rows;
  static constexpr int block_rows = warp_rows * c.warps;
  static constexpr int blocks = ceil_div(form.v_dim, block_rows);
  static constexpr int threads = c.warps * 32, state_elements = form.dim * form.v_dim;
  static constexpr int state_vector = form.key_major ? c.v_vector : c.k_vector;
  static_assert(c.rows % c.v_vector == 0 && form.dim % c.k_vector == 0);
  static_assert(form.key_major ? form.v_dim % c.v_vector == 0 : c.v_vector == 1);

  // The first feature of k of a step, and the first row.
  static __device__ __forceinline__ int k_at(int step) {
    return (step * c.lanes_k + static_cast<int>(threadIdx.x) % c.lanes_k) * c.k_vector;
  }
  static __device__ __forceinline__ int v_at(int step) {
    const int first = static_cast<int>(blockIdx.x) % blocks * block_rows +
                      static_cast<int>(threadIdx.x) / 32 * warp_rows;
    const int lane_v = static_cast<int>(threadIdx.x) % 32 / c.lanes_k;
    return first + (step * lanes_v + lane_v) * c.v_vector;
  }

  float state[c.rows][features];

  static __device__ __forceinline__ bool has_k(int k) {
    return form.dim % (c.lanes_k * c.k_vector) == 0 || k < form.dim;
  }
  static __device__ __forceinline__ bool has_v(int v) {
    return form.v_dim % block_rows == 0 || v < form.v_dim;
  }

  // Calls move(address, is there, row, feature) for each vector of the head's state at `state`. The
  // addresses are constants behind the lane's first.
  template <class Pointer, class Move>
  static __device__ __forceinline__ void for_each_vector(Pointer state, const Move& move) {
    constexpr int k_stride = form.key_major ? form.v_dim : 1,
                  v_stride = form.key_major ? 1 : form.dim;
    const Pointer first = state + (k_at(0) * k_stride + v_at(0) * v_stride);
    if constexpr (form.key_major) {
#pragma unroll
      for (int i = 0; i < features; ++i) {
        const int k = i / c.k_vector * (c.lanes_k * c.k_vector) + i % c.k_vector;
#pragma unroll
        for (int step = 0; step < v_steps; ++step) {
          const int v = step * lanes_v * c.v_vector;
          move(first + (k * k_stride + v * v_stride), has_k(k_at(0) + k) && has_v(v_at(0) + v),
               step * c.v_vector, i);
        }
      }
    } else {
#pragma unroll
      for (int row = 0; row < c.rows; ++row) {
        const int v = row * lanes_v;
#pragma unroll
        for (int step = 0; step < k_steps; ++step) {
          const int k = step * (c.lanes_k * c.k_vector);
          move(first + (k * k_stride + v * v_stride), has_k(k_at(0) + k) && has_v(v_at(0) + v), row,
               step * c.k_vector);
        }
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int row = 0; row < c.rows; ++row) {
#pragma unroll
      for (int i = 0; i < features; ++i) state[row][i] = 0.0f;
    }
  }
  // From the head's state at `from`. Loads of all vectors are in flight together.
  template <class State>
  __device__ __forceinline__ void load(const State* from) {
    const u64 policy = l2_eviction_policy<false>();
    for_each_vector(from, [&](const State* at, bool is_there, int row, int i) {
      const auto vector = load_once<State, state_vector>(at, is_there, policy);
      float values[state_vector];
      to_floats(vector, values);
#pragma unroll
      for (int e = 0; e < state_vector; ++e) element(row, i, e) = values[e];
    });
  }
  template <class State>
  __device__ __forceinline__ void store(State* to) {
    const u64 policy = l2_eviction_policy<false>();
    for_each_vector(to, [&](State* at, bool is_there, int row, int i) {
      float values[state_vector];
#pragma unroll
      for (int e = 0; e < state_vector; ++e) values[e] = element(row, i, e);
      if (is_there) store_once(at, from_floats<State, state_vector>(values), policy);
    });
  }

  // A token's values as they are in memory.
  struct token {
    aligned_vector<T, c.k_vector> q[k_steps], k[k_steps];
    aligned_vector<T, c.v_vector> v[v_steps];
    typename Gates::Raw gate[form.channels ? features : 1];
    typename Gates::RawBeta beta;
  };
  static __device__ __forceinline__ token load_token(const delta_rule_params& p, i64 row,
                                                     int head) {
    const int first = head_of_keys(p, head) * form.dim, of_head = gate_of_head(p, head);
    const T* const q = static_cast<const T*>(p.q) + row * p.q_row + first;
    const T* const k = static_cast<const T*>(p.k) + row * p.k_row + first;
    const T* const v =
        static_cast<const T*>(p.v) + row * p.v_row + static_cast<i64>(head) * form.v_dim;
    const auto* const gate = static_cast<const typename Gates::Raw*>(p.gate) + row * p.g_row +
                             (form.channels ? static_cast<i64>(head) * form.dim : of_head);
    token token;
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      const bool is_there = has_k(k_at(step));
      token.q[step] = load_through_l1<T, c.k_vector>(q + k_at(step), is_there);
      token.k[step] = load_through_l1<T, c.k_vector>(k + k_at(step), is_there);
    }
#pragma unroll
    for (int step = 0; step < v_steps; ++step)
      token.v[step] = load_through_l1<T, c.v_vector>(v + v_at(step), has_v(v_at(step)));
    if constexpr (form.channels) {
#pragma unroll
      for (int i = 0; i < features; ++i) {
        const int at = k_at(i / c.k_vector) + i % c.k_vector;
        token.gate[i] = gate[has_k(at) ? at : 0];
      }
    } else {
      token.gate[0] = *gate;
    }
    token.beta = static_cast<const typename Gates::RawBeta*>(p.beta)[row * p.beta_row + of_head];
    return token;
  }

  // dt_bias of a lane's decays.
  struct biases {
    float value[form.channels ? features : 1] = {};

    __device__ __forceinline__ biases(const delta_rule_params& p, int head) {
      if constexpr (!Gates::given) {
#pragma unroll
        for (int i = 0; i < (form.channels ? features : 1); ++i) {
          const int at = form.channels ? k_at(i / c.k_vector) + i % c.k_vector : 0;
          if (at < form.decays()) value[i] = p.dt_bias[static_cast<i64>(head) * form.decays() + at];
        }
      }
    }
  };

  // A token's values as numbers; q and k as they are given, without their norm.
  struct values {
    float q[features], k[features], v[c.rows];
    float decays[form.channels ? features : 1];
    float beta;

    __device__ __forceinline__ values(const token& token, const Gates& gates, const biases& bias) {
#pragma unroll
      for (int i = 0; i < k_steps; ++i) {
        float some[c.k_vector];
        to_floats(token.q[i], some);
#pragma unroll
        for (int e = 0; e < c.k_vector; ++e) q[i * c.k_vector + e] = some[e];
        to_floats(token.k[i], some);
#pragma unroll
        for (int e = 0; e < c.k_vector; ++e) k[i * c.k_vector + e] = some[e];
      }
#pragma unroll
      for (int i = 0; i < v_steps; ++i) {
        float some[c.v_vector];
        to_floats(token.v[i], some);
#pragma unroll
        for (int e = 0; e < c.v_vector; ++e) v[i * c.v_vector + e] = some[e];
      }
#pragma unroll
      for (int i = 0; i < (form.channels ? features : 1); ++i)
        decays[i] = expf(gates.log_decay(to_float(token.gate[i]), bias.value[i]));
      beta = gates.beta(to_float(token.beta));
    }
    __device__ __forceinline__ float decay(int i) const {
      return decays[form.channels ? i : 0];
    }

    // Divides q and k by their norms.
    __device__ __forceinline__ void normalise() {
      if constexpr (form.normed) {
        float squares[2] = {};
#pragma unroll
        for (int i = 0; i < features; ++i) {
          squares[0] += q[i] * q[i];
          squares[1] += k[i] * k[i];
        }
        sum_over_row(squares, 2);
        const float of_q = 1.0f / sqrtf(squares[0] + 1e-6f);
        const float of_k = 1.0f / sqrtf(squares[1] + 1e-6f);
#pragma unroll
        for (int i = 0; i < features; ++i) {
          q[i] *= of_q;
          k[i] *= of_k;
        }
      }
    }
  };

  // One reduction over the lanes of a row gives S k and S q of its rows, and sums of k and q.
  struct row_sums {
    static constexpr int held = 1, read = held + c.rows, squares = read + c.rows;
    float sums[squares + 2] = {};  // k q; S k; S q; k k, q q

    __device__ __forceinline__ row_sums(const values& token) {
#pragma unroll
      for (int i = 0; i < features; ++i) {
        sums[0] += token.k[i] * token.q[i];
        if constexpr (form.normed) {
          sums[squares] += token.k[i] * token.k[i];
          sums[squares + 1] += token.q[i] * token.q[i];
        }
      }
    }
    __device__ __forceinline__ void add(const values& token, int row, int i, float element) {
      sums[held + row] += element * token.k[i];
      sums[read + row] += element * token.q[i];
    }
    // Sets `delta` of the rows, which k multiplies in the state, and `out`. `decay`: of the
    // elements that were added.
    __device__ __forceinline__ void finish(const values& token, float decay, float scale,
                                           float (&delta)[c.rows], float (&out)[c.rows]) {
      sum_over_row(sums, form.normed ? squares + 2 : squares);
      float of_k = 1.0f, of_q = scale;
      if constexpr (form.normed) {
        of_k = rsqrtf(sums[squares] + 1e-6f);
        of_q *= rsqrtf(sums[squares + 1] + 1e-6f);
      }
#pragma unroll
      for (int row = 0; row < c.rows; ++row) {
        delta[row] = token.beta * (token.v[row] - of_k * decay * sums[held + row]) * of_k;
        out[row] = of_q * (decay * sums[read + row] + delta[row] * sums[0]);
      }
    }
  };

  // The state behind the token; `out` of the rows.
  __device__ __forceinline__ void step(const values& token, float scale, float (&out)[c.rows]) {
    row_sums sums(token);
#pragma unroll
    for (int i = 0; i < features; ++i) {
#pragma unroll
      for (int row = 0; row < c.rows; ++row) {
        state[row][i] *= token.decay(i);
        sums.add(token, row, i, state[row][i]);
      }
    }
    float delta[c.rows];
    sums.finish(token, 1.0f, scale, delta, out);
#pragma unroll
    for (int row = 0; row < c.rows; ++row) {
#pragma unroll
      for (int i = 0; i < features; ++i) state[row][i] += delta[row] * token.k[i];
    }
  }

  // Lanes of a row have the same; each writes some rows.
  static __device__ __forceinline__ void store_out(const delta_rule_params& p, i64 row, int head,
                                                   const float (&out)[c.rows]) {
    T* const to = static_cast<T*>(p.out) + (row * p.v_heads + head) * form.v_dim;
    const int lane_k = static_cast<int>(threadIdx.x) % c.lanes_k;
#pragma unroll
    for (int i = 0; i < c.rows; ++i) {
      const int v = v_at(i / c.v_vector) + i % c.v_vector;
      if (lane_k == i % c.lanes_k && has_v(v)) to[v] = from_float<T>(out[i]);
    }
  }

  // The first `count` values, over the lanes of a row.
  template <int values>
  static __device__ __forceinline__ void sum_over_row(float (&value)[values], int count) {
#pragma unroll
    for (int distance = c.lanes_k / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < values; ++i)
        if (i < count) value[i] += __shfl_xor_sync(~0u, value[i], distance);
    }
  }

 private:
  // Element e of the vector at (row, feature).
  __device__ __forceinline__ float& element(int row, int i, int e) {
    if constexpr (form.key_major) {
      return state[row + e][i];
    } else {
      return state[row][i + e];
    }
  }
};

}  // namespace fftune

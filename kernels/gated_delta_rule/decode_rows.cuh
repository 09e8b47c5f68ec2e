// Rows of the states of sequences of one token each, as they are in memory, in the registers of a
// warp. gated-delta-rule and ssd share them; the rows of a lane are those of recurrent_tile.cuh.
//
// Such a kernel is bound by the bytes of the states, so what counts is how many of them are on
// their way: a lane keeps a state's own type, and widens an element where it is used.
#pragma once

#include "common/async.cuh"
#include "gated_delta_rule/recurrent_tile.cuh"

namespace fftune {

template <delta_rule_form form, delta_recurrent_config c>
struct decode_rows {
  using Tile = recurrent_tile<form, c>;
  using T = typename Tile::T;
  using State = typename Tile::State;
  static constexpr int features = Tile::features, vector = Tile::state_vector;

  aligned_vector<State, vector> packed[c.rows * features / vector];

  // The vector at (row, feature).
  static constexpr int vector_at(int row, int i) {
    return (form.key_major ? i * c.rows + row : row * features + i) / vector;
  }

  // Prefetches the CTA's rows of the state at `from` to L2. May precede wait_for_dependencies().
  static __device__ __forceinline__ void prefetch(const State* from) {
    static_assert(!form.key_major);
    constexpr int rows = Tile::block_rows, size = static_cast<int>(sizeof(State));
    const int first = static_cast<int>(blockIdx.x) % Tile::blocks * rows;
    const int count = smaller(rows, form.v_dim - first);
    if (threadIdx.x == 0) prefetch_l2(from + first * form.dim, count * form.dim * size);
  }

  // Loads of all vectors are in flight together. Zeros if not `begins`.
  __device__ __forceinline__ void load(const State* from, bool begins) {
    const u64 policy = l2_eviction_policy<false>();
    Tile::for_each_vector(from, [&](const State* at, bool is_there, int row, int i) {
      packed[vector_at(row, i)] = load_once<State, vector>(at, begins && is_there, policy);
    });
  }

  // Calls use(row, feature, element) for each element.
  template <class Use>
  __device__ __forceinline__ void for_each(const Use& use) const {
#pragma unroll
    for (int row = 0; row < c.rows; row += form.key_major ? vector : 1) {
#pragma unroll
      for (int i = 0; i < features; i += form.key_major ? 1 : vector) {
        float values[vector];
        to_floats(packed[vector_at(row, i)], values);
#pragma unroll
        for (int e = 0; e < vector; ++e)
          use(form.key_major ? row + e : row, form.key_major ? i : i + e, values[e]);
      }
    }
  }
  // Converts again what for_each() converted, instead of holding floats of all rows.
  __device__ __forceinline__ void prevent_reuse() {
#pragma unroll
    for (auto& some : packed) prevent_float_reuse(some);
  }

  // Stores after(row, feature, element) for each element; the rows are still those that were
  // loaded.
  template <class After>
  __device__ __forceinline__ void store(State* to, const After& after) const {
    const u64 policy = l2_eviction_policy<false>();
    Tile::for_each_vector(to, [&](State* at, bool is_there, int row, int i) {
      float values[vector];
      to_floats(packed[vector_at(row, i)], values);
#pragma unroll
      for (int e = 0; e < vector; ++e) {
        values[e] = after(form.key_major ? row + e : row, form.key_major ? i : i + e, values[e]);
      }
      if (is_there) store_once(at, from_floats<State, vector>(values), policy);
    });
  }

  // `out` of the rows: each lane of a row has all of the row group's, and writes one of them.
  static __device__ __forceinline__ void store_out(const delta_rule_params& p, i64 row, int head,
                                                   const float (&out)[c.rows]) {
    T* const to = static_cast<T*>(p.out) + (row * p.v_heads + head) * form.v_dim;
    const int lane_k = static_cast<int>(threadIdx.x) % c.lanes_k;
#pragma unroll
    for (int first = 0; first < c.rows; first += c.lanes_k) {
      float own = out[first];
#pragma unroll
      for (int i = 1; i < c.lanes_k && first + i < c.rows; ++i)
        if (lane_k == i) own = out[first + i];
      const int i = first + lane_k, v = Tile::v_at(i / c.v_vector) + i % c.v_vector;
      if (i < c.rows && Tile::has_v(v)) to[v] = from_float<T>(own);
    }
  }
};

// The sequence, the head and the state of a CTA.
template <class Rows>
struct decode_place {
  int index, head;

  __device__ __forceinline__ decode_place()
      : index(static_cast<int>(blockIdx.x) / Rows::Tile::blocks),
        head(static_cast<int>(blockIdx.y)) {}
  // Before the kernels before this one are complete: the entry may be another one then, and no data
  // is read.
  __device__ __forceinline__ void prefetch(const delta_rule_params& p) const {
    if (p.state_in == nullptr) return;
    int state = index;
    if (p.state_indices != nullptr) {
      state = load_coherent_word(p.state_indices + index);
      if (state < 0 || state >= p.states) return;
    }
    Rows::prefetch(static_cast<const typename Rows::State*>(p.state_in) + begin(p, state));
  }
  // -1 for padding.
  __device__ __forceinline__ int state(const delta_rule_params& p) const {
    return p.state_indices != nullptr ? entry_at(p, index) : index;
  }
  // The byte of has_state; where there is none, another that is not used. Without a branch, which
  // would wait for it before other loads.
  __device__ __forceinline__ bool begins(const delta_rule_params& p) const {
    const bool is_given = p.has_state != nullptr;
    const void* const from = is_given ? p.has_state + index : p.q;
    const bool has_state = *static_cast<const unsigned char*>(from) != 0;
    return p.state_in != nullptr && (has_state || !is_given);
  }
  __device__ __forceinline__ i64 begin(const delta_rule_params& p, int state) const {
    return state * p.state_block + static_cast<i64>(head) * Rows::Tile::state_elements;
  }
};

}  // namespace fftune

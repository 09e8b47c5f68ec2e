// The gradients of ssd token by token (recurrent_tile.cuh), for any sizes, as those of the gated
// delta rule (gated_delta_rule/recurrent_backward.cu):
//
//   checkpoints   walks forward and keeps the states before each chunk of a sequence.
//   reverse       walks back. For each chunk it walks forward from the chunk's state and keeps the
//                 state before each token, in memory of its own threads; then it takes the tokens
//                 from the last on, with the gradient of the state in registers. Sums over the rows
//                 of a CTA, the gradients of B, C, dt and D, go to partial sums.
//   delta_rule_rows  adds up those of B and C, of a group's CTAs and heads.
//   steps         adds up those of dt, and leads them through its limits and softplus.
//   parameters    adds up the gradients of A, D and dt_bias over all tokens, in their order.
//
// Grid of the first two: sequences * heads * ceil(dim / (rows of a block)).
#include "common/async.cuh"
#include "ssd/recurrent_tile.cuh"

namespace fftune {

template <ssd_form form, delta_recurrent_config c>
__global__ void __launch_bounds__(c.warps * 32)
    ssd_checkpoints(const __grid_constant__ ssd_backward_params params) {
  using Tile = ssd_tile<form, c>;
  wait_and_launch_dependents();
  const delta_backward_params& p = params.back;
  const recurrent_place<Tile> place(p.forward);
  Tile tile;
  place.template load<typename Tile::State>(tile, p.forward, p.forward.state_in);
  const ssd_head<form> parameters(params, p.forward, place.head);
  keep_checkpoints(p, place, tile, [&](i64 row) {
    tile.write(typename Tile::values(Tile::load_token(p.forward, row, place.head), parameters));
  });
}

// A token's part of the gradients, from this thread's rows of a state.
template <ssd_form form, delta_recurrent_config c>
struct ssd_token_gradient {
  using Tile = ssd_tile<form, c>;
  using T = typename Tile::T;
  static constexpr int features = Tile::features;
  static constexpr int values = 2 * form.state_dim + 3;  // of C, of B, of dt A, dt and D

  float dB[features] = {}, dC[features] = {};
  float of[3] = {};  // of dt A, dt and D

  // Takes the token at `row` off `gradient`, that of the state behind it. `kept`: the state before
  // it. Stores dx.
  __device__ __forceinline__ ssd_token_gradient(const delta_backward_params& p, i64 row, int head,
                                                const typename Tile::values& token,
                                                const ssd_head<form>& parameters, const float* kept,
                                                Tile& gradient) {
    const T* const d_out =
        static_cast<const T*>(p.d_out) + (row * p.forward.v_heads + head) * form.dim;
    float dy[c.rows], written[c.rows] = {};
#pragma unroll
    for (int r = 0; r < c.rows; ++r) {
      const int v = Tile::v_at(r);
      dy[r] = v < form.dim ? to_float(d_out[v]) : 0.0f;
      const float x = token.step.dt * token.x[r];
#pragma unroll
      for (int f = 0; f < features; ++f) {
        const float decayed = token.decay * kept[(r * features + f) * Tile::threads];
        float& d_state = gradient.state[r][f];
        dC[f] += dy[r] * (decayed + x * token.B[f]);
        d_state += dy[r] * token.C[f];
        dB[f] += d_state * x;
        written[r] += d_state * token.B[f];
        of[0] += d_state * decayed;
        d_state *= token.decay;
      }
    }
    Tile::sum_over_row(written, c.rows);
    T* const dx = static_cast<T*>(p.dv) + (row * p.forward.v_heads + head) * form.dim;
    const int lane_k = static_cast<int>(threadIdx.x) % 32 % c.lanes_k;
#pragma unroll
    for (int r = 0; r < c.rows; ++r) {
      const int v = Tile::v_at(r);
      of[1] += written[r] * token.x[r];
      of[2] += dy[r] * token.x[r];
      float value = number(token.step.dt * written[r]);
      if constexpr (form.skip) value += parameters.D * dy[r];
      if (lane_k == r % c.lanes_k && v < form.dim) dx[v] = from_float<T>(value);
    }
  }

  // Over the rows of a warp.
  __device__ __forceinline__ void sum_over_warp() {
#pragma unroll
    for (int f = 0; f < features; ++f) {
#pragma unroll
      for (int distance = c.lanes_k; distance < 32; distance *= 2) {
        dB[f] += __shfl_xor_sync(~0u, dB[f], distance);
        dC[f] += __shfl_xor_sync(~0u, dC[f], distance);
      }
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      of[0] += __shfl_xor_sync(~0u, of[0], distance);
      // Lanes of a row have the same of the others.
      if (distance < c.lanes_k) continue;
      of[1] += __shfl_xor_sync(~0u, of[1], distance);
      of[2] += __shfl_xor_sync(~0u, of[2], distance);
    }
  }

  // A warp's, in shared memory.
  __device__ __forceinline__ void store(float (&to)[values], int lane) const {
    if (lane < c.lanes_k) {
#pragma unroll
      for (int f = 0; f < features; ++f) {
        const int n = Tile::k_at(f / c.k_vector) + f % c.k_vector;
        if (n < form.state_dim) {
          to[n] = dC[f];
          to[form.state_dim + n] = dB[f];
        }
      }
    }
    if (lane == 0) {
#pragma unroll
      for (int kind = 0; kind < 3; ++kind) to[2 * form.state_dim + kind] = of[kind];
    }
  }

  // The partial sums of the CTA at `place`, by all threads.
  static __device__ __forceinline__ void add_up(const delta_backward_params& p,
                                                const float (&of_warps)[c.warps][values],
                                                i64 place) {
    for (int k = static_cast<int>(threadIdx.x); k < values; k += Tile::threads) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < c.warps; ++w) sum += of_warps[w][k];
      sum = number(sum);
      if (k < 2 * form.state_dim) {
        p.row_sums[place * 2 * form.state_dim + k] = sum;
      } else {
        p.gate_sums[place * 3 + k - 2 * form.state_dim] = sum;
      }
    }
  }
};

template <ssd_form form, delta_recurrent_config c>
__global__ void __launch_bounds__(c.warps * 32)
    ssd_reverse(const __grid_constant__ ssd_backward_params params) {
  using Tile = ssd_tile<form, c>;
  using Sums = ssd_token_gradient<form, c>;
  __shared__ float shared[2][c.warps][Sums::values];
  wait_and_launch_dependents();
  const delta_backward_params& p = params.back;
  const recurrent_place<Tile> place(p.forward);
  const ssd_head<form> parameters(params, p.forward, place.head);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int block = static_cast<int>(blockIdx.x) % Tile::blocks;
  Tile tile, gradient;
  place.template load<float>(gradient, p.forward, p.d_final_state);
  int buffer = 0;
  const auto values_of = [&](i64 row) {
    return typename Tile::values(Tile::load_token(p.forward, row, place.head), parameters);
  };
  const auto write = [&](i64 row) { tile.write(values_of(row)); };
  walk_back(p, place, tile, write, [&](i64 row, const float* kept) {
    Sums own(p, row, place.head, values_of(row), parameters, kept, gradient);
    own.sum_over_warp();
    own.store(shared[buffer][warp], lane);
    __syncthreads();
    Sums::add_up(p, shared[buffer], (block * p.all_tokens + row) * p.forward.v_heads + place.head);
    // The other buffer is free: all threads have passed this token's barrier since they read it.
    buffer ^= 1;
  });
  if (p.d_initial_state == nullptr) return;
  gradient.check();
  gradient.store(p.d_initial_state + place.state(p.forward));
}

// A thread for each token and head. Grid: ceil(tokens * heads / 256).
template <ssd_form form, int blocks>
__global__ void __launch_bounds__(256)
    ssd_steps(const __grid_constant__ ssd_backward_params params) {
  using T = element_type<form.type>;
  wait_and_launch_dependents();
  const delta_backward_params& p = params.back;
  const delta_rule_params& f = p.forward;
  const i64 at = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= p.all_tokens * f.v_heads) return;
  const i64 row = at / f.v_heads;
  const int head = static_cast<int>(at - row * f.v_heads);
  if (f.offsets != nullptr && !is_of_sequence(f, row)) return;
  float of[3] = {};
  for (int block = 0; block < blocks; ++block) {
#pragma unroll
    for (int kind = 0; kind < 3; ++kind)
      of[kind] += p.gate_sums[(block * p.all_tokens * f.v_heads + at) * 3 + kind];
  }
  const ssd_head<form> parameters(params, f, head);
  const ssd_step step =
      parameters.step(to_float(static_cast<const T*>(f.gate)[row * f.g_row + head]));
  const float of_input = (of[0] * parameters.A + of[1]) * step.slope;
  static_cast<T*>(p.d_gate)[at] = from_float<T>(of_input);
  // `parameters` adds up these, in the place of the first block's sums.
  float* const kept = p.gate_sums + at * 3;
  kept[0] = of[0] * step.dt;
  kept[1] = of_input;
  kept[2] = of[2];
}

// Sums over all tokens: a CTA has a head. Grid: heads.
template <ssd_form form>
__global__ void __launch_bounds__(256)
    ssd_parameters(const __grid_constant__ ssd_backward_params params) {
  __shared__ float shared[3][256];
  wait_and_launch_dependents();
  const delta_backward_params& p = params.back;
  const delta_rule_params& f = p.forward;
  const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  float of[3] = {};
  for (int index = 0; index < f.batch; ++index) {
    const delta_rule_sequence sequence = sequence_of(f, index);
    const i64 first = first_row(f, sequence, index);
    const i64 end = first + sequence.end - sequence.first;
    for (i64 row = first + thread; row < end; row += 256) {
#pragma unroll
      for (int kind = 0; kind < 3; ++kind)
        of[kind] += p.gate_sums[(row * f.v_heads + head) * 3 + kind];
    }
  }
#pragma unroll
  for (int kind = 0; kind < 3; ++kind) shared[kind][thread] = of[kind];
  for (int half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) {
#pragma unroll
      for (int kind = 0; kind < 3; ++kind) shared[kind][thread] += shared[kind][thread + half];
    }
  }
  if (thread != 0) return;
  p.dA_log[head] = form.given ? shared[0][0] : -expf(f.A_log[head]) * shared[0][0];
  if constexpr (form.bias) p.ddt_bias[head] = shared[1][0];
  if constexpr (form.skip) params.dD[head] = shared[2][0];
}

}  // namespace fftune

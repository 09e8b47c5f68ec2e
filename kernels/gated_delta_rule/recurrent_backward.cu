// The gradients of gated-delta-rule token by token (recurrent_walk.cuh), for any sizes.
//
//   checkpoints   walks forward and keeps the states before each chunk of a sequence.
//   reverse       walks back. For each chunk it walks forward from the chunk's state and keeps the
//                 state before each token, in memory of its own threads; then it takes the tokens
//                 from the last on, with the gradient of the state in registers. Sums over the rows
//                 of a CTA, the gradients of the normed q and k, of g and of beta, go to partial
//                 sums.
//   rows          adds up the partial sums of a head's CTAs and value heads, and leads dq and dk
//                 through the norm.
//   gates         adds up those of g and beta, and leads them through the gate.
//   parameters    adds up the gradients of A_log and dt_bias over all tokens, in their order.
//
// Grid of the first two: sequences * v_heads * ceil(v_dim / (rows of a block)).
#include "common/async.cuh"
#include "gated_delta_rule/recurrent_walk.cuh"

namespace fftune {

template <delta_rule_form form, delta_recurrent_config c>
__global__ void __launch_bounds__(c.warps * 32)
    delta_rule_checkpoints(const __grid_constant__ delta_backward_params p) {
  using Tile = recurrent_tile<form, c>;
  wait_and_launch_dependents();
  const recurrent_place<Tile> place(p.forward);
  Tile tile;
  place.template load<typename Tile::State>(tile, p.forward, p.forward.state_in);
  const typename Tile::Gates gates(p.forward, place.head);
  const typename Tile::biases bias(p.forward, place.head);
  float out[c.rows];
  keep_checkpoints(p, place, tile, [&](i64 row) {
    const auto token = Tile::load_token(p.forward, row, place.head);
    tile.step(typename Tile::values(token, gates, bias), 1.0f, out);
  });
}

// A token's part of the gradients, from this thread's rows of a state.
template <delta_rule_form form, delta_recurrent_config c>
struct delta_token_gradient {
  using Tile = recurrent_tile<form, c>;
  using T = typename Tile::T;
  static constexpr int features = Tile::features;
  static constexpr int sums = form.channels ? 3 : 2;  // rows of dim: of q, k, and g of channels
  static constexpr int values = sums * form.dim + 2;

  float dq[features], dk[features], dg[features];
  float of_beta = 0.0f, of_g = 0.0f;

  static __device__ __forceinline__ int row_of(int r) {
    return Tile::v_at(r / c.v_vector) + r % c.v_vector;
  }

  // Takes the token at `row` off `gradient`, that of the state behind it. `tile`: the state before
  // it, once decayed, from `kept`. Stores dv.
  __device__ __forceinline__ delta_token_gradient(const delta_backward_params& p, i64 row, int head,
                                                  const typename Tile::values& token,
                                                  const float* kept, Tile& tile, Tile& gradient) {
    float error[c.rows], d_error[c.rows], dy[c.rows];
#pragma unroll
    for (int r = 0; r < c.rows; ++r) {
      error[r] = 0.0f;
#pragma unroll
      for (int f = 0; f < features; ++f) {
        tile.state[r][f] = kept[(r * features + f) * Tile::threads] * token.decay(f);
        error[r] += tile.state[r][f] * token.k[f];
      }
      const int v = row_of(r);
      const T* const d_out =
          static_cast<const T*>(p.d_out) + (row * p.forward.v_heads + head) * form.v_dim;
      dy[r] = v < form.v_dim ? p.forward.scale * to_float(d_out[v]) : 0.0f;
    }
    Tile::sum_over_row(error, c.rows);
#pragma unroll
    for (int r = 0; r < c.rows; ++r) {
      error[r] = token.v[r] - error[r];
      d_error[r] = 0.0f;
#pragma unroll
      for (int f = 0; f < features; ++f) {
        gradient.state[r][f] += dy[r] * token.q[f];
        d_error[r] += gradient.state[r][f] * token.k[f];
      }
    }
    Tile::sum_over_row(d_error, c.rows);
#pragma unroll
    for (int f = 0; f < features; ++f) dq[f] = dk[f] = dg[f] = 0.0f;
#pragma unroll
    for (int r = 0; r < c.rows; ++r) {
      const float delta = token.beta * error[r];
      of_beta += d_error[r] * error[r];
      d_error[r] *= token.beta;
#pragma unroll
      for (int f = 0; f < features; ++f) {
        const float decayed = tile.state[r][f];
        float& d_state = gradient.state[r][f];
        dq[f] += dy[r] * (decayed + delta * token.k[f]);
        dk[f] += d_state * delta - decayed * d_error[r];
        d_state -= d_error[r] * token.k[f];
        dg[f] += d_state * decayed;
        d_state *= token.decay(f);
      }
    }
    T* const dv = static_cast<T*>(p.dv) + (row * p.forward.v_heads + head) * form.v_dim;
    const int lane_k = static_cast<int>(threadIdx.x) % 32 % c.lanes_k;
#pragma unroll
    for (int r = 0; r < c.rows; ++r) {
      const int v = row_of(r);
      if (lane_k == r % c.lanes_k && v < form.v_dim) dv[v] = from_float<T>(d_error[r]);
    }
  }

  // Over the rows of a warp.
  __device__ __forceinline__ void sum_over_warp() {
#pragma unroll
    for (int f = 0; f < features; ++f) {
      of_g += dg[f];
#pragma unroll
      for (int distance = c.lanes_k; distance < 32; distance *= 2) {
        dq[f] += __shfl_xor_sync(~0u, dq[f], distance);
        dk[f] += __shfl_xor_sync(~0u, dk[f], distance);
        if constexpr (form.channels) dg[f] += __shfl_xor_sync(~0u, dg[f], distance);
      }
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      // Lanes of a row have the same of beta.
      if (distance >= c.lanes_k) of_beta += __shfl_xor_sync(~0u, of_beta, distance);
      of_g += __shfl_xor_sync(~0u, of_g, distance);
    }
  }

  // A warp's, in shared memory.
  __device__ __forceinline__ void store(float (&to)[values], int lane) const {
    if (lane < c.lanes_k) {
#pragma unroll
      for (int f = 0; f < features; ++f) {
        const int k = Tile::k_at(f / c.k_vector) + f % c.k_vector;
        if (k < form.dim) {
          to[k] = dq[f];
          to[form.dim + k] = dk[f];
          if constexpr (form.channels) to[2 * form.dim + k] = dg[f];
        }
      }
    }
    if (lane == 0) {
      to[sums * form.dim] = of_beta;
      to[sums * form.dim + 1] = of_g;
    }
  }

  // The partial sums of the CTA at `place`, by all threads.
  static __device__ __forceinline__ void add_up(const delta_backward_params& p,
                                                const float (&of_warps)[c.warps][values],
                                                i64 place) {
    float* const row_sums = p.row_sums + place * 2 * form.dim;
    float* const gate_sums = p.gate_sums + place * (1 + form.decays());
    for (int k = static_cast<int>(threadIdx.x); k < values; k += Tile::threads) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < c.warps; ++w) sum += of_warps[w][k];
      if (k < 2 * form.dim) {
        row_sums[k] = sum;
      } else if (k < sums * form.dim) {
        gate_sums[1 + k - 2 * form.dim] = sum;
      } else if (k == sums * form.dim) {
        gate_sums[0] = sum;
      } else if (!form.channels) {
        gate_sums[1] = sum;
      }
    }
  }
};

template <delta_rule_form form, delta_recurrent_config c>
__global__ void __launch_bounds__(c.warps * 32)
    delta_rule_reverse(const __grid_constant__ delta_backward_params p) {
  using Tile = recurrent_tile<form, c>;
  using Sums = delta_token_gradient<form, c>;
  __shared__ float shared[2][c.warps][Sums::values];
  wait_and_launch_dependents();
  const recurrent_place<Tile> place(p.forward);
  const typename Tile::Gates gates(p.forward, place.head);
  const typename Tile::biases bias(p.forward, place.head);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int block = static_cast<int>(blockIdx.x) % Tile::blocks;
  Tile tile, gradient;
  place.template load<float>(gradient, p.forward, p.d_final_state);
  int buffer = 0;
  const auto write = [&](i64 row) {
    float out[c.rows];
    const auto token = Tile::load_token(p.forward, row, place.head);
    tile.step(typename Tile::values(token, gates, bias), 1.0f, out);
  };
  walk_back(p, place, tile, write, [&](i64 row, const float* kept) {
    typename Tile::values token(Tile::load_token(p.forward, row, place.head), gates, bias);
    token.normalise();
    Sums own(p, row, place.head, token, kept, tile, gradient);
    own.sum_over_warp();
    own.store(shared[buffer][warp], lane);
    __syncthreads();
    Sums::add_up(p, shared[buffer], (block * p.all_tokens + row) * p.forward.v_heads + place.head);
    // The other buffer is free: all threads have passed this token's barrier since they read it.
    buffer ^= 1;
  });
  if (p.d_initial_state != nullptr) gradient.store(p.d_initial_state + place.state(p.forward));
}

// The rows of a sequence's tokens, one warp for each token and head of q. Grid: ceil(tokens * heads
// / 8).
template <delta_rule_form form, int blocks>
__global__ void __launch_bounds__(256)
    delta_rule_rows(const __grid_constant__ delta_backward_params p) {
  using T = element_type<form.type>;
  constexpr int features = ceil_div(form.dim, 32);
  wait_and_launch_dependents();
  const delta_rule_params& f = p.forward;
  const i64 at = static_cast<i64>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (at >= p.all_tokens * f.heads) return;
  const i64 row = at / f.heads;
  const int head = static_cast<int>(at - row * f.heads), group = f.v_heads / f.heads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (f.offsets != nullptr && !is_of_sequence(f, row)) return;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const T* const from = part == 0 ? static_cast<const T*>(f.q) + row * f.q_row + head * form.dim
                                    : static_cast<const T*>(f.k) + row * f.k_row + head * form.dim;
    T* const to = static_cast<T*>(part == 0 ? p.dq : p.dk) + at * form.dim;
    float sum[features], value[features], squares = 0.0f, along = 0.0f;
#pragma unroll
    for (int i = 0; i < features; ++i) {
      const int k = lane + 32 * i;
      sum[i] = value[i] = 0.0f;
      if (k >= form.dim) continue;
      value[i] = to_float(from[k]);
      for (int block = 0; block < blocks; ++block) {
        for (int j = 0; j < group; ++j)
          sum[i] += p.row_sums[(((block * p.all_tokens + row) * f.v_heads + head * group + j) * 2 +
                                part) *
                                   form.dim +
                               k];
      }
      squares += value[i] * value[i];
      along += sum[i] * value[i];
    }
    float factor = 1.0f, shrink = 0.0f;
    if constexpr (form.normed) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        squares += __shfl_xor_sync(~0u, squares, distance);
        along += __shfl_xor_sync(~0u, along, distance);
      }
      factor = 1.0f / sqrtf(squares + 1e-6f);
      shrink = along * factor * factor;
    }
#pragma unroll
    for (int i = 0; i < features; ++i) {
      const int k = lane + 32 * i;
      if (k < form.dim) to[k] = from_float<T>(factor * (sum[i] - shrink * value[i]));
    }
  }
}

// A thread for each token, value head and decay. Grid: ceil(tokens * v_heads * decays / 256).
template <delta_rule_form form, int blocks>
__global__ void __launch_bounds__(256)
    delta_rule_gates_backward(const __grid_constant__ delta_backward_params p) {
  using T = element_type<form.type>;
  using Gates = delta_rule_gates<form>;
  wait_and_launch_dependents();
  const delta_rule_params& f = p.forward;
  constexpr int decays = form.decays();
  const i64 at = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= p.all_tokens * f.v_heads * decays) return;
  const i64 of_head = at / decays, row = of_head / f.v_heads;
  const int channel = static_cast<int>(at - of_head * decays);
  const int head = static_cast<int>(of_head - row * f.v_heads);
  if (f.offsets != nullptr && !is_of_sequence(f, row)) return;
  float of_g = 0.0f, of_beta = 0.0f;
  for (int block = 0; block < blocks; ++block) {
    const float* const sums =
        p.gate_sums + ((block * p.all_tokens + row) * f.v_heads + head) * (1 + decays);
    of_beta += sums[0];
    of_g += sums[1 + channel];
  }
  if (channel == 0) {
    if constexpr (form.sigmoid) {
      const float logit =
          to_float(static_cast<const T*>(f.beta)[row * f.beta_row + gate_of_head(f, head)]);
      static_cast<T*>(p.d_beta)[of_head] =
          from_float<T>(of_beta * f.beta_scale * logistic(logit) * logistic(-logit));
    } else {
      static_cast<float*>(p.d_beta)[of_head] = of_beta;
    }
  }
  if constexpr (Gates::given) {
    static_cast<float*>(p.d_gate)[at] = of_g;
  } else {
    const float rate = expf(f.A_log[head]);
    const int own = form.channels ? head * decays + channel : gate_of_head(f, head);
    const float x = to_float(static_cast<const T*>(f.gate)[row * f.g_row + own]) +
                    f.dt_bias[head * decays + channel];
    float of_input, of_log;  // gradients of g
    if constexpr (form.gate == delta_gate::softplus) {
      of_input = -rate * logistic(x);
      of_log = -rate * softplus(x);
    } else {
      const float slope = f.gate_bound * logistic(rate * x) * logistic(-rate * x);
      of_input = slope * rate;
      of_log = slope * rate * x;
    }
    static_cast<T*>(p.d_gate)[at] = from_float<T>(of_input * of_g);
    // `parameters` adds up these, without the rounding, in the place of the first block's sums.
    p.gate_sums[(row * f.v_heads + head) * (1 + decays) + 1 + channel] = of_input * of_g;
    p.log_sums[at] = of_log * of_g;
  }
}

// Sums over all tokens: a CTA has a value head. Grid: v_heads.
template <delta_rule_form form>
__global__ void __launch_bounds__(256)
    delta_rule_parameters(const __grid_constant__ delta_backward_params p) {
  constexpr int decays = form.decays();
  __shared__ float shared[2][256];
  wait_and_launch_dependents();
  const delta_rule_params& f = p.forward;
  const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  // A thread has a decay, or every 256th token of one.
  constexpr int step = decays == 1 ? 256 : 1;
  float of_bias = 0.0f, of_log = 0.0f;
  if (decays == 1 || thread < decays) {
    const int channel = decays == 1 ? 0 : thread;
    for (int index = 0; index < f.batch; ++index) {
      const delta_rule_sequence sequence = sequence_of(f, index);
      const i64 first = first_row(f, sequence, index);
      const i64 end = first + sequence.end - sequence.first;
      for (i64 row = first + (decays == 1 ? thread : 0); row < end; row += step) {
        const i64 place = row * f.v_heads + head;
        of_bias += p.gate_sums[place * (1 + decays) + 1 + channel];
        of_log += p.log_sums[place * decays + channel];
      }
    }
  }
  if (decays > 1 && thread < decays) p.ddt_bias[static_cast<i64>(head) * decays + thread] = of_bias;
  shared[0][thread] = of_log;
  shared[1][thread] = of_bias;
  for (int half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) {
      shared[0][thread] += shared[0][thread + half];
      shared[1][thread] += shared[1][thread + half];
    }
  }
  if (thread == 0) {
    p.dA_log[head] = shared[0][0];
    if (decays == 1) p.ddt_bias[head] = shared[1][0];
  }
}

}  // namespace fftune

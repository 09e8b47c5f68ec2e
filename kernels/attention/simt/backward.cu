// The simt attention backward: for any element type, head dim, form and device, and the same bits
// every time. The fallback. Three kernels, one after the other; the formulas are in attention.hpp.
//
//   attention_simt_dq       warp: one query of one head; stores dq, and delta = d_out . out
//   attention_simt_dkv      warp: one key of one kv head; all heads and queries that see it, in
//                           ascending order; stores dk and dv
//   attention_simt_d_sinks  CTA: one head; adds up its queries in a fixed order
//
// As in the forward, a lane has one key (or query) of 32 for products, and the columns lane, lane +
// 32, ... of sums. Grids: ceil(queries x heads / warps), ceil(keys x kv heads / warps), heads.
// Block: attention_simt_config::threads.
#include "attention/simt/rows.cuh"
#include "common/async.cuh"

namespace fftune {

// The probability of a score, from its row's lse in powers of two.
__device__ __forceinline__ float probability_of(float power, float lse_power) {
  return lse_power == minus_infinity() ? 0.0f : approximate_exp2(power - lse_power);
}

template <attention_form form, int v_dim>
__device__ __forceinline__ void simt_dq(const attention_backward_params& params) {
  using rows = simt_rows<form, v_dim>;
  using T = typename rows::T;
  const attention_params& p = params.forward;
  __shared__ float shared_q[attention_simt_config::warps][form.dim];
  __shared__ float shared_d_out[attention_simt_config::warps][v_dim];
  wait_and_launch_dependents();

  const auto query = rows::own_query(p);
  if (!query.is_valid) return;
  const attention_sequence& sequence = query.sequence;
  const int head = query.head;

  float(&q)[form.dim] = shared_q[threadIdx.x / 32];
  float(&d_out)[v_dim] = shared_d_out[threadIdx.x / 32];
  const int column = head * form.dim, value_column = head * v_dim;
  rows::stage(q, static_cast<const T*>(p.q) +
                     rows::query_at(sequence, query.place, p.q_batch, p.q_row) + column);
  rows::stage(d_out,
              static_cast<const T*>(p.d_out) +
                  rows::query_at(sequence, query.place, params.d_out_batch, params.d_out_row) +
                  value_column);
  const T* const out = static_cast<const T*>(p.out) +
                       rows::query_at(sequence, query.place, p.out_batch, p.out_row) + value_column;
  float delta = 0;
  for (int i = rows::lane(); i < v_dim; i += 32) delta += d_out[i] * to_float(out[i]);
  delta = rows::warp_sum(delta);
  const i64 statistic = rows::statistic_at(p, sequence, query.place, head);
  if (rows::lane() == 0) p.delta[statistic] = delta;
  const float lse_power = p.lse[statistic] * log2_e;

  const score_scaling<form> scaling(p);
  typename rows::key_columns dq = {};
  const key_range keys = keys_of_row<form>(p, sequence, query.place);
  for (int first = keys.first; first < keys.last; first += 32) {
    const int key = first + rows::lane();
    float d_product = 0;
    const bool allowed = key < keys.last && rows::allowed(p, sequence, head, query.place, key);
    if (allowed) {
      const float product =
          rows::product(q, query.k + rows::key_at(p, sequence, key, p.k_batch, p.k_row));
      const auto score = rows::scale(p, scaling, sequence, head, query.place, key, product);
      const float d_probability =
          rows::product(d_out, query.v + rows::key_at(p, sequence, key, p.v_batch, p.v_row));
      d_product =
          probability_of(score.power, lse_power) * (d_probability - delta) * score.slope * p.scale;
    }
    // A gradient of zero counts where it meets an infinity: only pairs that are not allowed are
    // left out.
    const u32 all_allowed = __ballot_sync(~0u, allowed);
    for (int i = 0; i < smaller(32, keys.last - first); ++i) {
      const float of_key = __shfl_sync(~0u, d_product, i);
      if ((all_allowed >> i & 1) == 0) continue;
      rows::template add_row<form.dim>(
          dq, of_key, query.k + rows::key_at(p, sequence, first + i, p.k_batch, p.k_row));
    }
  }
  rows::template store_row<form.dim>(
      static_cast<T*>(p.dq) +
          rows::query_at(sequence, query.place, params.dq_batch, params.dq_row) + column,
      dq, 1.0f);
}

template <attention_form form, int v_dim>
__device__ __forceinline__ void simt_dkv(const attention_backward_params& params) {
  using rows = simt_rows<form, v_dim>;
  using T = typename rows::T;
  static_assert(!form.paged);
  const attention_params& p = params.forward;
  __shared__ float shared_k[attention_simt_config::warps][form.dim];
  __shared__ float shared_v[attention_simt_config::warps][v_dim];
  wait_and_launch_dependents();

  const i64 item = rows::warp_of_grid();
  const int tokens = form.packed_sequences() ? p.kv_len : p.batch * p.kv_len;
  if (item >= static_cast<i64>(tokens) * p.kv_heads) return;
  const int kv_head = static_cast<int>(item % p.kv_heads);
  const auto key = rows::find(p, static_cast<int>(item / p.kv_heads), true);
  if (!key.is_valid) return;
  const attention_sequence& sequence = key.sequence;

  typename rows::key_columns dk = {};
  typename rows::value_columns dv = {};
  const int column = kv_head * form.dim, value_column = kv_head * v_dim;
  // Keys beyond a sequence's length have gradients of zero, and may hold anything.
  if (key.place < sequence.kv_len) {
    float(&k)[form.dim] = shared_k[threadIdx.x / 32];
    float(&v)[v_dim] = shared_v[threadIdx.x / 32];
    rows::stage(k, static_cast<const T*>(p.k) +
                       rows::key_at(p, sequence, key.place, p.k_batch, p.k_row) + column);
    rows::stage(v, static_cast<const T*>(p.v) +
                       rows::key_at(p, sequence, key.place, p.v_batch, p.v_row) + value_column);
    // The queries that a causal mask and a window leave.
    int first_query = 0, last_query = sequence.q_len;
    if constexpr (form.mask == attention_mask::causal) {
      first_query = larger(first_query, key.place - sequence.shift());
    }
    if constexpr (form.window) {
      last_query = smaller(last_query, key.place - sequence.shift() + p.window);
    }
    const score_scaling<form> scaling(p);
    const int heads = p.heads / p.kv_heads;
    for (int head = kv_head * heads; head < (kv_head + 1) * heads; ++head) {
      const T* const q = static_cast<const T*>(p.q) + head * form.dim;
      const T* const d_out = static_cast<const T*>(p.d_out) + head * v_dim;
      for (int first = first_query; first < last_query; first += 32) {
        const int query = first + rows::lane();
        float probability = 0, d_product = 0;
        const bool allowed =
            query < last_query && rows::allowed(p, sequence, head, query, key.place);
        if (allowed) {
          const float product =
              rows::product(k, q + rows::query_at(sequence, query, p.q_batch, p.q_row));
          const auto score = rows::scale(p, scaling, sequence, head, query, key.place, product);
          const float d_probability = rows::product(
              v, d_out + rows::query_at(sequence, query, params.d_out_batch, params.d_out_row));
          const i64 statistic = rows::statistic_at(p, sequence, query, head);
          probability = probability_of(score.power, p.lse[statistic] * log2_e);
          d_product = probability * (d_probability - p.delta[statistic]) * score.slope * p.scale;
        }
        const u32 all_allowed = __ballot_sync(~0u, allowed);
        for (int i = 0; i < smaller(32, last_query - first); ++i) {
          const float of_v = __shfl_sync(~0u, probability, i);
          const float of_k = __shfl_sync(~0u, d_product, i);
          if ((all_allowed >> i & 1) == 0) continue;
          rows::template add_row<v_dim>(
              dv, of_v,
              d_out + rows::query_at(sequence, first + i, params.d_out_batch, params.d_out_row));
          rows::template add_row<form.dim>(
              dk, of_k, q + rows::query_at(sequence, first + i, p.q_batch, p.q_row));
        }
      }
    }
  }
  rows::template store_row<form.dim>(
      static_cast<T*>(p.dk) + rows::key_at(p, sequence, key.place, params.dk_batch, params.dk_row) +
          column,
      dk, 1.0f);
  rows::template store_row<v_dim>(
      static_cast<T*>(p.dv) + rows::key_at(p, sequence, key.place, params.dv_batch, params.dv_row) +
          value_column,
      dv, 1.0f);
}

template <attention_form form>
__global__ void __launch_bounds__(attention_simt_config::threads)
    attention_simt_dq(const __grid_constant__ attention_backward_params params) {
  simt_dq<form, form.dim>(params);
}
template <attention_form form, int v_dim>
__global__ void __launch_bounds__(attention_simt_config::threads)
    attention_simt_dq_values(const __grid_constant__ attention_backward_params params) {
  simt_dq<form, v_dim>(params);
}

template <attention_form form>
__global__ void __launch_bounds__(attention_simt_config::threads)
    attention_simt_dkv(const __grid_constant__ attention_backward_params params) {
  simt_dkv<form, form.dim>(params);
}
template <attention_form form, int v_dim>
__global__ void __launch_bounds__(attention_simt_config::threads)
    attention_simt_dkv_values(const __grid_constant__ attention_backward_params params) {
  simt_dkv<form, v_dim>(params);
}

template <attention_form form>
__global__ void __launch_bounds__(attention_simt_config::threads)
    attention_simt_d_sinks(const __grid_constant__ attention_backward_params params) {
  constexpr int threads = attention_simt_config::threads;
  const attention_params& p = params.forward;
  __shared__ float sums[threads];
  wait_and_launch_dependents();
  const int head = blockIdx.x;
  const float sink_power = p.sinks[head] * log2_e;
  const i64 matrices = form.packed_sequences() ? 1 : p.batch;
  float sum = 0;
  for (i64 i = threadIdx.x; i < matrices * p.q_len; i += threads) {
    const i64 statistic = (i / p.q_len * p.heads + head) * p.q_len + i % p.q_len;
    sum -= probability_of(sink_power, p.lse[statistic] * log2_e) * p.delta[statistic];
  }
  sums[threadIdx.x] = sum;
  for (int distance = threads / 2; distance > 0; distance /= 2) {
    __syncthreads();
    if (threadIdx.x < distance) sums[threadIdx.x] += sums[threadIdx.x + distance];
  }
  if (threadIdx.x == 0) p.d_sinks[head] = sums[0];
}

}  // namespace fftune

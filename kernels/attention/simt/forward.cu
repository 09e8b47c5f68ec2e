// The simt attention forward: for any element type, head dim, form and device. The fallback.
//
//   warp      one query of one head; 32 keys at a time
//   scores    a lane has one key: it multiplies the query, in shared memory, with the key's row
//   output    a lane has the columns lane, lane + 32, ...: it adds up rows of values, whose
//             probabilities come from the lanes by shuffles
//
// Keys are added up in ascending order. Grid: ceil(queries x heads / warps), heads fastest. Block:
// attention_simt_config::threads.
#include "attention/simt/rows.cuh"
#include "common/async.cuh"

namespace fftune {

template <attention_form form, int v_dim>
__device__ __forceinline__ void simt_forward(const attention_params& p,
                                             const attention_cache_params* cache = nullptr) {
  using rows = simt_rows<form, v_dim>;
  using T = typename rows::T;
  __shared__ float shared_q[attention_simt_config::warps][form.dim];
  wait_and_launch_dependents();

  const auto query = rows::own_query(p);
  if (!query.is_valid) return;
  const attention_sequence& sequence = query.sequence;
  const int head = query.head;

  float(&q)[form.dim] = shared_q[threadIdx.x / 32];
  rows::stage(q, static_cast<const T*>(p.q) +
                     rows::query_at(sequence, query.place, p.q_batch, p.q_row) + head * form.dim);
  score_scaling<form> scaling(p);
  const int kv_head = head / (p.heads / p.kv_heads);
  if constexpr (form.e4m3) scaling.scale_keys(k_scale_of<form>(cache, kv_head));
  softmax_row softmax;
  typename rows::value_columns out = {};
  const key_range keys = keys_of_row<form>(p, sequence, query.place);
  for (int first = keys.first; first < keys.last; first += 32) {
    const int key = first + rows::lane();
    float power = minus_infinity();
    const bool allowed = key < keys.last && rows::allowed(p, sequence, head, query.place, key);
    if (allowed) {
      const float product =
          rows::key_product(q, query.k, rows::key_at(p, sequence, key, p.k_batch, p.k_row));
      power = rows::scale(p, scaling, sequence, head, query.place, key, product).power;
    }
    const float rescale = softmax.rescale(rows::warp_max(power));
    const float probability = approximate_exp2(power - softmax.offset());
    softmax.sum += rows::warp_sum(probability);
#pragma unroll
    for (float& value : out) value *= rescale;
    // A probability that underflows counts: its value may be infinite. One that is not allowed does
    // not, so that its values may be anything.
    const u32 all_allowed = __ballot_sync(~0u, allowed);
    for (int i = 0; i < smaller(32, keys.last - first); ++i) {
      const float of_key = __shfl_sync(~0u, probability, i);
      if ((all_allowed >> i & 1) == 0) continue;
      const i64 at = rows::key_at(p, sequence, first + i, p.v_batch, p.v_row);
      if (form.paged && at < 0) continue;
      rows::template add_row<v_dim>(out, of_key, query.v + at);
    }
  }
  const softmax_result result =
      finish_softmax(softmax, form.sinks ? p.sinks[head] : minus_infinity());
  rows::template store_row<v_dim>(
      static_cast<T*>(p.out) + rows::query_at(sequence, query.place, p.out_batch, p.out_row) +
          head * v_dim,
      out, form.e4m3 ? result.factor * v_scale_of<form>(cache, kv_head) : result.factor);
  if constexpr (form.lse) {
    if (rows::lane() == 0) {
      p.lse[rows::statistic_at(p, sequence, query.place, head)] = result.lse * natural_log_of_2;
    }
  }
}

template <attention_form form>
__global__ void __launch_bounds__(attention_simt_config::threads)
    attention_simt_forward(const __grid_constant__ attention_params p) {
  simt_forward<form, form.dim>(p);
}
template <attention_form form, int v_dim>
__global__ void __launch_bounds__(attention_simt_config::threads)
    attention_simt_forward_values(const __grid_constant__ attention_params p) {
  simt_forward<form, v_dim>(p);
}

template <attention_form form>
__global__ void __launch_bounds__(attention_simt_config::threads)
    attention_simt_forward_e4m3(const __grid_constant__ attention_cache_params p) {
  simt_forward<form, form.dim>(p.attention, &p);
}
template <attention_form form, int v_dim>
__global__ void __launch_bounds__(attention_simt_config::threads)
    attention_simt_forward_values_e4m3(const __grid_constant__ attention_cache_params p) {
  simt_forward<form, v_dim>(p.attention, &p);
}

}  // namespace fftune

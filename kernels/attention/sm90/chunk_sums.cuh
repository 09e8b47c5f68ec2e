// The second kernel of a divided forward.
#pragma once

#include "attention/key_walk.cuh"
#include "attention/sm90/chunks.cuh"
#include "attention/sm90/config.cuh"
#include "attention/sm90/params.cuh"
#include "attention/softmax.cuh"
#include "common/async.cuh"
#include "common/numerics.cuh"

namespace fftune {

// divided: a warp adds up the chunks of a row of the result, and stores it. Four lanes
// have the sums of probabilities that the four threads of a row had, in the order of store_row().
template <attention_form form, attention_sm90_config config>
__global__ void __launch_bounds__(128)
    attention_chunk_sums_sm90(const __grid_constant__ attention_sm90_params maps) {
  using T = element_type<form.type>;
  constexpr int columns = (form.dim + 31) / 32, length = attention_chunk_row(form);
  constexpr int sums_at = length - 8;
  launch_dependents();
  wait_for_dependencies();
  const attention_params& params = maps.attention;
  const int lane = static_cast<int>(threadIdx.x % 32), quarter = lane % 4;
  const i64 rows = static_cast<i64>(params.batch) * params.q_len * params.heads;
  const i64 row = blockIdx.x * i64{4} + threadIdx.x / 32;
  if (row >= rows) return;
  const int head = static_cast<int>(row % params.heads);
  const i64 query_of_all = row / params.heads;
  const int query = static_cast<int>(query_of_all % params.q_len);
  const attention_sequence sequence =
      sequence_of<form>(params, static_cast<int>(query_of_all / params.q_len));
  const key_range keys = keys_of_row<form>(params, sequence, query);
  const int first = keys.first / config.chunk;
  const int last = keys.last > keys.first ? ceil_div(keys.last, config.chunk) : first;
  const float* const from = reinterpret_cast<const float*>(params.partials) + row * length;
  softmax_row all;
  float sums[columns] = {};
#pragma unroll 4
  for (int chunk = last - 1; chunk >= first; --chunk) {
    const float* const own = from + chunk * rows * length;
    const chunk_factors by = chunk_factors_of(all.reference, own[sums_at + 4 + quarter]);
    all.sum = add_chunk(all.sum, own[sums_at + quarter], by);
#pragma unroll
    for (int j = 0; j < columns; ++j) {
      if (form.dim % 32 == 0 || j * 32 + lane < form.dim) {
        sums[j] = add_chunk(sums[j], own[j * 32 + lane], by);
      }
    }
  }
  all.sum += __shfl_xor_sync(~0u, all.sum, 1);
  all.sum += __shfl_xor_sync(~0u, all.sum, 2);
  const softmax_result result =
      finish_softmax(all, form.sinks ? params.sinks[head] : minus_infinity());
  T* const to = static_cast<T*>(params.out) + head * form.dim +
                (query_of_all / params.q_len) * params.out_batch + query * i64{params.out_row};
#pragma unroll
  for (int j = 0; j < columns; ++j) {
    if (form.dim % 32 == 0 || j * 32 + lane < form.dim) {
      to[j * 32 + lane] = from_float<T>(sums[j] * result.factor);
    }
  }
  if constexpr (form.lse) {
    if (lane == 0) {
      params.lse[(query_of_all / params.q_len * params.heads + head) * params.q_len + query] =
          result.lse * natural_log_of_2;
    }
  }
}

}  // namespace fftune

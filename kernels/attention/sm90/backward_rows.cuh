// The kernels around the sm_90a attention backward's main one: before it delta, the log-sum-exp in
// base 2 and the zeros that dq starts from; after it the conversion of dq; and d_sinks.
#pragma once

#include "attention/sm90/backward_work.cuh"
#include "attention/softmax.cuh"
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/numerics.cuh"
#include "common/vectors.cuh"

namespace fftune {

constexpr int backward_row_threads = 256;

// A query block of a head: delta = rowsum(d_out * out) and lse log2(e), 0 and +inf for rows that
// see no key or are past the sequence's last, whose probabilities are then zero; zeros to dq and
// its turns. Work of so many threads, whose passes are unrolled by `unrolled`.
template <attention_form form, sm90_backward_config config, int threads, int unrolled>
struct backward_preparation {
  using T = element_type<form.type>;
  static constexpr sm90_backward_plan plan = sm90_backward_plan_of(form, config);
  static constexpr int bm = config.bm;
  // Lanes of a row: a power of two; each has 8 elements.
  static constexpr int lanes = form.dim <= 64 ? 8 : form.dim <= 128 ? 16 : 32;
  static constexpr int rows = threads / lanes;  // of a pass

  // out and d_out to L2, of block `block` of all sequences'; `thread`: its number.
  static __device__ __forceinline__ void prefetch(const sm90_backward_params& params, int block,
                                                  int head, int thread) {
    const attention_params& attention = params.attention;
    const query_block own = query_block_of<form, bm>(attention, block);
    const i64 index = own.sequence.index;
    for (int row = own.first_row + thread; row < smaller(own.first_row + bm, own.sequence.q_len);
         row += threads) {
      prefetch_l2(static_cast<const T*>(attention.out) + index * attention.out_batch +
                      static_cast<i64>(row) * attention.out_row + head * form.dim,
                  form.dim * 2);
      prefetch_l2(static_cast<const T*>(attention.d_out) + index * params.d_out_batch +
                      static_cast<i64>(row) * params.d_out_row + head * form.dim,
                  form.dim * 2);
    }
  }

  static __device__ __forceinline__ void run(const sm90_backward_params& params, int block,
                                             int head, int thread) {
    const attention_params& attention = params.attention;
    const int blocks = params.padded_rows / bm;
    const i64 number = static_cast<i64>(head) * blocks + block;
    float4* const dq = reinterpret_cast<float4*>(attention.dq_partials + number * plan.dq_words);
    for (int i = thread; i < plan.dq_words / 4; i += threads) dq[i] = make_float4(0, 0, 0, 0);
    if (form.deterministic && thread < config.mma_warpgroups) {
      params.turns[number * config.mma_warpgroups + thread] = 0;
    }
    const query_block own = query_block_of<form, bm>(attention, block);
    const attention_sequence& sequence = own.sequence;
    const i64 index = form.packed_sequences() ? 0 : sequence.index;
    const T* const out = static_cast<const T*>(attention.out) + index * attention.out_batch;
    const T* const d_out = static_cast<const T*>(attention.d_out) + index * params.d_out_batch;
    const float* const lse =
        attention.lse + (form.packed_sequences()
                             ? static_cast<i64>(head) * attention.q_len + sequence.q_first
                             : (index * attention.heads + head) * attention.q_len);
    const int lane = thread % lanes;
    const i64 column = head * form.dim + lane * 8;
#pragma unroll(unrolled)
    for (int pass = 0; pass < bm; pass += rows) {
      const int in_block = pass + thread / lanes, row = own.first_row + in_block;
      const bool valid = in_block < bm && row < sequence.q_len;
      const float natural = valid ? lse[row] : minus_infinity();
      float sum = 0.0f;
      if (valid && lane * 8 < form.dim) {
        const i64 token = sequence.q_first + row;
        const vector16 a = load_dependent(out + token * attention.out_row + column);
        const vector16 b = load_dependent(d_out + token * params.d_out_row + column);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float a0, a1, b0, b1;
          unpack<T>(a.word[i], a0, a1);
          unpack<T>(b.word[i], b0, b1);
          sum += a0 * b0 + a1 * b1;
        }
      }
#pragma unroll
      for (int distance = lanes / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(~0u, sum, distance);
      }
      if (lane == 0 && in_block < bm) {
        const bool sees = natural != minus_infinity();  // NaN, too
        const i64 at = static_cast<i64>(head) * params.padded_rows + block * bm + in_block;
        attention.delta[at] = sees ? sum : 0.0f;
        params.lse_log2[at] = sees ? natural * log2_e : -minus_infinity();
      }
    }
  }
};

// A query block of a head, of a launch that prepares all heads, or those that are scheduled first.
template <attention_form form, sm90_backward_config config>
__device__ __forceinline__ void prepare_query_block(const sm90_backward_params& params) {
  wait_and_launch_dependents();
  const attention_params& attention = params.attention;
  int block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  if constexpr (config.beside) {
    if (block == 0 && head == 0) {
      for (int i = threadIdx.x; i < attention.batch * attention.kv_heads;
           i += backward_row_threads) {
        params.prepared[i] = params.finished[i] = 0;
      }
    }
    block += head / attention.heads * ceil_div(attention.q_len, config.bm);
    head %= attention.heads;
  }
  backward_preparation<form, config, backward_row_threads, config.bm>::run(params, block, head,
                                                                           threadIdx.x);
}

// A query block of a head: dq from the order in which the main kernel's threads have it, times the
// scale, to rows. Work of so many warps; each has eight queries at a time, and `loads` of every 16
// columns in flight together.
template <attention_form form, sm90_backward_config config, int warps, int loads>
struct backward_conversion {
  using T = element_type<form.type>;
  static constexpr sm90_backward_plan plan = sm90_backward_plan_of(form, config);
  static constexpr int queries = 8;
  static constexpr int parts = form.dim / 16;  // of 16 columns
  static_assert(parts % loads == 0);

  // Block `block` of all sequences'; `warp`: its number.
  static __device__ __forceinline__ void run(const sm90_backward_params& params, int block,
                                             int head, int warp) {
    const attention_params& attention = params.attention;
    const query_block own = query_block_of<form, config.bm>(attention, block);
    const i64 number = static_cast<i64>(head) * (params.padded_rows / config.bm) + block;
    const int rows = smaller(config.bm, own.sequence.q_len - own.first_row);
    T* const to = static_cast<T*>(attention.dq) +
                  (form.packed_sequences() ? 0 : own.sequence.index * params.dq_batch) +
                  static_cast<i64>(own.sequence.q_first + own.first_row) * params.dq_row +
                  head * form.dim;
    for (int first = warp * queries; first < rows; first += warps * queries) {
      convert(to + static_cast<i64>(first) * params.dq_row, params.dq_row,
              attention.dq_partials + number * plan.dq_words, first, rows - first, attention.scale);
    }
  }

  // A lane has one float4 of each part: the accumulators of columns d, d + 8 and queries q, q + 1.
  // A warp's are two 8x8 matrices, whose transposes have two columns of one query in each lane;
  // two neighbouring lanes then share them out, so that each stores four columns. `dq`: of the
  // block.
  static __device__ __forceinline__ void convert(T* to, int row_elements, const float* dq,
                                                 int first_query, int rows, float scale) {
    constexpr int groups = plan.dq_columns / queries;
    const int number = first_query / queries, lane = threadIdx.x % 32;
    const int warpgroup = plan.splits_dq_rows ? number / groups : 0, group = number % groups;
    const bool odd = lane % 2 != 0;
    const float* const from = dq + (group * 128 + lane) * 4;
    T* const own = to + static_cast<i64>(lane / 4) * row_elements + lane % 4 / 2 * 4 + odd * 8;
#pragma unroll
    for (int first = 0; first < parts; first += loads) {
      float4 values[loads];
#pragma unroll
      for (int i = 0; i < loads; ++i) {
        const int part = first + i, dq_tile = warpgroup * plan.dq_tiles + part / 4;
        values[i] = load_coherent(from + (dq_tile * groups * 128 + part % 4 * 32) * 4);
      }
#pragma unroll
      for (int i = 0; i < loads; ++i) {
        const float4 value = values[i];
        const u32 low = transpose_matrix(pack<T>(value.x * scale, value.y * scale));
        const u32 high = transpose_matrix(pack<T>(value.z * scale, value.w * scale));
        const u32 other = __shfl_xor_sync(~0u, odd ? low : high, 1);
        if (lane / 4 < rows) {
          *reinterpret_cast<uint2*>(own + (first + i) * 16) =
              odd ? make_uint2(other, high) : make_uint2(low, other);
        }
      }
    }
  }
};

// A query block of a head, of a launch that converts all heads, or the last ones.
template <attention_form form, sm90_backward_config config>
__device__ __forceinline__ void convert_query_block(const sm90_backward_params& params) {
  wait_and_launch_dependents();
  int block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  if constexpr (config.beside) {
    const attention_params& attention = params.attention;
    head += params.first_converted;
    block += head / attention.heads * ceil_div(attention.q_len, config.bm);
    head %= attention.heads;
  }
  constexpr int warps = backward_row_threads / 32;
  backward_conversion<form, config, warps, form.dim / 16>::run(params, block, head,
                                                               threadIdx.x / 32);
}

// d_sinks of a head: the sink's probability takes from every row's others, and it has no value:
// minus the sum of P_sink * delta, in an order that does not change.
__device__ __forceinline__ void sink_gradient(const sm90_backward_params& params) {
  wait_for_dependencies();
  __shared__ float sums[backward_row_threads / 32];
  const int head = static_cast<int>(blockIdx.x);
  const float sink = params.attention.sinks[head] * log2_e;
  const i64 first = static_cast<i64>(head) * params.padded_rows;
  float sum = 0.0f;
  for (int row = threadIdx.x; row < params.padded_rows; row += backward_row_threads) {
    const float lse = params.lse_log2[first + row];
    if (lse != -minus_infinity()) sum -= exp2f(sink - lse) * params.attention.delta[first + row];
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (const float part : sums) total += part;
    params.attention.d_sinks[head] = total;
  }
}

}  // namespace fftune

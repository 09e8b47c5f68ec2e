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
// its turns.
template <attention_form form, sm90_backward_config config>
struct backward_preparation {
  using T = element_type<form.type>;
  static constexpr sm90_backward_plan plan = sm90_backward_plan_of(form, config);
  static constexpr int bm = config.bm;
  // Lanes of a row: a power of two; each has 8 elements.
  static constexpr int lanes = form.dim <= 64 ? 8 : form.dim <= 128 ? 16 : 32;
  static constexpr int rows = backward_row_threads / lanes;  // of a pass

  static __device__ __forceinline__ void run(const sm90_backward_params& params) {
    wait_and_launch_dependents();
    const attention_params& attention = params.attention;
    const int block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
    const int blocks = params.padded_rows / bm;
    const i64 number = static_cast<i64>(head) * blocks + block;
    float4* const dq = reinterpret_cast<float4*>(attention.dq_partials + number * plan.dq_words);
    for (int i = threadIdx.x; i < plan.dq_words / 4; i += backward_row_threads) {
      dq[i] = make_float4(0, 0, 0, 0);
    }
    if (form.deterministic && threadIdx.x < config.mma_warpgroups) {
      params.turns[number * config.mma_warpgroups + threadIdx.x] = 0;
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
    const int lane = threadIdx.x % lanes;
    const i64 column = head * form.dim + lane * 8;
#pragma unroll
    for (int pass = 0; pass < bm; pass += rows) {
      const int in_block = pass + threadIdx.x / lanes, row = own.first_row + in_block;
      const bool valid = in_block < bm && row < sequence.q_len;
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
        const float natural = valid ? lse[row] : minus_infinity();
        const bool sees = natural != minus_infinity();  // NaN, too
        const i64 at = static_cast<i64>(head) * params.padded_rows + block * bm + in_block;
        attention.delta[at] = sees ? sum : 0.0f;
        params.lse_log2[at] = sees ? natural * log2_e : -minus_infinity();
      }
    }
  }
};

// A query block of a head: dq from the order in which the main kernel's threads have it, times the
// scale, to rows. A warp has eight queries at a time.
template <attention_form form, sm90_backward_config config>
struct backward_conversion {
  using T = element_type<form.type>;
  static constexpr sm90_backward_plan plan = sm90_backward_plan_of(form, config);
  static constexpr int queries = 8, warps = backward_row_threads / 32;
  static constexpr int parts = plan.slabs * 4;       // of 16 columns
  static constexpr int pitch = plan.slabs * 64 + 8;  // elements; the 16 bytes more spread the banks

  // A lane has one float4 of each part: the accumulators of columns d, d + 8 and queries q, q + 1.
  // A warp's are two 8x8 matrices, which stmatrix transposes into rows at `tile`. `dq`: of the
  // block.
  static __device__ __forceinline__ void convert(u32 tile, const float* dq, int first_query,
                                                 float scale) {
    constexpr int groups = plan.dq_columns / queries;
    const int number = first_query / queries, lane = threadIdx.x % 32;
    const int warpgroup = plan.splits_dq_rows ? number / groups : 0, group = number % groups;
    float4 values[parts];
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const int dq_tile = warpgroup * plan.dq_tiles + part / 4;
      const int i = (dq_tile * groups + group) * 128 + part % 4 * 32 + lane;
      values[part] = load_coherent(dq + i * 4);
    }
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const float4 value = values[part];
      const u32 words[2] = {pack<T>(value.x * scale, value.y * scale),
                            pack<T>(value.z * scale, value.w * scale)};
      store_matrices_transposed(tile + ((lane % 8) * pitch + part * 16 + lane % 16 / 8 * 8) * 2,
                                words);
    }
  }

  static __device__ __forceinline__ void run(const sm90_backward_params& params) {
    wait_and_launch_dependents();
    __shared__ alignas(16) u16 tiles[warps][queries * pitch];
    const attention_params& attention = params.attention;
    const int block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u16* const tile = tiles[warp];
    const query_block own = query_block_of<form, config.bm>(attention, block);
    const i64 number = static_cast<i64>(head) * (params.padded_rows / config.bm) + block;
    T* const to = static_cast<T*>(attention.dq) +
                  (form.packed_sequences() ? 0 : own.sequence.index * params.dq_batch) +
                  static_cast<i64>(own.sequence.q_first + own.first_row) * params.dq_row +
                  head * form.dim;
    const int rows = smaller(config.bm, own.sequence.q_len - own.first_row);
    for (int first = warp * queries; first < rows; first += warps * queries) {
      convert(static_cast<u32>(__cvta_generic_to_shared(tile)),
              attention.dq_partials + number * plan.dq_words, first, attention.scale);
      __syncwarp();
      constexpr int vectors = form.dim / 8;  // of a row
      for (int i = lane; i < smaller(queries, rows - first) * vectors; i += 32) {
        const int row = i / vectors, column = i % vectors * 8;
        *reinterpret_cast<float4*>(to + static_cast<i64>(first + row) * params.dq_row + column) =
            *reinterpret_cast<const float4*>(tile + row * pitch + column);
      }
      __syncwarp();
    }
  }
};

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

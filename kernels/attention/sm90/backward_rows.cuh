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

// Stores those of 8 features, from number `first` on, that a head has: with `any_exists` at least
// one. Heads are aligned to no more than their features are.
template <int dim, bool any_exists, class T>
__device__ __forceinline__ void store_features(T* to, int first, float4 value) {
  constexpr int bytes = attention_access_bytes(dim);
  if constexpr (bytes == 16) {
    if (any_exists || first < dim) *reinterpret_cast<float4*>(to) = value;
  } else if constexpr (bytes == 8) {
    if (first < dim) *reinterpret_cast<float2*>(to) = float2{value.x, value.y};
    if (first + 4 < dim) *reinterpret_cast<float2*>(to + 4) = float2{value.z, value.w};
  } else {
    const float words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i * 2 < dim) *reinterpret_cast<float*>(to + i * 2) = words[i];
    }
  }
}

// Loads them, zeros behind the last one.
template <int dim, class T>
__device__ __forceinline__ vector16 load_features(const T* from, int first) {
  if constexpr (dim % 8 == 0) return load_dependent(from);
  vector16 value;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    value.word[i] = first + i * 2 < dim ? load_dependent_word(from + i * 2) : 0;
  }
  return value;
}

// A query block of a head: delta = rowsum(d_out * out) and lse log2(e), 0 and +inf for rows that
// see no key or are past the sequence's last, whose probabilities are then zero; zeros to dq and
// its turns. `threads` threads do it, in passes that are unrolled by `unrolled`.
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
        const vector16 a =
            load_features<form.dim>(out + token * attention.out_row + column, lane * 8);
        const vector16 b =
            load_features<form.dim>(d_out + token * params.d_out_row + column, lane * 8);
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
// scale, to rows. A warp has eight queries at a time.
template <attention_form form, sm90_backward_config config>
struct backward_conversion {
  using T = element_type<form.type>;
  static constexpr sm90_backward_plan plan = sm90_backward_plan_of(form, config);
  static constexpr int queries = 8, warps = backward_row_threads / 32;
  static constexpr int parts = (form.dim + 15) / 16;  // of 16 columns
  static constexpr int pitch = plan.slabs * 64 + 8;  // elements; the 16 bytes more spread the banks

  // The block is number `block` of all sequences'.
  int rows;
  T* to;
  const float* dq;
  __device__ __forceinline__ backward_conversion(const sm90_backward_params& params, int block,
                                                 int head) {
    const attention_params& attention = params.attention;
    const query_block own = query_block_of<form, config.bm>(attention, block);
    const i64 number = static_cast<i64>(head) * (params.padded_rows / config.bm) + block;
    rows = smaller(config.bm, own.sequence.q_len - own.first_row);
    to = static_cast<T*>(attention.dq) +
         (form.packed_sequences() ? 0 : own.sequence.index * params.dq_batch) +
         static_cast<i64>(own.sequence.q_first + own.first_row) * params.dq_row + head * form.dim;
    dq = attention.dq_partials + number * plan.dq_words;
  }

  // Calls store(part, words) for each part, whose loads are in flight together, `loads` at a time.
  // A lane has one float4 of each: the accumulators of columns d, d + 8 and queries q, q + 1, so
  // that a warp's words are two transposed 8x8 matrices.
  template <int loads, class Store>
  __device__ __forceinline__ void for_parts(int first_query, float scale,
                                            const Store& store) const {
    static_assert(parts % loads == 0);
    constexpr int groups = plan.dq_columns / queries;
    const int number = first_query / queries, lane = threadIdx.x % 32;
    const int warpgroup = plan.splits_dq_rows ? number / groups : 0, group = number % groups;
#pragma unroll
    for (int first = 0; first < parts; first += loads) {
      float4 values[loads];
#pragma unroll
      for (int i = 0; i < loads; ++i) {
        const int dq_tile = warpgroup * plan.dq_tiles + (first + i) / 4;
        int at = (dq_tile * groups + group) * 128 + (first + i) % 4 * 32 + lane;
        if constexpr (plan.last_dq_threads < 128) {
          // Fewer threads have columns of the last slab.
          const int slab = (first + i) / 4;
          const int threads = slab + 1 < plan.slabs ? 128 : plan.last_dq_threads;
          at = warpgroup * (plan.dq_share / 4) + slab * groups * 128 + group * threads +
               (first + i) % 4 * 32 + lane;
        }
        values[i] = load_coherent(dq + at * 4);
      }
#pragma unroll
      for (int i = 0; i < loads; ++i) {
        const float4 value = values[i];
        const u32 words[2] = {pack<T>(value.x * scale, value.y * scale),
                              pack<T>(value.z * scale, value.w * scale)};
        store(first + i, words);
      }
    }
  }

  // By a block of threads. stmatrix transposes.
  __device__ __forceinline__ void run(const sm90_backward_params& params) const {
    __shared__ alignas(16) u16 tiles[warps][queries * pitch];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u16* const tile = tiles[warp];
    const u32 own = static_cast<u32>(__cvta_generic_to_shared(tile)) +
                    (lane % 8 * pitch + lane % 16 / 8 * 8) * 2;
    for (int first = warp * queries; first < rows; first += warps * queries) {
      for_parts<parts>(first, params.attention.scale, [&](int part, const u32(&words)[2]) {
        store_matrices_transposed(own + part * 32, words);
      });
      __syncwarp();
      constexpr int vectors = (form.dim + 7) / 8;  // of a row
      for (int i = lane; i < smaller(queries, rows - first) * vectors; i += 32) {
        const int row = i / vectors, column = i % vectors * 8;
        store_features<form.dim, true>(
            to + static_cast<i64>(first + row) * params.dq_row + column, column,
            *reinterpret_cast<const float4*>(tile + row * pitch + column));
      }
      __syncwarp();
    }
  }

  // By warp `own` of `count`, without shared memory. A transpose has two columns of one query in
  // each lane; two neighbouring lanes share out those of both matrices, so that each stores four.
  __device__ __forceinline__ void run_beside(const sm90_backward_params& params, int own,
                                             int count) const {
    const int lane = threadIdx.x % 32;
    const bool odd = lane % 2 != 0;
    T* const column = to + lane % 4 / 2 * 4 + odd * 8;
    for (int first = own * queries; first < rows; first += count * queries) {
      const int row = first + lane / 4;
      T* const of_row = column + static_cast<i64>(row) * params.dq_row;
      constexpr int loads = parts % 4 == 0 ? 4 : parts % 2 == 0 ? 2 : 1;
      for_parts<loads>(first, params.attention.scale, [&](int part, const u32(&words)[2]) {
        const u32 low = transpose_matrix(words[0]), high = transpose_matrix(words[1]);
        const u32 other = __shfl_xor_sync(~0u, odd ? low : high, 1);
        if (row < rows) {
          *reinterpret_cast<uint2*>(of_row + part * 16) =
              odd ? make_uint2(other, high) : make_uint2(low, other);
        }
      });
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
  backward_conversion<form, config>(params, block, head).run(params);
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

// Scores of keys for the choice of indexer: sum_h weights_h relu(q_h · k).
//
//   indexer_scores   mma.sync. The keys of a warp are the rows of its tiles, and heads their
//                    columns: a thread adds up the heads of its rows in registers. It holds its
//                    part of its keys in registers, and a query after the other comes to shared
//                    memory.
//                    Grid: (blocks of keys, parts of the queries, sequences). Block:
//                    config.threads()
//   indexer_simple   a thread has a key. Any type and size: the fallback.
//                    Grid: (blocks of keys, queries of all sequences), which loops. Block: 128
//                    threads
//
// Features: a thread loads eight of a row at once, 8 (lane % 4) + 0..7 of 32, of keys and of
// queries. As fragments of two steps they are features of other places, the same of both operands,
// and a sum of products has no order. Keys of e4m3 become numbers of T, exactly, and the scale of a
// key is a factor of its score.
#include "attention/e4m3_tile.cuh"
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/vectors.cuh"
#include "indexer/visible.cuh"

namespace fftune {

// NaN stays NaN.
__device__ __forceinline__ float relu_of_product(float value) {
  return larger_magnitude::join(value, 0.0f);
}

template <indexer_form form, indexer_config config>
class indexer_scores_kernel {
  using T = element_type<form.type>;
  static constexpr int dim = form.dim, heads = form.heads, m_tiles = config.m_tiles;
  static constexpr int steps = config.steps(form), blocks = config.blocks(form);
  static constexpr int row_bytes = config.row_bytes(form), threads = config.threads();
  static_assert(dim % 8 == 0 && m_tiles <= 2 && row_bytes % 128 == 64);
  using keys_of_thread = u32[m_tiles][2][steps][4];

  // Starts to copy a query and its weights; padding is zero.
  static __device__ __forceinline__ void load_query(const indexer_params& p, i64 row, u32 to) {
    const T* const q = static_cast<const T*>(p.q) + row * (heads * dim);
    constexpr int chunks = steps * 4;
    for (int i = threadIdx.x; i < blocks * 8 * chunks; i += threads) {
      const int head = i / chunks, chunk = i % chunks;
      const bool exists = head < heads && chunk * 8 < dim;
      copy_async(to + head * row_bytes + chunk * 16, q + (exists ? head * dim + chunk * 8 : 0),
                 exists);
    }
    const float* const weights = p.weights + row * heads;
    for (int head = threadIdx.x; head < blocks * 8; head += threads) {
      const bool exists = head < heads;
      copy_async_narrow<4>(to + config.weights_at(form) + head * 4, weights + (exists ? head : 0),
                           exists);
    }
  }

  // Rows of this thread from `first` on; those behind the length are zeros.
  static __device__ __forceinline__ void load_keys(const indexer_params& p, int sequence, int first,
                                                   int length, keys_of_thread& keys) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = first + tile * 16 + half * 8 + lane / 4;
        const i64 place = key < length ? indexer_place<form>(p, sequence, key).key : -1;
#pragma unroll
        for (int step = 0; step < steps; ++step) {
          const int column = step * 32 + lane % 4 * 8;
          vector16 value = {};
          if (place >= 0 && column < dim) {
            const i64 at = place + column;
            if constexpr (form.e4m3) {
              const uint2 bytes = *reinterpret_cast<const uint2*>(static_cast<const u8*>(p.k) + at);
              value.word[0] = e4m3_pair<T, 0, 1>(bytes.x);
              value.word[1] = e4m3_pair<T, 2, 3>(bytes.x);
              value.word[2] = e4m3_pair<T, 0, 1>(bytes.y);
              value.word[3] = e4m3_pair<T, 2, 3>(bytes.y);
            } else {
              value = load_dependent(static_cast<const T*>(p.k) + at);
            }
          }
#pragma unroll
          for (int word = 0; word < 4; ++word) keys[tile][half][step][word] = value.word[word];
        }
      }
    }
  }

  // Scores of a query in shared memory, of this thread's rows and heads.
  static __device__ __forceinline__ void multiply(const keys_of_thread& keys, u32 query,
                                                  float (&sum)[m_tiles][2]) {
    const int lane = threadIdx.x % 32;
    const u32 fragment = query + lane / 4 * row_bytes + lane % 4 * 16;
    const u32 weights = query + config.weights_at(form) + lane % 4 * 8;
#pragma unroll 2
    for (int block = 0; block < blocks; ++block) {
      float c[m_tiles][4] = {};
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        const float4 value = load_shared(fragment + block * 8 * row_bytes + step * 64);
        const u32 b[2][2] = {{__float_as_uint(value.x), __float_as_uint(value.y)},
                             {__float_as_uint(value.z), __float_as_uint(value.w)}};
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
          for (int tile = 0; tile < m_tiles; ++tile) {
            const u32 a[4] = {keys[tile][0][step][odd * 2], keys[tile][1][step][odd * 2],
                              keys[tile][0][step][odd * 2 + 1], keys[tile][1][step][odd * 2 + 1]};
            mma_16x8x16<T>(c[tile], a, b[odd]);
          }
        }
      }
      const float2 weight = load_shared_pair(weights + block * 32);
#pragma unroll
      for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sum[tile][half] += weight.x * relu_of_product(c[tile][half * 2]);
          sum[tile][half] += weight.y * relu_of_product(c[tile][half * 2 + 1]);
        }
      }
    }
  }

 public:
  static __device__ __forceinline__ void run(const indexer_params& p, u32 shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sequence = blockIdx.z;
    wait_and_launch_dependents();
    const int length = indexer_length<form.lengths>(p, sequence);
    const int first_key = static_cast<int>(blockIdx.x) * config.keys();
    const int begin = static_cast<int>(blockIdx.y) * p.queries_of_cta;
    const int end = smaller(begin + p.queries_of_cta, p.queries);
    // The first query that sees the first key.
    const int first = larger(begin, first_key - length + p.queries);
    if (first_key >= length || first >= end) return;

    const i64 rows = static_cast<i64>(sequence) * p.queries;
    load_query(p, rows + first, shared);
    copy_async_commit();
    const int key = first_key + warp * m_tiles * 16;
    keys_of_thread keys;
    load_keys(p, sequence, key, length, keys);
    // The key whose scores this lane stores: of the four lanes of a row each has another one.
    const int own_row = key + lane % 4 / 2 * 16 + lane % 2 * 8 + lane / 4;
    [[maybe_unused]] float scale = 1;
    if constexpr (form.e4m3) {
      const i64 place = own_row < length ? indexer_place<form>(p, sequence, own_row).scale : -1;
      if (place >= 0) scale = p.k_scale[place];
    }
    for (int query = first; query < end; ++query) {
      const u32 stage = shared + (query - first) % 2 * config.stage_bytes(form);
      if (query + 1 < end) {
        load_query(p, rows + query + 1,
                   shared + (query + 1 - first) % 2 * config.stage_bytes(form));
      }
      copy_async_commit();
      copy_async_wait<1>();
      __syncthreads();
      float sum[m_tiles][2] = {};
      multiply(keys, stage, sum);
      const int visible = indexer_visible(p, query, length);
      float* const scores = p.scores + (rows + query) * p.kv_len;
#pragma unroll
      for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float all = sum[tile][half];
          all += __shfl_xor_sync(~0u, all, 1);
          all += __shfl_xor_sync(~0u, all, 2);
          if (lane % 4 == tile * 2 + half && own_row < visible) {
            scores[own_row] = form.e4m3 ? all * scale : all;
          }
        }
      }
      __syncthreads();  // the query is read
    }
    copy_async_wait<0>();
  }
};

template <indexer_form form, indexer_config config>
__global__ void __launch_bounds__(config.threads())
    indexer_scores(const __grid_constant__ indexer_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  indexer_scores_kernel<form, config>::run(p, shared_address(shared_memory));
}

template <indexer_form form>
__global__ void __launch_bounds__(128) indexer_simple(const __grid_constant__ indexer_params p) {
  using T = element_type<form.type>;
  wait_and_launch_dependents();
  const int key = static_cast<int>(blockIdx.x * 128 + threadIdx.x);
  const i64 rows = static_cast<i64>(p.batch) * p.queries;
  for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
    const int sequence = static_cast<int>(row / p.queries);
    const int query = static_cast<int>(row % p.queries);
    if (key >= indexer_visible(p, query, indexer_length<form.lengths>(p, sequence))) continue;
    using K = element_type<form.e4m3 ? element::fp8 : form.type>;
    const key_place place = indexer_place<form>(p, sequence, key);
    const bool exists = place.key >= 0;
    const K* const k = static_cast<const K*>(p.k) + place.key;
    const T* q = static_cast<const T*>(p.q) + row * (form.heads * form.dim);
    float score = 0;
    for (int head = 0; head < form.heads; ++head, q += form.dim) {
      float product = 0;
      for (int i = 0; i < form.dim; ++i)
        product += to_float(q[i]) * (exists ? to_float(k[i]) : 0.0f);
      score += p.weights[row * form.heads + head] * relu_of_product(product);
    }
    if constexpr (form.e4m3) score *= exists ? p.k_scale[place.scale] : 1.0f;
    p.scores[row * p.kv_len + key] = score;
  }
}

}  // namespace fftune

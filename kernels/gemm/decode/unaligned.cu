// The decode engine for rows of B that are not aligned to 16 bytes: C = epilogue(A B^T) for up to
// 16 rows of A and any n and k, at the speed of reading B once.
//
// A row of B begins up to 7 elements behind a 16-byte boundary. Rows that are `period` apart begin
// equally far behind one. A block takes rows of one such alignment, loads them from the boundary
// on, and multiplies them by tokens that lie equally far behind zeros: copies that the launch
// before has made (padded/copy.cu). No element moves. What lies around the row is replaced by
// zeros, since it may be NaN.
//
//     boundary |       |       |       |
//     row        [b0 b1 b2 b3 ...
//     tokens   0 [a0 a1 a2 a3 ...
//
// Shared memory: the warps' accumulators, which share k (decode/stream.cuh).
#include "common/async.cuh"
#include "common/vectors.cuh"
#include "gemm/decode/stream.cuh"
#include "gemm/decode/unaligned_config.cuh"
#include "gemm/epilogue_ops.cuh"

namespace fftune {

template <gemm_form form, unaligned_config config>
class unaligned_kernel {
  using T = element_type<form.ab>;
  using ops = epilogue_ops<form>;
  static constexpr int b_operands = form.b_operands();
  static constexpr stream_shape shape = config.shape(b_operands);
  static constexpr int n_fragments = shape.n_fragments(), halves = shape.halves();
  static constexpr int unroll = config.unroll, k_step = 32, k_group = k_step * unroll;
  using reduction = warp_reduction<shape, config.warps>;
  static_assert(n_fragments <= config.warps);

  // Zeros instead of the elements outside of [begin, end) of a chunk.
  static __device__ __forceinline__ void clear_outside(vector16& chunk, int begin, int end) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 mask = 0;
      if (2 * i >= begin && 2 * i < end) mask |= 0xffffu;
      if (2 * i + 1 >= begin && 2 * i + 1 < end) mask |= 0xffff0000u;
      chunk.word[i] &= mask;
    }
  }
  // The first `count` elements of a chunk behind which the matrix ends.
  static __device__ __forceinline__ vector16 load_last(const T* from, int count) {
    vector16 chunk = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) chunk.word[i / 2] |= static_cast<u32>(from[i].bits) << i % 2 * 16;
    }
    return chunk;
  }

  // Stores value number `index` of the accumulators of one element of C, then those after it.
  template <int index = 0>
  static __device__ __forceinline__ void store(const gemm_params& p, int token, i64 column,
                                               const float (&sum)[b_operands]) {
    const i64 at = static_cast<i64>(token) * p.n + column;
    float value = ops::template stored<index>(sum), same = value;
    if constexpr (form.changes_columns()) {
      ops::apply_broadcasts(ops::column_twice(p.broadcasts, static_cast<int>(column)), value, same);
    }
    if constexpr (form.adds_source) {
      value += to_float(static_cast<const T*>(ops::source(p, 0))[at]);
    }
    void* const to = ops::destination(p, index, 0);
    if constexpr (form.c != form.ab) {
      static_cast<float*>(to)[at] = value;
    } else {
      static_cast<T*>(to)[at] = from_float<T>(value);
    }
    if constexpr (index + 1 < ops::stored_values) store<index + 1>(p, token, column, sum);
  }

 public:
  static __device__ __forceinline__ void run(const unaligned_params& all, float* shared) {
    const gemm_params& p = all.gemm;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int alignment = static_cast<int>(blockIdx.x) % all.period;
    const i64 first = static_cast<i64>(blockIdx.x) / all.period * config.rows;
    launch_dependents();
    if (first * all.period + alignment >= p.n) {
      wait_for_dependencies();
      return;
    }
    const i64 last = (p.n - 1 - alignment) / all.period;  // row of this alignment
    const int shift = static_cast<int>(static_cast<i64>(alignment) * p.k % 8);
    const int end = shift + p.k, lane_k = lane % 4 * 8;
    const i64 elements = static_cast<i64>(p.n) * p.k;  // of B

    i64 begin[n_fragments];  // of the lane's rows, from the boundary
#pragma unroll
    for (int j = 0; j < n_fragments; ++j) {
      const i64 row = first + j * 8 + lane / 4;
      begin[j] = ((row < last ? row : last) * all.period + alignment) * p.k - shift;
    }
    const T* rows[halves];
    bool exists[halves];
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      const int token = lane / 4 + half * 8;
      exists[half] = token < p.m;
      rows[half] = static_cast<const T*>(all.tokens) +
                   (static_cast<i64>(alignment) * p.m + token) * all.pitch;
    }

    float sum[b_operands][n_fragments][4] = {};
    bool waited = false;
    for (int at = warp * k_group + lane_k; at - lane_k < end; at += config.warps * k_group) {
      vector16 b[b_operands][n_fragments][unroll], a[halves][unroll];
#pragma unroll
      for (int step = 0; step < unroll; ++step) {
        const int chunk = at + step * k_step;
#pragma unroll
        for (int operand = 0; operand < b_operands; ++operand) {
          const T* const matrix = static_cast<const T*>(p.b[0][operand]);
#pragma unroll
          for (int j = 0; j < n_fragments; ++j) {
            const i64 from = begin[j] + chunk;
            vector16& to = b[operand][j][step];
            to = {};
            if (chunk < end) {
              if (from + 8 <= elements) {
                to = load_streaming(matrix + from);
              } else {
                to = load_last(matrix + from, static_cast<int>(elements - from));
              }
            }
          }
        }
      }
      if (!waited) wait_for_dependencies();
      waited = true;
#pragma unroll
      for (int step = 0; step < unroll; ++step) {
        const int chunk = at + step * k_step;
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          a[half][step] =
              exists[half] && chunk < end ? load_dependent(rows[half] + chunk) : vector16{};
        }
      }
      __syncwarp();  // keeps all loads before the MMAs (decode/stream.cuh)
#pragma unroll
      for (int step = 0; step < unroll; ++step) {
        const int chunk = at + step * k_step;
        const bool whole = chunk >= shift && chunk + 8 <= end;
        const vector16& low = a[0][step];
        const vector16 high = halves == 2 ? a[halves - 1][step] : vector16{};
#pragma unroll
        for (int operand = 0; operand < b_operands; ++operand) {
#pragma unroll
          for (int j = 0; j < n_fragments; ++j) {
            vector16& own = b[operand][j][step];
            if (!whole) clear_outside(own, shift - chunk, end - chunk);
#pragma unroll
            for (int pair = 0; pair < 4; pair += 2) {
              mma_pairs<T>(sum[operand][j], low.word, high.word, own.word, pair);
            }
          }
        }
      }
    }
    if (!waited) wait_for_dependencies();

    reduction::store(shared, sum, warp, lane);
    __syncthreads();
    if (warp >= n_fragments) return;
    float total[b_operands][4] = {};
    reduction::add(total, shared, warp, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = lane / 4 + i / 2 * 8;
      const i64 row = first + warp * 8 + lane % 4 * 2 + i % 2;
      if (i / 2 >= halves || token >= p.m || row > last) continue;
      float of[b_operands];
#pragma unroll
      for (int operand = 0; operand < b_operands; ++operand) of[operand] = total[operand][i];
      store(p, token, row * all.period + alignment, of);
    }
  }
};

// Grid: period * ceil(ceil(n / period) / rows). Block: config.threads(). Shared memory: that of the
// reduction of the shape's warps.
template <gemm_form form, unaligned_config config>
__global__ void __launch_bounds__(config.threads())
    unaligned_gemm(const __grid_constant__ unaligned_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  unaligned_kernel<form, config>::run(p, reinterpret_cast<float*>(shared_memory));
}

}  // namespace fftune

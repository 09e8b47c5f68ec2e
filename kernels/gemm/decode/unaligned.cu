// The decode engine for rows of B that are not aligned to 16 bytes: C = epilogue(A B^T) for up to
// 16 rows of A and any n and k, at the speed of reading B once.
//
// A row of B begins up to 7 elements behind a 16-byte boundary. Rows that are `period` apart begin
// equally far behind one. A block takes rows of one such alignment, loads them from the boundary
// on, and multiplies them by tokens that lie equally far behind zeros. No element of B moves. Zeros
// replace the elements around the row, which may be NaN.
//
//     boundary |       |       |       |
//     row        [b0 b1 b2 b3 ...
//     tokens   0 [a0 a1 a2 a3 ...
//
// The tokens are those of A where k is a multiple of 8; copies that the launch before has made
// (padded/copy.cu); or, `staged`, copies that the block makes in shared memory.
//
// k is cut into groups of 32 * unroll elements, one warp's after the other. Loads of a group are
// not checked. The rest, `unroll` steps of 32 elements at most, is shared out to warps, which load
// it together with their first group.
//
// Shared memory: the warps' accumulators, which share k (decode/stream.cuh); then staged tokens.
#include "common/async.cuh"
#include "common/vectors.cuh"
#include "gemm/decode/stream.cuh"
#include "gemm/decode/unaligned_config.cuh"
#include "gemm/epilogue_ops.cuh"
#include "gemm/padded/shifted.cuh"

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

  using weights = vector16[b_operands][n_fragments];
  using weight_group = vector16[b_operands][n_fragments][unroll];

  // `at`: the lane's first element of a group, behind the boundary.
  static __device__ __forceinline__ void load_group(const gemm_params& p, weight_group& to,
                                                    const i64 (&begin)[n_fragments], int at) {
#pragma unroll
    for (int operand = 0; operand < b_operands; ++operand) {
#pragma unroll
      for (int j = 0; j < n_fragments; ++j) {
        const T* const from = static_cast<const T*>(p.b[0][operand]) + begin[j] + at;
#pragma unroll
        for (int step = 0; step < unroll; ++step) {
          to[operand][j][step] = load_streaming(from + step * k_step);
        }
      }
    }
  }
  // The same of the lane's element `at` of the rest of k.
  static __device__ __forceinline__ void load_rest(const gemm_params& p, weights& to,
                                                   const i64 (&begin)[n_fragments], int at, int end,
                                                   i64 elements) {
#pragma unroll
    for (int operand = 0; operand < b_operands; ++operand) {
#pragma unroll
      for (int j = 0; j < n_fragments; ++j) {
        const T* const matrix = static_cast<const T*>(p.b[0][operand]);
        const i64 from = begin[j] + at;
        to[operand][j] = {};
        if (at >= end) continue;
        if (from + 8 <= elements) {
          to[operand][j] = load_streaming(matrix + from);
        } else {
          to[operand][j] = load_last(matrix + from, static_cast<int>(elements - from));
        }
      }
    }
  }
  static __device__ __forceinline__ void load_tokens(vector16 (&to)[halves],
                                                     const T* const (&rows)[halves],
                                                     const bool (&exists)[halves], int at) {
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      to[half] = {};
      if (!exists[half]) continue;
      if constexpr (config.staged) {
        to[half] = *reinterpret_cast<const vector16*>(rows[half] + at);
      } else {
        to[half] = load_dependent(rows[half] + at);
      }
    }
  }
  static __device__ __forceinline__ void multiply(float (&sum)[4], const vector16 (&a)[halves],
                                                  const vector16& b) {
    const vector16 high = halves == 2 ? a[halves - 1] : vector16{};
#pragma unroll
    for (int pair = 0; pair < 4; pair += 2) mma_pairs<T>(sum, a[0].word, high.word, b.word, pair);
  }

  // Copies the tokens to shared memory, behind `shift` zeros and before others. Chunks of 8
  // elements that lie within a row are shifted out of 32 aligned bytes; those at its ends take
  // elements.
  static __device__ __forceinline__ void stage_tokens(const unaligned_params& all, T* to,
                                                      int shift) {
    const gemm_params& p = all.gemm;
    const T* const a = static_cast<const T*>(p.a[0]);
    const int chunks = (p.k + shift + 7) / 8;
    // Without the first of a row and the last whole one, whose 32 bytes may reach beyond A.
    const int inner = larger((p.k + shift) / 8 - 2, 0), outer = chunks - inner;
    constexpr int together = 4;
    for (int first = static_cast<int>(threadIdx.x); first < p.m * inner;
         first += together * config.threads()) {
      vector16 low[together], high[together];
      u32 shifts[together];
      T* at[together];
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const int index = first + i * config.threads();
        if (index >= p.m * inner) break;
        const int token = static_cast<u32>(index) / static_cast<u32>(inner);
        const int chunk = index - token * inner + 1;
        const i64 from = static_cast<i64>(token) * p.k + chunk * 8 - shift;
        low[i] = load_dependent(a + from / 8 * 8);
        high[i] = load_dependent(a + from / 8 * 8 + 8);
        shifts[i] = static_cast<u32>(from) % 8;
        at[i] = to + token * all.pitch + chunk * 8;
      }
#pragma unroll
      for (int i = 0; i < together; ++i) {
        if (first + i * config.threads() >= p.m * inner) break;
        *reinterpret_cast<vector16*>(at[i]) = shifted(low[i], high[i], shifts[i]);
      }
    }
    for (int index = static_cast<int>(threadIdx.x); index < p.m * outer * 8;
         index += config.threads()) {
      const int token = index / (outer * 8), of_outer = index - token * outer * 8;
      const int element = of_outer < 8 ? of_outer : of_outer + inner * 8;
      const int column = element - shift;
      const bool is_there = column >= 0 && column < p.k;
      const volatile u16* const row =
          reinterpret_cast<const volatile u16*>(a) + static_cast<i64>(token) * p.k;
      to[token * all.pitch + element] = T{is_there ? row[column] : u16{0}};
    }
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
    const int groups = end / k_group;
    // The warp's step of the rest.
    const int step_of_rest = (warp - groups % config.warps + config.warps) % config.warps;
    const int rest = groups * k_group + step_of_rest * k_step + lane_k;
    const bool has_rest = step_of_rest < unroll && rest - lane_k < end;

    i64 begin[n_fragments];  // of the lane's rows, from the boundary
#pragma unroll
    for (int j = 0; j < n_fragments; ++j) {
      const i64 row = first + j * 8 + lane / 4;
      begin[j] = ((row < last ? row : last) * all.period + alignment) * p.k - shift;
    }

    vector16 b_of_rest[b_operands][n_fragments];
    if (has_rest) load_rest(p, b_of_rest, begin, rest, end, elements);
    vector16 b[b_operands][n_fragments][unroll];
    if (warp < groups) load_group(p, b, begin, warp * k_group + lane_k);

    wait_for_dependencies();
    T* const staged = reinterpret_cast<T*>(shared) + shape.reduction_bytes(config.warps) / 2;
    if constexpr (config.staged) {
      stage_tokens(all, staged, shift);
      __syncthreads();
    }
    const T* rows[halves];
    bool exists[halves];
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      const int token = lane / 4 + half * 8;
      exists[half] = token < p.m;
      rows[half] = config.staged ? staged + token * all.pitch
                                 : static_cast<const T*>(all.tokens) +
                                       (static_cast<i64>(alignment) * p.m + token) * all.pitch;
    }

    float sum[b_operands][n_fragments][4] = {};
    for (int group = warp; group < groups; group += config.warps) {
      const int at = group * k_group + lane_k;
      if (group != warp) load_group(p, b, begin, at);
      vector16 a[unroll][halves];
#pragma unroll
      for (int step = 0; step < unroll; ++step) {
        load_tokens(a[step], rows, exists, at + step * k_step);
      }
      __syncwarp();  // keeps all loads before the MMAs (decode/stream.cuh)
      if (at == 0) {
#pragma unroll
        for (int i = 0; i < b_operands * n_fragments; ++i) {
          clear_outside(b[i / n_fragments][i % n_fragments][0], shift, 8);
        }
      }
#pragma unroll
      for (int step = 0; step < unroll; ++step) {
#pragma unroll
        for (int i = 0; i < b_operands * n_fragments; ++i) {
          multiply(sum[i / n_fragments][i % n_fragments], a[step],
                   b[i / n_fragments][i % n_fragments][step]);
        }
      }
    }
    if (has_rest) {
      vector16 a[halves] = {};
      if (rest < end) load_tokens(a, rows, exists, rest);
#pragma unroll
      for (int i = 0; i < b_operands * n_fragments; ++i) {
        vector16& own = b_of_rest[i / n_fragments][i % n_fragments];
        clear_outside(own, shift - rest, end - rest);
        multiply(sum[i / n_fragments][i % n_fragments], a, own);
      }
    }

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
// reduction of the shape's warps, and of the staged tokens.
template <gemm_form form, unaligned_config config>
__global__ void __launch_bounds__(config.threads())
    unaligned_gemm(const __grid_constant__ unaligned_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  unaligned_kernel<form, config>::run(p, reinterpret_cast<float*>(shared_memory));
}

}  // namespace fftune

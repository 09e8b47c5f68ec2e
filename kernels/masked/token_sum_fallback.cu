// C = A^T B (+ addend) over the tokens of either expert, for any sizes, alignment and element type:
// the kernel of last resort. An expert without tokens has zeros.
//
// Of each expert one C [m, n], or two of two A that share B: a1 is null with one. A [k, m] and
// B [k, n] may be in the order of the mask [k]. Addends are null where there is none, or C itself.
// The tokens of an expert are added up in their order, 16 at a time through shared memory.
// Grid: 2 * results * ceil(m / 64) * ceil(n / 64). Block: 256 threads, 4 x 4 sums each.
#include "common/float16.cuh"
#include "gemm/row_groups.cuh"

namespace fftune {

template <class T, bool sorted_a, bool sorted_b>
__global__ void __launch_bounds__(256, 1)
    token_sum_fallback(const T* a0, const T* a1, const T* b, const T* true_addend0,
                       const T* true_addend1, const T* false_addend0, const T* false_addend1,
                       T* true_c0, T* true_c1, T* false_c0, T* false_c1, const u8* mask, int m,
                       int n, int k) {
  constexpr int tile = 64, depth = 16, side = 16, per_thread = tile / side, threads = 256;
  __shared__ u32 words[row_groups::shared_words];
  __shared__ u32 rows_of_a[depth], rows_of_b[depth];
  __shared__ float shared_a[depth][tile], shared_b[depth][tile];

  const row_groups groups = row_groups::build<threads>(mask, k, words);
  const u32 tiles_m = ceil_div(static_cast<u32>(m), static_cast<u32>(tile));
  const u32 tiles_n = ceil_div(static_cast<u32>(n), static_cast<u32>(tile));
  const u32 result = blockIdx.x / (tiles_m * tiles_n), within = blockIdx.x % (tiles_m * tiles_n);
  const int results = a1 == nullptr ? 1 : 2;
  const int group = result / results;
  const bool second = result % results == 1;
  const T* const a = second ? a1 : a0;
  const i64 first_m = static_cast<i64>(within / tiles_n) * tile;
  const i64 first_n = static_cast<i64>(within % tiles_n) * tile;
  const u32 begin = group == 0 ? 0 : groups.marked();
  const u32 count = group == 0 ? groups.marked() : k - groups.marked();
  const int row = threadIdx.x / side, column = threadIdx.x % side;

  float sum[per_thread][per_thread] = {};
  for (u32 first = 0; first < count; first += depth) {
    if (threadIdx.x < depth && first + threadIdx.x < count) {
      const u32 rank = first + threadIdx.x;
      const u32 token = sorted_a && sorted_b ? 0 : groups.row_of(group, rank);
      rows_of_a[threadIdx.x] = sorted_a ? begin + rank : token;
      rows_of_b[threadIdx.x] = sorted_b ? begin + rank : token;
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < tile * depth; i += threads) {
      const int at = i / tile, line = i % tile;
      const bool valid = first + at < count;
      shared_a[at][line] = valid && first_m + line < m
                               ? to_float(a[static_cast<i64>(rows_of_a[at]) * m + first_m + line])
                               : 0.0f;
      shared_b[at][line] = valid && first_n + line < n
                               ? to_float(b[static_cast<i64>(rows_of_b[at]) * n + first_n + line])
                               : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int at = 0; at < depth; ++at) {
#pragma unroll
      for (int i = 0; i < per_thread; ++i) {
#pragma unroll
        for (int j = 0; j < per_thread; ++j) {
          sum[i][j] += shared_a[at][row + i * side] * shared_b[at][column + j * side];
        }
      }
    }
    __syncthreads();
  }
  T* const c = group == 0 ? (second ? true_c1 : true_c0) : (second ? false_c1 : false_c0);
  const T* const addend = group == 0 ? (second ? true_addend1 : true_addend0)
                                     : (second ? false_addend1 : false_addend0);
#pragma unroll
  for (int i = 0; i < per_thread; ++i) {
#pragma unroll
    for (int j = 0; j < per_thread; ++j) {
      const i64 at_m = first_m + row + i * side, at_n = first_n + column + j * side;
      if (at_m >= m || at_n >= n) continue;
      const i64 at = at_m * n + at_n;
      c[at] = from_float<T>(addend == nullptr ? sum[i][j] : sum[i][j] + to_float(addend[at]));
    }
  }
}

}  // namespace fftune

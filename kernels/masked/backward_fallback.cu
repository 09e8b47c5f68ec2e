// dw = dy^T x (+ before) over the tokens of either expert, for any sizes, alignment and element
// type: the kernel of last resort. An expert without tokens has zeros.
//
// dy [m, n], x [m, k], mask [m], dw and before [n, k]; before may be null, or dw itself. The tokens
// of an expert are added up in their order, 16 at a time through shared memory. Grid: 2 * ceil(n /
// 64) * ceil(k / 64). Block: 256 threads, 4 x 4 sums each.
#include "common/float16.cuh"
#include "gemm/row_groups.cuh"

namespace fftune {

template <class T>
__global__ void __launch_bounds__(256)
    dw_fallback(const T* dy, const T* x, const u8* mask, const T* true_before,
                const T* false_before, T* dw_true, T* dw_false, int m, int n, int k) {
  constexpr int tile = 64, depth = 16, side = 16, per_thread = tile / side, threads = 256;
  __shared__ u32 words[row_groups::shared_words];
  __shared__ u32 tokens[depth];
  __shared__ float shared_dy[depth][tile], shared_x[depth][tile];

  const row_groups groups = row_groups::build<threads>(mask, m, words);
  const u32 tiles_n = ceil_div(static_cast<u32>(n), static_cast<u32>(tile));
  const u32 tiles_k = ceil_div(static_cast<u32>(k), static_cast<u32>(tile));
  const int group = blockIdx.x / (tiles_n * tiles_k);
  const u32 within = blockIdx.x % (tiles_n * tiles_k);
  const i64 first_n = static_cast<i64>(within / tiles_k) * tile;
  const i64 first_k = static_cast<i64>(within % tiles_k) * tile;
  const u32 count = group == 0 ? groups.marked() : m - groups.marked();
  const int row = threadIdx.x / side, column = threadIdx.x % side;

  float sum[per_thread][per_thread] = {};
  for (u32 first = 0; first < count; first += depth) {
    if (threadIdx.x < depth && first + threadIdx.x < count) {
      tokens[threadIdx.x] = groups.row_of(group, first + threadIdx.x);
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < tile * depth; i += threads) {
      const int at = i / tile, line = i % tile;
      const bool valid = first + at < count;
      shared_dy[at][line] = valid && first_n + line < n
                                ? to_float(dy[static_cast<i64>(tokens[at]) * n + first_n + line])
                                : 0.0f;
      shared_x[at][line] = valid && first_k + line < k
                               ? to_float(x[static_cast<i64>(tokens[at]) * k + first_k + line])
                               : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int at = 0; at < depth; ++at) {
#pragma unroll
      for (int i = 0; i < per_thread; ++i) {
#pragma unroll
        for (int j = 0; j < per_thread; ++j) {
          sum[i][j] += shared_dy[at][row + i * side] * shared_x[at][column + j * side];
        }
      }
    }
    __syncthreads();
  }
  T* const dw = group == 0 ? dw_true : dw_false;
  const T* const before = group == 0 ? true_before : false_before;
#pragma unroll
  for (int i = 0; i < per_thread; ++i) {
#pragma unroll
    for (int j = 0; j < per_thread; ++j) {
      const i64 at_n = first_n + row + i * side, at_k = first_k + column + j * side;
      if (at_n >= n || at_k >= k) continue;
      const i64 at = at_n * k + at_k;
      dw[at] = from_float<T>(before == nullptr ? sum[i][j] : sum[i][j] + to_float(before[at]));
    }
  }
}

}  // namespace fftune

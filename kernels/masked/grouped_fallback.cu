// Products with the B of each row's expert, for any sizes, alignment and element type: the kernel
// of last resort. One sum, epilogue(A B0^T, A B1^T), two terms A0 B0^T + A1 B1^T, or the gradients
// of a gate.
//
// The rows of each expert are in tiles of 64 of their own, so that none is computed twice. A, or
// all that the epilogue reads and stores, may be in the order of the mask. b0 and b1 are an
// expert's; transposed_b: they are [k, n]. What a form does without is null; k is that of one term.
// Grid: (ceil(m / 64) + 1) * ceil(n / 64). Block: 256 threads, 4 x 4 sums each.
#include "gemm/epilogue.cuh"
#include "gemm/row_groups.cuh"

namespace fftune {

// What an element becomes: the outputs of its epilogue, at `at` of each.
template <class T, class Epilogue>
__device__ __forceinline__ void store_element(const float (&sum)[Epilogue::products],
                                              T* const (&c)[most_outputs], const T* gate,
                                              const T* up, i64 at) {
  if constexpr (is_gradient<Epilogue>) {
    float result[Epilogue::outputs];
    Epilogue::apply(sum[0], to_float(gate[at]), to_float(up[at]), result);
#pragma unroll
    for (int output = 0; output < Epilogue::outputs; ++output) {
      c[output][at] = from_float<T>(result[output]);
    }
  } else {
    c[0][at] = from_float<T>(Epilogue::apply(sum));
    if constexpr (Epilogue::outputs == 3) {
      c[1][at] = from_float<T>(sum[0]);
      c[2][at] = from_float<T>(sum[1]);
    }
  }
}

template <class T, class Epilogue, bool sorted_a, bool sorted_c, bool transposed_b, int terms>
__global__ void __launch_bounds__(256, 1)
    grouped_fallback(const T* a0, const T* a1, const u8* mask, const T* true_b0, const T* true_b1,
                     const T* false_b0, const T* false_b1, T* c0, T* c1, T* c2, const T* gate,
                     const T* up, int m, int n, int k) {
  constexpr int products = Epilogue::products;
  constexpr int tile = 64, bk = 16, side = 16, per_thread = tile / side, threads = 256;
  constexpr int padded = tile + 1;  // the transposing stores then hit different banks
  __shared__ u32 words[row_groups::shared_words];
  __shared__ u32 rows_of_a[tile], rows_of_c[tile];
  __shared__ float shared_a[bk][padded], shared_b[products][bk][padded];

  const row_groups groups = row_groups::build<threads>(mask, m, words);
  const u32 tiles_n = ceil_div(static_cast<u32>(n), static_cast<u32>(tile));
  const u32 index = blockIdx.x / tiles_n;
  const i64 first_n = static_cast<i64>(blockIdx.x % tiles_n) * tile;
  const u32 marked = groups.marked();
  const u32 marked_tiles = ceil_div(marked, static_cast<u32>(tile));
  const int group = index >= marked_tiles ? 1 : 0;
  const u32 rank = (group == 0 ? index : index - marked_tiles) * tile;
  const u32 total = group == 0 ? marked : m - marked;
  if (rank >= total) return;
  const u32 rows = total - rank < tile ? total - rank : tile;
  if (threadIdx.x < rows) {
    const u32 sorted = rank + threadIdx.x + (group == 0 ? 0 : marked);
    const u32 row = groups.row_of(group, rank + threadIdx.x);
    rows_of_a[threadIdx.x] = sorted_a ? sorted : row;
    rows_of_c[threadIdx.x] = sorted_c ? sorted : row;
  }
  __syncthreads();

  const T* const b[2] = {group == 0 ? true_b0 : false_b0, group == 0 ? true_b1 : false_b1};
  const int row = threadIdx.x / side, column = threadIdx.x % side;
  float sum[per_thread][per_thread][products] = {};
  int term = 0;
  for (int first_k = 0;;) {
    const T* const a = terms == 2 && term == 1 ? a1 : a0;
#pragma unroll
    for (int i = threadIdx.x; i < tile * bk; i += threads) {
      const u32 line = i / bk;
      const int at = i % bk;
      const bool within = at < k - first_k;
      shared_a[at][line] = line < rows && within
                               ? to_float(a[static_cast<i64>(rows_of_a[line]) * k + first_k + at])
                               : 0.0f;
      // Neighbouring threads read along a row of B.
      const i64 n_of_b = transposed_b ? i % tile : i / bk,
                k_of_b = transposed_b ? i / tile : i % bk;
      const i64 in_n = first_n + n_of_b, in_k = first_k + k_of_b;
#pragma unroll
      for (int product = 0; product < products; ++product) {
        shared_b[product][k_of_b][n_of_b] =
            in_n < n && in_k < k ? to_float(b[terms == 2 ? term : product]
                                             [transposed_b ? in_k * n + in_n : in_n * k + in_k])
                                 : 0.0f;
      }
    }
    __syncthreads();
#pragma unroll
    for (int at = 0; at < bk; ++at) {
#pragma unroll
      for (int i = 0; i < per_thread; ++i) {
#pragma unroll
        for (int j = 0; j < per_thread; ++j) {
#pragma unroll
          for (int product = 0; product < products; ++product) {
            sum[i][j][product] +=
                shared_a[at][row + i * side] * shared_b[product][at][column + j * side];
          }
        }
      }
    }
    if (k - first_k <= bk) {  // first_k + bk may pass 2^31
      if (++term == terms) break;
      first_k = 0;
    } else {
      first_k += bk;
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < per_thread; ++i) {
#pragma unroll
    for (int j = 0; j < per_thread; ++j) {
      const u32 line = row + i * side;
      const i64 at_n = first_n + column + j * side;
      if (line < rows && at_n < n) {
        store_element<T, Epilogue>(sum[i][j], {c0, c1, c2}, gate, up,
                                   static_cast<i64>(rows_of_c[line]) * n + at_n);
      }
    }
  }
}

}  // namespace fftune

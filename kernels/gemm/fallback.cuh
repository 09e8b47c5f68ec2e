// C = epilogue(A B1^T[, A B2^T]) for any sizes, any alignment and any element type: the kernel of
// last resort.
//
// Each output of the epilogue has a C of its own: c, then `sums`.
//
// A 64 x 64 tile a block of 256 threads, 16 of k at a time through shared memory, 4 x 4 sums a
// thread with fp32 FMA. Every load and store is one element, so nothing has to be a multiple of
// anything.
#pragma once

#include "gemm/epilogue.cuh"
#include "gemm/operands.cuh"
#include "gemm/scales.cuh"

namespace fftune {

// Elements are T; the epilogue's first output is Out, and all else that is stored or added Wide.
template <class T, class Epilogue, class Out = T, class Wide = T, class Scales = no_scales>
class fallback_gemm {
  static constexpr int products = Epilogue::products, outputs = Epilogue::outputs;
  static constexpr int tile = 64, bk = 16, side = 16, per_thread = tile / side;
  static constexpr int threads = side * side;
  static constexpr int padded = tile + 1;  // the transposing stores then hit different banks

  using operand = float[bk][padded];

  // matrix [rows, k], or [k, rows] where it is transposed.
  template <bool transposed>
  static __device__ __forceinline__ void load(operand& to, const T* matrix, i64 first_row, i64 rows,
                                              int k, int first_k) {
#pragma unroll
    for (int i = threadIdx.x; i < tile * bk; i += threads) {
      const int in_tile = transposed ? i % tile : i / bk, at = transposed ? i / tile : i % bk;
      const i64 row = first_row + in_tile;
      const bool valid = row < rows && at < k - first_k;
      const i64 place =
          transposed ? (static_cast<i64>(first_k) + at) * rows + row : row * k + first_k + at;
      to[at][in_tile] = valid ? to_float(matrix[place]) : 0.0f;
    }
  }

  template <int output = 1>
  static __device__ __forceinline__ void store_sums(Wide* const (&sums)[most_outputs - 1], i64 at,
                                                    const float (&sum)[products]) {
    if constexpr (output < outputs) {
      sums[output - 1][at] = from_float<Wide>(output_of<Epilogue, output>(sum));
      store_sums<output + 1>(sums, at, sum);
    }
  }

 public:
  struct storage {
    operand a;
    operand b[products];
  };

  using tile_sums = float[per_thread][per_thread][products];

  // sum += this block's tile of the products of A and each B, over all of k.
  template <class Operands = forward_operands>
  static __device__ __forceinline__ void multiply(tile_sums& sum, const T* a,
                                                  const T* const (&b)[products], i64 first_m,
                                                  i64 first_n, int m, int n, int k,
                                                  storage& shared) {
    multiply_range<Operands>(sum, a, b, first_m, first_n, m, n, k, 0, k, shared);
  }

  // The same over [from, to) of k, of which `from` is a multiple of 16.
  template <class Operands = forward_operands>
  static __device__ __forceinline__ void multiply_range(tile_sums& sum, const T* a,
                                                        const T* const (&b)[products], i64 first_m,
                                                        i64 first_n, int m, int n, int k, int from,
                                                        int to, storage& shared) {
    const int row = threadIdx.x / side, column = threadIdx.x % side;
    for (int first_k = from;;) {
      load<Operands::a_transposed>(shared.a, a, first_m, m, k, first_k);
#pragma unroll
      for (int product = 0; product < products; ++product) {
        load<Operands::b_transposed>(shared.b[product], b[product], first_n, n, k, first_k);
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
                  shared.a[at][row + i * side] * shared.b[product][at][column + j * side];
            }
          }
        }
      }
      if (to - first_k <= bk) {  // first_k + bk may pass 2^31
        break;
      }
      first_k += bk;
      __syncthreads();
    }
  }

  // Calls body(row, column, sums) for each of this thread's elements that exist.
  template <class Body>
  static __device__ __forceinline__ void for_each_element(tile_sums& sum, i64 first_m, i64 first_n,
                                                          int m, int n, const Body& body) {
    const int row = threadIdx.x / side, column = threadIdx.x % side;
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
#pragma unroll
      for (int j = 0; j < per_thread; ++j) {
        const i64 at_m = first_m + row + i * side, at_n = first_n + column + j * side;
        if (at_m < m && at_n < n) body(at_m, at_n, sum[i][j]);
      }
    }
  }

  static __device__ __forceinline__ void run(const T* a, const T* const (&b)[products], Out* c,
                                             Wide* const (&sums)[most_outputs - 1],
                                             const addends<Wide>& more, const Scales& scales, int m,
                                             int n, int k, storage& shared) {
    const u32 tiles_n = ceil_div(static_cast<u32>(n), static_cast<u32>(tile));
    const i64 first_m = static_cast<i64>(blockIdx.x / tiles_n) * tile;
    const i64 first_n = static_cast<i64>(blockIdx.x % tiles_n) * tile;
    tile_sums sum = {};
    multiply(sum, a, b, first_m, first_n, m, n, k, shared);
    for_each_element(sum, first_m, first_n, m, n, [&](i64 row, i64 column, float(&own)[products]) {
      if constexpr (Scales::present) {
#pragma unroll
        for (int product = 0; product < products; ++product) {
          own[product] *= scales.of_product(product);
        }
      }
      float value = output_of<Epilogue, 0>(own);
      if constexpr (Scales::present) value *= scales.of_output();
      const i64 at = row * n + column;
      c[at] = from_float<Out>(more.template add<Epilogue>(value, row, column, n));
      store_sums(sums, at, own);
    });
  }
};

}  // namespace fftune

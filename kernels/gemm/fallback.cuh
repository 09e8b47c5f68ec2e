// C = epilogue(A B1^T[, A B2^T]) for any sizes, any alignment and any element type: the kernel of
// last resort.
//
// Each output of the epilogue has a C of its own.
//
// A 64 x 64 tile a block of 256 threads, 16 of k at a time through shared memory, 4 x 4 sums a
// thread with fp32 FMA. Every load and store is one element, so nothing has to be a multiple of
// anything.
#pragma once

#include "gemm/epilogue.cuh"

namespace fftune {

template <class T, class Epilogue>
class fallback_gemm {
  static constexpr int products = Epilogue::products, outputs = Epilogue::outputs;
  static constexpr int tile = 64, bk = 16, side = 16, per_thread = tile / side;
  static constexpr int threads = side * side;
  static constexpr int padded = tile + 1;  // the transposing stores then hit different banks

  using operand = float[bk][padded];

  static __device__ __forceinline__ void load(operand& to, const T* matrix, i64 first_row, i64 rows,
                                              int k, int first_k) {
#pragma unroll
    for (int i = threadIdx.x; i < tile * bk; i += threads) {
      const i64 row = first_row + i / bk;
      const int at = i % bk;
      const bool valid = row < rows && at < k - first_k;
      to[at][i / bk] = valid ? to_float(matrix[row * k + first_k + at]) : 0.0f;
    }
  }

  template <int output = 0>
  static __device__ __forceinline__ void store(T* const (&c)[most_outputs], const addends<T>& more,
                                               i64 row, i64 column, int n,
                                               const float (&sum)[products]) {
    const float value = output_of<Epilogue, output>(sum);
    c[output][row * n + column] = from_float<T>(more.template add<Epilogue>(value, row, column, n));
    if constexpr (output + 1 < outputs) store<output + 1>(c, more, row, column, n, sum);
  }

 public:
  struct storage {
    operand a;
    operand b[products];
  };

  static __device__ __forceinline__ void run(const T* a, const T* const (&b)[products],
                                             T* const (&c)[most_outputs], const addends<T>& more,
                                             int m, int n, int k, storage& shared) {
    const u32 tiles_n = ceil_div(static_cast<u32>(n), static_cast<u32>(tile));
    const i64 first_m = static_cast<i64>(blockIdx.x / tiles_n) * tile;
    const i64 first_n = static_cast<i64>(blockIdx.x % tiles_n) * tile;
    const int row = threadIdx.x / side, column = threadIdx.x % side;

    float sum[per_thread][per_thread][products] = {};
    for (int first_k = 0;;) {
      load(shared.a, a, first_m, m, k, first_k);
#pragma unroll
      for (int product = 0; product < products; ++product) {
        load(shared.b[product], b[product], first_n, n, k, first_k);
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
      if (k - first_k <= bk) {  // first_k + bk may pass 2^31
        break;
      }
      first_k += bk;
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
#pragma unroll
      for (int j = 0; j < per_thread; ++j) {
        const i64 at_m = first_m + row + i * side, at_n = first_n + column + j * side;
        if (at_m < m && at_n < n) {
          store(c, more, at_m, at_n, n, sum[i][j]);
        }
      }
    }
  }
};

}  // namespace fftune

// The fallback's products of fp8 elements with scales of blocks: each block of 128 of k is summed
// by itself, and joins the sum by its scales.
#pragma once

#include "common/quantise.cuh"
#include "gemm/fallback.cuh"

namespace fftune {

template <class Epilogue>
class fallback_block_gemm {
  static constexpr int products = Epilogue::products;
  using gemm = fallback_gemm<fp8, Epilogue, fp8, bf16>;
  static constexpr int side = 16, per_thread = 4;  // of a tile of 64 x 64, as gemm has them

 public:
  using storage = typename gemm::storage;
  using tile_sums = typename gemm::tile_sums;

  // sum += this block's tile of the products of A and each B.
  static __device__ __forceinline__ void multiply(tile_sums& sum, const fp8* a,
                                                  const fp8* const (&b)[products],
                                                  const block_scales& scales, i64 first_m,
                                                  i64 first_n, int m, int n, int k,
                                                  storage& shared) {
    for (int block = 0; block < blocks_of(k); ++block) {
      const int from = block * scale_block;
      tile_sums part = {};
      gemm::multiply_range(part, a, b, first_m, first_n, m, n, k, from,
                           k - from < scale_block ? k : from + scale_block, shared);
      __syncthreads();
      gemm::for_each_element(
          part, first_m, first_n, m, n, [&](i64 row, i64 column, float(&own)[products]) {
#pragma unroll
            for (int product = 0; product < products; ++product) {
              own[product] *=
                  scales.of_a(row, m, block, k) * scales.of_b(product, column, n, block, k);
            }
          });
#pragma unroll
      for (int i = 0; i < per_thread; ++i) {
#pragma unroll
        for (int j = 0; j < per_thread; ++j) {
#pragma unroll
          for (int product = 0; product < products; ++product) {
            sum[i][j][product] += part[i][j][product];
          }
        }
      }
    }
  }

  // Calls body(row, column, sums) for each of this thread's elements that exist.
  template <class Body>
  static __device__ __forceinline__ void for_each_element(tile_sums& sum, i64 first_m, i64 first_n,
                                                          int m, int n, const Body& body) {
    gemm::for_each_element(sum, first_m, first_n, m, n, body);
  }

  // What the epilogue makes of 64 x 128 sums, in units of a scale for each row, which is stored.
  static __device__ __forceinline__ void store_quantised(tile_sums (&sum)[2], fp8* c,
                                                         float* c_scale, i64 first_m, i64 first_n,
                                                         int m, int n) {
    const int row = threadIdx.x / side, column = threadIdx.x % side;
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
      float value[2][per_thread], largest = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < per_thread; ++j) {
          value[half][j] = Epilogue::apply(sum[half][i][j]);
          largest = fmaxf(largest, fabsf(value[half][j]));
        }
      }
#pragma unroll
      for (int lane = 1; lane < side; lane *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
      }
      const float scale = scale_of<fp8>(largest);
      const i64 at_m = first_m + row + i * side;
      if (at_m >= m) continue;
      if (column == 0) {
        c_scale[at_m * blocks_of(n) + first_n / scale_block] = scale;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < per_thread; ++j) {
          const i64 at_n = first_n + half * 64 + column + j * side;
          if (at_n < n) c[at_m * n + at_n] = from_float<fp8>(value[half][j] / scale);
        }
      }
    }
  }
};

}  // namespace fftune

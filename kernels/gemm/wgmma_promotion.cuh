// Sums of fp8 products in the wgmma engine: one k tile of 128 after the other joins the fp32 sums
// in registers. The tensor cores keep 13 bits of a sum below its largest addend, so that no sum of
// theirs may grow over more than that; and 128 is what a scale of a block is for.
#pragma once

#include "common/wgmma.cuh"
#include "gemm/scales.cuh"
#include "gemm/wgmma_ring.cuh"

namespace fftune {

template <class T, int products, wgmma_tile tile, class layout, class Scales>
struct wgmma_promotion {
  static constexpr int values = layout::columns / 2;  // accumulators a thread, product and part
  using sums = float[layout::parts][products][values];
  // What a thread multiplies its sums of a k tile by: of A, one for each of its two rows of a part,
  // or with swapped operands one for each of its columns; of B, one for each product and part.
  static constexpr int tokens = tile.swapped ? values / 2 : 2 * layout::parts;
  static constexpr int weights = tile.swapped ? layout::parts : 1;
  struct block_factors {
    float a[tokens];
    float b[weights][products];
  };
  struct no_factors {};
  template <bool in_blocks, class = void>
  struct choice {
    using type = no_factors;
  };
  template <class Void>
  struct choice<true, Void> {
    using type = block_factors;
  };
  using factors = typename choice<Scales::in_blocks>::type;

  const Scales& scales;
  const wgmma_gemm_shape& shape;
  int token, feature;  // the first of this consumer's outputs

  // Of a k tile, which is a block of k. The loads are under way while the tile is.
  __device__ __forceinline__ factors factors_of(int k_tile) const {
    if constexpr (!Scales::in_blocks) {
      return {};
    } else {
      factors result;
      const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < tokens; ++i) {
        const int row = tile.swapped ? i / 2 * 8 + lane % 4 * 2 + i % 2
                                     : i / 2 * 64 + warp * 16 + lane / 4 + i % 2 * 8;
        result.a[i] = scales.of_a(token + row, shape.m, k_tile, shape.k);
      }
#pragma unroll
      for (int i = 0; i < weights; ++i) {
#pragma unroll
        for (int product = 0; product < products; ++product) {
          result.b[i][product] = scales.of_b(product, feature + i * 64, shape.n, k_tile, shape.k);
        }
      }
      return result;
    }
  }

  static __device__ __forceinline__ void clear(sums& sum) {
#pragma unroll
    for (int i = 0; i < layout::parts * products * values; ++i) {
      reinterpret_cast<float*>(sum)[i] = 0;
    }
  }

  static __device__ __forceinline__ void multiply(sums& sum, u32 slot, u32 first_row,
                                                  const factors& factor) {
    const u64 a = wgmma_descriptor(slot + (tile.swapped ? 0 : first_row * 128));
    const u64 b = wgmma_descriptor(slot + layout::a_bytes + (tile.swapped ? first_row * 128 : 0));
#pragma unroll
    for (int part = 0; part < layout::parts; ++part) {
#pragma unroll
      for (int product = 0; product < products; ++product) {
        float partial[values];
        const int row_offset = part * 64 * 128 >> 4,
                  product_offset = product * layout::b_bytes >> 4;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < layout::row_bytes / 32; ++step) {
          if constexpr (tile.swapped) {
            wgmma<T, tile.bm>(partial, b + product_offset + row_offset + step * 2, a + step * 2,
                              step > 0);
          } else {
            wgmma<T, tile.bn>(partial, a + row_offset + step * 2, b + product_offset + step * 2,
                              step > 0);
          }
        }
        wgmma_commit();
        wgmma_wait<0>();
        add(sum[part][product], partial, factor, part, product);
      }
    }
  }

  // Turns sums of elements into those that the epilogue takes. `joins`: the output's own scale goes
  // to the last product, which every epilogue is linear in.
  template <bool joins>
  static __device__ __forceinline__ void finish(sums& sum, const Scales& scales) {
    if constexpr (!Scales::in_blocks) {
#pragma unroll
      for (int product = 0; product < products; ++product) {
        float factor = scales.of_product(product);
        if (joins && product == products - 1) factor *= scales.of_output();
#pragma unroll
        for (int i = 0; i < layout::parts * values; ++i) {
          sum[i / values][product][i % values] *= factor;
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ void add(float (&sum)[values], const float (&partial)[values],
                                             const factors& factor, int part, int product) {
    if constexpr (!Scales::in_blocks) {
#pragma unroll
      for (int i = 0; i < values; ++i) sum[i] += partial[i];
    } else if constexpr (tile.swapped) {
#pragma unroll
      for (int i = 0; i < values; ++i) {
        sum[i] += partial[i] * (factor.a[i / 4 * 2 + i % 2] * factor.b[part][product]);
      }
    } else {
      const float row[2] = {factor.a[part * 2] * factor.b[0][product],
                            factor.a[part * 2 + 1] * factor.b[0][product]};
#pragma unroll
      for (int i = 0; i < values; ++i) sum[i] += partial[i] * row[i / 2 % 2];
    }
  }
};

}  // namespace fftune

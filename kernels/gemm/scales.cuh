// Scales of quantised operands: from elements to values.
#pragma once

#include "common/types.cuh"

namespace fftune {

// One scale for each 128 elements of a row of A [m, k], and for each block of 128 x 128 of a B
// [n, k]; the last ones may be of less.
constexpr int scale_block = 128;

__device__ __forceinline__ int blocks_of(int extent) {
  return static_cast<int>(ceil_div(static_cast<u32>(extent), static_cast<u32>(scale_block)));
}

struct block_scales {
  static constexpr bool present = true, in_blocks = true;
  const float* a;     // [m, blocks of k]
  const float* b[2];  // [blocks of n, blocks of k]; the second is unused with one B operand

  // The scale of block `block` of 128 of k, in row `row` of A, or row `row` of a B. The padding
  // rows of a tile, beyond `rows`, take the last row's scale: their elements are zeros.
  __device__ __forceinline__ float of_a(int row, int rows, int block, int k) const {
    const i64 at = row < rows ? row : rows - 1;
    return a[at * blocks_of(k) + block];
  }
  __device__ __forceinline__ float of_b(int product, int row, int rows, int block, int k) const {
    const i64 at = (row < rows ? row : rows - 1) / scale_block;
    return b[product][at * blocks_of(k) + block];
  }
};

}  // namespace fftune

// The mapping of threads to a matrix where a thread works on fixed columns: a block has `rows` rows
// of `columns` threads, and a thread takes `unroll` rows at once.
#pragma once

#include "common/aligned_vector.cuh"

namespace fftune {

template <class T, int vector, int columns, int rows, int unroll>
struct column_grid {
  static constexpr int count = vector / static_cast<int>(sizeof(T));  // elements of an access
  static constexpr int width = columns * count;                       // columns of a block
  static constexpr int height = rows * unroll;                        // rows of a block at once

  u32 row_block;  // blocks next to each other share rows
  i64 column;     // this thread's first
  i64 row;        // this thread's first; it has every `rows`th from there on

  __device__ __forceinline__ explicit column_grid(int column_blocks) {
    const u32 across = static_cast<u32>(column_blocks);
    row_block = blockIdx.x / across;
    const int lane = static_cast<int>(threadIdx.x) % columns;
    column = static_cast<i64>(blockIdx.x % across) * width + lane * count;
    row = static_cast<i64>(row_block) * height + threadIdx.x / columns;
  }
};

}  // namespace fftune

// Matrices by columns: threads that keep fixed columns, and the sum of every column.
#pragma once

#include "common/async.cuh"
#include "common/vectors.cuh"

namespace fftune {

// The mapping of threads to a matrix where a thread works on fixed columns: a block has `rows` rows
// of `columns` threads, and a thread takes `unroll` rows at once.

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

// The second step of a column sum: adds up rows of partial sums, in a fixed order.
constexpr int column_sum_columns = 32;
constexpr int column_sum_lanes = 16;

// out [columns] = the sum of the rows of partial [rows, columns]. A thread adds up every 16th row
// of a column; the 16 sums of a column are added up in shared memory.
// Grid: ceil(columns / 32). Block: 512 threads. May be launched programmatically behind the kernel
// that writes `partial`.
template <class W>
__device__ __forceinline__ void column_sum(const float* partial, W* out, int rows, i64 columns) {
  __shared__ float sums[column_sum_lanes][column_sum_columns];
  const int column_in_block = static_cast<int>(threadIdx.x) % column_sum_columns;
  const int lane = static_cast<int>(threadIdx.x) / column_sum_columns;
  const i64 column = static_cast<i64>(blockIdx.x) * column_sum_columns + column_in_block;
  wait_and_launch_dependents();
  float sum = 0.0f;
  if (column < columns) {
    const float* const first = partial + column;
    constexpr int batch = 12;  // rows whose loads are in flight together
    for (int row = lane; row < rows; row += batch * column_sum_lanes) {
      float value[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int own = row + i * column_sum_lanes;
        value[i] = own < rows ? first[own * columns] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) sum += value[i];
    }
  }
  sums[lane][column_in_block] = sum;
  __syncthreads();
  if (lane != 0 || column >= columns) return;
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < column_sum_lanes; ++i) sum += sums[i][column_in_block];
  out[column] = from_float<W>(sum);
}

}  // namespace fftune

// dbias = the sum of the rows of dy (+ dbias_before), in two steps, each with a fixed order.
//
// dy [m, n], partial [parts, n], dbias [n].
#include "common/columns.cuh"

namespace fftune {

// partial row p = the sum of rows [p rows, (p + 1) rows) of dy. A thread adds up every 16th row of
// a column; the 16 sums of a column meet in shared memory.
// Grid: (ceil(n / 32), parts). Block: 512.
template <class T>
__global__ void __launch_bounds__(512)
    d_bias_partial(const T* dy, float* partial, i64 m, i64 n, i64 rows) {
  __shared__ float sums[column_sum_lanes][column_sum_columns];
  const int column_in_block = static_cast<int>(threadIdx.x) % column_sum_columns;
  const int lane = static_cast<int>(threadIdx.x) / column_sum_columns;
  const i64 column = static_cast<i64>(blockIdx.x) * column_sum_columns + column_in_block;
  const i64 first = blockIdx.y * rows, last = first + rows < m ? first + rows : m;
  wait_for_dependencies();
  launch_dependents();
  float sum = 0.0f;
  if (column < n) {
#pragma unroll 8
    for (i64 row = first + lane; row < last; row += column_sum_lanes) {
      sum += to_float(dy[row * n + column]);
    }
  }
  sums[lane][column_in_block] = sum;
  __syncthreads();
  if (lane != 0 || column >= n) return;
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < column_sum_lanes; ++i) sum += sums[i][column_in_block];
  partial[blockIdx.y * n + column] = sum;
}

// Grid: ceil(n / 256). Block: 256. `before` is null where nothing is added.
template <class T>
__global__ void __launch_bounds__(256)
    d_bias_total(const float* partial, const T* before, T* dbias, int parts, i64 n) {
  const i64 column = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  wait_for_dependencies();
  if (column >= n) return;
  float sum = before != nullptr ? to_float(before[column]) : 0.0f;
#pragma unroll 8
  for (int part = 0; part < parts; ++part) sum += partial[part * n + column];
  dbias[column] = from_float<T>(sum);
}

}  // namespace fftune

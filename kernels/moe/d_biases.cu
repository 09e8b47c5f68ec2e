// The gradient of the experts' biases: the sum of each expert's rows, in a fixed order.
//
// A thread adds up every 16th row of a column; the 16 sums of a column are added up in shared
// memory.
#include "common/async.cuh"
#include "common/numerics.cuh"

namespace fftune {

// sums [experts, width] = before + the sums of rows [offsets[e], offsets[e + 1]), each times its
// weight. Row r is `rows` number r or, where tokens is not null, number tokens[r]; row_weights and
// before may be null. Grid: (ceil(width / 32), experts). Block: 512.
template <class T>
__global__ void __launch_bounds__(512)
    sum_expert_rows(const T* rows, const int* offsets, const int* tokens, const float* row_weights,
                    const T* before, T* sums, i64 width) {
  constexpr int columns = 32, lanes = 512 / columns;
  __shared__ float partial[lanes][columns];
  const int own = static_cast<int>(threadIdx.x) % columns;
  const int lane = static_cast<int>(threadIdx.x) / columns;
  const i64 column = static_cast<i64>(blockIdx.x) * columns + own;
  const i64 to = static_cast<i64>(blockIdx.y) * width + column;
  wait_and_launch_dependents();
  const int first = offsets[blockIdx.y], last = offsets[blockIdx.y + 1];
  float sum = 0;
  if (column < width) {
#pragma unroll 8
    for (int row = first + lane; row < last; row += lanes) {
      const i64 from = tokens != nullptr ? tokens[row] : row;
      const float weight = row_weights != nullptr ? row_weights[row] : 1.0f;
      sum += weight * to_float(rows[from * width + column]);
    }
  }
  partial[lane][own] = sum;
  __syncthreads();
  if (lane != 0 || column >= width) return;
  sum = before != nullptr ? to_float(before[to]) : 0.0f;
#pragma unroll
  for (int i = 0; i < lanes; ++i) sum += partial[i][own];
  sums[to] = from_float<T>(sum);
}

}  // namespace fftune

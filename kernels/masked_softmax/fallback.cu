// Softmax and its gradient for rows of any width and alignment: a block of 256 threads reads a row
// once for its sums and again, from L2, for its result. A thread reads only elements in the
// second pass that it alone writes.
//
// Grid: min(rows, 2^31 - 1). Block: 256.
#include "common/async.cuh"
#include "common/numerics.cuh"
#include "common/rows.cuh"

namespace fftune {

// mask: 0 none, 1 causal, 2 bytes
template <class T, int mask>
__global__ void __launch_bounds__(256)
    softmax_forward_fallback(const T* x, const u8* allowed, T* y, i64 rows, int n, int s,
                             int mask_heads, float scale) {
  wait_and_launch_dependents();
  using reduction = row_reduction<softmax_sum, 256, 1, 1>;
  __shared__ typename reduction::memory shared;
  const float factor = scale * 1.44269504088896341f;  // powers are of two
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const i64 end = mask == 1 ? row % s + n - s + 1 : n;
    const i64 mask_row = mask_heads == 1 ? row : row / s / mask_heads * s + row % s;
    const auto power_at = [&](int column) {
      if (column >= end) return lowest_score();
      if (mask == 2 && allowed[mask_row * n + column] == 0) return lowest_score();
      return to_float(x[row * n + column]) * factor;
    };
    softmax_sum own = softmax_sum::nothing();
    for (int column = static_cast<int>(threadIdx.x); column < n; column += 256) {
      const float power = power_at(column);
      if (power == lowest_score()) continue;
      own = softmax_sum::join(own, {power, 1.0f});
    }
    const softmax_sum all = reduction::apply(own, shared);
    const float by = all.sum != 0.0f ? 1.0f / all.sum : 0.0f;
    const float reference = all.most == lowest_score() ? 0.0f : all.most;
    for (int column = static_cast<int>(threadIdx.x); column < n; column += 256) {
      y[row * n + column] = from_float<T>(power_of_two(power_at(column) - reference) * by);
    }
    __syncthreads();  // the sums of the next row
  }
}

template <class T, int mask>
__global__ void __launch_bounds__(256)
    softmax_backward_fallback(const T* y, const T* dy, T* dx, i64 rows, int n, int s, float scale) {
  wait_and_launch_dependents();
  using reduction = row_reduction<plain_sum, 256, 1, 1>;
  __shared__ typename reduction::memory shared;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const i64 end = mask == 1 ? row % s + n - s + 1 : n;
    plain_sum own = plain_sum::nothing();
    for (int column = static_cast<int>(threadIdx.x); column < n && column < end; column += 256) {
      own.sum += to_float(y[row * n + column]) * to_float(dy[row * n + column]);
    }
    const float sum = reduction::apply(own, shared).sum;
    for (int column = static_cast<int>(threadIdx.x); column < n; column += 256) {
      const i64 at = row * n + column;
      const float gradient =
          column < end ? scale * to_float(y[at]) * (to_float(dy[at]) - sum) : 0.0f;
      dx[at] = from_float<T>(gradient);
    }
    __syncthreads();  // the sums of the next row
  }
}

}  // namespace fftune

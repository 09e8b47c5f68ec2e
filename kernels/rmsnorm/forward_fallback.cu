// The definition for any width and alignment: a block of 256 threads takes a row, reads it once for
// the sum and once more, from L2, for the result.
//
// Arguments as in forward_rows. Grid: min(rows, 2^31 - 1). Block: 256.
#include "common/rms_norm.cuh"
#include "common/row_sum.cuh"

namespace fftune {

template <class T, class W, class Convention, bool adds, bool saves>
__global__ void __launch_bounds__(256)
    forward_fallback(const T* x, const T* residual, const W* w, T* y, T* sum, float* rstd, i64 rows,
                     int d, float eps) {
  using row_sums = row_sum<1, 256, 1, 1>;
  __shared__ typename row_sums::memory shared;
  int turn = 0;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    // A thread reads back only what it wrote itself.
    const T* const values = (adds ? sum : x) + row * d;
    float squares[1] = {};
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      if constexpr (adds) {
        const i64 at = row * d + column;
        sum[at] = from_float<T>(to_float(x[at]) + to_float(residual[at]));
      }
      const float value = to_float(values[column]);
      squares[0] += value * value;
    }
    row_sums::apply(squares, shared, turn);
    const float r = reciprocal_deviation(squares[0], d, eps);
    if (saves && threadIdx.x == 0) rstd[row] = r;
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      const float normalised = Convention::template normalised<T>(to_float(values[column]) * r);
      y[row * d + column] = from_float<T>(normalised * Convention::factor(to_float(w[column])));
    }
  }
}

}  // namespace fftune

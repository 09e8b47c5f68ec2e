// The forward pass for any width and alignment: a block of 256 threads reads a row once for the sum
// of squares and again, from L2, for y. If y is quantised, it reads the row once more, for the
// largest magnitude.
//
// Arguments as in forward_rows. Grid: min(rows, 2^31 - 1). Block: 256.
#include "common/rows.cuh"
#include "common/vectors.cuh"

namespace fftune {

template <class T, class W, class Convention, bool adds, bool saves, class Y, bool adds_after>
__global__ void __launch_bounds__(256)
    forward_fallback(const T* x, const T* residual, const W* w, Y* y, T* sum, float* rstd,
                     float* scales, i64 rows, int d, float eps) {
  using row_sums = row_sum<1, 256, 1, 1>;
  using row_largest = row_sum<1, 256, 1, 1, larger_magnitude>;
  constexpr bool quantises = sizeof(Y) == 1;
  __shared__ typename row_sums::memory shared;
  __shared__ typename row_largest::memory shared_largest;
  int buffer = 0;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x, buffer ^= 1) {
    // A thread reads only elements that it wrote itself, so no barrier is needed.
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
    row_sums::apply(squares, shared, buffer);
    const float r = reciprocal_deviation(squares[0], d, eps);
    if (saves && threadIdx.x == 0) rstd[row] = r;
    const auto weighed = [&](int column) {
      const float value = to_float(values[column]) * r;
      // A quantised value is rounded only once.
      return (quantises ? value : Convention::template normalised<T>(value)) *
             Convention::factor(to_float(w[column]));
    };
    float largest[1] = {};
    if constexpr (quantises) {
      for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
        largest[0] = larger_magnitude::join(largest[0], fabsf(weighed(column)));
      }
      row_largest::apply(largest, shared_largest, buffer);
    }
    const float scale = scale_of<Y>(largest[0]);
    const float factor = 1.0f / scale;
    if (quantises && threadIdx.x == 0) scales[row] = scale;
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      if constexpr (quantises) {
        y[row * d + column].bits = static_cast<u8>(quantised<Y>(weighed(column) * factor));
      } else {
        const float other = adds_after ? to_float(residual[row * d + column]) : 0.0f;
        y[row * d + column] = from_float<T>(weighed(column) + other);
      }
    }
  }
}

}  // namespace fftune

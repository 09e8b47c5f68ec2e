// The steps of rmsnorm as kernels of their own, as a user's pipeline has them: what `bench`
// compares with.
// Block: 256. Grid: (ceil(d / 1024), min(rows, 65535)), or a block for each row.
#include "common/numerics.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"

namespace fftune {

template <class T>
__global__ void __launch_bounds__(256)
    baseline_add(const T* x, const T* residual, T* sum, i64 rows, int d) {
  for_elements(rows, d, [&](i64 row, i64 column) {
    const i64 i = row * d + column;
    sum[i] = from_float<T>(to_float(x[i]) + to_float(residual[i]));
  });
}

template <class T>
__global__ void __launch_bounds__(256)
    baseline_root(const T* x, float* root, i64 rows, int d, float eps) {
  using row_sums = row_sum<1, 256, 1, 1>;
  __shared__ typename row_sums::memory shared;
  int buffer = 0;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x, buffer ^= 1) {
    float squares[1] = {};
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      const float value = to_float(x[row * d + column]);
      squares[0] += value * value;
    }
    row_sums::apply(squares, shared, buffer);
    if (threadIdx.x == 0) root[row] = reciprocal_deviation(squares[0], d, eps);
  }
}

template <class T>
__global__ void __launch_bounds__(256)
    baseline_scale(const T* x, const float* root, T* normalised, i64 rows, int d) {
  for_elements(rows, d, [&](i64 row, i64 column) {
    const i64 i = row * d + column;
    normalised[i] = from_float<T>(to_float(x[i]) * root[row]);
  });
}

template <class T, class W, bool from_one>
__global__ void __launch_bounds__(256)
    baseline_weigh(const T* normalised, const W* w, T* y, i64 rows, int d) {
  for_elements(rows, d, [&](i64 row, i64 column) {
    const i64 i = row * d + column;
    const float factor = to_float(w[column]) + (from_one ? 1.0f : 0.0f);
    y[i] = from_float<T>(to_float(normalised[i]) * factor);
  });
}

}  // namespace fftune

// The backward pass for any width and alignment, in three kernels: dx and the rows' 1 / deviation;
// partial dw over chunks of rows; the sum of the chunks.
//
// Arguments as in backward_rows; r [rows] and partial [chunks, d] are workspace.
#include "common/columns.cuh"
#include "common/rows.cuh"

namespace fftune {

// Grid: min(rows, 2^31 - 1). Block: 256 threads, which share a row.
template <class T, class W, class Convention, bool adds, bool saved>
__global__ void __launch_bounds__(256)
    backward_fallback(const T* x, const W* w, const T* dy, const T* dsum, const float* rstd, T* dx,
                      float* r_of, i64 rows, int d, float eps) {
  using row_sums = row_sum<2, 256, 1, 1>;
  __shared__ typename row_sums::memory shared;
  int buffer = 0;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x, buffer ^= 1) {
    const i64 first = row * d;
    float sums[2] = {};  // of factor(w) dy x, and of x²
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      const float value = to_float(x[first + column]);
      const float g = Convention::factor(to_float(w[column])) * to_float(dy[first + column]);
      sums[0] += g * value;
      sums[1] += value * value;
    }
    row_sums::apply(sums, shared, buffer);
    const float r = saved ? rstd[row] : reciprocal_deviation(sums[1], d, eps);
    if (threadIdx.x == 0) r_of[row] = r;
    const float mean = sums[0] * r / static_cast<float>(d);
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      const float normalised = to_float(x[first + column]) * r;
      const float g = Convention::factor(to_float(w[column])) * to_float(dy[first + column]);
      float slope = r * (g - normalised * mean);
      if (!saved && d == 1) slope = lone_gradient(g, r, eps);
      if constexpr (adds) slope += to_float(dsum[first + column]);
      dx[first + column] = from_float<T>(slope);
    }
  }
}

// partial [chunks, d]: a thread adds up `chunk` rows of one column.
// Grid: (ceil(d / 256), chunks). Block: 256.
template <class T>
__global__ void __launch_bounds__(256)
    backward_fallback_columns(const T* x, const T* dy, const float* r_of, float* partial, i64 rows,
                              int d, i64 chunk) {
  const int column = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (column >= d) return;
  const i64 begin = blockIdx.y * chunk;
  const i64 end = begin + chunk < rows ? begin + chunk : rows;
  float sum = 0.0f;
  for (i64 row = begin; row < end; ++row) {
    sum += to_float(dy[row * d + column]) * (to_float(x[row * d + column]) * r_of[row]);
  }
  partial[static_cast<i64>(blockIdx.y) * d + column] = sum;
}

template <class W>
__global__ void __launch_bounds__(512)
    backward_fallback_weight(const float* partial, W* dw, int rows, i64 columns) {
  column_sum(partial, dw, rows, columns);
}

}  // namespace fftune

// bias-gelu as an unfused sequence of kernels, the baseline of `bench`.
// Block: 256. Grid: (ceil(h / 1024), min(m, 65535)) unless stated otherwise.
#include "common/activation.cuh"
#include "common/columns.cuh"
#include "common/vectors.cuh"

namespace fftune {

template <class T, class B>
__global__ void __launch_bounds__(256)
    baseline_add(const T* x, const B* bias, T* sum, i64 m, i64 h) {
  for_elements(m, h, [&](i64 row, i64 column) {
    const i64 i = row * h + column;
    sum[i] = from_float<T>(to_float(x[i]) + to_float(bias[column]));
  });
}

template <class T, class Activation>
__global__ void __launch_bounds__(256) baseline_activate(const T* sum, T* y, i64 m, i64 h) {
  for_elements(m, h, [&](i64 row, i64 column) {
    const i64 i = row * h + column;
    y[i] = from_float<T>(Activation::value(to_float(sum[i])));
  });
}

template <class T, class Activation>
__global__ void __launch_bounds__(256)
    baseline_slope(const T* sum, const T* dy, T* dx, i64 m, i64 h) {
  for_elements(m, h, [&](i64 row, i64 column) {
    const i64 i = row * h + column;
    float value, slope;
    const float input = to_float(sum[i]);
    Activation::value_and_slope(input, value, slope);
    dx[i] = from_float<T>(activation_gradient<Activation>(input, to_float(dy[i]), slope));
  });
}

// partial [chunks, h]. Grid: (ceil(h / 256), chunks).
template <class T>
__global__ void __launch_bounds__(256)
    baseline_chunks(const T* dx, float* partial, i64 m, i64 h, i64 chunk) {
  const i64 column = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (column >= h) return;
  const i64 begin = blockIdx.y * chunk;
  const i64 end = begin + chunk < m ? begin + chunk : m;
  float sum = 0.0f;
  for (i64 row = begin; row < end; ++row) sum += to_float(dx[row * h + column]);
  partial[blockIdx.y * h + column] = sum;
}

template <class B>
__global__ void __launch_bounds__(512)
    baseline_sum(const float* partial, B* dbias, int rows, i64 columns) {
  column_sum(partial, dbias, rows, columns);
}

}  // namespace fftune

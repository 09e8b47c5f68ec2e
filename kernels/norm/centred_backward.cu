// The backward pass in four kernels: dx and the rows' moments; partial dw and db over chunks of
// rows; the sums of the chunks.
//
// x, dy, dsum, dx [rows, d], w [d]; moments [rows, 2], mean and 1 / deviation, and the partial sums
// [chunks, d] are workspace.
#include "common/async.cuh"
#include "common/columns.cuh"
#include "common/numerics.cuh"
#include "common/rows.cuh"

namespace fftune {

// Grid: min(rows, 2^31 - 1). Block: 256 threads, which share a row.
template <class T, bool adds>
__global__ void __launch_bounds__(256)
    layernorm_backward(const T* x, const T* w, const T* dy, const T* dsum, T* dx, float2* moments,
                       i64 rows, int d, float eps) {
  using one_sum = row_sum<1, 256, 1, 1>;
  using two_sums = row_sum<2, 256, 1, 1>;
  __shared__ typename one_sum::memory shared_one;
  __shared__ typename two_sums::memory shared_two;
  const float share = 1.0f / static_cast<float>(d);
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const i64 first = row * d;
    float total[1] = {};
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      total[0] += to_float(x[first + column]);
    }
    one_sum::apply(total, shared_one, 0);
    const float mean = total[0] * share;
    float squares[1] = {};
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      const float value = to_float(x[first + column]) - mean;
      squares[0] += value * value;
    }
    one_sum::apply(squares, shared_one, 1);
    const float r = rsqrtf(squares[0] * share + eps);
    if (threadIdx.x == 0) moments[row] = {mean, r};
    float sums[2] = {};  // of g, and of g x̂
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      const float g = to_float(w[column]) * to_float(dy[first + column]);
      sums[0] += g;
      sums[1] += g * (to_float(x[first + column]) - mean) * r;
    }
    two_sums::apply(sums, shared_two, 0);
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      // Rounded as in the sum: with one feature the difference is exactly zero.
      const float g = __fmul_rn(to_float(w[column]), to_float(dy[first + column]));
      const float centred = __fsub_rn(g, sums[0] * share);
      const float normalised = (to_float(x[first + column]) - mean) * r;
      // With two features the difference would cancel every digit: 1 - x̂² is eps r².
      float slope =
          d == 2 ? r * centred * (eps * r * r) : r * (centred - normalised * (sums[1] * share));
      if constexpr (adds) slope += to_float(dsum[first + column]);
      dx[first + column] = from_float<T>(slope);
    }
    __syncthreads();
  }
}

// A thread adds up `chunk` rows of one column. Grid: (ceil(d / 256), chunks). Block: 256.
template <class T>
__global__ void __launch_bounds__(256)
    layernorm_backward_columns(const T* x, const T* dy, const float2* moments, float* dw, float* db,
                               i64 rows, int d, i64 chunk) {
  const int column = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (column >= d) return;
  const i64 begin = blockIdx.y * chunk;
  const i64 end = begin + chunk < rows ? begin + chunk : rows;
  float of_w = 0.0f, of_b = 0.0f;
  for (i64 row = begin; row < end; ++row) {
    const float slope = to_float(dy[row * d + column]);
    const float2 own = moments[row];
    of_w += slope * ((to_float(x[row * d + column]) - own.x) * own.y);
    of_b += slope;
  }
  const i64 at = static_cast<i64>(blockIdx.y) * d + column;
  dw[at] = of_w;
  db[at] = of_b;
}

template <class T>
__global__ void __launch_bounds__(512)
    layernorm_backward_sum(const float* partial, T* out, int rows, i64 columns) {
  column_sum(partial, out, rows, columns);
}

}  // namespace fftune

// y = (x − mean) / sqrt(var + eps) ⊙ w + b. Rows that fit in registers are read once; the variance
// is of what is left after the mean is taken away, so that a large mean costs no digits.
//
// x, residual, y, sum [rows, d], w, b [d]. `adds`: sum = x + residual is written, and normalised.
#include "common/async.cuh"
#include "common/numerics.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"

namespace fftune {

// `group` threads share a row, a block has `groups` of them; vector i of a thread is vector
// i * group + lane of the row. Grid: ceil(rows / groups). Block: group * groups.
template <class T, bool adds, int vector, int vectors, int group, int groups>
__global__ void __launch_bounds__(group* groups)
    layernorm_rows(const T* x, const T* residual, const T* w, const T* b, T* y, T* sum, i64 rows,
                   int d, float eps) {
  constexpr int count = vector / static_cast<int>(sizeof(T));
  using sums = row_sum<1, group, groups, 1>;
  __shared__ typename sums::memory shared;
  wait_and_launch_dependents();
  const u64 policy = l2_eviction_policy<false>();
  const i64 row = static_cast<i64>(blockIdx.x) * groups + threadIdx.x / group;
  const int first_column = static_cast<int>(threadIdx.x) % group * count;
  constexpr int column_step = group * count;
  float values[vectors][count];
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    const bool valid = row < rows && column < d;
    to_floats(load_once<T, count>(x + row * d + column, valid, policy), values[i]);
    if constexpr (adds) {
      float other[count];
      to_floats(load_once<T, count>(residual + row * d + column, valid, policy), other);
#pragma unroll
      for (int e = 0; e < count; ++e) values[i][e] += other[e];
      const auto rounded = from_floats<T>(values[i]);
      to_floats(rounded, values[i]);
      if (valid) store_once(sum + row * d + column, rounded, policy);
    }
  }
  float total[1] = {};
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
#pragma unroll
    for (int e = 0; e < count; ++e) total[0] += values[i][e];
  }
  sums::apply(total, shared, 0);
  const float mean = total[0] / static_cast<float>(d);
  float squares[1] = {};
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
#pragma unroll
    for (int e = 0; e < count; ++e) {
      values[i][e] -= mean;
      if (first_column + i * column_step < d) squares[0] += values[i][e] * values[i][e];
    }
  }
  sums::apply(squares, shared, 1);
  const float rstd = rsqrtf(squares[0] / static_cast<float>(d) + eps);
  if (row >= rows) return;
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    if (column >= d) continue;
    float weight[count], bias[count];
    to_floats(load_through_l1<T, count>(w + column, true), weight);
    to_floats(load_through_l1<T, count>(b + column, true), bias);
#pragma unroll
    for (int e = 0; e < count; ++e) values[i][e] = values[i][e] * rstd * weight[e] + bias[e];
    store_once(y + row * d + column, from_floats<T>(values[i]), policy);
  }
}

// Any width and alignment: a row is read three times, twice from L2. Grid: min(rows, 2^31 - 1).
// Block: 256.
template <class T, bool adds>
__global__ void __launch_bounds__(256)
    layernorm_fallback(const T* x, const T* residual, const T* w, const T* b, T* y, T* sum,
                       i64 rows, int d, float eps) {
  using sums = row_sum<1, 256, 1, 1>;
  __shared__ typename sums::memory shared;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    // A thread reads only elements that it wrote itself, so no barrier is needed.
    const T* const values = (adds ? sum : x) + row * d;
    float total[1] = {};
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      if constexpr (adds) {
        const i64 at = row * d + column;
        sum[at] = from_float<T>(to_float(x[at]) + to_float(residual[at]));
      }
      total[0] += to_float(values[column]);
    }
    sums::apply(total, shared, 0);
    const float mean = total[0] / static_cast<float>(d);
    float squares[1] = {};
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      const float value = to_float(values[column]) - mean;
      squares[0] += value * value;
    }
    sums::apply(squares, shared, 1);
    const float rstd = rsqrtf(squares[0] / static_cast<float>(d) + eps);
    for (int column = static_cast<int>(threadIdx.x); column < d; column += 256) {
      const float value = (to_float(values[column]) - mean) * rstd;
      y[row * d + column] = from_float<T>(value * to_float(w[column]) + to_float(b[column]));
    }
    __syncthreads();
  }
}

}  // namespace fftune

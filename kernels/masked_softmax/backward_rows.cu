// The gradient of a softmax for rows that fit in registers: dx = scale y (dy - sum of y dy). y and
// dy are read once, with all loads of a row in flight together.
//
// Threads and rows as in forward_rows.cu. Columns that a causal mask excludes are not read.
#include "common/async.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"

namespace fftune {

template <class T, bool causal, int vector, int vectors, int group, int groups, int cluster,
          bool evict_first>
__global__ void __launch_bounds__(group* groups)
    softmax_backward_rows(const T* y, const T* dy, T* dx, i64 rows, int n, int s, float scale) {
  wait_and_launch_dependents();
  constexpr int count = vector / static_cast<int>(sizeof(T));
  using reduction = row_reduction<plain_sum, group, groups, cluster>;
  __shared__ typename reduction::memory shared;
  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int lane = static_cast<int>(threadIdx.x) % group;
  const int first_column = (rank * group + lane) * count;
  constexpr int column_step = cluster * group * count;
  const u64 policy = l2_eviction_policy<evict_first>();
  const i64 row = static_cast<i64>(blockIdx.x / cluster) * groups + threadIdx.x / group;
  i64 columns = row < rows ? n : 0;
  if (causal && row < rows) {
    const i64 end = row % s + n - s + 1;
    columns = end < 0 ? 0 : end < n ? end : n;
  }

  aligned_vector<T, count> weights[vectors], gradients[vectors];
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    weights[i] = load_once<T, count>(y + row * n + column, column < columns, policy);
    gradients[i] = load_once<T, count>(dy + row * n + column, column < columns, policy);
  }
  plain_sum own = plain_sum::nothing();
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    float weight[count], gradient[count];
    to_floats(weights[i], weight);
    to_floats(gradients[i], gradient);
#pragma unroll
    for (int e = 0; e < count; ++e) {
      if (column + e < columns) own.sum += weight[e] * gradient[e];
    }
  }
  const float sum = reduction::apply(own, shared).sum;
  if (row >= rows) return;
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    if (column >= n) continue;
    float weight[count], gradient[count];
    to_floats(weights[i], weight);
    to_floats(gradients[i], gradient);
#pragma unroll
    for (int e = 0; e < count; ++e) {
      gradient[e] = column + e < columns ? scale * weight[e] * (gradient[e] - sum) : 0.0f;
    }
    store_once(dx + row * n + column, from_floats<T>(gradient), policy);
  }
}

}  // namespace fftune

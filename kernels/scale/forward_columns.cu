// y = factor[0]·x. In place, where y is x, nothing is moved if the factor is 1.
//
// x and y are [m, h]. Grid: column_blocks * ceil(m / (rows * unroll)). Block: columns * rows.
#include "common/async.cuh"
#include "common/columns.cuh"

namespace fftune {

template <class T, int vector, int columns, int rows, int unroll, bool evict_first>
__global__ void __launch_bounds__(columns* rows)
    forward_columns(const T* x, const float* factor, T* y, i64 m, i64 h, int column_blocks) {
  wait_and_launch_dependents();
  const float scale = *factor;
  if (scale == 1.0f && x == y) return;
  using grid = column_grid<T, vector, columns, rows, unroll>;
  constexpr int count = grid::count;
  const grid at(column_blocks);
  if (at.column >= h) return;
  const u64 policy = l2_eviction_policy<evict_first>();
  aligned_vector<T, count> loaded[unroll];
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    const i64 row = at.row + u * rows;
    loaded[u] = load_once<T, count>(x + row * h + at.column, row < m, policy);
  }
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    const i64 row = at.row + u * rows;
    if (row >= m) return;
    float value[count];
    to_floats(loaded[u], value);
#pragma unroll
    for (int e = 0; e < count; ++e) value[e] *= scale;
    store_once(y + row * h + at.column, from_floats<T>(value), policy);
  }
}

}  // namespace fftune

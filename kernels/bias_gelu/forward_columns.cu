// y = act(x + bias), each byte read or written once.
//
// x, y, input [m, h], bias [h]; `saves`: x + bias is written to input. A thread has up to 16
// bytes of each of `unroll` rows in flight, and the bias of its columns in registers. Grid:
// column_blocks * ceil(m / (rows * unroll)). Block: columns * rows.
#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/columns.cuh"

namespace fftune {

template <class T, class B, class Activation, bool saves, int vector, int columns, int rows,
          int unroll, bool evict_first>
__global__ void __launch_bounds__(columns* rows)
    forward_columns(const T* x, const B* bias, T* y, T* input, i64 m, i64 h, int column_blocks) {
  wait_and_launch_dependents();
  using grid = column_grid<T, vector, columns, rows, unroll>;
  constexpr int count = grid::count;
  const grid at(column_blocks);
  if (at.column >= h) return;
  const u64 policy = l2_eviction_policy<evict_first>();
  aligned_vector<T, count> values[unroll];
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    const i64 row = at.row + u * rows;
    values[u] = load_once<T, count>(x + row * h + at.column, row < m, policy);
  }
  float offset[count];
  to_floats(load_through_l1<B, count>(bias + at.column, true), offset);
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    const i64 row = at.row + u * rows;
    if (row >= m) return;
    float value[count];
    to_floats(values[u], value);
#pragma unroll
    for (int e = 0; e < count; ++e) value[e] += offset[e];
    if constexpr (saves) store_once(input + row * h + at.column, from_floats<T>(value), policy);
#pragma unroll
    for (int e = 0; e < count; ++e) value[e] = Activation::value(value[e]);
    store_once(y + row * h + at.column, from_floats<T>(value), policy);
  }
}

}  // namespace fftune

// out = act(gate) ⊙ up, each byte read or written once.
//
// gate, up and out are [m, h]; rows of gate and up are `stride` elements apart: h, or 2 h where
// they are the two halves of a packed row. Grid: column_blocks * ceil(m / (rows * unroll)). Block:
// columns * rows.
#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/columns.cuh"

namespace fftune {

template <class T, class Activation, bool packed, int vector, int columns, int rows, int unroll,
          bool evict_first>
__global__ void __launch_bounds__(columns* rows)
    forward_columns(const T* gate, const T* up, T* out, i64 m, i64 h, int column_blocks) {
  wait_and_launch_dependents();
  using grid = column_grid<T, vector, columns, rows, unroll>;
  constexpr int count = grid::count;
  const grid at(column_blocks);
  if (at.column >= h) return;
  const i64 stride = packed ? 2 * h : h;
  const T* const second = packed ? gate + h : up;
  const u64 policy = l2_eviction_policy<evict_first>();
  aligned_vector<T, count> gates[unroll], ups[unroll];
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    const i64 row = at.row + u * rows;
    gates[u] = load_once<T, count>(gate + row * stride + at.column, row < m, policy);
    ups[u] = load_once<T, count>(second + row * stride + at.column, row < m, policy);
  }
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    const i64 row = at.row + u * rows;
    if (row >= m) return;
    float value[count], factor[count];
    to_floats(gates[u], value);
    to_floats(ups[u], factor);
#pragma unroll
    for (int e = 0; e < count; ++e) value[e] = Activation::value(value[e]) * factor[e];
    store_once(out + row * h + at.column, from_floats<T>(value), policy);
  }
}

}  // namespace fftune

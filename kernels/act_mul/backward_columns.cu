// dgate = dout ⊙ up ⊙ act'(gate) and dup = dout ⊙ act(gate), each byte read or written
// once.
//
// Layouts as in forward_columns; dgate and dup are packed where gate and up are.
// Grid: column_blocks * ceil(m / (rows * unroll)). Block: columns * rows.
#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/columns.cuh"

namespace fftune {

template <class T, class Activation, bool packed, int vector, int columns, int rows, int unroll,
          bool evict_first>
__global__ void __launch_bounds__(columns* rows)
    backward_columns(const T* gate, const T* up, const T* dout, T* dgate, T* dup, i64 m, i64 h,
                     int column_blocks) {
  wait_and_launch_dependents();
  using grid = column_grid<T, vector, columns, rows, unroll>;
  constexpr int count = grid::count;
  const grid at(column_blocks);
  if (at.column >= h) return;
  const i64 stride = packed ? 2 * h : h;
  const T* const second = packed ? gate + h : up;
  T* const second_gradient = packed ? dgate + h : dup;
  const u64 policy = l2_eviction_policy<evict_first>();
  aligned_vector<T, count> gates[unroll], ups[unroll], gradients[unroll];
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    const i64 row = at.row + u * rows;
    gates[u] = load_once<T, count>(gate + row * stride + at.column, row < m, policy);
    ups[u] = load_once<T, count>(second + row * stride + at.column, row < m, policy);
    gradients[u] = load_once<T, count>(dout + row * h + at.column, row < m, policy);
  }
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    const i64 row = at.row + u * rows;
    if (row >= m) return;
    float value[count], factor[count], gradient[count];
    to_floats(gates[u], value);
    to_floats(ups[u], factor);
    to_floats(gradients[u], gradient);
#pragma unroll
    for (int e = 0; e < count; ++e) {
      float activated, slope;
      Activation::value_and_slope(value[e], activated, slope);
      value[e] = activation_gradient<Activation>(value[e], gradient[e] * factor[e], slope);
      factor[e] = gradient[e] * activated;
    }
    store_once(dgate + row * stride + at.column, from_floats<T>(value), policy);
    store_once(second_gradient + row * stride + at.column, from_floats<T>(factor), policy);
  }
}

}  // namespace fftune

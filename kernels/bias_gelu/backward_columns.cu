// dx = dy ⊙ act'(x + bias) and dbias = the sum of the unrounded dx over rows. x + bias is
// recomputed, so that the forward pass saves x alone; `saved`: x is that sum, and bias is unused.
//
// x, dy, dx [m, h], bias, dbias [h], partial [row blocks, h]. A thread adds up its columns over
// all its rows, a block adds up its threads in shared memory, and backward_columns_bias adds up the
// blocks. The order of every sum is fixed.
// Grid: column_blocks * row_blocks. Block: columns * rows.
#include "common/activation.cuh"
#include "common/columns.cuh"

namespace fftune {

template <class T, class B, class Activation, bool saved, int vector, int columns, int rows,
          int unroll, bool evict_first>
__global__ void __launch_bounds__(columns* rows)
    backward_columns(const T* x, const B* bias, const T* dy, T* dx, float* partial, i64 m, i64 h,
                     int column_blocks) {
  using grid = column_grid<T, vector, columns, rows, unroll>;
  constexpr int count = grid::count;
  __shared__ float row_sums[rows > 1 ? rows * grid::width : 1];
  const grid at(column_blocks);
  const bool inside = at.column < h;
  const i64 step = static_cast<i64>(gridDim.x / static_cast<u32>(column_blocks)) * grid::height;
  wait_and_launch_dependents();
  const u64 policy = l2_eviction_policy<evict_first>();
  float offset[count], sum[count] = {};
  to_floats(load_through_l1<B, count>(bias + at.column, inside && !saved), offset);

  for (i64 first = at.row; first < m; first += step) {
    aligned_vector<T, count> values[unroll], gradients[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const i64 row = first + u * rows;
      const bool valid = inside && row < m;
      values[u] = load_once<T, count>(x + row * h + at.column, valid, policy);
      gradients[u] = load_once<T, count>(dy + row * h + at.column, valid, policy);
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const i64 row = first + u * rows;
      if (!inside || row >= m) continue;
      float value[count], gradient[count];
      to_floats(values[u], value);
      to_floats(gradients[u], gradient);
#pragma unroll
      for (int e = 0; e < count; ++e) {
        float result, slope;
        const float input = value[e] + offset[e];
        Activation::value_and_slope(input, result, slope);
        gradient[e] = activation_gradient<Activation>(input, gradient[e], slope);
        sum[e] += gradient[e];
      }
      store_once(dx + row * h + at.column, from_floats<T>(gradient), policy);
    }
  }

  float* const block_partial = partial + static_cast<i64>(at.row_block) * h;
  if constexpr (rows == 1) {
#pragma unroll
    for (int e = 0; e < count; ++e) {
      if (inside) block_partial[at.column + e] = sum[e];
    }
  } else {
    const int own = static_cast<int>(threadIdx.x) / columns * grid::width +
                    static_cast<int>(threadIdx.x) % columns * count;
#pragma unroll
    for (int e = 0; e < count; ++e) row_sums[own + e] = sum[e];
    __syncthreads();
    const i64 begin = at.column - static_cast<int>(threadIdx.x) % columns * count;
    for (int i = static_cast<int>(threadIdx.x); i < grid::width; i += columns * rows) {
      float total = 0.0f;
#pragma unroll
      for (int row = 0; row < rows; ++row) total += row_sums[row * grid::width + i];
      if (begin + i < h) block_partial[begin + i] = total;
    }
  }
}

template <class B>
__global__ void __launch_bounds__(512)
    backward_columns_bias(const float* partial, B* dbias, int rows, i64 columns) {
  column_sum(partial, dbias, rows, columns);
}

}  // namespace fftune

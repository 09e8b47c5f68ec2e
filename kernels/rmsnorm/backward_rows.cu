// dx = r(g − x̂·mean(g x̂)) + dsum and dw = the sum over rows of dy ⊙ x̂, with x̂ = r·x, r = 1 /
// sqrt(mean(x²) + eps) and g = factor(w) ⊙ dy, for rows that fit in registers: x and dy are read
// once.
//
// x, dy, dsum, dx [rows, d], w, dw [d], rstd [rows]; partial [gridDim.x / cluster, d]. Threads
// share rows as in forward_rows. A thread has the same columns in every row that it works on, so it
// adds up their dw in registers; the groups of a block meet in shared memory, and
// backward_rows_weight adds up the blocks. Every sum has a fixed order. `ahead`: the next row is
// fetched before the sums of this one, so that loads are in flight all the time.
// Grid: any number of clusters of (cluster, 1, 1). Block: group * groups.
#include "common/column_sum.cuh"
#include "common/packet.cuh"
#include "common/rms_norm.cuh"
#include "common/row_sum.cuh"

namespace fftune {

template <class T, class W, class Convention, bool adds, bool saved, int vector, int vectors,
          int group, int groups, int cluster, bool ahead, bool streams>
__global__ void __launch_bounds__(group* groups)
    backward_rows(const T* x, const W* w, const T* dy, const T* dsum, const float* rstd, T* dx,
                  float* partial, i64 rows, int d, float eps) {
  constexpr int count = vector / static_cast<int>(sizeof(T));
  using row_sums = row_sum<saved ? 1 : 2, group, groups, cluster>;
  __shared__ typename row_sums::memory shared;
  __shared__ float group_sums[groups > 1 ? groups * group * vectors * count : 1];
  wait_for_dependencies();

  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int lane = static_cast<int>(threadIdx.x) % group;
  const int first_column = (rank * group + lane) * count;
  constexpr int column_step = cluster * group * count;
  const u64 policy = stream_policy<streams>();

  packet<W, count> weights[vectors];
  float weight_gradient[vectors][count] = {};
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    weights[i] = load_shared_by_blocks<W, count>(w + column, column < d);
  }

  struct loaded_row {
    packet<T, count> values[vectors], gradients[vectors], passed[adds ? vectors : 1];
    float r;  // as it was saved
  };
  const auto load = [&](i64 row, loaded_row& to) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const int column = first_column + i * column_step;
      const bool valid = row < rows && column < d;
      to.values[i] = load_once<T, count>(x + row * d + column, valid, policy);
      to.gradients[i] = load_once<T, count>(dy + row * d + column, valid, policy);
      if constexpr (adds) {
        to.passed[i] = load_once<T, count>(dsum + row * d + column, valid, policy);
      }
    }
    to.r = saved && row < rows ? rstd[row] : 0.0f;
  };

  const i64 step = static_cast<i64>(gridDim.x / cluster) * groups;
  i64 base = static_cast<i64>(blockIdx.x / cluster) * groups;  // the block's first row
  i64 row = base + threadIdx.x / group;
  loaded_row current;
  load(row, current);
  for (int turn = 0; base < rows; base += step, row += step, turn ^= 1) {
    loaded_row next;
    if constexpr (ahead) load(row + step, next);

    float sums[saved ? 1 : 2] = {};  // of factor(w) dy x, and of x²
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      float value[count], gradient[count], weight[count];
      to_floats(current.values[i], value);
      to_floats(current.gradients[i], gradient);
      to_floats(weights[i], weight);
#pragma unroll
      for (int e = 0; e < count; ++e) {
        sums[0] += Convention::factor(weight[e]) * gradient[e] * value[e];
        if constexpr (!saved) sums[1] += value[e] * value[e];
      }
    }
    row_sums::apply(sums, shared, turn);
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      forget_floats(current.values[i]);
      forget_floats(current.gradients[i]);
      forget_floats(weights[i]);
    }
    const float r = saved ? current.r : reciprocal_deviation(sums[saved ? 0 : 1], d, eps);
    const float mean = sums[0] * r / static_cast<float>(d);  // of g x̂

#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const int column = first_column + i * column_step;
      if (row >= rows || column >= d) continue;
      float value[count], gradient[count], weight[count], other[count] = {};
      to_floats(current.values[i], value);
      to_floats(current.gradients[i], gradient);
      to_floats(weights[i], weight);
      if constexpr (adds) to_floats(current.passed[i], other);
#pragma unroll
      for (int e = 0; e < count; ++e) {
        const float normalised = value[e] * r;
        weight_gradient[i][e] += gradient[e] * normalised;
        const float g = Convention::factor(weight[e]) * gradient[e];
        float slope = r * (g - normalised * mean);
        if (!saved && d == 1) slope = lone_gradient(g, r, eps);
        value[e] = slope + other[e];
      }
      store_once(dx + row * d + column, from_floats<T>(value), policy);
    }
    if constexpr (ahead) {
      current = next;
    } else {
      load(row + step, current);
    }
  }
  row_sums::finish();

  float* const block_partial = partial + static_cast<i64>(blockIdx.x / cluster) * d;
  if constexpr (groups == 1) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
#pragma unroll
      for (int e = 0; e < count; ++e) {
        const int column = first_column + i * column_step + e;
        if (column < d) block_partial[column] = weight_gradient[i][e];
      }
    }
  } else {
    constexpr int width = group * vectors * count;  // d, or more
    float* const own = group_sums + threadIdx.x / group * width;
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
#pragma unroll
      for (int e = 0; e < count; ++e) {
        own[first_column + i * column_step + e] = weight_gradient[i][e];
      }
    }
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.x); column < d; column += group * groups) {
      float sum = 0.0f;
#pragma unroll
      for (int g = 0; g < groups; ++g) sum += group_sums[g * width + column];
      block_partial[column] = sum;
    }
  }
  launch_dependents();
}

template <class W>
__global__ void __launch_bounds__(512)
    backward_rows_weight(const float* partial, W* dw, int rows, i64 columns) {
  column_sum(partial, dw, rows, columns);
}

}  // namespace fftune

// dx = r(g − x̂·mean(g x̂)) + dsum and dw = the sum over rows of dy ⊙ x̂, with x̂ = r·x, r = 1 /
// sqrt(mean(x²) + eps) and g = factor(w) ⊙ dy, for rows that fit in registers: x and dy are read
// once.
//
// x, dy, dsum, dx [rows, d], w, dw [d], rstd [rows]; partial [gridDim.x / cluster, d]. Threads
// share rows as in forward_rows. A thread has the same columns in every row that it works on, so it
// adds up their dw in registers; the groups of a block meet in shared memory, and
// backward_rows_weight adds up the blocks. Every sum has a fixed order. `ahead`: with 1 the next
// row is fetched before the sums of this one, so that loads are in flight all the time; with more,
// so many rows are in shared memory or on their way there, this one among them.
// Grid: any number of clusters of (cluster, 1, 1). Block: group * groups. Dynamic shared memory:
// the row_ring of `ahead` rows where there are several.
#include "common/column_sum.cuh"
#include "common/packet.cuh"
#include "common/rms_norm.cuh"
#include "common/row_ring.cuh"
#include "common/row_sum.cuh"

namespace fftune {

template <class T, class W, class Convention, bool adds, bool saved, int vector, int vectors,
          int group, int groups, int cluster, int ahead, bool streams>
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

  constexpr bool rings = ahead > 1;
  static_assert(!rings || vector == 16, "a ring is of 16-byte accesses");
  using row_ring_of = row_ring<T, rings ? ahead : 1, adds ? 3 : 2, vectors, group * groups>;
  extern __shared__ vector16 dynamic_memory[];
  row_ring_of& ring = *reinterpret_cast<row_ring_of*>(dynamic_memory);
  struct loaded_row {
    packet<T, count> values[vectors], gradients[vectors], passed[adds ? vectors : 1];
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
  };
  const auto fetch = [&](i64 row, int place) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const int column = first_column + i * column_step;
      const bool valid = row < rows && column < d;
      ring.fetch(place, 0, i, x + row * d + column, valid, policy);
      ring.fetch(place, 1, i, dy + row * d + column, valid, policy);
      if constexpr (adds) ring.fetch(place, 2, i, dsum + row * d + column, valid, policy);
    }
    copy_async_commit();
  };
  const auto saved_deviation = [&](i64 row) { return saved && row < rows ? rstd[row] : 0.0f; };

  const i64 step = static_cast<i64>(gridDim.x / cluster) * groups;
  i64 base = static_cast<i64>(blockIdx.x / cluster) * groups;  // the block's first row
  i64 row = base + threadIdx.x / group;
  loaded_row current;
  if constexpr (rings) {
#pragma unroll
    for (int i = 0; i < ahead; ++i) fetch(row + i * step, i);
  } else {
    load(row, current);
  }
  float r = saved_deviation(row);
  int place = 0;  // the row's in the ring
  for (int turn = 0; base < rows; base += step, row += step, turn ^= 1) {
    loaded_row next;
    if constexpr (ahead == 1) load(row + step, next);
    if constexpr (rings) copy_async_wait<ahead - 1>();
    const float next_r = saved_deviation(row + step);
    const auto values_of = [&](int i) {
      if constexpr (rings)
        return ring.take(place, 0, i);
      else
        return current.values[i];
    };
    const auto gradients_of = [&](int i) {
      if constexpr (rings)
        return ring.take(place, 1, i);
      else
        return current.gradients[i];
    };

    float sums[saved ? 1 : 2] = {};  // of factor(w) dy x, and of x²
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      float value[count], gradient[count], weight[count];
      to_floats(values_of(i), value);
      to_floats(gradients_of(i), gradient);
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
      if constexpr (!rings) {
        forget_floats(current.values[i]);
        forget_floats(current.gradients[i]);
      }
      forget_floats(weights[i]);
    }
    if constexpr (!saved) r = reciprocal_deviation(sums[1], d, eps);
    // r² times the mean of g x̂: what the slope is less by for each x.
    const float mean_slope = sums[0] * r / static_cast<float>(d) * r * r;

#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const int column = first_column + i * column_step;
      if (row >= rows || column >= d) continue;
      float value[count], gradient[count], weight[count], other[count] = {};
      to_floats(values_of(i), value);
      to_floats(gradients_of(i), gradient);
      to_floats(weights[i], weight);
      if constexpr (adds && rings) to_floats(ring.take(place, 2, i), other);
      if constexpr (adds && !rings) to_floats(current.passed[i], other);
#pragma unroll
      for (int e = 0; e < count; ++e) {
        const float scaled = gradient[e] * r;
        weight_gradient[i][e] += scaled * value[e];
        float slope = Convention::factor(weight[e]) * scaled - value[e] * mean_slope;
        if constexpr (!saved && count == 1) {  // as rows of one column have it
          if (d == 1) slope = lone_gradient(Convention::factor(weight[e]) * gradient[e], r, eps);
        }
        value[e] = adds ? slope + other[e] : slope;
      }
      store_once(dx + row * d + column, from_floats<T>(value), policy);
    }
    r = next_r;
    if constexpr (rings) {
      fetch(row + ahead * step, place);  // what was there has been used
      if (++place == ahead) place = 0;
    } else if constexpr (ahead == 1) {
      current = next;
    } else {
      load(row + step, current);
    }
  }
  row_sums::finish();
  if constexpr (rings) copy_async_wait<0>();

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

// y = x̂ ⊙ factor(w) with x̂ = x / sqrt(mean(x²) + eps) for rows that fit in registers: x is read
// once, with all loads of a row in flight together.
//
// x, residual, y, sum [rows, d], w [d], rstd [rows]. `group` threads of each of `cluster` blocks
// share a row, a block has `groups` groups, and a group takes `unroll` rows at once. Vector i of a
// thread is vector (i * cluster + rank) * group + lane of the row, so that accesses coalesce.
// Blocks loop over the rows. `keeps`: weights are loaded once, before the rows, and stay in
// registers; else they are loaded for every row, after its sum. `l2_prefetch`: before
// griddepcontrol.wait a block prefetches its first rows to L2, and the first block the weights. If
// Y is a type of one byte, y is quantised (common/numerics.cuh) and scales [rows] is written. Grid:
// any number of clusters of (cluster, 1, 1). Block: group * groups.
#include "common/async.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"

namespace fftune {

template <class T, class W, class Convention, bool adds, bool saves, class Y, bool adds_after,
          int vector, int vectors, int group, int groups, int unroll, int cluster, bool keeps,
          bool evict_first, bool l2_prefetch>
__global__ void __launch_bounds__(group* groups)
    forward_rows(const T* x, const T* residual, const W* w, Y* y, T* sum, float* rstd,
                 float* scales, i64 rows, int d, float eps) {
  constexpr int count = vector / static_cast<int>(sizeof(T));
  if constexpr (l2_prefetch) {
    // A block's rows are contiguous.
    const i64 begin = static_cast<i64>(blockIdx.x / cluster) * groups * unroll;
    const i64 left = rows - begin;
    const u32 row_bytes = static_cast<u32>(d) * static_cast<u32>(sizeof(T));
    const u32 block_rows = static_cast<u32>(left < groups * unroll ? left : groups * unroll);
    if (threadIdx.x == 0 && blockIdx.x % cluster == 0) {
      prefetch_l2(x + begin * d, block_rows * row_bytes);
      if constexpr (adds) prefetch_l2(residual + begin * d, block_rows * row_bytes);
      if (blockIdx.x == 0) prefetch_l2(w, static_cast<u32>(d) * static_cast<u32>(sizeof(W)));
    }
  }
  wait_and_launch_dependents();
  using row_sums = row_sum<unroll, group, groups, cluster>;
  using row_largest = row_sum<unroll, group, groups, cluster, larger_magnitude>;
  constexpr bool quantises = sizeof(Y) == 1;
  __shared__ typename row_sums::memory shared;
  __shared__ typename row_largest::memory shared_largest;

  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int lane = static_cast<int>(threadIdx.x) % group;
  const int first_column = (rank * group + lane) * count;
  constexpr int column_step = cluster * group * count;
  const u64 policy = l2_eviction_policy<evict_first>();

  constexpr int chunk =
      keeps || vectors < 4 ? vectors : 4;  // vectors whose weights are in registers
  aligned_vector<W, count> weights[chunk];
  const auto load_weights = [&](int start) {
#pragma unroll
    for (int i = 0; i < chunk; ++i) {
      const int column = first_column + (start + i) * column_step;
      weights[i] = load_through_l1<W, count>(w + column, column < d);
    }
  };
  if constexpr (keeps) load_weights(0);

  const i64 step = static_cast<i64>(gridDim.x / cluster) * groups * unroll;
  int buffer = 0;
  for (i64 base = static_cast<i64>(blockIdx.x / cluster) * groups * unroll; base < rows;
       base += step, buffer ^= 1) {
    const i64 row = base + threadIdx.x / group;  // and every `groups`-th row after it
    aligned_vector<T, count> values[unroll][vectors];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        const int column = first_column + i * column_step;
        const bool valid = row + u * groups < rows && column < d;
        values[u][i] = load_once<T, count>(x + (row + u * groups) * d + column, valid, policy);
      }
    }
    float squares[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      squares[u] = 0.0f;
      if constexpr (adds) {
        aligned_vector<T, count> others[vectors];
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
          const int column = first_column + i * column_step;
          const bool valid = row + u * groups < rows && column < d;
          others[i] =
              load_once<T, count>(residual + (row + u * groups) * d + column, valid, policy);
        }
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
          const int column = first_column + i * column_step;
          float value[count], other[count];
          to_floats(values[u][i], value);
          to_floats(others[i], other);
#pragma unroll
          for (int e = 0; e < count; ++e) value[e] += other[e];
          values[u][i] = from_floats<T>(value);  // the rounded sum is normalised
          if (row + u * groups < rows && column < d) {
            store_once(sum + (row + u * groups) * d + column, values[u][i], policy);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        float value[count];
        to_floats(values[u][i], value);
#pragma unroll
        for (int e = 0; e < count; ++e) squares[u] += value[e] * value[e];
      }
    }
    row_sums::apply(squares, shared, buffer);

#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int i = 0; i < vectors; ++i) prevent_float_reuse(values[u][i]);
    }
    if constexpr (keeps) {
#pragma unroll
      for (int i = 0; i < vectors; ++i) prevent_float_reuse(weights[i]);
    }
    float r[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) r[u] = reciprocal_deviation(squares[u], d, eps);
    const auto weighed = [&](int u, int i, float(&value)[count]) {
      float weight[count];
      to_floats(values[u][i], value);
      to_floats(weights[i % chunk], weight);
#pragma unroll
      for (int e = 0; e < count; ++e) {
        // A quantised value is rounded only once.
        const float normalised =
            quantises ? value[e] * r[u] : Convention::template normalised<T>(value[e] * r[u]);
        value[e] = normalised * Convention::factor(weight[e]);
      }
    };
    float largest[unroll] = {};
    if constexpr (quantises) {
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        if (!keeps && i % chunk == 0) load_weights(i);
        if (first_column + i * column_step >= d) continue;
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
          float value[count];
          weighed(u, i, value);
#pragma unroll
          for (int e = 0; e < count; ++e)
            largest[u] = larger_magnitude::join(largest[u], fabsf(value[e]));
        }
      }
      row_largest::apply(largest, shared_largest, buffer);
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const i64 own = row + u * groups;
      if (own >= rows) continue;
      if (saves && first_column == 0) rstd[own] = r[u];
      const float scale = scale_of<Y>(largest[u]);
      const float factor = 1.0f / scale;
      if (quantises && first_column == 0) scales[own] = scale;
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        if (!keeps && i % chunk == 0) load_weights(i);
        const int column = first_column + i * column_step;
        if (column >= d) continue;
        float value[count];
        weighed(u, i, value);
        if constexpr (quantises) {
#pragma unroll
          for (int e = 0; e < count; ++e) value[e] *= factor;
          store_once(y + own * d + column, quantise<Y>(value), policy);
        } else {
          if constexpr (adds_after) {
            float other[count];
            to_floats(load_once<T, count>(residual + own * d + column, true, policy), other);
#pragma unroll
            for (int e = 0; e < count; ++e) value[e] += other[e];
          }
          store_once(y + own * d + column, from_floats<T>(value), policy);
        }
      }
    }
  }
  row_sums::finish();
}

}  // namespace fftune

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

// A row of a tensor [rows, d]; zeros behind the last one.
template <int column_step, class T, int count, int vectors>
__device__ __forceinline__ void load_row(aligned_vector<T, count> (&values)[vectors], const T* from,
                                         const i64& row, i64 rows, int first_column, int d,
                                         u64 policy) {
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    const bool valid = row < rows && column < d;
    values[i] = load_once<T, count>(from + row * d + column, valid, policy);
  }
}

// Prefetches a block's first rows, which are contiguous, to L2. The first block prefetches the
// weights.
template <class T, class W, bool adds>
__device__ __forceinline__ void prefetch_first_rows(const T* x, const T* residual, const W* w,
                                                    i64 rows, int d, int most_rows, int cluster) {
  const i64 begin = static_cast<i64>(blockIdx.x / cluster) * most_rows;
  const i64 left = rows - begin;
  const u32 row_bytes = static_cast<u32>(d) * static_cast<u32>(sizeof(T));
  const u32 block_rows = static_cast<u32>(left < most_rows ? left : most_rows);
  if (threadIdx.x == 0 && blockIdx.x % cluster == 0) {
    prefetch_l2(x + begin * d, block_rows * row_bytes);
    if constexpr (adds) prefetch_l2(residual + begin * d, block_rows * row_bytes);
    if (blockIdx.x == 0) prefetch_l2(w, static_cast<u32>(d) * static_cast<u32>(sizeof(W)));
  }
}

// Adds a row of the residual to x, and stores the rounded sum, which is normalised.
template <int column_step, class T, int count, int vectors>
__device__ __forceinline__ void add_residual(aligned_vector<T, count> (&values)[vectors],
                                             const T* residual, T* sum, const i64& row, i64 rows,
                                             int first_column, int d, u64 policy) {
  aligned_vector<T, count> others[vectors];
  load_row<column_step>(others, residual, row, rows, first_column, d, policy);
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    float value[count], other[count];
    to_floats(values[i], value);
    to_floats(others[i], other);
#pragma unroll
    for (int e = 0; e < count; ++e) value[e] += other[e];
    values[i] = from_floats<T>(value);
    if (row < rows && column < d) {
      store_once(sum + row * d + column, values[i], policy);
    }
  }
}

template <class Vector, int vectors>
__device__ __forceinline__ void prevent_float_reuse_of(Vector (&values)[vectors]) {
#pragma unroll
  for (int i = 0; i < vectors; ++i) prevent_float_reuse(values[i]);
}

// A vector of y: quantised, with the reciprocal of its scale as `factor`, or with the residual
// behind.
template <bool adds_after, class Y, class T, int count>
__device__ __forceinline__ void store_vector(Y* y, const T* residual, float (&value)[count],
                                             float factor, u64 policy) {
  if constexpr (sizeof(Y) == 1) {
#pragma unroll
    for (int e = 0; e < count; ++e) value[e] *= factor;
    store_once(y, quantise<Y>(value), policy);
  } else {
    if constexpr (adds_after) {
      float other[count];
      to_floats(load_once<T, count>(residual, true, policy), other);
#pragma unroll
      for (int e = 0; e < count; ++e) value[e] += other[e];
    }
    store_once(y, from_floats<T>(value), policy);
  }
}

template <class T, int count, int vectors>
__device__ __forceinline__ void add_squares(float& sum,
                                            const aligned_vector<T, count> (&values)[vectors]) {
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    float value[count];
    to_floats(values[i], value);
#pragma unroll
    for (int e = 0; e < count; ++e) sum += value[e] * value[e];
  }
}

// A quantised value is rounded only once.
template <class Convention, bool quantises, class T, class W, int count>
__device__ __forceinline__ void weigh(float (&value)[count], const aligned_vector<T, count>& values,
                                      const aligned_vector<W, count>& weights, const float& r) {
  float weight[count];
  to_floats(values, value);
  to_floats(weights, weight);
#pragma unroll
  for (int e = 0; e < count; ++e) {
    const float normalised =
        quantises ? value[e] * r : Convention::template normalised<T>(value[e] * r);
    value[e] = normalised * Convention::factor(weight[e]);
  }
}

// Neighbouring vectors of weights [d].
template <int column_step, class W, int count, int vectors>
__device__ __forceinline__ void load_columns(aligned_vector<W, count> (&values)[vectors],
                                             const W* from, int first_column, int d) {
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    values[i] = load_through_l1<W, count>(from + column, column < d);
  }
}

template <class T, class W, class Convention, bool adds, bool saves, class Y, bool adds_after,
          int vector, int vectors, int group, int groups, int unroll, int cluster, bool keeps,
          bool evict_first, bool l2_prefetch>
__global__ void __launch_bounds__(group* groups)
    forward_rows(const T* x, const T* residual, const W* w, Y* y, T* sum, float* rstd,
                 float* scales, i64 rows, int d, float eps) {
  constexpr int count = vector / static_cast<int>(sizeof(T));
  if constexpr (l2_prefetch) {
    prefetch_first_rows<T, W, adds>(x, residual, w, rows, d, groups * unroll, cluster);
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
    load_columns<column_step>(weights, w, first_column + start * column_step, d);
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
      load_row<column_step>(values[u], x, row + u * groups, rows, first_column, d, policy);
    }
    float squares[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      squares[u] = 0.0f;
      if constexpr (adds) {
        add_residual<column_step>(values[u], residual, sum, row + u * groups, rows, first_column, d,
                                  policy);
      }
      add_squares(squares[u], values[u]);
    }
    row_sums::apply(squares, shared, buffer);

#pragma unroll
    for (int u = 0; u < unroll; ++u) prevent_float_reuse_of(values[u]);
    if constexpr (keeps) prevent_float_reuse_of(weights);
    float r[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) r[u] = reciprocal_deviation(squares[u], d, eps);
    const auto weighed = [&](int u, int i, float(&value)[count]) {
      weigh<Convention, quantises>(value, values[u][i], weights[i % chunk], r[u]);
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
        store_vector<adds_after>(y + own * d + column, residual + own * d + column, value, factor,
                                 policy);
      }
    }
  }
  row_sums::finish();
}

}  // namespace fftune

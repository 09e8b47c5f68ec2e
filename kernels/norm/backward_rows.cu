// Computes dx = r(g − x̂·mean(g x̂)) + dsum and dw = the sum over rows of dy ⊙ x̂, for rows that
// fit in registers: x and dy are read once. Here x̂ = r·x, r = 1 / sqrt(mean(x²) + eps) and g =
// factor(w) ⊙ dy.
//
// x, dy, dsum, dx [rows, d], w, dw [d], rstd [rows]; partial [gridDim.x / cluster, d]. Threads
// share rows as in forward_rows. A thread has the same columns in every row, so it accumulates
// their dw in registers; a block adds up its groups in shared memory, and backward_rows_weight adds
// up the blocks. The order of every sum is fixed. `keeps`: weights stay in registers as floats;
// else they are loaded twice for every row, from L1. `prefetch`: the next row is loaded before the
// sums of this one, so that loads are always in flight. `l2_prefetch_rows`: each iteration
// prefetches to L2 the rows of this many iterations later; the first rows and the weights are
// prefetched before griddepcontrol.wait; 0: no prefetch. Grid: any number of clusters of (cluster,
// 1, 1). Block: group * groups; `resident`: blocks an SM (launch bounds).
#include "common/columns.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"

namespace fftune {

// The sums of a block, of its groups in their order.
template <int group, int groups, int column_step, int vectors, int count, int all>
__device__ __forceinline__ void store_partial(float* block_partial,
                                              const float (&weight_gradient)[vectors][count],
                                              float (&group_sums)[all], int first_column, int d) {
  if constexpr (groups == 1) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const int column = first_column + i * column_step;
      if (column < d) store_floats(block_partial + column, weight_gradient[i]);
    }
  } else {
    constexpr int width = group * vectors * count;  // d, or more
    float* const own = group_sums + threadIdx.x / group * width;
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      store_floats(own + first_column + i * column_step, weight_gradient[i]);
    }
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.x); column < d; column += group * groups) {
      float sum = 0.0f;
#pragma unroll
      for (int g = 0; g < groups; ++g) sum += group_sums[g * width + column];
      block_partial[column] = sum;
    }
  }
}

// A thread's part of a row, and the row's r as saved by the forward pass.
template <class T, int count, int vectors, bool adds>
struct backward_row {
  aligned_vector<T, count> values[vectors], gradients[vectors], passed[adds ? vectors : 1];
  float r;

  template <int column_step, bool saved>
  __device__ __forceinline__ void load(const T* x, const T* dy, const T* dsum, const float* rstd,
                                       i64 row, i64 rows, int first_column, int d, u64 policy) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const int column = first_column + i * column_step;
      const bool valid = row < rows && column < d;
      values[i] = load_once<T, count>(x + row * d + column, valid, policy);
      gradients[i] = load_once<T, count>(dy + row * d + column, valid, policy);
      if constexpr (adds) {
        passed[i] = load_once<T, count>(dsum + row * d + column, valid, policy);
      }
    }
    r = saved && row < rows ? rstd[row] : 0.0f;
  }
};

// To L2. A block's rows are contiguous.
template <int groups, bool adds, class T>
__device__ __forceinline__ void prefetch_block(const T* x, const T* dy, const T* dsum, i64 first,
                                               i64 rows, int d) {
  const i64 left = rows - first;
  const u32 bytes = static_cast<u32>(left < groups ? left : groups) * static_cast<u32>(d) *
                    static_cast<u32>(sizeof(T));
  prefetch_l2(x + first * d, bytes);
  prefetch_l2(dy + first * d, bytes);
  if constexpr (adds) prefetch_l2(dsum + first * d, bytes);
}

// `value`: elements of x, which become those of dx. `taken`: what dx loses for each unit of x.
template <bool adds, bool saved, int count>
__device__ __forceinline__ void differentiate(float (&value)[count],
                                              float (&weight_gradient)[count],
                                              const float (&gradient)[count],
                                              const float (&factor)[count],
                                              const float (&other)[count], float r, float taken,
                                              int d, float eps) {
#pragma unroll
  for (int e = 0; e < count; ++e) {
    const float scaled = gradient[e] * r;
    weight_gradient[e] += scaled * value[e];
    float slope = factor[e] * scaled - value[e] * taken;
    if constexpr (!saved && count == 1) {  // d == 1 implies count == 1
      if (d == 1) slope = lone_gradient(factor[e] * gradient[e], r, eps);
    }
    value[e] = adds ? slope + other[e] : slope;
  }
}

template <class Convention, class W, int count>
__device__ __forceinline__ void load_factor(float (&factor)[count], const W* w, int column, int d) {
  to_floats(load_through_l1<W, count>(w + column, column < d), factor);
#pragma unroll
  for (int e = 0; e < count; ++e) factor[e] = Convention::factor(factor[e]);
}

template <bool saved, int all, int count>
__device__ __forceinline__ void add_products(float (&sums)[all], const float (&factor)[count],
                                             const float (&gradient)[count],
                                             const float (&value)[count]) {
#pragma unroll
  for (int e = 0; e < count; ++e) {
    sums[0] += factor[e] * gradient[e] * value[e];
    if constexpr (!saved) sums[1] += value[e] * value[e];
  }
}

template <class T, class W, class Convention, bool adds, bool saved, int vector, int vectors,
          int group, int groups, int cluster, bool keeps, bool prefetch, int l2_prefetch_rows,
          bool evict_first, int resident>
__global__ void __launch_bounds__(group* groups, resident)
    backward_rows(const T* x, const W* w, const T* dy, const T* dsum, const float* rstd, T* dx,
                  float* partial, i64 rows, int d, float eps) {
  constexpr int count = vector / static_cast<int>(sizeof(T));
  using row_sums = row_sum<saved ? 1 : 2, group, groups, cluster>;
  __shared__ typename row_sums::memory shared;
  alignas(16) __shared__ float group_sums[groups > 1 ? groups * group * vectors * count : 1];

  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const i64 step = static_cast<i64>(gridDim.x / cluster) * groups;
  i64 base = static_cast<i64>(blockIdx.x / cluster) * groups;  // the block's first row
  const auto prefetch_rows = [&](i64 first) {
    if (threadIdx.x == 0 && rank == 0 && first < rows)
      prefetch_block<groups, adds>(x, dy, dsum, first, rows, d);
  };
  if constexpr (l2_prefetch_rows > 0) {
#pragma unroll
    for (int ahead = 0; ahead < l2_prefetch_rows; ++ahead) prefetch_rows(base + ahead * step);
    if (blockIdx.x == 0 && threadIdx.x == 0)
      prefetch_l2(w, static_cast<u32>(d) * static_cast<u32>(sizeof(W)));
  }
  wait_and_launch_dependents();

  const int lane = static_cast<int>(threadIdx.x) % group;
  const int first_column = (rank * group + lane) * count;
  constexpr int column_step = cluster * group * count;
  const u64 policy = l2_eviction_policy<evict_first>();
  const float inverse_width = 1.0f / static_cast<float>(d);
  const u32 zero = static_cast<u32>(d) >> 31;  // 0, unknown to the compiler
  float weight_gradient[vectors][count] = {};
  const auto load_factors = [&](int i, float(&factor)[count]) {
    load_factor<Convention>(factor, w, first_column + i * column_step, d);
  };
  float cached_factors[keeps ? vectors : 1][count];
  if constexpr (keeps) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) load_factors(i, cached_factors[i]);
  }
  const auto factors = [&](int i, float(&factor)[count]) {
    if constexpr (keeps) {
#pragma unroll
      for (int e = 0; e < count; ++e) factor[e] = cached_factors[i][e];
    } else {
      load_factors(i, factor);
    }
  };

  using loaded_row = backward_row<T, count, vectors, adds>;
  const auto load = [&](i64 row, loaded_row& to) {
    to.template load<column_step, saved>(x, dy, dsum, rstd, row, rows, first_column, d, policy);
  };

  i64 row = base + threadIdx.x / group;
  loaded_row current;
  load(row, current);
  for (int buffer = 0; base < rows; base += step, row += step, buffer ^= 1) {
    if constexpr (l2_prefetch_rows > 0) prefetch_rows(base + l2_prefetch_rows * step);
    loaded_row next;
    if constexpr (prefetch) load(row + step, next);

    float sums[saved ? 1 : 2] = {};  // of factor(w) dy x, and of x²
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      float value[count], gradient[count], factor[count];
      to_floats(current.values[i], value);
      to_floats(current.gradients[i], gradient);
      factors(i, factor);
      add_products<saved>(sums, factor, gradient, value);
    }
    row_sums::apply(sums, shared, buffer);
    const float r = saved ? current.r : rsqrtf(sums[saved ? 0 : 1] * inverse_width + eps);
    const float taken = sums[0] * r * inverse_width * r * r;  // dx loses this for each unit of x

#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const int column = first_column + i * column_step;
      if (row >= rows || column >= d) continue;
      float value[count], gradient[count], factor[count], other[count];
      to_floats_again(current.values[i], zero, value);
      to_floats_again(current.gradients[i], zero, gradient);
      factors(i, factor);
      if constexpr (adds) to_floats(current.passed[i], other);
      differentiate<adds, saved>(value, weight_gradient[i], gradient, factor, other, r, taken, d,
                                 eps);
      store_once(dx + row * d + column, from_floats<T>(value), policy);
    }
    if constexpr (prefetch) {
      current = next;
    } else {
      load(row + step, current);
    }
  }
  row_sums::finish();

  float* const block_partial = partial + static_cast<i64>(blockIdx.x / cluster) * d;
  store_partial<group, groups, column_step>(block_partial, weight_gradient, group_sums,
                                            first_column, d);
}

template <class W>
__global__ void __launch_bounds__(512)
    backward_rows_weight(const float* partial, W* dw, int rows, i64 columns) {
  column_sum(partial, dw, rows, columns);
}

}  // namespace fftune

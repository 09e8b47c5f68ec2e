// Softmax of rows that fit in registers. Scores are read once, with all loads of a row in flight
// together, and become powers of two relative to the thread's own largest score. One reduction then
// gives the row's largest score and its sum.
//
// x, y [rows, n], mask [mask rows, n]. `group` threads of each of `cluster` blocks share a row, and
// a block has `groups` rows. Vector i of a thread is vector (i * cluster + rank) * group + lane of
// the row, so that accesses coalesce. Columns that a causal mask excludes are not read.
//
// Grid: clusters of (cluster, 1, 1) for all rows. Block: group * groups.
#include "common/async.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"

namespace fftune {

// Rows of `s` queries of `heads` matrices of a sequence.
struct softmax_shape {
  i64 rows;
  int n, s;
  int mask_heads;  // `heads` whose masks are one; 1 if each head has its own
};

enum class softmax_mask { none, causal, boolean };

// Columns that a row may see for its place.
template <softmax_mask mask>
__device__ __forceinline__ int softmax_columns(i64 row, const softmax_shape& shape) {
  if constexpr (mask != softmax_mask::causal) return shape.n;
  const i64 end = row % shape.s + shape.n - shape.s + 1;
  return end < 0 ? 0 : end < shape.n ? static_cast<int>(end) : shape.n;
}

// One bit for each of `count` bytes that is not zero.
template <int count>
__device__ __forceinline__ u32 allowed_bits(const u8* bytes) {
  if constexpr (count == 1) {
    return *bytes != 0 ? 1 : 0;
  } else {
    aligned_vector<u8, count> word = load_through_l1<u8, count>(bytes, true);
    u32 bits = 0;
#pragma unroll
    for (int e = 0; e < count; ++e) {
      if ((word.word[e / 4] >> (e % 4 * 8) & 0xff) != 0) bits |= 1u << e;
    }
    return bits;
  }
}

template <class T, softmax_mask mask, int vector, int vectors, int group, int groups, int cluster,
          bool evict_first>
__global__ void __launch_bounds__(group* groups)
    softmax_forward_rows(const T* x, const u8* allowed, T* y, i64 rows, int n, int s,
                         int mask_heads, float scale) {
  wait_and_launch_dependents();
  constexpr int count = vector / static_cast<int>(sizeof(T));
  using reduction = row_reduction<softmax_sum, group, groups, cluster>;
  __shared__ typename reduction::memory shared;
  const softmax_shape shape{rows, n, s, mask_heads};
  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int lane = static_cast<int>(threadIdx.x) % group;
  const int first_column = (rank * group + lane) * count;
  constexpr int column_step = cluster * group * count;
  const u64 policy = l2_eviction_policy<evict_first>();
  const i64 row = static_cast<i64>(blockIdx.x / cluster) * groups + threadIdx.x / group;
  const int columns = row < rows ? softmax_columns<mask>(row, shape) : 0;
  const float factor = scale * 1.44269504088896341f;  // powers are of two

  aligned_vector<T, count> loaded[vectors];
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    loaded[i] = load_once<T, count>(x + row * n + column, column < columns, policy);
  }
  float value[vectors][count];
  softmax_sum own = softmax_sum::nothing();
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    to_floats(loaded[i], value[i]);
    u32 bits = ~0u;
    if constexpr (mask == softmax_mask::boolean) {
      const i64 mask_row = mask_heads == 1 ? row : row / s / mask_heads * s + row % s;
      if (column < columns) bits = allowed_bits<count>(allowed + mask_row * n + column);
    }
#pragma unroll
    for (int e = 0; e < count; ++e) {
      const bool sees = column + e < columns && (bits >> e & 1) != 0;
      value[i][e] = sees ? value[i][e] * factor : lowest_score();
      own.most = fmaxf(own.most, value[i][e]);
    }
  }
  const float reference = own.most == lowest_score() ? 0.0f : own.most;
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
#pragma unroll
    for (int e = 0; e < count; ++e) {
      value[i][e] = power_of_two(value[i][e] - reference);
      own.sum += value[i][e];
    }
  }
  const softmax_sum all = reduction::apply(own, shared);
  if (row >= rows) return;
  const float by = all.sum != 0.0f ? softmax_sum::factor(own.most, all.most) / all.sum : 0.0f;
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int column = first_column + i * column_step;
    if (column >= n) continue;
#pragma unroll
    for (int e = 0; e < count; ++e) value[i][e] *= by;
    store_once(y + row * n + column, from_floats<T>(value[i]), policy);
  }
}

}  // namespace fftune

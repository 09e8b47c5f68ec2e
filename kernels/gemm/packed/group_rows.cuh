// Rows of A in groups that are sorted before, such as those of experts, for kernels of packed
// weights: which rows a block has, and what belongs to a row and its group before the epilogue.
#pragma once

#include "common/numerics.cuh"
#include "gemm/epilogue_ops.cuh"
#include "gemm/form.cuh"

namespace fftune {

// `count` sorted rows from `first` on, of group `index`; none: there is no such tile.
struct group_rows {
  int index = 0, first = 0, count = 0;
};

// Tiles of up to `height` rows that all groups have. All lanes of a warp.
__device__ __forceinline__ int count_group_tiles(const gemm_params& p, int height) {
  int tiles = 0;
  for (int group = threadIdx.x % 32; group < p.groups; group += 32) {
    tiles += ceil_div(p.offsets[group + 1] - p.offsets[group], height);
  }
  return __reduce_add_sync(~0u, tiles);
}

// Tile number `slot` of all groups' tiles of up to `height` rows. All lanes of a warp.
__device__ __forceinline__ group_rows find_group_tile(const gemm_params& p, int slot, int height) {
  const int lane = threadIdx.x % 32;
  for (int begin = 0; begin < p.groups; begin += 32) {
    const int group = begin + lane;
    const int first = group < p.groups ? p.offsets[group] : 0;
    const int count = group < p.groups ? p.offsets[group + 1] - first : 0;
    const int own = ceil_div(count, height);
    int upto = own;  // tiles of this lane's group and those before
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, upto, distance);
      if (lane >= distance) upto += before;
    }
    const u32 behind = __ballot_sync(~0u, upto > slot);
    if (behind == 0) {
      slot -= __shfl_sync(~0u, upto, 31);
      continue;
    }
    const int from = __ffs(behind) - 1;
    const int skipped = (slot - __shfl_sync(~0u, upto - own, from)) * height;
    const int left = __shfl_sync(~0u, count, from) - skipped;
    return {begin + from, __shfl_sync(~0u, first, from) + skipped, left < height ? left : height};
  }
  return {};
}

// Rows of a group, and the lanes whose ids name it, in the order of these rows.
struct counted_rows {
  group_rows rows = {};
  u32 members = 0;
};

// The group that is number `slot` of those that up to 32 ids name, as their sort will have it: a
// lane has an id. All lanes of a warp.
__device__ __forceinline__ counted_rows find_counted_group(const gemm_params& p, int slot) {
  const int lane = threadIdx.x % 32;
  const int id = lane < p.id_count ? p.ids[lane] : -1;
  const bool valid = id >= 0 && id < p.groups;
  const u32 alike = __match_any_sync(~0u, id);
  const bool is_first = valid && __ffs(alike) - 1 == lane;
  const u32 all_first = __ballot_sync(~0u, is_first);
  int rows_before = 0, groups_before = 0;
  for (int other = 0; other < p.id_count; ++other) {
    const int of_other = __shfl_sync(~0u, id, other);
    if (of_other < 0 || of_other >= id) continue;
    rows_before += 1;
    groups_before += all_first >> other & 1;
  }
  const u32 found = __ballot_sync(~0u, is_first && groups_before == slot);
  if (found == 0) return {};
  const int from = __ffs(found) - 1;
  const u32 members = __shfl_sync(~0u, alike, from);
  return {{__shfl_sync(~0u, id, from), __shfl_sync(~0u, rows_before, from), __popc(members)},
          members};
}

// The terms of a group for two neighbouring columns. They are loaded before the first store, which
// the compiler may not move loads ahead of.
template <gemm_form form>
struct column_terms {
  static constexpr int operands = form.b_operands();
  using of_group = group_terms<form>;
  float bias[operands][2];

  __device__ __forceinline__ column_terms(const gemm_params& p, int group, int column) {
#pragma unroll
    for (int i = 0; i < operands; ++i) {
      bias[i][0] = of_group::bias(p, group, i, column);
      bias[i][1] = of_group::bias(p, group, i, column + 1);
    }
  }
  // Asks for those of a tile's rows in L2, for a launch that reads little else from memory then.
  static __device__ __forceinline__ void prefetch(const gemm_params& p, int group, int column) {
    if constexpr (form.group_bias && form.b_packing == packing::separate) {
      if (column >= p.n) return;
#pragma unroll
      for (int i = 0; i < operands; ++i) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(
            static_cast<const typename of_group::wide*>(p.group_bias[i]) +
            static_cast<i64>(group) * p.n + column));
      }
    }
  }
  // Adds those of a sorted row to its accumulators.
  __device__ __forceinline__ void apply(const gemm_params& p, int row, float (&first)[operands],
                                        float (&second)[operands]) const {
    if constexpr (of_group::present) {
      const float factor = of_group::factor(p, row);
#pragma unroll
      for (int i = 0; i < operands; ++i) {
        first[i] = first[i] * factor + bias[i][0];
        second[i] = second[i] * factor + bias[i][1];
      }
    }
  }
};

}  // namespace fftune

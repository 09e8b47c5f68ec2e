// Rows of A in groups that are sorted before, such as those of experts, for kernels of packed
// weights: which rows a block has, and what belongs to a row and its group before the epilogue.
#pragma once

#include "common/numerics.cuh"
#include "gemm/form.cuh"

namespace fftune {

// `count` sorted rows from `first` on, of group `index`; none: there is no such tile.
struct group_rows {
  int index = 0, first = 0, count = 0;
};

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

// Two neighbouring columns of a sorted row with the row's weight and its group's bias.
template <gemm_form form>
__device__ __forceinline__ void apply_group_terms(const gemm_params& p, int group, int row,
                                                  int column, float (&first)[form.b_operands()],
                                                  float (&second)[form.b_operands()]) {
  if constexpr (form.weighs_rows) {
    const float weight = p.row_weights[row];
#pragma unroll
    for (int i = 0; i < form.b_operands(); ++i) first[i] *= weight, second[i] *= weight;
  }
  if constexpr (form.group_bias) {
    using wide = element_type<form.wide>;
#pragma unroll
    for (int i = 0; i < form.b_operands(); ++i) {
      const wide* const bias =
          static_cast<const wide*>(p.group_bias[i]) + static_cast<i64>(group) * p.n + column;
      first[i] += to_float(bias[0]), second[i] += to_float(bias[1]);
    }
  }
}

}  // namespace fftune

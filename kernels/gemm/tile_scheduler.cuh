// The tile scheduler of engines whose blocks compute one work tile each, sm80 and simt: dense,
// grouped rows or grouped reduction, as the form says.
//
// Dense: the tiles of the second output are below those of the first. Grouped rows: no tile has
// rows of two groups, and the tile rows of all groups are below each other. Grouped reduction:
// every group has all tiles of its outputs, and of two groups the one with more tokens comes first,
// as its tiles take longer.
#pragma once

#include "gemm/form.cuh"
#include "gemm/params.cuh"
#include "gemm/row_groups.cuh"
#include "gemm/tile_order.cuh"

namespace fftune {

// Two groups by a mask, which every block works out by itself.
class mask_groups {
 public:
  static constexpr int shared_words = row_groups::shared_words;

  // All threads of the block together.
  template <int threads>
  static __device__ __forceinline__ mask_groups make(const gemm_params& p, int tokens,
                                                     u32* shared) {
    return mask_groups(row_groups::build<threads>(p.mask, tokens, shared));
  }

  __device__ __forceinline__ u32 count(int group) const { return sorted_.count(group); }
  // The first sorted row of a group.
  __device__ __forceinline__ u32 begin(int group) const {
    return group == 0 ? 0 : sorted_.marked();
  }
  // The token of row `rank` of a group.
  __device__ __forceinline__ u32 token(int group, u32 rank) const {
    return sorted_.row_of(group, rank);
  }
  // How many tile rows of so many rows the groups take.
  __device__ __forceinline__ u32 tile_rows(u32 height) const {
    return ceil_div(count(0), height) + ceil_div(count(1), height);
  }
  // The group of a tile row, whose number becomes that within the group.
  __device__ __forceinline__ int find(u32& tile_row, u32 height) const {
    const u32 first = ceil_div(count(0), height);
    if (tile_row < first) return 0;
    tile_row -= first;
    return 1;
  }

 private:
  __device__ __forceinline__ explicit mask_groups(const row_groups& sorted) : sorted_(sorted) {}
  row_groups sorted_;
};

// Any number of groups, sorted before: by offsets and a permutation in memory.
class routed_groups {
 public:
  static constexpr int shared_words = 0;

  template <int threads>
  static __device__ __forceinline__ routed_groups make(const gemm_params& p, int /*tokens*/,
                                                       u32* /*shared*/) {
    return routed_groups(p);
  }

  __device__ __forceinline__ u32 count(int group) const {
    return offsets_[group + 1] - offsets_[group];
  }
  __device__ __forceinline__ u32 begin(int group) const { return offsets_[group]; }
  __device__ __forceinline__ u32 token(int group, u32 rank) const {
    return permutation_[begin(group) + rank];
  }
  __device__ __forceinline__ u32 tile_rows(u32 height) const {
    u32 rows = 0;
#pragma unroll 1
    for (int first = 0; first < groups_; first += 32) rows += tile_rows_of_lane(first, height);
    return __reduce_add_sync(~0u, rows);
  }
  // All lanes of a warp; the tile row exists.
  __device__ __forceinline__ int find(u32& tile_row, u32 height) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0;; first += 32) {
      const u32 own = tile_rows_of_lane(first, height);
      u32 inclusive = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(~0u, inclusive, distance);
        if (lane >= distance) inclusive += other;
      }
      const u32 behind = __ballot_sync(~0u, inclusive > tile_row);
      if (behind != 0) {
        const int found = __ffs(behind) - 1;
        tile_row -= __shfl_sync(~0u, inclusive - own, found);
        return first + found;
      }
      tile_row -= __shfl_sync(~0u, inclusive, 31);
    }
  }

 private:
  __device__ __forceinline__ explicit routed_groups(const gemm_params& p)
      : offsets_(p.offsets), permutation_(p.permutation), groups_(p.groups) {}
  // Of group first + lane.
  __device__ __forceinline__ u32 tile_rows_of_lane(int first, u32 height) const {
    const int group = first + static_cast<int>(threadIdx.x % 32);
    return group < groups_ ? ceil_div(count(group), height) : 0;
  }

  const int *offsets_, *permutation_;
  int groups_;
};

template <gemm_form form>
using groups_of =
    typename choose_type<form.source == group_source::mask, mask_groups, routed_groups>::type;

struct work_tile {
  i64 first_m, first_n;  // in C; grouped rows: first_m counts the group's own rows
  int rows, columns;     // that exist
  int output, group;
  u32 sorted;  // grouped rows: the sorted row of the tile's first; reduction: the group's first
  int k;       // of one K-concatenated pair; grouped reduction: the group's tokens
  bool is_valid;
};

template <gemm_form form, int bm, int bn>
struct tile_scheduler {
  static constexpr u32 outputs = form.outputs();

  static __device__ __forceinline__ work_tile dense(const gemm_params& p) {
    const u32 tiles_m = ceil_div(static_cast<u32>(p.m), static_cast<u32>(bm));
    tile_position at = grouped_tile(blockIdx.x, tiles_m * outputs, tiles_n(p), p.group_m);
    const bool second = outputs == 2 && at.m >= tiles_m;
    if (second) at.m -= tiles_m;
    work_tile tile = tile_at(p, at);
    tile.output = second ? 1 : 0;
    return tile;
  }

  // The grid has as many tile rows as the groups could take: blocks beyond have no tile.
  template <class Groups>
  static __device__ __forceinline__ work_tile grouped_rows(const gemm_params& p,
                                                           const Groups& groups) {
    const u32 tiles_m = groups.tile_rows(bm);
    if (blockIdx.x >= tiles_m * outputs * tiles_n(p)) return {};
    tile_position at = grouped_tile(blockIdx.x, tiles_m * outputs, tiles_n(p), p.group_m);
    const bool second = outputs == 2 && at.m >= tiles_m;
    if (second) at.m -= tiles_m;
    const int group = groups.find(at.m, bm);
    work_tile tile = tile_at(p, at);
    const u32 rank = at.m * bm, left = groups.count(group) - rank;
    tile.rows = static_cast<int>(left < bm ? left : bm);
    tile.output = second ? 1 : 0;
    tile.group = group;
    tile.sorted = groups.begin(group) + rank;
    return tile;
  }

  template <class Groups>
  static __device__ __forceinline__ work_tile grouped_reduction(const gemm_params& p,
                                                                const Groups& groups) {
    const u32 tiles_m = ceil_div(static_cast<u32>(p.m), static_cast<u32>(bm));
    tile_position at =
        grouped_tile(blockIdx.x, tiles_m * p.groups * outputs, tiles_n(p), p.group_m);
    const u32 result = at.m / tiles_m;
    at.m -= result * tiles_m;
    work_tile tile = tile_at(p, at);
    tile.group = static_cast<int>(result / outputs);
    if (p.groups == 2 && groups.count(0) < groups.count(1)) tile.group = 1 - tile.group;
    tile.output = static_cast<int>(result % outputs);
    tile.k = static_cast<int>(groups.count(tile.group));
    tile.sorted = groups.begin(tile.group);
    return tile;
  }

 private:
  static __device__ __forceinline__ u32 tiles_n(const gemm_params& p) {
    return ceil_div(static_cast<u32>(p.n), static_cast<u32>(bn));
  }
  static __device__ __forceinline__ work_tile tile_at(const gemm_params& p, tile_position at) {
    work_tile tile = {};
    tile.first_m = static_cast<i64>(at.m) * bm;
    tile.first_n = static_cast<i64>(at.n) * bn;
    tile.rows = smaller(bm, static_cast<int>(p.m - tile.first_m));
    tile.columns = smaller(bn, static_cast<int>(p.n - tile.first_n));
    tile.k = p.k;
    tile.is_valid = true;
    return tile;
  }
};

}  // namespace fftune

// The tile scheduler of engines whose blocks compute one work tile each, sm80 and simt: dense,
// grouped rows or grouped reduction, as the form says.
//
// Dense: the tiles of the second output are below those of the first. Grouped rows: no tile has
// rows of two groups, and the tile rows of all groups are below each other. Grouped reduction:
// every group has all tiles of its outputs, and of two groups the one with more tokens comes first,
// as its tiles take longer.
#pragma once

#include "common/types.cuh"
#include "gemm/groups.cuh"

namespace fftune {

struct work_tile {
  i64 first_m, first_n;  // in C; grouped rows: first_m counts the group's own rows
  int rows, columns;     // that exist
  int output, group;
  u32 sorted;  // grouped rows: the sorted place of the tile's first row; reduction: the group's
  int k;       // of one K-concatenated pair; grouped reduction: the group's tokens
  bool is_valid;
};

// The groups of a grouped reduction whose offsets are in memory: a block needs those of one group.
class group_offsets {
  const int *offsets_, *permutation_;

 public:
  static constexpr int shared_words = 0;

  template <int threads>
  static __device__ __forceinline__ group_offsets build(const gemm_params& p, int, u32*) {
    group_offsets groups;
    groups.offsets_ = p.offsets;
    groups.permutation_ = p.permutation;
    return groups;
  }
  __device__ __forceinline__ int count(int group) const {
    return offsets_[group + 1] - offsets_[group];
  }
  __device__ __forceinline__ int first(int group) const { return offsets_[group]; }
  __device__ __forceinline__ u32 row_of(int group, u32 rank) const {
    return static_cast<u32>(permutation_[first(group) + rank]);
  }
};

template <gemm_form form, int bm, int bn>
class tile_scheduler {
  static constexpr u32 outputs = form.outputs();

 public:
  static __device__ __forceinline__ work_tile dense(const gemm_params& p) {
    const u32 tiles_m = ceil_div(static_cast<u32>(p.m), static_cast<u32>(bm));
    tile_position at = grouped_tile(blockIdx.x, tiles_m * outputs, tiles_n(p), p.group_m);
    const u32 output = output_of(at, tiles_m);
    work_tile tile = tile_at(p, at);
    tile.output = static_cast<int>(output);
    return tile;
  }

  // The grid has as many tile rows as any groups could take: the blocks beyond have no tile.
  template <class Tiles>
  static __device__ __forceinline__ work_tile grouped_rows(const gemm_params& p,
                                                           const Tiles& tiles) {
    const u32 tiles_m = tiles.count();
    if (blockIdx.x >= tiles_m * outputs * tiles_n(p)) return {};
    tile_position at = grouped_tile(blockIdx.x, tiles_m * outputs, tiles_n(p), p.group_m);
    const u32 output = output_of(at, tiles_m);
    const group_tile own = tiles.at(at.m);
    work_tile tile = tile_at(p, at);
    tile.first_m = own.rank;
    tile.rows = own.count;
    tile.output = static_cast<int>(output);
    tile.group = own.group;
    tile.sorted = own.first;
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
    tile.k = groups.count(tile.group);
    tile.sorted = groups.first(tile.group);
    return tile;
  }

 private:
  static __device__ __forceinline__ u32 tiles_n(const gemm_params& p) {
    return ceil_div(static_cast<u32>(p.n), static_cast<u32>(bn));
  }
  // The output of a tile row, whose number becomes that within the output.
  static __device__ __forceinline__ u32 output_of(tile_position& at, u32 tiles_m) {
    if (outputs == 1 || at.m < tiles_m) return 0;
    at.m -= tiles_m;
    return 1;
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

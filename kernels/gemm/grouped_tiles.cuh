// Tiles of rows of one group each (row_groups.cuh), as one schedule: those of the first group, then
// those of the other, a multiple of a cluster's of each.
#pragma once

#include "gemm/row_groups.cuh"

namespace fftune {

// A tile in the order of the groups.
struct grouped_place {
  int group;
  int rank;   // of its first row in the group
  int first;  // of its first row in the order of the groups
  int count;  // rows that it has; none or less of one that only fills a cluster
};

template <int height, int cluster>
struct grouped_tiles {
  const row_groups groups;

  __device__ __forceinline__ u32 count(int group) const {
    return ceil_div(static_cast<u32>(groups.count(group)), static_cast<u32>(height * cluster)) *
           cluster;
  }
  __device__ __forceinline__ u32 count() const { return count(0) + count(1); }
  __device__ __forceinline__ grouped_place at(u32 tile) const {
    const u32 first_of_other = count(0);
    const int group = tile >= first_of_other ? 1 : 0;
    const int rank = static_cast<int>(group == 0 ? tile : tile - first_of_other) * height;
    const int left = groups.count(group) - rank;
    return {group, rank, (group == 0 ? 0 : groups.marked()) + rank, left < height ? left : height};
  }
};

}  // namespace fftune

// The raster order of output tiles. Blocks start roughly in the order of their index, so neighbours
// in this order run together and share operands in L2. A band of `group_m` tile rows is walked
// column by column, so that a wave covers a rectangle instead of a strip.
#pragma once

#include "common/types.cuh"

namespace fftune {

struct tile_position {
  u32 m, n;
};

// Division by the same number many times: by a multiplication, whose result is one too low at most.
class divider {
  u32 by_, inverse_;

 public:
  __device__ __forceinline__ explicit divider(u32 by) : by_(by), inverse_(0xffffffffu / by) {}

  __device__ __forceinline__ u32 quotient(u32 of) const {
    const u32 low = static_cast<u32>(static_cast<u64>(of) * inverse_ >> 32);
    return of - low * by_ >= by_ ? low + 1 : low;
  }
};

__device__ __forceinline__ tile_position grouped_tile(u32 index, u32 tiles_m, u32 tiles_n,
                                                      u32 group_m) {
  const u32 band_tiles = group_m * tiles_n;
  const u32 band = index / band_tiles;
  const u32 in_band = index - band * band_tiles;
  const u32 first_m = band * group_m;
  const u32 rows_left = tiles_m - first_m;
  const u32 height = rows_left < group_m ? rows_left : group_m;  // the last band may be lower
  const u32 column = in_band / height;
  return {first_m + in_band - column * height, column};
}

}  // namespace fftune

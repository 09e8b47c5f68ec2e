// The raster order of output tiles. Blocks start roughly in the order of their index, so neighbours
// in this order run together and share operands in L2. A band of `group_m` tile rows is walked
// column by column, so that a wave covers a rectangle instead of a strip.
#pragma once

#include "common/types.cuh"

namespace fftune {

struct tile_position {
  u32 m, n;
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

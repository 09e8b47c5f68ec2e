// Eight elements that begin between two boundaries of 16 bytes.
#pragma once

#include "common/vectors.cuh"

namespace fftune {

// Elements [shift, shift + 8) of two neighbouring chunks; shift < 8.
__device__ __forceinline__ vector16 shifted(const vector16& low, const vector16& high, u32 shift) {
  u32 word[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = low.word[i], word[4 + i] = high.word[i];
#pragma unroll
  for (int i = 0; i < 6; ++i) word[i] = shift & 4 ? word[i + 2] : word[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) word[i] = shift & 2 ? word[i + 1] : word[i];
  vector16 result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    result.word[i] = shift & 1 ? word[i] >> 16 | word[i + 1] << 16 : word[i];
  }
  return result;
}

}  // namespace fftune

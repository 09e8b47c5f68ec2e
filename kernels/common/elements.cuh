// The loop of a plain elementwise kernel, as baselines have it.
#pragma once

#include "common/types.cuh"

namespace fftune {

// Calls body(row, column) for each of this thread's elements of a matrix. Block: 256. Grid:
// (ceil(columns / 1024), min(rows, 65535)).
template <class Body>
__device__ __forceinline__ void for_elements(i64 rows, i64 columns, const Body& body) {
  const i64 first = static_cast<i64>(blockIdx.x) * 1024 + threadIdx.x;
  for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (first + e * 256 < columns) body(row, first + e * 256);
    }
  }
}

}  // namespace fftune

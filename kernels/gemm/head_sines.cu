// The cosines and sines by which the epilogue qkv rotates heads, for every row and pair, in
// float32.
#include "common/async.cuh"
#include "gemm/head_row.cuh"

namespace fftune {

// Positions, table, table_rows and scale are those of head_angles. Grid: rows * pairs / 256 blocks.
template <int pairs, head_rotation rotation, class Real>
__global__ void __launch_bounds__(256)
    head_sines(const int* positions, const float* table, float2* sines,
               const __grid_constant__ pair_frequencies<pairs> frequencies, i64 rows,
               int table_rows, float scale) {
  launch_dependents();
  const i64 at = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= rows * pairs) return;
  wait_for_dependencies();
  const int pair = static_cast<int>(at % pairs);
  sines[at] = turn_of<rotation, Real>({positions, table, table_rows, scale}, frequencies.of,
                                      at / pairs, pair, pairs);
}

}  // namespace fftune

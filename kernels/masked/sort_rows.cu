// Copies the rows of one or two matrices into the order of a mask, for the sums of
// gemm/wgmma_token_sum.cuh: under a mask that scatters an expert's tokens TMA cannot copy them from
// where they are.
//
// Matrices are [m, row_vectors] of 16 bytes; the second may be null. A warp copies a row.
// Grid: any. Block: 256 threads.
#include "common/dependency.cuh"
#include "gemm/row_groups.cuh"

namespace fftune {

namespace {

constexpr int sort_warps = 8;

__device__ __forceinline__ void copy_row(const float4* from, float4* to, int vectors) {
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < vectors; i += 32) to[i] = from[i];
}

}  // namespace

__global__ void __launch_bounds__(sort_warps * 32, 4)
    sort_rows(const u8* mask, const float4* first, float4* first_sorted, int first_vectors,
              const float4* second, float4* second_sorted, int second_vectors, int m) {
  __shared__ u32 words[row_groups::shared_words];
  const row_groups groups = row_groups::build<sort_warps * 32>(mask, m, words);
  launch_dependents();
  wait_for_dependencies();  // others may still read the copies
  for (i64 row = blockIdx.x * sort_warps + threadIdx.x / 32; row < m;
       row += gridDim.x * sort_warps) {
    const i64 to = groups.place_of(static_cast<u32>(row));
    copy_row(first + row * first_vectors, first_sorted + to * first_vectors, first_vectors);
    if (second != nullptr) {
      copy_row(second + row * second_vectors, second_sorted + to * second_vectors, second_vectors);
    }
  }
}

}  // namespace fftune

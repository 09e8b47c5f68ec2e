// Writes the sorted order of a mask's groups (groups.cuh) to memory, for kernels that need many
// tokens of each group. The result is offsets and a permutation, or a copy of the rows, because TMA
// cannot load the rows of a group in place if they are scattered.
#include "common/async.cuh"
#include "gemm/groups.cuh"

namespace fftune {

// offsets [3], permutation [tokens]. A token a thread. Grid: ceil(tokens / 256). Block: 256
// threads.
__global__ void __launch_bounds__(256, 4)
    sort_tokens(const u8* mask, int* offsets, int* permutation, int tokens) {
  __shared__ u32 words[mask_groups::shared_words];
  gemm_params params = {};
  params.mask = mask;
  const mask_groups groups = mask_groups::build<256>(params, tokens, words);
  const int place = static_cast<int>(blockIdx.x * 256 + threadIdx.x), second = groups.first(1);
  if (place == 0) {
    offsets[0] = 0;
    offsets[1] = second;
    offsets[2] = tokens;
  }
  if (place >= tokens) return;
  permutation[place] = place < second ? groups.row_of(0, place) : groups.row_of(1, place - second);
}

namespace {

constexpr int permute_warps = 8;

__device__ __forceinline__ void copy_row(const float4* from, float4* to, int vectors) {
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < vectors; i += 32) to[i] = from[i];
}

}  // namespace

// Copies the rows of one or two matrices into the sorted order, before a grouped reduction: of
// `groups` by mask, or by offsets and permutation. Matrices are [rows, row_vectors] of 16 bytes;
// the second may be null. A warp copies a row. Grid: any. Block: 256 threads.
template <group_source source>
__global__ void __launch_bounds__(permute_warps * 32, 4)
    permute_rows(const u8* mask, const int* offsets, const int* permutation, int groups,
                 const float4* first, float4* first_sorted, int first_vectors, const float4* second,
                 float4* second_sorted, int second_vectors, int rows) {
  const auto copy = [&](i64 row, i64 to) {
    copy_row(first + row * first_vectors, first_sorted + to * first_vectors, first_vectors);
    if (second != nullptr) {
      copy_row(second + row * second_vectors, second_sorted + to * second_vectors, second_vectors);
    }
  };
  const i64 warp = blockIdx.x * permute_warps + threadIdx.x / 32, warps = gridDim.x * permute_warps;
  if constexpr (source == group_source::mask) {
    __shared__ u32 words[mask_groups::shared_words];
    gemm_params params = {};
    params.mask = mask;
    const mask_groups own = mask_groups::build<permute_warps * 32>(params, rows, words);
    launch_dependents();
    wait_for_dependencies();  // others may still read the copies
    for (i64 row = warp; row < rows; row += warps) copy(row, own.place_of(static_cast<u32>(row)));
  } else {
    wait_and_launch_dependents();
    for (i64 place = offsets[0] + warp; place < offsets[groups]; place += warps) {
      copy(permutation[place], place);
    }
  }
}

}  // namespace fftune

// Copies rows of one or two matrices into the order of a mask, for the sums of
// gemm/wgmma_token_sum.cuh: of each expert's tokens those 64 at a time that are no neighbours. The
// rest of the copies stays as it is, for nobody reads it. `tokens` is the table that says which.
//
// Matrices are [m, row_vectors] of 16 bytes; the second may be null. A warp copies a row.
// Grid: any. Block: 256 threads.
#include "common/dependency.cuh"
#include "common/vector.cuh"
#include "gemm/token_tiles.cuh"

namespace fftune {

namespace {

constexpr int sort_warps = 8;

__device__ __forceinline__ void copy_row(const float4* from, float4* to, int vectors) {
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < vectors; i += 32) to[i] = from[i];
}

}  // namespace

__global__ void __launch_bounds__(sort_warps * 32, 4)
    sort_rows(const u8* mask, u32* tokens, const float4* first, float4* first_sorted,
              int first_vectors, const float4* second, float4* second_sorted, int second_vectors,
              int m) {
  constexpr int height = token_tiles::height;
  __shared__ u32 words[row_groups::shared_words];
  const token_tiles::tiles tiles{row_groups::build<sort_warps * 32>(mask, m, words)};
  __syncthreads();
  launch_dependents();
  wait_for_dependencies();  // others may still read the copies
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    token_tiles::write_marked(tiles.groups.marked(), tokens);
    token_tiles::write_place(tiles.count(), 0, tokens);
  }
  constexpr u32 parts = height / sort_warps;
  const u32 warp = threadIdx.x / 32;
  for (u32 item = blockIdx.x; item < tiles.count() * parts; item += gridDim.x) {
    const u32 tile = item / parts, part = item % parts;
    const grouped_place own = tiles.at(tile);
    const row_span found = tiles.groups.span(own.group, own.rank, own.count);
    if (part == 0 && threadIdx.x == 0) {
      token_tiles::write_place(tile, found.consecutive ? found.first : token_tiles::scattered,
                               tokens);
    }
    const int row = static_cast<int>(part * sort_warps + warp);
    if (found.consecutive || row >= own.count) continue;
    const i64 from = tiles.groups.row_of(own.group, own.rank + row), to = own.first + row;
    copy_row(first + from * first_vectors, first_sorted + to * first_vectors, first_vectors);
    if (second != nullptr) {
      copy_row(second + from * second_vectors, second_sorted + to * second_vectors, second_vectors);
    }
  }
}

}  // namespace fftune

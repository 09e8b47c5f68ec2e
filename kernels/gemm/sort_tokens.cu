// The groups of a mask as offsets and a permutation in memory, for kernels that need many tokens of
// a group each.
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

}  // namespace fftune

// The groups of a mask as offsets and a permutation in memory, which kernels read more cheaply
// where each needs many tokens.
#include "gemm/row_groups.cuh"

namespace fftune {

// offsets [3] and permutation [tokens] of the two groups of a mask. A token a thread. Grid:
// ceil(tokens / 256). Block: 256 threads.
__global__ void __launch_bounds__(256, 4)
    sort_tokens(const u8* mask, int* offsets, int* permutation, int tokens) {
  __shared__ u32 words[row_groups::shared_words];
  const row_groups groups = row_groups::build<256>(mask, tokens, words);
  const int place = static_cast<int>(blockIdx.x * 256 + threadIdx.x), first = groups.marked();
  if (place == 0) {
    offsets[0] = 0;
    offsets[1] = first;
    offsets[2] = tokens;
  }
  if (place >= tokens) return;
  permutation[place] = place < first ? groups.row_of(0, place) : groups.row_of(1, place - first);
}

}  // namespace fftune

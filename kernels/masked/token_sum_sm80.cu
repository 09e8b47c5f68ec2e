// Sums over the tokens of either expert, C = A^T B (+ addend), sm_80 and newer: see
// gemm/mma_sync_token_sum.cuh. C is [m, n], of k tokens; a1, c1 and the addends are null where
// there is none.
//
// Grid of the sums: (2 * results * ceil(m / bm) * ceil(n / bn), split_k), with clusters of (1,
// split_k) where `counters` is null. Block: warps_m * warps_n * 32 threads. Shared memory: as in
// product_sm80.cu.
#include "gemm/mma_sync_token_sum.cuh"
#include "gemm/row_groups.cuh"

namespace fftune {

// order [m + 1] = the tokens in the order of the mask, and how many are marked. A token a thread.
// Grid: ceil(m / 256). Block: 256 threads.
__global__ void __launch_bounds__(256, 4) order_tokens(const u8* mask, u32* order, int m) {
  __shared__ u32 words[row_groups::shared_words];
  const row_groups groups = row_groups::build<256>(mask, m, words);
  const int place = static_cast<int>(blockIdx.x * 256 + threadIdx.x), marked = groups.marked();
  if (place == 0) order[m] = marked;
  if (place >= m) return;
  order[place] = place < marked ? groups.row_of(0, place) : groups.row_of(1, place - marked);
}

template <class T, class Epilogue, bool sorted_a, bool sorted_b, int results, int bm, int bn,
          int bk, int warps_m, int warps_n, int stages>
__global__ void __launch_bounds__(warps_m* warps_n * 32)
    token_sum_sm80(const T* a0, const T* a1, const T* b, const T* true_addend0,
                   const T* true_addend1, const T* false_addend0, const T* false_addend1,
                   T* true_c0, T* true_c1, T* false_c0, T* false_c1, const u32* order,
                   u32* counters, float* partials, int m, int n, int k, int split_k, int group_m) {
  using gemm = mma_sync_token_sum<T, Epilogue, sorted_a, sorted_b, results, bm, bn, bk, warps_m,
                                  warps_n, stages>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  gemm::run({{a0, a1},
             b,
             order,
             {{true_addend0, true_addend1}, {false_addend0, false_addend1}},
             {{true_c0, true_c1}, {false_c0, false_c1}},
             {counters, partials},
             m,
             n,
             k,
             split_k,
             group_m},
            shared_memory);
}

}  // namespace fftune

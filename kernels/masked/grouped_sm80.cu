// C = epilogue(A B1^T[, A B2^T]) with the B of each row's expert, sm_80 and newer: see
// gemm/mma_sync_grouped.cuh. b0 and b1 are an expert's weights; b1 is null with one product.
//
// Grid: ((ceil(m / bm) + 1) * ceil(n / bn), split_k), with clusters of (1, split_k) where
// `counters` is null. Block: warps_m * warps_n * 32 threads.
// Shared memory: the tables of the grouping, then as in mma_sync.cuh.
#include "gemm/mma_sync_grouped.cuh"

namespace fftune {

template <class T, class Epilogue, bool sorted_a, bool sorted_c, int bm, int bn, int bk,
          int warps_m, int warps_n, int stages>
__global__ void __launch_bounds__(warps_m* warps_n * 32)
    grouped_sm80(const T* a, const u8* mask, const T* true_b0, const T* true_b1, const T* false_b0,
                 const T* false_b1, T* c, u32* counters, float* partials, int m, int n, int k,
                 int split_k, int group_m) {
  using gemm =
      mma_sync_grouped_gemm<T, Epilogue, sorted_a, sorted_c, bm, bn, bk, warps_m, warps_n, stages>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  if constexpr (Epilogue::products == 2) {
    gemm::run({a,
               mask,
               {{true_b0, true_b1}, {false_b0, false_b1}},
               c,
               {counters, partials},
               m,
               n,
               k,
               split_k,
               group_m},
              shared_memory);
  } else {
    gemm::run(
        {a, mask, {{true_b0}, {false_b0}}, c, {counters, partials}, m, n, k, split_k, group_m},
        shared_memory);
  }
}

}  // namespace fftune

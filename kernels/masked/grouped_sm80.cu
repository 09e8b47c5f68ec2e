// Products with the B of each row's expert, sm_80 and newer: see gemm/mma_sync_grouped.cuh. One
// sum, epilogue(A B0^T, A B1^T), two terms A0 B0^T + A1 B1^T, or the gradients of a gate; what a
// form does without is null. b0 and b1 are an expert's; transposed_b: they are [k, n]. k is that of
// one term.
//
// Grid: ((ceil(m / bm) + 1) * ceil(n / bn), split_k), with clusters of (1, split_k) where
// `counters` is null. Block: warps_m * warps_n * 32 threads.
// Shared memory: the tables of the grouping, then as in mma_sync.cuh.
#include "gemm/mma_sync_grouped.cuh"

namespace fftune {

template <class T, class Epilogue, bool sorted_a, bool sorted_c, bool transposed_b, int terms,
          int bm, int bn, int bk, int warps_m, int warps_n, int stages>
__global__ void __launch_bounds__(warps_m* warps_n * 32)
    grouped_sm80(const T* a0, const T* a1, const u8* mask, const T* true_b0, const T* true_b1,
                 const T* false_b0, const T* false_b1, T* c0, T* c1, T* c2, const T* gate,
                 const T* up, u32* counters, float* partials, int m, int n, int k, int split_k,
                 int group_m) {
  using gemm = mma_sync_grouped_gemm<T, Epilogue, sorted_a, sorted_c, bm, bn, bk, warps_m, warps_n,
                                     stages, matrix_operands<false, transposed_b, terms, 1, false>>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  gemm::run({a0,
             a1,
             mask,
             {{true_b0, true_b1}, {false_b0, false_b1}},
             {c0, c1, c2},
             gate,
             up,
             {counters, partials},
             m,
             n,
             k,
             split_k,
             group_m},
            shared_memory);
}

}  // namespace fftune

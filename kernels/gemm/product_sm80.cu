// Products of matrices with mma.sync, sm_80 and newer: one sum, two terms, two results that share
// B, or the gradients of a gate. k is that of one term.
//
// Grid: (results * ceil(m / bm) * ceil(n / bn), split_k), with clusters of (1, split_k) where
// `counters` is null. Block: warps_m * warps_n * 32 threads.
// Shared memory: 128 + max(stages * (bm + bn) * bk * 2, bm * (bn * 2 + 16)) bytes.
#include "common/dependency.cuh"
#include "gemm/mma_sync.cuh"

namespace fftune {

// c0, and c1 of a second result, add `bias` and their own `more`; null where they do not. Of
// gradients `more` is gate and up, and c is d_gate, d_up and hidden.
template <class T, class Epilogue, class Operands, int bm, int bn, int bk, int warps_m, int warps_n,
          int stages>
__global__ void __launch_bounds__(warps_m* warps_n * 32)
    product_sm80(const T* a0, const T* a1, const T* b0, const T* b1, T* c0, T* c1, T* c2,
                 const T* bias, const T* more0, const T* more1, u32* counters, float* partials,
                 int m, int n, int k, int split_k, int group_m) {
  using gemm = mma_sync_gemm<T, Epilogue, bm, bn, bk, warps_m, warps_n, stages, Operands>;
  launch_dependents();
  wait_for_dependencies();
  extern __shared__ __align__(128) unsigned char shared_memory[];
  gemm::run({a0,
             {b0},
             {c0, c1, c2},
             {counters, partials},
             m,
             n,
             k,
             split_k,
             group_m,
             {bias, more0},
             a1,
             b1,
             {bias, more1},
             more0,
             more1},
            shared_memory);
}

}  // namespace fftune

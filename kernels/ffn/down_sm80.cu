// y = hidden Wd^T (+ bias) (+ residual) for any number of tokens, sm_80 and newer.
//
// Grid: (ceil(m / bm) * ceil(d / bn), split_k), with clusters of (1, split_k) where
// `counters` is null. Block: warps_m * warps_n * 32 threads.
// Shared memory: 128 + max(stages * (bm + bn) * bk * 2, bm * (bn * 2 + 16)) bytes.
#include "gemm/mma_sync.cuh"

namespace fftune {

template <class T, class Epilogue, int bm, int bn, int bk, int warps_m, int warps_n, int stages>
__global__ void __launch_bounds__(warps_m* warps_n * 32)
    down_sm80(const T* hidden, const T* w_down, T* y, const T* bias, const T* residual,
              u32* counters, float* partials, int m, int d, int h, int split_k, int group_m) {
  using gemm = mma_sync_gemm<T, Epilogue, bm, bn, bk, warps_m, warps_n, stages>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  gemm::run(
      {hidden, {w_down}, {y}, {counters, partials}, m, d, h, split_k, group_m, {bias, residual}},
      shared_memory);
}

}  // namespace fftune

// hidden = act(x Wg^T) * (x Wu^T) for any number of tokens, sm_80 and newer: x is read once for
// both products, and the activation and the product happen in registers. gate = x Wg^T and up = x
// Wu^T are stored where the epilogue says so.
//
// Grid: (ceil(m / bm) * ceil(h / bn), split_k), with clusters of (1, split_k) where
// `counters` is null. Block: warps_m * warps_n * 32 threads.
// Shared memory: 128 + max(stages * (bm + 2 bn) * bk * 2, bm * (bn * 2 + 16)) bytes.
#include "common/dependency.cuh"
#include "gemm/mma_sync.cuh"

namespace fftune {

template <class T, class Epilogue, int bm, int bn, int bk, int warps_m, int warps_n, int stages>
__global__ void __launch_bounds__(warps_m* warps_n * 32)
    gate_up_sm80(const T* x, const T* w_gate, const T* w_up, T* hidden, T* gate, T* up,
                 u32* counters, float* partials, int m, int d, int h, int split_k, int group_m) {
  using gemm = mma_sync_gemm<T, Epilogue, bm, bn, bk, warps_m, warps_n, stages>;
  launch_dependents();
  extern __shared__ __align__(128) unsigned char shared_memory[];
  gemm::run(
      {x, {w_gate, w_up}, {hidden, gate, up}, {counters, partials}, m, h, d, split_k, group_m},
      shared_memory);
}

}  // namespace fftune

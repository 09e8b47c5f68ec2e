// y = hidden Wd^T (+ bias) (+ residual) for up to 16 tokens, sm_80 and newer, at the speed of
// reading Wd once.
//
// Grid: (ceil(d / rows), split_k), with clusters of (1, split_k) where `counters` is null. Block:
// warps * 32 threads. Shared memory: warps * max(rows / 8 * tokens * 32, 512) bytes.
#include "gemm/decode.cuh"

namespace fftune {

template <class T, class Epilogue, int tokens, int rows, int warps, int unroll>
__global__ void __launch_bounds__(warps * 32)
    down_decode(const T* hidden, const T* w_down, T* y, const T* bias, const T* residual,
                u32* counters, float* partials, int m, int d, int h, int split_k) {
  using gemm = decode_gemm<T, Epilogue, tokens, rows, warps, unroll>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  gemm::run({hidden, {w_down}, {y}, {counters, partials}, m, d, h, split_k, {bias, residual}},
            shared_memory);
}

}  // namespace fftune

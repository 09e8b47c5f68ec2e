// C = A B^T (+ bias) (+ residual) for up to 16 rows of A, sm_80 and newer, at the speed of reading
// B once.
//
// Grid: (ceil(n / rows), split_k), with clusters of (1, split_k) where `counters` is null. Block:
// warps * 32 threads. Shared memory: rows / 8 * max(warps * tokens * 32, 512) bytes.
#include "gemm/decode.cuh"

namespace fftune {

template <class T, class Epilogue, int tokens, int rows, int warps, int unroll>
__global__ void __launch_bounds__(warps * 32)
    product_decode(const T* a, const T* b, T* c, const T* bias, const T* residual, u32* counters,
                   float* partials, int m, int n, int k, int split_k) {
  using gemm = decode_gemm<T, Epilogue, tokens, rows, warps, unroll>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  gemm::run({a, {b}, {c}, {counters, partials}, m, n, k, split_k, {bias, residual}}, shared_memory);
}

}  // namespace fftune

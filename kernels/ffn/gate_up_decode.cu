// hidden = act(x Wg^T) * (x Wu^T) for up to 16 tokens, sm_80 and newer, at the speed of reading Wg
// and Wu once. gate = x Wg^T and up = x Wu^T are stored where the epilogue says so.
//
// Grid: (ceil(h / rows), split_k), with clusters of (1, split_k) where `counters` is null. Block:
// warps * 32 threads. Shared memory: warps * 2 * max(rows / 8 * tokens * 32, 512) bytes.
#include "gemm/decode.cuh"

namespace fftune {

template <class T, class Epilogue, int tokens, int rows, int warps, int unroll>
__global__ void __launch_bounds__(warps * 32)
    gate_up_decode(const T* x, const T* w_gate, const T* w_up, T* hidden, T* gate, T* up,
                   u32* counters, float* partials, int m, int d, int h, int split_k) {
  using gemm = decode_gemm<T, Epilogue, tokens, rows, warps, unroll>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  gemm::run({x, {w_gate, w_up}, {hidden, gate, up}, {counters, partials}, m, h, d, split_k},
            shared_memory);
}

}  // namespace fftune

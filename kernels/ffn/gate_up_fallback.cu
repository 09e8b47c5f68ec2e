// hidden = act(x Wg^T) * (x Wu^T) for any sizes, alignment and element type. gate = x Wg^T
// and up = x Wu^T are stored where the epilogue says so. Grid: ceil(m / 64) * ceil(h / 64), in one
// dimension because only that one may pass 65,535. Block: 256 threads.
#include "gemm/fallback.cuh"

namespace fftune {

template <class T, class Epilogue>
__global__ void __launch_bounds__(256)
    gate_up_fallback(const T* x, const T* w_gate, const T* w_up, T* hidden, T* gate, T* up, int m,
                     int d, int h) {
  using gemm = fallback_gemm<T, Epilogue>;
  __shared__ typename gemm::storage shared;
  gemm::run(x, {w_gate, w_up}, {hidden, gate, up}, {}, m, h, d, shared);
}

}  // namespace fftune

// y = hidden Wd^T (+ bias) (+ residual) for any sizes, alignment and element type. Grid: ceil(m /
// 64) * ceil(d / 64), in one dimension because only that one may pass 65,535. Block: 256 threads.
#include "gemm/fallback.cuh"

namespace fftune {

template <class T, class Epilogue>
__global__ void __launch_bounds__(256)
    down_fallback(const T* hidden, const T* w_down, T* y, const T* bias, const T* residual, int m,
                  int d, int h) {
  using gemm = fallback_gemm<T, Epilogue>;
  __shared__ typename gemm::storage shared;
  gemm::run(hidden, {w_down}, {y}, {bias, residual}, m, d, h, shared);
}

}  // namespace fftune

// y = hidden Wd^T (+ bias) (+ residual) for any sizes, alignment and element type. Grid: ceil(m /
// 64) * ceil(d / 64), in one dimension because only that one may pass 65,535. Block: 256 threads.
#include "common/float8.cuh"
#include "gemm/fallback.cuh"
#include "gemm/fallback_blocks.cuh"

namespace fftune {

template <class T, class Epilogue>
__global__ void __launch_bounds__(256)
    down_fallback(const T* hidden, const T* w_down, T* y, const T* bias, const T* residual, int m,
                  int d, int h) {
  using gemm = fallback_gemm<T, Epilogue>;
  __shared__ typename gemm::storage shared;
  gemm::run(hidden, {w_down}, y, {}, {bias, residual}, {}, m, d, h, shared);
}

// The same with elements of fp8: hidden and w_down; the rest is bf16.
template <class T, class Epilogue>
__global__ void __launch_bounds__(256)
    down_fallback_fp8(const T* hidden, const T* w_down, bf16* y, const bf16* bias,
                      const bf16* residual, const float* hidden_scale, const float* w_down_scale,
                      int m, int d, int h) {
  using gemm = fallback_gemm<T, Epilogue, bf16, bf16, tensor_scales>;
  __shared__ typename gemm::storage shared;
  gemm::run(hidden, {w_down}, y, {}, {bias, residual}, {hidden_scale, {w_down_scale}, nullptr}, m,
            d, h, shared);
}

// The same with a scale for each 128 elements of a row of hidden, and for each block of 128 x 128
// of w_down.
template <class T, class Epilogue>
__global__ void __launch_bounds__(256)
    down_fallback_fp8_blocks(const T* hidden, const T* w_down, bf16* y, const bf16* bias,
                             const bf16* residual, const float* hidden_scale,
                             const float* w_down_scale, int m, int d, int h) {
  using gemm = fallback_block_gemm<Epilogue>;
  __shared__ typename gemm::storage shared;
  const u32 tiles = ceil_div(static_cast<u32>(d), 64u);
  const i64 first_m = static_cast<i64>(blockIdx.x / tiles) * 64;
  const i64 first_d = static_cast<i64>(blockIdx.x % tiles) * 64;
  const addends<bf16> more{bias, residual};
  typename gemm::tile_sums sum = {};
  gemm::multiply(sum, hidden, {w_down}, {hidden_scale, {w_down_scale, w_down_scale}}, first_m,
                 first_d, m, d, h, shared);
  gemm::for_each_element(sum, first_m, first_d, m, d, [&](i64 row, i64 column, float(&own)[1]) {
    y[row * d + column] = from_float<bf16>(more.template add<Epilogue>(own[0], row, column, d));
  });
}

}  // namespace fftune

// hidden = act(x Wg^T) * (x Wu^T) for any sizes, alignment and element type. gate = x Wg^T
// and up = x Wu^T are stored where the epilogue says so. Grid: ceil(m / 64) * ceil(h / 64), in one
// dimension because only that one may pass 65,535. Block: 256 threads.
#include "common/float8.cuh"
#include "gemm/fallback.cuh"
#include "gemm/fallback_blocks.cuh"

namespace fftune {

template <class T, class Epilogue>
__global__ void __launch_bounds__(256)
    gate_up_fallback(const T* x, const T* w_gate, const T* w_up, T* hidden, T* gate, T* up, int m,
                     int d, int h) {
  using gemm = fallback_gemm<T, Epilogue>;
  __shared__ typename gemm::storage shared;
  gemm::run(x, {w_gate, w_up}, hidden, {gate, up}, {}, {}, m, h, d, shared);
}

// The same with elements of fp8: x, weights and hidden; gate and up are bf16.
template <class T, class Epilogue>
__global__ void __launch_bounds__(256)
    gate_up_fallback_fp8(const T* x, const T* w_gate, const T* w_up, T* hidden, bf16* gate,
                         bf16* up, const float* x_scale, const float* w_gate_scale,
                         const float* w_up_scale, const float* hidden_scale, int m, int d, int h) {
  using gemm = fallback_gemm<T, Epilogue, T, bf16, tensor_scales>;
  __shared__ typename gemm::storage shared;
  gemm::run(x, {w_gate, w_up}, hidden, {gate, up}, {},
            {x_scale, {w_gate_scale, w_up_scale}, hidden_scale}, m, h, d, shared);
}

// The same with a scale for each 128 elements of a row of x and of hidden, which are found here,
// and for each block of 128 x 128 of a weight. Grid: ceil(m / 64) * ceil(h / 128).
template <class T, class Epilogue>
__global__ void __launch_bounds__(256)
    gate_up_fallback_fp8_blocks(const T* x, const T* w_gate, const T* w_up, T* hidden, bf16* gate,
                                bf16* up, const float* x_scale, const float* w_gate_scale,
                                const float* w_up_scale, float* hidden_scale, int m, int d, int h) {
  using gemm = fallback_block_gemm<Epilogue>;
  __shared__ typename gemm::storage shared;
  const block_scales scales{x_scale, {w_gate_scale, w_up_scale}};
  const u32 blocks = ceil_div(static_cast<u32>(h), static_cast<u32>(scale_block));
  const i64 first_m = static_cast<i64>(blockIdx.x / blocks) * 64;
  const i64 first_h = static_cast<i64>(blockIdx.x % blocks) * scale_block;
  typename gemm::tile_sums sum[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i64 first = first_h + half * 64;
    gemm::multiply(sum[half], x, {w_gate, w_up}, scales, first_m, first, m, h, d, shared);
    if constexpr (Epilogue::outputs == 3) {
      gemm::for_each_element(sum[half], first_m, first, m, h,
                             [&](i64 row, i64 column, float(&own)[2]) {
                               gate[row * h + column] = from_float<bf16>(own[0]);
                               up[row * h + column] = from_float<bf16>(own[1]);
                             });
    }
  }
  gemm::store_quantised(sum, hidden, hidden_scale, first_m, first_h, m, h);
}

}  // namespace fftune

// y = hidden Wd^T (+ bias) (+ residual) on sm_90a: TMA and wgmma.
#include "gemm/wgmma_gemm.cuh"

namespace fftune {

// `shared_bytes` is what the host will launch with.
template <class T, class Epilogue, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 1))
    down_sm90(const __grid_constant__ tensor_map hidden, const __grid_constant__ tensor_map w_down,
              const __grid_constant__ tensor_map y, int m, int d, int h, int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile>::run({hidden, w_down, w_down, wgmma_outputs(y)}, {m, d, h, group_m},
                                     shared_memory);
}

// The same, which adds what the epilogue says. `residual` has the boxes of y, and is y itself where
// there is none; `bias` is null where there is none.
template <class T, class Epilogue, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 1))
    down_adding_sm90(const __grid_constant__ tensor_map hidden,
                     const __grid_constant__ tensor_map w_down,
                     const __grid_constant__ tensor_map y,
                     const __grid_constant__ tensor_map residual, const T* bias, int m, int d,
                     int h, int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile>::run(
      {hidden, w_down, w_down, wgmma_outputs(y, y, y, residual, bias)}, {m, d, h, group_m},
      shared_memory);
}

// The same with elements of fp8, each tensor with a scale; y is bf16.
template <class T, class Epilogue, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 2))
    down_fp8_sm90(const __grid_constant__ tensor_map hidden,
                  const __grid_constant__ tensor_map w_down, const __grid_constant__ tensor_map y,
                  const float* hidden_scale, const float* w_down_scale, int m, int d, int h,
                  int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile, bf16, tensor_scales>::run(
      {hidden,
       w_down,
       w_down,
       wgmma_outputs(y),
       {hidden_scale, {w_down_scale, w_down_scale}, nullptr}},
      {m, d, h, group_m}, shared_memory);
}

// The same with a scale for each 128 elements of a row of hidden, and for each block of 128 x 128
// of w_down.
template <class T, class Epilogue, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 2))
    down_fp8_blocks_sm90(const __grid_constant__ tensor_map hidden,
                         const __grid_constant__ tensor_map w_down,
                         const __grid_constant__ tensor_map y, const float* hidden_scale,
                         const float* w_down_scale, int m, int d, int h, int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile, bf16, block_scales>::run(
      {hidden, w_down, w_down, wgmma_outputs(y), {hidden_scale, {w_down_scale, w_down_scale}}},
      {m, d, h, group_m}, shared_memory);
}

// The two of fp8, which add what the epilogue says, in bf16.
template <class T, class Epilogue, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 2))
    down_adding_fp8_sm90(const __grid_constant__ tensor_map hidden,
                         const __grid_constant__ tensor_map w_down,
                         const __grid_constant__ tensor_map y,
                         const __grid_constant__ tensor_map residual, const bf16* bias,
                         const float* hidden_scale, const float* w_down_scale, int m, int d, int h,
                         int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile, bf16, tensor_scales>::run(
      {hidden,
       w_down,
       w_down,
       wgmma_outputs(y, y, y, residual, bias),
       {hidden_scale, {w_down_scale, w_down_scale}, nullptr}},
      {m, d, h, group_m}, shared_memory);
}

template <class T, class Epilogue, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 2))
    down_adding_fp8_blocks_sm90(const __grid_constant__ tensor_map hidden,
                                const __grid_constant__ tensor_map w_down,
                                const __grid_constant__ tensor_map y,
                                const __grid_constant__ tensor_map residual, const bf16* bias,
                                const float* hidden_scale, const float* w_down_scale, int m, int d,
                                int h, int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile, bf16, block_scales>::run(
      {hidden,
       w_down,
       w_down,
       wgmma_outputs(y, y, y, residual, bias),
       {hidden_scale, {w_down_scale, w_down_scale}}},
      {m, d, h, group_m}, shared_memory);
}

}  // namespace fftune

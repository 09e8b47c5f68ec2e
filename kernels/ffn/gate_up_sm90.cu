// hidden = act(x Wg^T) * (x Wu^T) on sm_90a: TMA and wgmma, x read once for both products, the
// activation and the product in registers.
#include "gemm/wgmma_gemm.cuh"

namespace fftune {

// `shared_bytes` is what the host will launch with.
template <class T, class Epilogue, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 2))
    gate_up_sm90(const __grid_constant__ tensor_map x, const __grid_constant__ tensor_map w_gate,
                 const __grid_constant__ tensor_map w_up, const __grid_constant__ tensor_map hidden,
                 int m, int d, int h, int group_m) {
  static_assert(wgmma_layout<tile, 2>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile>::run({x, w_gate, w_up, wgmma_outputs(hidden)}, {m, h, d, group_m},
                                     shared_memory);
}

// The same, which stores gate = x Wg^T and up = x Wu^T too. A kernel of its own, so that the plain
// form passes no map in vain.
template <class T, class Epilogue, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 2))
    gate_up_saving_sm90(const __grid_constant__ tensor_map x,
                        const __grid_constant__ tensor_map w_gate,
                        const __grid_constant__ tensor_map w_up,
                        const __grid_constant__ tensor_map hidden,
                        const __grid_constant__ tensor_map gate,
                        const __grid_constant__ tensor_map up, int m, int d, int h, int group_m) {
  static_assert(wgmma_layout<tile, 2>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile>::run(
      {x, w_gate, w_up, wgmma_outputs(hidden, gate, up, hidden, nullptr)}, {m, h, d, group_m},
      shared_memory);
}

// The same with elements of fp8, each tensor with a scale.
template <class T, class Epilogue, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 3))
    gate_up_fp8_sm90(const __grid_constant__ tensor_map x,
                     const __grid_constant__ tensor_map w_gate,
                     const __grid_constant__ tensor_map w_up,
                     const __grid_constant__ tensor_map hidden, const float* x_scale,
                     const float* w_gate_scale, const float* w_up_scale, const float* hidden_scale,
                     int m, int d, int h, int group_m) {
  static_assert(wgmma_layout<tile, 2>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile, T, tensor_scales>::run(
      {x, w_gate, w_up, wgmma_outputs(hidden), {x_scale, {w_gate_scale, w_up_scale}, hidden_scale}},
      {m, h, d, group_m}, shared_memory);
}

// The same with a scale for each 128 elements of a row of x and of hidden, which are found here,
// and for each block of 128 x 128 of a weight.
template <class T, class Epilogue, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 3))
    gate_up_fp8_blocks_sm90(const __grid_constant__ tensor_map x,
                            const __grid_constant__ tensor_map w_gate,
                            const __grid_constant__ tensor_map w_up,
                            const __grid_constant__ tensor_map hidden, const float* x_scale,
                            const float* w_gate_scale, const float* w_up_scale, float* hidden_scale,
                            int m, int d, int h, int group_m) {
  static_assert(wgmma_layout<tile, 2>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, block_quantised<Epilogue>, tile, T, block_scales>::run(
      {x,
       w_gate,
       w_up,
       {hidden, hidden_scale, m, hidden, hidden},
       {x_scale, {w_gate_scale, w_up_scale}}},
      {m, h, d, group_m}, shared_memory);
}

// The two of fp8, which store gate and up too, in bf16.
template <class T, class Epilogue, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 3))
    gate_up_saving_fp8_sm90(const __grid_constant__ tensor_map x,
                            const __grid_constant__ tensor_map w_gate,
                            const __grid_constant__ tensor_map w_up,
                            const __grid_constant__ tensor_map hidden,
                            const __grid_constant__ tensor_map gate,
                            const __grid_constant__ tensor_map up, const float* x_scale,
                            const float* w_gate_scale, const float* w_up_scale,
                            const float* hidden_scale, int m, int d, int h, int group_m) {
  static_assert(wgmma_layout<tile, 2>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile, T, tensor_scales>::run(
      {x,
       w_gate,
       w_up,
       wgmma_outputs(hidden, gate, up, hidden, nullptr, hidden_scale),
       {x_scale, {w_gate_scale, w_up_scale}, hidden_scale}},
      {m, h, d, group_m}, shared_memory);
}

template <class T, class Epilogue, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 3))
    gate_up_saving_fp8_blocks_sm90(const __grid_constant__ tensor_map x,
                                   const __grid_constant__ tensor_map w_gate,
                                   const __grid_constant__ tensor_map w_up,
                                   const __grid_constant__ tensor_map hidden,
                                   const __grid_constant__ tensor_map gate,
                                   const __grid_constant__ tensor_map up, const float* x_scale,
                                   const float* w_gate_scale, const float* w_up_scale,
                                   float* hidden_scale, int m, int d, int h, int group_m) {
  static_assert(wgmma_layout<tile, 2>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, block_quantised<Epilogue>, tile, T, block_scales>::run(
      {x, w_gate, w_up, {hidden, hidden_scale, m, gate, up}, {x_scale, {w_gate_scale, w_up_scale}}},
      {m, h, d, group_m}, shared_memory);
}

}  // namespace fftune

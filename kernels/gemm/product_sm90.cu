// Products of matrices on sm_90a by the wgmma engine, each form a kernel of its own, so that none
// passes a map in vain. `shared_bytes` is what the host will launch with. k is that of one term.
#include "gemm/wgmma_gemm.cuh"

namespace fftune {

// C = A B^T
template <class T, class Epilogue, class Operands, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 1))
    product_sm90(const __grid_constant__ tensor_map a, const __grid_constant__ tensor_map b,
                 const __grid_constant__ tensor_map c, int m, int n, int k, int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile, T, no_scales, Operands>::run({a, b, b, wgmma_outputs(c)},
                                                             {m, n, k, group_m}, shared_memory);
}

// C = A B^T (+ bias) (+ residual): `residual` has the boxes of C, and is C itself where there is
// none; `bias` is null where there is none.
template <class T, class Epilogue, class Operands, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 1))
    product_adding_sm90(const __grid_constant__ tensor_map a, const __grid_constant__ tensor_map b,
                        const __grid_constant__ tensor_map c,
                        const __grid_constant__ tensor_map residual, const T* bias, int m, int n,
                        int k, int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile, T, no_scales, Operands>::run(
      {a, b, b, wgmma_outputs(c, c, c, residual, bias)}, {m, n, k, group_m}, shared_memory);
}

// C = A0 B0^T + A1 B1^T
template <class T, class Epilogue, class Operands, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 1))
    product_terms_sm90(const __grid_constant__ tensor_map a0, const __grid_constant__ tensor_map a1,
                       const __grid_constant__ tensor_map b0, const __grid_constant__ tensor_map b1,
                       const __grid_constant__ tensor_map c, int m, int n, int k, int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile, T, no_scales, Operands>::run(
      {a0, b0, b1, wgmma_outputs(c), {}, &a1}, {m, n, k, group_m}, shared_memory);
}

// C0 = A0 B^T (+ residual0), C1 = A1 B^T (+ residual1): each residual is its C where there is none.
template <class T, class Epilogue, class Operands, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 1))
    product_results_sm90(
        const __grid_constant__ tensor_map a0, const __grid_constant__ tensor_map a1,
        const __grid_constant__ tensor_map b, const __grid_constant__ tensor_map c0,
        const __grid_constant__ tensor_map c1, const __grid_constant__ tensor_map residual0,
        const __grid_constant__ tensor_map residual1, int m, int n, int k, int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  const wgmma_outputs second(c1, c1, c1, residual1, nullptr);
  wgmma_gemm<T, Epilogue, tile, T, no_scales, Operands>::run(
      {a0, b, b, wgmma_outputs(c0, c0, c0, residual0, nullptr), {}, &a1, &second},
      {m, n, k, group_m}, shared_memory);
}

// Of dc = A B^T the gradients of gate and up and, where the epilogue has it, act(gate) * up; else
// `hidden` is any map.
template <class T, class Epilogue, class Operands, wgmma_tile tile, int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 1))
    product_gradient_sm90(
        const __grid_constant__ tensor_map a, const __grid_constant__ tensor_map b,
        const __grid_constant__ tensor_map gate, const __grid_constant__ tensor_map up,
        const __grid_constant__ tensor_map d_gate, const __grid_constant__ tensor_map d_up,
        const __grid_constant__ tensor_map hidden, int m, int n, int k, int group_m) {
  static_assert(wgmma_layout<tile, 1, Epilogue::outputs>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_gemm<T, Epilogue, tile, T, no_scales, Operands>::run(
      {a, b, b, {gate, up, d_gate, d_up, hidden}}, {m, n, k, group_m}, shared_memory);
}

}  // namespace fftune

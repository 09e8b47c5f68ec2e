// Sums over the tokens of either expert, C = A^T B (+ residual), on sm_90a: TMA and wgmma. See
// gemm/wgmma_token_sum.cuh.
//
// `shared_bytes` is that of the layout; the tables of the grouping come after it. Each residual is
// its C where there is none. The addresses that follow the maps are those of A and B, for rows that
// are gathered. C is [m, n], of k tokens.
#include "gemm/wgmma_token_sum.cuh"

namespace fftune {

// One sum of each expert.
template <class T, class Epilogue, bool sorted_a, bool sorted_b, int gatherers, wgmma_tile tile,
          int shared_bytes>
__global__ void __launch_bounds__(token_sum_threads(tile, gatherers),
                                  token_sum_blocks(tile, gatherers))
    token_sum_sm90(const __grid_constant__ tensor_map a, const __grid_constant__ tensor_map b,
                   const __grid_constant__ tensor_map true_c,
                   const __grid_constant__ tensor_map false_c,
                   const __grid_constant__ tensor_map true_residual,
                   const __grid_constant__ tensor_map false_residual, const u8* mask,
                   const T* a_rows, const T* b_rows, int m, int n, int k, int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_token_sum<T, Epilogue, tile, sorted_a, sorted_b, gatherers, 1>::run(
      {a, a, b, true_c, true_c, false_c, false_c, true_residual, true_residual, false_residual,
       false_residual, mask, a_rows, b_rows},
      {m, n, k, group_m}, shared_memory);
}

// The same of two A that share B.
template <class T, class Epilogue, bool sorted_a, bool sorted_b, int gatherers, wgmma_tile tile,
          int shared_bytes>
__global__ void __launch_bounds__(token_sum_threads(tile, gatherers),
                                  token_sum_blocks(tile, gatherers))
    token_sums_sm90(const __grid_constant__ tensor_map a0, const __grid_constant__ tensor_map a1,
                    const __grid_constant__ tensor_map b,
                    const __grid_constant__ tensor_map true_c0,
                    const __grid_constant__ tensor_map true_c1,
                    const __grid_constant__ tensor_map false_c0,
                    const __grid_constant__ tensor_map false_c1,
                    const __grid_constant__ tensor_map true_residual0,
                    const __grid_constant__ tensor_map true_residual1,
                    const __grid_constant__ tensor_map false_residual0,
                    const __grid_constant__ tensor_map false_residual1, const u8* mask,
                    const T* a_rows, const T* b_rows, int m, int n, int k, int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_token_sum<T, Epilogue, tile, sorted_a, sorted_b, gatherers, 2>::run(
      {a0, a1, b, true_c0, true_c1, false_c0, false_c1, true_residual0, true_residual1,
       false_residual0, false_residual1, mask, a_rows, b_rows},
      {m, n, k, group_m}, shared_memory);
}

}  // namespace fftune

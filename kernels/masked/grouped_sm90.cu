// Products on sm_90a with the B of each row's expert: TMA and wgmma over grouped rows, each form a
// kernel of its own. See gemm/wgmma_grouped.cuh.
//
// `turns`: tiles of the same rows of A that a block has one after the other, and `kept` where it
// keeps them; any map where that is one (gemm/wgmma_turns.cuh).
//
// `shared_bytes` is that of the layout; the tables of the grouping come after it. The addresses
// that follow the maps are those of the same matrices, for rows that are gathered or scattered. k
// is that of one term.
#include "gemm/wgmma_grouped.cuh"

namespace fftune {

// C = A B^T
template <class T, class Epilogue, bool sorted_a, bool sorted_c, bool transposed_b, wgmma_tile tile,
          int shared_bytes, int turns>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 1))
    grouped_sm90(const __grid_constant__ tensor_map a, const __grid_constant__ tensor_map kept,
                 const __grid_constant__ tensor_map true_b,
                 const __grid_constant__ tensor_map false_b, const __grid_constant__ tensor_map c,
                 const u8* mask, const T* a_rows, T* c_rows, int m, int n, int k, int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  using gemm = wgmma_grouped_gemm<T, Epilogue, tile, sorted_a, sorted_c,
                                  matrix_operands<false, transposed_b, 1, 1, false>, turns>;
  const typename gemm::operands from{
      a, a, kept, true_b, true_b, false_b, false_b, wgmma_outputs(c), mask, a_rows, {c_rows}};
  gemm::run(from, {m, n, k, group_m}, shared_memory);
}

// C = epilogue(A B0^T, A B1^T)
template <class T, class Epilogue, bool sorted_a, bool sorted_c, bool transposed_b, wgmma_tile tile,
          int shared_bytes, int turns>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 2))
    grouped_pair_sm90(const __grid_constant__ tensor_map a, const __grid_constant__ tensor_map kept,
                      const __grid_constant__ tensor_map true_b0,
                      const __grid_constant__ tensor_map true_b1,
                      const __grid_constant__ tensor_map false_b0,
                      const __grid_constant__ tensor_map false_b1,
                      const __grid_constant__ tensor_map c, const u8* mask, const T* a_rows,
                      T* c_rows, int m, int n, int k, int group_m) {
  static_assert(wgmma_layout<tile, 2>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  using gemm = wgmma_grouped_gemm<T, Epilogue, tile, sorted_a, sorted_c,
                                  matrix_operands<false, transposed_b, 1, 1, false>, turns>;
  const typename gemm::operands from{
      a, a, kept, true_b0, true_b1, false_b0, false_b1, wgmma_outputs(c), mask, a_rows, {c_rows}};
  gemm::run(from, {m, n, k, group_m}, shared_memory);
}

// The same, which stores both products too.
template <class T, class Epilogue, bool sorted_a, bool sorted_c, bool transposed_b, wgmma_tile tile,
          int shared_bytes, int turns>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 2))
    grouped_pair_saving_sm90(
        const __grid_constant__ tensor_map a, const __grid_constant__ tensor_map kept,
        const __grid_constant__ tensor_map true_b0, const __grid_constant__ tensor_map true_b1,
        const __grid_constant__ tensor_map false_b0, const __grid_constant__ tensor_map false_b1,
        const __grid_constant__ tensor_map c, const __grid_constant__ tensor_map first,
        const __grid_constant__ tensor_map second, const u8* mask, const T* a_rows, T* c_rows,
        T* first_rows, T* second_rows, int m, int n, int k, int group_m) {
  static_assert(wgmma_layout<tile, 2>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  using gemm = wgmma_grouped_gemm<T, Epilogue, tile, sorted_a, sorted_c,
                                  matrix_operands<false, transposed_b, 1, 1, false>, turns>;
  const typename gemm::operands from{a,
                                     a,
                                     kept,
                                     true_b0,
                                     true_b1,
                                     false_b0,
                                     false_b1,
                                     wgmma_outputs(c, first, second, c, nullptr),
                                     mask,
                                     a_rows,
                                     {c_rows, first_rows, second_rows}};
  gemm::run(from, {m, n, k, group_m}, shared_memory);
}

// C = A0 B0^T + A1 B1^T
template <class T, class Epilogue, bool sorted_a, bool sorted_c, bool transposed_b, wgmma_tile tile,
          int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 1))
    grouped_terms_sm90(const __grid_constant__ tensor_map a0, const __grid_constant__ tensor_map a1,
                       const __grid_constant__ tensor_map true_b0,
                       const __grid_constant__ tensor_map true_b1,
                       const __grid_constant__ tensor_map false_b0,
                       const __grid_constant__ tensor_map false_b1,
                       const __grid_constant__ tensor_map c, const u8* mask, const T* a_rows,
                       T* c_rows, int m, int n, int k, int group_m) {
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  using gemm = wgmma_grouped_gemm<T, Epilogue, tile, sorted_a, sorted_c,
                                  matrix_operands<false, transposed_b, 2, 1, false>>;
  const typename gemm::operands from{
      a0, a1, a0, true_b0, true_b1, false_b0, false_b1, wgmma_outputs(c), mask, a_rows, {c_rows}};
  gemm::run(from, {m, n, k, group_m}, shared_memory);
}

// Of dc = A B^T the gradients of gate and up, which are in the order of the mask, and where the
// epilogue has it act(gate) * up; else `hidden` is any map.
template <class T, class Epilogue, bool sorted_a, bool sorted_c, bool transposed_b, wgmma_tile tile,
          int shared_bytes>
__global__ void __launch_bounds__(wgmma_threads(tile), wgmma_blocks_per_multiprocessor(tile, 1))
    grouped_gradient_sm90(
        const __grid_constant__ tensor_map a, const __grid_constant__ tensor_map true_b,
        const __grid_constant__ tensor_map false_b, const __grid_constant__ tensor_map gate,
        const __grid_constant__ tensor_map up, const __grid_constant__ tensor_map d_gate,
        const __grid_constant__ tensor_map d_up, const __grid_constant__ tensor_map hidden,
        const u8* mask, const T* a_rows, T* d_gate_rows, T* d_up_rows, T* hidden_rows, int m, int n,
        int k, int group_m) {
  static_assert(wgmma_layout<tile, 1, Epilogue::outputs>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  using gemm = wgmma_grouped_gemm<T, Epilogue, tile, sorted_a, sorted_c,
                                  matrix_operands<false, transposed_b, 1, 1, false>>;
  const typename gemm::operands from{a,
                                     a,
                                     a,
                                     true_b,
                                     true_b,
                                     false_b,
                                     false_b,
                                     {gate, up, d_gate, d_up, hidden},
                                     mask,
                                     a_rows,
                                     {d_gate_rows, d_up_rows, hidden_rows}};
  gemm::run(from, {m, n, k, group_m}, shared_memory);
}

}  // namespace fftune

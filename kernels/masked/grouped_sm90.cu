// C = epilogue(A B1^T[, A B2^T]) on sm_90a with the B of each row's expert: TMA and wgmma over
// grouped rows. See gemm/wgmma_grouped.cuh.
#include "gemm/wgmma_grouped.cuh"

namespace fftune {

// The tile as plain numbers: see wgmma_tile. `shared_bytes` is that of the layout; the tables of
// the grouping come after it. `a` and `c` have the boxes' addresses for the rows that need them.
template <class T, class Epilogue, bool sorted_a, bool sorted_c, bool transposed_b, int bm, int bn,
          int stages, int consumers, bool ping_pong, bool swapped, int cluster_m, int cluster_n,
          int split_k, int output_boxes, int shared_bytes>
__global__ void __launch_bounds__((consumers + 1) * 128,
                                  wgmma_blocks_per_multiprocessor(swapped ? bm : bn,
                                                                  swapped ? bn : bm, consumers,
                                                                  ping_pong, 1))
    grouped_sm90(const __grid_constant__ tensor_map a_map,
                 const __grid_constant__ tensor_map true_b,
                 const __grid_constant__ tensor_map false_b,
                 const __grid_constant__ tensor_map c_map, const u8* mask, const T* a, T* c, int m,
                 int n, int k, int group_m) {
  constexpr wgmma_tile tile{bm,      bn,        stages,    consumers, ping_pong,
                            swapped, cluster_m, cluster_n, split_k,   output_boxes};
  static_assert(wgmma_layout<tile, 1>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_grouped_gemm<T, Epilogue, tile, sorted_a, sorted_c,
                     matrix_operands<false, transposed_b, 1, 1, false>>::run({a_map, true_b, true_b,
                                                                              false_b, false_b,
                                                                              c_map, mask, a, c},
                                                                             {m, n, k, group_m},
                                                                             shared_memory);
}

// The same with two products.
template <class T, class Epilogue, bool sorted_a, bool sorted_c, int bm, int bn, int stages,
          int consumers, bool ping_pong, bool swapped, int cluster_m, int cluster_n, int split_k,
          int output_boxes, int shared_bytes>
__global__ void __launch_bounds__((consumers + 1) * 128,
                                  wgmma_blocks_per_multiprocessor(swapped ? bm : bn,
                                                                  swapped ? bn : bm, consumers,
                                                                  ping_pong, 2))
    grouped_pair_sm90(const __grid_constant__ tensor_map a_map,
                      const __grid_constant__ tensor_map true_b0,
                      const __grid_constant__ tensor_map true_b1,
                      const __grid_constant__ tensor_map false_b0,
                      const __grid_constant__ tensor_map false_b1,
                      const __grid_constant__ tensor_map c_map, const u8* mask, const T* a, T* c,
                      int m, int n, int k, int group_m) {
  constexpr wgmma_tile tile{bm,      bn,        stages,    consumers, ping_pong,
                            swapped, cluster_m, cluster_n, split_k,   output_boxes};
  static_assert(wgmma_layout<tile, 2>::shared_bytes == shared_bytes);
  extern __shared__ unsigned char shared_memory[];
  wgmma_grouped_gemm<T, Epilogue, tile, sorted_a, sorted_c>::run(
      {a_map, true_b0, true_b1, false_b0, false_b1, c_map, mask, a, c}, {m, n, k, group_m},
      shared_memory);
}

}  // namespace fftune

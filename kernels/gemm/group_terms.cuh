// Terms that apply to accumulators of grouped rows before their epilogue: the factor of a row of A,
// then a bias of the row's group for each B operand. Shared by all engines.
#pragma once

#include "common/numerics.cuh"
#include "gemm/element_type.cuh"
#include "gemm/params.cuh"

namespace fftune {

template <gemm_form form>
struct group_terms {
  static constexpr bool present = form.weighs_rows || form.group_bias;
  using wide = element_type<form.wide>;

  // Factor of a row of A, by its place in the sorted order.
  static __device__ __forceinline__ float factor(const gemm_params& p, i64 row) {
    if constexpr (form.weighs_rows) return p.row_weights[row];
    return 1;
  }
  // Bias of one column; 0 past the last one.
  static __device__ __forceinline__ float bias(const gemm_params& p, int group, int operand,
                                               int column) {
    if constexpr (!form.group_bias) {
      return 0;
    } else {
      if (column >= p.n) return 0;
      const u32 first = static_cast<u32>(group) * static_cast<u32>(p.n);
      if constexpr (form.b_operands() == 2 && form.b_packing == packing::halves) {
        return to_float(
            static_cast<const wide*>(p.group_bias[0])[2 * first + operand * p.n + column]);
      } else if constexpr (form.b_operands() == 2 && form.b_packing == packing::interleaved) {
        return to_float(static_cast<const wide*>(p.group_bias[0])[2 * (first + column) + operand]);
      } else {
        const void* const own = operand == 0 ? p.group_bias[0] : p.group_bias[1];
        return to_float(static_cast<const wide*>(own)[first + column]);
      }
    }
  }
};

}  // namespace fftune

// The epilogue of a thread that has two neighbouring columns of a token, for kernels that store C
// from registers: 16-bit elements, or an f32 C.
#pragma once

#include "common/vectors.cuh"
#include "gemm/epilogue_ops.cuh"

namespace fftune {

// Stores value number `index` of the accumulators `first` and `second` of both columns, then the
// values after it. `column` is even; tokens and columns outside of C are not stored.
template <gemm_form form, int index = 0>
__device__ __forceinline__ void store_pair(const gemm_params& p, int token, int column,
                                           const float (&first)[form.b_operands()],
                                           const float (&second)[form.b_operands()]) {
  using ops = epilogue_ops<form>;
  using T = element_type<form.ab>;
  if (token < p.m && column < p.n) {
    const i64 at = static_cast<i64>(token) * p.n + column;
    float value = ops::template stored<index>(first), next = ops::template stored<index>(second);
    if constexpr (form.changes_columns()) {
      ops::apply_broadcasts(ops::columns_from(p.broadcasts, column), value, next);
    }
    if constexpr (form.adds_source) {
      add_pair<T>(value, next, *reinterpret_cast<const u32*>(ops::source(p, 0) + at));
    }
    void* const to = ops::destination(p, index, 0);
    if constexpr (form.c != form.ab) {
      *reinterpret_cast<float2*>(static_cast<float*>(to) + at) = {value, next};
    } else {
      *reinterpret_cast<u32*>(static_cast<T*>(to) + at) = pack<T>(value, next);
    }
  }
  if constexpr (index + 1 < ops::stored_values) {
    store_pair<form, index + 1>(p, token, column, first, second);
  }
}

}  // namespace fftune

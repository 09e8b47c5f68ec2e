// stmatrix (sm_90): accumulators of tensor core products to shared memory; and its inverse, which
// brings what was stored there into the registers that would have stored it.
#pragma once

#include "common/types.cuh"

namespace fftune {

// Four 8x8 matrices of 16-bit elements; lanes 8i..8i+7 give the addresses of the rows of matrix i.
// Lane l holds columns 2 (l % 4) and the next of row l / 4 of each; transposed, rows 2 (l % 4) and
// the next of column l / 4.
template <bool transposed>
__device__ __forceinline__ void store_matrices(u32 shared, const u32 (&word)[4]) {
  if constexpr (transposed) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
        "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
                 "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
  }
}

template <bool transposed>
__device__ __forceinline__ void reload_matrices(u32 shared, u32 (&word)[4]) {
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(shared)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(shared)
                 : "memory");
  }
}

// Two matrices, transposed; lanes 0 to 15 give the addresses.
__device__ __forceinline__ void store_matrices_transposed(u32 shared, const u32 (&word)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared),
               "r"(word[0]), "r"(word[1])
               : "memory");
}

__device__ __forceinline__ void reload_matrices_transposed(u32 shared, u32 (&word)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(word[0]), "=r"(word[1])
               : "r"(shared)
               : "memory");
}

}  // namespace fftune

// Tensor core products of one warp: mma.sync m16n8k16 with fp32 accumulation, ldmatrix, which
// feeds it, and stmatrix, which stores accumulators of tensor core products to shared memory.
//
// Fragments, with group = lane / 4 and pair = lane % 4 (PTX ISA, "Matrix fragments for
// mma.m16n8k16"):
//   a[0] row group, k 2*pair..+1     a[1] row group+8, same k     a[2], a[3] the same rows at k+8
//   b[0] column group, k 2*pair..+1  b[1] the same column at k+8
//   c[0], c[1] row group, columns 2*pair..+1                      c[2], c[3] row group+8
#pragma once

#include "common/float16.cuh"

namespace fftune {

template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if constexpr (is_same<T, bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// Four 8x8 matrices of 16-bit elements; lanes 8i..8i+7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void load_matrices(u32& r0, u32& r1, u32& r2, u32& r3, u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(shared)
               : "memory");
}

// The same for a transposed matrix: lane l gets rows 2 (l % 4) and the next of column l / 4.
__device__ __forceinline__ void load_matrices_transposed(u32& r0, u32& r1, u32& r2, u32& r3,
                                                         u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(shared)
               : "memory");
}

// stmatrix (sm_90): four 8x8 matrices of 16-bit elements; lanes 8i..8i+7 give the addresses of the
// rows of matrix i. Lane l holds columns 2 (l % 4) and the next of row l / 4 of each; transposed,
// rows 2 (l % 4) and the next of column l / 4.
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

// Its inverse: loads stored values into the registers that would have stored them.
template <bool transposed>
__device__ __forceinline__ void reload_matrices(u32 shared, u32 (&word)[4]) {
  if constexpr (transposed) {
    load_matrices_transposed(word[0], word[1], word[2], word[3], shared);
  } else {
    load_matrices(word[0], word[1], word[2], word[3], shared);
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

// Tensor core MMAs with fp32 accumulation: mma.sync of one warp (sm_80), with ldmatrix and
// stmatrix, and wgmma of one warpgroup (sm_90a).
#pragma once

#include "common/numerics.cuh"

namespace fftune {

// --- mma.sync ---
//
// Tensor core products of one warp: mma.sync m16n8k16 with fp32 accumulation, ldmatrix, which
// feeds it, and stmatrix, which stores accumulators of tensor core products to shared memory.
//
// Fragments, with group = lane / 4 and pair = lane % 4 (PTX ISA, "Matrix fragments for
// mma.m16n8k16"):
//   a[0] row group, k 2*pair..+1     a[1] row group+8, same k     a[2], a[3] the same rows at k+8
//   b[0] column group, k 2*pair..+1  b[1] the same column at k+8
//   c[0], c[1] row group, columns 2*pair..+1                      c[2], c[3] row group+8

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

// An 8x8 matrix of 16-bit elements over a warp's lanes, each with two neighbours of a row.
__device__ __forceinline__ u32 transpose_matrix(u32 word) {
  u32 transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

__device__ __forceinline__ void reload_matrices_transposed(u32 shared, u32 (&word)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(word[0]), "=r"(word[1])
               : "r"(shared)
               : "memory");
}

// --- wgmma ---
//
// Tensor core MMAs of one warpgroup (sm_90a): wgmma m64nNk16, k32 of fp8, fp32 accumulation. B is
// in shared memory, A too or in registers.
//
// Accumulator c[j], lane l of warp w: row 16 w + l / 4 (+ 8 when j & 2), column 8 (j / 4) + 2 (l %
// 4) + (j & 1) (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16"). PTX wants every
// register named in the text of the instruction, so the widths are spelled out, each from the one
// before.

// Before the first wgmma of a sequence, and after any other access to the accumulators.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `pending` committed groups are unfinished.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Descriptor of a K-major tile in shared memory with rows of 128 bytes under the 128-byte swizzle:
// 8-row atoms are 1024 bytes apart. Adding bytes >> 4 moves along k inside the swizzled row.
__device__ __forceinline__ u64 wgmma_descriptor(u32 shared) {
  return (u64{1} << 62) | (u64{1024 >> 4} << 32) | (u64{1} << 16) | ((shared & 0x3ffffu) >> 4);
}

// Descriptor of a tile of 64 k whose other extent is contiguous: slabs of 64 elements of that
// extent, each [64 k][128 bytes] under the 128-byte swizzle, `slab_bytes` apart. Atoms of 8 rows of
// k are 1024 bytes apart, so 16 of k are 2048 bytes (PTX ISA, "Strides" of the matrix descriptor,
// MN-major).
constexpr int wgmma_slab_bytes = 64 * 128;
__device__ __forceinline__ u64 wgmma_transposed_descriptor(u32 shared) {
  return (u64{1} << 62) | (u64{1024 >> 4} << 32) | (u64{wgmma_slab_bytes >> 4} << 16) |
         ((shared & 0x3ffffu) >> 4);
}

// The same for rows of 128 or of 64 bytes, each under the swizzle of its width. K-major: 8-row
// atoms follow each other, `slab_bytes` is not used. Transposed: slabs of `row_bytes` of the
// contiguous extent are `slab_bytes` apart, and 16 of k are 16 * row_bytes.
template <int row_bytes, int slab_bytes = 16>
__device__ __forceinline__ u64 wgmma_swizzled_descriptor(u32 shared) {
  static_assert(row_bytes == 128 || row_bytes == 64);
  constexpr u64 swizzle = row_bytes == 128 ? 1 : 2;
  return (swizzle << 62) | (u64{8 * row_bytes >> 4} << 32) | (u64{slab_bytes >> 4} << 16) |
         ((shared & 0x3ffffu) >> 4);
}

// The descriptor of the tile `bytes` further: an addition to its lower word, which has no carry.
__device__ __forceinline__ u64 wgmma_advance(u64 descriptor, int bytes) {
  const u32 lower = static_cast<u32>(descriptor) + static_cast<u32>(bytes >> 4);
  return (descriptor & 0xffffffff00000000) | lower;
}

// The accumulators of each width: their numbers in the text, and the operands themselves.
#define FFTUNE_T4(i, j, k, l) "%" #i ", %" #j ", %" #k ", %" #l
#define FFTUNE_C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define FFTUNE_T_8 FFTUNE_T4(0, 1, 2, 3)
#define FFTUNE_T_16 FFTUNE_T_8 ", " FFTUNE_T4(4, 5, 6, 7)
#define FFTUNE_T_24 FFTUNE_T_16 ", " FFTUNE_T4(8, 9, 10, 11)
#define FFTUNE_T_32 FFTUNE_T_24 ", " FFTUNE_T4(12, 13, 14, 15)
#define FFTUNE_T_40 FFTUNE_T_32 ", " FFTUNE_T4(16, 17, 18, 19)
#define FFTUNE_T_48 FFTUNE_T_40 ", " FFTUNE_T4(20, 21, 22, 23)
#define FFTUNE_T_56 FFTUNE_T_48 ", " FFTUNE_T4(24, 25, 26, 27)
#define FFTUNE_T_64 FFTUNE_T_56 ", " FFTUNE_T4(28, 29, 30, 31)
#define FFTUNE_T_72 FFTUNE_T_64 ", " FFTUNE_T4(32, 33, 34, 35)
#define FFTUNE_T_80 FFTUNE_T_72 ", " FFTUNE_T4(36, 37, 38, 39)
#define FFTUNE_T_88 FFTUNE_T_80 ", " FFTUNE_T4(40, 41, 42, 43)
#define FFTUNE_T_96 FFTUNE_T_88 ", " FFTUNE_T4(44, 45, 46, 47)
#define FFTUNE_T_104 FFTUNE_T_96 ", " FFTUNE_T4(48, 49, 50, 51)
#define FFTUNE_T_112 FFTUNE_T_104 ", " FFTUNE_T4(52, 53, 54, 55)
#define FFTUNE_T_120 FFTUNE_T_112 ", " FFTUNE_T4(56, 57, 58, 59)
#define FFTUNE_T_128 FFTUNE_T_120 ", " FFTUNE_T4(60, 61, 62, 63)
#define FFTUNE_T_136 FFTUNE_T_128 ", " FFTUNE_T4(64, 65, 66, 67)
#define FFTUNE_T_144 FFTUNE_T_136 ", " FFTUNE_T4(68, 69, 70, 71)
#define FFTUNE_T_152 FFTUNE_T_144 ", " FFTUNE_T4(72, 73, 74, 75)
#define FFTUNE_T_160 FFTUNE_T_152 ", " FFTUNE_T4(76, 77, 78, 79)
#define FFTUNE_T_168 FFTUNE_T_160 ", " FFTUNE_T4(80, 81, 82, 83)
#define FFTUNE_T_176 FFTUNE_T_168 ", " FFTUNE_T4(84, 85, 86, 87)
#define FFTUNE_T_184 FFTUNE_T_176 ", " FFTUNE_T4(88, 89, 90, 91)
#define FFTUNE_T_192 FFTUNE_T_184 ", " FFTUNE_T4(92, 93, 94, 95)
#define FFTUNE_T_200 FFTUNE_T_192 ", " FFTUNE_T4(96, 97, 98, 99)
#define FFTUNE_T_208 FFTUNE_T_200 ", " FFTUNE_T4(100, 101, 102, 103)
#define FFTUNE_T_216 FFTUNE_T_208 ", " FFTUNE_T4(104, 105, 106, 107)
#define FFTUNE_T_224 FFTUNE_T_216 ", " FFTUNE_T4(108, 109, 110, 111)
#define FFTUNE_T_232 FFTUNE_T_224 ", " FFTUNE_T4(112, 113, 114, 115)
#define FFTUNE_T_240 FFTUNE_T_232 ", " FFTUNE_T4(116, 117, 118, 119)
#define FFTUNE_T_248 FFTUNE_T_240 ", " FFTUNE_T4(120, 121, 122, 123)
#define FFTUNE_T_256 FFTUNE_T_248 ", " FFTUNE_T4(124, 125, 126, 127)
#define FFTUNE_C_8 FFTUNE_C4(0)
#define FFTUNE_C_16 FFTUNE_C_8, FFTUNE_C4(4)
#define FFTUNE_C_24 FFTUNE_C_16, FFTUNE_C4(8)
#define FFTUNE_C_32 FFTUNE_C_24, FFTUNE_C4(12)
#define FFTUNE_C_40 FFTUNE_C_32, FFTUNE_C4(16)
#define FFTUNE_C_48 FFTUNE_C_40, FFTUNE_C4(20)
#define FFTUNE_C_56 FFTUNE_C_48, FFTUNE_C4(24)
#define FFTUNE_C_64 FFTUNE_C_56, FFTUNE_C4(28)
#define FFTUNE_C_72 FFTUNE_C_64, FFTUNE_C4(32)
#define FFTUNE_C_80 FFTUNE_C_72, FFTUNE_C4(36)
#define FFTUNE_C_88 FFTUNE_C_80, FFTUNE_C4(40)
#define FFTUNE_C_96 FFTUNE_C_88, FFTUNE_C4(44)
#define FFTUNE_C_104 FFTUNE_C_96, FFTUNE_C4(48)
#define FFTUNE_C_112 FFTUNE_C_104, FFTUNE_C4(52)
#define FFTUNE_C_120 FFTUNE_C_112, FFTUNE_C4(56)
#define FFTUNE_C_128 FFTUNE_C_120, FFTUNE_C4(60)
#define FFTUNE_C_136 FFTUNE_C_128, FFTUNE_C4(64)
#define FFTUNE_C_144 FFTUNE_C_136, FFTUNE_C4(68)
#define FFTUNE_C_152 FFTUNE_C_144, FFTUNE_C4(72)
#define FFTUNE_C_160 FFTUNE_C_152, FFTUNE_C4(76)
#define FFTUNE_C_168 FFTUNE_C_160, FFTUNE_C4(80)
#define FFTUNE_C_176 FFTUNE_C_168, FFTUNE_C4(84)
#define FFTUNE_C_184 FFTUNE_C_176, FFTUNE_C4(88)
#define FFTUNE_C_192 FFTUNE_C_184, FFTUNE_C4(92)
#define FFTUNE_C_200 FFTUNE_C_192, FFTUNE_C4(96)
#define FFTUNE_C_208 FFTUNE_C_200, FFTUNE_C4(100)
#define FFTUNE_C_216 FFTUNE_C_208, FFTUNE_C4(104)
#define FFTUNE_C_224 FFTUNE_C_216, FFTUNE_C4(108)
#define FFTUNE_C_232 FFTUNE_C_224, FFTUNE_C4(112)
#define FFTUNE_C_240 FFTUNE_C_232, FFTUNE_C4(116)
#define FFTUNE_C_248 FFTUNE_C_240, FFTUNE_C4(120)
#define FFTUNE_C_256 FFTUNE_C_248, FFTUNE_C4(124)

// One instruction: its width, then the numbers of the operands behind the accumulators. Only 16-bit
// elements have a choice of layout: 0 where k is contiguous, 1 where the other extent is.
#define FFTUNE_WGMMA(width, at_a, at_b, at_p, kind, layouts, ...)                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #at_p                               \
               ", 0;\n"                                                              \
               "wgmma.mma_async.sync.aligned.m64n" #width kind " {" FFTUNE_T_##width \
               "}, %" #at_a ", %" #at_b ", p, 1, 1" layouts ";}"                     \
               : FFTUNE_C_##width                                                    \
               : "l"(a), "l"(b), "r"(accumulate)__VA_ARGS__)
#define FFTUNE_WGMMA_16BIT(width, at_a, at_b, at_p, at_s, at_t, kind)                            \
  FFTUNE_WGMMA(width, at_a, at_b, at_p, kind, ", %" #at_s ", %" #at_t, , "n"(int{a_transposed}), \
               "n"(int{b_transposed}))
#define FFTUNE_WGMMA_CASE(width, at_a, at_b, at_p, at_s, at_t)                      \
  if constexpr (n == width) {                                                       \
    if constexpr (is_same<T, bf16>) {                                               \
      FFTUNE_WGMMA_16BIT(width, at_a, at_b, at_p, at_s, at_t, "k16.f32.bf16.bf16"); \
    } else if constexpr (is_same<T, fp16>) {                                        \
      FFTUNE_WGMMA_16BIT(width, at_a, at_b, at_p, at_s, at_t, "k16.f32.f16.f16");   \
    } else {                                                                        \
      FFTUNE_WGMMA(width, at_a, at_b, at_p, "k32.f32.e4m3.e4m3", "");               \
    }                                                                               \
  }

// c (+)= a b^T: a [64, k], b [n, k], k 32 bytes, by descriptors; c is overwritten where
// `accumulate` is 0. A transposed operand has its other extent contiguous.
template <class T, int n, bool a_transposed = false, bool b_transposed = false>
__device__ __forceinline__ void wgmma(float (&c)[n / 2], u64 a, u64 b, int accumulate) {
  static_assert(n % 8 == 0 && n >= 8 && n <= 256);
  static_assert(is_same<T, bf16> || is_same<T, fp16> || is_same<T, fp8>);
  static_assert(!b_transposed || !is_same<T, fp8>);
  FFTUNE_WGMMA_CASE(8, 4, 5, 6, 7, 8);
  FFTUNE_WGMMA_CASE(16, 8, 9, 10, 11, 12);
  FFTUNE_WGMMA_CASE(24, 12, 13, 14, 15, 16);
  FFTUNE_WGMMA_CASE(32, 16, 17, 18, 19, 20);
  FFTUNE_WGMMA_CASE(40, 20, 21, 22, 23, 24);
  FFTUNE_WGMMA_CASE(48, 24, 25, 26, 27, 28);
  FFTUNE_WGMMA_CASE(56, 28, 29, 30, 31, 32);
  FFTUNE_WGMMA_CASE(64, 32, 33, 34, 35, 36);
  FFTUNE_WGMMA_CASE(72, 36, 37, 38, 39, 40);
  FFTUNE_WGMMA_CASE(80, 40, 41, 42, 43, 44);
  FFTUNE_WGMMA_CASE(88, 44, 45, 46, 47, 48);
  FFTUNE_WGMMA_CASE(96, 48, 49, 50, 51, 52);
  FFTUNE_WGMMA_CASE(104, 52, 53, 54, 55, 56);
  FFTUNE_WGMMA_CASE(112, 56, 57, 58, 59, 60);
  FFTUNE_WGMMA_CASE(120, 60, 61, 62, 63, 64);
  FFTUNE_WGMMA_CASE(128, 64, 65, 66, 67, 68);
  FFTUNE_WGMMA_CASE(136, 68, 69, 70, 71, 72);
  FFTUNE_WGMMA_CASE(144, 72, 73, 74, 75, 76);
  FFTUNE_WGMMA_CASE(152, 76, 77, 78, 79, 80);
  FFTUNE_WGMMA_CASE(160, 80, 81, 82, 83, 84);
  FFTUNE_WGMMA_CASE(168, 84, 85, 86, 87, 88);
  FFTUNE_WGMMA_CASE(176, 88, 89, 90, 91, 92);
  FFTUNE_WGMMA_CASE(184, 92, 93, 94, 95, 96);
  FFTUNE_WGMMA_CASE(192, 96, 97, 98, 99, 100);
  FFTUNE_WGMMA_CASE(200, 100, 101, 102, 103, 104);
  FFTUNE_WGMMA_CASE(208, 104, 105, 106, 107, 108);
  FFTUNE_WGMMA_CASE(216, 108, 109, 110, 111, 112);
  FFTUNE_WGMMA_CASE(224, 112, 113, 114, 115, 116);
  FFTUNE_WGMMA_CASE(232, 116, 117, 118, 119, 120);
  FFTUNE_WGMMA_CASE(240, 120, 121, 122, 123, 124);
  FFTUNE_WGMMA_CASE(248, 124, 125, 126, 127, 128);
  FFTUNE_WGMMA_CASE(256, 128, 129, 130, 131, 132);
}

// A in registers: four words of a thread, which hold its elements of the 64 x 16 fragment as those
// of a warp's 16 rows lie for mma.sync m16n8k16.
#define FFTUNE_WGMMA_REGISTERS(width, at_0, at_1, at_2, at_3, at_b, at_p, at_t, kind)              \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #at_p                                             \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #width kind " {" FFTUNE_T_##width               \
               "}, {%" #at_0 ", %" #at_1 ", %" #at_2 ", %" #at_3 "}, %" #at_b ", p, 1, 1, %" #at_t \
               ";}"                                                                                \
               : FFTUNE_C_##width                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),              \
                 "n"(int{b_transposed}))
#define FFTUNE_WGMMA_REGISTERS_CASE(width, ...)                        \
  if constexpr (n == width) {                                          \
    if constexpr (is_same<T, bf16>) {                                  \
      FFTUNE_WGMMA_REGISTERS(width, __VA_ARGS__, "k16.f32.bf16.bf16"); \
    } else {                                                           \
      FFTUNE_WGMMA_REGISTERS(width, __VA_ARGS__, "k16.f32.f16.f16");   \
    }                                                                  \
  }

// c (+)= a b^T: a [64, 16] in registers, b [n, 16] by descriptor. Neither c nor a may be accessed
// before the wait.
template <class T, int n, bool b_transposed = false>
__device__ __forceinline__ void wgmma_registers(float (&c)[n / 2], const u32 (&a)[4], u64 b,
                                                int accumulate) {
  static_assert(n == 8 || n == 16 || n == 32 || n == 64 || n == 80 || n == 96 || n == 128 ||
                n == 192 || n == 256);
  static_assert(is_same<T, bf16> || is_same<T, fp16>);
  FFTUNE_WGMMA_REGISTERS_CASE(8, 4, 5, 6, 7, 8, 9, 10);
  FFTUNE_WGMMA_REGISTERS_CASE(16, 8, 9, 10, 11, 12, 13, 14);
  FFTUNE_WGMMA_REGISTERS_CASE(32, 16, 17, 18, 19, 20, 21, 22);
  FFTUNE_WGMMA_REGISTERS_CASE(64, 32, 33, 34, 35, 36, 37, 38);
  FFTUNE_WGMMA_REGISTERS_CASE(80, 40, 41, 42, 43, 44, 45, 46);
  FFTUNE_WGMMA_REGISTERS_CASE(96, 48, 49, 50, 51, 52, 53, 54);
  FFTUNE_WGMMA_REGISTERS_CASE(128, 64, 65, 66, 67, 68, 69, 70);
  FFTUNE_WGMMA_REGISTERS_CASE(192, 96, 97, 98, 99, 100, 101, 102);
  FFTUNE_WGMMA_REGISTERS_CASE(256, 128, 129, 130, 131, 132, 133, 134);
}

}  // namespace fftune

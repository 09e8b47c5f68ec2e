// Tensor core products of one warpgroup (sm_90a): wgmma m64nNk16, k32 of fp8, both operands in
// shared memory, fp32 accumulation.
//
// Accumulator c[j], lane l of warp w: row 16 w + l / 4 (+ 8 when j & 2), column 8 (j / 4) + 2 (l %
// 4) + (j & 1) (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16"). PTX wants every
// register named in the text of the instruction, so the widths are spelled out; the macros only
// shorten the lists and end with this file.
#pragma once

#include "common/float8.cuh"

namespace fftune {

// Before the first product of a chain, and after any other access to the accumulators.
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
// 8-row atoms are 1024 bytes apart. Adding advance bytes >> 4 moves along k inside the swizzled
// row.
__device__ __forceinline__ u64 wgmma_descriptor(u32 shared) {
  return (u64{1} << 62) | (u64{1024 >> 4} << 32) | (u64{1} << 16) | ((shared & 0x3ffffu) >> 4);
}

// Descriptor of a tile of 64 k whose other extent is contiguous: slabs of 64 elements of that
// extent, each [64 k][128 bytes] under the 128-byte swizzle, `slab_bytes` apart. 8-row atoms of k
// are 1024 bytes apart, so 16 of k are 2048 bytes (PTX ISA, "Strides" of the matrix descriptor,
// MN-major).
constexpr int wgmma_slab_bytes = 64 * 128;
__device__ __forceinline__ u64 wgmma_transposed_descriptor(u32 shared) {
  return (u64{1} << 62) | (u64{1024 >> 4} << 32) | (u64{wgmma_slab_bytes >> 4} << 16) |
         ((shared & 0x3ffffu) >> 4);
}

#define FFTUNE_C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define FFTUNE_C16(i) FFTUNE_C4(i), FFTUNE_C4(i + 4), FFTUNE_C4(i + 8), FFTUNE_C4(i + 12)
#define FFTUNE_C64(i) FFTUNE_C16(i), FFTUNE_C16(i + 16), FFTUNE_C16(i + 32), FFTUNE_C16(i + 48)

#define FFTUNE_WGMMA_8(kind, layouts)           \
  asm volatile(                                 \
      "{.reg .pred p; setp.ne.b32 p, %6, 0;\n"  \
      "wgmma.mma_async.sync.aligned.m64n8" kind \
      " {"                                      \
      "%0, %1, %2, %3"                          \
      "}, %4, %5, p, 1, 1" layouts ";}"         \
      : FFTUNE_C4(0)                            \
      : "l"(a), "l"(b), "r"(accumulate))

#define FFTUNE_WGMMA_16(kind, layouts)           \
  asm volatile(                                  \
      "{.reg .pred p; setp.ne.b32 p, %10, 0;\n"  \
      "wgmma.mma_async.sync.aligned.m64n16" kind \
      " {"                                       \
      "%0, %1, %2, %3, %4, %5, %6, %7"           \
      "}, %8, %9, p, 1, 1" layouts ";}"          \
      : FFTUNE_C4(0), FFTUNE_C4(4)               \
      : "l"(a), "l"(b), "r"(accumulate))

#define FFTUNE_WGMMA_24(kind, layouts)                   \
  asm volatile(                                          \
      "{.reg .pred p; setp.ne.b32 p, %14, 0;\n"          \
      "wgmma.mma_async.sync.aligned.m64n24" kind         \
      " {"                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11" \
      "}, %12, %13, p, 1, 1" layouts ";}"                \
      : FFTUNE_C4(0), FFTUNE_C4(4), FFTUNE_C4(8)         \
      : "l"(a), "l"(b), "r"(accumulate))

#define FFTUNE_WGMMA_32(kind, layouts)                                       \
  asm volatile(                                                              \
      "{.reg .pred p; setp.ne.b32 p, %18, 0;\n"                              \
      "wgmma.mma_async.sync.aligned.m64n32" kind                             \
      " {"                                                                   \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
      "}, %16, %17, p, 1, 1" layouts ";}"                                    \
      : FFTUNE_C16(0)                                                        \
      : "l"(a), "l"(b), "r"(accumulate))

#define FFTUNE_WGMMA_64(kind, layouts)                                                 \
  asm volatile(                                                                        \
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"                                        \
      "wgmma.mma_async.sync.aligned.m64n64" kind                                       \
      " {"                                                                             \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "         \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
      "}, %32, %33, p, 1, 1" layouts ";}"                                              \
      : FFTUNE_C16(0), FFTUNE_C16(16)                                                  \
      : "l"(a), "l"(b), "r"(accumulate))

#define FFTUNE_WGMMA_96(kind, layouts)                                                   \
  asm volatile(                                                                          \
      "{.reg .pred p; setp.ne.b32 p, %50, 0;\n"                                          \
      "wgmma.mma_async.sync.aligned.m64n96" kind                                         \
      " {"                                                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"   \
      "}, %48, %49, p, 1, 1" layouts ";}"                                                \
      : FFTUNE_C16(0), FFTUNE_C16(16), FFTUNE_C16(32)                                    \
      : "l"(a), "l"(b), "r"(accumulate))

#define FFTUNE_WGMMA_128(kind, layouts)                                                  \
  asm volatile(                                                                          \
      "{.reg .pred p; setp.ne.b32 p, %66, 0;\n"                                          \
      "wgmma.mma_async.sync.aligned.m64n128" kind                                        \
      " {"                                                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"   \
      "}, %64, %65, p, 1, 1" layouts ";}"                                                \
      : FFTUNE_C64(0)                                                                    \
      : "l"(a), "l"(b), "r"(accumulate))

#define FFTUNE_WGMMA_160(kind, layouts)                                                  \
  asm volatile(                                                                          \
      "{.reg .pred p; setp.ne.b32 p, %82, 0;\n"                                          \
      "wgmma.mma_async.sync.aligned.m64n160" kind                                        \
      " {"                                                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"   \
      "}, %80, %81, p, 1, 1" layouts ";}"                                                \
      : FFTUNE_C64(0), FFTUNE_C16(64)                                                    \
      : "l"(a), "l"(b), "r"(accumulate))

#define FFTUNE_WGMMA_192(kind, layouts)                                                  \
  asm volatile(                                                                          \
      "{.reg .pred p; setp.ne.b32 p, %98, 0;\n"                                          \
      "wgmma.mma_async.sync.aligned.m64n192" kind                                        \
      " {"                                                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"   \
      "}, %96, %97, p, 1, 1" layouts ";}"                                                \
      : FFTUNE_C64(0), FFTUNE_C16(64), FFTUNE_C16(80)                                    \
      : "l"(a), "l"(b), "r"(accumulate))

#define FFTUNE_WGMMA_224(kind, layouts)                                                            \
  asm volatile(                                                                                    \
      "{.reg .pred p; setp.ne.b32 p, %114, 0;\n"                                                   \
      "wgmma.mma_async.sync.aligned.m64n224" kind                                                  \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "           \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "           \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "           \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
      "}, %112, %113, p, 1, 1" layouts ";}"                                                        \
      : FFTUNE_C64(0), FFTUNE_C16(64), FFTUNE_C16(80), FFTUNE_C16(96)                              \
      : "l"(a), "l"(b), "r"(accumulate))

#define FFTUNE_WGMMA_256(kind, layouts)                                                            \
  asm volatile(                                                                                    \
      "{.reg .pred p; setp.ne.b32 p, %130, 0;\n"                                                   \
      "wgmma.mma_async.sync.aligned.m64n256" kind                                                  \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "           \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "           \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "           \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
      "%111, "                                                                                     \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
      "%127"                                                                                       \
      "}, %128, %129, p, 1, 1" layouts ";}"                                                        \
      : FFTUNE_C64(0), FFTUNE_C64(64)                                                              \
      : "l"(a), "l"(b), "r"(accumulate))

// The instruction of one width, for each element type. Only 16-bit elements have a choice of
// layout: 0 where k is contiguous, 1 where the other extent is.
#define FFTUNE_WGMMA_16BIT(width, kind)         \
  if constexpr (a_transposed && b_transposed) { \
    FFTUNE_WGMMA_##width(kind, ", 1, 1");       \
  } else if constexpr (b_transposed) {          \
    FFTUNE_WGMMA_##width(kind, ", 0, 1");       \
  } else {                                      \
    static_assert(!a_transposed);               \
    FFTUNE_WGMMA_##width(kind, ", 0, 0");       \
  }
#define FFTUNE_WGMMA(width)                              \
  if constexpr (is_same<T, bf16>) {                      \
    FFTUNE_WGMMA_16BIT(width, "k16.f32.bf16.bf16");      \
  } else if constexpr (is_same<T, fp16>) {               \
    FFTUNE_WGMMA_16BIT(width, "k16.f32.f16.f16");        \
  } else {                                               \
    static_assert(is_same<T, fp8>, "bf16, fp16 or fp8"); \
    FFTUNE_WGMMA_##width("k32.f32.e4m3.e4m3", "");       \
  }

// c (+)= a b^T: a [64, k], b [n, k], k 32 bytes, by descriptors; c is overwritten where
// `accumulate` is 0. A transposed operand has its other extent contiguous.
template <class T, int n, bool a_transposed = false, bool b_transposed = false>
__device__ __forceinline__ void wgmma(float (&c)[n / 2], u64 a, u64 b, int accumulate) {
  if constexpr (n == 8) {
    FFTUNE_WGMMA(8);
  } else if constexpr (n == 16) {
    FFTUNE_WGMMA(16);
  } else if constexpr (n == 24) {
    FFTUNE_WGMMA(24);
  } else if constexpr (n == 32) {
    FFTUNE_WGMMA(32);
  } else if constexpr (n == 64) {
    FFTUNE_WGMMA(64);
  } else if constexpr (n == 96) {
    FFTUNE_WGMMA(96);
  } else if constexpr (n == 128) {
    FFTUNE_WGMMA(128);
  } else if constexpr (n == 160) {
    FFTUNE_WGMMA(160);
  } else if constexpr (n == 192) {
    FFTUNE_WGMMA(192);
  } else if constexpr (n == 224) {
    FFTUNE_WGMMA(224);
  } else if constexpr (n == 256) {
    FFTUNE_WGMMA(256);
  } else {
    static_assert(n == 256, "this width is not spelled out");
  }
}

#undef FFTUNE_WGMMA
#undef FFTUNE_WGMMA_16BIT
#undef FFTUNE_WGMMA_8
#undef FFTUNE_WGMMA_16
#undef FFTUNE_WGMMA_24
#undef FFTUNE_WGMMA_32
#undef FFTUNE_WGMMA_64
#undef FFTUNE_WGMMA_96
#undef FFTUNE_WGMMA_128
#undef FFTUNE_WGMMA_160
#undef FFTUNE_WGMMA_192
#undef FFTUNE_WGMMA_224
#undef FFTUNE_WGMMA_256
#undef FFTUNE_C64
#undef FFTUNE_C16
#undef FFTUNE_C4

}  // namespace fftune

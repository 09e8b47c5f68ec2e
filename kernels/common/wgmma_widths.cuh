// wgmma with its operand A in registers, at every width.
#pragma once

#include "common/mma.cuh"

namespace fftune {

// wgmma_registers (common/mma.cuh), and the widths that it lacks.
template <class T, int n, bool b_transposed = false>
__device__ __forceinline__ void wgmma_of_width(float (&c)[n / 2], const u32 (&a)[4], u64 b,
                                               int accumulate) {
  if constexpr (n == 8 || n == 16 || n == 32 || n == 64 || n == 80 || n == 96 || n == 128 ||
                n == 192 || n == 256) {
    wgmma_registers<T, n, b_transposed>(c, a, b, accumulate);
  } else {
    static_assert(n % 8 == 0 && n < 256);
    FFTUNE_WGMMA_REGISTERS_CASE(24, 12, 13, 14, 15, 16, 17, 18);
    FFTUNE_WGMMA_REGISTERS_CASE(40, 20, 21, 22, 23, 24, 25, 26);
    FFTUNE_WGMMA_REGISTERS_CASE(48, 24, 25, 26, 27, 28, 29, 30);
    FFTUNE_WGMMA_REGISTERS_CASE(56, 28, 29, 30, 31, 32, 33, 34);
    FFTUNE_WGMMA_REGISTERS_CASE(72, 36, 37, 38, 39, 40, 41, 42);
    FFTUNE_WGMMA_REGISTERS_CASE(88, 44, 45, 46, 47, 48, 49, 50);
    FFTUNE_WGMMA_REGISTERS_CASE(104, 52, 53, 54, 55, 56, 57, 58);
    FFTUNE_WGMMA_REGISTERS_CASE(112, 56, 57, 58, 59, 60, 61, 62);
    FFTUNE_WGMMA_REGISTERS_CASE(120, 60, 61, 62, 63, 64, 65, 66);
    FFTUNE_WGMMA_REGISTERS_CASE(136, 68, 69, 70, 71, 72, 73, 74);
    FFTUNE_WGMMA_REGISTERS_CASE(144, 72, 73, 74, 75, 76, 77, 78);
    FFTUNE_WGMMA_REGISTERS_CASE(152, 76, 77, 78, 79, 80, 81, 82);
    FFTUNE_WGMMA_REGISTERS_CASE(160, 80, 81, 82, 83, 84, 85, 86);
    FFTUNE_WGMMA_REGISTERS_CASE(168, 84, 85, 86, 87, 88, 89, 90);
    FFTUNE_WGMMA_REGISTERS_CASE(176, 88, 89, 90, 91, 92, 93, 94);
    FFTUNE_WGMMA_REGISTERS_CASE(184, 92, 93, 94, 95, 96, 97, 98);
    FFTUNE_WGMMA_REGISTERS_CASE(200, 100, 101, 102, 103, 104, 105, 106);
    FFTUNE_WGMMA_REGISTERS_CASE(208, 104, 105, 106, 107, 108, 109, 110);
    FFTUNE_WGMMA_REGISTERS_CASE(216, 108, 109, 110, 111, 112, 113, 114);
    FFTUNE_WGMMA_REGISTERS_CASE(224, 112, 113, 114, 115, 116, 117, 118);
    FFTUNE_WGMMA_REGISTERS_CASE(232, 116, 117, 118, 119, 120, 121, 122);
    FFTUNE_WGMMA_REGISTERS_CASE(240, 120, 121, 122, 123, 124, 125, 126);
    FFTUNE_WGMMA_REGISTERS_CASE(248, 124, 125, 126, 127, 128, 129, 130);
  }
}

}  // namespace fftune

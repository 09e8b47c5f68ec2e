// wgmma with its operand A in registers, at every width up to 152: tiles of a group's rows are as
// high as these need.
#pragma once

#include "common/mma.cuh"

namespace fftune {

// wgmma_registers (common/mma.cuh), and the widths that it lacks.
template <class T, int n>
__device__ __forceinline__ void wgmma_of_width(float (&c)[n / 2], const u32 (&a)[4], u64 b,
                                               int accumulate) {
  if constexpr (n > 152 || n == 128 || n == 96 || n == 80 || n == 64 || n == 32 || n <= 16) {
    wgmma_registers<T, n>(c, a, b, accumulate);
  } else {
    static_assert(n % 8 == 0);
    constexpr bool b_transposed = false;
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
  }
}

}  // namespace fftune

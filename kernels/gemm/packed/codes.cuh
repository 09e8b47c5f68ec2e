// Packed weights (gemm/packed/layout.cuh) as operands of the tensor cores.
#pragma once

#include "common/vectors.cuh"
#include "gemm/packed/layout.cuh"

namespace fftune {

// Whether these are the first 16 bytes of a packed weight [n, k] of this layout.
__device__ __forceinline__ bool is_packed(const vector16& header, i64 n, i64 k) {
  return header.word[0] == packed_magic && header.word[1] == packed_version &&
         header.word[2] == static_cast<u32>(n) && header.word[3] == static_cast<u32>(k);
}

// Integers of 4 bits as pairs of T. The bits of a code below those of a constant make the constant
// plus the code, exactly, and subtracting the constant and the zero point is exact too. Multiplying
// first would round the zero point times the scale, so that q = z would not be zero.
template <class T>
struct packed_codes;

// (word & mask) | bits in one instruction, which has room for one constant: else ptxas takes two.
template <u32 mask>
__device__ __forceinline__ u32 masked_or(u32 word, u32 bits) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "n"(mask), "r"(bits));
  return result;
}

template <>
struct packed_codes<bf16> {
  // The addend of both codes of a pair: -(128 + zero point).
  template <int i>
  static __device__ __forceinline__ u32 offset(u32 zero) {
    return (0xc300u | zero) * 0x10001u;
  }
  // Register `i` of the operand.
  template <int i>
  static __device__ __forceinline__ u32 pair(u32 word, u32 offset) {
    const u32 codes = masked_or<0x000f000f>(word >> 4 * i, 0x43004300);
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(codes), "r"(0x3f803f80u), "r"(offset));
    return result;
  }
  static __device__ __forceinline__ u32 scaled(u32 pair, u32 scale) {
    u32 result;  // the addend is -0, which changes no product
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(scale), "r"(0x80008000u));
    return result;
  }
};

template <>
struct packed_codes<fp16> {
  // Four bits further up a code counts 16, and (1024 + 16 q) / 16 is 64 + q: 64 and the zero point
  // are subtracted then.
  template <int i>
  static __device__ __forceinline__ u32 offset(u32 zero) {
    return (i % 2 == 0 ? 0xe400u | zero : 0xd400u | zero << 4) * 0x10001u;
  }
  template <int i>
  static __device__ __forceinline__ u32 pair(u32 word, u32 offset) {
    u32 result;
    if constexpr (i % 2 == 0) {
      const u32 codes = masked_or<0x000f000f>(word >> 4 * i, 0x64006400);
      asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(codes), "r"(offset));
    } else {
      const u32 codes = masked_or<0x00f000f0>(word >> 4 * (i - 1), 0x64006400);
      asm("fma.rn.f16x2 %0, %1, %2, %3;"
          : "=r"(result)
          : "r"(codes), "r"(0x2c002c00u), "r"(offset));
    }
    return result;
  }
  static __device__ __forceinline__ u32 scaled(u32 pair, u32 scale) {
    u32 result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(scale));
    return result;
  }
};

}  // namespace fftune

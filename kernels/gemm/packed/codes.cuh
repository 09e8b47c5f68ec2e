// Packed weights (gemm/packed/layout.cuh) as operands of the tensor cores.
#pragma once

#include "common/vectors.cuh"
#include "gemm/packed/layout.cuh"

namespace fftune {

// Whether these are the first 16 bytes of a packed weight [n, k] of this layout.
__device__ __forceinline__ bool is_packed(const vector16& header, packed_code code, i64 n, i64 k) {
  return header.word[0] == packed_magic(code) && header.word[1] == packed_version &&
         header.word[2] == static_cast<u32>(n) && header.word[3] == static_cast<u32>(k);
}

// (word & mask) | bits in one instruction, which has room for one constant: else ptxas takes two.
template <u32 mask>
__device__ __forceinline__ u32 masked_or(u32 word, u32 bits) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "n"(mask), "r"(bits));
  return result;
}

// Products of pairs of T.
template <class T>
__device__ __forceinline__ u32 multiply_pairs(u32 left, u32 right) {
  u32 result;
  if constexpr (is_same<T, bf16>) {  // the addend is -0, which changes no product
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(left), "r"(right), "r"(0x80008000u));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(left), "r"(right));
  }
  return result;
}

// A pair of f32 scales as two pairs of T: the nearest, and the rest. Products with the first alone
// would be rounded twice, as the scales are before.
struct split_scales {
  u32 nearest, rest;
};
template <class T>
__device__ __forceinline__ split_scales split_scale(float value) {
  const u32 nearest = pack<T>(value, value);
  float first, second;
  unpack<T>(nearest, first, second);
  return {nearest, pack<T>(value - first, value - first)};
}
template <class T>
__device__ __forceinline__ u32 multiply_pairs(u32 left, const split_scales& right) {
  const u32 rest = multiply_pairs<T>(left, right.rest);
  u32 result;
  if constexpr (is_same<T, bf16>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(left), "r"(right.nearest), "r"(rest));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(left), "r"(right.nearest), "r"(rest));
  }
  return result;
}

// The codes of a lane in a k16 step, and these as pairs of T, exactly, times 1 / unit; the scales
// of two rows, times unit. twice() is of one of the two k16 steps of 32 elements of k.
template <class T, packed_code code>
struct packed_codes;

// Codes of 4 bits: a word. `words`: the 16 bytes of a part.
struct packed_word {
  u32 word;
  static __device__ __forceinline__ packed_word of(const u32* words, int step) {
    return {words[step]};
  }
};
// Codes of 8 bits: a word with k and k + 1, and one with k + 8 and k + 9.
struct packed_words {
  u32 word[2];
  static __device__ __forceinline__ packed_words of(const u32* words, int step) {
    return {{words[step * 2], words[step * 2 + 1]}};
  }
};

// A pair of one T.
__device__ __forceinline__ u32 both_halves(u32 words, int half) {
  return __byte_perm(words, 0, half == 0 ? 0x1010 : 0x3232);
}

// The two rows' scales where they have type T.
template <class T>
struct packed_scales {
  using scale = T;
  using two_scales = u32;
  static __device__ __forceinline__ void values(u32 scales, float& first, float& second) {
    unpack<T>(scales, first, second);
  }
  // The scale of row `row` twice, as a pair.
  static __device__ __forceinline__ u32 twice(u32 scales, int row, int) {
    return both_halves(scales, row);
  }
};

// And where they are f32: with codes of 8 bits, which have no zero points.
template <class T, int unit>
struct packed_wide_scales {
  using step_codes = packed_words;
  using scale = float;
  using two_scales = u64;
  template <int i>
  static __device__ __forceinline__ u32 offset(u32) {
    return 0;
  }
  static __device__ __forceinline__ void values(u64 scales, float& first, float& second) {
    first = __uint_as_float(static_cast<u32>(scales)) * unit;
    second = __uint_as_float(static_cast<u32>(scales >> 32)) * unit;
  }
  static __device__ __forceinline__ split_scales twice(u64 scales, int row, int) {
    return split_scale<T>(__uint_as_float(static_cast<u32>(scales >> 32 * row)) * unit);
  }
};

// Integers of 4 bits in bf16. The low byte of a half is that integer times 2^-133, and stays so in
// its last bit, which is the exponent's: as a code in place, or 16 times it four bits further up.
// The multiplication that makes it a number has the zero point as its addend: q - z is exact.
// Multiplying z by the scale first would round it, so that q = z would not be zero; but 8 is a
// power of two. So codes without zero points take their scale in that one operation, rounded once.
template <>
struct packed_codes<bf16, packed_code::int4> {
  using step_codes = packed_word;
  using scale = bf16;
  using two_scales = u32;
  static constexpr float unit = 256;

  static __device__ __forceinline__ void values(u32 scales, float& first, float& second) {
    unpack<bf16>(scales, first, second);
    first *= unit, second *= unit;
  }
  static __device__ __forceinline__ u32 twice(u32 scales, int row, int) {
    return multiply_pairs<bf16>(both_halves(scales, row), 0x43804380);
  }
  // The addend of both codes of a pair: -zero / 256. 2^23 + zero is exact.
  template <int i>
  static __device__ __forceinline__ u32 offset(u32 zero) {
    const float number = __fmaf_rn(__uint_as_float(0x4b000000u | zero), -0x1p-8f, 0x1p15f);
    return both_halves(__float_as_uint(number), 1);
  }
  // Register `i` of the operand: codes times 2^-133, or 2^-129.
  template <int i>
  static __device__ __forceinline__ u32 bits(const packed_word& own) {
    return (i < 2 ? own.word : own.word >> 8) & (i % 2 == 0 ? 0x000f000f : 0x00f000f0);
  }
  static __device__ __forceinline__ u32 multiply_add(u32 left, u32 right, u32 addend) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(left), "r"(right), "r"(addend));
    return result;
  }
  template <int i>
  static __device__ __forceinline__ u32 pair(const packed_word& own, u32 offset) {
    return multiply_add(bits<i>(own), i % 2 == 0 ? 0x7e007e00 : 0x7c007c00,
                        offset);  // 2^125, 2^121
  }

  // With the zero point 8, times the scale, times 1 / scaled_unit: scales between 2^-62 and 2^58
  // round as they do in a product with q - 8.
  static constexpr float scaled_unit = 0x1p64f;
  template <int i>
  static __device__ __forceinline__ u32 scaled_pair(const packed_word& own, u32 scales) {
    const u32 twice = both_halves(scales, i % 2);
    return multiply_add(bits<i>(own),
                        multiply_pairs<bf16>(twice, i % 2 == 0 ? 0x62006200 : 0x60006000),
                        multiply_pairs<bf16>(twice, 0xa100a100));  // 2^69, 2^65, -2^-61
  }
};

// And in fp16. The bits of a code below those of a constant make the constant plus the code,
// exactly, and subtracting the constant and the zero point is exact too.
template <>
struct packed_codes<fp16, packed_code::int4> : packed_scales<fp16> {
  using step_codes = packed_word;
  // Four bits further up a code counts 16, and (1024 + 16 q) / 16 is 64 + q: 64 and the zero point
  // are subtracted then.
  template <int i>
  static __device__ __forceinline__ u32 offset(u32 zero) {
    return (i % 2 == 0 ? 0xe400u | zero : 0xd400u | zero << 4) * 0x10001u;
  }
  template <int i>
  static __device__ __forceinline__ u32 pair(const packed_word& own, u32 offset) {
    const u32 word = own.word;
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
};

// An e8m0 scale: 2^(byte - 127); 255 is NaN.
__device__ __forceinline__ float e8m0_value(u32 byte) {
  const u32 bits = byte == 0 ? 0x00400000u : byte == 255 ? 0x7fffffffu : byte << 23;
  return __uint_as_float(bits);
}

// e2m1: the sign in place, and the three other bits at the end of T's exponent and the beginning of
// its mantissa. That is the number times 2^-126 (bf16) or 2^-14 (fp16), 0.5 as a subnormal. bf16
// takes nine operations for the four registers of a word, as its bits are in the order for that.
template <class T>
struct packed_e2m1 {
  static constexpr bool wide = is_same<T, bf16>;
  using step_codes = packed_word;
  using two_scales = u32;

  template <int i>
  static __device__ __forceinline__ u32 offset(u32) {
    return 0;
  }
  template <int i>
  static __device__ __forceinline__ u32 bits(const packed_word& own) {
    const u32 word = own.word;
    const u32 turned = i == 0   ? word
                       : i == 2 ? word << 6
                                : __funnelshift_r(word, word, i == 1 ? 4 : 6);
    if constexpr (wide) {
      if constexpr (i < 3) return turned & 0x81c081c0;
      return masked_or<0x81808180>(turned, word << 2 & 0x00400040);
    } else {
      u32 others = i == 0 ? word << 3 : i == 1 ? word >> 1 : i == 2 ? word << 9 : word << 5;
      others &= i == 3 ? 0x02000200 : 0x0e000e00;
      if constexpr (i == 3) others = masked_or<0x0c000c00>(word >> 3, others);
      return masked_or<0x80008000>(turned, others);
    }
  }
};

template <class T>
struct packed_codes<T, packed_code::mxfp4> : packed_e2m1<T> {
  using packed_e2m1<T>::wide;
  using scale = u8;

  template <int i>
  static __device__ __forceinline__ u32 pair(const packed_word& own, u32) {
    return multiply_pairs<T>(packed_e2m1<T>::template bits<i>(own), wide ? 0x7e807e80 : 0x74007400);
  }
  // Times the scale, times 1 / scaled_unit, in one exact operation: the factor is a power of two
  // whose exponent is the byte plus 94. Scales between 2^-100 and 2^33; larger ones give infinities
  // or NaN, as the byte 255 must.
  static constexpr float scaled_unit = 0x1p32f;
  template <int i>
  static __device__ __forceinline__ u32 scaled_pair(const packed_word& own, u32 scales) {
    static_assert(wide);
    const u32 bytes = __byte_perm(scales, 0, i % 2 == 0 ? 0x4040 : 0x4141);
    const u32 factor = __vminu2(bytes * 128 + 94 * 128 * 0x10001u, 0x7fc07fc0);
    return multiply_pairs<T>(packed_e2m1<T>::template bits<i>(own), factor);
  }
  // Both scales as bf16: the byte is the exponent. 0 is the subnormal 2^-127, and 255 NaN.
  static __device__ __forceinline__ u32 both(u32 scales) {
    const u32 exponents = __byte_perm(scales, 0, 0x4140) << 7;
    const u32 numbers = __vmaxu2(exponents, 0x00400040);
    return numbers | ((numbers + 0x00800080) >> 15 & 0x00010001);
  }
  static __device__ __forceinline__ void values(u32 scales, float& first, float& second) {
    const u32 numbers = both(scales);
    first = __uint_as_float(numbers << 16);
    second = __uint_as_float(numbers & 0xffff0000);
  }
  static __device__ __forceinline__ u32 twice(u32 scales, int row, int) {
    if constexpr (wide) {
      return __byte_perm(both(scales), 0, row == 0 ? 0x1010 : 0x3232);
    } else {
      const float value = e8m0_value(scales >> 8 * row & 255);
      return pack<T>(value, value);
    }
  }
};

// e4m3 in the upper byte of each half: the sign in place, and the seven other bits at the end of
// T's exponent and the beginning of its mantissa. That is the number times 2^-120 (bf16) or 2^-8
// (fp16).
template <class T>
__device__ __forceinline__ u32 e4m3_bits(u32 bytes) {
  if constexpr (is_same<T, bf16>) {
    return masked_or<0x07f007f0>(bytes >> 4, bytes & 0x80008000);
  } else {
    return masked_or<0x3f803f80>(bytes >> 1, bytes & 0x80008000);
  }
}

// The scales multiply the operands, which have at most 6 bits then: exactly. A code times 2^-126
// (bf16) or 2^-14 (fp16), times its scale times 2^118 or 2^6, is the number times 2^-8.
template <class T>
struct packed_codes<T, packed_code::nvfp4> : packed_e2m1<T> {
  using packed_e2m1<T>::wide;
  using scale = u16;
  static constexpr float unit = 256;  // of the rows' scales

  template <int i>
  static __device__ __forceinline__ u32 pair(const packed_word& own, u32) {
    return packed_e2m1<T>::template bits<i>(own);
  }
  // Bytes: the first row's scales of both k16 steps, then the second row's.
  static __device__ __forceinline__ u32 twice(u32 scales, int row, int step) {
    const u32 both = e4m3_bits<T>(__byte_perm(scales, 0, step == 0 ? 0x2404 : 0x3414));
    const u32 factor = wide ? 0x7b007b00 : 0x74007400;  // 2^119, 2^14
    u32 numbers = multiply_pairs<T>(both, factor);
    if constexpr (wide) numbers = multiply_pairs<T>(numbers, factor);
    return __byte_perm(numbers, 0, row == 0 ? 0x1010 : 0x3232);
  }
};

// e4m3 likewise; 2^8 is the unit of fp16.
template <class T>
struct packed_codes<T, packed_code::fp8> : packed_wide_scales<T, is_same<T, bf16> ? 1 : 256> {
  static constexpr bool wide = is_same<T, bf16>;

  template <int i>
  static __device__ __forceinline__ u32 pair(const packed_words& own, u32) {
    constexpr int shift = (wide ? 4 : 7) - i % 2 * 8;
    constexpr u32 mask = wide ? 0x07f007f0 : 0x3f803f80;
    const u32 word = own.word[i / 2];
    const u32 moved = shift >= 0 ? word << (shift & 31) : word >> (-shift & 31);
    const u32 bits = masked_or<mask>(moved, word << (8 - i % 2 * 8) & 0x80008000);
    return wide ? multiply_pairs<T>(bits, 0x7b807b80) : bits;
  }
};

// Integers of 8 bits, less 128 for their sign. bf16: the seven low bits below those of 128, from
// which 128 or 256 are subtracted. fp16: q + 128 below the bits of 1024, and that times 1 / 128.
template <class T>
struct packed_codes<T, packed_code::int8> : packed_wide_scales<T, is_same<T, bf16> ? 1 : 128> {
  template <int i>
  static __device__ __forceinline__ u32 pair(const packed_words& own, u32) {
    const u32 word = own.word[i / 2] >> i % 2 * 8;
    u32 result;
    if constexpr (is_same<T, bf16>) {
      const u32 low = masked_or<0x007f007f>(word, 0x43004300);
      const u32 addend = masked_or<0x00800080>(word, 0xc300c300);
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(0x3f803f80u), "r"(addend));
    } else {
      const u32 bits = (word & 0x00ff00ff) ^ 0x64806480;
      asm("fma.rn.f16x2 %0, %1, %2, %3;"
          : "=r"(result)
          : "r"(bits), "r"(0x20002000u), "r"(0xc880c880u));
    }
    return result;
  }
};

// The value of a code before its scale, for codes without zero points.
template <packed_code code>
__device__ __forceinline__ float code_value(u32 own) {
  if constexpr (code == packed_code::mxfp4 || code == packed_code::nvfp4) {
    return __uint_as_float((own & 8) << 28 | (own & 7) << 22) * 0x1p126f;
  } else if constexpr (code == packed_code::fp8) {
    return __uint_as_float((own & 128) << 24 | (own & 127) << 20) * 0x1p120f;
  } else {
    static_assert(code == packed_code::int8);
    return static_cast<float>(static_cast<int>(own << 24) >> 24);
  }
}

}  // namespace fftune

// Products of packed integers and one or two tokens in integers: mma.sync m16n8k32 with 16 rows
// of codes as A, and the digits of the tokens as columns of B.
//
// Within a block of 64 elements of k a token is a fixed-point number of 22 bits, whose exponent is
// that of the block's largest element. Its three signed digits of base 256 are columns, so that all
// sums of a block are exact. What the fixed point cuts off an element is at most 2^-21 of the largest
// one: as much as an addition in fp32 does. A code becomes a byte by one operation, without a
// conversion to bf16, and one MMA has the work of two.
//
//   shared memory   planes of bytes [token, digit, k], the highest digit first. The 16 bytes of a
//                   k16 step are in the order of a packed word's bytes (packed/layout.cuh):
//                   2 pair, 2 pair + 8, 2 pair + 1, 2 pair + 9 for pair = 0 .. 3
//                   scales f32 [token, k / 64]; NaN where an element of the block is not finite.
//                   With zero points [token, k / 64, 4]: behind the scale the sums of both halves
#pragma once

#include "gemm/decode/packed_stage.cuh"

namespace fftune {

constexpr int token_digits = 3;
// 1.5 * 2^23: its bits plus a small integer are the bits of their sum.
constexpr u32 integer_bits = 0x4b400000;
constexpr float integer_base = 12582912;

__device__ __forceinline__ void mma_digits(u32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The operand A of one MMA from a lane's words of two k16 steps: bytes of the first row, then of
// the second one, of each step.
template <packed_code code>
struct code_bytes;

// 16 times the codes less 8.
template <>
struct code_bytes<packed_code::int4> {
  static constexpr int unit = 16;
  static __device__ __forceinline__ void expand(u32 (&a)[4], const u32* words) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      a[step * 2] = upper(words[step] << 4);
      a[step * 2 + 1] = upper(words[step]);
    }
  }

 private:
  static __device__ __forceinline__ u32 upper(u32 word) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;"
        : "=r"(result)
        : "r"(word), "r"(0xf0f0f0f0u), "r"(0x80808080u));
    return result;
  }
};

template <>
struct code_bytes<packed_code::int8> {
  static constexpr int unit = 1;
  static __device__ __forceinline__ void expand(u32 (&a)[4], const u32* words) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      a[step * 2] = __byte_perm(words[step * 2], words[step * 2 + 1], 0x6240);
      a[step * 2 + 1] = __byte_perm(words[step * 2], words[step * 2 + 1], 0x7351);
    }
  }
};

// The digits of 8 elements that a lane has of a token; 8 neighbouring lanes have a block. `to`: the
// place of the lane's bytes in the plane of the highest digit, and `scale_at` that of the block's
// scale. All lanes of a warp; those with `stores` false have zeros.
template <class T, packed_form format>
__device__ __forceinline__ void write_digits(const vector16& value, u32 to, u32 plane_stride,
                                             u32 scale_at, bool stores) {
  const int lane = threadIdx.x % 32;
  const bool upper = lane % 2 != 0;
  // The largest magnitude; a NaN's bits are larger than those of all others.
  u32 pair = 0;
#pragma unroll
  for (const u32 word : value.word) pair = __vmaxu2(pair, word & 0x7fff7fff);
#pragma unroll
  for (int other = 1; other < 8; other *= 2)
    pair = __vmaxu2(pair, __shfl_xor_sync(~0u, pair, other));
  float even, odd;
  unpack<T>(pair, even, odd);
  const int bits = larger(__float_as_int(even), __float_as_int(odd));
  const int exponent = larger(bits >> 23, 25);
  const float factor = __int_as_float((274 - exponent) << 23);  // |element| * factor < 2^21
  // Lanes 2 i and 2 i + 1 have the lower and upper half of a k16 step. The first one takes pairs 0
  // and 1 of both, the second one pairs 2 and 3.
  u32 others[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    others[i] = __shfl_xor_sync(~0u, upper ? value.word[i] : value.word[i + 2], 1);
  u32 plane[token_digits][2];
  [[maybe_unused]] int sum = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 low = upper ? others[i] : value.word[i];
    const u32 high = upper ? value.word[i + 2] : others[i];
    float element[4];
    unpack<T>(low, element[0], element[2]);
    unpack<T>(high, element[1], element[3]);
    // The integer plus 128 and 128 * 256: its two lower digits plus 128 each. Above them are the
    // highest digit plus 64.
    u32 digits[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      digits[j] = __float_as_uint(fmaf(element[j], factor, integer_base + 0x8080));
      if constexpr (format.zeros) sum += static_cast<int>(digits[j] - (integer_bits + 0x8080));
    }
    const u32 first = __byte_perm(digits[0], digits[1], 0x5140);
    const u32 second = __byte_perm(digits[2], digits[3], 0x5140);
    plane[2][i] = __byte_perm(first, second, 0x5410) ^ 0x80808080u;
    plane[1][i] = __byte_perm(first, second, 0x7632) ^ 0x80808080u;
    const u32 highest = __byte_perm(__byte_perm(digits[0], digits[1], 0x0062),
                                    __byte_perm(digits[2], digits[3], 0x0062), 0x5410);
    plane[0][i] = (highest + 0x40404040u) ^ 0x80808080u;
  }
  if constexpr (format.zeros) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
  }
  if (!stores) return;
#pragma unroll
  for (int digit = 0; digit < token_digits; ++digit)
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + digit * plane_stride),
                 "r"(plane[digit][0]), "r"(plane[digit][1])
                 : "memory");
  if (lane % 8 == 0) {
    constexpr int shift = code_bytes<format.code>::unit == 16 ? 24 : 20;
    const int scale = bits >= 0x7f800000 ? 0x7fffffff : (exponent - shift) << 23;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(scale_at), "r"(scale) : "memory");
  }
  if constexpr (format.zeros) {
    if (lane % 4 == 0)
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(scale_at + 4 + lane % 8),
                   "f"(static_cast<float>(sum))
                   : "memory");
  }
}

// A warp's MMAs of its blocks of a stage.
template <class T, packed_stage_shape shape, int warps>
struct digit_stage_product : packed_stage_product<T, shape, warps> {
  using base = packed_stage_product<T, shape, warps>;
  using typename base::fragment;
  static constexpr packed_form format = shape.format;
  static constexpr int steps = base::steps, scales_of_block = base::scales_of_block;
  using bytes = code_bytes<format.code>;
  struct accumulators {
    float value[2];  // of both rows, of this lane's two digits
  };

  // The plane whose rows this lane reads for ldmatrix.
  static __device__ __forceinline__ int lane_plane(int tokens) {
    const int column = threadIdx.x % 8;
    return smaller(column / 4, tokens - 1) * token_digits + smaller(column % 4, token_digits - 1);
  }

  // `tokens`: this lane's bytes for ldmatrix, and `scales` those of the lane's token, at the
  // stage's first element of k.
  static __device__ __forceinline__ void run(accumulators& sum, const fragment& of, u32 tokens,
                                             u32 scales, int left) {
    const int warp = threadIdx.x / 32, there = smaller(ceil_div(left, packed_k), shape.blocks);
    run_own<steps>(sum, of, tokens, scales, (there - warp + warps - 1) / warps);
  }
  // The sums of both rows and tokens, to lanes 0 of 4.
  static __device__ __forceinline__ void add_digits(const accumulators& sum, float (&total)[4]) {
    __syncwarp();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float both = sum.value[row] + __shfl_xor_sync(~0u, sum.value[row], 1);
      total[2 * row] = both;
      total[2 * row + 1] = __shfl_xor_sync(~0u, both, 2);
    }
  }

 private:
  static __device__ __forceinline__ void row_scales(typename base::both_scales scales, float& first,
                                                    float& second) {
    if constexpr (sizeof(scales) == 8) {
      first = __uint_as_float(static_cast<u32>(scales));
      second = __uint_as_float(static_cast<u32>(scales >> 32));
    } else {
      unpack<T>(scales, first, second);
    }
  }
  template <int count>
  static __device__ __forceinline__ void run_own(accumulators& sum, const fragment& of, u32 tokens,
                                                 u32 scales, int own) {
    if (own >= count)
      run_steps<count>(sum, of, tokens, scales);
    else if constexpr (count > 1)
      run_own<count - 1>(sum, of, tokens, scales, own);
  }
  template <int count>
  static __device__ __forceinline__ void run_steps(accumulators& sum, const fragment& of,
                                                   u32 tokens, u32 scales) {
    const int warp = threadIdx.x / 32;
    const bool lowest = threadIdx.x % 2 != 0;
    const float first_factor = lowest ? 1 : 65536, second_factor = lowest ? 0 : 256;
    const float base_of_both = -integer_base * first_factor - integer_base * second_factor;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int block = warp + i * warps;
      u32 b[4];
      load_matrices(b[0], b[1], b[2], b[3], tokens + block * packed_k);
      // The scale, and with zero points the sums of both halves, for lanes of the higher digits.
      constexpr int scale_bytes = digit_scale_bytes(format);
      float scale;
      [[maybe_unused]] float sums[2];
      if constexpr (format.zeros) {
        const vector16 all = read_shared(scales + block * scale_bytes);
        scale = __uint_as_float(all.word[0]);
        sums[0] = lowest ? 0 : __uint_as_float(all.word[1]);
        sums[1] = lowest ? 0 : __uint_as_float(all.word[2]);
      } else {
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(scales + block * scale_bytes));
      }
      u32 part[4] = {integer_bits, integer_bits, integer_bits, integer_bits};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 a[4];
        bytes::expand(a, format.parts() == 2 ? of.words[i][half % format.parts()].word
                                             : of.words[i][0].word + half * 2);
        mma_digits(part, a, b[half * 2], b[half * 2 + 1]);
        if (scales_of_block == 2 || half == 1) {
          const int group = scales_of_block == 2 ? half : 0;
          float rows[2];
          row_scales(of.scale[i][group], rows[0], rows[1]);
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const float high = fmaf(__uint_as_float(part[2 * row]), first_factor, base_of_both);
            float value = fmaf(__uint_as_float(part[2 * row + 1]), second_factor, high);
            if constexpr (format.zeros) {
              // The codes are less 8 already.
              const int zero = (of.zero[i][group] >> 8 * row & 15) - 8;
              const float all = scales_of_block == 2 ? sums[half] : sums[0] + sums[1];
              value = fmaf(static_cast<float>(-bytes::unit * zero), all, value);
            }
            sum.value[row] = fmaf(value, rows[row] * scale, sum.value[row]);
            part[2 * row] = part[2 * row + 1] = integer_bits;
          }
        }
      }
    }
  }
};

}  // namespace fftune

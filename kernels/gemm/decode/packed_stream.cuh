// A stream of packed weights (gemm/packed/layout.cuh) as the operand A of mma.sync m16n8k16. Up to
// 64 tokens are B. A block of 16 rows and 64 elements of k is one or two 16-byte loads of each
// lane, and a word or two of them expand straight into the registers of one MMA.
//
//   packed_stream   a warp's loads in flight, scales and MMAs
#pragma once

#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/vectors.cuh"
#include "gemm/decode/packed_config.cuh"
#include "gemm/packed/codes.cuh"

namespace fftune {

// 16, 8, 4 or 2 bytes. If not `valid`, the result is zero and no memory is accessed. Volatile, with
// memory clobbered: loads stay where they are written, ahead of the MMAs.
template <class Value>
__device__ __forceinline__ Value load_packed(const void* address, bool valid) {
  Value value = {};
  if constexpr (sizeof(Value) == 16) {
    asm volatile(
        "{.reg .pred on;\nsetp.ne.u32 on, %5, 0;\n"
        "@on ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(value.word[0]), "+r"(value.word[1]), "+r"(value.word[2]), "+r"(value.word[3])
        : "l"(address), "r"(valid ? 1u : 0u)
        : "memory");
  } else if constexpr (sizeof(Value) == 8) {
    asm volatile("{.reg .pred on;\nsetp.ne.u32 on, %2, 0;\n@on ld.global.nc.b64 %0, [%1];}"
                 : "+l"(value)
                 : "l"(address), "r"(valid ? 1u : 0u)
                 : "memory");
  } else if constexpr (sizeof(Value) == 4) {
    asm volatile("{.reg .pred on;\nsetp.ne.u32 on, %2, 0;\n@on ld.global.nc.b32 %0, [%1];}"
                 : "+r"(value)
                 : "l"(address), "r"(valid ? 1u : 0u)
                 : "memory");
  } else {
    asm volatile("{.reg .pred on;\nsetp.ne.u32 on, %2, 0;\n@on ld.global.nc.b16 %0, [%1];}"
                 : "+h"(value)
                 : "l"(address), "r"(valid ? 1u : 0u)
                 : "memory");
  }
  return value;
}

template <class T, packed_form format, packed_config config, int operands>
struct packed_stream {
  static constexpr int tiles = config.tiles, unroll = config.unroll, parts = format.parts();
  static constexpr int n_fragments = config.n_fragments();
  static constexpr bool scales_operands = config.scales_operands(format);
  static constexpr bool by_row = format.group == 0;
  // Powers of two round no operand: they take no sums of their own.
  static constexpr bool takes_scales = format.code == packed_code::mxfp4 && is_same<T, bf16>;
  static constexpr bool separate_sums = !by_row && !scales_operands && !takes_scales;
  static constexpr int scales_of_run = config.scales_of_run(format);
  // Blocks of a run that share a scale; with groups of 32 a block has two.
  static constexpr int blocks_of_scale = unroll > scales_of_run ? unroll / scales_of_run : 1;
  static constexpr int scales_of_block = unroll < scales_of_run ? scales_of_run / unroll : 1;
  using codes = packed_codes<T, format.code>;
  // For both rows.
  using two_scales = typename codes::two_scales;
  using both_scales = typename choose_type<format.scale_bytes() == 1, u16, two_scales>::type;
  using step_codes = typename codes::step_codes;
  using accumulators = float[operands][tiles][n_fragments][4];

  // Addresses of this lane: of its first block, and of the scales and zero points of its two rows.
  const u8* blocks[operands][tiles];
  const typename codes::scale* scales[operands][tiles];
  const u8* zeros[operands][tiles];
  accumulators sum = {};

  // The run in flight.
  vector16 words[operands][tiles][unroll * parts];
  two_scales scale[operands][tiles][scales_of_run];  // of both rows
  u32 zero[operands][tiles][scales_of_run];
  float2 row_scale[operands][tiles];  // of both rows, where rows have scales beside their groups'

  // Loads block `i` of the run that begins with block `first`; elements of k from `end` on are
  // zeros.
  __device__ __forceinline__ void load_block(int i, int first, int end) {
    const bool valid = (first + i) * packed_k < end;
#pragma unroll
    for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int part = 0; part < parts; ++part) {
          words[operand][tile][i * parts + part] = load_packed<vector16>(
              blocks[operand][tile] +
                  (static_cast<i64>(first + i) * parts + part) * packed_part_bytes,
              valid);
        }
      }
    }
  }
  // And scale `i` of that run.
  __device__ __forceinline__ void load_scales(int i, int first, int end) {
    if constexpr (by_row) {
      return;
    } else {
      const int element = first * packed_k + i * (unroll * packed_k / scales_of_run);
      const bool valid = element < end;
      const int at = element / format.group * packed_rows;
#pragma unroll
      for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
          scale[operand][tile][i] = load_packed<both_scales>(scales[operand][tile] + at, valid);
          if constexpr (format.zeros)
            zero[operand][tile][i] = load_packed<u16>(zeros[operand][tile] + at, valid);
        }
      }
    }
  }
  __device__ __forceinline__ void load_run(int first, int end) {
#pragma unroll
    for (int i = 0; i < unroll; ++i) load_block(i, first, end);
#pragma unroll
    for (int i = 0; i < scales_of_run; ++i) load_scales(i, first, end);
  }
  // The one scale and zero point of a whole row, or the scale beside those of its groups.
  __device__ __forceinline__ void load_row_scales() {
    if constexpr (format.scales_rows()) {
#pragma unroll
      for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
          const int first = format.first_group() * packed_rows;
          const int pair = threadIdx.x % 32 / 4;
          const u64 both = load_packed<u64>(
              reinterpret_cast<const u8*>(scales[operand][tile] - first - pair * 2) + pair * 8,
              true);
          row_scale[operand][tile] = {__uint_as_float(static_cast<u32>(both)),
                                      __uint_as_float(static_cast<u32>(both >> 32))};
        }
      }
    }
    if constexpr (by_row) {
#pragma unroll
      for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
          scale[operand][tile][0] = load_packed<both_scales>(scales[operand][tile], true);
          if constexpr (format.zeros)
            zero[operand][tile][0] = load_packed<u16>(zeros[operand][tile], true);
        }
      }
    }
  }

  // The MMAs of the run in flight with the tokens at `tokens` in shared memory, [unroll][tokens] of
  // 128 bytes under a swizzle of 16 bytes. Each block that is done makes room for the one of the
  // next run, which begins with `next`.
  __device__ __forceinline__ void multiply(u32 tokens, int next, int end) {
    const int lane = threadIdx.x % 32;
    const u32 row = tokens + lane % 8 * 128;
    accumulators part;
#pragma unroll
    for (int i = 0; i < unroll; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool begins = half == 0 ? i % blocks_of_scale == 0 : scales_of_block == 2;
        if (separate_sums && begins) clear(part);
        u32 b[n_fragments][4];
        const u32 chunk = ((half * 4 + lane / 8) ^ (lane % 8)) * 16;
#pragma unroll
        for (int j = 0; j < n_fragments; ++j) {
          load_matrices(b[j][0], b[j][1], b[j][2], b[j][3],
                        row + (i * config.tokens + j * 8) * 128 + chunk);
        }
        const int place = i / blocks_of_scale * scales_of_block + (scales_of_block == 2 ? half : 0);
#pragma unroll
        for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
          for (int tile = 0; tile < tiles; ++tile) {
            // Two of a block's four k16 steps: half of its one part, or one of its two.
            const int first = (half * 2) % (4 / parts);
            const u32* const own = words[operand][tile][i * parts + half * parts / 2].word;
            multiply_half(separate_sums ? part[operand][tile] : sum[operand][tile], b,
                          step_codes::of(own, first), step_codes::of(own, first + 1),
                          scale[operand][tile][place], zero[operand][tile][place]);
          }
        }
        const bool ends = half == 1 ? (i + 1) % blocks_of_scale == 0 : scales_of_block == 2;
        if constexpr (separate_sums) {
          if (ends) add_scaled(part, place);
        }
        if (ends) load_scales(place, next, end);
      }
      load_block(i, next, end);
    }
  }

  // At the end, where whole rows have scales, or operands a unit.
  __device__ __forceinline__ void scale_rows() {
    if constexpr (takes_scales) {
      for_each([&](int operand, int tile, int j, int value) {
        sum[operand][tile][j][value] *= codes::scaled_unit;
      });
    }
    if constexpr (format.scales_rows()) {
      for_each([&](int operand, int tile, int j, int value) {
        const float2& rows = row_scale[operand][tile];
        sum[operand][tile][j][value] *= (value < 2 ? rows.x : rows.y) * codes::unit;
      });
    }
    if constexpr (by_row) {
      accumulators unscaled;
      for_each([&](int operand, int tile, int j, int value) {
        unscaled[operand][tile][j][value] = sum[operand][tile][j][value];
        sum[operand][tile][j][value] = 0;
      });
      add_scaled(unscaled, 0);
    }
  }

  // Two k16 steps of one tile with all tokens. `scaled`: the sums need no scale but the unit's.
  template <bool scaled = takes_scales>
  static __device__ __forceinline__ void multiply_half(float (&into)[n_fragments][4],
                                                       const u32 (&b)[n_fragments][4],
                                                       const step_codes& first,
                                                       const step_codes& second, two_scales scale,
                                                       u32 zero) {
    const u32 of_first = format.zeros ? zero & 15 : 8,
              of_second = format.zeros ? zero >> 8 & 15 : 8;
    // Registers 0 and 2 are of the first row, 1 and 3 of the second.
    const u32 first_offset = codes::template offset<0>(of_first);
    const u32 second_offset = codes::template offset<1>(of_second);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const step_codes& word = step == 0 ? first : second;
      u32 a[4];
      if constexpr (scaled) {
        a[0] = codes::template scaled_pair<0>(word, scale);
        a[1] = codes::template scaled_pair<1>(word, scale);
        a[2] = codes::template scaled_pair<2>(word, scale);
        a[3] = codes::template scaled_pair<3>(word, scale);
      } else {
        a[0] = codes::template pair<0>(word, first_offset);
        a[1] = codes::template pair<1>(word, second_offset);
        a[2] = codes::template pair<2>(word, first_offset);
        a[3] = codes::template pair<3>(word, second_offset);
      }
      if constexpr (scales_operands && !scaled) {
        const auto of_first = codes::twice(scale, 0, step);
        const auto of_second = codes::twice(scale, 1, step);
        a[0] = multiply_pairs<T>(a[0], of_first);
        a[1] = multiply_pairs<T>(a[1], of_second);
        a[2] = multiply_pairs<T>(a[2], of_first);
        a[3] = multiply_pairs<T>(a[3], of_second);
      }
#pragma unroll
      for (int j = 0; j < n_fragments; ++j) {
        const u32 tokens[2] = {b[j][step * 2], b[j][step * 2 + 1]};
        mma_16x8x16<T>(into[j], a, tokens);
      }
    }
  }

 private:
  template <class Body>
  static __device__ __forceinline__ void for_each(const Body& body) {
#pragma unroll
    for (int operand = 0; operand < operands; ++operand) {
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int j = 0; j < n_fragments; ++j) {
#pragma unroll
          for (int value = 0; value < 4; ++value) body(operand, tile, j, value);
        }
      }
    }
  }
  static __device__ __forceinline__ void clear(accumulators& part) {
    for_each([&](int operand, int tile, int j, int value) { part[operand][tile][j][value] = 0; });
  }
  __device__ __forceinline__ void add_scaled(const accumulators& part, int place) {
    for_each([&](int operand, int tile, int j, int value) {
      float first, second;
      codes::values(scale[operand][tile][place], first, second);
      sum[operand][tile][j][value] += part[operand][tile][j][value] * (value < 2 ? first : second);
    });
  }
};

}  // namespace fftune

// Products of a warp's tile of queries with keys and values of e4m3 in shared memory: they become
// numbers of T, which holds each of them, in registers. Scales are the caller's.
//
// ldmatrix moves elements of 16 bits: pairs of e4m3, of which a thread gets two neighbours. Both
// products take them in the order in which they come.
//
//   S = Q K^T   thread l has features 4 (l % 4) to 4 (l % 4) + 3 of 16 of a key. As B fragment of
//               k16 they are numbers 2c, 2c + 1, 2c + 8 and 2c + 9 (c = l % 4), so that Q has its
//               features in this order: q_words()
//   O = P V     transposed, it has features 2n and 2n + 1 (n = l / 4) of 16 of two keys: the even
//               features are one block of eight columns of O, the odd ones the next. Of 16 columns
//               a thread has 4c to 4c + 3: columns_of()
#pragma once

#include "attention/mma_tile.cuh"

namespace fftune {

// d = a b + c of two numbers of T.
template <class T>
__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
  u32 d;
  if constexpr (is_same<T, bf16>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

// Bytes `first` and `second` of a word as numbers of T, exactly. Their bits, moved to the low end
// of the exponent, are the number times 2^-120 (bf16) or 2^-8 (fp16). NaN, which they make 480, is
// the one number that overflows when it is multiplied further; infinity times 0 is NaN again.
template <class T, int first, int second>
__device__ __forceinline__ u32 e4m3_pair(u32 word) {
  constexpr bool is_bf16 = is_same<T, bf16>;
  constexpr u32 minus_zero = 0x80008000u;
  constexpr u32 unit = is_bf16 ? 0x7b807b80u : 0x5c005c00u;   // 2^120, 2^8
  constexpr u32 limit = is_bf16 ? 0x7b107b10u : 0x58605860u;  // 9/8 2^119, 140
  const u32 high = __byte_perm(word, 0, second << 12 | first << 4 | 0x0404);
  const u32 magnitude = is_bf16 ? high >> 4 & 0x07f007f0u : high >> 1 & 0x3f803f80u;
  const u32 number = fma_pair<T>(high & minus_zero | magnitude, unit, minus_zero);
  return fma_pair<T>(fma_pair<T>(number, limit, minus_zero), 0, number);
}

// The functions of mma_tile. `dim` is a multiple of 4.
template <class T, int dim, int m_tiles>
struct e4m3_tile {
  using tile_of_rows = mma_tile<T, dim, m_tiles>;
  using fragments = typename tile_of_rows::fragments;
  using output = typename tile_of_rows::output;
  using layout = attention_row_layout<dim / 2>;           // of k and v
  static constexpr int wide_steps = layout::padded / 16;  // of 32 features

  // Chunk `odd` (0 or 1) of 16 features of Q from both of them.
  static __device__ __forceinline__ vector16 q_words(const vector16& first, const vector16& second,
                                                     int odd) {
    vector16 words;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const vector16& from = i < 2 ? first : second;
      words.word[i] = odd != 0 ? from.word[i % 2 * 2 + 1] : from.word[i % 2 * 2];
    }
    return words;
  }

  // Four neighbouring columns of 16 of a row's accumulators, from blocks 2 group and 2 group + 1.
  static __device__ __forceinline__ float4 columns_of(const float (&o)[tile_of_rows::o_blocks][4],
                                                      int group, int half) {
    const float(&even)[4] = o[2 * group];
    const float(&odd)[4] = o[2 * group + 1];
    return {even[half * 2], odd[half * 2], even[half * 2 + 1], odd[half * 2 + 1]};
  }

  template <int keys, bool held>
  static __device__ __forceinline__ void multiply_keys(float (&s)[m_tiles][keys / 8][4],
                                                       const fragments& in_registers, u32 q,
                                                       u32 k) {
#pragma unroll
    for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
      for (int block = 0; block < keys / 8; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[tile][block][i] = 0;
      }
    }
#pragma unroll
    for (int wide = 0; wide < wide_steps; ++wide) {
      u32 a[2][m_tiles][4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int step = 2 * wide + part;
        if (step == tile_of_rows::steps) continue;
        if constexpr (held) {
#pragma unroll
          for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[part][tile][i] = in_registers[tile][step][i];
          }
        } else {
          tile_of_rows::load_q(a[part], q, step);
        }
      }
#pragma unroll
      for (int pair = 0; pair < keys / 16; ++pair) {
        u32 words[2][2];  // of eight keys, and of 16 features
        load_matrices(words[0][0], words[0][1], words[1][0], words[1][1],
                      layout::next_rows(layout::advance(k, wide), pair * 16));
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          if (2 * wide + part == tile_of_rows::steps) continue;
#pragma unroll
          for (int block = 0; block < 2; ++block) {
            const u32 b[2] = {e4m3_pair<T, 0, 1>(words[block][part]),
                              e4m3_pair<T, 2, 3>(words[block][part])};
#pragma unroll
            for (int tile = 0; tile < m_tiles; ++tile) {
              mma_16x8x16<T>(s[tile][2 * pair + block], a[part][tile], b);
            }
          }
        }
      }
    }
  }

  template <int keys>
  static __device__ __forceinline__ void multiply_values(output& o,
                                                         const float (&p)[m_tiles][keys / 8][4],
                                                         u32 v) {
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
      u32 a[m_tiles][4];
#pragma unroll
      for (int tile = 0; tile < m_tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&from)[4] = p[tile][2 * step + i / 2];
          a[tile][i] = pack<T>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int wide = 0; wide < wide_steps; ++wide) {
        u32 words[2][2];  // of 16 features, and of eight keys
        load_matrices_transposed(words[0][0], words[0][1], words[1][0], words[1][1],
                                 layout::next_rows(layout::advance(v, wide), step * 16));
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const int group = 2 * wide + part;
          if (2 * group == tile_of_rows::o_blocks) continue;
          const u32(&own)[2] = words[part];
          const u32 even[2] = {e4m3_pair<T, 0, 2>(own[0]), e4m3_pair<T, 0, 2>(own[1])};
          const u32 odd[2] = {e4m3_pair<T, 1, 3>(own[0]), e4m3_pair<T, 1, 3>(own[1])};
#pragma unroll
          for (int tile = 0; tile < m_tiles; ++tile) {
            mma_16x8x16<T>(o[tile][2 * group], a[tile], even);
            mma_16x8x16<T>(o[tile][2 * group + 1], a[tile], odd);
          }
        }
      }
    }
  }
};

}  // namespace fftune

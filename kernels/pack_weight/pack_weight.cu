// Codes, scales and zero points to the layout of packed weights (gemm/packed/layout.cuh), and back.
//
// A warp has a block of 16 rows and 64 elements of k: each lane has 32 codes of two of these rows.
// Then the threads of all blocks share the scales and zero points.
#include "common/async.cuh"
#include "common/vectors.cuh"
#include "gemm/packed/layout.cuh"

namespace fftune {

constexpr int pack_warps = 8;

// A number of each row and group.
template <packed_code code, class Number>
__device__ __forceinline__ void move_numbers(Number* plain, Number* packed, i64 n, i64 groups,
                                             bool back, bool known, Number unknown) {
  // nvfp4: groups come in pairs, and the second one of the last pair may not exist.
  const i64 places = packed_scales_rows(code) ? (groups + 1) / 2 * 2 : groups;
  const i64 count = packed_tiles(n) * places * packed_rows;
  const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += threads) {
    const i64 row = i / packed_rows / places * packed_rows + i % packed_rows;
    const i64 group = i / packed_rows % places;
    const bool exists = row < n && group < groups;
    Number& own = packed[packed_scale_place(row, group, groups, code)];
    if (!back) {
      own = exists ? plain[row * groups + group] : Number{};
    } else if (exists) {
      plain[row * groups + group] = known ? own : unknown;
    }
  }
}
// The scales of rows.
__device__ __forceinline__ void move_row_scales(u32* plain, u8* packed, i64 n, i64 groups,
                                                bool back, bool known) {
  const i64 count = packed_tiles(n) * packed_rows;
  const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 row = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; row < count;
       row += threads) {
    u32& own = *reinterpret_cast<u32*>(packed + packed_row_scale_place(row, groups));
    if (!back) {
      own = row < n ? plain[row] : 0;
    } else if (row < n) {
      plain[row] = known ? own : ~0u;
    }
  }
}

// Grid: ceil(blocks / pack_warps). Block: 32 * pack_warps. `Bits`: as wide as a scale. Unpacking
// gives scales of all bits, which are NaN, where the header is not of this layout.
template <class Bits, bool back, packed_code code>
__global__ void __launch_bounds__(32 * pack_warps)
    pack_weight(u8* codes, Bits* scale, u8* zero, u32* row_scale, u8* packed, Bits* packed_scale,
                u8* packed_zero, i64 n, i64 k, i64 groups) {
  const int lane = threadIdx.x % 32;
  const i64 block = static_cast<i64>(blockIdx.x) * pack_warps + threadIdx.x / 32;
  wait_and_launch_dependents();
  const u32 header[4] = {packed_magic(code), packed_version, static_cast<u32>(n),
                         static_cast<u32>(k)};
  bool known = true;
  if constexpr (back) {
    const vector16 given = load_dependent(packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) known = known && given.word[i] == header[i];
  } else if (block == 0) {
    vector16 words = {};
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words.word[i] = header[i];
    }
    store(packed + lane * 16, words);
  }
  move_numbers<code>(scale, packed_scale, n, groups, back, known, static_cast<Bits>(~Bits{}));
  if (zero != nullptr) move_numbers<code>(zero, packed_zero, n, groups, back, known, u8{0});
  if constexpr (packed_scales_rows(code)) {
    move_row_scales(row_scale, packed_scale, n, groups, back, known);
  }

  constexpr int parts = packed_parts(code);
  const i64 k_blocks = packed_k_blocks(k);
  if (block >= packed_tiles(n) * k_blocks) return;
  const i64 first_row = block / k_blocks * packed_rows + lane / 4 * 2;
  const i64 first_k = block % k_blocks * packed_k + lane % 4 * 2;
#pragma unroll
  for (int part = 0; part < parts; ++part) {
    u8* const words = packed + (1 + block * parts + part) * packed_part_bytes + lane * 16;
    vector16 value = {};
    if constexpr (back) {
      value = load_dependent(words);
#pragma unroll
      for (int i = 0; i < 4; ++i) value.word[i] = packed_nibbles_of(value.word[i], code);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // two neighbours of k of a row, or one
      if constexpr (packed_bits(code) == 4) {
        u32& word = value.word[i / 4];
        const int at = 4 * (i % 4);
        const i64 row = first_row + i % 2, column = first_k + i / 4 * 16 + i / 2 % 2 * 8;
        if (row >= n || column >= k) continue;
        u8* const plain = codes + row * ((k + 1) / 2) + column / 2;
        const bool has_second = column + 1 < k;
        if constexpr (back) {
          const u32 low = word >> at & 15, high = word >> (16 + at) & 15;
          *plain = static_cast<u8>(low | (has_second ? high << 4 : 0));
        } else {
          word |= (*plain & 15u) << at;
          if (has_second) word |= (*plain >> 4u) << (16 + at);
        }
      } else {
        u32& word = value.word[i / 4];
        const int at = 8 * (i % 4), step = part * 2 + i / 8;
        const i64 row = first_row + i % 2;
        const i64 column = first_k + step * 16 + i / 4 % 2 * 8 + i / 2 % 2;
        if (row >= n || column >= k) continue;
        u8* const plain = codes + row * k + column;
        if constexpr (back) {
          *plain = static_cast<u8>(word >> at & 255);
        } else {
          word |= static_cast<u32>(*plain) << at;
        }
      }
    }
    if constexpr (!back) {
#pragma unroll
      for (int i = 0; i < 4; ++i) value.word[i] = packed_word_of(value.word[i], code);
      store(words, value);
    }
  }
}

}  // namespace fftune

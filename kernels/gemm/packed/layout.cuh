// The layout of packed weights of 4 and 8 bits, in the order in which the decode kernels stream
// them. Included by host and device code.
//
// A weight [n, k] is cut into blocks of 16 rows and 64 elements of k. A block has one part of 512
// bytes with codes of 4 bits, and two with codes of 8. A part has 16 bytes for each lane of a warp:
// a word for each of its k16 steps, or two. These are the eight codes that the lane holds of the
// operand A of mma.sync m16n8k16 (common/mma.cuh), and so of wgmma's:
//
//   row of the MMA      row of the block
//   group               2 * group                       group = lane / 4, pair = lane % 4
//   group + 8           2 * group + 1                   so a lane has two neighbouring outputs
//
//   4 bits, nibble    0       1       2         3         4       5       6         7
//   row               first   second  first     second    first   second  first     second
//   k                 2*pair  2*pair  2*pair+8  2*pair+8  2*pair+1 ...    (each one k further)
//
//   8 bits, byte      0       1       2         3         of the second word: k + 8
//   row               first   second  first     second
//   k                 2*pair  2*pair  2*pair+1  2*pair+1
//
// `word >> 4 * i & 0x000f000f` therefore is register i of the operand, a code in each half; with 8
// bits `word >> 8 * (i % 2) & 0x00ff00ff` of word i / 2.
//
// The bits of e2m1 lie elsewhere within the word, so that fewer operations make bf16 of them: where
// they are the sign, the end of the exponent and the beginning of the mantissa of a half. Registers
// 0 to 3 take the word as it is, turned right by 4, shifted left by 6, and turned right by 6 with
// one bit shifted left by 2 (packed/codes.cuh).
//
//   register            0    1                        2    3
//   bits 0 to 2         6    10                       0    4, 13, 14
//   sign                15   3 of the other half      9    5 of the other half
//
// codes  u8 [1 + parts, 512]: a header, then the blocks of rows 0..15 by k, those of 16..31, ...
// scales [ceil(n / 16), groups of k, 16], zero points u8 of the same shape; nvfp4: u8
//        [ceil(n / 16), 2 + ceil(k / 32), 32], the f32 scales of 16 rows, then for each 32 elements
//        of k two e4m3 scales of each row
//
// Rows and elements of k that do not exist have the code 0 and the scale 0.
#pragma once

namespace fftune {

/// A code, and the scale of a group.
enum class packed_code {
  int4,   // An integer from 0 to 15 less a zero point or 8; the scale has the tokens' type.
  mxfp4,  // OCP MX v1.0: e2m1 elements, whose groups of 32 have an e8m0 scale.
  fp8,    // e4m3 with an f32 scale. The codes 0x7f and 0xff count as 480 and -480.
  int8,   // An integer from -128 to 127 with an f32 scale.
  nvfp4,  // e2m1 elements, whose groups of 16 have an e4m3 scale, and an f32 scale of each row.
};

constexpr int packed_bits(packed_code code) {
  return code == packed_code::fp8 || code == packed_code::int8 ? 8 : 4;
}
constexpr bool packed_is_e2m1(packed_code code) {
  return code == packed_code::mxfp4 || code == packed_code::nvfp4;
}
/// Parts of 512 bytes of a block.
constexpr int packed_parts(packed_code code) {
  return packed_bits(code) / 4;
}
/// Bytes of a scale; with nvfp4 of both that 32 elements of k have.
constexpr int packed_scale_bytes(packed_code code) {
  return code == packed_code::mxfp4 ? 1 : packed_bits(code) == 8 ? 4 : 2;
}
/// Whether each row has a scale of its own beside those of groups.
constexpr bool packed_scales_rows(packed_code code) {
  return code == packed_code::nvfp4;
}

/// The format of the weights of a kernel.
struct packed_form {
  int group = 128;  // Elements of k that share a scale: 32, 64 or 128; 0: the whole row. nvfp4: 32.
  bool zeros = false;  // Each group has a zero point, instead of 8: int4 alone.
  packed_code code = packed_code::int4;

  constexpr int parts() const { return packed_parts(code); }
  constexpr int scale_bytes() const { return packed_scale_bytes(code); }
  constexpr bool scales_rows() const { return packed_scales_rows(code); }
  /// Whether bf16 operands take their scale in the operation that makes numbers of the codes.
  constexpr bool takes_scales() const {
    return (code == packed_code::int4 && !zeros) || code == packed_code::mxfp4;
  }
  /// Groups' places that the scales of rows take, in front of a tile's scales.
  constexpr int first_group() const { return scales_rows() ? 4 / scale_bytes() : 0; }
};

constexpr int packed_rows = 16, packed_k = 64, packed_part_bytes = 512;

// The first words of the header; n and k follow. Another layout has another version.
constexpr unsigned packed_magic(packed_code code) {
  switch (code) {
    case packed_code::int4:
      return 0x34576666;  // "ffW4"
    case packed_code::mxfp4:
      return 0x344d6666;  // "ffM4"
    case packed_code::fp8:
      return 0x38466666;  // "ffF8"
    case packed_code::int8:
      return 0x38496666;  // "ffI8"
    case packed_code::nvfp4:
      return 0x344e6666;  // "ffN4"
  }
  return 0;
}
constexpr unsigned packed_version = 2;

constexpr long long packed_tiles(long long n) {
  return (n + packed_rows - 1) / packed_rows;
}
constexpr long long packed_k_blocks(long long k) {
  return (k + packed_k - 1) / packed_k;
}
// Parts of 512 bytes, with the header.
constexpr long long packed_all_parts(long long n, long long k, packed_code code) {
  return 1 + packed_tiles(n) * packed_k_blocks(k) * packed_parts(code);
}

// Where a code is: its byte, and its lowest bit there; with e2m1 in the order of nibbles.
struct packed_place {
  long long byte;
  int shift;
};
constexpr packed_place packed_place_of(long long row, long long column, long long k,
                                       packed_code code) {
  const long long block = row / packed_rows * packed_k_blocks(k) + column / packed_k;
  const int r = static_cast<int>(row % packed_rows), c = static_cast<int>(column % 16);
  const int step = static_cast<int>(column % packed_k / 16);
  const int lane = r / 2 * 4 + c % 8 / 2;
  if (packed_bits(code) == 4) {
    const int nibble = r % 2 + c / 8 * 2 + c % 2 * 4;
    return {(1 + block) * packed_part_bytes + lane * 16 + step * 4 + nibble / 2, nibble % 2 * 4};
  }
  const int byte = r % 2 + c % 2 * 2 + c / 8 * 4;
  return {(1 + block * 2 + step / 2) * packed_part_bytes + lane * 16 + step % 2 * 8 + byte, 0};
}
// Eight codes in the order of nibbles as they are stored, and back.
template <bool back>
constexpr unsigned packed_reordered(unsigned word) {
  constexpr int places[4][4] = {
      {6, 7, 8, 15}, {10, 11, 12, 16 + 3}, {0, 1, 2, 9}, {4, 13, 14, 16 + 5}};
  unsigned result = 0;
  for (int nibble = 0; nibble < 8; ++nibble)
    for (int bit = 0; bit < 4; ++bit) {
      const int plain = nibble * 4 + bit;
      const int stored = (places[nibble % 4][bit] + nibble / 4 * 16) % 32;
      result |= (word >> (back ? stored : plain) & 1) << (back ? plain : stored);
    }
  return result;
}
constexpr unsigned packed_word_of(unsigned nibbles, packed_code code) {
  return packed_is_e2m1(code) ? packed_reordered<false>(nibbles) : nibbles;
}
constexpr unsigned packed_nibbles_of(unsigned word, packed_code code) {
  return packed_is_e2m1(code) ? packed_reordered<true>(word) : word;
}
// Where the scale and the zero point of a row and group are; nvfp4: bytes.
constexpr long long packed_scale_place(long long row, long long group, long long groups,
                                       packed_code code) {
  const long long tile = row / packed_rows, r = row % packed_rows;
  if (packed_scales_rows(code))
    return ((tile * (2 + (groups + 1) / 2) + 2 + group / 2) * packed_rows + r) * 2 + group % 2;
  return (tile * groups + group) * packed_rows + r;
}
// Where the scale of a row is, in bytes.
constexpr long long packed_row_scale_place(long long row, long long groups) {
  return row / packed_rows * (2 + (groups + 1) / 2) * packed_rows * 2 + row % packed_rows * 4;
}

}  // namespace fftune

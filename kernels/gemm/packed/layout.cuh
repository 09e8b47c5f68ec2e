// The layout of packed weights of 4 bits, in the order in which the decode kernels stream them.
// Included by host and device code.
//
// A weight [n, k] is cut into blocks of 16 rows and 64 elements of k. A block has 512 bytes, 16 for
// each lane of a warp: four words, one for each k16 step. A word has the eight codes that the lane
// holds of the operand A of mma.sync m16n8k16 (common/mma.cuh), and so of wgmma's:
//
//   row of the MMA      row of the block
//   group               2 * group                       group = lane / 4, pair = lane % 4
//   group + 8           2 * group + 1                   so a lane has two neighbouring outputs
//
//   nibble   0       1       2         3         4       5       6         7
//   row      first   second  first     second    first   second  first     second
//   k        2*pair  2*pair  2*pair+8  2*pair+8  2*pair+1 ...    (each one k further)
//
// `word >> 4 * i & 0x000f000f` therefore is register i of the operand, a code in each half.
//
// codes  u8 [1 + blocks, 512]: a header, then the blocks of rows 0..15 by k, those of 16..31, ...
// scales [ceil(n / 16), groups of k, 16], zero points u8 of the same shape
//
// Rows and elements of k that do not exist have the code 0 and the scale 0.
#pragma once

namespace fftune {

/// A code of 4 bits, and the scale of a group.
enum class packed_code {
  int4,   // An integer from 0 to 15 less a zero point or 8; the scale has the tokens' type.
  mxfp4,  // OCP MX v1.0: e2m1 elements, whose groups of 32 have an e8m0 scale.
};

/// The format of the weights of a kernel.
struct packed_form {
  int group = 128;     // Elements of k that share a scale: 32, 64 or 128; 0: the whole row.
  bool zeros = false;  // Each group has a zero point, instead of 8.
  packed_code code = packed_code::int4;

  /// Bytes of a scale.
  constexpr int scale_bytes() const { return code == packed_code::mxfp4 ? 1 : 2; }
};

constexpr int packed_rows = 16, packed_k = 64, packed_block_bytes = 512;

// The first words of the header; n and k follow. Another layout has another version.
constexpr unsigned packed_magic(packed_code code) {
  return code == packed_code::mxfp4 ? 0x344d6666 : 0x34576666;  // "ffM4", "ffW4"
}
constexpr unsigned packed_version = 1;

constexpr long long packed_tiles(long long n) {
  return (n + packed_rows - 1) / packed_rows;
}
constexpr long long packed_k_blocks(long long k) {
  return (k + packed_k - 1) / packed_k;
}
// Blocks of 512 bytes, with the header.
constexpr long long packed_blocks(long long n, long long k) {
  return 1 + packed_tiles(n) * packed_k_blocks(k);
}

// Where a code is: a byte, and which of its nibbles.
struct packed_place {
  long long byte;
  int shift;
};
constexpr packed_place packed_place_of(long long row, long long column, long long k) {
  const long long block = 1 + row / packed_rows * packed_k_blocks(k) + column / packed_k;
  const int r = static_cast<int>(row % packed_rows), c = static_cast<int>(column % 16);
  const int step = static_cast<int>(column % packed_k / 16);
  const int lane = r / 2 * 4 + c % 8 / 2;
  const int nibble = r % 2 + c / 8 * 2 + c % 2 * 4;
  return {block * packed_block_bytes + lane * 16 + step * 4 + nibble / 2, nibble % 2 * 4};
}
// Where the scale and the zero point of a row and group are.
constexpr long long packed_scale_place(long long row, long long group, long long groups) {
  return (row / packed_rows * groups + group) * packed_rows + row % packed_rows;
}

}  // namespace fftune

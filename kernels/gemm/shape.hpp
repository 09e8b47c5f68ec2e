// A matrix product as the GEMM engines see it, whatever op it belongs to.
#pragma once

#include <cstdint>

namespace fftune {

/// c [m,n] = epilogue(a [m,k] · b1 [n,k]ᵀ[, a · b2 [n,k]ᵀ]), row-major, so k is contiguous in both
/// operands unless they are stored transposed.
struct GemmShape {
  std::int64_t m = 1;
  std::int64_t n = 1;
  std::int64_t k = 1;
  int products = 1;           // how many b there are, and sums of an element
  bool a_transposed = false;  // a is stored as [k,m]
  bool b_transposed = false;  // b is stored as [k,n]
  int terms = 1;              // pairs of a and b that add up to one sum; k is that of each
  int results = 1;            // how many a share b, each with a c of its own
  int box_buffers = 1;        // matrices of c's size that are stored, or read and then stored over
  bool a_gathered = false;    // its rows are gathered by a list, rather than copied in tiles
  bool b_gathered = false;
  bool promoted = false;   // of fp8: sums of a k tile join those of all in registers
  bool grouped = false;    // its rows are in groups whose sizes are known on the device alone
  bool one_owner = false;  // a tile whose k is split is finished by one block alone
};

/// What shares a scale in fp8 with scales of blocks: so many elements of a row, and in a weight
/// rows too. The host's twin of scales.cuh.
constexpr std::int64_t scale_block = 128;

/// Whether rows of `extent` two-byte elements begin lines of the L2, of 128 bytes; others begin
/// anywhere in one, and 128 bytes of them touch two.
constexpr bool starts_lines(std::int64_t extent) {
  return extent % 64 == 0;
}

constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

}  // namespace fftune

// A matrix product as the GEMM engines see it, whatever op it belongs to.
#pragma once

#include <cstdint>

#include "kernels/gemm/problem.hpp"

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
  int gatherers = 2;      // warps of a block that gather
  int turns = 1;          // tiles of the same rows of a that a block has, of which one is gathered
  bool promoted = false;  // of fp8: sums of a k tile join those of all in registers
  bool grouped = false;   // its rows are in two groups whose sizes are known on the device alone
  std::int64_t marked = 0;  // rows that the first group should have
  double deviation = 0;     // of that number, where it is drawn by lot
  bool one_owner = false;   // a tile whose k is split is finished by one block alone

  /// How many tiles of so many rows m takes; no tile has rows of both groups.
  constexpr std::int64_t row_tiles(std::int64_t height) const {
    return ceil_div(m - marked, height) + ceil_div(marked, height);
  }
  /// How many groups have rows.
  constexpr int groups() const { return (marked > 0) + (marked < m); }
  /// Of two groups the fewer rows of tiles.
  constexpr std::int64_t fewest_row_tiles(std::int64_t height) const {
    return ceil_div(marked < m - marked ? marked : m - marked, height);
  }
};

/// Whether rows of `extent` two-byte elements begin lines of the L2, of 128 bytes; others begin
/// anywhere in one, and 128 bytes of them touch two.
constexpr bool starts_lines(std::int64_t extent) {
  return extent % 64 == 0;
}

}  // namespace fftune

// The parameters of the sm_90a attention kernels: one struct, passed by value. Included by host and
// device code. The host encodes the tensor maps in use and leaves the others untouched.
#pragma once

#include "attention/params.cuh"
#include "common/types.cuh"

namespace fftune {

/// Tensor maps have three dimensions: heads * dim columns, tokens, sequences (of thd: one; paged:
/// columns, tokens of a page, pages). Boxes are attention_sm90_plan::slab_columns wide.
struct attention_sm90_params {
  attention_params attention;
  tensor_map q;  // boxes of 64 tokens; of packed heads: columns of a head, heads, tokens
  tensor_map k;  // boxes of bn tokens; paged: of a page, if that has fewer
  tensor_map v;
  unsigned long long* next_tile;  // dynamic: attention_tile_counter
};

/// A counter of tiles in memory that nobody clears: it counts from the moment on when it holds
/// this, which the first CTA stores, and holds something else after the kernel.
struct attention_tile_counter {
  static constexpr int bits = 24;  // of the number of tiles; above them the mark
  static constexpr unsigned long long mark = 0x9d3c6ae571ull << bits;
  static constexpr long long most_tiles = 1ll << bits;

  static constexpr bool counts(unsigned long long value) { return value >> bits == mark >> bits; }
};

}  // namespace fftune

// Rows of 16-bit elements of a head in shared memory, for ldmatrix: of Q, K and V alike. Included
// by host and device code.
//
// A row is ceil(dim/8) chunks of 16 bytes, padded to a multiple of 16 elements. ldmatrix reads one
// chunk column of eight consecutive rows in one phase, which must lie in eight different groups of
// four banks. Where rows are multiples of 128 bytes, the chunk index is XORed with the row;
// elsewhere a row takes an odd number of chunks.
#pragma once

#include "attention/form.cuh"

namespace fftune {

constexpr int attention_padded_dim(int dim) {
  return (dim + 15) / 16 * 16;
}

constexpr bool attention_rows_swizzled(int dim) {
  return attention_padded_dim(dim) % 64 == 0;
}

/// Bytes of an access to a head in global memory: heads are `dim` elements of 16 bits apart, so
/// that they are aligned to no more. dim is even.
constexpr int attention_access_bytes(int dim) {
  return dim % 8 == 0 ? 16 : dim % 4 == 0 ? 8 : 4;
}

/// Words of 16 bits of a head of k and v: elements, or pairs of e4m3.
constexpr int attention_kv_words(const attention_form& form) {
  return form.e4m3 ? form.dim / 2 : form.dim;
}

/// Whether kernels of TMA read copies of q, k, v and d_out, whose heads are attention_padded_dim()
/// apart with zeros behind their features: TMA addresses multiples of 16 bytes.
constexpr bool attention_copies_heads(int dim) {
  return dim % 8 != 0;
}

/// Bytes from row to row.
constexpr int attention_row_pitch(int dim) {
  const int chunks = attention_padded_dim(dim) / 8;
  return (attention_rows_swizzled(dim) ? chunks : chunks | 1) * 16;
}

template <int dim>
struct attention_row_layout {
  static constexpr int padded = attention_padded_dim(dim);
  static constexpr int chunks = padded / 8;
  static constexpr int pitch = attention_row_pitch(dim);
  static constexpr bool swizzled = attention_rows_swizzled(dim);

  static constexpr unsigned offset(int row, int chunk) {
    return static_cast<unsigned>(row * pitch + ((swizzled ? chunk ^ (row & 7) : chunk) << 4));
  }

  // Where lane `lane` points ldmatrix.x4 so that it yields an A fragment of Q (16 rows by 16 of
  // dim), or, transposed, two B fragments of V (16 keys by 2 x 8 of dim).
  static constexpr unsigned row_fragment(int lane) { return offset(lane & 15, lane >> 4); }

  // The same of two B fragments of K (2 x 8 keys by 16 of dim).
  static constexpr unsigned key_fragment(int lane) {
    return offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  }

  // A fragment `step` times 16 elements of dim further.
  static constexpr unsigned advance(unsigned fragment, int step) {
    if (!swizzled) return fragment + static_cast<unsigned>(step) * 32;
    return (fragment ^ static_cast<unsigned>((step & 3) << 5)) +
           static_cast<unsigned>((step >> 2) << 7);
  }

  // An offset `rows` rows on, a multiple of a power of two that is larger than the offset's row.
  static constexpr unsigned below(unsigned first, int rows) {
    return (swizzled ? first ^ static_cast<unsigned>((rows & 7) << 4) : first) +
           static_cast<unsigned>(rows * pitch);
  }

  // A fragment `rows` rows on, a multiple of 8.
  static constexpr unsigned next_rows(unsigned fragment, int rows) {
    return fragment + static_cast<unsigned>(rows * pitch);
  }
};

}  // namespace fftune

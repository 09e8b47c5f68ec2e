// The epilogue of a QKV product: the columns of C are the heads of q, then of k, then of v, `dim`
// features each, and each of the three parts is a matrix of its own. Steps for a head's features,
// in this order:
//   bias      + bias[n]
//   norm      q and k: x * w / sqrt(mean of x^2 + eps), over the features of a head
//   rotation  q and k: rotary position embedding of the first `rotary` features
// and then the one rounding. Included by host and device code.
#pragma once

namespace fftune {

enum class head_rotation {
  none,
  halves,       // pairs are features rotary / 2 apart
  interleaved,  // pairs are neighbours
};

struct qkv_form {
  int dim = 0;     // features of a head
  int rotary = 0;  // The first `rotary` features are rotated.
  head_rotation rotation = head_rotation::none;
  bool separate = false;  // B, and the bias, are a tensor for each part
  bool bias = false;
  bool normalises = false;  // q and k
  bool caches = false;  // row i of k and v goes to row slots[i], nowhere if there is no such row
  bool wide_slots = false;  // of 64 bits

  constexpr bool rotates() const { return rotation != head_rotation::none; }
};

// The angles of rotated heads: those of a row's position.
struct head_angles {
  const int* positions;  // [m]
  const float* table;    // [table_rows, 2 pairs]: kernels read the first of each pair, and the last
                         // row for a position past the end. Null: position times the pair's
                         // frequency.
  int table_rows;
  float scale;  // of sines and cosines
};
template <int count>
struct pair_frequencies {
  float of[count];
};

// Kernel parameters besides gemm_params, whose b and c hold the parts in their order, as arrays of
// pointers one after the other.
struct qkv_params {
  const void* bias[3];   // of each part; the first alone if they are one tensor
  const void* norms[2];  // [dim], of q and of k
  const float* sines;    // [m, rotary / 2, 2]: cosine and sine of each pair
  const void* slots;     // [m]
  int cache_rows;        // of the caches
  int cache_head;        // elements from a head of theirs to the next
  int q_columns;         // of part 0
  int kv_columns;        // of each other part
  float epsilon;
  float
      norm_offset;  // added to the norms' elements: 1 where they are kept as their distance from 1

  constexpr int part_of(int column) const {
    return column < q_columns ? 0 : column < q_columns + kv_columns ? 1 : 2;
  }
  constexpr int first_column(int part) const {
    return part == 0 ? 0 : q_columns + (part - 1) * kv_columns;
  }
  constexpr int columns(int part) const { return part == 0 ? q_columns : kv_columns; }
};

}  // namespace fftune

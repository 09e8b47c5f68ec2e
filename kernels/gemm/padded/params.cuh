// The parameters of copy_rows (copy.cu). Included by host and device code.
#pragma once

#include "common/types.cuh"

namespace fftune {

// Copies [matrices, rows, columns] to [matrices, to_rows, to_columns], both row-major, in elements
// of 16 bits. Rows begin behind `before` zeros. What `to` has beyond `from` becomes zero.
struct row_copy {
  const void* from;
  void* to;
  i64 matrices;
  i64 rows, to_rows;
  int columns, to_columns;
  int before;
};

constexpr int most_row_copies = 12;
constexpr int row_copy_threads = 256, row_copy_unroll = 4;

struct row_copies {
  row_copy each[most_row_copies];
};

}  // namespace fftune

// The row broadcasts of a linear epilogue: vectors [n] of which each row of C takes the same
// elements, such as a bias. This is the only definition: every engine applies those of a
// gemm_form in this order, and the host names their tensors (Epilogue::row). To add one, add an
// enumerator and its arithmetic here. Included by host and device code.
#pragma once

namespace fftune {

enum class row_broadcast { bias, scale };  // in the order in which they are applied
constexpr int row_broadcasts = 2;

/// Whether its elements are f32 whatever C is, rather than those of the source.
constexpr bool is_f32(row_broadcast row) {
  return row == row_broadcast::scale;
}

/// An element of C with the vector's element of its column.
constexpr float apply(row_broadcast row, float value, float element) {
  return row == row_broadcast::scale ? value * element : value + element;
}

}  // namespace fftune

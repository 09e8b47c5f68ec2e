// The row broadcasts of a linear epilogue: vectors [n] whose elements are applied to every row of
// C, such as a bias. This is the only definition: every engine applies those of a gemm_form in this
// order, and the host names their tensors (Epilogue::row). To add one, add an enumerator and its
// arithmetic here. Included by host and device code.
#pragma once

namespace fftune {

enum class row_broadcast { bias };  // in the order in which they are applied
constexpr int row_broadcasts = 1;

/// Whether its elements are f32 whatever C is, rather than those of the source.
constexpr bool is_f32(row_broadcast) {
  return false;
}

/// An element of C with the vector's element of its column.
constexpr float apply(row_broadcast, float value, float element) {
  return value + element;
}

}  // namespace fftune

// Where the operands of a product are: the policy that makes one engine serve the forward and the
// backward passes.
#pragma once

namespace fftune {

// A is [m, k] row-major, or [k, m] where it is transposed; B [n, k], or [k, n]. Of two `terms` each
// has an A and a B, and their products add up to one C; of two `results` each has an A and a C, and
// they share B. B may be what an earlier kernel of the plan writes; else it is there from the
// start.
template <bool a, bool b, int terms_, int results_, bool written>
struct matrix_operands {
  static constexpr bool a_transposed = a, b_transposed = b;
  static constexpr int terms = terms_, results = results_;
  static constexpr bool b_is_written = written;
  static_assert(terms == 1 || results == 1);
};

// As a forward pass has them: k is contiguous in both.
using forward_operands = matrix_operands<false, false, 1, 1, false>;

}  // namespace fftune

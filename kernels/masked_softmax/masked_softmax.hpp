// Softmax over the last axis of scores, for those who keep them:
//
//   y_j = exp(scale x_j) / sum over the allowed k of exp(scale x_k)     0 where j is not allowed
//
// x, y [b, heads, s, n]. Row i of s is allowed all columns (mask none), columns j <= i + n - s
// (causal, aligned at the bottom right), or those whose byte in mask [b, 1 | heads, s, n] is not
// zero (bool). A row that is allowed none is 0.
//
// Backward, from y and its gradient: dx_j = scale y_j (dy_j - sum_k y_k dy_k), 0 where a causal
// mask does not allow j; y is 0 where another mask does not.
//
// y may lie in the buffer of x, and dx in that of dy or y: each thread reads an element before it
// writes the same one, and no other thread reads it after that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in op.cpp; listed in kernels/catalog.cpp.
const Op& masked_softmax_op();

namespace masked_softmax {

enum class Mask { none, causal, boolean };

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t b = 0, heads = 0, s = 0, n = 0;
  Mask mask = Mask::none;
  bool mask_of_head = false;
  bool backward = false;
  float scale = 1;
  DType dtype = DType::f32;

  std::int64_t rows() const { return b * heads * s; }
  /// Columns that a row may see for its place.
  std::int64_t columns(std::int64_t row) const {
    if (mask != Mask::causal) return n;
    const std::int64_t end = row % s + n - s + 1;
    return end < 0 ? 0 : end < n ? end : n;
  }
  /// The mask's row of a row.
  std::int64_t mask_row(std::int64_t row) const {
    return mask_of_head ? row : row / s / heads * s + row % s;
  }
};
Layer layer_of(const Problem& problem);

struct Places {
  std::size_t x = absent, mask = absent, y = absent, dy = absent, dx = absent;
  std::size_t count = 0;
};
Places places_of(const Problem& problem);

/// The definition in float64, of either pass.
void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

std::vector<const Family*> cuda_families(), cpu_families();

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace masked_softmax
}  // namespace fftune

// A product for each head: y[i, h] = w_h x[i, h], in front of latent attention and behind it
// (mla/mla.hpp). There kv_b_proj has of each head rows W_UK [nope, rank], then W_UV [v, rank]:
// queries are multiplied by the transpose of the first, and results by the second.
//
//   layout=nk: w_h [n, k], a row for each feature of y
//   layout=kn: w_h [k, n], a row for each feature of x
//
// x [m, heads, x-head] has k features of a head, the first of x-head elements. w [heads, w-rows,
// columns] has of each head the rows of w_h from row w-skip on, so that two products read one
// tensor.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in head_linear/op.cpp; listed in kernels/catalog.cpp.
const Op& head_linear_op();

namespace head_linear {

constexpr std::int64_t most_features = 1024;

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t m = 0, heads = 0;
  std::int64_t n = 0, k = 0;    // features of a head of y and of x
  std::int64_t x_head = 0;      // elements from a head of x to the next
  std::int64_t w_rows = 0;      // rows of a head in w
  std::int64_t w_skip = 0;      // those in front of w_h
  bool inputs_as_rows = false;  // layout=kn
  DType dtype = DType::f32;

  std::int64_t rows() const { return inputs_as_rows ? k : n; }  // of w_h
  std::int64_t columns() const { return inputs_as_rows ? n : k; }
  /// The first element of w_h.
  std::int64_t place(std::int64_t head) const { return (head * w_rows + w_skip) * columns(); }
};
Layer layer_of(const Problem& problem);

/// The definition in float64.
void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

std::vector<const Family*> cuda_families(), cpu_families();

}  // namespace head_linear
}  // namespace fftune

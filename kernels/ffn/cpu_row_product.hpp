// Sums of products of two rows for the plain CPU family, in any dtype and with any scales.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "core/dtype.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {

/// A matrix of rows as long as the sum, and what makes numbers of its elements: nothing, one scale,
/// or one for each block of block_rows x 128 elements.
struct Operand {
  const void* elements = nullptr;
  const float* scales = nullptr;
  std::size_t block_rows = 0;  // 0: the tensor has one scale
};

/// The products of rows of `x` [tokens, depth] and `w` [rows, depth], both of `dtype`.
class RowProduct {
 public:
  RowProduct(DType dtype, const Operand& x, const Operand& w, std::size_t depth)
      : dtype_(dtype), x_(x), w_(w), depth_(depth), in_blocks_(x.block_rows > 0) {}

  /// Row `token` of x times row `row` of w, summed in fp32 in a fixed order.
  float at(std::size_t token, std::size_t row) const {
    float sum = 0;
    float partial[lanes] = {};
    for (std::size_t k = 0; k < depth_; k += chunk) {
      float a[chunk], b[chunk];
      const std::size_t count = std::min(chunk, depth_ - k);
      widen(x_, token * depth_ + k, {a, count});
      widen(w_, row * depth_ + k, {b, count});
      for (std::size_t i = 0; i < count; ++i) partial[i % lanes] += a[i] * b[i];
      if (!in_blocks_) continue;
      sum += fold(partial) * scale_at(x_, token, k) * scale_at(w_, row, k);
      std::fill_n(partial, lanes, 0.0f);
    }
    if (in_blocks_) return sum;
    return fold(partial) * (x_.scales ? *x_.scales * *w_.scales : 1.0f);
  }

 private:
  static constexpr auto chunk = static_cast<std::size_t>(scale_block);  // of a row, in float
  static constexpr std::size_t lanes = 8;  // partial sums, which a compiler may keep in vectors

  static float fold(const float (&partial)[lanes]) {
    float sum = 0;
    for (const float part : partial) sum += part;
    return sum;
  }
  float scale_at(const Operand& operand, std::size_t row, std::size_t k) const {
    const std::size_t blocks = (depth_ + chunk - 1) / chunk;
    return operand.scales[row / operand.block_rows * blocks + k / chunk];
  }
  void widen(const Operand& from, std::size_t at, std::span<float> to) const {
    decode(dtype_, static_cast<const std::byte*>(from.elements) + at * dtype_bytes(dtype_), to);
  }

  DType dtype_;
  Operand x_;
  Operand w_;
  std::size_t depth_;
  bool in_blocks_;
};

}  // namespace fftune::ffn

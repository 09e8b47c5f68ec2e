// A packed weight of an op (layout.cuh), by the names of its tensors.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/dtype.hpp"
#include "kernels/gemm/packed/layout.cuh"

namespace fftune {

/// The format of a problem's weights.
struct PackedFormat {
  bool packed = false;     // else they are dense
  std::int64_t group = 0;  // elements of k that share a scale; 0: the whole row
  bool zeros = false;      // groups have a zero point each, instead of 8
  packed_code code = packed_code::int4;

  std::int64_t groups(std::int64_t k) const { return group == 0 ? 1 : (k + group - 1) / group; }
  /// The type of scales, for a dense weight of `dtype`.
  DType scale_type(DType dtype) const {
    if (packed_bits(code) == 8) return DType::f32;
    return code == packed_code::int4 ? dtype : DType::u8;
  }
  /// The format of the kernels, and how many groups of it a row's scales take.
  packed_form form() const {
    return {.group = packed_scales_rows(code) ? 32 : static_cast<int>(group),
            .zeros = zeros,
            .code = code};
  }
  std::int64_t stored_groups(std::int64_t k) const {
    return packed_scales_rows(code) ? form().first_group() + (groups(k) + 1) / 2 : groups(k);
  }
  /// The shape of the packed scales.
  std::vector<std::int64_t> scale_shape(std::int64_t n, std::int64_t k) const {
    return {packed_tiles(n), stored_groups(k), packed_rows * (packed_scales_rows(code) ? 2 : 1)};
  }
};

/// One packed weight [n, k], by the names of the op's tensors.
struct PackedWeight {
  std::string_view codes, scales, zeros;  // zeros may be empty
  std::string_view dense = {};            // the expanded weight
  std::int64_t n = 0, k = 0;
  PackedFormat format = {};
  DType dtype = DType::bf16;  // of the expanded weight, and of the scales of int4
};

}  // namespace fftune

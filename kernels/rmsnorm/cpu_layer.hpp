// What rmsnorm's CPU families share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/program.hpp"
#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"

namespace fftune::rmsnorm {

/// What w is in the formula, in float: `factors` [d] of scratch memory is filled, or w itself
/// serves.
const float* factors_of(const Layer& layer, const void* w, float* factors);

/// The bytes of scratch memory that factors_of needs.
std::size_t factor_bytes(const Layer& layer);

/// A matrix's row.
inline std::byte* row_of(const Layer& layer, void* matrix, std::int64_t row) {
  if (!matrix) return nullptr;
  const auto at = static_cast<std::size_t>(row) * static_cast<std::size_t>(layer.d);
  return static_cast<std::byte*>(matrix) + at * dtype_bytes(layer.dtype);
}

/// 1 / sqrt(the mean of d squares + eps)
float reciprocal_deviation(const Layer& layer, float squares);

inline std::int64_t row_bytes(const Layer& layer) {
  return layer.d * static_cast<std::int64_t>(dtype_bytes(layer.dtype));
}

}  // namespace fftune::rmsnorm

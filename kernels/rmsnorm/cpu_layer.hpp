// What rmsnorm's CPU families share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/common/cpu_rows.hpp"
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

/// 1, 2, 4, ... and every core.
std::vector<std::int64_t> thread_counts(const DeviceFacts& facts);

/// Whether results are so large that caches would hold none of them until they are read.
inline bool exceeds_caches(const Layer& layer, const DeviceFacts& facts) {
  return layer.m * layer.d * static_cast<std::int64_t>(dtype_bytes(layer.dtype)) > facts.l2_bytes;
}

/// Threads that share the work from 256 KB a thread on: below that, waking one takes longer than
/// its share.
inline std::int64_t default_threads(const Layer& layer, const DeviceFacts& facts) {
  const std::int64_t bytes =
      layer.m * layer.d * static_cast<std::int64_t>(dtype_bytes(layer.dtype));
  const auto counts = thread_counts(facts);
  std::int64_t threads = 1;
  for (const std::int64_t count : counts)
    if (count == 1 || count <= bytes >> 18) threads = count;
  return threads;
}

}  // namespace fftune::rmsnorm

// The roofline (Williams, Waterman, Patterson 2009): the time below which no kernel can come.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "device/backend.hpp"
#include "registry/op.hpp"

namespace fftune {

/// The cost of a run of stages by itself, each of whose inputs is read once.
inline Cost cost_of_stages(const std::vector<StageSpec>& stages, std::size_t first,
                           std::size_t count) {
  Cost cost;
  for (std::size_t i = first; i < first + count; ++i) {
    cost.flops += stages[i].flops;
    cost.bytes += stages[i].bytes;
  }
  return cost;
}

/// A limit that is unknown sets no floor.
inline double floor_seconds(const Cost& cost, const Limits& limits) {
  const double compute = limits.flops_per_second > 0 ? cost.flops / limits.flops_per_second : 0;
  const double memory = limits.bytes_per_second > 0 ? cost.bytes / limits.bytes_per_second : 0;
  return std::max(compute, memory);
}

/// The term that sets the floor: "compute" or "memory".
inline const char* limit_of(const Cost& cost, const Limits& limits) {
  const bool compute =
      floor_seconds({cost.flops, 0}, limits) >= floor_seconds({0, cost.bytes}, limits);
  return compute ? "compute" : "memory";
}

}  // namespace fftune

// Fallbacks that take longer than the kernels of PyTorch would.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "registry/op.hpp"
#include "registry/variant.hpp"

namespace fftune {

/// Stages of a recipe that run by fallbacks, and what they should take.
struct SlowerFallback {
  std::vector<std::string> stages;
  double seconds = 0;          // by the families' cost models
  double pytorch_seconds = 0;  // by PyTorch's kernels, at the most
};

/// The fallbacks of a recipe whose stages PyTorch computes faster; none where they are faster,
/// where no fallback runs, or where one has no cost model. PyTorch's time is a high estimate: sizes
/// that no fast kernel of fftune takes are not those that cuBLAS is fastest at. `problem` is
/// canonical.
std::optional<SlowerFallback> slower_fallback(const Op& op, const Problem& problem,
                                              const DeviceFacts& facts, const Recipe& recipe);

}  // namespace fftune

// What a user would call without fftune: both experts for every token, and a selection.
#pragma once

#include <vector>

#include "registry/op.hpp"

namespace fftune::masked {

std::vector<Baseline> linear_baselines(const Problem& problem, const DeviceFacts& facts);
std::vector<Baseline> ffn_baselines(const Problem& problem, const DeviceFacts& facts);

/// Of the pass bwd.
std::vector<Baseline> linear_backward_baselines(const Problem& problem, const DeviceFacts& facts);
std::vector<Baseline> ffn_backward_baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace fftune::masked

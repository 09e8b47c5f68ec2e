// What a user would write without fftune: one plain kernel for each step of the formula.
#pragma once

#include <vector>

#include "core/problem.hpp"
#include "device/facts.hpp"
#include "registry/op.hpp"

namespace fftune::rmsnorm {

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace fftune::rmsnorm

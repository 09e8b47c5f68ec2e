// What a user would write without fftune: library products and an elementwise kernel.
#pragma once

#include <vector>

#include "core/problem.hpp"
#include "device/facts.hpp"
#include "registry/op.hpp"

namespace fftune::ffn {

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace fftune::ffn

// What a plan says of itself, as JSON.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "runtime/choice.hpp"
#include "runtime/plan.hpp"

namespace fftune {

/// Whether every variant of the plan is of a fallback family, which takes any alignment.
bool runs_fallbacks_alone(const Plan& plan);

/// See fftune_plan_describe. `complaints` are of the preset files that could not be read whole.
std::string describe(const Plan& plan, const DeviceFacts& facts, const Choice& choice,
                     const std::vector<std::size_t>& alignments,
                     const std::vector<std::string>& complaints);

}  // namespace fftune

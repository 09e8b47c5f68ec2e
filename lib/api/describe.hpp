// A plan's description, as JSON.
#pragma once

#include <string>
#include <vector>

#include "fftune/fftune.h"
#include "runtime/choice.hpp"

namespace fftune {

/// Whether every variant of the recipe is of a fallback family, which takes any alignment.
bool runs_fallbacks_alone(const Op& op, const Recipe& recipe);

/// The facts that describe() reports; everything except the description of the buffers is made
/// before the handle.
struct PlanFacts {
  const Op* op;
  const Problem* problem;
  const DeviceFacts* facts;
  const Choice* choice;
  const fftune_plan* plan;
  std::vector<std::string> warnings;    // of the backend
  std::vector<std::string> complaints;  // of the preset files that could not be read whole
};

/// See fftune_plan_describe.
std::string describe(const PlanFacts& plan);

}  // namespace fftune

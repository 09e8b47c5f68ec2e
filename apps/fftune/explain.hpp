// Why a family's space is as large as it is for a problem on a device.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/space.hpp"
#include "registry/family.hpp"

namespace fftune::tool {

struct ConstraintEffect {
  std::string reason;
  std::size_t alone = 0;  // configurations that this constraint alone rules out
};

struct FamilyView {
  const Family* family = nullptr;
  std::string refusal;  // why none of it can serve; then all below is empty
  std::vector<Parameter> parameters;
  std::size_t size = 0;  // before the constraints
  std::vector<Config> feasible;
  Config untuned;
  std::vector<ConstraintEffect> effects;  // only if asked for
};

FamilyView view_of(const Family& family, const Problem& problem, const DeviceFacts& facts,
                   bool with_effects);

}  // namespace fftune::tool

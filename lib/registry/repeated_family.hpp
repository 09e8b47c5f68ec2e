// A family whose program of a problem that is made of equal ones (Repetition) is of all of them,
// with tensor arguments in the order of the whole's tensors. Others have a program of one, which a
// plan repeats.
#pragma once

#include "registry/catalog.hpp"
#include "registry/family.hpp"

namespace fftune {

class RepeatedFamily : public Family {
 public:
  bool is_preferred(const Problem&, const DeviceFacts&) const override = 0;
};

/// Whether the recipe is one variant of such a family, whose program is all that a plan runs.
inline bool is_repeated_by_family(const Op& op, const Recipe& recipe) {
  return recipe.size() == 1 &&
         dynamic_cast<const RepeatedFamily*>(&family_of(op, recipe.front().family)) != nullptr;
}

}  // namespace fftune

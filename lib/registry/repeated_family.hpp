// A family whose program of a problem that is made of equal ones (Repetition) is of all of them,
// with tensor arguments in the order of the whole's tensors.
#pragma once

#include "registry/family.hpp"

namespace fftune {

class RepeatedFamily : public Family {
 public:
  /// Whether it should be faster than what the families behind it in the op's order make up: only
  /// then does it serve untuned. Only called when refusal() is empty.
  virtual bool is_preferred(const Problem&, const DeviceFacts&) const = 0;
};

}  // namespace fftune

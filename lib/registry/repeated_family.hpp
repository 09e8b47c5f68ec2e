// A family that can run a problem several times, one after the other, in one program.
#pragma once

#include <optional>

#include "registry/family.hpp"
#include "registry/op.hpp"

namespace fftune {

class RepeatedFamily : public Family {
 public:
  /// Whether it should be faster than what the families behind it in the op's order make up: only
  /// then does it serve untuned. Only called when refusal() is empty.
  virtual bool is_preferred(const Problem& one, const DeviceFacts&) const = 0;

  /// The program of `whole`, a problem with a repetition whose one problem `config` is for. Tensor
  /// arguments count in the order of the op's tensors(whole).
  virtual Program repeated_program(const Problem& whole, const Repetition& repetition,
                                   const DeviceFacts&, const Config& config) const = 0;
};

}  // namespace fftune

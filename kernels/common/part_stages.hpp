// The stages of an op that is made of others, and their references: those of its parts, with the
// names that the whole has for them.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "registry/op.hpp"

namespace fftune {

/// Why a problem does not have its parts, one line; empty: it has them.
std::string contradiction_of_parts(const Problem& problem,
                                   std::vector<OpPart> (*parts_of)(const Problem&));

std::vector<StageSpec> stages_of_parts(const std::vector<OpPart>& parts);

/// Computes a stage of a part: `name_of` says what its tensors are called in `tensors`.
void reference_of_part(const OpPart& part, std::size_t stage, ReferenceTensors& tensors,
                       Parallel& parallel,
                       const std::function<std::string(const std::string&)>& name_of);

/// Computes a stage of all parts, whose tensors have the names that the parts give them; false if
/// `stage` is behind the last one.
bool reference_of_parts(const std::vector<OpPart>& parts, std::size_t stage,
                        ReferenceTensors& tensors, Parallel& parallel);

}  // namespace fftune

// --same-bits: a search among variants that agree bit for bit with the recorded winner, so that a
// model's results do not change.
#pragma once

#include <optional>
#include <vector>

#include "registry/variant.hpp"
#include "tuning/decide/combine.hpp"
#include "tuning/search/group.hpp"
#include "tuning/search/session.hpp"

namespace fftune {

/// Runs the recipe, end to end and every run of consecutive variants of it, and requires the same
/// hash of any winner of the same stages. Throws Error(unavailable) if it does not pass any more.
void require_bits_of(const Recipe& recipe, Session& session);

/// The recipe as a combination of what the groups hold; none if they do not hold all of it.
std::optional<Combination> combination_of(const Recipe& recipe,
                                          const std::vector<Searched>& groups);

}  // namespace fftune

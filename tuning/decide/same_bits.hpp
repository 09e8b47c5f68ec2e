// Keeping a model's results: a search among what agrees bit for bit with the present winner.
#pragma once

#include <optional>
#include <vector>

#include "registry/variant.hpp"
#include "tuning/decide/combine.hpp"
#include "tuning/search/group.hpp"
#include "tuning/search/session.hpp"

namespace fftune {

/// Runs the recipe, whole and in every run of its parts, and requires the bits that it writes of
/// whatever may win the same stages. Throws Error(unavailable) if it does not pass any more.
void require_bits_of(const Recipe& recipe, Session& session);

/// The recipe as a combination of what the groups hold; none if they do not hold all of it.
std::optional<Combination> combination_of(const Recipe& recipe,
                                          const std::vector<Searched>& groups);

}  // namespace fftune

// Whether the constraints of a space look at what they name alone.
#pragma once

#include <algorithm>
#include <random>

#include "core/space.hpp"
#include "support/catch.hpp"

namespace fftune::test {

/// Requires that no constraint reads a parameter that it does not name: feasible() judges it as
/// soon as those are known, whatever the rest is then. In `rounds` random configurations, and
/// others that agree with them in what the constraint names.
inline void require_named_reads(const Space& space, int rounds, std::mt19937& random) {
  const auto draw = [&](const Parameter& parameter) {
    return parameter.values[random() % parameter.values.size()];
  };
  for (int round = 0; round < rounds; ++round) {
    Config config, other;
    for (const auto& parameter : space.parameters()) config.set(parameter.name, draw(parameter));
    for (const auto& constraint : space.constraints()) {
      if (constraint.reads.empty()) continue;
      for (const auto& parameter : space.parameters()) {
        const bool read = std::find(constraint.reads.begin(), constraint.reads.end(),
                                    parameter.name) != constraint.reads.end();
        other.set(parameter.name, read ? config.value(parameter.name) : draw(parameter));
      }
      INFO(constraint.reason << ": " << config.text() << ", " << other.text());
      REQUIRE(constraint.holds(config) == constraint.holds(other));
    }
  }
}

}  // namespace fftune::test

// Deciding among times that are not exact: a tie band, and a tie-break that does not depend on
// them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fftune {

struct Contestant {
  std::string id;
  double median_us = 0;
  int registers = 0;
};

/// The places of the contestants, most wanted first: those within the tie band of the fastest by
/// fewer registers (more can be resident beside other work), then by id; then the rest by median,
/// then id. So the same device gives the same answer twice, while the answer costs at most the
/// band.
std::vector<std::size_t> by_preference(const std::vector<Contestant>& contestants, double tie_band);

/// How many of them are within the tie band of the fastest.
std::size_t tied(const std::vector<Contestant>& contestants, double tie_band);

}  // namespace fftune

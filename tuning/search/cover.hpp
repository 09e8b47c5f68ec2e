// The cheapest way to cover the stages of an op.
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include "tuning/search/session.hpp"

namespace fftune {

/// Consecutive stages, and the cost of covering them together; infinite if that is not possible.
struct Piece {
  Span span;
  double cost = 0;
};

struct Cover {
  std::vector<std::size_t> pieces;  // their places, in stage order
  double cost = std::numeric_limits<double>::infinity();
};

/// The pieces that cover each stage of `span` once at the least cost, the first of equal ones; an
/// infinite cost if none do.
Cover least_cover(const std::vector<Piece>& pieces, const Span& span);

}  // namespace fftune

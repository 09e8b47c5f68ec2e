#include "tuning/strategies/exhaustive.hpp"

#include "tuning/order.hpp"
#include "tuning/strategies/contest.hpp"

namespace fftune {

std::vector<std::size_t> ExhaustiveStrategy::run(Search& search) const {
  const auto order = shuffled(search.variants().size(), search.favourites(), search.seed());
  return finals(search, measure_fully(search, order, 10));
}

}  // namespace fftune

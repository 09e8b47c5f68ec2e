#include "tuning/strategies/exhaustive.hpp"

#include "tuning/strategies/finals.hpp"
#include "tuning/strategies/order.hpp"

namespace fftune {

std::vector<std::size_t> ExhaustiveStrategy::run(Search& search) const {
  const auto order = shuffled(search.variants().size(), search.warm_starts(), search.seed());
  return finals(search, measure_fully(search, order, 10));
}

}  // namespace fftune

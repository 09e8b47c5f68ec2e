// The strategies there are, one row each, and those of a few lines.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/error.hpp"
#include "measure/statistics.hpp"
#include "tuning/strategies/finals.hpp"
#include "tuning/strategies/strategy.hpp"

namespace fftune {

const std::vector<const Strategy*>& strategies() {
  static const HalvingStrategy halving;
  static const ExhaustiveStrategy exhaustive;
  static const GuidedStrategy guided;
  static const RandomStrategy random;
  static const std::vector<const Strategy*> all{&halving, &guided, &exhaustive, &random};
  return all;
}

const Strategy& strategy_named(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Strategy* strategy : strategies()) {
    if (strategy->name() == name) return *strategy;
    names.push_back(strategy->name());
  }
  throw Error(ErrorKind::invalid_input,
              fmt::format("unknown strategy '{}': use {}", name, fmt::join(names, ", ")));
}

std::vector<std::size_t> shuffled(std::size_t count, std::size_t fixed, std::uint64_t seed) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t end = count; end > fixed + 1; --end)
    std::swap(order[end - 1], order[fixed + next_random(seed) % (end - fixed)]);
  return order;
}

std::vector<std::size_t> half_by_prediction(const std::vector<double>& estimates, std::size_t fixed,
                                            std::uint64_t seed) {
  const auto anywhere = shuffled(estimates.size(), fixed, seed);
  auto ranked = anywhere;
  const auto rest = static_cast<std::ptrdiff_t>(std::min(fixed, estimates.size()));
  std::stable_sort(ranked.begin() + rest, ranked.end(),
                   [&](std::size_t a, std::size_t b) { return estimates[a] < estimates[b]; });
  std::vector<std::size_t> order(ranked.begin(), ranked.begin() + rest);
  std::vector<bool> taken(estimates.size(), false);
  for (auto place = static_cast<std::size_t>(rest); place < estimates.size(); ++place)
    for (const auto index : {ranked[place], anywhere[place]}) {
      if (taken[index]) continue;
      taken[index] = true;
      order.push_back(index);
    }
  return order;
}

std::vector<std::size_t> ExhaustiveStrategy::run(Search& search) const {
  const auto order = shuffled(search.variants().size(), search.warm_starts(), search.seed());
  return finals(search, measure_fully(search, order, 10));
}

// A quarter misses all of the ten best variants once in eighteen searches (0.75^10).
std::vector<std::size_t> RandomStrategy::run(Search& search) const {
  auto order = shuffled(search.variants().size(), search.warm_starts(), search.seed());
  order.resize(std::min(order.size(), std::max<std::size_t>(order.size() / 4, 16)));
  return finals(search, measure_fully(search, order, 10));
}

}  // namespace fftune

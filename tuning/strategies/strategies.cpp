// The strategies there are, one row each.
#include <fmt/format.h>

#include "core/error.hpp"
#include "tuning/strategies/exhaustive.hpp"
#include "tuning/strategies/guided.hpp"
#include "tuning/strategies/halving.hpp"
#include "tuning/strategies/random.hpp"
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

}  // namespace fftune

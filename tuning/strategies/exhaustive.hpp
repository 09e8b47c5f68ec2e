#pragma once

#include "tuning/strategies/strategy.hpp"

namespace fftune {

class ExhaustiveStrategy : public Strategy {
 public:
  std::string_view name() const override { return "exhaustive"; }
  std::string_view summary() const override { return "measure every feasible variant fully"; }
  std::vector<std::size_t> run(Search& search) const override;
};

}  // namespace fftune

#pragma once

#include "tuning/strategies/strategy.hpp"

namespace fftune {

class RandomStrategy : public Strategy {
 public:
  std::string_view name() const override { return "random"; }
  std::string_view summary() const override {
    return "measure a random quarter of the feasible variants fully";
  }
  std::vector<std::size_t> run(Search& search) const override;
};

}  // namespace fftune

#pragma once

#include "tuning/strategies/strategy.hpp"

namespace fftune {

class HalvingStrategy : public Strategy {
 public:
  std::string_view name() const override { return "halving"; }
  std::string_view summary() const override {
    return "screen all briefly, then interleave ever fewer with ever more samples";
  }
  std::vector<std::size_t> run(Search& search) const override;
};

}  // namespace fftune

#pragma once

#include "tuning/strategies/strategy.hpp"

namespace fftune {

class GuidedStrategy : public Strategy {
 public:
  std::string_view name() const override { return "guided"; }
  std::string_view summary() const override {
    return "begin where the cost model expects most, learn from what is measured, and end "
           "when little is left to gain";
  }
  std::vector<std::size_t> run(Search& search) const override;
};

}  // namespace fftune

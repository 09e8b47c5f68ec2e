// A strategy: which variants of a group are tried, in which order, and how hard.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tuning/strategies/search.hpp"

namespace fftune {

class Strategy {
 public:
  virtual ~Strategy() = default;
  virtual std::string_view name() const = 0;
  virtual std::string_view summary() const = 0;  // one line for --help
  /// Returns the finalists, in no order: measured alike, so that their medians may be compared.
  /// The same search with the same seed on the same times gives the same finalists.
  virtual std::vector<std::size_t> run(Search& search) const = 0;
};

/// All there are; the first is the default.
const std::vector<const Strategy*>& strategies();

/// Throws Error(invalid_input) that lists the strategies there are.
const Strategy& strategy_named(std::string_view name);

// The order in which a strategy tries variants.

/// 0 to `count`-1: the first `fixed` in place, the rest shuffled. The same on every platform, which
/// std::shuffle does not promise.
std::vector<std::size_t> shuffled(std::size_t count, std::size_t fixed, std::uint64_t seed);

/// The same, but with every other one of the rest in the order of its predicted time: if the time
/// is too short for all, half of it goes to the most promising variants and half to random ones.
std::vector<std::size_t> half_by_prediction(const std::vector<double>& estimates, std::size_t fixed,
                                            std::uint64_t seed);

class HalvingStrategy : public Strategy {
 public:
  std::string_view name() const override { return "halving"; }
  std::string_view summary() const override { return "screen all, then fewer with more samples"; }
  std::vector<std::size_t> run(Search& search) const override;
};

class GuidedStrategy : public Strategy {
 public:
  std::string_view name() const override { return "guided"; }
  std::string_view summary() const override {
    return "begin with the cost model's best and learn, until little is left to gain";
  }
  std::vector<std::size_t> run(Search& search) const override;
};

class ExhaustiveStrategy : public Strategy {
 public:
  std::string_view name() const override { return "exhaustive"; }
  std::string_view summary() const override { return "measure all variants"; }
  std::vector<std::size_t> run(Search& search) const override;
};

class RandomStrategy : public Strategy {
 public:
  std::string_view name() const override { return "random"; }
  std::string_view summary() const override { return "measure a quarter"; }
  std::vector<std::size_t> run(Search& search) const override;
};

}  // namespace fftune

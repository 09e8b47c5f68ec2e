// A strategy: which variants of a group are tried, in which order, and how hard.
#pragma once

#include <cstddef>
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

}  // namespace fftune

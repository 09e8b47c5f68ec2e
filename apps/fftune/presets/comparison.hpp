// Two measurements of one problem compared by their intervals: the same verdict in a report, in
// `bench --against` and in `presets diff`.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "apps/fftune/terminal/text.hpp"
#include "store/record.hpp"

namespace fftune::tool {

/// A median with its 95% confidence interval, in µs.
struct Measured {
  double median_us = 0;
  double low_us = 0;
  double high_us = 0;
};

Measured measured_of(const Verdict& verdict);

enum class Comparison { faster, slower, same, undecided };

/// Compares `after` with `before`. SAME: both intervals lie within the 2% that count as a tie of
/// each other. FASTER and SLOWER: the intervals do not overlap. UNDECIDED: they do, and are wider
/// than a tie, so that more samples are needed; also where a time is missing.
Comparison compare(const Measured& before, const Measured& after);

/// "FASTER", "SLOWER", "SAME", "UNDECIDED".
std::string_view comparison_name(Comparison comparison);
Style comparison_style(Comparison comparison);

struct ComparisonCounts {
  std::array<std::size_t, 4> counts{};  // in the order of the enumeration

  std::size_t of(Comparison comparison) const {
    return counts[static_cast<std::size_t>(comparison)];
  }
  void add(Comparison comparison) { ++counts[static_cast<std::size_t>(comparison)]; }
  /// "2 FASTER, 1 SLOWER, 10 SAME, 0 UNDECIDED".
  std::string text() const;
};

}  // namespace fftune::tool

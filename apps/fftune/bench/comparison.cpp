#include "apps/fftune/bench/comparison.hpp"

#include <fmt/format.h>

namespace fftune::tool {

namespace {

/// As in the tuner: times closer than this to the best are ties.
constexpr double tie = 1.02;

}  // namespace

Measured measured_of(const Verdict& verdict) {
  return {verdict.median_us, verdict.interval_low_us, verdict.interval_high_us};
}

Comparison compare(const Measured& before, const Measured& after) {
  if (!(before.low_us > 0) || !(after.low_us > 0)) return Comparison::undecided;
  const double least = after.low_us / before.high_us;
  const double most = after.high_us / before.low_us;
  if (least >= 1 / tie && most <= tie) return Comparison::same;
  if (most < 1) return Comparison::faster;
  if (least > 1) return Comparison::slower;
  return Comparison::undecided;
}

std::string_view comparison_name(Comparison comparison) {
  switch (comparison) {
    case Comparison::faster:
      return "FASTER";
    case Comparison::slower:
      return "SLOWER";
    case Comparison::same:
      return "SAME";
    case Comparison::undecided:
      break;
  }
  return "UNDECIDED";
}

Style comparison_style(Comparison comparison) {
  switch (comparison) {
    case Comparison::faster:
      return Style::good;
    case Comparison::slower:
      return Style::bad;
    case Comparison::same:
      return Style::plain;
    case Comparison::undecided:
      break;
  }
  return Style::caution;
}

void ComparisonCounts::add(Comparison comparison) {
  switch (comparison) {
    case Comparison::faster:
      ++faster;
      return;
    case Comparison::slower:
      ++slower;
      return;
    case Comparison::same:
      ++same;
      return;
    case Comparison::undecided:
      ++undecided;
  }
}

std::string ComparisonCounts::text() const {
  return fmt::format("{} FASTER, {} SLOWER, {} SAME, {} UNDECIDED", faster, slower, same,
                     undecided);
}

}  // namespace fftune::tool

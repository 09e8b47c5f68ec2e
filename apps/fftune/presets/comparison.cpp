#include "apps/fftune/presets/comparison.hpp"

#include <fmt/format.h>

#include "core/lookup.hpp"

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
  using enum Comparison;
  return value_of<Comparison, std::string_view>(
      comparison,
      {{faster, "FASTER"}, {slower, "SLOWER"}, {same, "SAME"}, {undecided, "UNDECIDED"}});
}

Style comparison_style(Comparison comparison) {
  using enum Comparison;
  return value_of<Comparison, Style>(comparison, {{faster, Style::good},
                                                  {slower, Style::bad},
                                                  {same, Style::plain},
                                                  {undecided, Style::caution}});
}

std::string ComparisonCounts::text() const {
  using enum Comparison;
  return fmt::format("{} FASTER, {} SLOWER, {} SAME, {} UNDECIDED", of(faster), of(slower),
                     of(same), of(undecided));
}

}  // namespace fftune::tool

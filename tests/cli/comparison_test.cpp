#include "apps/fftune/presets/comparison.hpp"

#include "support/catch.hpp"

using namespace fftune::tool;

TEST_CASE("two times are told apart by their intervals alone") {
  const Measured before{100, 99.5, 100.5};
  CHECK(compare(before, {90, 89, 91}) == Comparison::faster);
  CHECK(compare(before, {110, 108, 112}) == Comparison::slower);
  CHECK(compare(before, {100.4, 100, 100.9}) == Comparison::same);
  CHECK(compare(before, before) == Comparison::same);
  // The medians differ by a tenth, and so may the next run's the other way.
  CHECK(compare({100, 80, 125}, {110, 90, 140}) == Comparison::undecided);
  // Intervals that do not overlap, closer than what counts as a tie.
  CHECK(compare({100, 99.9, 100.1}, {101, 100.9, 101.1}) == Comparison::same);
  // Without an interval nothing is known.
  CHECK(compare({100, 0, 0}, {50, 49, 51}) == Comparison::undecided);
}

TEST_CASE("verdicts are counted") {
  ComparisonCounts counts;
  for (const Comparison each : {Comparison::faster, Comparison::same, Comparison::same,
                                Comparison::slower, Comparison::undecided})
    counts.add(each);
  CHECK(counts.text() == "1 FASTER, 1 SLOWER, 2 SAME, 1 UNDECIDED");
}

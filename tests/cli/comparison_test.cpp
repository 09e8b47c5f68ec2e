#include "apps/fftune/presets/comparison.hpp"

#include "support/catch.hpp"

using namespace fftune;
using namespace fftune::tool;

TEST_CASE("two times are told apart by their intervals alone") {
  const Measured before{100, 99.5, 100.5};
  CHECK(compare(before, {90, 89, 91}) == tool::Comparison::faster);
  CHECK(compare(before, {110, 108, 112}) == tool::Comparison::slower);
  CHECK(compare(before, {100.4, 100, 100.9}) == tool::Comparison::same);
  CHECK(compare(before, before) == tool::Comparison::same);
  // The medians differ by a tenth, and so may the next run's the other way.
  CHECK(compare({100, 80, 125}, {110, 90, 140}) == tool::Comparison::undecided);
  // Intervals that do not overlap, closer than what counts as a tie.
  CHECK(compare({100, 99.9, 100.1}, {101, 100.9, 101.1}) == tool::Comparison::same);
  // Without an interval nothing is known.
  CHECK(compare({100, 0, 0}, {50, 49, 51}) == tool::Comparison::undecided);
}

TEST_CASE("verdicts are counted") {
  ComparisonCounts counts;
  for (const tool::Comparison each :
       {tool::Comparison::faster, tool::Comparison::same, tool::Comparison::same,
        tool::Comparison::slower, tool::Comparison::undecided})
    counts.add(each);
  CHECK(counts.text() == "1 FASTER, 1 SLOWER, 2 SAME, 1 UNDECIDED");
}

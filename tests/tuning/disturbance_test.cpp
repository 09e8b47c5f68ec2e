// Measuring on a device that others disturb: waiting, measuring again, and saying so.
#include <cmath>
#include <string>
#include <vector>

#include "fake_evaluator.hpp"
#include "fake_op.hpp"
#include "near.hpp"
#include "support/catch.hpp"
#include "valley.hpp"

using namespace fftune;

namespace {

using Lines = std::vector<std::string>;

TuneResult tuned(FakeEvaluator& evaluator) {
  auto fake = FakeCatalog::of_variants(30);
  return tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
}

double quiet_seconds() {
  FakeEvaluator quiet(valley, 0.002);
  tuned(quiet);
  return quiet.clock;
}

}  // namespace

TEST_CASE("a disturbance that ends in time is waited for, and leaves no mark") {
  const double end = quiet_seconds() + 4;
  FakeEvaluator evaluator(valley, 0.002);
  evaluator.disturbed = [&](double clock) {
    return clock < end ? Lines{"another process uses the device"} : Lines{};
  };
  const auto result = tuned(evaluator);
  CHECK(result.record->verdict.disturbances.empty());
  CHECK(evaluator.clock >= end);
  CHECK(evaluator.clock < end + 2);
}

TEST_CASE("one that stays is waited for as long as patience lasts, and marks the record") {
  FakeEvaluator evaluator(valley, 0.002);
  evaluator.disturbed = [](double) { return Lines{"another process uses the device"}; };
  const auto result = tuned(evaluator);
  CHECK(result.record->verdict.disturbances == Lines{"another process uses the device"});
  bool said = false;
  for (const auto& note : result.notes)
    said = said || note == "measured while disturbed: another process uses the device";
  CHECK(said);
  const double quiet = quiet_seconds();
  CHECK(evaluator.clock > quiet + 9.9);
  CHECK(evaluator.clock < quiet + 11);
}

TEST_CASE("one that comes in the middle of a measurement makes it taken again") {
  FakeEvaluator evaluator(valley, 0.002);
  const int once = [&] {
    FakeEvaluator quiet(valley, 0.002);
    return quiet.sampled[tuned(quiet).record->stages[0].variant.id()];
  }();
  int asked = 0;
  // The fourth time is right after the verdict: the start, the finals and the verdict asked before.
  evaluator.disturbed = [&](double) { return ++asked == 4 ? Lines{"hot"} : Lines{}; };
  const auto result = tuned(evaluator);
  CHECK(result.record->verdict.disturbances.empty());
  CHECK(evaluator.sampled[result.record->stages[0].variant.id()] == once + 32);
}

TEST_CASE("a sentinel that drifts is measured until it is stable, and marked if it never is") {
  const auto drifting = [](double rate) {
    FakeEvaluator evaluator(valley, 0.002);
    std::vector<Lines> all;
    evaluator.stretch = [&evaluator, rate](const std::string&) {
      return std::exp(rate * evaluator.clock);  // however long it has lasted
    };
    return tuned(evaluator).record->verdict.disturbances;
  };
  CHECK(drifting(0.001).empty());
  const auto marked = drifting(3);
  REQUIRE(marked.size() == 1);
  CHECK(marked[0].find("the winner's own time drifts by +") == 0);
}

TEST_CASE("one step in the clock costs a measurement and no mark") {
  FakeEvaluator evaluator(valley, 0.002);
  double step_at = quiet_seconds();
  // In the last samples of a quiet sweep, which are those of the verdict.
  step_at -= 0.02;
  evaluator.stretch = [&](const std::string&) { return evaluator.clock > step_at ? 1.2 : 1.0; };
  const auto result = tuned(evaluator);
  CHECK(result.record->verdict.disturbances.empty());
  CHECK(result.record->verdict.median_us > 115);
}

// Times on a machine that others use: a simulated clock that changes its speed for long enough to
// move a whole burst.
#include "tuning/evaluate/evaluator.hpp"

#include <cmath>
#include <string>
#include <vector>

#include "fake_evaluator.hpp"
#include "fake_op.hpp"
#include "measure/statistics.hpp"
#include "near.hpp"
#include "support/catch.hpp"
#include "valley.hpp"

using namespace fftune;

namespace {

const Candidate one{0, {Variant::parse("f/p=137")}, ""};     // 100 µs
const Candidate slower{0, {Variant::parse("f/p=142")}, ""};  // 105 µs
const Candidate twice{0, {Variant::parse("f/p=237")}, ""};   // 200 µs

/// A neighbour takes a part of the machine or not, anew every 0.2 s, by no rule.
double neighbour(double clock) {
  std::uint64_t slot = static_cast<std::uint64_t>(clock / 0.2);
  const double levels[] = {1, 1, 2.1, 2.7};
  return levels[next_random(slot) % 4];
}

FakeEvaluator shared_machine(double began) {
  FakeEvaluator evaluator(valley, 0.01);
  evaluator.clock = began;
  return evaluator;
}

BurstPlan plan_for(FakeEvaluator& evaluator, DeviceKind kind = DeviceKind::cpu) {
  auto plan = bursts_for(kind, 5);
  plan.sleep = [&evaluator](double seconds) { evaluator.clock += seconds; };
  return plan;
}

TimeRequest fifty() {
  TimeRequest request;
  request.samples = 50;
  request.seconds = 5;
  return request;
}

}  // namespace

TEST_CASE("repeated measurements of one variant agree within their intervals") {
  std::vector<Summary> runs;
  for (int run = 0; run < 40; ++run) {
    auto evaluator = shared_machine(17.3 * run);
    evaluator.stretch = [&](const std::string&) { return neighbour(evaluator.clock); };
    runs.push_back(summarise_bursts(
        time_in_bursts(evaluator, {one}, fifty(), plan_for(evaluator)).front().bursts));
  }
  int apart = 0, pairs = 0;
  for (const auto& a : runs)
    for (const auto& b : runs) {
      apart += a.low > b.high || b.low > a.high;
      ++pairs;
    }
  CHECK(apart < pairs / 20);
}

TEST_CASE("samples of one burst claim to know more than they do: what the bursts are for") {
  int apart = 0;
  std::vector<Summary> runs;
  for (int run = 0; run < 40; ++run) {
    auto evaluator = shared_machine(17.3 * run);
    evaluator.stretch = [&](const std::string&) { return neighbour(evaluator.clock); };
    runs.push_back(
        summarise_bursts(time_in_bursts(evaluator, {one}, fifty(), BurstPlan{}).front().bursts));
  }
  for (const auto& a : runs)
    for (const auto& b : runs) apart += a.low > b.high || b.low > a.high;
  CHECK(apart > 400);
}

TEST_CASE("candidates that slow down together are still compared") {
  auto evaluator = shared_machine(0);
  evaluator.stretch = [&](const std::string&) { return neighbour(evaluator.clock); };
  const auto timings = time_in_bursts(evaluator, {one, twice}, fifty(), plan_for(evaluator));
  const auto ratio = ratio_of(timings[1].bursts, timings[0].bursts);
  CHECK(ratio.low > 1.5);
  CHECK(ratio.high < 2.7);
  CHECK(!ratio.is_in_noise());
}

TEST_CASE("a difference below the noise is in the noise, and one above it is not") {
  // Each sample by itself may be slowed down.
  for (const double noise : {0.0, 1.5}) {
    auto evaluator = shared_machine(0);
    std::uint64_t state = 7;
    evaluator.stretch = [&](const std::string&) {
      return 1 + noise * static_cast<double>(next_random(state) % 1000) / 1000;
    };
    const auto timings = time_in_bursts(evaluator, {one, slower}, fifty(), plan_for(evaluator));
    INFO("noise " << noise);
    CHECK(ratio_of(timings[1].bursts, timings[0].bursts).is_in_noise() == (noise > 0));
  }
}

TEST_CASE("samples are divided among the bursts, which the pauses set apart") {
  auto evaluator = shared_machine(0);
  const auto plan = plan_for(evaluator);
  const auto timing = time_in_bursts(evaluator, {one}, fifty(), plan).front();
  CHECK(timing.bursts.size() == 8);
  for (const auto& burst : timing.bursts) CHECK(burst.size() == 7);
  CHECK(timing.samples_us().size() == 56);
  CHECK(evaluator.clock > 7 * plan.pause_seconds);
  CHECK(evaluator.clock < 2.5);
  // A GPU tells of disturbances itself: nothing changes for it.
  CHECK(time_in_bursts(evaluator, {one}, fifty(), plan_for(evaluator, DeviceKind::cuda))
            .front()
            .bursts.size() == 1);
}

TEST_CASE("a failed candidate is left out of later bursts, and the others go on") {
  auto evaluator = shared_machine(0);
  evaluator.misbehaving["f/p=142"] = Misbehaviour::launch;
  const auto timings = time_in_bursts(evaluator, {one, slower}, fifty(), plan_for(evaluator));
  CHECK(timings[0].bursts.size() == 8);
  CHECK(timings[1].bursts.empty());
  CHECK(timings[1].last.failure == "too many resources requested");
}

TEST_CASE("intervals of bursts take in what differs between them") {
  const std::vector<std::vector<double>> apart{{1, 1, 1}, {2, 2, 2}, {1, 1, 1}, {3, 3, 3}};
  const auto summary = summarise_bursts(apart);
  CHECK(summary.low == 1);
  CHECK(summary.high == 3);
  CHECK(summary.samples == 12);
  CHECK(noise_floor_of_bursts(apart) == near(2 / summary.median));
  CHECK(summarise_bursts({{5, 5, 5}}).high == 5);
  CHECK(summarise_bursts({}).samples == 0);
  CHECK(ratio_of({{2, 2}, {8, 8}}, {{1, 1}, {4, 4}}).median == near(2));
  CHECK(ratio_of({}, {{1}}).median == 0);
}

TEST_CASE("a sweep on a shared machine does not call its record decided") {
  auto fake = FakeCatalog::of_variants(200);
  int decided = 0;
  for (int run = 0; run < 10; ++run) {
    auto evaluator = shared_machine(31.7 * run);
    evaluator.stretch = [&](const std::string&) { return neighbour(evaluator.clock); };
    auto options = evaluator.options();
    options.bursts = bursts_for;
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
    REQUIRE(result.record);
    const auto& verdict = result.record->verdict;
    decided += verdict.decided == true;
    // The interval takes in what the machine does, most of the time.
    CHECK(verdict.interval_high_us > 1.5 * verdict.interval_low_us);
  }
  CHECK(decided == 0);
  auto quiet = shared_machine(0);
  auto options = quiet.options();
  options.bursts = bursts_for;
  CHECK(tune(fake.catalog(), quiet, fake.problem(), options).record->verdict.decided == true);
}

// The verdicts of bench on times under noise that the test makes.
#include "apps/fftune/bench/bench_run.hpp"

#include <string>
#include <vector>

#include "../tuning/fake_evaluator.hpp"
#include "../tuning/fake_op.hpp"
#include "sandbox.hpp"
#include "support/catch.hpp"

using namespace fftune;
using fftune::tool::bench;
using fftune::tool::BenchResult;

namespace {

BenchResult benched(FakeEvaluator& evaluator) {
  FakeCatalog fake(1);
  auto& family = fake.op.add("f", {"a"}, 300);
  family.fallback = true;
  auto plan = bursts_for(DeviceKind::cpu, 5);
  plan.sleep = [&evaluator](double seconds) { evaluator.clock += seconds; };
  TimeRequest request;
  request.samples = 50;
  request.seconds = 5;
  return bench(fake.catalog(), fake.op, fake.problem(), PresetLibrary{}, evaluator, request, plan);
}

}  // namespace

TEST_CASE("bench states a ratio on a quiet machine, and none within the noise") {
  FakeEvaluator quiet([](const Variant&) { return 940.0; }, 0.002);
  const auto sure = benched(quiet);
  REQUIRE(sure.entries.size() == 2);  // fftune, and the baseline, which takes 1000 µs
  CHECK(sure.entries[1].ratio.median > 1.05);
  CHECK(sure.entries[1].ratio.median < 1.08);
  CHECK(!sure.entries[1].ratio.is_in_noise());
  CHECK(sure.disturbances.empty());

  int in_noise = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    FakeEvaluator noisy([](const Variant&) { return 940.0; }, 0.002);
    std::uint64_t state = seed;
    noisy.stretch = [&](const std::string&) {
      return 1 + 2 * static_cast<double>(next_random(state) % 1000) / 1000;
    };
    const auto unsure = benched(noisy);
    in_noise += unsure.entries[1].ratio.is_in_noise();
    CHECK(unsure.entries[0].microseconds.high > 1.1 * unsure.entries[0].microseconds.low);
  }
  CHECK(in_noise >= 18);
}

TEST_CASE("bench measures again while it is disturbed, three times at most") {
  FakeEvaluator evaluator([](const Variant&) { return 940.0; }, 0.002);
  int asked = 0;
  const std::vector<std::string> busy{"other processes use 1 of its 2 cores"};
  evaluator.disturbed = [&](double) { return ++asked == 2 ? busy : std::vector<std::string>{}; };
  CHECK(benched(evaluator).disturbances.empty());
  CHECK(asked == 3);  // before, after the first measurement, after the second

  FakeEvaluator always([](const Variant&) { return 940.0; }, 0.002);
  asked = 0;
  always.disturbed = [&](double) { return ++asked, busy; };
  CHECK(benched(always).disturbances == busy);
  CHECK(asked == 4);
}

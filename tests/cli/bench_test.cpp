// The verdicts of bench on times under noise that the test makes.
#include "apps/fftune/bench/bench_run.hpp"

#include <atomic>
#include <optional>
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

std::optional<BenchResult> benched_unless(FakeEvaluator& evaluator,
                                          const std::atomic<bool>& cancel) {
  FakeCatalog fake(1);
  auto& family = fake.op.add("f", {"a"}, 300);
  family.fallback = true;
  auto plan = bursts_for(DeviceKind::cpu, 5);
  plan.sleep = [&evaluator](double seconds) { evaluator.clock += seconds; };
  TimeRequest request;
  request.samples = 50;
  request.seconds = 5;
  return bench(fake.catalog(), fake.op, fake.problem(), PresetLibrary{}, evaluator, request, plan,
               cancel);
}

BenchResult benched(FakeEvaluator& evaluator) {
  return benched_unless(evaluator, false).value();
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

TEST_CASE("an interrupted bench begins nothing more") {
  FakeEvaluator evaluator([](const Variant&) { return 940.0; }, 0.002);
  std::atomic<bool> cancel{true};
  CHECK(!benched_unless(evaluator, cancel));
  CHECK(evaluator.verified.empty());
  CHECK(evaluator.sampled.empty());

  // While it measures again what was disturbed: the first measurement stands.
  cancel = false;
  int looks = 0;
  evaluator.disturbed = [&](double) -> std::vector<std::string> {
    cancel = ++looks > 1;
    return {"other work"};
  };
  const auto cut = benched_unless(evaluator, cancel);
  REQUIRE(cut);
  CHECK(cut->entries.front().microseconds.median > 0);
  CHECK(cut->disturbances.size() == 1);
  CHECK(looks == 2);
}

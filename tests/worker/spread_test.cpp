// One sweep over several workers: some slow, some that leave.
#include <algorithm>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "tuning/evaluate/multi_device_evaluator.hpp"
#include "tuning/tuner.hpp"
#include "tuning/worker/worker_evaluator.hpp"
#include "worker/misbehaving.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

MultiDeviceEvaluator::Device device(std::vector<std::string> words) {
  const auto name = words.front();
  words.insert(words.begin(), WORKER_OF_TESTS);
  return {name, [words] { return std::make_unique<WorkerEvaluator>(words); }};
}

TuneResult sweep(MultiDeviceEvaluator& evaluator, const std::string& way,
                 const std::string& strategy = "halving") {
  const MisbehavingOp op(way);
  const Catalog catalog{{&op}, &no_sources};
  TuneOptions options;
  options.budget_seconds = 3600;
  options.strategy = strategy;
  return tune(catalog, evaluator, misbehaving_problem(), options);
}

bool noted(const TuneResult& result, const std::string& words) {
  return std::any_of(result.notes.begin(), result.notes.end(), [&](const std::string& note) {
    return note.find(words) != std::string::npos;
  });
}

/// Every variant has its own time, to within what scaling leaves.
void check_times(const TuneResult& result) {
  REQUIRE(result.record);
  CHECK(result.stopped.empty());
  CHECK(result.record->stages[0].variant.id() == "odd/p=" + std::to_string(misbehaving_best));
  REQUIRE(result.outcomes.size() >= misbehaving_variants);
  for (int i = 0; i < misbehaving_variants; ++i) {
    const auto& outcome = result.outcomes[static_cast<std::size_t>(i)];
    const int p = Variant::parse(outcome.id).config.get("p");
    INFO(outcome.id << " " << outcome_kind_name(outcome.kind) << " " << outcome.reason);
    REQUIRE(outcome.kind == OutcomeKind::measured);
    const double expected = p == misbehaving_best ? 290 : 600 + p;
    CHECK(outcome.median_us == Approx(expected).epsilon(0.03));
  }
}

}  // namespace

TEST_CASE("three workers find what one finds, and each variant its time") {
  const auto strategy = GENERATE("halving", "exhaustive", "guided");
  CAPTURE(strategy);
  MultiDeviceEvaluator evaluator(
      {device({"worker", "none"}), device({"worker", "none"}), device({"worker", "none"})});
  CHECK(evaluator.workers() == 3);
  const auto result = sweep(evaluator, "none", strategy);
  if (std::string(strategy) != "guided") check_times(result);
  REQUIRE(result.record);
  CHECK(result.record->stages[0].variant.id() == "odd/p=" + std::to_string(misbehaving_best));
}

TEST_CASE("times of a slow worker are scaled, and reported as such") {
  MultiDeviceEvaluator evaluator({device({"worker", "none"}), device({"slow", "none"})});
  const auto result = sweep(evaluator, "none");
  check_times(result);
  CHECK(noted(result, "slow takes 1.30 times as long as worker took"));
}

TEST_CASE("times of a worker whose pace changed are measured again, and reported as such") {
  MultiDeviceEvaluator evaluator({device({"worker", "none"}), device({"throttled", "none"})});
  const auto result = sweep(evaluator, "none");
  check_times(result);
  CHECK(noted(result, "throttled changed its pace by +30%"));
}

TEST_CASE("candidates of a lost worker go to the others, and the note says so") {
  const testing::TemporaryFolder folder;
  const auto flag = (folder.path() / "left").string();
  const bool first = GENERATE(true, false);  // the reference too
  std::vector<MultiDeviceEvaluator::Device> devices{device({"worker", "none"}),
                                                    device({"leaving", "none", flag})};
  if (first) std::swap(devices[0], devices[1]);
  MultiDeviceEvaluator evaluator(std::move(devices));
  const auto result = sweep(evaluator, "none");
  check_times(result);
  CHECK(noted(result, "leaving is lost"));
  CHECK(evaluator.lost().empty());
  CHECK(evaluator.workers() == 1);
}

TEST_CASE("a worker that goes before the search begins is not the end of it") {
  const testing::TemporaryFolder folder;
  MultiDeviceEvaluator evaluator(
      {device({"idle", "none", (folder.path() / "left").string()}), device({"worker", "none"})});
  const auto result = sweep(evaluator, "none", "exhaustive");
  check_times(result);
  CHECK(noted(result, "idle is lost"));
}

TEST_CASE("variants that kill cost themselves alone on several workers too") {
  MultiDeviceEvaluator evaluator({device({"worker", "exit"}), device({"worker", "exit"})});
  const auto result = sweep(evaluator, "exit");
  REQUIRE(result.record);
  CHECK(result.record->stages[0].variant.id() == "odd/p=" + std::to_string(misbehaving_best));
  int crashed = 0;
  for (const auto& outcome : result.outcomes) crashed += outcome.kind == OutcomeKind::crashed;
  CHECK(crashed == misbehaving_variants / 5);
}

TEST_CASE("a device that does not open is left out; none that opens is an error") {
  MultiDeviceEvaluator evaluator({device({"worker", "none"}), device({"nonsense", "none"})});
  CHECK(evaluator.workers() == 1);
  CHECK(evaluator.remarks().front().find("nonsense is left out") == 0);
  CHECK_THROWS_AS(
      MultiDeviceEvaluator({device({"nonsense", "none"}), device({"nonsense", "none"})}), Error);
}

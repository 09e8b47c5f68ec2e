// One sweep over the GPUs of this machine: kernels that misbehave, and a GPU that goes.
#include <algorithm>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "cuda/open.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "tuning/evaluate/multi_device_evaluator.hpp"
#include "tuning/tuner.hpp"
#include "tuning/worker/worker_evaluator.hpp"
#include "worker/misbehaving.hpp"
#include "worker/misbehaving_kernels.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

int gpus() {
  return static_cast<int>(list_cuda_devices({}).found.size());
}

MultiDeviceEvaluator::Device gpu_device(int ordinal, std::vector<std::string> words) {
  words.insert(words.begin(), WORKER_OF_TESTS);
  Watchdog watchdog;
  watchdog.least_seconds = 2;
  watchdog.most_seconds = 4;
  return {"cuda:" + std::to_string(ordinal),
          [words, watchdog] { return std::make_unique<WorkerEvaluator>(words, watchdog); }};
}

TuneResult sweep_gpus(MultiDeviceEvaluator& evaluator, const std::string& way) {
  const MisbehavingOp op(way);
  const Catalog catalog{{&op}, &misbehaving_sources()};
  TuneOptions options;
  options.budget_seconds = 3600;
  options.strategy = "exhaustive";
  const auto result = tune(catalog, evaluator, misbehaving_problem(), options);
  REQUIRE(result.record);
  CHECK(result.stopped.empty());
  CHECK(result.record->stages[0].variant.id() ==
        "odd_kernels/p=" + std::to_string(misbehaving_kernels_best));
  return result;
}

}  // namespace

TEST_CASE("kernels that misbehave on several GPUs cost themselves alone", "[gpu][timing][gpus]") {
  if (gpus() < 2) FFTUNE_SKIP("there are no two GPUs");
  const auto way = GENERATE("trap", "illegal", "wrong");
  CAPTURE(way);
  std::vector<MultiDeviceEvaluator::Device> devices;
  for (int i = 0; i < gpus(); ++i)
    devices.push_back(gpu_device(i, {"gpu", way, std::to_string(i)}));
  MultiDeviceEvaluator evaluator(std::move(devices));
  CHECK(evaluator.workers() == static_cast<std::size_t>(gpus()));
  const auto result = sweep_gpus(evaluator, way);
  CHECK(evaluator.workers() == static_cast<std::size_t>(gpus()));
  for (std::size_t i = 0; i < misbehaving_kernels; ++i) {
    const auto& outcome = result.outcomes[i];
    INFO(outcome.id << ": " << outcome_kind_name(outcome.kind) << ": " << outcome.reason);
    const int p = Variant::parse(outcome.id).config.get("p");
    CHECK((outcome.kind == OutcomeKind::measured) == !misbehaves(p));
  }
}

TEST_CASE("a GPU that goes in the middle of a sweep leaves its part to the others",
          "[gpu][timing][gpus]") {
  if (gpus() < 2) FFTUNE_SKIP("there are no two GPUs");
  const testing::TemporaryFolder folder;
  const auto id = (folder.path() / "left").string();
  const int going = GENERATE(0, 1);  // the reference too
  std::vector<MultiDeviceEvaluator::Device> devices;
  for (int i = 0; i < gpus(); ++i)
    devices.push_back(i == going ? gpu_device(i, {"vanishing", "vanishing", std::to_string(i), id})
                                 : gpu_device(i, {"gpu", "none", std::to_string(i)}));
  MultiDeviceEvaluator evaluator(std::move(devices));
  const auto result = sweep_gpus(evaluator, "none");
  const auto lost = "cuda:" + std::to_string(going) + " is lost, and its part goes to the others";
  CHECK(std::any_of(result.notes.begin(), result.notes.end(),
                    [&](const std::string& note) { return note.find(lost) == 0; }));
  CHECK(evaluator.workers() == static_cast<std::size_t>(gpus() - 1));
  for (std::size_t i = 0; i < misbehaving_kernels; ++i)
    CHECK(result.outcomes[i].kind == OutcomeKind::measured);
}

// Whatever a kernel does to a GPU costs its variant alone, and the device serves on.
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "core/error.hpp"
#include "cuda/open.hpp"
#include "support/catch.hpp"
#include "tuning/tuner.hpp"
#include "tuning/worker/worker_evaluator.hpp"
#include "worker/misbehaving.hpp"
#include "worker/misbehaving_kernels.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// A kernel of these ends within a millisecond, and is compiled within a second.
Watchdog impatient_with_kernels() {
  Watchdog watchdog;
  watchdog.least_seconds = 2;
  watchdog.most_seconds = 4;
  watchdog.compile_seconds = 8;
  return watchdog;
}

struct Gpu {
  std::optional<WorkerEvaluator> evaluator;  // none if `missing` says why
  std::string missing;

  explicit Gpu(const std::string& way) {
    try {
      evaluator.emplace(WorkerCommand{WORKER_OF_TESTS, "gpu", way, "0"}, impatient_with_kernels());
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unavailable) throw;
      missing = error.what();
    }
  }
};

Candidate odd_kernel(int p) {
  return {0, {{"odd_kernels", {{"p", p}}}}, ""};
}

struct Expected {
  OutcomeKind kind;
  std::string word;  // that the reason must hold
};

Expected expected(const std::string& way) {
  if (way == "illegal") return {OutcomeKind::device_fault, "ILLEGAL_ADDRESS"};
  if (way == "loop") return {OutcomeKind::crashed, "did not end within"};
  if (way == "trap") return {OutcomeKind::device_fault, "LAUNCH_FAILED"};
  if (way == "beyond") return {OutcomeKind::verify_failed, "guard"};
  return {OutcomeKind::verify_failed, ""};
}

}  // namespace

TEST_CASE("the kernels that misbehave compile") {
  const Problem problem = misbehaving_problem();
  const MisbehavingKernels family("mixed");
  const auto facts = facts_of_architecture("sm_90a");
  std::unique_ptr<Compiler> compiler;
  try {
    compiler = make_cuda_compiler("sm_90a", misbehaving_sources(), {});
  } catch (const Error& error) {
    FFTUNE_SKIP(error.what());
  }
  for (int p = 0; p < misbehaving_kernels; p += 5)
    CHECK(compiler->compile(family.program(problem, facts, {{"p", p}})).failure == "");
}

TEST_CASE("a new worker serves on within 2 s of a kernel's fault", "[gpu][timing]") {
  Gpu gpu("trap");
  if (!gpu.evaluator) FFTUNE_SKIP(gpu.missing);
  gpu.evaluator->avoid({odd_kernel(0).id()});
  REQUIRE(gpu.evaluator->begin(misbehaving_problem()).refusal.empty());
  REQUIRE(gpu.evaluator->verify(odd_kernel(1)).passed);
  for (const int p : {5, 10, 15}) {
    const auto began = std::chrono::steady_clock::now();
    CHECK(gpu.evaluator->verify(odd_kernel(p)).device_fault);
    CHECK(gpu.evaluator->verify(odd_kernel(p + 1)).passed);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
    CHECK(spent.count() < 2);
  }
  CHECK(gpu.evaluator->deaths() == 3);
}

TEST_CASE("kernels that misbehave cost themselves alone, and the GPU serves on", "[gpu][timing]") {
  auto ways = kernel_ways();
  ways.push_back("mixed");
  const auto way = GENERATE_COPY(from_range(ways));
  CAPTURE(way);
  const MisbehavingOp op(way);
  const Catalog catalog{{&op}, &misbehaving_sources()};
  Gpu gpu(way);
  if (!gpu.evaluator) FFTUNE_SKIP(gpu.missing);
  TuneOptions options;
  options.budget_seconds = 3600;
  const auto result = tune(catalog, *gpu.evaluator, misbehaving_problem(), options);
  REQUIRE(result.record);
  CHECK(result.stopped.empty());
  CHECK(result.record->stages[0].variant.id() ==
        odd_kernel(misbehaving_kernels_best).recipe[0].id());
  REQUIRE(result.outcomes.size() >= misbehaving_kernels);
  for (std::size_t i = 0; i < misbehaving_kernels; ++i) {
    const auto& outcome = result.outcomes[i];
    const int p = Variant::parse(outcome.id).config.get("p");
    INFO(outcome.id << ": " << outcome_kind_name(outcome.kind) << ": " << outcome.reason);
    if (!misbehaves(p)) {
      CHECK(outcome.kind == OutcomeKind::measured);
      continue;
    }
    const auto& own = way == "mixed"
                          ? kernel_ways()[static_cast<std::size_t>(p / 5) % kernel_ways().size()]
                          : way;
    CHECK(outcome.kind == expected(own).kind);
    CHECK(outcome.reason.find(expected(own).word) != std::string::npos);
  }

  // Another process finds the device as if nothing had happened.
  Gpu after("none");
  REQUIRE(after.evaluator);
  REQUIRE(after.evaluator->begin(misbehaving_problem()).refusal.empty());
  CHECK(after.evaluator->verify(odd_kernel(misbehaving_kernels_best)).passed);
  CHECK(after.evaluator->time({odd_kernel(1)}, {}).front().samples_us.size() == 3);
  CHECK(after.evaluator->deaths() == 0);
}

// A problem whose intermediate has no room: what does without it is measured, and the rest is not.
#include <algorithm>
#include <string>
#include <vector>

#include "fake_evaluator.hpp"
#include "fake_op.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "support/host_backend.hpp"
#include "support/toy_op.hpp"
#include "tuning/evaluate/local_evaluator.hpp"
#include "tuning/tuner.hpp"
#include "valley.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Both stages, row by row, so that it needs no intermediate.
class LeanFamily final : public WholeToyFamily {
 public:
  LeanFamily() : WholeToyFamily("lean", "row by row") {}
  Space space(const Problem&, const DeviceFacts&) const override {
    return Space().parameter("rows", "at once", {1});
  }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {{"rows", 1}}; }
  Program program(const Problem& problem, const DeviceFacts&, const Config&) const override {
    Program program;
    program.host_tensors = 4;
    program.steps.emplace_back(HostFunction([problem](const HostCall& call) {
      const auto m = problem.size("m"), d = problem.size("d"), h = problem.size("h");
      const auto* const x = static_cast<const float*>(call.tensors[0]);
      auto* const y = static_cast<float*>(call.tensors[3]);
      std::vector<float> hidden(static_cast<std::size_t>(h));
      for (std::int64_t row = 0; row < m; ++row) {
        toy_product(DType::f32, 1, h, d, x + row * d, call.tensors[1], hidden.data());
        toy_product(DType::f32, 1, d, h, hidden.data(), call.tensors[2], y + row * d);
      }
    }));
    return program;
  }
};

class LeanOp final : public ToyOp {
 public:
  std::vector<const Family*> families() const override {
    auto all = ToyOp::families();
    all.front() = &lean_;  // in the place of the fused one
    return all;
  }

 private:
  LeanFamily lean_;
};

class SmallBackend final : public HostBackend {
 public:
  SmallBackend(std::size_t free, std::size_t all) {
    limit = free;
    facts_ = HostBackend::facts();
    facts_.memory_bytes = static_cast<std::int64_t>(all);
  }
  const DeviceFacts& facts() const override { return facts_; }

 private:
  DeviceFacts facts_;
};

const SourceSet no_device_sources{{}};
const Candidate lean{0, {{"lean", {{"rows", 1}}}}, ""};
const Candidate apart{0, {{"toy_first", {{"block", 1}}}, {"toy_second", {{"block", 1}}}}, ""};
const Problem long_problem = ToyOp::problem(DType::f32, 4096, 4, 64);  // hidden takes 1 MiB

}  // namespace

TEST_CASE("variants that need an intermediate without room fail with its name and size") {
  const LeanOp op;
  const Catalog catalog{{&op}, &no_device_sources};
  SmallBackend backend(700 << 10, 700 << 10);
  LocalEvaluator evaluator(backend, catalog, 1);
  const Setup setup = evaluator.begin(long_problem);
  CHECK(setup.refusal.empty());
  CHECK(setup.left_out.find("hidden (1 MiB)") != std::string::npos);
  CHECK_FALSE(setup.for_now);
  CHECK(evaluator.verify(lean).failure.empty());
  CHECK(evaluator.verify(lean).passed);
  const auto timed = evaluator.time({lean, apart}, {.samples = 3});
  CHECK_FALSE(timed[0].samples_us.empty());
  CHECK(timed[1].failure.find("it needs 1 MiB for 'hidden'") == 0);
  CHECK(evaluator.verify(apart).failure.find("it needs 1 MiB for 'hidden'") == 0);
}

TEST_CASE("all variants run where there is room for all") {
  const LeanOp op;
  const Catalog catalog{{&op}, &no_device_sources};
  SmallBackend backend(16 << 20, 16 << 20);
  LocalEvaluator evaluator(backend, catalog, 1);
  CHECK(evaluator.begin(long_problem).left_out.empty());
  for (const Candidate& each : {lean, apart}) CHECK(evaluator.verify(each).passed);
}

TEST_CASE("a search that lacks memory for the moment says so, and its record is not to be kept") {
  auto fake = FakeCatalog::of_variants(12);
  for (const bool for_now : {false, true}) {
    FakeEvaluator evaluator(valley);
    evaluator.left_out = "variants that write hidden (1 MiB) are left out";
    evaluator.for_now = for_now;
    const TuneResult result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
    CHECK(result.record);
    CHECK(result.lacked == (for_now ? evaluator.left_out : ""));
    CHECK(std::find(result.notes.begin(), result.notes.end(), evaluator.left_out) !=
          result.notes.end());
  }
}

TEST_CASE("a search without a library that the machine lacks for the moment says so") {
  FakeCatalog fake(1);
  fake.op.add("f", {"a"}, 12);
  FakeFamily& library = fake.op.add("by_library", {"a"}, 2);
  for (const char* refusal : {"no library: its threads need 64 MiB, and 8 are left", "never"}) {
    library.refused = refusal;
    FakeEvaluator evaluator(valley);
    evaluator.lack("no library: its threads need 64 MiB, and 8 are left");
    const TuneResult result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
    CHECK(result.record);
    CHECK(result.lacked.empty() == (library.refused == "never"));
  }
}

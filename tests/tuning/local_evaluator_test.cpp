#include "tuning/evaluate/local_evaluator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>

#include "core/memory.hpp"
#include "cpu/open.hpp"
#include "odd_op.hpp"
#include "registry/part_family.hpp"
#include "support/catch.hpp"
#include "support/host_backend.hpp"
#include "support/seconds.hpp"
#include "tuning/tuner.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

const SourceSet no_sources{{}};

Candidate way(int value) {
  return {0, {{"odd", {{"way", value}}}}, ""};
}

constexpr std::size_t toy_tensors = 5;

std::int64_t times_of(const Problem& problem) {
  return problem.sizes.contains("times") ? problem.size("times") : 1;
}

/// Both stages of as many toys as the problem has, in one program.
class AllToys final : public WholeToyFamily {
 public:
  AllToys() : WholeToyFamily("all", "every time in one program") {}
  Space space(const Problem&, const DeviceFacts&) const override {
    return Space().parameter("block", "rows at once", {1});
  }
  Config default_config(const Problem&, const DeviceFacts&) const override {
    return {{"block", 1}};
  }
  bool covers_repetition() const override { return true; }

  Program program(const Problem& problem, const DeviceFacts&, const Config&) const override {
    const auto times = static_cast<std::size_t>(times_of(problem));
    Program program;
    program.host_tensors = static_cast<int>(times * toy_tensors);
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      const auto m = problem.size("m"), d = problem.size("d"), h = problem.size("h");
      for (std::size_t at = 0; at < times * toy_tensors; at += toy_tensors) {
        toy_product(problem.dtype, m, h, d, call.tensors[at], call.tensors[at + 1],
                    call.tensors[at + 4]);
        toy_product(problem.dtype, m, d, h, call.tensors[at + 4], call.tensors[at + 2],
                    call.tensors[at + 3]);
      }
    }));
    return program;
  }
};

/// `times` toys that have nothing to do with each other.
class Toys final : public ToyOp {
 public:
  std::vector<SizeField> sizes() const override {
    auto sizes = ToyOp::sizes();
    sizes.push_back({.name = "times", .help = "how many"});
    return sizes;
  }
  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    std::vector<TensorSpec> all;
    for (std::int64_t i = 0; i < times_of(problem); ++i)
      for (auto& tensor : ToyOp::tensors(problem)) {
        if (i > 0) tensor.name += std::to_string(i);
        all.push_back(std::move(tensor));
      }
    return all;
  }
  std::optional<Repetition> repetition(const Problem& problem) const override {
    if (!problem.sizes.contains("times")) return std::nullopt;
    Repetition all{problem, {}};
    all.one.sizes.erase("times");
    for (std::int64_t i = 0; i < problem.size("times"); ++i) {
      auto& places = all.places.emplace_back(toy_tensors);
      std::iota(places.begin(), places.end(), static_cast<std::size_t>(i) * toy_tensors);
    }
    return all;
  }
  std::vector<const Family*> families() const override { return {&all_}; }

 private:
  AllToys all_;
};

/// An op of the test on the CPU.
template <class TestOp>
struct CpuEvaluator {
  const TestOp op;
  const Catalog catalog{{&op}, &no_sources};
  const std::unique_ptr<Backend> backend = open_cpu();
  LocalEvaluator evaluator{*backend, catalog, 1};
};

}  // namespace

TEST_CASE("any outcome of a candidate on a real backend is a value") {
  CpuEvaluator<OddOp> cpu;
  auto& evaluator = cpu.evaluator;
  const auto setup = evaluator.begin(ToyOp::problem(DType::f32, 7, 16, 24));
  REQUIRE(setup.refusal.empty());
  CHECK(setup.buffer_sets >= 2);

  Candidates all;
  for (int value = 0; value < odd_count; ++value) all.push_back(way(value));
  std::size_t told = 0;
  const auto compiled = evaluator.compile(all, [&](std::size_t, const Compiled&) {
    ++told;
    return true;
  });
  CHECK(told == all.size());
  CHECK(compiled[odd_right].failure.empty());
  CHECK(compiled[odd_no_program].failure == "no program can be made");
  CHECK_FALSE(compiled[odd_not_compiled].failure.empty());

  for (int value = 0; value < odd_count; ++value) {
    const auto verified = evaluator.verify(way(value));
    INFO(value << ": " << verified.failure);
    CHECK(verified.passed == (value == odd_right || value == odd_slow));
    CHECK(verified.passed == verified.failure.empty());
    CHECK(verified.device_fault == (value == odd_faults));
  }
  CHECK(evaluator.lost().empty());

  TimeRequest request;
  request.samples = 5;
  const auto timings = evaluator.time(all, request);
  REQUIRE(timings.size() == all.size());
  CHECK(timings[odd_right].samples_us.size() == 5);
  CHECK(timings[odd_slow].samples_us.size() == 5);
  CHECK(timings[odd_slow].samples_us[0] > 30000);
  CHECK(timings[odd_right].samples_us[0] < 30000);
  CHECK(timings[odd_throws].failure == "a function gave up");
  CHECK(timings[odd_faults].device_fault);
  CHECK(timings[odd_faults].samples_us.empty());
}

TEST_CASE("a request to end comes before a problem's inputs are made") {
  const OddOp op;
  const Catalog catalog{{&op}, &no_sources};
  const auto backend = open_cpu();
  std::atomic<bool> cancel{true};
  LocalEvaluator evaluator(*backend, catalog, 1, -1, {&cancel, &cancel});
  CHECK(evaluator.begin(ToyOp::problem(DType::f32, 7, 16, 24)).refusal == "interrupted");
  CHECK(evaluator.lost().empty());
}

TEST_CASE("a program of several times is verified by one of them, and timed as all") {
  CpuEvaluator<Toys> cpu;
  auto& evaluator = cpu.evaluator;
  Problem problem = ToyOp::problem(DType::f32, 7, 16, 24);
  problem.sizes["times"] = 3;
  REQUIRE(evaluator.begin(problem).refusal.empty());
  const Candidate all{0, {{"all", {{"block", 1}}}}, ""};
  const auto verified = evaluator.verify(all);
  INFO(verified.failure);
  CHECK(verified.passed);
  const auto timings = evaluator.time({all}, {});
  CHECK(timings[0].failure.empty());
  CHECK_FALSE(timings[0].samples_us.empty());
}

TEST_CASE("a slow candidate is abandoned at its second sample, and a round ends in time") {
  CpuEvaluator<OddOp> cpu;
  auto& evaluator = cpu.evaluator;
  REQUIRE(evaluator.begin(ToyOp::problem(DType::f32, 7, 16, 24)).refusal.empty());
  TimeRequest request;
  request.samples = 100;
  request.abandon_above_us = 10000;
  const auto abandoned = evaluator.time({way(odd_slow)}, request);
  CHECK(abandoned[0].abandoned);
  CHECK(abandoned[0].samples_us.size() == 2);
  TimeRequest brief;
  brief.samples = 100;
  brief.seconds = 0.001;
  CHECK(evaluator.time({way(odd_slow)}, brief)[0].samples_us.size() == 1);
}

TEST_CASE("baselines have their own tensors behind the op's") {
  CpuEvaluator<OddOp> cpu;
  auto& evaluator = cpu.evaluator;
  REQUIRE(evaluator.begin(ToyOp::problem(DType::f32, 3, 8, 8)).refusal.empty());
  const auto timings =
      evaluator.time({{0, {}, "unfused"}, {0, {}, "broken"}, {0, {}, "missing"}}, {});
  CHECK(timings[0].failure.empty());
  CHECK_FALSE(timings[0].samples_us.empty());
  CHECK(timings[1].failure == "a function gave up");
  CHECK(timings[2].failure == "there is no baseline 'missing'");
}

TEST_CASE("a problem that does not fit is refused with the bytes needed and there") {
  const OddOp op;
  const Catalog catalog{{&op}, &no_sources};
  HostBackend backend;
  backend.limit = 1 << 20;
  LocalEvaluator evaluator(backend, catalog, 1);
  const auto setup = evaluator.begin(ToyOp::problem(DType::f32, 100000, 16, 24));
  CHECK(setup.refusal.find("it needs " + bytes_text(static_cast<double>(setup.bytes_per_set))) ==
        0);
  CHECK(setup.refusal.find("1 MiB are there") != std::string::npos);
  CHECK(evaluator.begin(ToyOp::problem(DType::f32, 10, 16, 24)).refusal.empty());
}

TEST_CASE("another number of tokens does not compute the whole reference again") {
  const ToyOp op;
  const Catalog catalog{{&op}, &no_sources};
  HostBackend backend;
  LocalEvaluator evaluator(backend, catalog, 1);
  REQUIRE(evaluator.begin(ToyOp::problem(DType::f32, 64, 16, 24)).refusal.empty());
  const auto runs = op.reference_runs;
  for (const std::int64_t m : {64, 33, 200}) {
    REQUIRE(evaluator.begin(ToyOp::problem(DType::f32, m, 16, 24)).refusal.empty());
    CHECK(evaluator.verify({0, {{"toy_fused", {{"block", 1}}}}, ""}).passed);
    CHECK(evaluator.verify({1, {{"toy_second", {{"block", 2}}}}, ""}).passed);
  }
  CHECK(op.reference_runs == runs);
  REQUIRE(evaluator.begin(ToyOp::problem(DType::f32, 64, 8, 24)).refusal.empty());
  CHECK(op.reference_runs > runs);
}

TEST_CASE("a whole search on the CPU picks the only variant that is right and fast") {
  CpuEvaluator<OddOp> cpu;
  auto& evaluator = cpu.evaluator;
  const auto problem = ToyOp::problem(DType::f32, 7, 64, 128);
  TuneOptions options;
  options.patience_seconds = 0;
  options.budget_seconds = 1000;  // other processes may be at work
  TuneResult result;
  const double seconds =
      processor_seconds_of([&] { result = tune(cpu.catalog, evaluator, problem, options); });
  REQUIRE(result.record);
  CHECK(result.record->stages[0].variant.id() == "odd/way=0");
  CHECK(result.record->stages[0].measured == 2);
  CHECK(result.record->stages[0].failed == odd_count - 2);
  CHECK(result.record->verdict.complete);
  CHECK(result.record->error < result.record->tolerance);
  // The record has no ratio of times that a busy machine spreads by more than a factor of two.
  const Ratio& unfused = result.ratios.at("unfused");
  CHECK(unfused.high > 0.3);
  CHECK(result.record->verdict.unfused_ratio == (unfused.is_known() ? unfused.median : 0));
  CHECK(result.baselines.size() == 1);
  // Notes on the broken baseline, and on a decision that a busy machine may have made hard, are
  // expected.
  CHECK(std::count_if(result.notes.begin(), result.notes.end(), [](const std::string& note) {
          return !note.starts_with("undecided: ") &&
                 !note.starts_with("measured while disturbed: ");
        }) == 1);
  std::map<std::string, OutcomeKind> kinds;
  for (const auto& outcome : result.outcomes) kinds[outcome.id] = outcome.kind;
  CHECK(kinds["odd/way=1"] == OutcomeKind::verify_failed);
  CHECK(kinds["odd/way=2"] == OutcomeKind::verify_failed);
  CHECK(kinds["odd/way=3"] == OutcomeKind::verify_failed);
  CHECK(kinds["odd/way=4"] == OutcomeKind::device_fault);
  CHECK(kinds["odd/way=5"] == OutcomeKind::compile_failed);
  CHECK(kinds["odd/way=6"] == OutcomeKind::compile_failed);
  CHECK(seconds < 10);
}

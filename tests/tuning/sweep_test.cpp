#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "core/error.hpp"
#include "fake_evaluator.hpp"
#include "fake_op.hpp"
#include "support/catch.hpp"
#include "tuning/tuner.hpp"

using namespace fftune;

namespace {

double slope(const Variant& variant) {
  return 100 + 50 * std::abs(static_cast<double>(variant.config.at("p")) - 90);
}

}  // namespace

TEST_CASE("problems share a budget; each gets a part and the end is in time") {
  auto fake = FakeCatalog::of_variants(2000);
  FakeEvaluator evaluator(slope);
  evaluator.compile_seconds = 0.05;
  auto options = evaluator.options(20);
  std::vector<double> seconds;
  tune_all(fake.catalog(), evaluator, {fake.problem(1), fake.problem(2), fake.problem(4)}, options,
           [&](const TuneResult& result) {
             CHECK(result.record);
             CHECK_FALSE(result.stopped.empty());
             seconds.push_back(result.seconds);
           });
  REQUIRE(seconds.size() == 3);
  for (const auto each : seconds) CHECK(each > 2);
  CHECK(evaluator.clock < 23);
}

TEST_CASE("the last of many problems that use all of their time is not starved") {
  constexpr int problems = 12;
  constexpr double budget = 120;
  auto fake = FakeCatalog::of_variants(2000);
  FakeEvaluator evaluator(slope);
  evaluator.compile_seconds = 0.05;
  auto options = evaluator.options();
  options.budget_seconds = budget;
  options.strategy = "exhaustive";
  std::vector<Problem> all;
  for (int i = 0; i < problems; ++i) all.push_back(fake.problem(100 + i));
  std::vector<double> seconds;
  tune_all(fake.catalog(), evaluator, all, options,
           [&](const TuneResult& result) { seconds.push_back(result.seconds); });
  REQUIRE(seconds.size() == problems);
  CAPTURE(seconds);
  CHECK(seconds.back() > 0.6 * budget / problems);
  CHECK(evaluator.clock < budget * 1.05);
}

TEST_CASE("preparation of small problems does not use up their time") {
  // Numbers of tokens, and seconds that a mixture of experts took to prepare on an H200.
  const std::map<std::int64_t, double> preparing{
      {1, 1.216},  {2, 0.154},   {4, 0.306},   {8, 0.376},    {16, 0.554},   {24, 0.612},
      {32, 0.675}, {48, 0.771},  {64, 0.814},  {96, 1.598},   {128, 0.754},  {256, 1.696},
      {512, 2.09}, {1024, 2.75}, {1536, 3.67}, {2048, 4.749}, {3072, 4.475}, {4096, 3.454}};
  constexpr double budget = 110;
  auto fake = FakeCatalog::of_variants(2000);
  struct Preparing : FakeEvaluator {
    using FakeEvaluator::FakeEvaluator;
    std::map<std::int64_t, double> preparing;
    Setup begin(const Problem& problem) override {
      begin_seconds = preparing.at(problem.size("m"));
      return FakeEvaluator::begin(problem);
    }
  } evaluator(slope);
  evaluator.preparing = preparing;
  evaluator.compile_seconds = 0.05;
  auto options = evaluator.options();
  options.budget_seconds = budget;
  options.strategy = "exhaustive";
  std::vector<Problem> all;
  for (const auto& [m, seconds] : preparing) all.push_back(fake.problem(m));
  std::vector<double> searching;
  tune_all(fake.catalog(), evaluator, all, options, [&](const TuneResult& result) {
    searching.push_back(result.seconds - preparing.at(result.problem.size("m")));
  });
  CAPTURE(searching);
  REQUIRE(searching.size() == all.size());
  // 79 s are left for searching, 4.4 for each.
  CHECK(*std::min_element(searching.begin(), searching.end()) > 1.5);
  CHECK(evaluator.clock < budget * 1.05);
}

TEST_CASE("a short problem beside a long one still gets time to be searched") {
  auto fake = FakeCatalog::of_variants(60);
  FakeEvaluator evaluator(slope);
  evaluator.compile_seconds = 0.02;
  auto options = evaluator.options(30);
  tune_all(fake.catalog(), evaluator, {fake.problem(1), fake.problem(1 << 20)}, options,
           [&](const TuneResult& result) { CHECK(result.stopped.empty()); });
}

TEST_CASE("a winner is tried first on the next problem") {
  auto fake = FakeCatalog::of_variants(100);
  FakeEvaluator evaluator(slope);
  std::vector<std::string> order;  // in which they are sampled first
  evaluator.stretch = [&](const std::string& id) {
    if (std::find(order.begin(), order.end(), id) == order.end()) order.push_back(id);
    return 1.0;
  };
  std::vector<std::vector<std::string>> orders;
  tune_all(fake.catalog(), evaluator, {fake.problem(1), fake.problem(2)}, evaluator.options(),
           [&](const TuneResult&) { orders.push_back(std::exchange(order, {})); });
  REQUIRE(orders.size() == 2);
  // The default, then the winner of before.
  CHECK(orders[1].at(0) == "f/p=0");
  CHECK(orders[1].at(1) == "f/p=90");
  CHECK(orders[0].at(1) != "f/p=90");
}

TEST_CASE("a problem that does not fit is a result with its reason, and the others are searched") {
  auto fake = FakeCatalog::of_variants(10);
  struct Small : FakeEvaluator {
    using FakeEvaluator::FakeEvaluator;
    Setup begin(const Problem& problem) override {
      Setup setup = FakeEvaluator::begin(problem);
      if (problem.size("m") == 2) setup.refusal = "needs 100 bytes, 10 are free";
      return setup;
    }
  } evaluator(slope);
  std::vector<std::string> stopped;
  tune_all(fake.catalog(), evaluator, {fake.problem(1), fake.problem(2), fake.problem(3)},
           evaluator.options(), [&](const TuneResult& result) {
             CHECK(result.record.has_value() == result.stopped.empty());
             stopped.push_back(result.stopped);
           });
  CHECK(stopped == std::vector<std::string>{"", "needs 100 bytes, 10 are free", ""});
}

TEST_CASE("an interruption ends the sweep after the problem it fell into") {
  auto fake = FakeCatalog::of_variants(10);
  std::atomic<bool> cancel{false};
  FakeEvaluator evaluator(slope);
  evaluator.cancel = &cancel;
  evaluator.cancel_after = 6;
  auto options = evaluator.options();
  options.cancel = &cancel;
  int results = 0;
  tune_all(fake.catalog(), evaluator, {fake.problem(1), fake.problem(2)}, options,
           [&](const TuneResult& result) {
             ++results;
             CHECK(result.cancelled);
             CHECK(result.record);
           });
  CHECK(results == 1);
}

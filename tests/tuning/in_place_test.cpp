// Tuning in place: an op made of ops gets the variants that are fastest within the whole.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fake_evaluator.hpp"
#include "fake_op.hpp"
#include "near.hpp"
#include "support/catch.hpp"
#include "tuning/tuner.hpp"
#include "valley.hpp"

using namespace fftune;

namespace {

constexpr double step_us = 4;

/// By itself a variant is the faster, the less its p.
double alone(const Variant& variant) {
  return 100 + step_us * static_cast<double>(variant.config.at("p"));
}

/// The families f, g and h of one stage each; in the whole another variant of each is the fastest.
FakeCatalog three_stages() {
  FakeCatalog fake(3);
  fake.op.is_made_of_ops = true;
  fake.op.add("f", {"a"}, 7);
  fake.op.add("g", {"b"}, 7);
  fake.op.add("h", {"c"}, 7);
  return fake;
}

double distance(const Recipe& recipe, const std::map<std::string, std::int64_t>& targets) {
  double sum = 0;
  for (const Variant& variant : recipe)
    if (const auto target = targets.find(variant.family); target != targets.end())
      sum += std::abs(static_cast<double>(variant.config.at("p") - target->second));
  return sum;
}

}  // namespace

TEST_CASE("a part gets the variant that is fastest in the whole, not by itself") {
  for (const double noise : {0.0, 0.003}) {
    auto fake = three_stages();
    FakeEvaluator evaluator(alone, noise);
    evaluator.whole_us = [](const Recipe& recipe) {
      return 300 + 5 * distance(recipe, {{"f", 3}, {"g", 6}, {"h", 4}});
    };
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
    CHECK(winner(result, 0) == 3);
    CHECK(winner(result, 1) == 6);
    CHECK(winner(result, 2) == 4);
    CHECK(result.record->verdict.median_us == near(300, 0.01));
    CHECK(result.record->verdict.decided == true);
    REQUIRE(result.notes.size() == 1);
    CHECK(result.notes[0].find("timed within the whole") == 0);
  }
}

TEST_CASE("the best variant of a part depends on its neighbours: rounds go on until none changes") {
  auto fake = three_stages();
  FakeEvaluator evaluator(alone);
  // The best p of f is that of g, whose best is 2 once h has 2.
  evaluator.whole_us = [](const Recipe& recipe) {
    const auto p = [&](std::size_t i) { return static_cast<double>(recipe[i].config.at("p")); };
    return 300 + 3 * std::abs(p(0) - p(1)) + 5 * std::abs(p(1) - (p(2) == 2 ? 2 : 0)) +
           20 * std::abs(p(2) - 2);
  };
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  CHECK(winner(result, 2) == 2);
  CHECK(winner(result, 1) == 2);
  CHECK(winner(result, 0) == 2);
}

TEST_CASE("a family of several stages takes the place of theirs, and they of it, in the whole") {
  for (const bool fused_wins : {true, false}) {
    auto fake = three_stages();
    fake.op.add("gh", {"b", "c"}, 3);
    // By itself the one that loses in the whole is the faster.
    FakeEvaluator evaluator([&](const Variant& variant) {
      return variant.family == "gh" ? (fused_wins ? 230 : 170) : alone(variant);
    });
    evaluator.whole_us = [&](const Recipe& recipe) {
      const bool fused = recipe.back().family == "gh";
      return (fused == fused_wins ? 280 : 300) + 4 * distance(recipe, {{"f", 2}, {"h", 1}});
    };
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
    REQUIRE(result.record);
    CHECK(result.record->stages.size() == (fused_wins ? 2 : 3));
    CHECK(winner(result, 0) == 2);
  }
}

TEST_CASE("many stages of many families are tuned in place within the time") {
  constexpr int stages = 20;
  FakeCatalog fake(stages);
  fake.op.is_made_of_ops = true;
  for (int i = 0; i < stages; ++i) {
    const std::string stage(1, static_cast<char>('a' + i));
    for (const char* engine : {"x", "y", "z"}) fake.op.add(stage + engine, {stage}, 3);
  }
  FakeEvaluator evaluator(alone);
  evaluator.whole_us = [](const Recipe& recipe) {
    double us = 0;
    for (const Variant& variant : recipe) us += variant.family[1] == 'z' ? 90 : 100;
    return us;
  };
  auto options = evaluator.options(60);
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  REQUIRE(result.record);
  CHECK(result.record->verdict.median_us == near(90.0 * stages));
  CHECK(result.seconds < 60);
}

TEST_CASE("a variant that cannot run in the whole loses its place, and the search goes on") {
  auto fake = three_stages();
  FakeEvaluator evaluator(alone);
  evaluator.whole_us = [](const Recipe& recipe) {
    return 300 + 5 * distance(recipe, {{"f", 1}, {"g", 0}, {"h", 2}});
  };
  evaluator.misbehaving["f/p=1 + g/p=0 + h/p=0"] = Misbehaviour::launch;
  evaluator.misbehaving["f/p=0 + g/p=0 + h/p=2"] = Misbehaviour::wrong;
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  REQUIRE(result.record);
  // In the second round the neighbour is another, with which it runs.
  CHECK(winner(result, 0) == 1);
  CHECK(winner(result, 2) == 2);
}

TEST_CASE("in place, a recipe that is wrong as a whole is not chosen") {
  auto fake = three_stages();
  FakeEvaluator evaluator(alone);
  evaluator.misbehaving["f/p=0 + g/p=0 + h/p=0"] = Misbehaviour::wrong;
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  REQUIRE(result.record);
  CHECK(winner(result, 0) + winner(result, 1) + winner(result, 2) > 0);
}

TEST_CASE("without time for it, the variants that are fastest by themselves are the record") {
  auto fake = three_stages();
  FakeEvaluator evaluator(alone);
  evaluator.compile_seconds = 1;
  evaluator.whole_us = [](const Recipe& recipe) { return 300 + distance(recipe, {{"f", 3}}); };
  auto options = evaluator.options(2);
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  REQUIRE(result.record);
  CHECK(winner(result, 0) == 0);
}

TEST_CASE("however little time there is, no winner is slower than the recipe without a record") {
  int searches = 0, outdone = 0;
  for (double budget = 0.6; budget < 12; budget *= 1.15) {
    CAPTURE(budget);
    auto fake = three_stages();
    FakeEvaluator evaluator([](const Variant& variant) {
      return 100 + step_us * std::abs(static_cast<double>(variant.config.at("p") - 5));
    });
    // By themselves others are faster, in the whole the defaults.
    const auto whole = [](const Recipe& recipe) {
      return 300 + 50 * distance(recipe, {{"f", 0}, {"g", 0}, {"h", 0}});
    };
    evaluator.whole_us = whole;
    evaluator.compile_seconds = 0.1;
    auto options = evaluator.options(budget);
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
    if (!result.record || !result.record->verdict.untuned_ratio) continue;
    ++searches;
    outdone += result.record->verdict.complete == false;
    CHECK(result.record->verdict.untuned_ratio.value() > 0.99);
  }
  CHECK(searches >= 10);
  CHECK(outdone >= 1);
}

TEST_CASE("however a search or a refresh ends, its winner is not slower than the one on record") {
  const bool refresh = GENERATE(false, true);
  const bool interrupted = GENERATE(false, true);
  CAPTURE(refresh, interrupted);
  const Recipe recorded{{"f", {{"p", 3}}}, {"g", {{"p", 6}}}, {"h", {{"p", 4}}}};
  // By themselves others are faster, in the whole those on record.
  const auto whole = [](const Recipe& recipe) {
    return 300 + 50 * distance(recipe, {{"f", 3}, {"g", 6}, {"h", 4}});
  };
  int searches = 0, incomplete = 0;
  double budget = interrupted ? 100 : 0.3;
  for (int step = 1; step < 60; step += 3) {
    auto fake = three_stages();
    FakeEvaluator evaluator(alone);
    evaluator.whole_us = whole;
    evaluator.compile_seconds = 0.05;
    std::atomic<bool> cancel{false};
    evaluator.cancel = &cancel;
    evaluator.cancel_after = interrupted ? step : 0;
    auto options = evaluator.options(budget);
    options.cancel = &cancel;
    options.on_record[fake.problem()] = {recorded};
    if (refresh) {
      options.strategy = "exhaustive";
      auto& only = options.only[fake.problem()] = recorded;
      for (const Variant& variant : recorded)
        only.push_back({variant.family, {{"p", variant.config.at("p") - 2}}});
    }
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
    CAPTURE(step, budget);
    if (!interrupted) budget *= 1.2;
    if (!result.record) continue;
    ++searches;
    incomplete += result.record->verdict.complete == false;
    CHECK(whole(result.record->recipe()) <= 300);
  }
  CHECK(searches >= 5);
  CHECK(incomplete >= 1);
}

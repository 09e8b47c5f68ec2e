#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "fake_evaluator.hpp"
#include "fake_op.hpp"
#include "near.hpp"
#include "support/catch.hpp"
#include "tuning/tuner.hpp"
#include "valley.hpp"

using namespace fftune;

TEST_CASE("a family of several stages wins exactly when the whole is faster") {
  for (const double fused_us : {150.0, 230.0}) {
    FakeCatalog fake(2);
    fake.op.add("fused", {"a", "b"}, 10);
    fake.op.add("f", {"a"}, 10);
    fake.op.add("g", {"b"}, 10);
    FakeEvaluator evaluator([&](const Variant& variant) {
      const auto p = static_cast<double>(variant.config.at("p"));
      return (variant.family == "fused" ? fused_us : 100) + std::abs(p - 4) * 10;
    });
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
    REQUIRE(result.record);
    CHECK(result.record->stages.size() == (fused_us < 200 ? 1 : 2));
    CHECK(winner(result) == 4);
    CHECK(result.record->verdict.median_us == near(std::min(fused_us, 200.0)));
    std::vector<std::string> names;
    for (const auto& stage : result.record->stages)
      names.insert(names.end(), stage.stages.begin(), stage.stages.end());
    CHECK(names == std::vector<std::string>{"a", "b"});
  }
}

TEST_CASE("the whole is measured: stages that hinder each other lose to those that do not") {
  FakeCatalog fake(2);
  fake.op.add("f", {"a"}, 4);
  fake.op.add("g", {"b"}, 4);
  FakeEvaluator evaluator(
      [](const Variant& v) { return 100 + 4 * static_cast<double>(v.config.at("p")); });
  evaluator.whole_us = [](const Recipe& recipe) {
    const bool both = recipe[0].config.at("p") == 0 && recipe[1].config.at("p") == 0;
    return both ? 260.0
                : 200.0 +
                      4 * static_cast<double>(recipe[0].config.at("p") + recipe[1].config.at("p"));
  };
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  CHECK(winner(result, 0) + winner(result, 1) == 1);
  CHECK(result.record->verdict.median_us == near(204));
}

TEST_CASE("the winner is not slower as a whole than what runs without a record") {
  FakeCatalog fake(2);
  fake.op.add("f", {"a"}, 4).default_value = 3;
  fake.op.add("g", {"b"}, 4).default_value = 3;
  const auto time = [](const Variant& v) {
    return 100 + 20 * static_cast<double>(v.config.at("p"));
  };
  FakeEvaluator evaluator(time);
  evaluator.whole_us = [&](const Recipe& recipe) {
    const bool untuned = recipe[0].config.at("p") == 3 && recipe[1].config.at("p") == 3;
    return untuned ? 190 : time(recipe[0]) + time(recipe[1]);
  };
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  CHECK(winner(result, 0) == 3);
  CHECK(winner(result, 1) == 3);
  CHECK(result.record->verdict.median_us == near(190));
  CHECK(result.record->verdict.untuned_ratio == 1);
}

TEST_CASE("a recipe that is wrong as a whole is not chosen") {
  FakeCatalog fake(2);
  fake.op.add("f", {"a"}, 3);
  fake.op.add("g", {"b"}, 3);
  FakeEvaluator evaluator(
      [](const Variant& v) { return 100 + 5 * static_cast<double>(v.config.at("p")); });
  evaluator.misbehaving["f/p=0 + g/p=0"] = Misbehaviour::wrong;
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  CHECK(winner(result, 0) + winner(result, 1) == 1);
}

TEST_CASE("the first failure is one of the stage that nothing runs") {
  const auto outcome = [](std::size_t stage, const char* id, OutcomeKind kind) {
    Outcome made;
    made.first_stage = stage;
    made.id = id;
    made.kind = kind;
    return made;
  };
  const std::vector<Outcome> outcomes{
      outcome(0, "f/p=0", OutcomeKind::compile_failed), outcome(0, "f/p=1", OutcomeKind::measured),
      outcome(1, "g/p=0", OutcomeKind::not_tried), outcome(1, "g/p=1", OutcomeKind::verify_failed)};
  CHECK(first_failure(outcomes)->id == "g/p=1");
  CHECK(first_failure({outcomes[0], outcomes[1]})->id == "f/p=0");
  CHECK_FALSE(first_failure({outcomes[1], outcomes[2]}));
  CHECK(failure_text(outcomes[3]) == "g/p=1: verify failed");
}

TEST_CASE("fallbacks take part only where nothing else serves, and it is said") {
  SECTION("not beside a family that works") {
    auto fake = FakeCatalog::of_variants(3);
    fake.op.add("slow", {"a"}, 1).fallback = true;
    FakeEvaluator evaluator(valley);
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
    CHECK(result.record->stages[0].variant.family == "f");
    CHECK(evaluator.compiled["slow/p=0"] == 0);
    CHECK(result.notes.empty());
  }
  SECTION("for the stage that no other family takes") {
    FakeCatalog fake(2);
    fake.op.add("f", {"a"}, 3);
    fake.op.add("g", {"b"}, 3).refused = "d must be a multiple of 8";
    fake.op.add("slow_a", {"a"}, 1).fallback = true;
    fake.op.add("slow_b", {"b"}, 1).fallback = true;
    FakeEvaluator evaluator(valley);
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
    REQUIRE(result.record);
    CHECK(result.record->stages[0].variant.family == "f");
    CHECK(result.record->stages[1].variant.family == "slow_b");
    CHECK(evaluator.compiled["slow_a/p=0"] == 0);
    REQUIRE(result.notes.size() == 1);
    CHECK(result.notes[0].find("g: d must be a multiple of 8") != std::string::npos);
  }
  SECTION("where every other variant fails") {
    auto fake = FakeCatalog::of_variants(1);
    fake.op.add("slow", {"a"}, 1).fallback = true;
    FakeEvaluator evaluator(valley);
    evaluator.misbehaving["f/p=0"] = Misbehaviour::wrong;
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
    CHECK(result.record->stages[0].variant.family == "slow");
    REQUIRE(result.notes.size() == 1);
    CHECK(result.notes[0].find("(f/p=0: verify failed: ") != std::string::npos);
  }
  SECTION("but not again where they were what failed") {
    FakeCatalog fake(1);
    fake.op.add("slow", {"a"}, 1).fallback = true;
    FakeEvaluator evaluator(valley);
    evaluator.misbehaving["slow/p=0"] = Misbehaviour::wrong;
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
    CHECK_FALSE(result.record);
    for (const auto& note : result.notes) CHECK(note.find("is tried") == std::string::npos);
    const auto failure = first_failure(result.outcomes);
    REQUIRE(failure);
    CHECK(failure->id == "slow/p=0");
    CHECK(failure->kind == OutcomeKind::verify_failed);
    CHECK_FALSE(failure->reason.empty());
  }
  SECTION("none at all is an error") {
    FakeCatalog fake(1);
    fake.op.add("f", {"a"}, 1).refused = "never";
    FakeEvaluator evaluator(valley);
    CHECK_THROWS_AS(tune(fake.catalog(), evaluator, fake.problem(), evaluator.options()), Error);
  }
}

TEST_CASE("a winner that its record's own times show to be slower gives way") {
  FakeCatalog fake(1);
  fake.op.add("f", {"a"}, 12).default_value = 3;
  const bool recorded = GENERATE(true, false);  // to the variant on record, or else to the untuned
  const std::string fastest = recorded ? "f/p=5" : "f/p=3";
  FakeEvaluator evaluator([&](const Variant& v) { return v.id() == fastest ? 100.0 : 130.0; },
                          0.001);
  // A busy machine makes it slow until the record is made, beside a baseline.
  evaluator.stretch = [&](const std::string& id) {
    return id == fastest && evaluator.sampled["unfused"] == 0 ? 1.35 : 1;
  };
  auto options = evaluator.options();
  if (recorded) options.on_record[fake.problem()] = {{{"f", {{"p", 5}}}}};
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  REQUIRE(result.record);
  const StageRecord& stage = result.record->stages[0];
  CHECK(stage.variant.id() == fastest);
  CHECK(result.record->verdict.untuned_ratio.value() > 0.999);
  CHECK_FALSE(stage.runners_up.empty());
  CHECK(std::any_of(result.notes.begin(), result.notes.end(), [&](const std::string& note) {
    return note.find(recorded ? "the variant on record, which is the winner"
                              : "the untuned choice, which is the winner") != std::string::npos;
  }));
}

TEST_CASE("a family of all stages is timed beside parts that are faster by themselves alone") {
  FakeCatalog fake(2);
  fake.op.add("fused", {"a", "b"}, 3);
  fake.op.add("f", {"a"}, 3);
  fake.op.add("g", {"b"}, 3);
  FakeEvaluator evaluator([](const Variant& v) { return v.family == "fused" ? 500.0 : 100.0; });
  evaluator.whole_us = [](const Recipe&) { return 600.0; };
  auto options = evaluator.options();
  const bool recorded = GENERATE(true, false);  // or else untuned
  if (recorded) options.on_record[fake.problem()] = {{{"fused", {{"p", 2}}}}};
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  REQUIRE(result.record);
  CHECK(result.record->stages[0].variant.family == "fused");
}

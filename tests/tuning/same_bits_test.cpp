// Classes of variants that agree bit for bit, and searches that stay within one.
#include <map>
#include <string>

#include "fake_evaluator.hpp"
#include "fake_op.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "tuning/journal/journal.hpp"
#include "tuning/tuner.hpp"
#include "valley.hpp"

using namespace fftune;

namespace {

/// Variants agree with those of the same parity; a recipe's class is that of its parts.
std::string parity(const std::string& id) {
  std::string odd;
  for (std::size_t at = id.find("p="); at != id.npos; at = id.find("p=", at + 1))
    odd += std::stoi(id.substr(at + 2)) % 2 ? '1' : '0';
  return std::string(16 - odd.size(), '0') + odd;
}

Variant variant(const std::string& family, std::int64_t p) {
  return {family, {{"p", p}}};
}

}  // namespace

TEST_CASE("a record names the class of the winner, and of all that came close") {
  auto fake = FakeCatalog::of_variants(200);
  FakeEvaluator evaluator(valley);
  evaluator.bits = parity;
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  const auto& stage = result.record->stages[0];
  CHECK(stage.bits == parity(stage.variant.id()));
  REQUIRE_FALSE(stage.ties.empty());
  for (const auto& tie : stage.ties) CHECK(tie.bits == parity(tie.id));
  REQUIRE_FALSE(stage.runners_up.empty());
  for (const auto& next : stage.runners_up) CHECK(next.bits == parity(next.id));
}

TEST_CASE("a search within the class of the present winner leaves it for nothing") {
  auto fake = FakeCatalog::of_variants(200);
  for (const std::int64_t present : {20, 21}) {
    FakeEvaluator evaluator(valley);
    evaluator.bits = parity;
    auto options = evaluator.options();
    options.same_bits_as[fake.problem()] = {variant("f", present)};
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
    CHECK(std::abs(winner(result) - 137) <= 3);
    CHECK(winner(result) % 2 == present % 2);
    const auto& stage = result.record->stages[0];
    CHECK(stage.failed == 0);
    CHECK(stage.measured == 100);
    for (const auto& outcome : result.outcomes) {
      if (outcome.kind == OutcomeKind::measured) continue;
      CHECK(outcome.kind == OutcomeKind::other_bits);
      CHECK(outcome.reason.find("differ") != outcome.reason.npos);
      // A variant that may not win is not timed.
      CHECK(evaluator.sampled[outcome.id] == 0);
    }
  }
}

TEST_CASE(
    "a search within a class that resumes one of all variants takes no time of another class") {
  const fftune::testing::TemporaryFolder folder;
  auto fake = FakeCatalog::of_variants(200);
  const auto search = [&](bool resume, const std::map<Problem, Recipe>& same_bits_as) {
    FakeEvaluator evaluator(valley);
    evaluator.bits = parity;
    auto journal = Journal::open(folder.path(), evaluator.facts(), "fake", resume);
    auto options = evaluator.options();
    options.journal = &journal;
    options.same_bits_as = same_bits_as;
    return tune(fake.catalog(), evaluator, fake.problem(), options);
  };
  REQUIRE(winner(search(false, {})) % 2 == 1);
  const auto even = search(true, {{fake.problem(), {variant("f", 20)}}});
  CHECK(winner(even) % 2 == 0);
  for (const auto& outcome : even.outcomes)
    if (parity(outcome.id).ends_with('1')) CHECK(outcome.kind == OutcomeKind::other_bits);
}

TEST_CASE("where a fused winner has no parts to compare with, whole recipes are compared") {
  FakeCatalog fake(2);
  fake.op.add("f", {"a"}, 20);
  fake.op.add("g", {"b"}, 20);
  fake.op.add("fused", {"a", "b"}, 20);
  FakeEvaluator evaluator([](const Variant& v) {
    return (v.family == "fused" ? 500.0 : 100.0) + static_cast<double>(v.config.at("p"));
  });
  // The parts together write what the fused one does if both are odd.
  evaluator.bits = [](const std::string& id) {
    const auto odd = parity(id);
    if (id.starts_with("fused")) return std::string("00000000000000ff");
    return odd.ends_with("11") ? std::string("00000000000000ff") : odd;
  };
  auto options = evaluator.options();
  options.same_bits_as[fake.problem()] = {variant("fused", 3)};
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  REQUIRE(result.record);
  for (const auto& stage : result.record->stages)
    if (stage.variant.family != "fused") CHECK(stage.variant.config.at("p") % 2 == 1);

  // And where nothing else agrees, the present winner is what is left, however slow.
  evaluator.bits = [](const std::string& id) {
    return id == "fused/p=3" ? std::string("00000000000000ff") : parity(id);
  };
  const auto kept = tune(fake.catalog(), evaluator, fake.problem(), options);
  REQUIRE(kept.record);
  CHECK(kept.record->stages[0].variant == variant("fused", 3));
}

TEST_CASE("a present winner that fails now is no measure of anything: nothing is recorded") {
  auto fake = FakeCatalog::of_variants(20);
  FakeEvaluator evaluator(valley);
  evaluator.misbehaving["f/p=4"] = Misbehaviour::wrong;
  auto options = evaluator.options();
  options.same_bits_as[fake.problem()] = {variant("f", 4)};
  int results = 0;
  tune_all(fake.catalog(), evaluator, {fake.problem()}, options, [&](const TuneResult& result) {
    ++results;
    CHECK_FALSE(result.record);
    CHECK(result.stopped.find("the bits of the present winner cannot be told") == 0);
  });
  CHECK(results == 1);
}

TEST_CASE("with only some variants to try, no other is, and they all come to the finals") {
  FakeCatalog fake(2);
  fake.op.add("f", {"a"}, 200);
  fake.op.add("g", {"b"}, 200).fallback = true;
  FakeEvaluator evaluator(valley);
  auto options = evaluator.options();
  options.only[fake.problem()] = {variant("f", 137), variant("f", 150), variant("g", 9)};
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  CHECK(winner(result, 0) == 137);
  CHECK(winner(result, 1) == 9);
  CHECK(evaluator.compiled.size() == 3);
  // Registers that spill are a reason not to try a variant, and no reason where it is asked for.
  evaluator.misbehaving["f/p=137"] = Misbehaviour::spill;
  CHECK(winner(tune(fake.catalog(), evaluator, fake.problem(), options), 0) == 137);
  options.only[fake.problem()] = {variant("f", 137), variant("g", 1000)};
  CHECK_THROWS_AS(tune(fake.catalog(), evaluator, fake.problem(), options), Error);
}

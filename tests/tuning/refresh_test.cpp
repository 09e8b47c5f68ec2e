// Records that are stale, and what is made of them in seconds.
#include "tuning/tuner.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "fake_evaluator.hpp"
#include "fake_op.hpp"
#include "support/catch.hpp"
#include "valley.hpp"

using namespace fftune;

namespace {

struct Recorded {
  FakeCatalog fake{1};
  PresetRecord record;

  Recorded() {
    fake.op.add("f", {"a"}, 200);
    FakeEvaluator evaluator(valley);
    record = *tune(fake.catalog(), evaluator, fake.problem(), evaluator.options()).record;
  }

  TuneResult again(FakeEvaluator& evaluator) {
    auto options = evaluator.options();
    options.strategy = "exhaustive";
    options.only[fake.problem()] = refreshed_variants(record, fake.catalog(), evaluator.facts());
    return tune(fake.catalog(), evaluator, fake.problem(), options);
  }
};

using Lines = std::vector<std::string>;

}  // namespace

TEST_CASE("a record is stale by its sources, its driver and its toolkit, each by name") {
  Recorded recorded;
  FakeEvaluator evaluator(valley);
  auto facts = evaluator.facts();
  CHECK(changes_since(recorded.record, recorded.fake.catalog(), facts).empty());
  facts.driver = "2";
  facts.toolkit = "13.1";
  CHECK(changes_since(recorded.record, recorded.fake.catalog(), facts) ==
        Lines{"driver 2 instead of 1", "toolkit 13.1 instead of none"});
  recorded.fake.sources = SourceSet{{{"fake.cu", "changed"}}};
  CHECK(changes_since(recorded.record, recorded.fake.catalog(), evaluator.facts()) ==
        Lines{"other sources of f"});
  recorded.record.stages[0].variant.family = "gone";
  CHECK(changes_since(recorded.record, recorded.fake.catalog(), evaluator.facts()) ==
        Lines{"there is no family gone any more"});
}

TEST_CASE("a refresh tries what was stored and the untuned, and keeps a winner that still wins") {
  Recorded recorded;
  const auto stored = stored_variants(recorded.record);
  CHECK(stored.front() == recorded.record.stages[0].variant);
  CHECK(stored.size() ==
        1 + recorded.record.stages[0].ties.size() + recorded.record.stages[0].runners_up.size());
  FakeEvaluator evaluator(valley);
  const auto result = recorded.again(evaluator);
  REQUIRE(result.record);
  CHECK(evaluator.compiled.size() == stored.size() + 1);
  CHECK(result.record->stages[0].variant == recorded.record.stages[0].variant);
  CHECK(result.record->verdict.untuned_ratio.value() > 2);  // 237 µs, the end of the valley
  // Seconds, and not because the clock is made up: a sample takes what it says.
  CHECK(evaluator.clock < 2);
  const auto record = refreshed(*result.record, recorded.record);
  CHECK(record.stages[0].feasible == 200);
  CHECK(record.stages[0].measured == 200);
  CHECK(record.verdict.strategy == "halving");
}

TEST_CASE("a winner that has become slow, or wrong, is demoted for the best of the rest") {
  Recorded recorded;
  const auto before = recorded.record.stages[0].variant;
  FakeEvaluator slower([&](const Variant& v) { return v == before ? 130 : valley(v); });
  auto result = recorded.again(slower);
  REQUIRE(result.record);
  CHECK_FALSE(result.record->stages[0].variant == before);
  CHECK(std::abs(winner(result) - 137) <= 5);
  FakeEvaluator wrong(valley);
  wrong.misbehaving[before.id()] = Misbehaviour::wrong;
  result = recorded.again(wrong);
  REQUIRE(result.record);
  CHECK_FALSE(result.record->stages[0].variant == before);
  CHECK(refreshed(*result.record, recorded.record).stages[0].failed == 0);
}

TEST_CASE("a hand-written tie that names no variant is left out") {
  Recorded recorded;
  const auto count = stored_variants(recorded.record).size();
  recorded.record.stages[0].ties.push_back({"no=variant/at all", 1});
  recorded.record.stages[0].ties.push_back({recorded.record.stages[0].variant.id(), 1});
  CHECK(stored_variants(recorded.record).size() <= count + 1);
}

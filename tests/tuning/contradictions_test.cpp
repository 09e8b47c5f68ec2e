// Records whose times cannot all be right.
#include "tuning/decide/verdict.hpp"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "fake_evaluator.hpp"
#include "fake_op.hpp"
#include "support/catch.hpp"
#include "valley.hpp"

using namespace fftune;

namespace {

using Texts = std::vector<std::string>;

PresetRecord record_of(double whole_us, std::vector<double> stages_us) {
  PresetRecord record;
  record.verdict.median_us = whole_us;
  for (const double us : stages_us) {
    StageRecord stage;
    stage.stages = {"a"};
    stage.median_us = us;
    record.stages.push_back(stage);
  }
  return record;
}

bool doubts(const TuneResult& result, const std::string& words) {
  return std::any_of(result.notes.begin(), result.notes.end(), [&](const std::string& note) {
    return note.find("undecided: ") == 0 && note.find(words) != std::string::npos;
  });
}

}  // namespace

TEST_CASE("a winner beside a faster runner-up, and a whole beside its stages, contradict") {
  CHECK(contradictions(record_of(100, {100})).empty());
  CHECK(contradictions(record_of(105, {60, 45})).empty());
  CHECK(contradictions(record_of(90, {60, 45})).empty());
  // As they were found in records.
  auto slow_winner = record_of(71, {71});
  slow_winner.stages[0].runners_up = {{"f/p=2", 95, ""}, {"f/p=3", 28, ""}};
  REQUIRE(contradictions(slow_winner).size() == 1);
  CHECK(contradictions(slow_winner)[0] == "f/p=3 took 28 µs at a, where the winner takes 71");
  REQUIRE(contradictions(record_of(976, {494})).size() == 1);
  CHECK(contradictions(record_of(976, {494}))[0] ==
        "the whole took 976 µs, and its stages 494 together");
  CHECK(contradictions(record_of(23720, {15000.4}))[0] ==
        "the whole took 23720 µs, and its stages 15000 together");
  CHECK(contradictions(record_of(300, {100, 100})).size() == 1);
  CHECK(contradictions(record_of(40, {60, 45})).size() == 1);
  auto close = record_of(100, {100});
  close.stages[0].ties = {{"f/p=2", 99, ""}};
  CHECK(contradictions(close).empty());
}

TEST_CASE("finals that were disturbed are measured again with what was faster before") {
  auto fake = FakeCatalog::of_variants(300);
  FakeEvaluator evaluator(valley, 0.002);
  // One variant alone is slow from its second sample to its fifth: it misses the finals.
  int best = 0;
  evaluator.stretch = [&](const std::string& id) {
    if (id != "f/p=137") return 1.0;
    ++best;
    return best > 3 && best < 8 ? 3.0 : 1.0;
  };
  // From the finals on the machine is busy, but for what is measured again.
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  REQUIRE(result.record);
  CHECK(contradictions(*result.record).empty());
  CHECK(std::abs(winner(result) - 137) <= 3);
}

TEST_CASE("a machine that is busy during the finals: what was faster is not a mere runner-up") {
  auto fake = FakeCatalog::of_variants(300);
  FakeEvaluator quiet(valley, 0.002);
  const auto before = tune(fake.catalog(), quiet, fake.problem(), quiet.options());
  REQUIRE(before.record);
  const double end = quiet.clock;
  int contradicted = 0, undecided = 0;
  // Busy for a while that begins at different times of the sweep.
  for (int part = 1; part < 20; ++part) {
    FakeEvaluator evaluator(valley, 0.002);
    const double began = end * (0.75 + 0.0125 * part);
    evaluator.stretch = [&](const std::string&) {
      return evaluator.clock > began && evaluator.clock < began + 0.05 * end ? 2.5 : 1.0;
    };
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
    REQUIRE(result.record);
    const bool contradicts = !contradictions(*result.record).empty();
    contradicted += contradicts;
    undecided += result.record->verdict.decided == false;
    if (contradicts) CHECK(result.record->verdict.decided == false);
  }
  // It ends, and what was measured meanwhile is measured again.
  CHECK(contradicted == 0);
}

TEST_CASE("a winner that its runners-up contradict is chosen again") {
  auto fake = FakeCatalog::of_variants(300);
  FakeEvaluator quiet(valley, 0.002);
  const auto before = tune(fake.catalog(), quiet, fake.problem(), quiet.options());
  REQUIRE(before.record);
  const std::string fastest = before.record->stages[0].variant.id();
  // From some sample on, the variant that would win takes three times as long, and does not end to.
  for (int last = 8; last < 40; ++last) {
    FakeEvaluator evaluator(valley, 0.002);
    int samples = 0;
    evaluator.stretch = [&](const std::string& id) {
      return id == fastest && ++samples > last ? 3.0 : 1.0;
    };
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
    REQUIRE(result.record);
    INFO(last << " samples, then it is slow; it had " << samples);
    CHECK(contradictions(*result.record).empty());
    if (samples > last + 40) CHECK(result.record->stages[0].variant.id() != fastest);
    std::set<std::string> ids;
    for (const auto& outcome : result.outcomes) CHECK(ids.insert(outcome.id).second);
  }
}

TEST_CASE("a record that is not decided says why, by what it holds") {
  FakeCatalog fake(2);
  const auto why = [&](const PresetRecord& record, DeviceKind kind = DeviceKind::cuda) {
    return doubts(record, fake.catalog(), kind);
  };
  PresetRecord record = record_of(100, {60, 40});
  CHECK(why(record).empty());  // a version that does not say
  record.verdict.decided = true;
  CHECK(why(record).empty());

  record.verdict.decided = false;
  record.verdict.complete = false;
  record.stages[0].measured = 5, record.stages[0].failed = 1, record.stages[0].feasible = 90;
  record.stages[1].measured = record.stages[1].feasible = 4;  // all there are
  CHECK(why(record) == Texts{"only 6 of 90 variants of a were tried"});
  record.stages[0].measured = 7;
  CHECK(why(record) == Texts{"the search ended before all variants could be told apart"});
  record.verdict.complete = true;
  CHECK(why(record) == Texts{"some variants cannot be told from the fastest"});
  record.verdict.noise = 0.04;
  CHECK(why(record, DeviceKind::cpu) ==
        Texts{"the noise floor of 4.0% is above the tie band of 2.0%"});
  record.verdict.median_us = 300;
  CHECK(why(record) == Texts{"the whole took 300 µs, and its stages 100 together"});
}

TEST_CASE("a whole that stays slower than its stages is not decided, and the record says why") {
  FakeCatalog fake(2);
  fake.op.add("f", {"a"}, 20);
  fake.op.add("g", {"b"}, 20);
  FakeEvaluator evaluator([](const Variant&) { return 100.0; }, 0.002);
  evaluator.whole_us = [](const Recipe&) { return 976.0; };
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  REQUIRE(result.record);
  CHECK(result.record->verdict.decided == false);
  CHECK(doubts(result, "the whole took"));
  FakeEvaluator sound([](const Variant&) { return 100.0; }, 0.002);
  const auto fine = tune(fake.catalog(), sound, fake.problem(), sound.options());
  CHECK(fine.record->verdict.decided == true);
}

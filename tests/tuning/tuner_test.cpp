#include "tuning/tuner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <set>

#include "core/error.hpp"
#include "fake_evaluator.hpp"
#include "fake_op.hpp"
#include "near.hpp"
#include "support/catch.hpp"
#include "tuning/strategies/search.hpp"
#include "valley.hpp"

using namespace fftune;

TEST_CASE("every strategy that tries all finds the best within the tie band, for ten seeds") {
  auto fake = FakeCatalog::of_variants(300);
  for (const std::string strategy : {"halving", "exhaustive"})
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      FakeEvaluator evaluator(valley, 0.02, seed);
      auto options = evaluator.options();
      options.strategy = strategy;
      options.seed = seed;
      options.budget_seconds = 1000;
      const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
      INFO(strategy << " seed " << seed);
      // Half-normal noise of 2% shifts all medians alike; 2% of 100 µs is p=137±2, and the
      // medians' own error a little more.
      CHECK(std::abs(winner(result) - 137) <= 4);
      CHECK(result.stopped.empty());
      CHECK(result.record->verdict.complete);
      CHECK(result.record->verdict.strategy == strategy);
    }
}

TEST_CASE("equal variants give the same answer for ten seeds of search and noise") {
  auto fake = FakeCatalog::of_variants(100);
  // Five variants within half a percent, the rest a tenth slower and more: the fewest registers
  // win.
  const auto truth = [](const Variant& variant) {
    const auto p = variant.config.at("p");
    return p % 20 == 3 ? 100 + static_cast<double>(p) * 0.005 : 112 + static_cast<double>(p);
  };
  std::set<std::int64_t> winners;
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    FakeEvaluator evaluator(truth, 0.005, seed);
    evaluator.registers = [](const std::string& id) { return id == "f/p=63" ? 40 : 64; };
    auto options = evaluator.options();
    options.seed = seed;
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
    winners.insert(winner(result));
    CHECK(result.record->stages[0].ties.size() == 4);
    CHECK(result.record->stages[0].runners_up.size() == 3);
  }
  CHECK(winners == std::set<std::int64_t>{63});
}

TEST_CASE("halving spends little on what is slow") {
  auto fake = FakeCatalog::of_variants(200);
  FakeEvaluator evaluator(
      [](const Variant& v) { return 100.0 * static_cast<double>(v.config.at("p") + 1); });
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  CHECK(winner(result) == 0);
  int total = 0;
  for (const auto& [id, count] : evaluator.sampled) total += count;
  // The default is the best, so each of the others is abandoned at its second sample.
  for (int p = 2; p < 200; ++p) CHECK(evaluator.sampled["f/p=" + std::to_string(p)] == 2);
  CHECK(total < 550);
}

TEST_CASE("a search that has little time for compiling screens what it compiled") {
  auto fake = FakeCatalog::of_variants(400);
  for (const std::string strategy : {"halving", "guided", "exhaustive"}) {
    FakeEvaluator evaluator(valley);
    evaluator.compile_seconds = 0.05;
    auto options = evaluator.options();
    options.strategy = strategy;
    options.budget_seconds = 5;
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
    INFO(strategy << ": " << evaluator.compiled.size() << " compiled");
    CHECK(result.record->stages[0].measured >= 20);
    // guided compiles ahead of what it tries.
    const int part = strategy == "guided" ? 3 : 2;
    CHECK(part * result.record->stages[0].measured >= static_cast<int>(evaluator.compiled.size()));
  }
}

TEST_CASE("random tries a quarter and answers with the best of it") {
  auto fake = FakeCatalog::of_variants(200);
  FakeEvaluator evaluator(valley);
  auto options = evaluator.options();
  options.strategy = "random";
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  // The variants with the largest expected gain, which every search begins with, are added.
  CHECK(result.record->stages[0].measured >= 50);
  CHECK(result.record->stages[0].measured <= 54);
  CHECK(result.record->stages[0].feasible == 200);
  CHECK(result.record->verdict.complete);
  CHECK(std::abs(winner(result) - 137) < 40);
}

TEST_CASE("a few spilled words are no reason not to time a kernel, and many are") {
  auto fake = FakeCatalog::of_variants(200);
  FakeEvaluator evaluator(valley);
  auto options = evaluator.options();
  options.strategy = "exhaustive";
  for (const auto& [spill, failed] :
       {std::pair(Misbehaviour::spill_little, 0), std::pair(Misbehaviour::spill, 1)}) {
    evaluator.misbehaving["f/p=137"] = spill;
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
    CHECK(result.record->stages[0].failed == failed);
    CHECK(result.record->stages[0].measured == 200 - failed);
  }
}

TEST_CASE("misbehaviour is an outcome with its cause, and the best of the rest wins") {
  auto fake = FakeCatalog::of_variants(200);
  for (const std::string strategy : {"halving", "exhaustive", "random"}) {
    FakeEvaluator evaluator(valley);
    const std::map<Misbehaviour, OutcomeKind> kinds{
        {Misbehaviour::compile, OutcomeKind::compile_failed},
        {Misbehaviour::spill, OutcomeKind::spilled},
        {Misbehaviour::wrong, OutcomeKind::verify_failed},
        {Misbehaviour::launch, OutcomeKind::launch_failed},
        {Misbehaviour::fault, OutcomeKind::device_fault}};
    // The 50 around the best, with the best and the default among them, fail in each way by
    // rotation.
    int next = 0;
    for (int p = 112; p < 162; ++p) {
      auto kind = kinds.begin();
      std::advance(kind, next++ % 5);
      evaluator.misbehaving["f/p=" + std::to_string(p)] = kind->first;
    }
    evaluator.misbehaving["f/p=0"] = Misbehaviour::fault;
    auto options = evaluator.options();
    options.strategy = strategy;
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
    INFO(strategy);
    if (strategy != "random") {
      CHECK(std::abs(winner(result) - 137) <= 27);
      CHECK(result.record->stages[0].failed == 51);
      CHECK(result.record->stages[0].measured == 149);
    }
    CHECK_FALSE(evaluator.misbehaving.contains(result.record->stages[0].variant.id()));
    for (const auto& outcome : result.outcomes) {
      const auto found = evaluator.misbehaving.find(outcome.id);
      if (found == evaluator.misbehaving.end() || outcome.kind == OutcomeKind::not_tried) {
        CHECK_FALSE(outcome.failed());
        continue;
      }
      CHECK(outcome.kind == kinds.at(found->second));
      CHECK_FALSE(outcome.reason.empty());
      // Nothing is timed before it is verified.
      if (found->second != Misbehaviour::launch) CHECK(evaluator.sampled[outcome.id] == 0);
    }
  }
}

TEST_CASE("when everything fails there is no record, and the outcomes say why") {
  auto fake = FakeCatalog::of_variants(5);
  FakeEvaluator evaluator(valley);
  for (int p = 0; p < 5; ++p)
    evaluator.misbehaving["f/p=" + std::to_string(p)] = Misbehaviour::wrong;
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  CHECK_FALSE(result.record);
  for (const auto& outcome : result.outcomes) CHECK(outcome.kind == OutcomeKind::verify_failed);
}

TEST_CASE("a search whose processes were killed until its time was up blames no want of time") {
  auto fake = FakeCatalog::of_variants(40);
  FakeEvaluator evaluator([](const Variant&) { return 100.0; });
  for (int p = 0; p < 40; ++p)
    evaluator.misbehaving[fmt::format("f/p={}", p)] = Misbehaviour::killed;
  auto options = evaluator.options(6.5);
  const auto result = tune(fake.catalog(), evaluator, fake.problem(1), options);
  CHECK_FALSE(result.record);
  CHECK(result.stopped.find("processes of ") == 4);
  CHECK(result.stopped.find("as happens when memory runs out; then the budget of 6.5 s") !=
        std::string::npos);
  CHECK(std::any_of(result.notes.begin(), result.notes.end(), [](const std::string& note) {
    return note.find(" variants of a were not measured") != std::string::npos;
  }));
}

TEST_CASE("a lost device ends the search with what is known") {
  FakeCatalog fake(2);
  fake.op.add("f", {"a"}, 50);
  fake.op.add("g", {"b"}, 50);
  FakeEvaluator evaluator(valley);
  evaluator.misbehaving["f/p=20"] = Misbehaviour::lose_device;
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  CHECK(result.device_lost);
  CHECK(result.stopped == "the device is lost: illegal address");
  CHECK_FALSE(result.record);
  CHECK(result.outcomes.size() == 100);
}

TEST_CASE("the budget is kept, and the record says that the search is not complete") {
  FakeCatalog fake(2);
  fake.op.add("f", {"a"}, 1000);
  fake.op.add("g", {"b"}, 500);
  for (const std::string strategy : {"halving", "exhaustive", "random"})
    for (const double budget : {0.05, 1.0, 5.0}) {
      FakeEvaluator evaluator(valley, 0.01);
      evaluator.compile_seconds = 0.02;
      auto options = evaluator.options();
      options.strategy = strategy;
      options.budget_seconds = budget;
      const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
      INFO(strategy << " " << budget);
      REQUIRE(result.record);
      CHECK(result.record->stages.size() == 2);
      CHECK_FALSE(result.record->verdict.complete);
      CHECK_FALSE(result.stopped.empty());
      // A tenth over, and what one candidate and the shortest verdict take.
      CHECK(evaluator.clock < budget * 1.1 + 0.5);
    }
}

TEST_CASE("a group whose share is short still tries what promises most") {
  FakeCatalog fake(2);
  // The first has a fifteenth of the time, in which four variants are compiled.
  fake.op.add("f", {"a"}, 60).default_value = 30;
  fake.op.add("g", {"b"}, 1000).default_value = 500;
  FakeEvaluator evaluator(valley);
  evaluator.compile_seconds = 0.1;
  const auto options = evaluator.options(8, "guided");
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  REQUIRE(result.record);
  CHECK(evaluator.clock < 8 * 1.1 + 0.5);
  CHECK_FALSE(result.record->verdict.complete);
  for (const auto& stage : result.record->stages) CHECK(stage.measured >= 5);
}

TEST_CASE("a search that hardly began says so, and decides nothing") {
  auto fake = FakeCatalog::of_variants(500);
  FakeEvaluator evaluator(valley);
  evaluator.compile_seconds = 0.3;
  const auto options = evaluator.options(0.7, "guided");
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  REQUIRE(result.record);
  CHECK_FALSE(result.record->verdict.complete);
  CHECK(result.record->verdict.decided == false);
  CHECK(std::any_of(result.notes.begin(), result.notes.end(), [](const std::string& note) {
    return note.find("undecided: only ") == 0 && note.find(" of 500 variants of a") != note.npos;
  }));
}

TEST_CASE("a search on a GPU compiles as many at first as decide about each of four groups") {
  for (const int groups : {1, 4})
    for (const auto kind : {DeviceKind::cpu, DeviceKind::cuda}) {
      CAPTURE(groups, kind == DeviceKind::cuda);
      FakeCatalog fake(groups);
      for (const char* stage : {"a", "b", "c", "d"})
        if (stage[0] < 'a' + groups) fake.op.add(stage, {stage}, 500).kind = kind;
      FakeEvaluator evaluator(valley);
      evaluator.set_kind(kind);
      evaluator.compile_seconds = 1;
      const auto result =
          tune(fake.catalog(), evaluator, fake.problem(), evaluator.options(12 * groups, "guided"));
      REQUIRE(result.record);
      const auto each = evaluator.compiled.size() / static_cast<std::size_t>(groups);
      CHECK(each >= (kind == DeviceKind::cuda ? 8 : 5));
      CHECK(std::any_of(result.notes.begin(), result.notes.end(), [](const std::string& note) {
              return note.find("undecided: only ") == 0;
            }) == (kind == DeviceKind::cpu));
    }
}

TEST_CASE(
    "a search whose time ended with only a family's default tried says so, and decides nothing") {
  const auto search = [](double budget, bool fallback, double late_us = 0) {
    FakeCatalog fake(1);
    fake.op.add("early", {"a"}, 300).kind = DeviceKind::cuda;
    FakeFamily& late = fake.op.add("late", {"a"}, 3);
    late.kind = DeviceKind::cuda;
    late.fallback = fallback;
    FakeEvaluator evaluator([&](const Variant& variant) {
      return valley(variant) + (variant.family == "late" ? late_us : 0);
    });
    evaluator.set_kind(DeviceKind::cuda);
    evaluator.compile_seconds = 0.1;
    auto options = evaluator.options();
    options.strategy = "halving";
    options.budget_seconds = budget;
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
    REQUIRE(result.record);
    const auto tried =
        std::count_if(result.outcomes.begin(), result.outcomes.end(), [](const Outcome& outcome) {
          return outcome.id.find("late/") == 0 && outcome.kind != OutcomeKind::not_tried;
        });
    const bool said =
        std::any_of(result.notes.begin(), result.notes.end(), [](const std::string& note) {
          return note.find("undecided: only the default of late was tried before") == 0;
        });
    if (said) CHECK(result.record->verdict.decided == false);
    return std::pair(tried > 1, said);
  };
  bool said_once = false;
  for (const double budget : {0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 3.0, 6.0}) {
    const auto [tried, said] = search(budget, false, -100);
    CHECK_FALSE((tried && said));
    said_once |= said;
    CHECK_FALSE(search(budget, true).second);  // a fallback is never the fastest
    CHECK_FALSE(search(budget, false, 300).second);
  }
  CHECK(said_once);
  CHECK(search(600, false, -100) == std::pair(true, false));
}

namespace {

/// How many variants of each family were tried, where the families' times are valleys that begin at
/// these: one of stage a, one of b, and one of both.
std::map<std::string, int> tried_of(double a_us, double b_us, double both_us) {
  FakeCatalog fake(2);
  fake.op.add("small", {"a"}, 400);
  fake.op.add("large", {"b"}, 400);
  fake.op.add("both", {"a", "b"}, 400);
  FakeEvaluator evaluator([&](const Variant& variant) {
    const double least = variant.family == "small"   ? a_us
                         : variant.family == "large" ? b_us
                                                     : both_us;
    return valley(variant) / 100 * least;
  });
  const auto result =
      tune(fake.catalog(), evaluator, fake.problem(), evaluator.options(600, "guided"));
  REQUIRE(result.record);
  std::map<std::string, int> tried;
  for (const Outcome& outcome : result.outcomes)
    if (const auto slash = outcome.id.find('/'); outcome.id.find('+') == outcome.id.npos)
      tried[outcome.id.substr(0, slash)] += outcome.kind != OutcomeKind::not_tried;
  return tried;
}

}  // namespace

TEST_CASE("a stage that takes little of the whole, or is far behind, is not searched in depth") {
  auto even = tried_of(100, 100, 200), uneven = tried_of(1, 199, 200),
       behind = tried_of(100, 100, 600);
  CAPTURE(even, uneven, behind);
  CHECK(uneven["small"] < even["small"]);
  CHECK(uneven["large"] >= even["large"]);
  CHECK(behind["both"] < even["both"]);
  CHECK(uneven["small"] >= least_tried);
  CHECK(behind["both"] >= least_tried);
}

TEST_CASE("a default that spills is timed: it is what runs without a record") {
  auto fake = FakeCatalog::of_variants(20);
  FakeEvaluator evaluator(valley);
  evaluator.misbehaving["f/p=0"] = evaluator.misbehaving["f/p=1"] = Misbehaviour::spill;
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  REQUIRE(result.record);
  const auto kind_of = [&](const std::string& id) {
    return std::find_if(result.outcomes.begin(), result.outcomes.end(),
                        [&](const Outcome& outcome) { return outcome.id == id; })
        ->kind;
  };
  CHECK(kind_of("f/p=0") == OutcomeKind::measured);
  CHECK(kind_of("f/p=1") == OutcomeKind::spilled);
  CHECK(result.record->verdict.untuned_ratio.value() > 1.05);
}

TEST_CASE("an interrupted search too states what tuning gained") {
  for (const int after : {60, 150, 260}) {
    auto fake = FakeCatalog::of_variants(100);
    FakeEvaluator evaluator(valley);
    std::atomic<bool> cancel{false};
    evaluator.cancel = &cancel;
    evaluator.cancel_after = after;
    auto options = evaluator.options();
    options.cancel = &cancel;
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
    CAPTURE(after);
    CHECK(result.cancelled);
    REQUIRE(result.record);
    CHECK_FALSE(result.record->verdict.complete);
    CHECK(result.record->verdict.untuned_ratio);
  }
}

TEST_CASE("every family is tried twice before any group is searched in depth") {
  FakeCatalog fake(1);
  fake.op.add("early", {"a"}, 300);
  fake.op.add("late", {"a"}, 300);
  fake.op.add("last", {"a"}, 1);
  std::vector<std::string> order;
  FakeEvaluator evaluator([&](const Variant& variant) {
    if (std::find(order.begin(), order.end(), variant.id()) == order.end())
      order.push_back(variant.id());
    return valley(variant);
  });
  REQUIRE(tune(fake.catalog(), evaluator, fake.problem(), evaluator.options()).record);
  REQUIRE(order.size() > 8);
  // The defaults, four of the lowest predicted time, and the second of this family.
  CHECK(std::count_if(order.begin(), order.begin() + 8,
                      [](const std::string& id) { return id.find("late/") == 0; }) == 2);
}

TEST_CASE(
    "the limit of a whole counts its inputs and outputs, not what one stage leaves the next") {
  FakeCatalog fake(2);
  fake.op.add("f", {"a"}, 3);
  fake.op.add("g", {"b"}, 3);
  FakeEvaluator evaluator([](const Variant&) { return 100.0; });
  evaluator.ceilings = {1e8, 1e12};
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
  REQUIRE(result.record);
  const Verdict& verdict = result.record->verdict;
  CHECK(verdict.limit == "memory");
  // x and y have 800 bytes; the stages by themselves move 2000.
  CHECK(verdict.roofline_fraction * verdict.median_us == Approx(8));
}

TEST_CASE("a time below the floor has a note with the reason") {
  auto fake = FakeCatalog::of_variants(20);
  const auto note = [&](std::size_t cache) {
    FakeEvaluator evaluator([](const Variant&) { return 1.0; });
    evaluator.ceilings = {1e6, 1e15};  // 800 bytes take 800 µs
    evaluator.set_cache(cache);
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), evaluator.options());
    REQUIRE(result.record);
    CHECK(result.record->verdict.roofline_fraction > 1.05);
    std::string found;
    for (const auto& text : result.notes)
      if (text.find("faster than ") == 0) found += text;
    return found;
  };
  CHECK(note(std::size_t{1} << 20).find("stay in the cache (1 MiB)") != std::string::npos);
  CHECK(note(8).find("measure again on a quiet machine") != std::string::npos);
}

TEST_CASE(
    "preparation does not count as search time, unless the user gave a budget for all of it") {
  auto fake = FakeCatalog::of_variants(300);
  const auto tried = [&](double preparing, double budget) {
    FakeEvaluator evaluator(valley);
    evaluator.begin_seconds = preparing;
    evaluator.compile_seconds = 0.01;
    auto options = evaluator.options();
    options.budget_seconds = budget;
    int measured = 0;
    tune_all(fake.catalog(), evaluator, {fake.problem(), fake.problem().with_size("m", 2)}, options,
             [&](const TuneResult& result) {
               REQUIRE(result.record);
               measured = result.record->stages[0].measured;
             });
    return measured;  // for the last
  };
  CHECK(tried(300, 0) == tried(0.01, 0));
  CHECK(tried(10, 12) < tried(0.01, 12));
}

TEST_CASE("long variants under a budget still come to the finals") {
  auto fake = FakeCatalog::of_variants(40);
  // 0.15 s a pass, all within the screening band: forty in turn would take six seconds.
  FakeEvaluator evaluator(
      [](const Variant& v) { return 1.5e5 + 500 * static_cast<double>(v.config.at("p")); }, 0.02);
  auto options = evaluator.options(30);
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  REQUIRE(result.record);
  CHECK(evaluator.clock < 31);
  CHECK(result.record->verdict.noise > 0);
  int finalists = 0;
  for (const auto& outcome : result.outcomes)
    if (outcome.finalist) {
      ++finalists;
      CHECK(outcome.samples >= 4);
    }
  CHECK(finalists >= 3);
}

TEST_CASE("a limit of variants is kept and the decision is still made") {
  auto fake = FakeCatalog::of_variants(300);
  FakeEvaluator evaluator(valley);
  auto options = evaluator.options();
  options.max_variants = 20;
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  CHECK(result.record->stages[0].measured == 20);
  CHECK(result.stopped == "20 variants of a were tried, as asked");
  CHECK_FALSE(result.record->verdict.complete);
}

TEST_CASE("an interruption at any moment returns what is known, and soon") {
  FakeCatalog fake(2);
  fake.op.add("f", {"a"}, 60);
  fake.op.add("g", {"b"}, 60);
  int uninterrupted = 0;
  for (int after = 1; after < 2000; after += 97) {
    std::atomic<bool> cancel{false};
    FakeEvaluator evaluator(valley);
    evaluator.cancel = &cancel;
    evaluator.cancel_after = after;
    auto options = evaluator.options();
    options.cancel = &cancel;
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
    INFO("after " << after);
    if (!cancel) {
      ++uninterrupted;
      CHECK(result.stopped.empty());
      continue;
    }
    CHECK(result.cancelled);
    CHECK(result.stopped == "interrupted");
    // No further variant is begun: what is verified is the whole recipe.
    CHECK(evaluator.verified_after_cancel <= 1);
    // Three samples of the first default, three of the second: from then on there is a cover.
    if (after > 6) {
      REQUIRE(result.record);
      CHECK_FALSE(result.record->verdict.complete);
      CHECK(result.record->verdict.median_us > 0);
    }
  }
  CHECK(uninterrupted > 0);
}

TEST_CASE("a search that is ended at once keeps the winner on record") {
  FakeCatalog fake(1);
  fake.op.add("f", {"a"}, 100).default_value = 3;
  FakeEvaluator evaluator(
      [](const Variant& v) { return 100 + std::abs(static_cast<double>(v.config.at("p")) - 77); });
  std::atomic<bool> cancel{false};
  evaluator.cancel = &cancel;
  evaluator.cancel_after = 1;
  auto options = evaluator.options();
  options.cancel = &cancel;
  options.on_record[fake.problem()] = {{{"f", {{"p", 77}}}}};
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  CHECK(result.cancelled);
  REQUIRE(result.record);
  CHECK(result.record->stages[0].variant.id() == "f/p=77");
}

TEST_CASE("the record is filled") {
  FakeCatalog fake(2);
  fake.op.add("f", {"a"}, 30);
  fake.op.add("g", {"b"}, 30);
  FakeEvaluator evaluator(valley, 0.01);
  auto options = evaluator.options();
  options.seed = 9;
  const auto result = tune(fake.catalog(), evaluator, fake.problem(10), options);
  REQUIRE(result.record);
  const auto& record = *result.record;
  CHECK(record.problem == fake.problem(10));
  const auto& verdict = record.verdict;
  CHECK(verdict.interval_low_us <= verdict.median_us);
  CHECK(verdict.median_us <= verdict.interval_high_us);
  CHECK(verdict.noise > 0);
  CHECK(verdict.noise < 0.1);
  // 2 stages of 1e6·10 flops at 1e12 flops/s: 20 µs; 8000 bytes at 1e9 bytes/s: 8 µs.
  CHECK(verdict.limit == "compute");
  CHECK(verdict.roofline_fraction == near(20 / verdict.median_us));
  CHECK(verdict.unfused_ratio == near(1000 / verdict.median_us, 0.05));
  REQUIRE(result.baselines.size() == 1);
  CHECK(result.baselines[0].id == "unfused");
  CHECK(verdict.untuned_ratio.value() > 1.1);  // the default is at the end of the valley
  CHECK(record.error == 1e-4);
  CHECK(record.tolerance == 1e-3);
  CHECK(record.provenance.device == "Fake Device");
  CHECK(record.provenance.seed == 9);
  CHECK(record.provenance.date.size() == 20);
  for (const auto& stage : record.stages) {
    CHECK(stage.feasible == 30);
    CHECK(stage.measured == 30);
    CHECK(stage.failed == 0);
    CHECK(stage.source_hash == fake.sources.hash({"fake.cu"}));
    CHECK(stage.median_us > 0);
  }
}

TEST_CASE("a refused problem and an unknown strategy are errors") {
  auto fake = FakeCatalog::of_variants(3);
  FakeEvaluator evaluator(valley);
  auto options = evaluator.options();
  options.strategy = "none";
  CHECK_THROWS_AS(tune(fake.catalog(), evaluator, fake.problem(), options), Error);
  options.strategy = "halving";
  evaluator.refusal = "needs 100 bytes, 10 are free";
  CHECK_THROWS_AS(tune(fake.catalog(), evaluator, fake.problem(), options), Error);
}

TEST_CASE("progress goes forward and ends with the result") {
  struct Sink : ProgressSink {
    void update(const Progress& progress) override { all.push_back(progress); }
    std::vector<Progress> all;
  } sink;
  auto fake = FakeCatalog::of_variants(300);
  FakeEvaluator evaluator(valley);
  auto options = evaluator.options();
  options.progress = &sink;
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  int screened = 0;
  double seconds = 0;
  for (const auto& progress : sink.all) {
    CHECK(progress.done <= progress.total);
    CHECK(progress.seconds >= seconds);
    CHECK(progress.seconds_left >= 0);
    seconds = progress.seconds;
    if (progress.phase != Phase::screen) continue;
    CHECK(progress.done >= screened);
    screened = progress.done;
  }
  CHECK(screened == 300);
  CHECK(sink.all.front().phase == Phase::setup);
  CHECK(sink.all.back().phase == Phase::done);
  CHECK(sink.all.back().best_us == result.record->verdict.median_us);
  CHECK(sink.all.back().compiled == 300);
}

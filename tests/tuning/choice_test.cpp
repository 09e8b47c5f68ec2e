// Small parts that choosing is made of: stop rules, order, decisions, combinations.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <set>

#include "core/error.hpp"
#include "measure/statistics.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "tuning/decide/end_to_end.hpp"
#include "tuning/journal/outcome.hpp"
#include "tuning/search/options.hpp"
#include "tuning/strategies/strategy.hpp"

using namespace fftune;

TEST_CASE("stop rules compose, the first with a reason speaks") {
  std::atomic<bool> cancel{false};
  const auto rule =
      any_of({stop_when(cancel, "interrupted"), stop_after_seconds(10), stop_after_variants(5)});
  CHECK(rule({9.9, 4}).empty());
  CHECK(rule({10, 4}) == "the budget of 10 s is spent");
  CHECK(stop_after_seconds(0.5, 60)({0.6, 0}) == "its part of the budget, 0.5 of 60 s, is spent");
  CHECK(rule({1, 5}) == "5 variants were tried");
  cancel = true;
  CHECK(rule({10, 5}) == "interrupted");
  CHECK(any_of({})({1e9, 1000000}).empty());
}

TEST_CASE("an order is a permutation that keeps its head and depends on the seed alone") {
  for (const std::size_t count : {0u, 1u, 2u, 3u, 50u})
    for (std::size_t fixed = 0; fixed <= count; fixed += 1 + count / 3) {
      auto order = shuffled(count, fixed, 7);
      CHECK(order == shuffled(count, fixed, 7));
      for (std::size_t i = 0; i < fixed; ++i) CHECK(order[i] == i);
      std::sort(order.begin(), order.end());
      std::vector<std::size_t> all(count);
      std::iota(all.begin(), all.end(), std::size_t{0});
      CHECK(order == all);
    }
  CHECK(shuffled(50, 1, 1) != shuffled(50, 1, 2));
}

TEST_CASE("half of an order goes by the estimates, half is from anywhere, and each comes once") {
  for (const std::size_t count : {0u, 1u, 2u, 3u, 50u})
    for (std::size_t fixed = 0; fixed <= count; fixed += 1 + count / 3) {
      std::vector<double> estimates;
      for (std::size_t i = 0; i < count; ++i) estimates.push_back(static_cast<double>(count - i));
      auto order = half_by_prediction(estimates, fixed, 7);
      for (std::size_t i = 0; i < fixed; ++i) CHECK(order[i] == i);
      // The last has the least estimate.
      if (fixed < count) CHECK(order[fixed] == count - 1);
      const std::set<std::size_t> tenth(order.begin(),
                                        order.begin() + static_cast<std::ptrdiff_t>(count / 5));
      for (std::size_t i = 0; fixed == 0 && i < count / 10; ++i)
        CHECK(tenth.contains(count - 1 - i));
      std::sort(order.begin(), order.end());
      std::vector<std::size_t> all(count);
      std::iota(all.begin(), all.end(), std::size_t{0});
      CHECK(order == all);
    }
}

TEST_CASE("ties are broken by registers, then by id; the rest goes by time") {
  const std::vector<Finalist> all{
      {"d", 100, 64}, {"b", 101.9, 40}, {"a", 102.1, 32}, {"c", 101, 40}, {"e", 103, 8}};
  const auto order = by_preference(all, 0.02);
  CHECK(order == std::vector<std::size_t>{1, 3, 0, 2, 4});
  CHECK(tied(all, 0.02).size() == 3);
  CHECK(by_preference({}, 0.02).empty());
}

TEST_CASE("combinations cover every stage once, cheapest sum first") {
  const std::vector<GroupChoices> groups{{{0, 1}, {{0, 0, 10}, {0, 1, 11}}},
                                         {{1, 1}, {{1, 0, 20}}},
                                         {{0, 2}, {{2, 0, 30.5}}},
                                         {{1, 2}, {{3, 0, 1}}}};  // reaches beyond the end of two
  const auto all = combine({groups.begin(), groups.begin() + 3}, 2, 1.5, 10);
  REQUIRE(all.size() == 3);
  CHECK(all[0].sum_us == 30);
  CHECK(all[0].parts.size() == 2);
  CHECK(all[1].parts.size() == 1);
  CHECK(all[1].sum_us == 30.5);
  CHECK(all[2].sum_us == 31);
  CHECK(combine(groups, 3, 1.5, 10).size() == 2);  // 0 then 1-2, by either choice
  CHECK(combine({groups.begin(), groups.begin() + 3}, 2, 1.01, 10).size() == 1);
  CHECK(combine({groups.begin(), groups.begin() + 3}, 2, 1.5, 2).size() == 2);
  CHECK(combine({groups.begin(), groups.begin() + 1}, 2, 1.5, 2).empty());
}

TEST_CASE("kinds of outcomes have names both ways") {
  for (const auto kind :
       {OutcomeKind::measured, OutcomeKind::compile_failed, OutcomeKind::spilled,
        OutcomeKind::verify_failed, OutcomeKind::launch_failed, OutcomeKind::device_fault,
        OutcomeKind::other_bits, OutcomeKind::not_tried})
    CHECK(parse_outcome_kind(outcome_kind_name(kind)) == kind);
  CHECK_THROWS_AS(parse_outcome_kind("good"), Error);
}

TEST_CASE("strategies are found by name, and an unknown name lists them") {
  std::set<std::string_view> names;
  for (const auto* strategy : strategies()) {
    CHECK(&strategy_named(strategy->name()) == strategy);
    CHECK_FALSE(strategy->summary().empty());
    names.insert(strategy->name());
  }
  CHECK(names == std::set<std::string_view>{"exhaustive", "guided", "halving", "random"});
  CHECK(strategies().front()->name() == "halving");
  CHECK(test::error_of(ErrorKind::invalid_input, [] { strategy_named("best"); }) ==
        "unknown strategy 'best': use halving, guided, exhaustive, random");
}

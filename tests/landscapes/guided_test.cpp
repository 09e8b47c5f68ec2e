// Results of each strategy on landscapes that were recorded on an H200, and the number of variants
// that it tried.
#include <algorithm>
#include <iostream>
#include <map>
#include <string>

#include "landscapes/landscape.hpp"
#include "support/catch.hpp"
#include "tuning/strategies/strategy.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

struct Found {
  double us = 0;
  std::vector<std::size_t> tried;
  std::vector<Statement> statements;
};

Found search(const Landscape& landscape, const std::string& strategy, std::uint64_t seed) {
  const auto facts = h200();
  RecordedSearch search(landscape, facts, seed);
  Found found;
  found.us = std::numeric_limits<double>::infinity();
  const auto finalists = strategy_named(strategy).run(search);
  const auto chosen = *std::min_element(
      finalists.begin(), finalists.end(),
      [&](std::size_t a, std::size_t b) { return search.median_us(a) < search.median_us(b); });
  found.us = landscape.us[chosen];
  found.tried = search.tried();
  found.statements = search.statements();
  return found;
}

}  // namespace

TEST_CASE("guided is within 1% of the best after 15% of what there is, on every landscape") {
  // By problem: its stages are searched apart, and their variants are one space.
  std::map<std::string, std::pair<std::size_t, std::size_t>> spent;
  const auto all = recorded_landscapes();
  const std::uint64_t seed = GENERATE(0, 1, 2);
  for (const auto& landscape : all) {
    const auto found = search(landscape, "guided", seed);
    INFO(landscape.problem.text() << ": " << landscape.stages << ", seed " << seed);
    CHECK(found.us <= 1.01 * landscape.best());
    auto& [tried, there] = spent[landscape.problem.text()];
    tried += found.tried.size();
    there += landscape.variants.size();
  }
  CHECK(spent.size() >= 6);
  for (const auto& [problem, counts] : spent) {
    INFO(problem << ", seed " << seed << ": " << counts.first << " of " << counts.second);
    CHECK(static_cast<double>(counts.first) <= 0.15 * static_cast<double>(counts.second));
  }
}

TEST_CASE("the remaining gain that guided states is seldom too small, at its end or before") {
  std::size_t ends = 0, ends_kept = 0, all = 0, all_kept = 0;
  std::vector<double> said;
  for (const auto& landscape : recorded_landscapes())
    for (const std::uint64_t seed : {0, 1, 2, 3, 4, 5}) {
      const auto found = search(landscape, "guided", seed);
      REQUIRE_FALSE(found.statements.empty());
      const auto& last = found.statements.back();
      ++ends;
      ends_kept += last.left <= last.said;
      said.push_back(last.said);
      // Each of them is what would be said of a search that is cut there.
      for (const auto& statement : found.statements) {
        ++all;
        all_kept += statement.left <= statement.said;
      }
    }
  INFO(ends_kept << " of " << ends << " at the end, " << all_kept << " of " << all << " of all");
  CHECK(static_cast<double>(ends_kept) >= 0.97 * static_cast<double>(ends));
  CHECK(static_cast<double>(all_kept) >= 0.9 * static_cast<double>(all));
  // And it says something: a bound of anything would be kept too.
  std::sort(said.begin(), said.end());
  CHECK(said[said.size() / 2] < 0.05);
}

// Output for bench/strategies.py: strategy, problem, stages, seed, variants there, tried, and the
// time of the choice as a multiple of the best. Pairs of the stated and the real remaining gain
// follow, then the best so far after each variant that was tried.
TEST_CASE("the course of every strategy on every landscape", "[.courses]") {
  for (const auto& landscape : recorded_landscapes())
    for (const auto* strategy : strategies())
      for (const std::uint64_t seed : {0, 1, 2, 3, 4, 5}) {
        const auto found = search(landscape, std::string(strategy->name()), seed);
        std::cout << strategy->name() << '\t' << landscape.problem.text() << '\t'
                  << landscape.stages << '\t' << seed << '\t' << landscape.variants.size() << '\t'
                  << found.tried.size() << '\t' << found.us / landscape.best() << '\t';
        for (const auto& statement : found.statements)
          std::cout << statement.said << ':' << statement.left << ' ';
        std::cout << '\t';
        double best = std::numeric_limits<double>::infinity();
        for (const auto index : found.tried) {
          best = std::min(best, landscape.us[index]);
          std::cout << best / landscape.best() << ' ';
        }
        std::cout << '\n';
      }
}

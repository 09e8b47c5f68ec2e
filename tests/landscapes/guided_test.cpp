// What each strategy finds on landscapes that were recorded on an H200, and after how much.
#include <algorithm>
#include <iostream>
#include <map>
#include <string>

#include "landscapes/landscape.hpp"
#include "support/catch.hpp"
#include "tuning/strategy.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

DeviceFacts h200() {
  auto facts = facts_of_architecture("sm_90a");
  facts.name = "NVIDIA H200";
  facts.memory_bandwidth = 4.8e12;
  return facts;
}

std::vector<Landscape> recorded() {
  std::vector<Landscape> all;
  for (const auto& entry :
       std::filesystem::directory_iterator(FFTUNE_SOURCE_DIR "/docs/measurements/landscapes"))
    for (auto& landscape : read_landscapes(entry.path(), builtin_catalog(), h200()))
      all.push_back(std::move(landscape));
  return all;
}

struct Found {
  double us = 0;
  std::vector<std::size_t> tried;
  double gain = -1;  // said to be left
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
  found.gain = search.gain();
  return found;
}

}  // namespace

TEST_CASE("guided is within 1% of the best after 15% of what there is, on every landscape") {
  // By problem: its stages are searched apart, and their variants are one space.
  std::map<std::string, std::pair<std::size_t, std::size_t>> spent;
  const auto all = recorded();
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

// For docs/measurements/strategies.py: strategy, problem, stages, seed, variants there, tried, what
// the choice takes and then the best so far after each, as multiples of the best there is, and what
// was said to be left.
TEST_CASE("the course of every strategy on every landscape", "[.courses]") {
  for (const auto& landscape : recorded())
    for (const auto* strategy : strategies())
      for (const std::uint64_t seed : {0, 1, 2, 3, 4, 5}) {
        const auto found = search(landscape, std::string(strategy->name()), seed);
        std::cout << strategy->name() << '\t' << landscape.problem.text() << '\t'
                  << landscape.stages << '\t' << seed << '\t' << landscape.variants.size() << '\t'
                  << found.tried.size() << '\t' << found.us / landscape.best() << '\t' << found.gain
                  << '\t';
        double best = std::numeric_limits<double>::infinity();
        for (const auto index : found.tried) {
          best = std::min(best, landscape.us[index]);
          std::cout << best / landscape.best() << ' ';
        }
        std::cout << '\n';
      }
}

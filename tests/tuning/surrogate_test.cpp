// The surrogate's predictions for variants whose parameters are words.
#include "tuning/strategies/surrogate.hpp"

#include <cmath>
#include <string>
#include <vector>

#include "support/catch.hpp"

using namespace fftune;

namespace {

/// Every pair of a word, in the order given, and a number; all of the same estimate.
std::vector<Variant> variants_of(const std::vector<std::string>& words) {
  std::vector<Variant> variants;
  for (const auto& word : words)
    for (const int stages : {2, 4, 8})
      variants.push_back({"f", {{"order", word}, {"stages", stages}}});
  return variants;
}

struct Belief {
  std::string next;
  double gain = 0;
};

/// After all variants of one word are learned as slow, and two of another one as fast.
Belief belief(const std::vector<std::string>& words) {
  const auto variants = variants_of(words);
  Surrogate surrogate(variants, std::vector<double>(variants.size(), 1),
                      std::vector<std::vector<double>>(variants.size()));
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const auto& word = variants[i].config.word("order");
    const auto stages = variants[i].config.at("stages");
    if (word == "slow") surrogate.learn(i, 100);
    if (word == "fast" && stages != 4) surrogate.learn(i, 50 + static_cast<double>(stages));
  }
  surrogate.conclude();
  const auto next = surrogate.propose(1);
  REQUIRE(next.size() == 1);
  return {variants[next[0]].id(), surrogate.gain_expected()};
}

}  // namespace

TEST_CASE("words have no order: in which one a space lists them changes no belief") {
  const auto first = belief({"slow", "fast", "other"});
  for (const auto& words : std::vector<std::vector<std::string>>{
           {"fast", "slow", "other"}, {"other", "slow", "fast"}, {"slow", "other", "fast"}}) {
    const auto other = belief(words);
    CAPTURE(words);
    CHECK(other.next == first.next);
    CHECK(other.gain == Approx(first.gain).epsilon(1e-6));
  }
}

#include "measure/statistics.hpp"

#include <algorithm>
#include <cmath>
#include <random>

#include "near.hpp"
#include "support/catch.hpp"

using namespace fftune;

TEST_CASE("a median is the middle value or the mean of the middle two") {
  CHECK(median({3, 1, 2}) == 2);
  CHECK(median({4, 1, 3, 2}) == 2.5);
  CHECK(std::isinf(median({})));
}

TEST_CASE("the ranks of the interval are those of the binomial table") {
  // n = 10: P(binomial(10, 1/2) <= 1) = 0.0107, <= 2: 0.0547; so the 2nd smallest and largest.
  const auto ten = summarise({1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  CHECK(ten.low == 2);
  CHECK(ten.high == 9);
  // n = 5 cannot give 95%: the whole range.
  const auto five = summarise({5, 4, 3, 2, 1});
  CHECK(five.low == 1);
  CHECK(five.high == 5);
  CHECK(summarise({}).samples == 0);
  CHECK(summarise({7}).median == 7);
}

TEST_CASE("the interval covers the true median in at least 95% of trials, whatever the noise") {
  std::mt19937_64 random(11);
  for (const int samples : {6, 11, 21, 32}) {
    int covered = 0;
    constexpr int trials = 2000;
    for (int trial = 0; trial < trials; ++trial) {
      std::exponential_distribution<double> noise(20);  // one-sided, as that of timings is
      std::vector<double> times;
      for (int i = 0; i < samples; ++i) times.push_back(100 * (1 + noise(random)));
      const double truth = 100 * (1 + std::log(2.0) / 20);
      const auto summary = summarise(times);
      covered += summary.low <= truth && truth <= summary.high;
    }
    INFO(samples << " samples");
    CHECK(covered >= 0.94 * trials);  // less 1% for the chance of the trials themselves
    CHECK(covered < trials);
  }
}

TEST_CASE("samples that depend on their neighbours widen the interval") {
  std::mt19937_64 random(5);
  std::normal_distribution<double> noise(100, 1);
  int covered = 0;
  int covered_by_ranks = 0;
  constexpr int trials = 1000;
  for (int trial = 0; trial < trials; ++trial) {
    // Eight values, four samples each: what a clock that moves in steps does.
    std::vector<double> times;
    for (int i = 0; i < 8; ++i) times.insert(times.end(), 4, noise(random));
    const auto summary = summarise(times);
    covered += summary.low <= 100 && 100 <= summary.high;
    const auto again = summarise(times);
    CHECK((again.low == summary.low && again.high == summary.high));
    // The ranks of 32 independent samples: the 10th and the 23rd.
    std::sort(times.begin(), times.end());
    covered_by_ranks += times[9] <= 100 && 100 <= times[22];
  }
  CHECK(covered_by_ranks < 0.75 * trials);
  CHECK(covered > 0.85 * trials);
}

TEST_CASE("a bootstrap of one value is that value, and lies within the samples") {
  CHECK(block_bootstrap({3}).low == 3);
  CHECK(block_bootstrap({3}).high == 3);
  const auto interval = block_bootstrap({5, 1, 4, 2, 3, 9, 7, 8, 6});
  CHECK(interval.low >= 1);
  CHECK(interval.low <= 5);
  CHECK(interval.high >= 5);
  CHECK(interval.high <= 9);
}

TEST_CASE("the noise floor is the range of the medians of consecutive runs") {
  CHECK(noise_floor({1, 1, 1, 1, 1, 1, 1, 1}) == 0);
  CHECK(noise_floor({100, 100, 101, 101, 102, 102, 104, 104}) == near(4 / 101.5));
  CHECK(noise_floor({1, 2, 3}) == 0);
}

// Statistics of samples: the median, its confidence interval, and the noise floor.
#pragma once

#include <cstdint>
#include <vector>

namespace fftune {

struct Summary {
  int samples = 0;
  double median = 0;
  double low = 0;  // 95% confidence interval of the median
  double high = 0;
};

/// The middle value, or the mean of the middle two; infinity of none.
double median(std::vector<double> samples);

/// Samples in the order in which they were taken. The interval is between order statistics: the
/// number of samples below the true median is binomial(n, 1/2), whatever their distribution
/// (Conover, Practical Nonparametric Statistics, section 3.2). Fewer than six samples cannot give
/// 95%: theirs is the whole range. That holds for samples that do not depend on each other; those
/// of a clock that drifts do, so from sixteen on the interval takes in block_bootstrap() as well.
Summary summarise(const std::vector<double>& samples);

/// Summary of samples in bursts that lie apart in time. A disturbance longer than a burst moves all
/// of its samples alike, so the interval also covers that of the bursts' medians: the whole range
/// for five bursts or fewer.
Summary summarise_bursts(const std::vector<std::vector<double>>& bursts);

/// The middle 95% of the medians of resamples, which are put together from runs of consecutive
/// samples, so that what lasts for several samples widens it (circular block bootstrap: Politis,
/// Romano 1992). The same samples give the same interval. At least one sample.
struct Interval {
  double low = 0;
  double high = 0;
};
Interval block_bootstrap(const std::vector<double>& samples);

/// The noise floor: samples taken one after the other are cut into `blocks` runs, and this is the
/// range of the runs' medians over the median of all. 0 with fewer than two samples a block.
double noise_floor(const std::vector<double>& samples, int blocks = 4);
/// The same of bursts: the range of their medians over the median of all.
double noise_floor_of_bursts(const std::vector<std::vector<double>>& bursts);

/// Time of one relative to another that was sampled in the same bursts, with its interval. A
/// disturbance that slows down a whole burst slows down both.
struct Ratio {
  double median = 0;
  double low = 0;
  double high = 0;

  /// Whether it may be either.
  bool is_in_noise() const { return low <= 1 && high >= 1; }
};
/// 0 where either has no samples.
Ratio ratio_of(const std::vector<std::vector<double>>& one,
               const std::vector<std::vector<double>>& other);

/// The next of a sequence of random numbers; `state` is its seed, then its place (SplitMix64:
/// Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195).
std::uint64_t next_random(std::uint64_t& state);

}  // namespace fftune

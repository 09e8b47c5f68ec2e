// Statistics of samples: the median, its confidence interval, and the noise floor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
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
  /// Whether the interval spans less than a factor of two: else its median says nothing.
  bool is_known() const { return high < 2 * low; }
};
/// 0 where either has no samples.
Ratio ratio_of(const std::vector<std::vector<double>>& one,
               const std::vector<std::vector<double>>& other);

/// The next of a sequence of random numbers; `state` is its seed, then its place (SplitMix64:
/// Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195).
std::uint64_t next_random(std::uint64_t& state);

// Deciding among times with noise: a tie band, and a tie-break that does not depend on the times.

struct Finalist {
  std::string id;
  double median_us = 0;
  int registers = 0;
  double low_us = 0;  // 95% confidence interval of the median; 0 and 0: none is known
  double high_us = 0;
  /// Its samples, where they were taken in turns with those of the fastest: then the ratios decide,
  /// from which a clock that sinks, or whatever else slows down both, cancels out.
  std::span<const double> in_turns_us{};
};

/// The places of the finalists, most wanted first. First come those within the tie band of the
/// fastest, by fewer registers (more blocks can be resident beside other work), then by id. Then
/// come those that the measurement cannot tell from the fastest, because their intervals meet or
/// that of their ratio contains 1; then the rest; both by median, then id. So the same device gives
/// the same answer twice, while the answer costs at most the band.
std::vector<std::size_t> by_preference(const std::vector<Finalist>& finalists, double tie_band);

/// How many of them, from the front of by_preference(), are tied with the fastest.
struct TieSet {
  std::size_t within_band = 0;
  std::size_t unresolved = 0;  // beyond the band, but not told from the fastest
  bool in_turns = true;        // whether ratios of samples taken in turns decided about all
  double spread = 0;           // how far these ratios may be off, of those that are tied

  std::size_t size() const { return within_band + unresolved; }
  /// Whether more samples may tell more.
  bool is_open(double tie_band) const { return unresolved > 0 || spread > tie_band; }
};
TieSet tied(const std::vector<Finalist>& finalists, double tie_band);

}  // namespace fftune

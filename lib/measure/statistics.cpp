#include "measure/statistics.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string_view>
#include <tuple>

namespace fftune {
namespace {

double middle(const std::vector<double>& sorted) {
  const std::size_t n = sorted.size();
  if (n == 0) return std::numeric_limits<double>::infinity();
  return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

/// The greatest k for which P(binomial(n, 1/2) < k) <= 2.5%: the interval runs from the k-th
/// smallest to the k-th largest. 0: there is none.
std::size_t interval_rank(std::size_t n) {
  double below = 0;
  for (std::size_t k = 0; k < n; ++k) {
    const double count = static_cast<double>(n);
    const double at = static_cast<double>(k);
    below += std::exp(std::lgamma(count + 1) - std::lgamma(at + 1) - std::lgamma(count - at + 1) -
                      count * std::log(2.0));
    if (below > 0.025) return k;
  }
  return 0;
}

std::vector<double> joined(const std::vector<std::vector<double>>& bursts) {
  std::vector<double> all;
  for (const auto& burst : bursts) all.insert(all.end(), burst.begin(), burst.end());
  return all;
}

std::vector<double> medians_of(const std::vector<std::vector<double>>& bursts) {
  std::vector<double> medians;
  for (const auto& burst : bursts)
    if (!burst.empty()) medians.push_back(median(burst));
  return medians;
}

/// Below this the resamples of a few blocks say less than the order statistics.
constexpr std::size_t least_for_bootstrap = 16;
constexpr std::size_t resamples = 400;

}  // namespace

double median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return middle(samples);
}

Summary summarise(const std::vector<double>& samples) {
  Summary summary;
  if (samples.empty()) return summary;
  auto sorted = samples;
  std::sort(sorted.begin(), sorted.end());
  const std::size_t rank = std::max<std::size_t>(interval_rank(sorted.size()), 1);
  summary.samples = static_cast<int>(sorted.size());
  summary.median = middle(sorted);
  summary.low = sorted[rank - 1];
  summary.high = sorted[sorted.size() - rank];
  if (samples.size() < least_for_bootstrap) return summary;
  const auto resampled = block_bootstrap(samples);
  summary.low = std::min(summary.low, resampled.low);
  summary.high = std::max(summary.high, resampled.high);
  return summary;
}

Summary summarise_bursts(const std::vector<std::vector<double>>& bursts) {
  auto summary = summarise(joined(bursts));
  const auto medians = medians_of(bursts);
  if (medians.size() < 2) return summary;
  const auto between = summarise(medians);
  summary.low = std::min(summary.low, between.low);
  summary.high = std::max(summary.high, between.high);
  return summary;
}

double noise_floor_of_bursts(const std::vector<std::vector<double>>& bursts) {
  const auto medians = medians_of(bursts);
  if (medians.size() < 2) return noise_floor(joined(bursts));
  const auto [least, most] = std::minmax_element(medians.begin(), medians.end());
  return (*most - *least) / median(joined(bursts));
}

Ratio ratio_of(const std::vector<std::vector<double>>& one,
               const std::vector<std::vector<double>>& other) {
  const auto a = summarise_bursts(one), b = summarise_bursts(other);
  if (!(a.median > 0) || !(b.median > 0)) return {};
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(one.size(), other.size()); ++i)
    if (!one[i].empty() && !other[i].empty()) ratios.push_back(median(one[i]) / median(other[i]));
  // A single burst gives only the spread of its own samples.
  if (ratios.size() < 2)
    return {.median = a.median / b.median, .low = a.low / b.high, .high = a.high / b.low};
  const auto summary = summarise(ratios);
  return {.median = summary.median, .low = summary.low, .high = summary.high};
}

Interval block_bootstrap(const std::vector<double>& samples) {
  const std::size_t count = samples.size();
  // The length that balances bias and variance grows with the cube root (Lahiri 2003, section 7).
  const auto block = static_cast<std::size_t>(std::ceil(std::cbrt(static_cast<double>(count))));
  std::uint64_t state = count;
  std::vector<double> medians;
  std::vector<double> drawn(count);
  for (std::size_t i = 0; i < resamples; ++i) {
    std::size_t place = 0;
    for (std::size_t k = 0; k < count; ++k, ++place) {
      if (k % block == 0) place = next_random(state) % count;
      drawn[k] = samples[place % count];
    }
    medians.push_back(median(drawn));
  }
  std::sort(medians.begin(), medians.end());
  const std::size_t outside = resamples / 40;  // 2.5%
  return {medians[outside], medians[resamples - 1 - outside]};
}

double noise_floor(const std::vector<double>& samples, int blocks) {
  const std::size_t length = samples.size() / static_cast<std::size_t>(blocks);
  if (length < 2) return 0;
  double least = std::numeric_limits<double>::infinity();
  double most = 0;
  for (std::size_t begin = 0; begin + length <= samples.size(); begin += length) {
    const auto first = samples.begin() + static_cast<std::ptrdiff_t>(begin);
    const double value = median({first, first + static_cast<std::ptrdiff_t>(length)});
    least = std::min(least, value);
    most = std::max(most, value);
  }
  return (most - least) / median(samples);
}

std::uint64_t next_random(std::uint64_t& state) {
  std::uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

namespace {

/// How far from the fastest.
enum class Rank { within_band, unresolved, slower };

struct Standing {
  Rank rank;
  double spread = 0;     // of the ratio to the fastest: half of its interval
  bool in_turns = true;  // whether there is one, or it is the fastest
};

/// As few do not give an interval of 95%.
constexpr std::size_t least_in_turns = 6;

std::vector<Standing> standings(const std::vector<Finalist>& finalists, double tie_band) {
  std::vector<Standing> all;
  const auto fastest = std::min_element(
      finalists.begin(), finalists.end(),
      [](const Finalist& a, const Finalist& b) { return a.median_us < b.median_us; });
  for (auto at = finalists.begin(); at != finalists.end(); ++at) {
    const bool within = at->median_us <= fastest->median_us * (1 + tie_band);
    const auto samples = at->in_turns_us.size();
    Standing standing{within ? Rank::within_band : Rank::slower};
    if (at != fastest && samples >= least_in_turns && samples == fastest->in_turns_us.size()) {
      std::vector<double> ratios;
      for (std::size_t i = 0; i < samples; ++i)
        ratios.push_back(at->in_turns_us[i] / fastest->in_turns_us[i]);
      const Summary ratio = summarise(ratios);
      standing.spread = (ratio.high - ratio.low) / 2;
      if (!within && ratio.low <= 1) standing.rank = Rank::unresolved;
    } else if (at != fastest) {
      standing.in_turns = false;
      const bool known = at->low_us > 0 && fastest->high_us > 0;
      if (!within && known && at->low_us <= fastest->high_us) standing.rank = Rank::unresolved;
    }
    all.push_back(standing);
  }
  return all;
}

}  // namespace

std::vector<std::size_t> by_preference(const std::vector<Finalist>& finalists, double tie_band) {
  const auto ranks = standings(finalists, tie_band);
  std::vector<std::size_t> order(finalists.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto key = [&](std::size_t index) {
    const auto& finalist = finalists[index];
    const auto rank = ranks[index].rank;
    const bool tie = rank == Rank::within_band;
    return std::tuple(rank, tie ? 0 : finalist.median_us, tie ? finalist.registers : 0,
                      std::string_view(finalist.id));
  };
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
  return order;
}

TieSet tied(const std::vector<Finalist>& finalists, double tie_band) {
  TieSet ties;
  for (const Standing& standing : standings(finalists, tie_band)) {
    ties.within_band += standing.rank == Rank::within_band;
    ties.unresolved += standing.rank == Rank::unresolved;
    ties.in_turns = ties.in_turns && standing.in_turns;
    if (standing.rank != Rank::slower) ties.spread = std::max(ties.spread, standing.spread);
  }
  return ties;
}

}  // namespace fftune

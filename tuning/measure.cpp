#include "tuning/measure.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

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

}  // namespace

double median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return middle(samples);
}

Summary summarise(std::vector<double> samples) {
  Summary summary;
  if (samples.empty()) return summary;
  std::sort(samples.begin(), samples.end());
  const std::size_t rank = std::max<std::size_t>(interval_rank(samples.size()), 1);
  summary.samples = static_cast<int>(samples.size());
  summary.median = middle(samples);
  summary.low = samples[rank - 1];
  summary.high = samples[samples.size() - rank];
  return summary;
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

}  // namespace fftune

#include "tuning/strategies/gaussian_process.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <utility>

namespace fftune {
namespace {

/// Keeps the factor's diagonal positive where two places are all but one.
constexpr double least_variance = 1e-10;

double dot(const std::vector<double>& a, const std::vector<double>& b, std::size_t count) {
  return std::inner_product(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(count), b.begin(),
                            0.0);
}

}  // namespace

void GaussianProcess::observe(std::size_t place, double value) {
  const std::size_t count = places_.size();
  std::vector<double> row(count + 1);
  for (std::size_t j = 0; j < count; ++j)
    row[j] = (covariance_(place, places_[j]) - dot(row, factor_[j], j)) / factor_[j][j];
  row[count] = std::sqrt(std::max(covariance_(place, place) + variance_ - dot(row, row, count),
                                  variance_ + least_variance));
  solved_.push_back((value - dot(row, solved_, count)) / row[count]);
  factor_.push_back(std::move(row));
  places_.push_back(place);
  for (std::size_t i = 0; i < watches_.size(); ++i) extend(watches_[i], watched_[i]);
}

double GaussianProcess::log_likelihood() const {
  double sum = 0;
  for (std::size_t i = 0; i < places_.size(); ++i)
    sum -= 0.5 * solved_[i] * solved_[i] + std::log(factor_[i][i]) +
           0.5 * std::log(2 * std::numbers::pi);
  return sum;
}

void GaussianProcess::watch(std::vector<std::size_t> places) {
  watched_ = std::move(places);
  watches_.assign(watched_.size(), {});
  for (std::size_t i = 0; i < watched_.size(); ++i) {
    watches_[i].variance = covariance_(watched_[i], watched_[i]);
    while (watches_[i].solved.size() < places_.size()) extend(watches_[i], watched_[i]);
  }
}

void GaussianProcess::extend(Watch& watch, std::size_t place) const {
  const std::size_t j = watch.solved.size();
  const double next =
      (covariance_(place, places_[j]) - dot(watch.solved, factor_[j], j)) / factor_[j][j];
  watch.solved.push_back(next);
  watch.mean += next * solved_[j];
  watch.variance -= next * next;
}

Belief GaussianProcess::belief(std::size_t watched) const {
  const auto& watch = watches_[watched];
  return {watch.mean, std::sqrt(std::max(watch.variance, 0.0))};
}

double expected_gain(const Belief& belief, double best) {
  const double ahead = best - belief.mean;
  if (!(belief.deviation > 0)) return std::max(ahead, 0.0);
  const double z = ahead / belief.deviation;
  const double density = std::exp(-z * z / 2) / std::sqrt(2 * std::numbers::pi);
  const double below = std::erfc(-z / std::numbers::sqrt2) / 2;
  return ahead * below + belief.deviation * density;
}

}  // namespace fftune

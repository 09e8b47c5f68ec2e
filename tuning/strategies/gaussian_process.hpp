// A Gaussian process: predictions for other places from a few observations, with their
// uncertainty (Rasmussen, Williams 2006, Gaussian Processes for Machine Learning, algorithm 2.1).
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace fftune {

struct Belief {
  double mean = 0;
  double deviation = 0;
};

class GaussianProcess {
 public:
  /// The covariance of the values at two places, by their numbers; without the noise of
  /// observation.
  using Covariance = std::function<double(std::size_t, std::size_t)>;

  /// `noise`: the standard deviation of an observation. The prior's mean is 0.
  GaussianProcess(Covariance covariance, double noise)
      : covariance_(std::move(covariance)), variance_(noise * noise) {}

  /// Costs as many steps as the square of the observations, and the cube of them all together.
  void observe(std::size_t place, double value);

  /// The logarithm of the density of the observations.
  double log_likelihood() const;

  /// Beliefs about `places`, which observe() keeps up to date from now on.
  void watch(std::vector<std::size_t> places);
  const std::vector<std::size_t>& watched() const { return watched_; }
  Belief belief(std::size_t watched) const;

 private:
  struct Watch {
    std::vector<double> solved;  // of the factor's system, one number an observation
    double mean = 0;
    double variance = 0;
  };

  void extend(Watch& watch, std::size_t place) const;

  Covariance covariance_;
  double variance_;
  std::vector<std::size_t> places_;
  std::vector<std::vector<double>> factor_;  // rows of the Cholesky factor
  std::vector<double> solved_;               // the factor's inverse times the values
  std::vector<std::size_t> watched_;
  std::vector<Watch> watches_;
};

/// How much lower than `best` a value is expected to fall, where falling short counts as nothing
/// (expected improvement; Jones, Schonlau, Welch 1998).
double expected_gain(const Belief& belief, double best);

}  // namespace fftune

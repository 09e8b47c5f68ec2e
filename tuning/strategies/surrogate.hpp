// A surrogate of a group's variants: from the times of a few and what a model of the device expects
// of all, beliefs about the others.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "registry/variant.hpp"
#include "tuning/strategies/gaussian_process.hpp"

namespace fftune {

class Surrogate {
 public:
  /// `estimates`: one per variant, in any unit, positive. `traits`: equally many numbers per
  /// variant, by which variants of different families can be compared.
  Surrogate(const std::vector<Variant>& variants, const std::vector<double>& estimates,
            const std::vector<std::vector<double>>& traits);
  Surrogate(const Surrogate&) = delete;
  Surrogate& operator=(const Surrogate&) = delete;

  /// The time of one, in the unit of best(). Once each.
  void learn(std::size_t variant, double us);
  /// Learns how much each parameter matters, if there is much that is new, and then what follows
  /// for the variants that are neither learned nor dropped.
  void conclude();
  /// It has no time: nothing is to be expected of it.
  void drop(std::size_t variant);

  /// Variants to try next, at most `count`. Each choice has the largest expected gain, and counts
  /// as if it had taken its expected time, so that the choices are not all neighbours.
  std::vector<std::size_t> propose(std::size_t count);
  /// How much faster than the best known the best of the others is expected to be, as a part of 1:
  /// no more than this, the sum of the expected gains of all.
  double gain_expected() const;
  /// A bound for people, which is seldom exceeded: twice what the most promising of them is
  /// expected to gain, and twice the error of a time. The sum takes variants that are much alike
  /// for as many chances.
  double gain_likely() const;

 private:
  /// Scales of the covariance, as standard deviations of the logarithm of a time.
  struct Scales {
    double estimate = 0.3;  // by how much the estimates tell variants apart
    double family = 0.3;    // families from each other
    double together = 0.1;  // by how much parameters act other than one by one
    double reach = 1;       // over what distance they do; 1: all values of a parameter
    double noise = 0.01;
    std::vector<double> alone;   // by how much each parameter acts by itself
    std::vector<double> traits;  // and each trait
  };
  struct Point {
    std::size_t family = 0;
    std::size_t first = 0;       // place of its parameters in Scales::alone
    std::vector<double> values;  // of its parameters: a number from 0 to 1, a word's place
    std::vector<double> traits;  // from 0 to 1
    double estimate = 0;         // logarithm, of mean 0 and deviation 1
  };

  GaussianProcess::Covariance covariance(const Scales& scales) const;
  GaussianProcess process(const Scales& scales) const;
  /// How well the scales explain the observations, and how ordinary they are.
  double merit(const Scales& scales) const;
  void improve_scales();

  std::vector<Point> points_;
  std::vector<bool> words_;  // which parameters hold words, as placed in Scales::alone
  std::vector<bool> open_;
  std::map<std::size_t, double> known_;  // logarithms of times
  Scales scales_;
  std::size_t scaled_at_ = 0;  // known when the scales were improved
  double mean_ = 0;
  double best_ = 0;
  GaussianProcess process_;
};

}  // namespace fftune

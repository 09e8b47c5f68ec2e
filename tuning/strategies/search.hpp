// A search: one group of interchangeable variants, and the means by which a strategy tries them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "device/facts.hpp"
#include "registry/variant.hpp"
#include "tuning/journal/outcome.hpp"

namespace fftune {

/// A search that was cut short after fewer timed variants says nothing about the others.
constexpr int least_tried = 8;

class Search {
 public:
  virtual ~Search() = default;

  virtual const Problem& problem() const = 0;
  virtual const DeviceFacts& facts() const = 0;
  virtual std::uint64_t seed() const = 0;

  /// The candidates, by index from now on. The first warm_starts() of them are warm starts: the
  /// families' defaults and the winners of neighbouring problems.
  virtual const std::vector<Variant>& variants() const = 0;
  virtual std::size_t warm_starts() const = 0;
  /// The cost model's prediction for a candidate, in µs: good enough to rank.
  virtual double predicted_us(std::size_t index) const = 0;
  /// Numbers by which candidates of all families can be compared: see launch_traits().
  virtual std::vector<double> traits(std::size_t index) const = 0;

  /// Compiles in parallel; a failure or a spill is recorded. Cheap for known variants.
  virtual void compile(const std::vector<std::size_t>& indices) = 0;
  /// Verifies, then samples briefly, and stops early above `abandon_us`. Does nothing to a failed
  /// or known one.
  virtual void screen(std::size_t index, double abandon_us) = 0;
  /// How many candidates are screened at the same time.
  virtual std::size_t workers() const = 0;
  /// Screens these on all workers, with `samples` samples each, stopping early above `band` times
  /// the best; returns those that were reached before the search was to end.
  virtual std::vector<std::size_t> screen_all(const std::vector<std::size_t>& indices, double band,
                                              int samples) = 0;
  /// Adds `samples` interleaved samples to each that has not failed, in at most about `seconds`.
  virtual void measure(const std::vector<std::size_t>& indices, int samples, double seconds) = 0;
  /// Forgets the samples of these, so that a decision rests on fresh ones.
  virtual void forget(const std::vector<std::size_t>& indices) = 0;

  /// Median of the samples so far, in µs; infinity for one without, or failed.
  virtual double median_us(std::size_t index) const = 0;
  /// Whether, beyond the tie band, there are some among them that their samples so far do not tell
  /// from the fastest.
  virtual bool undecided(const std::vector<std::size_t>& indices) const = 0;
  /// The least median so far; infinity if there is none.
  virtual double best_us() const = 0;

  /// The user or the budget wants an end: a strategy returns at once with its results.
  virtual bool stopped() const = 0;
  /// As many variants were tried as were asked for: decide among them.
  virtual bool enough() const = 0;
  /// The strategy says that it leaves out variants which it would have tried, given time.
  virtual void cut_short() = 0;
  /// The strategy expects that the best of those not tried is at most this much faster, a part of
  /// 1, than the best that was: for the user to see.
  virtual void expect_gain(double gain) = 0;
  /// The expected gain, as a part of 1, below which the search does not go on.
  virtual double least_gain() const = 0;
  /// Seconds until this group's share of the budget is spent; infinity without a budget.
  virtual double seconds_left() const = 0;

  virtual void enter(Phase phase, std::size_t total) = 0;
};

}  // namespace fftune

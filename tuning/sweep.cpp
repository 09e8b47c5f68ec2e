#include "tuning/tuner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "measure/roofline.hpp"
#include "tuning/log.hpp"
#include "tuning/search/session.hpp"

namespace fftune {
namespace {

/// Time of a search and its finals, however short the problem.
constexpr double least_seconds = 5;

/// A problem that is begun is searched for as long as a result takes, so a budget for fewer is
/// exceeded: said when it is spent, by what those before took.
void tell_exceeded(double budget, double spent, std::size_t done, std::size_t count) {
  const std::size_t left = count - done;
  const double each = spent / static_cast<double>(done);
  const std::string rest =
      left == 1 ? fmt::format("the last takes about {:.3g} s", each)
                : fmt::format("the others take about {:.3g} s each, {:.3g} s together", each,
                              each * static_cast<double>(left));
  logging::warn(
      "the budget of {:.3g} s is spent after {} of {} problems: {}; Ctrl-C ends the search and "
      "keeps what it has",
      budget, done, count, rest);
}

/// Expected time of trying one variant, in seconds.
double weight(DeviceKind kind, double floor) {
  return kind == DeviceKind::cpu ? 0.005 + 10 * floor : 0.003 + 12 * floor;
}

/// Time of preparing a problem, its inputs and its reference. It is a power of the problem's work,
/// from 0 to 1, fitted to the problems so far (least squares of the logarithms) with a prior of a
/// square root. Without the prior, problems of about the same work, whose times differ by noise,
/// would say nothing about large ones.
class Preparation {
 public:
  void learn(double work, double seconds) {
    // The first problem starts the device too: it counts while there is no other.
    if (problems_++ == 1) known_.clear();
    known_.push_back({std::log(std::max(work, 1.0)), std::log(std::max(seconds, 1e-3))});
    mean_ = {};
    for (const Point& point : known_) {
      mean_.work += point.work / static_cast<double>(known_.size());
      mean_.seconds += point.seconds / static_cast<double>(known_.size());
    }
    constexpr double prior = 2;  // as much as two problems tell whose works differ by a factor of 7
    double squares = prior, products = prior / 2;
    for (const Point& point : known_) {
      squares += (point.work - mean_.work) * (point.work - mean_.work);
      products += (point.work - mean_.work) * (point.seconds - mean_.seconds);
    }
    power_ = std::clamp(products / squares, 0.0, 1.0);
  }
  double seconds(double work) const {
    if (known_.empty()) return 0;
    return std::exp(mean_.seconds + power_ * (std::log(std::max(work, 1.0)) - mean_.work));
  }

 private:
  struct Point {
    double work = 0, seconds = 0;  // logarithms
  };
  int problems_ = 0;
  std::vector<Point> known_;
  Point mean_;
  double power_ = 0;
};

}  // namespace

void tune_all(const Catalog& catalog, Evaluator& evaluator, const std::vector<Problem>& problems,
              const TuneOptions& options, const std::function<void(const TuneResult&)>& result) {
  const auto now = clock_of(options);
  const double started = now();
  const auto kind = evaluator.facts().kind;
  double budget = 0;
  std::vector<double> weights, works;
  for (const auto& problem : problems) {
    const Cost cost = cost_of(catalog.op(problem.op), problem);
    const double floor = floor_seconds(cost, evaluator.limits(problem.dtype));
    weights.push_back(weight(kind, floor));
    works.push_back(cost.flops);
    budget += default_budget_seconds(kind, floor);
  }
  // A user's budget is for preparing too, so that of the problems to come is set aside.
  const bool given = options.budget_seconds > 0;
  if (given) budget = options.budget_seconds;

  TuneOptions own = options;
  Preparation preparation;
  double uncounted = 0;
  bool told_exceeded = false;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    double rest = 0, preparing = 0;
    for (std::size_t j = i; j < problems.size(); ++j) {
      rest += weights[j];
      if (given) preparing += preparation.seconds(works[j]);
    }
    // Time that a problem does not use goes to those after it.
    const double left = std::max(budget - (now() - started - uncounted) - preparing, 0.1);
    const double even = left / static_cast<double>(problems.size() - i);
    const double share = (given ? preparation.seconds(works[i]) : 0) +
                         std::max(left * weights[i] / rest, std::min(even, least_seconds));
    TuneResult one;
    try {
      one = tune_in_place(catalog, evaluator, problems[i], own, {i, problems.size()}, share);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unavailable) throw;
      one.problem = problems[i];
      one.stopped = error.what();
      one.cancelled = options.cancel != nullptr && *options.cancel;
    }
    preparation.learn(works[i], one.prepared_seconds);
    if (!given) uncounted += one.prepared_seconds;
    if (one.record) {
      own.try_first = options.try_first;
      for (const auto& stage : one.record->stages) own.try_first.push_back(stage.variant);
    }
    const bool end = one.cancelled || one.device_lost;
    result(one);
    if (end) return;
    const double spent = now() - started;
    if (options.budget_seconds > 0 && spent > budget && i + 1 < problems.size() && !told_exceeded) {
      told_exceeded = true;
      tell_exceeded(budget, spent, i + 1, problems.size());
    }
  }
}

}  // namespace fftune

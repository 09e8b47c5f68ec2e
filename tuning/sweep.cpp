#include "tuning/sweep.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/error.hpp"
#include "tuning/search/session.hpp"
#include "tuning/tuner.hpp"

namespace fftune {
namespace {

/// A problem may have this many times its even share of what is left: what it does not use goes to
/// those after it, and none starves them.
constexpr double generosity = 1.5;
/// What buffers, reference and finals take, however short the problem.
constexpr double least_seconds = 5;

/// A problem that is begun is searched for as long as a result takes, so a budget for fewer is
/// exceeded: said when it is spent, by what those before took.
void tell_exceeded(double budget, double spent, std::size_t done, std::size_t count) {
  const double each = spent / static_cast<double>(done);
  const double rest = each * static_cast<double>(count - done);
  spdlog::warn(
      "the budget of {:.3g} s is spent after {} of {} problems: the others take about {:.2g} s "
      "each, {:.3g} s together; Ctrl-C ends the search and keeps what it has",
      budget, done, count, each, rest);
}

/// What trying one variant is expected to take, in seconds.
double weight(DeviceKind kind, double floor) {
  return kind == DeviceKind::cpu ? 0.005 + 10 * floor : 0.003 + 12 * floor;
}

}  // namespace

void tune_all(const Catalog& catalog, Evaluator& evaluator, const std::vector<Problem>& problems,
              const TuneOptions& options, const std::function<void(const TuneResult&)>& result) {
  const auto now = clock_of(options);
  const double started = now();
  const auto kind = evaluator.facts().kind;
  double budget = 0;
  std::vector<double> weights;
  for (const auto& problem : problems) {
    const double floor =
        floor_seconds(cost_of(catalog.op(problem.op), problem), evaluator.limits(problem.dtype));
    weights.push_back(weight(kind, floor));
    budget += default_budget_seconds(kind, floor);
  }
  if (options.budget_seconds > 0) budget = options.budget_seconds;

  TuneOptions own = options;
  double uncounted = 0;
  bool told_exceeded = false;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    double rest = 0;
    for (std::size_t j = i; j < problems.size(); ++j) rest += weights[j];
    const double left = std::max(budget - (now() - started - uncounted), 0.1);
    const double even = left / static_cast<double>(problems.size() - i);
    const double share = std::max(left * std::min(1.0, generosity * weights[i] / rest),
                                  std::min(even, least_seconds));
    TuneResult one;
    try {
      one = tune_in_place(catalog, evaluator, problems[i], own, {i, problems.size()}, share);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unavailable) throw;
      one.problem = problems[i];
      one.stopped = error.what();
    }
    if (options.budget_seconds <= 0) uncounted += one.prepared_seconds;
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

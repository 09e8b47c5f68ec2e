// A sweep: several problems under one budget.
#pragma once

#include <functional>
#include <vector>

#include "registry/catalog.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "tuning/search/options.hpp"

namespace fftune {

/// Searches the problems in order and hands over each result as soon as it is there, so that it
/// can be written. The budget is split by the problems' expected cost, and what one leaves goes to
/// those after it; winners are tried first on the next problem. A problem that tune() refuses with
/// Error(unavailable) has a result with the reason in `stopped` and no record. Ends early when
/// cancelled or when the device is lost.
void tune_all(const Catalog& catalog, Evaluator& evaluator, const std::vector<Problem>& problems,
              const TuneOptions& options, const std::function<void(const TuneResult&)>& result);

}  // namespace fftune

// The tuner: from a problem to the record of its winner on a device.
#pragma once

#include "registry/catalog.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "tuning/search/options.hpp"

namespace fftune {

/// The bound of a search without --budget, from the floor of the problem's time in seconds.
double default_budget_seconds(DeviceKind kind, double floor_seconds);

/// Searches one problem (canonical). Throws Error(unavailable) if the problem does not fit or no
/// family serves it, Error(invalid_input) for an unknown strategy; a failing variant is an outcome.
TuneResult tune(const Catalog& catalog, Evaluator& evaluator, const Problem& problem,
                const TuneOptions& options);

/// tune() for one of several problems; `budget_seconds` 0: the default bound.
TuneResult tune_in_place(const Catalog& catalog, Evaluator& evaluator, const Problem& problem,
                         const TuneOptions& options, Place place, double budget_seconds);

}  // namespace fftune

// A sweep: several problems under one budget.
#pragma once

#include "tuning/session.hpp"
#include "tuning/tuner.hpp"

namespace fftune {

/// tune() for one of several problems; `budget_seconds` 0: the default bound.
TuneResult tune_in_place(const Catalog& catalog, Evaluator& evaluator, const Problem& problem,
                         const TuneOptions& options, Place place, double budget_seconds);

}  // namespace fftune

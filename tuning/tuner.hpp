// The tuner: from a problem to the record of its winner on a device.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "store/record.hpp"
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
                         const TuneOptions& options, SweepPosition position, double budget_seconds);

// A sweep: several problems under one budget.

/// Searches the problems in order and hands over each result as soon as it is there, so that it
/// can be written. The budget is split by the problems' expected cost, and what one leaves goes to
/// those after it; winners are tried first on the next problem. A problem that tune() refuses with
/// Error(unavailable) has a result with the reason in `stopped` and no record. Ends early when
/// cancelled or when the device is lost.
void tune_all(const Catalog& catalog, Evaluator& evaluator, const std::vector<Problem>& problems,
              const TuneOptions& options, const std::function<void(const TuneResult&)>& result);

// Refreshing a record: only what won or came close is timed again, which takes seconds.

/// The changes since the record was made, one line each: the driver, the toolkit, the sources of a
/// family, or that a family no longer exists. Empty: the record stands as it is.
std::vector<std::string> changes_since(const PresetRecord& record, const Catalog& catalog,
                                       const DeviceFacts& facts);

/// The winner's variants, then the ties and the runners-up.
std::vector<Variant> stored_variants(const PresetRecord& record);

/// These and the untuned choice, which says what the record is worth: for TuneOptions::only.
std::vector<Variant> refreshed_variants(const PresetRecord& record, const Catalog& catalog,
                                        const DeviceFacts& facts);

/// The result of a search among refreshed_variants(), completed from the earlier search: how many
/// variants it had of the same stages, which strategy, and whether it was complete.
PresetRecord refreshed(PresetRecord now, const PresetRecord& before);

}  // namespace fftune

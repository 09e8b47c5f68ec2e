// The tuner: from a problem to the record of what won it on a device.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "store/record.hpp"
#include "tuning/evaluator.hpp"
#include "tuning/outcome.hpp"
#include "tuning/progress.hpp"

namespace fftune {

class Journal;
class Quarantine;

struct TuneOptions {
  std::string strategy = "halving";
  double budget_seconds = 0;  // for all problems together; 0: default_budget_seconds() of each
  int max_variants = 0;       // timed for each group of stages at most; 0: no limit
  std::uint64_t seed = 0;
  double least_gain = 0.01;  // a part of 1: a strategy that can tell ends where less is expected
  double tie_band = 0.02;    // relative: times this close to the best are equal
  bool baselines = true;     // time the op's baselines beside the winner
  Recipe try_first;          // e.g. the winner of a neighbouring problem; the illegal are left out
  std::map<Problem, Recipe> same_bits_as;  // winners of these must agree bit for bit with these
  std::map<Problem, std::vector<Variant>> only;  // of these, no other variants are tried
  const std::atomic<bool>* cancel = nullptr;     // set: finish the current variant and return
  ProgressSink* progress = nullptr;
  Journal* journal = nullptr;         // gets every outcome; one that resumes also gives known ones
  Quarantine* quarantine = nullptr;   // gets what crashes; what is in it is not run,
  bool retry_quarantined = false;     // unless this is set
  double patience_seconds = 10;       // waited for a disturbed device to be left alone, at most
  std::function<double()> now;        // monotonic seconds; the steady clock if empty
  std::function<void(double)> sleep;  // for so many seconds; the thread sleeps if empty
};

struct TuneResult {
  Problem problem;
  std::optional<PresetRecord> record;  // none if nothing that covers every stage worked in time
  std::vector<Outcome> outcomes;       // of every feasible variant, then of the whole recipes
  std::vector<Timed> baselines;        // the op's baselines, timed beside the winner
  std::vector<std::string> notes;      // what a person should know, one line each
  std::string stopped;                 // why the search ended early; empty if it is complete
  bool cancelled = false;
  bool device_lost = false;
  double seconds = 0;
  double prepared_seconds = 0;  // of them, until the search began: reference and buffers
};

/// The bound of a search without --budget, from the floor of the problem's time in seconds.
double default_budget_seconds(DeviceKind kind, double floor_seconds);

/// Searches one problem (canonical). Throws Error(unavailable) if the problem does not fit or no
/// family serves it, Error(invalid_input) for an unknown strategy; a failing variant is an outcome.
TuneResult tune(const Catalog& catalog, Evaluator& evaluator, const Problem& problem,
                const TuneOptions& options);

/// Searches the problems in order and hands over each result as soon as it is there, so that it
/// can be written. The budget is split by the problems' expected cost, and what one leaves goes to
/// those after it; winners are tried first on the next problem. A problem that tune() refuses with
/// Error(unavailable) has a result with the reason in `stopped` and no record. Ends early when
/// cancelled or when the device is lost.
void tune_all(const Catalog& catalog, Evaluator& evaluator, const std::vector<Problem>& problems,
              const TuneOptions& options, const std::function<void(const TuneResult&)>& result);

}  // namespace fftune

// The options of a search, and its result.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "measure/statistics.hpp"
#include "registry/variant.hpp"
#include "store/record.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "tuning/journal/outcome.hpp"

namespace fftune {

class Journal;
class Quarantine;

struct TuneOptions {
  std::string strategy = "halving";
  double budget_seconds = 0;  // for all problems together; 0: default_budget_seconds() of each
  int max_variants = 0;       // timed for each group of stages at most; 0: no limit
  std::uint64_t seed = 0;
  double least_gain = 0.01;  // a fraction: a strategy with a model ends below this expected gain
  double tie_band = 0.02;    // relative: times this close to the best are equal
  bool baselines = true;     // time the op's baselines beside the winner
  Recipe
      try_first;  // warm start, e.g. a neighbouring problem's winner; illegal variants are skipped
  /// By problem: what runs now, tried before all else and timed as a whole, to be beaten or kept.
  std::map<Problem, std::vector<Recipe>> on_record;
  std::map<Problem, Recipe> same_bits_as;  // by problem: the recipe whose bits the winner must have
  // By problem: the only variants to try, even those that spill registers.
  std::map<Problem, std::vector<Variant>> only;
  const std::atomic<bool>* cancel = nullptr;  // set: finish the current variant and return
  ProgressSink* progress = nullptr;
  Journal* journal =
      nullptr;  // written with every outcome; a resumed one also supplies known outcomes
  Quarantine* quarantine = nullptr;  // gets variants that crash; those in it are not run,
  bool retry_quarantined = false;    // unless this is set
  double patience_seconds = 10;      // longest wait for disturbances of the device to end
  /// How the record's own times are taken, on a device of a kind within this many seconds.
  std::function<BurstPlan(DeviceKind, double seconds)> bursts = bursts_for;
  std::function<double()> now;  // monotonic seconds; the steady clock if empty
  std::function<void(double)>
      sleep;  // sleeps for the given seconds; the thread's own sleep if empty
};

struct TuneResult {
  Problem problem;
  std::optional<PresetRecord> record;  // none if no recipe of all stages worked in time
  std::vector<Outcome> outcomes;  // of every feasible variant, then of the end-to-end candidates
  std::vector<Timed> baselines;   // the op's baselines, timed beside the winner
  /// Times over the winner's, with their intervals: of baselines by their name, of the untuned
  /// choice as "untuned". The record has those that are known to a factor of two.
  std::map<std::string, Ratio> ratios;
  std::vector<std::string> notes;  // what a person should know, one line each
  std::string stopped;             // why the search ended early; empty if it is complete
  /// The memory or library that the machine lacked for the moment. Variants that may be the best
  /// were left out, so the record is not to be written. Empty: nothing.
  std::string lacked;
  bool cancelled = false;
  bool device_lost = false;
  double seconds = 0;
  double prepared_seconds =
      0;  // of `seconds`, spent on reference and buffers before the search began
};

/// The position of a problem in its sweep.
struct SweepPosition {
  std::size_t index = 0;
  std::size_t count = 1;
};

// Stop rules: why a search should end, and how rules are combined.

/// The resources that a search has spent so far.
struct Spent {
  double seconds = 0;
  int tried = 0;  // variants verified and timed
};

/// The reason to stop, one line for the user; empty: go on.
using StopRule = std::function<std::string(const Spent&)>;

/// `all` is the budget that contains these seconds, if there is one.
StopRule stop_after_seconds(double seconds, double all = 0);
StopRule stop_after_variants(int variants);
/// `flag` must outlive the rule; another thread or a signal handler sets it.
StopRule stop_when(const std::atomic<bool>& flag, std::string reason);
/// The reason of the first that has one.
StopRule any_of(std::vector<StopRule> rules);

}  // namespace fftune

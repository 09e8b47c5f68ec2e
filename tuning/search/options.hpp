// What the tuner is asked for, and what it answers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "registry/variant.hpp"
#include "store/record.hpp"
#include "tuning/journal/outcome.hpp"
#include "tuning/journal/progress.hpp"

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
  std::vector<Outcome> outcomes;   // of every feasible variant, then of the end-to-end candidates
  std::vector<Timed> baselines;    // the op's baselines, timed beside the winner
  std::vector<std::string> notes;  // what a person should know, one line each
  std::string stopped;             // why the search ended early; empty if it is complete
  bool cancelled = false;
  bool device_lost = false;
  double seconds = 0;
  double prepared_seconds = 0;  // of them, until the search began: reference and buffers
};

/// Where a problem stands among those of its sweep.
struct Place {
  std::size_t index = 0;
  std::size_t count = 1;
};

}  // namespace fftune

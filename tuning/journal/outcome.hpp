// The outcome of one candidate in a sweep, good or bad, for the journal and the reports.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.hpp"

namespace fftune {

enum class OutcomeKind {
  measured,        // verified and timed, at least briefly
  compile_failed,  // no kernel
  spilled,         // registers spilled to memory: dropped unmeasured
  verify_failed,   // wrong, unwritten, out of bounds, or different from run to run
  launch_failed,   // could not be launched or timed
  device_fault,    // the device reported a fault while it ran
  crashed,         // the process that ran it died, or was killed as it did not end
  killed,          // the process that ran it got a SIGKILL, as when memory runs out
  other_bits,      // right, but not what --same-bits asks for
  quarantined,     // crashed in an earlier sweep: not run
  not_tried,       // the budget or the user ended the search before its turn
};

/// "measured", "compile_failed", …
std::string_view outcome_kind_name(OutcomeKind kind);
/// Throws Error(invalid_input).
OutcomeKind parse_outcome_kind(std::string_view name);

struct Outcome {
  std::size_t first_stage = 0;
  std::string id;  // of the variant, or of the recipe
  OutcomeKind kind = OutcomeKind::not_tried;
  std::string reason;  // why it failed, one line; empty if measured
  bool finalist = false;

  int registers = 0;
  int spill_bytes = 0;
  double compile_seconds = 0;
  bool cached = false;
  double error = 0;  // relative, against the reference
  std::string bits;  // Verified::bits

  int samples = 0;
  double median_us = 0;
  double low_us = 0;  // 95% confidence interval of the median
  double high_us = 0;

  bool failed() const { return kind != OutcomeKind::measured && kind != OutcomeKind::not_tried; }
};

/// The failure to report for a search without a result: the first one among the variants of the
/// first stage without a working variant, or among all. Nothing if none failed.
std::optional<Outcome> first_failure(const std::vector<Outcome>& outcomes);

/// "gate_up_sm80/bm=64: verify failed: y[3] is 0.5, expected 0.25".
std::string failure_text(const Outcome& outcome);

// The progress of a sweep, reported to a sink. Sinks render it.

enum class Phase {
  setup,       // buffers, reference, ceilings
  compile,     // done and total count variants compiled
  screen,      // done and total count variants of all groups
  semifinals,  // the survivors, interleaved
  finals,      // finalists with fresh samples
  combine,     // end-to-end candidates and baselines
  done,
};

/// "setup", "compile", …
std::string_view phase_name(Phase phase);

struct Progress {
  Problem problem;
  std::size_t problem_index = 0;  // of problem_count in this sweep
  std::size_t problem_count = 1;
  Phase phase = Phase::setup;
  std::string group;  // the stages searched now: "gate_up", "gate_up+down"
  int done = 0;       // of total, in this phase
  int total = 0;
  int compiled = 0;         // so far, all groups of this problem
  int failed = 0;           // any outcome that is a failure, all groups of this problem
  double best_us = 0;       // of this group, or end to end in combine and done; 0: none yet
  std::string best_id;      // the one that took best_us
  double roofline = 0;      // the group's floor over best_us; 0: none yet
  double seconds = 0;       // spent on this problem
  double seconds_left = 0;  // estimate for this problem, waits included; 0: unknown
  double waits = 0;         // for a quiet device now, seconds at most; 0: it does not wait
  double gain_left = -1;    // expected of the variants not tried, a part of 1; below 0: unknown
};

class ProgressSink {
 public:
  virtual ~ProgressSink() = default;
  /// Called often (hundreds of times a second): a sink that draws limits its own rate. Calls come
  /// one at a time.
  virtual void update(const Progress& progress) = 0;
};

}  // namespace fftune

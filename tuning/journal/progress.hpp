// The progress of a sweep, reported to a sink. Sinks render it.
#pragma once

#include <string>
#include <string_view>

#include "core/problem.hpp"

namespace fftune {

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
  double seconds_left = 0;  // estimate for this problem; 0: unknown
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

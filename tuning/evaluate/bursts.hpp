// Samples in bursts that lie apart in time. Those of one burst share whatever lasts longer than it:
// another process, a clock, a neighbour of the virtual machine.
#pragma once

#include <functional>
#include <vector>

#include "tuning/evaluate/evaluator.hpp"

namespace fftune {

struct BurstPlan {
  int bursts = 1;
  double pause_seconds = 0;             // between two
  double warm_up_seconds = 0;           // of samples that are thrown away, in front of each
  std::function<void(double)> sleep{};  // empty: the thread sleeps
};

/// How to time on a device of this kind within about this many seconds, pauses included. A GPU is
/// one process's, and says itself when it is disturbed: one burst.
BurstPlan bursts_for(DeviceKind kind, double seconds);

/// The timing of one candidate.
struct BurstTiming {
  std::vector<std::vector<double>> bursts;  // samples in µs
  Timing last;                              // its failure, if there was one

  std::vector<double> samples_us() const;
};

/// Evaluator::time() once for each burst, with the samples of `request` divided among them, at
/// least three each. One BurstTiming for each candidate, in order; a candidate that fails is left
/// out of the bursts that follow. `request.seconds` is for all bursts together, without the pauses.
std::vector<BurstTiming> time_in_bursts(Evaluator& evaluator,
                                        const std::vector<Candidate>& candidates,
                                        const TimeRequest& request, const BurstPlan& plan);

}  // namespace fftune

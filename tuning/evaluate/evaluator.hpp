// An evaluator: the tuner's only view of a device. Arguments and results are plain values, so that
// the device may be in another process; every failure of a candidate is a value.
#pragma once

#include <compare>
#include <cstddef>
#include <exception>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "device/backend.hpp"
#include "device/facts.hpp"
#include "registry/variant.hpp"

namespace fftune {

/// A candidate to compile, verify and time: consecutive stages of the problem by one variant or
/// several, or one of the op's baselines.
struct Candidate {
  std::size_t first_stage = 0;
  Recipe recipe;         // in stage order; empty for a baseline
  std::string baseline;  // name of one of Op::baselines(); else empty

  /// The variants' ids joined with " + ", or the baseline's name.
  std::string id() const;

  auto operator<=>(const Candidate&) const = default;
};

using Candidates = std::vector<Candidate>;

/// The state that begin() prepared.
struct Setup {
  int buffer_sets = 0;  // used in rotation, so that no pass finds its data in the cache
  std::size_t bytes_per_set = 0;
  std::string refusal;  // why the problem cannot be run here, with bytes needed and there; or empty
  /// Which intermediates have no memory, so that the variants that need them fail; empty: none.
  std::string left_out = {};
  bool for_now = false;  // they would have, if nothing else took memory of the device
};

struct Compiled {
  int registers = 0;  // the most of any kernel
  int spill_bytes = 0;
  int shared_bytes = 0;  // static, the most of any kernel
  double seconds = 0;
  bool cached = false;
  std::vector<std::string> warnings;
  std::string failure;  // one line; empty on success
  bool fatal = false;   // the process that compiled it died
  bool killed = false;  // by a SIGKILL, as when memory runs out: no fault of the candidate
};

/// The results of candidates that were not compiled: their failure is "not started".
std::vector<Compiled> not_started(std::size_t candidates);

struct Verified {
  bool passed = false;
  double error = 0;
  double tolerance = 0;
  bool device_fault = false;  // the device itself reported the failure
  std::string failure;        // one line; empty if passed
  bool wrote_beyond = false;  // it wrote outside of its tensors
  bool fatal = false;         // the process that ran it died, or its device context was lost
  bool killed = false;        // as in Compiled
  bool cancelled = false;     // not verified: the user ended the search first
  /// Hash of the outputs of its stages, on inputs that depend on the problem and the seed alone:
  /// equal for candidates that agree in every bit. Empty if it did not pass.
  std::string bits{};
};

struct TimeRequest {
  int samples = 3;  // of each candidate, taken in turn: one of each, then the next of each
  /// No new round is begun once the call has taken this long. The first is always finished.
  double seconds = std::numeric_limits<double>::infinity();
  /// A candidate is sampled no further once it is_hopeless(). One that is above this once and might
  /// not be hopeless is sampled until that is known, whatever time it takes.
  double abandon_above_us = std::numeric_limits<double>::infinity();
};

struct Timing {
  std::vector<double> samples_us;  // of one pass over the candidate's stages
  bool abandoned = false;
  bool device_fault = false;
  std::string failure;  // one line; empty on success
  bool fatal = false;   // the process that ran it died, or its device context was lost
  bool killed = false;  // as in Compiled
};

/// The Verified or Timing of a candidate whose device is lost, and why.
template <class Result>
Result failed_as_lost(const std::string& lost) {
  Result result;
  result.failure = "the device is lost: " + lost;
  result.device_fault = true;
  return result;
}

/// The callbacks of try_each(); called one at a time, from any thread.
struct TrialCalls {
  std::function<void(std::size_t index)> begins;  // it is about to run
  std::function<TimeRequest()> request;           // how it is to be timed
  /// Its verdict and, if it passed, its times; false: begin no further ones.
  std::function<bool(std::size_t index, const Verified&, const Timing&)> ends;
};

/// Whether samples show that a candidate is slower than the limit. It takes two, since a busy
/// machine can stall one, or a single one that exceeds the limit by more than any stall.
bool is_hopeless(const std::vector<double>& samples_us, double limit_us);

/// Whether more samples are needed to tell a stall from a slow candidate: there are fewer than
/// three, and one is above the limit.
bool is_doubtful(const std::vector<double>& samples_us, double limit_us);

class Evaluator {
 public:
  /// Called, one call at a time, as each candidate is compiled; false: start no further ones. An
  /// exception means the same, is the last call, and is rethrown by compile().
  using CompileSink = std::function<bool(std::size_t index, const Compiled&)>;

  virtual ~Evaluator() = default;
  virtual const DeviceFacts& facts() const = 0;
  /// The measured ceilings of the roofline. Throws Error if they cannot be measured.
  virtual Limits limits(DType dtype) = 0;

  /// Prepares one problem, given in canonical form; releases the one before.
  virtual Setup begin(const Problem& problem) = 0;

  /// Compiles on every core; a candidate that was not begun because the sink said so is as in
  /// not_started().
  virtual std::vector<Compiled> compile(const Candidates& candidates, const CompileSink& sink) = 0;
  /// Compiles the candidate if it is not compiled yet.
  virtual Verified verify(const Candidate& candidate) = 0;
  /// Compiles candidates that are not compiled yet. One Timing for each candidate, in order.
  virtual std::vector<Timing> time(const Candidates& candidates, const TimeRequest& request) = 0;

  /// How many candidates are tried at the same time.
  virtual std::size_t workers() const { return 1; }
  /// Verifies and times each, in order where there is one worker, until told to begin no further.
  virtual void try_each(const Candidates& candidates, const TrialCalls& calls);
  /// Messages for the user about the devices since the last call, one line each.
  virtual std::vector<std::string> remarks() { return {}; }

  /// Ids of variants and of candidates that begin() must not run while it prepares: they are known
  /// to crash the process.
  virtual void avoid(std::set<std::string>) {}

  /// Backend::disturbances().
  virtual std::vector<std::string> disturbances() { return {}; }

  /// Why the device can do no more work (a sticky fault); empty while it can.
  virtual std::string lost() const = 0;
};

/// A compile sink that does not throw, for callers who still have the rest of a call to read.
class GuardedSink {
 public:
  explicit GuardedSink(const Evaluator::CompileSink& sink) : sink_(sink) {}
  bool operator()(std::size_t index, const Compiled& compiled);
  /// Throws what the sink threw, if it did.
  void rethrow() const {
    if (thrown_) std::rethrow_exception(thrown_);
  }

 private:
  const Evaluator::CompileSink& sink_;
  std::exception_ptr thrown_;
};

// Samples in bursts that lie apart in time. Those of one burst share whatever lasts longer than it:
// another process, a clock, a neighbour of the virtual machine.

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
std::vector<BurstTiming> time_in_bursts(Evaluator& evaluator, const Candidates& candidates,
                                        const TimeRequest& request, const BurstPlan& plan);

}  // namespace fftune

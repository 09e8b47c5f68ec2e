// A runner: one candidate made ready to be sampled, as captured sequences of passes over the
// buffer sets.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "device/backend.hpp"

namespace fftune {

/// The work of one pass: executables in order, on the tensors of a set.
struct Pass {
  std::vector<std::shared_ptr<const Executable>> executables;
  std::vector<std::vector<void*>> tensors;  // by set
  void* workspace = nullptr;
};

/// Which buffer set the next pass uses. All candidates share one: if each began at the first set, a
/// candidate would find in the cache what the one before it has just read.
struct SetRotation {
  int next = 0;
};

class Runner {
 public:
  /// The backend and the rotation must outlive it.
  Runner(Backend& backend, Pass pass, SetRotation& rotation)
      : backend_(backend), pass_(std::move(pass)), rotation_(rotation) {}

  /// Runs one pass alone: warms up, and gives a first estimate of its seconds. Throws as sample().
  double probe();
  /// Chooses the number of passes in a sample, for passes of about `pass_seconds`.
  void plan(double pass_seconds);
  /// Seconds of a pass, on average over one sample, which takes the next sets of the rotation.
  /// Throws Error(device_fault), and whatever a pass throws.
  double sample();

  int passes() const { return passes_; }

 private:
  /// Seconds of a pass, on average over `passes` of them.
  double run(int passes);

  Backend& backend_;
  Pass pass_;
  SetRotation& rotation_;
  int passes_ = 1;
  std::map<std::pair<int, int>, std::unique_ptr<Replay>> replays_;  // by first set and passes
};

/// Number of passes of a sample. A sample lasts at least 200 µs, so that the resolution of events
/// (0.5 µs) and the gap before the first launch vanish. It has whole rounds of the sets if that
/// takes at most 2 ms, so that every sample has the same work.
int passes_per_sample(double pass_seconds, int sets);

}  // namespace fftune

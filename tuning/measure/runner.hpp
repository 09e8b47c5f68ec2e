// A runner: one candidate made ready to be sampled, as captured sequences of passes over the
// buffer sets.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "device/backend.hpp"

namespace fftune {

/// What one pass does: executables in order, on the tensors of a set.
struct Pass {
  std::vector<std::shared_ptr<const Executable>> executables;
  std::vector<std::vector<void*>> tensors;  // by set
  void* workspace = nullptr;
};

class Runner {
 public:
  Runner(Backend& backend, Pass pass) : backend_(backend), pass_(std::move(pass)) {}

  /// Runs one pass alone: warms up, and gives a first estimate of its seconds. Throws as sample().
  double probe();
  /// Chooses the number of passes in a sample, for passes of about `pass_seconds`.
  void plan(double pass_seconds);
  /// Seconds of a pass, on average over one sample; each sample goes on at the next set. Throws
  /// Error(device_fault), and whatever a pass throws.
  double sample();

  int passes() const { return passes_; }

 private:
  Replay& replay(int first_set, int passes);

  Backend& backend_;
  Pass pass_;
  int passes_ = 1;
  int next_set_ = 0;
  std::map<std::pair<int, int>, std::unique_ptr<Replay>> replays_;
};

/// How many passes make a sample: enough that it lasts 200 µs, so that the resolution of events
/// (0.5 µs) and the gap before the first launch vanish; and whole rounds of the sets where that
/// takes at most 2 ms, so that every sample is of the same work.
int passes_per_sample(double pass_seconds, int sets);

}  // namespace fftune

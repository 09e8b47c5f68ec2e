// The evaluator of a device that a worker process has opened. Whatever a candidate does to that
// process is a failure of the candidate: the process is replaced, and the rest is tried again.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "tuning/evaluator.hpp"
#include "tuning/worker/keeper.hpp"

namespace fftune {

class RemoteEvaluator : public Evaluator {
 public:
  /// Throws what opening the device throws, there.
  explicit RemoteEvaluator(WorkerCommand command, const Watchdog& watchdog = {})
      : keeper_(std::move(command), watchdog) {}

  const DeviceFacts& facts() const override { return keeper_.facts(); }
  Limits limits(DType dtype) override;
  Setup begin(const Problem& problem) override { return keeper_.begin(problem); }
  void avoid(std::set<std::string> ids) override { keeper_.avoid(std::move(ids)); }
  std::vector<Compiled> compile(const std::vector<Candidate>& candidates,
                                const CompileSink& sink) override;
  Verified verify(const Candidate& candidate) override;
  std::vector<Timing> time(const std::vector<Candidate>& candidates,
                           const TimeRequest& request) override;
  std::vector<std::string> disturbances() override;
  std::string lost() const override { return keeper_.lost(); }

  /// How many worker processes have died so far.
  int deaths() const { return keeper_.deaths(); }

 private:
  void time_together(const std::vector<Candidate>& candidates, const TimeRequest& request,
                     std::vector<std::size_t> open, std::vector<Timing>& timings);

  Keeper keeper_;
  std::map<DType, Limits> limits_;
};

}  // namespace fftune

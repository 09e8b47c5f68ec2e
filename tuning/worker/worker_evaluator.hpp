// The evaluator of a device that a worker process has opened. When a candidate kills that
// process, the candidate has failed: the process is replaced and the others are tried again.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "tuning/evaluate/evaluator.hpp"
#include "tuning/worker/supervisor.hpp"

namespace fftune {

class WorkerEvaluator : public Evaluator {
 public:
  /// Throws the errors of opening the device in the worker.
  explicit WorkerEvaluator(WorkerCommand command, const Watchdog& watchdog = {})
      : supervisor_(std::move(command), watchdog) {}

  const DeviceFacts& facts() const override { return supervisor_.facts(); }
  Limits limits(DType dtype) override;
  Setup begin(const Problem& problem) override { return supervisor_.begin(problem); }
  void avoid(std::set<std::string> ids) override { supervisor_.avoid(std::move(ids)); }
  std::vector<Compiled> compile(const std::vector<Candidate>& candidates,
                                const CompileSink& sink) override;
  Verified verify(const Candidate& candidate) override;
  std::vector<Timing> time(const std::vector<Candidate>& candidates,
                           const TimeRequest& request) override;
  std::vector<std::string> disturbances() override;
  std::string lost() const override { return supervisor_.lost(); }

  /// How many worker processes have died so far.
  int deaths() const { return supervisor_.deaths(); }

 private:
  void time_together(const std::vector<Candidate>& candidates, const TimeRequest& request,
                     std::vector<std::size_t> open, std::vector<Timing>& timings);

  Supervisor supervisor_;
  std::map<DType, Limits> limits_;
};

}  // namespace fftune

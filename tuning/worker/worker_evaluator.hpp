// The evaluator of a device that a worker process has opened. When a candidate kills that
// process, the candidate has failed: the process is replaced and the others are tried again.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "store/json.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "tuning/worker/supervisor.hpp"

namespace fftune {

class WorkerEvaluator : public Evaluator {
 public:
  /// Throws the errors of opening the device in the worker.
  explicit WorkerEvaluator(WorkerCommand command, const Watchdog& watchdog = {},
                           const std::atomic<bool>* cancel = nullptr)
      : supervisor_(std::move(command), watchdog, cancel) {}

  const DeviceFacts& facts() const override { return supervisor_.facts(); }
  Limits limits(DType dtype) override;
  Setup begin(const Problem& problem) override { return supervisor_.begin(problem); }
  void avoid(std::set<std::string> ids) override { supervisor_.avoid(std::move(ids)); }
  std::vector<Compiled> compile(const Candidates& candidates, const CompileSink& sink) override;
  Verified verify(const Candidate& candidate) override;
  std::vector<Timing> time(const Candidates& candidates, const TimeRequest& request) override;
  std::vector<std::string> disturbances() override;
  std::string lost() const override { return supervisor_.lost(); }

  /// How many worker processes have died so far.
  int deaths() const { return supervisor_.deaths(); }

 private:
  void time_together(const Candidates& candidates, const TimeRequest& request,
                     std::vector<std::size_t> open, std::vector<Timing>& timings);

  Supervisor supervisor_;
  std::map<DType, Limits> limits_;
};

// One call of WorkerEvaluator::compile: many candidates at once; after a death, those that were
// being compiled one by one, to find the one that caused it.

class CompileCall {
 public:
  CompileCall(Supervisor& supervisor, const Candidates& candidates,
              const Evaluator::CompileSink& sink);
  std::vector<Compiled> run();

 private:
  /// The places to request next: one suspect, or all that are left.
  std::vector<std::size_t> next();
  Ended ask(const std::vector<std::size_t>& places);
  void hear(const std::vector<std::size_t>& places, const JsonValue& message);
  void finish(std::size_t place, Compiled compiled);

  Supervisor& supervisor_;
  const Candidates& candidates_;
  GuardedSink sink_;
  std::vector<Compiled> results_;
  std::vector<bool> done_;
  std::set<std::size_t> begun_;  // and not finished, in the call that is running
  std::deque<std::size_t> suspects_;
  bool stopped_ = false;
};

}  // namespace fftune

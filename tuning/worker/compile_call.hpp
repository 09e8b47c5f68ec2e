// One call of WorkerEvaluator::compile: many candidates at once; after a death, those that were
// being compiled one by one, to find the one that caused it.
#pragma once

#include <deque>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "tuning/evaluate/evaluator.hpp"
#include "tuning/worker/supervisor.hpp"

namespace fftune {

class CompileCall {
 public:
  CompileCall(Supervisor& supervisor, const std::vector<Candidate>& candidates,
              const Evaluator::CompileSink& sink);
  std::vector<Compiled> run();

 private:
  /// The places to request next: one suspect, or all that are left.
  std::vector<std::size_t> next();
  Ended ask(const std::vector<std::size_t>& places);
  void hear(const std::vector<std::size_t>& places, const nlohmann::json& message);
  void finish(std::size_t place, Compiled compiled);

  Supervisor& supervisor_;
  const std::vector<Candidate>& candidates_;
  const Evaluator::CompileSink& sink_;
  std::vector<Compiled> results_;
  std::vector<bool> done_;
  std::set<std::size_t> begun_;  // and not finished, in the call that is running
  std::deque<std::size_t> suspects_;
  bool stopped_ = false;
};

}  // namespace fftune

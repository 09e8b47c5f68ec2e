#include "tuning/worker/worker_evaluator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/error.hpp"
#include "tuning/protocol/messages.hpp"

namespace fftune {

CompileCall::CompileCall(Supervisor& supervisor, const Candidates& candidates,
                         const Evaluator::CompileSink& sink)
    : supervisor_(supervisor),
      candidates_(candidates),
      sink_(sink),
      results_(not_started(candidates.size())),
      done_(candidates.size()) {}

std::vector<Compiled> CompileCall::run() {
  while (!stopped_) {
    const auto places = next();
    if (places.empty()) break;
    begun_.clear();
    const auto ended = ask(places);
    if (ended == Ended::over) break;
    if (ended != Ended::answered && places.size() > 1)
      suspects_.insert(suspects_.end(), begun_.begin(), begun_.end());
    for (const auto place : places)
      if (ended == Ended::answered) supervisor_.faults().clear(candidates_[place].id());
  }
  sink_.rethrow();
  return std::move(results_);
}

std::vector<std::size_t> CompileCall::next() {
  std::vector<std::size_t> left;
  for (std::size_t place = 0; place < candidates_.size(); ++place) {
    if (done_[place] || stopped_) continue;
    // One that died in running compiles: what it does when it runs is said to who runs it.
    const auto* death = supervisor_.faults().of(candidates_[place].id());
    if (death && death->compiling) {
      Compiled compiled;
      compiled.failure = fmt::format("{} while it was compiled", death->cause);
      compiled.fatal = true;
      compiled.killed = death->killed;
      finish(place, std::move(compiled));
    } else {
      left.push_back(place);
    }
  }
  while (!suspects_.empty() && done_[suspects_.front()]) suspects_.pop_front();
  if (!suspects_.empty() && !stopped_) return {suspects_.front()};
  return left;
}

Ended CompileCall::ask(const std::vector<std::size_t>& places) {
  Candidates asked;
  for (const auto place : places) asked.push_back(candidates_[place]);
  // Several are compiled at a time: nothing but being alone makes one the culprit.
  std::vector<std::string> ids;
  if (places.size() == 1) ids.push_back(asked.front().id());
  return supervisor_.ask(
      {{"call", "compile"}, {"candidates", message_of(asked)}}, ids, [](const JsonValue&) {},
      [&](const JsonValue& message) { hear(places, message); });
}

void CompileCall::hear(const std::vector<std::size_t>& places, const JsonValue& message) {
  const auto index = field_as<std::size_t>(message, "index");
  if (index >= places.size() || done_[places[index]])
    throw Error(ErrorKind::invalid_input, "a candidate that is not being compiled");
  const auto place = places[index];
  if (field_as<std::string>(message, "reply") == "begun") {
    begun_.insert(place);
    return;
  }
  auto compiled = read_message<Compiled>(member(message, "compiled"));
  begun_.erase(place);
  const bool before = stopped_;
  finish(place, std::move(compiled));
  if (stopped_ && !before) supervisor_.tell({{"call", "stop"}});
}

void CompileCall::finish(std::size_t place, Compiled compiled) {
  results_[place] = std::move(compiled);
  done_[place] = true;
  if (!sink_(place, results_[place])) stopped_ = true;
}

namespace {

std::vector<std::string> ids_of(const Candidates& candidates,
                                const std::vector<std::size_t>& places) {
  std::vector<std::string> ids;
  for (const auto place : places) ids.push_back(candidates[place].id());
  return ids;
}

/// The result of a candidate whose process died, for a call that must judge it.
template <typename Result>
Result failed_by(const Death& death, const std::string& what) {
  Result result;
  result.failure = death.device ? death.cause : fmt::format("{} while {}", death.cause, what);
  result.device_fault = death.device;
  result.fatal = true;
  result.killed = death.killed;
  return result;
}

}  // namespace

Limits WorkerEvaluator::limits(DType dtype) {
  if (const auto known = limits_.find(dtype); known != limits_.end()) return known->second;
  const JsonValue call{{"call", "limits"}, {"dtype", dtype_name(dtype)}};
  Limits limits;
  for (;;) {
    const auto ended = supervisor_.ask(
        call, {}, [&](const JsonValue& value) { limits = read_message<Limits>(value); });
    if (ended == Ended::over) throw Error(ErrorKind::unavailable, lost());
    if (ended == Ended::answered) return limits_[dtype] = limits;
  }
}

std::vector<std::string> WorkerEvaluator::disturbances() {
  const JsonValue call{{"call", "disturbances"}};
  std::vector<std::string> all;
  for (;;) {
    const auto ended = supervisor_.ask(
        call, {}, [&](const JsonValue& value) { all = value_as<std::vector<std::string>>(value); });
    if (ended == Ended::over) return {};
    if (ended == Ended::answered) return all;
  }
}

std::vector<Compiled> WorkerEvaluator::compile(const Candidates& candidates,
                                               const CompileSink& sink) {
  return CompileCall(supervisor_, candidates, sink).run();
}

Verified WorkerEvaluator::verify(const Candidate& candidate) {
  const JsonValue call{{"call", "verify"}, {"candidate", message_of(candidate)}};
  const auto id = candidate.id();
  for (;;) {
    if (const auto* death = supervisor_.faults().of(id))
      return failed_by<Verified>(*death, "it was verified");
    Verified verified;
    const auto ended = supervisor_.ask(
        call, {id}, [&](const JsonValue& value) { verified = read_message<Verified>(value); });
    if (ended == Ended::over) return failed_as_lost<Verified>(lost());
    if (ended != Ended::answered) continue;
    supervisor_.faults().clear(id);
    // Where it wrote beyond its tensors is not known: the process may only seem well.
    if (verified.wrote_beyond) supervisor_.discard(id + " " + verified.failure);
    return verified;
  }
}

std::vector<Timing> WorkerEvaluator::time(const Candidates& candidates,
                                          const TimeRequest& request) {
  std::vector<Timing> timings(candidates.size());
  std::vector<std::size_t> open(candidates.size());
  for (std::size_t i = 0; i < open.size(); ++i) open[i] = i;
  time_together(candidates, request, std::move(open), timings);
  return timings;
}

void WorkerEvaluator::time_together(const Candidates& candidates, const TimeRequest& request,
                                    std::vector<std::size_t> open, std::vector<Timing>& timings) {
  for (int unexplained = 0;;) {
    std::erase_if(open, [&](std::size_t place) {
      const auto* death = supervisor_.faults().of(candidates[place].id());
      if (death) timings[place] = failed_by<Timing>(*death, "it was timed");
      return death != nullptr;
    });
    if (open.empty()) return;
    Candidates asked;
    for (const auto place : open) asked.push_back(candidates[place]);
    const JsonValue call{
        {"call", "time"}, {"candidates", message_of(asked)}, {"request", message_of(request)}};
    std::vector<Timing> answer;
    const auto ids = ids_of(candidates, open);
    const auto ended = supervisor_.ask(call, ids, [&](const JsonValue& value) {
      answer.clear();
      for (const auto& each : items_of(value)) answer.push_back(read_message<Timing>(each));
      if (answer.size() != open.size())
        throw Error(ErrorKind::invalid_input, "not one timing for each candidate");
    });
    if (ended == Ended::answered) {
      for (std::size_t i = 0; i < open.size(); ++i) timings[open[i]] = std::move(answer[i]);
      for (const auto& id : ids) supervisor_.faults().clear(id);
      return;
    }
    if (ended == Ended::over) {
      for (const auto place : open) timings[place] = failed_as_lost<Timing>(lost());
      return;
    }
    // Alone, each is known to be the one; those that live are then timed in turn again.
    if (ended == Ended::unexplained && ++unexplained == 2)
      for (const auto place : open) time_together(candidates, request, {place}, timings);
  }
}

}  // namespace fftune

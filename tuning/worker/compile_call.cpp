#include "tuning/worker/compile_call.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "core/error.hpp"
#include "tuning/protocol/messages.hpp"

namespace fftune {

using nlohmann::json;

CompileCall::CompileCall(Supervisor& supervisor, const std::vector<Candidate>& candidates,
                         const Evaluator::CompileSink& sink)
    : supervisor_(supervisor),
      candidates_(candidates),
      sink_(sink),
      results_(candidates.size()),
      done_(candidates.size()) {
  for (auto& result : results_) result.failure = "not started";
}

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
  std::vector<Candidate> asked;
  for (const auto place : places) asked.push_back(candidates_[place]);
  // Several are compiled at a time: nothing but being alone makes one the culprit.
  std::vector<std::string> ids;
  if (places.size() == 1) ids.push_back(asked.front().id());
  return supervisor_.ask(
      {{"call", "compile"}, {"candidates", message_of(asked)}}, ids, [](const json&) {},
      [&](const json& message) { hear(places, message); });
}

void CompileCall::hear(const std::vector<std::size_t>& places, const json& message) {
  const auto index = message.at("index").get<std::size_t>();
  if (index >= places.size() || done_[places[index]])
    throw Error(ErrorKind::invalid_input, "a candidate that is not being compiled");
  const auto place = places[index];
  if (message.at("reply") == "begun") {
    begun_.insert(place);
    return;
  }
  auto compiled = read_compiled(message.at("compiled"));
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

}  // namespace fftune

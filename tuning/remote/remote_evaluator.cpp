#include "tuning/remote/remote_evaluator.hpp"

#include <fmt/format.h>

#include <future>
#include <limits>
#include <optional>
#include <utility>

#include "core/error.hpp"
#include "tuning/evaluate/worker_thread.hpp"
#include "tuning/protocol/messages.hpp"

namespace fftune {
namespace {

constexpr double forever = std::numeric_limits<double>::infinity();

}  // namespace

RemoteEvaluator::RemoteEvaluator(std::unique_ptr<LineChannel> channel, std::string name)
    : channel_(std::move(channel)), name_(std::move(name)) {
  if (!await(
          [&](const JsonValue& value) {
            facts_ = read_message<DeviceFacts>(member(value, "facts"));
          },
          {}))
    throw Error(ErrorKind::unavailable, lost_);
}

bool RemoteEvaluator::ask(const JsonValue& call, const Take& take, const Take& listen) {
  if (!lost_.empty()) return false;
  // A send that fails shows as a closed channel.
  channel_->send(line_of(call));
  return await(take, listen);
}

bool RemoteEvaluator::await(const Take& take, const Take& listen) {
  while (!channel_->closed()) {
    const auto line = channel_->receive(forever);
    if (!line) continue;
    std::optional<Error> thrown;
    try {
      const JsonValue message = parse_json(*line);
      const auto reply = field_as<std::string>(message, "reply");
      if (reply == "done") {
        read_field(message, "lost", lost_);
        if (!lost_.empty()) return false;
        take(member(message, "value"));
        return true;
      }
      if (reply == "error")
        thrown.emplace(parse_error_kind(field_as<std::string>(message, "kind")),
                       field_as<std::string>(message, "text"));
      else if (listen)
        listen(message);
    } catch (const std::exception& error) {
      lost_ = fmt::format("{} sent an invalid message: {}", name_, error.what());
      return false;
    }
    if (thrown) throw *thrown;
  }
  lost_ = name_ + " is gone";
  return false;
}

Limits RemoteEvaluator::limits(DType dtype) {
  Limits limits;
  if (!ask({{"call", "limits"}, {"dtype", dtype_name(dtype)}},
           [&](const JsonValue& value) { limits = read_message<Limits>(value); }))
    throw Error(ErrorKind::unavailable, lost_);
  return limits;
}

std::vector<std::string> RemoteEvaluator::disturbances() {
  std::vector<std::string> found;
  ask({{"call", "disturbances"}},
      [&](const JsonValue& value) { found = value_as<std::vector<std::string>>(value); });
  return found;
}

Setup RemoteEvaluator::begin(const Problem& problem) {
  Setup setup;
  if (!ask({{"call", "begin"}, {"problem", message_of(problem)}, {"avoid", avoided_}},
           [&](const JsonValue& value) { setup = read_message<Setup>(value); }))
    setup.refusal = "the device is lost: " + lost_;
  return setup;
}

std::vector<Compiled> RemoteEvaluator::compile(const Candidates& candidates,
                                               const CompileSink& sink) {
  auto results = not_started(candidates.size());
  std::vector<bool> done(candidates.size());
  bool stopped = false;
  GuardedSink guarded(sink);
  ask(
      {{"call", "compile"}, {"candidates", message_of(candidates)}}, [](const JsonValue&) {},
      [&](const JsonValue& message) {
        const auto index = field_as<std::size_t>(message, "index");
        if (index >= done.size() || done[index])
          throw Error(ErrorKind::invalid_input, "a candidate that is not being compiled");
        results[index] = read_message<Compiled>(member(message, "compiled"));
        done[index] = true;
        if (stopped || guarded(index, results[index])) return;
        stopped = true;
        channel_->send(line_of({{"call", "stop"}}));
      });
  guarded.rethrow();
  return results;
}

Verified RemoteEvaluator::verify(const Candidate& candidate) {
  Verified verified;
  if (!ask({{"call", "verify"}, {"candidate", message_of(candidate)}},
           [&](const JsonValue& value) { verified = read_message<Verified>(value); }))
    return failed_as_lost<Verified>(lost_);
  return verified;
}

std::vector<Timing> RemoteEvaluator::time(const Candidates& candidates,
                                          const TimeRequest& request) {
  std::vector<Timing> timings;
  const bool answered = ask(
      {{"call", "time"}, {"candidates", message_of(candidates)}, {"request", message_of(request)}},
      [&](const JsonValue& value) {
        for (const auto& each : items_of(value)) timings.push_back(read_message<Timing>(each));
        if (timings.size() != candidates.size())
          throw Error(ErrorKind::invalid_input, "not one timing for each candidate");
      });
  if (!answered) timings.assign(candidates.size(), failed_as_lost<Timing>(lost_));
  return timings;
}

void serve_remote(LineChannel& channel, const std::function<std::unique_ptr<Evaluator>()>& open) {
  std::unique_ptr<Evaluator> evaluator;
  try {
    evaluator = open();
  } catch (const Error& error) {
    channel.send(line_of(error_reply(error)));
    return;
  }
  channel.send(line_of(
      {{"reply", "done"}, {"value", {{"facts", message_of(evaluator->facts())}}}, {"lost", ""}}));
  const auto compiled = [&channel](std::size_t index, const Compiled& each) {
    channel.send(
        line_of({{"reply", "compiled"}, {"index", index}, {"compiled", message_of(each)}}));
    // The only thing that is said in the middle of a call is to stop it.
    return !channel.receive(0) && !channel.closed();
  };
  serve_calls(channel, [&](const JsonValue& call) {
    try {
      JsonValue value = answer_to(call, *evaluator, compiled);
      channel.send(
          line_of({{"reply", "done"}, {"value", std::move(value)}, {"lost", evaluator->lost()}}));
    } catch (const Error& error) {
      channel.send(line_of(error_reply(error)));
    }
  });
}

void serve_remotes(std::vector<std::unique_ptr<LineChannel>> channels,
                   const std::function<std::unique_ptr<Evaluator>(std::size_t)>& open) {
  std::vector<std::unique_ptr<WorkerThread>> threads;
  std::vector<std::future<void>> serving;
  // If a thread cannot be started, the channels without one close before the others are awaited.
  auto waiting = std::move(channels);
  for (std::size_t i = 0; i < waiting.size(); ++i) {
    threads.push_back(std::make_unique<WorkerThread>());
    std::shared_ptr<LineChannel> channel = std::move(waiting[i]);  // a task can be copied
    serving.push_back(threads.back()->start([channel = std::move(channel), &open, i]() mutable {
      const auto own = std::move(channel);
      serve_remote(*own, [&] { return open(i); });
    }));
  }
  for (auto& each : serving) each.wait();
  for (auto& each : serving) each.get();
}

}  // namespace fftune

#include "tuning/worker/supervisor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.hpp"
#include "tuning/log.hpp"
#include "tuning/protocol/messages.hpp"

namespace fftune {
namespace {

using Clock = std::chrono::steady_clock;

/// The watchdog looks this often. An answer is heard at once.
constexpr double tick_seconds = 0.05;
/// Unattributed deaths in a row after which the device is given up.
constexpr int most_unexplained = 5;
/// Workers started for one call: each untuned recipe may take two down before it is avoided.
constexpr int most_starts = 8;

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

Supervisor::Supervisor(WorkerCommand command, const Watchdog& watchdog,
                       const std::atomic<bool>* cancel)
    : command_(std::move(command)), watchdog_(watchdog), cancel_(cancel) {
  if (!start())
    throw Error(ErrorKind::unavailable,
                fmt::format("the worker process did not open its device: {}", last_cause_));
}

bool Supervisor::start() {
  const auto began = Clock::now();
  ready_ = false;
  worker_.emplace(command_, references_.descriptor());
  std::vector<std::string> warnings;
  DeviceFacts facts;
  const Take take = [&](const JsonValue& value) {
    facts = read_message<DeviceFacts>(member(value, "facts"));
    read_field(value, "warnings", warnings);
  };
  if (await("open", 0, take, {})) return false;
  if (!opened_) {
    for (const auto& warning : warnings) logging::warn("{}", warning);
    facts_ = std::move(facts);
  } else if (facts.name != facts_.name || facts.driver != facts_.driver) {
    lost_ = fmt::format("{} is gone: {} is there in its place", facts_.name, facts.name);
    return false;
  }
  opened_ = true;
  logging::debug("a worker process is ready after {:.3f} s", since(began));
  return true;
}

Setup Supervisor::begin(const Problem& problem) {
  problem_ = problem;
  ready_ = false;
  accepted_ = false;
  faults_.forget();
  if (!ensure()) setup_.refusal = "the device is lost: " + lost_;
  return setup_;
}

bool Supervisor::ensure() {
  for (int started = 0; lost_.empty(); ++started) {
    if (started == most_starts) {
      lost_ = "no worker process stays alive: " + last_cause_;
      break;
    }
    try {
      if (!worker_ && !start()) continue;
      if (ready_ || !problem_ || make_ready()) return true;
    } catch (const Error& error) {
      // As the first one came up, this is the device, not the caller's words.
      if (!problem_ || error.kind() == ErrorKind::invalid_input) throw;
      lost_ = error.what();
    }
  }
  return false;
}

bool Supervisor::make_ready() {
  const auto began = Clock::now();
  std::set<std::string> avoid = avoided_;
  for (const auto& [id, death] : faults_.attributed()) avoid.insert(id);
  const JsonValue call{{"call", "begin"}, {"problem", message_of(*problem_)}, {"avoid", avoid}};
  std::string trying;
  const auto trouble = exchange(
      call, 0, [&](const JsonValue& value) { setup_ = read_message<Setup>(value); },
      [&](const JsonValue& message) { read_field(message, "candidate", trying); });
  if (trouble) {
    if (!trying.empty()) faults_.add(trying, trouble->death);
    return false;
  }
  // A problem that fitted before fits again once the driver has released the memory of the dead
  // worker.
  if (accepted_ && !setup_.refusal.empty()) {
    last_cause_ = setup_.refusal;
    discard(setup_.refusal);
    return false;
  }
  accepted_ = setup_.refusal.empty();
  ready_ = true;
  begin_seconds_ = since(began);
  logging::debug("it is ready for {} after {:.3f} s", problem_->text(), begin_seconds_);
  return true;
}

Ended Supervisor::ask(const JsonValue& call, const std::vector<std::string>& ids, const Take& take,
                      const Take& listen) {
  if (!ensure()) return Ended::over;
  auto trouble = exchange(call, ids.size(), take, listen);
  if (!trouble) {
    unexplained_ = 0;
    return Ended::answered;
  }
  if (trouble->candidate) {
    unexplained_ = 0;
    trouble->death.compiling = field_as<std::string>(call, "call") == "compile";
    faults_.add(ids[*trouble->candidate], trouble->death);
    return Ended::died;
  }
  if (++unexplained_ < most_unexplained) return Ended::unexplained;
  lost_ = fmt::format("{} worker processes died in a row: {}", most_unexplained, last_cause_);
  return Ended::over;
}

void Supervisor::tell(const JsonValue& message) {
  if (worker_) worker_->send(line_of(message));
}

void Supervisor::discard(const std::string& why) {
  logging::debug("the worker process is replaced: {}", why);
  worker_.reset();
}

std::optional<Supervisor::Trouble> Supervisor::exchange(const JsonValue& call,
                                                        std::size_t candidates, const Take& take,
                                                        const Take& listen) {
  // A send that fails shows as a closed channel.
  worker_->send(line_of(call));
  return await(field_as<std::string>(call, "call"), candidates, take, listen);
}

std::optional<Supervisor::Trouble> Supervisor::await(const std::string& call,
                                                     std::size_t candidates, const Take& take,
                                                     const Take& listen) {
  // Seconds of waiting in which nothing new was launched or said. Ticks are counted, not the clock:
  // a supervisor that was itself stopped for a while has not waited.
  double waited = 0;
  std::uint64_t launches = 0;
  for (;;) {
    const auto began = Clock::now();
    if (cancel_ != nullptr && *cancel_) worker_->cancel();
    const auto line = worker_->receive(tick_seconds);
    const auto launch = worker_->in_flight().current();
    if (line) {
      waited = 0;
      std::optional<Error> thrown;
      try {
        const JsonValue message = parse_json(*line);
        const auto reply = field_as<std::string>(message, "reply");
        if (reply == "done") {
          if (auto lost = field_as<std::string>(message, "lost"); !lost.empty())
            return end({std::move(lost), false, true}, candidates);
          take(member(message, "value"));
          return {};
        }
        if (reply == "error")
          thrown.emplace(parse_error_kind(field_as<std::string>(message, "kind")),
                         field_as<std::string>(message, "text"));
        else if (listen)
          listen(message);
        else
          throw Error(ErrorKind::invalid_input, "an answer to what was not asked");
      } catch (const std::exception& error) {
        return end(
            {fmt::format("the process that ran it sent an invalid message: {}", error.what())},
            candidates);
      }
      if (thrown) throw *thrown;
      continue;
    }
    if (worker_->closed()) return end({}, candidates);
    waited += std::min(since(began), 2 * tick_seconds);
    if (launch && launch->number != launches) {
      launches = launch->number;
      waited = 0;
    }
    const double limit = allowed(call, launch);
    if (waited > limit)
      return end({fmt::format("did not end within {:.3g} s", limit), true}, candidates);
  }
}

Supervisor::Trouble Supervisor::end(Death death, std::size_t candidates) {
  Trouble trouble;
  // Read before the memory of the worker may go on changing under a kill.
  if (const auto launch = worker_->in_flight().current(); launch && launch->candidate < candidates)
    trouble.candidate = launch->candidate;
  if (!trouble.candidate && candidates == 1) trouble.candidate = 0;
  const auto how = worker_->end();
  death.killed = worker_->was_killed();
  if (death.cause.empty()) death.cause = "the process that ran it " + how;
  if (death.killed) death.cause += ", as happens when memory runs out,";
  worker_.reset();
  ++deaths_;
  last_cause_ = death.cause;
  logging::debug("the worker process is replaced: {}", death.cause);
  trouble.death = std::move(death);
  return trouble;
}

double Supervisor::allowed(const std::string& call, const std::optional<Launch>& launch) const {
  if (call == "open" || call == "limits") return watchdog_.setup_seconds;
  if (!launch) return call == "begin" ? watchdog_.setup_seconds : watchdog_.compile_seconds;
  // Nothing is known yet of the untuned recipe, which is compiled as well.
  if (call == "begin") return watchdog_.compile_seconds;
  return watchdog_.allowed(launch->expected_seconds > 0 ? launch->expected_seconds
                                                        : begin_seconds_);
}

}  // namespace fftune

#include "tuning/worker/serve.hpp"

#include <fcntl.h>

#include <mutex>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "tuning/evaluate/local_evaluator.hpp"
#include "tuning/protocol/line_channel.hpp"
#include "tuning/protocol/messages.hpp"
#include "tuning/worker/in_flight_record.hpp"
#include "tuning/worker/process.hpp"

namespace fftune {
namespace {

class Service {
 public:
  Service(LineChannel& channel, InFlightRecord& in_flight, LocalEvaluator& evaluator)
      : channel_(channel), in_flight_(in_flight), evaluator_(evaluator) {
    evaluator_.observe(
        [this](std::size_t index, const Candidate& candidate, double expected_seconds) {
          if (beginning_) send({{"reply", "trying"}, {"candidate", candidate.id()}});
          in_flight_.launch(index, expected_seconds);
        },
        [this](std::size_t index) {
          if (compiling_) send({{"reply", "begun"}, {"index", index}});
        });
  }

  /// Throws Error for a call that is none.
  void answer(const JsonValue& call) {
    beginning_ = field_as<std::string>(call, "call") == "begin";
    compiling_ = field_as<std::string>(call, "call") == "compile";
    JsonValue value =
        answer_to(call, evaluator_, [this](std::size_t index, const Compiled& compiled) {
          send({{"reply", "compiled"}, {"index", index}, {"compiled", message_of(compiled)}});
          // The only thing that is said to a worker in the middle of a call is to stop it.
          return !channel_.receive(0) && !channel_.closed();
        });
    const auto lost = evaluator_.lost();
    // Nothing was launched after the one that lost the device: it stays for the supervisor to see.
    if (lost.empty()) in_flight_.land();
    send({{"reply", "done"}, {"value", std::move(value)}, {"lost", lost}});
  }

  void send(const JsonValue& message) {
    const std::lock_guard lock(mutex_);
    channel_.send(line_of(message));
  }

 private:
  LineChannel& channel_;
  InFlightRecord& in_flight_;
  LocalEvaluator& evaluator_;
  std::mutex mutex_;  // one message at a time
  bool beginning_ = false;
  bool compiling_ = false;
};

JsonValue hello(const Backend& backend) {
  return {{"reply", "done"},
          {"value", {{"facts", message_of(backend.facts())}, {"warnings", backend.warnings()}}},
          {"lost", ""}};
}

}  // namespace

int serve_worker(const Catalog& catalog, InputData data,
                 const std::function<std::unique_ptr<Backend>()>& open) {
  InFlightRecord in_flight(worker_in_flight_descriptor);
  LineChannel channel(worker_channel_descriptor);
  // Nothing that a worker may start is to hold the channel open.
  ::fcntl(worker_channel_descriptor, F_SETFD, FD_CLOEXEC);
  ::fcntl(worker_in_flight_descriptor, F_SETFD, FD_CLOEXEC);
  ::fcntl(worker_reference_descriptor, F_SETFD, FD_CLOEXEC);
  std::unique_ptr<Backend> backend;
  try {
    backend = open();
  } catch (const Error& error) {
    channel.send(line_of(error_reply(error)));
    return 0;
  }
  channel.send(line_of(hello(*backend)));
  // A search that is interrupted still times what it has verified, which takes inputs.
  LocalEvaluator evaluator(*backend, catalog, data, worker_reference_descriptor,
                           {.references = &in_flight.cancelled()});
  Service service(channel, in_flight, evaluator);
  serve_calls(channel, [&](const JsonValue& call) {
    try {
      service.answer(call);
    } catch (const Error& error) {
      in_flight.land();
      service.send(error_reply(error));
    }
  });
  return 0;
}

}  // namespace fftune

// A worker process: starting it, exchanging lines with it, ending it, and why it ended.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "tuning/protocol/line_channel.hpp"
#include "tuning/worker/in_flight_record.hpp"

namespace fftune {

/// The descriptors that a worker finds open, beside the standard ones.
inline constexpr int worker_channel_descriptor = 3;
inline constexpr int worker_in_flight_descriptor = 4;
inline constexpr int worker_reference_descriptor = 5;

class WorkerProcess {
 public:
  /// Starts command[0] (a path) with the rest as its arguments. Its output goes to a file without a
  /// name, so that neither the protocol nor the user's terminal gets any of it. `references` is the
  /// descriptor of its ReferenceFile. Throws Error(unavailable).
  WorkerProcess(const std::vector<std::string>& command, int references);
  /// Gives it a moment to end by itself, then kills it.
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  bool send(const std::string& line);
  std::optional<std::string> receive(double seconds) { return channel_->receive(seconds); }
  /// Whether it closed its end, as an ended process has.
  bool closed() const { return channel_ && channel_->closed(); }
  const InFlightRecord& in_flight() const { return in_flight_; }
  void cancel() { in_flight_.cancel(); }

  /// Kills it, if it has not ended, and says how it ended, with the last line that it printed:
  /// "killed by SIGSEGV (Segmentation fault)", "exited with code 3: out of luck".
  std::string end();
  /// Whether a signal SIGKILL ended it before end() could.
  bool was_killed() const { return was_killed_; }
  pid_t id() const { return id_; }

 private:
  /// Collects the process if it ends within `seconds`.
  bool wait(double seconds);
  std::string last_words() const;

  InFlightRecord in_flight_;
  int printed_;  // the file that it prints to
  std::optional<LineChannel> channel_;
  pid_t id_ = -1;
  bool ended_ = false;
  bool was_killed_ = false;
  int status_ = 0;
};

}  // namespace fftune

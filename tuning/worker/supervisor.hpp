// The supervisor of a worker process: starts it, makes it ready for the problem, watches what it
// runs, and replaces it when it dies.
#pragma once

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "store/json.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "tuning/worker/process.hpp"

namespace fftune {

// Fault attribution: which candidate caused the death of a worker.

/// How a call to a worker ended without an answer.
struct Death {
  std::string cause;       // one line
  bool hung = false;       // killed by the watchdog
  bool device = false;     // the device's context was lost, not the process
  bool compiling = false;  // not running
  bool killed = false;     // by SIGKILL, which no variant sends: perhaps for want of memory
};

class FaultAttribution {
 public:
  /// The candidate was in flight when the worker died. A hang, or a fault that the device reports,
  /// is attributed at once. Anything else may come from memory that an earlier candidate corrupted:
  /// it is attributed at the second death in a row, or at the third if the worker got a SIGKILL.
  void add(const std::string& id, const Death& death) {
    if (++deaths_[id] > (death.killed ? 2 : 1) || death.hung || death.device)
      attributed_[id] = death;
  }
  /// It ran to its end.
  void clear(const std::string& id) { deaths_.erase(id); }
  /// Null if no death is attributed to it.
  const Death* of(const std::string& id) const {
    const auto found = attributed_.find(id);
    return found == attributed_.end() ? nullptr : &found->second;
  }
  const std::map<std::string, Death>& attributed() const { return attributed_; }
  /// For another problem: what died with the one before may work there.
  void forget() {
    deaths_.clear();
    attributed_.clear();
  }

 private:
  std::map<std::string, int> deaths_;  // in a row
  std::map<std::string, Death> attributed_;
};

// A file in memory, without a name, that goes with the last process which has it open.

class MemoryFile {
 public:
  /// `name` is for /proc. Throws Error(unavailable).
  explicit MemoryFile(const char* name) : descriptor_(::memfd_create(name, MFD_CLOEXEC)) {
    if (descriptor_ < 0)
      throw Error(ErrorKind::unavailable,
                  fmt::format("no memory can be shared with a worker: {}", std::strerror(errno)));
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

/// How a worker is started: a path with its arguments.
using WorkerCommand = std::vector<std::string>;

/// How long a worker may be silent before it is killed.
///
/// A launch may take 50 times its expected time, at least 5 s (a busy machine can stall a process
/// that long) and at most 2 minutes, or three times the expected time if that is longer. The
/// expected time of a sample is that of the previous passes. For a verification or a first pass it
/// is the preparation time of the problem, which includes the reference and the verification of a
/// full recipe. Calls that are not launches have limits of their own.
struct Watchdog {
  double multiple = 50;
  double least_seconds = 5;
  double most_seconds = 120;
  double compile_seconds = 300;  // for one kernel
  double setup_seconds = 900;    // opening the device, measuring its ceilings, making ready

  /// `expected_seconds` 0: unknown.
  double allowed(double expected_seconds) const {
    if (!(expected_seconds > 0)) return most_seconds;
    const double bounded = std::clamp(multiple * expected_seconds, least_seconds, most_seconds);
    return std::max(bounded, 3 * expected_seconds);
  }
};

enum class Ended {
  answered,
  died,         // and the death is attributed to a candidate: ask again without it
  unexplained,  // died, with no candidate in flight
  over,         // no worker stays alive: lost() says why
};

class Supervisor {
 public:
  /// Reads the value of a message. If it throws, the message is invalid and the worker is replaced.
  using Take = std::function<void(const JsonValue&)>;

  /// Starts a worker. Throws the worker's error in opening its device, and Error(unavailable) if
  /// there is no worker. Once `cancel` is set, the worker computes no reference any more.
  Supervisor(WorkerCommand command, const Watchdog& watchdog, const std::atomic<bool>* cancel);

  const DeviceFacts& facts() const { return facts_; }
  const std::string& lost() const { return lost_; }
  FaultAttribution& faults() { return faults_; }

  /// Prepares a problem, in this worker and in each one that replaces it.
  Setup begin(const Problem& problem);
  void avoid(std::set<std::string> ids) { avoided_ = std::move(ids); }

  /// Makes the call, in a new worker if need be. `ids` are its candidates, in the order of the
  /// indices that the worker reports. `take` gets the value of the answer, `listen` every message
  /// before it. Throws Error if the worker answers with one.
  Ended ask(const JsonValue& call, const std::vector<std::string>& ids, const Take& take,
            const Take& listen = {});
  /// Sends a message during a call.
  void tell(const JsonValue& message);
  /// Ends the worker: the next call gets a new one.
  void discard(const std::string& why);

  int deaths() const { return deaths_; }

 private:
  struct Trouble {
    Death death;
    std::optional<std::size_t> candidate;
  };

  bool ensure();
  bool start();
  bool make_ready();
  std::optional<Trouble> exchange(const JsonValue& call, std::size_t candidates, const Take& take,
                                  const Take& listen);
  std::optional<Trouble> await(const std::string& call, std::size_t candidates, const Take& take,
                               const Take& listen);
  Trouble end(Death death, std::size_t candidates);
  double allowed(const std::string& call, const std::optional<Launch>& launch) const;

  WorkerCommand command_;
  Watchdog watchdog_;
  const std::atomic<bool>* cancel_;
  MemoryFile references_{"fftune references"};  // what one worker computed, for the next
  std::optional<WorkerProcess> worker_;
  DeviceFacts facts_;
  bool opened_ = false;  // once: the facts are known
  std::string lost_;
  std::string last_cause_;
  FaultAttribution faults_;
  std::set<std::string> avoided_;
  std::optional<Problem> problem_;
  Setup setup_;
  bool ready_ = false;
  bool accepted_ = false;  // the problem, by a worker before
  double begin_seconds_ = 0;
  int unexplained_ = 0;  // deaths in a row
  int deaths_ = 0;
};

}  // namespace fftune

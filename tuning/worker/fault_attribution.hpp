// Fault attribution: which candidate caused the death of a worker.
#pragma once

#include <map>
#include <string>

namespace fftune {

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

}  // namespace fftune

// Which candidate is to blame for the death of a worker.
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

class Blame {
 public:
  /// The candidate was in flight. One that hung or that the device itself reports is guilty at
  /// once. Otherwise memory that another one spoilt may be the cause: only the second death in a
  /// row is its own, and the third where somebody else's signal did it.
  void add(const std::string& id, const Death& death) {
    if (++deaths_[id] > (death.killed ? 2 : 1) || death.hung || death.device) guilty_[id] = death;
  }
  /// It was run, and nobody died.
  void clear(const std::string& id) { deaths_.erase(id); }
  /// Null for one that is not guilty.
  const Death* of(const std::string& id) const {
    const auto found = guilty_.find(id);
    return found == guilty_.end() ? nullptr : &found->second;
  }
  const std::map<std::string, Death>& guilty() const { return guilty_; }
  /// Another problem: what died of the one before may serve here.
  void forget() {
    deaths_.clear();
    guilty_.clear();
  }

 private:
  std::map<std::string, int> deaths_;  // in a row
  std::map<std::string, Death> guilty_;
};

}  // namespace fftune

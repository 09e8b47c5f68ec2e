// The quarantine: variants that were in flight when a worker process died, by problem, device,
// driver and the hash of their sources. Later sweeps of that problem leave them out; what crashes
// at one size may serve another.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/file_access.hpp"
#include "core/problem.hpp"
#include "device/facts.hpp"

namespace fftune {

struct Quarantined {
  std::string op;
  std::string problem;  // Problem::text()
  std::string id;       // of the variant
  std::string source_hash;
  std::string cause;  // one line
  std::string date;   // UTC
};

/// One file for each device, <folder>/<device slug>/quarantine.jsonl, beside its journals: a line
/// of JSON for each variant that is added or released; the last line of a variant counts. Lines are
/// appended under a lock, so any number of processes may write, and one that dies while writing
/// damages only its own line.
class Quarantine {
 public:
  /// Reads what is there. No file is an empty quarantine; a line that cannot be read is skipped,
  /// and so is one of before lines named their problem.
  Quarantine(const std::filesystem::path& folder, const DeviceFacts& facts);

  std::optional<Quarantined> find(const Problem& problem, const std::string& id,
                                  const std::string& source_hash) const;
  /// Those of the op, or of one problem, with this driver, by problem and id.
  std::vector<Quarantined> of(const std::string& op) const;
  std::vector<Quarantined> of(const Problem& problem) const;

  /// Adds it. A file that cannot be written is reported in the log; later sweeps then lack the
  /// entry.
  void add(const Problem& problem, const std::string& id, const std::string& source_hash,
           const std::string& cause);
  /// Removes it, if it is there: it was tried again and did not crash.
  void release(const Problem& problem, const std::string& id, const std::string& source_hash);

  const std::filesystem::path& path() const { return path_; }

 private:
  using Key = std::tuple<std::string, std::string, std::string>;  // problem, id, hash

  void append(const Quarantined& entry, bool released);

  OwnFolder own_folder() const;

  std::filesystem::path folder_;
  std::string slug_;
  std::filesystem::path path_;
  std::string driver_;
  std::map<Key, Quarantined> entries_;
};

}  // namespace fftune

// The quarantine: variants that were in flight when a worker process died, by device, driver and
// the hash of their sources. Later sweeps leave them out.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "device/facts.hpp"

namespace fftune {

struct Quarantined {
  std::string op;
  std::string id;  // of the variant
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
  /// Reads what is there. No file is an empty quarantine; a line that cannot be read is skipped.
  Quarantine(const std::filesystem::path& folder, const DeviceFacts& facts);

  std::optional<Quarantined> find(const std::string& op, const std::string& id,
                                  const std::string& source_hash) const;
  /// Those of the op with this driver, by id.
  std::vector<Quarantined> of(const std::string& op) const;

  /// Adds it. A file that cannot be written is reported in the log; later sweeps then lack the
  /// entry.
  void add(const std::string& op, const std::string& id, const std::string& source_hash,
           const std::string& cause);
  /// Removes it, if it is there: it was tried again and did not crash.
  void release(const std::string& op, const std::string& id, const std::string& source_hash);

  const std::filesystem::path& path() const { return path_; }

 private:
  using Key = std::tuple<std::string, std::string, std::string>;  // op, id, hash

  void append(const Quarantined& entry, bool released);

  std::filesystem::path path_;
  std::string driver_;
  std::map<Key, Quarantined> entries_;
};

}  // namespace fftune

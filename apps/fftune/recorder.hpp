// Writes the records of a sweep as soon as they exist, unless --strict refuses them. A disk that is
// full or a file that somebody damages meanwhile does not end the sweep.
#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "apps/fftune/exit_code.hpp"
#include "store/preset_file.hpp"
#include "tuning/tuner.hpp"

namespace fftune::tool {

class Recorder {
 public:
  Recorder(const Catalog& catalog, std::filesystem::path folder, PresetDevice device, bool strict,
           LockWait wait)
      : catalog_(catalog),
        folder_(std::move(folder)),
        device_(std::move(device)),
        strict_(strict),
        wait_(std::move(wait)) {}

  /// Merges the record into the device's file, with those that could not be written before. Says
  /// why where it cannot be, and keeps it for the next time.
  void write(const PresetRecord& record);
  /// Tries again to write the remaining records, and reports those that cannot be written.
  void finish();

  const std::set<std::string>& files() const { return files_; }
  /// Exit code by the results and writes: an error if --strict kept records out, or if records
  /// could not be written.
  ExitCode code() const;

 private:
  /// Returns why not; empty: it is.
  std::string merge(const PresetRecord& record);

  const Catalog& catalog_;
  std::filesystem::path folder_;
  PresetDevice device_;
  bool strict_;
  LockWait wait_;
  std::set<std::string> files_;
  std::vector<PresetRecord> unwritten_;
  int refused_ = 0;
};

}  // namespace fftune::tool

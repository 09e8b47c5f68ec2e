// The records that a search replaces: read, checked to be writable before it begins, and written.
#pragma once

#include <atomic>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "apps/fftune/command_line/session.hpp"
#include "store/preset_file.hpp"
#include "tuning/tuner.hpp"

namespace fftune::tool {

/// Which records of a disturbed device are written.
struct Admission {
  bool strict = false;          // none
  bool keep_undecided = false;  // all, or else those that are decided
};

/// Why the record of a search is not to be written, one line; empty: it is.
std::string kept_out(const TuneResult& result, const Admission& admission);

class Recorder {
 public:
  Recorder(const Catalog& catalog, std::filesystem::path folder, PresetDevice device,
           Admission admission, LockWait wait)
      : catalog_(catalog),
        folder_(std::move(folder)),
        device_(std::move(device)),
        admission_(admission),
        wait_(std::move(wait)) {}

  /// Merges the search's record into the device's file, with those that could not be written
  /// before, unless it is kept_out(). Says why where it cannot be, and keeps it for the next time.
  void write(const TuneResult& result);
  /// Tries again to write the remaining records, and reports those that cannot be written.
  void finish();

  const std::set<std::string>& files() const { return files_; }
  /// Exit code by the results and writes: an error if records were kept out, or could not be
  /// written.
  ExitCode code() const;

 private:
  /// Returns why not; empty: it is.
  std::string merge(const PresetRecord& record);

  const Catalog& catalog_;
  std::filesystem::path folder_;
  PresetDevice device_;
  Admission admission_;
  LockWait wait_;
  std::set<std::string> files_;
  std::vector<PresetRecord> unwritten_;
  int refused_ = 0;
};

/// The records in <folder>/<device>/<op>.json by_compared_part(); none if there is no such file.
/// Throws Error(invalid_input) for one that cannot be read whole.
std::map<Problem, PresetRecord> own_records(const std::filesystem::path& folder,
                                            const PresetDevice& device, const Op& op);

/// The present winners of the op's problems, as far as they have one: those whose records a search
/// would replace. By the problem that records are of, unrepeated(). Throws like own_records().
std::map<Problem, Recipe> present_winners(const std::filesystem::path& folder,
                                          const PresetDevice& device, const Op& op,
                                          const std::vector<Problem>& problems);

/// Says in the log what is waited for, and ends when the user wants an end, if that can be asked.
LockWait lock_wait(const std::atomic<bool>* cancelled = nullptr);

/// require_mergeable() of the folder that `where` names.
void require_out(const std::filesystem::path& folder, const PresetDevice& device,
                 const std::string& op, const LockWait& wait, const std::string& where = "--out");

/// Throws Error(io) that starts with `where` if `file` cannot be replaced.
void require_writable_file(const std::filesystem::path& file, const std::string& where);

}  // namespace fftune::tool

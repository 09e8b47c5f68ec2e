// The journal of a sweep: every outcome as a line of JSON, written as it happens, so that an
// interrupted sweep can be resumed and a report drawn.
#pragma once

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/problem.hpp"
#include "device/facts.hpp"
#include "tuning/journal/journal_lines.hpp"
#include "tuning/journal/outcome.hpp"

namespace fftune {

class Journal {
 public:
  /// Starts <folder>/<device slug>/<op>-<UTC time>-<process>.jsonl; with `resume` continues the
  /// newest one of this device and op, if there is one, and repairs its last line if it was torn.
  /// The folders must be OwnFolders: journals that others wrote, or could write, do not count.
  /// `data` identifies the contents of the inputs. Throws Error(io).
  static Journal open(const std::filesystem::path& folder, const DeviceFacts& facts,
                      const std::string& op, bool resume, const std::string& data = "");

  /// The outcome of a variant in the resumed journal, if it was found with the same device, driver,
  /// sources and data, on which errors and bits depend; its last line counts.
  std::optional<Outcome> known(const Problem& problem, const std::string& source_hash,
                               std::size_t first_stage, const std::string& id) const;

  /// Write-ahead: one line, flushed before these run, so that after a crash it is known what was in
  /// flight.
  void launch(const Problem& problem, const std::vector<std::string>& ids);
  /// Appends one line and flushes it. A full disk is reported once, in the log, and
  /// ends the journal but not the sweep.
  void add(const Problem& problem, const std::string& source_hash, const Outcome& outcome);

  const std::filesystem::path& path() const { return path_; }
  /// The variants in flight when the resumed sweep was interrupted: launched last, without an
  /// outcome.
  const std::set<std::string>& interrupted() const { return interrupted_; }
  /// How many outcomes were read back, and the numbers of the lines that could not be.
  std::size_t known_count() const { return known_.size(); }
  const std::vector<std::size_t>& damaged_lines() const { return damaged_lines_; }

 private:
  using Key = std::tuple<std::string, std::string, std::size_t, std::string>;
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  void read_back(int descriptor);
  void write_line(const std::string& line);
  void sync();

  std::filesystem::path path_;
  std::string header_hash_;  // its own
  std::unique_ptr<std::FILE, Close> file_;
  std::map<Key, Outcome> known_;
  std::set<std::string> interrupted_;
  std::vector<std::size_t> damaged_lines_;
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point synced_{};
};

}  // namespace fftune

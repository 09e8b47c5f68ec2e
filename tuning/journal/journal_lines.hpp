// The lines of a journal, read back: for a sweep that is resumed, and for a report.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "tuning/journal/outcome.hpp"

namespace fftune {

/// The first line of a sweep. A resumed journal has one for each time that it was continued.
struct JournalHeader {
  std::string fftune;  // version
  std::string device;  // DeviceFacts::name
  std::string driver;
  std::string toolkit;
  std::string data;  // what the inputs held; empty in a journal that does not tell

  bool operator==(const JournalHeader&) const = default;
};

struct JournalEntry {
  enum class Kind { header, launch, outcome };

  Kind kind = Kind::header;
  JournalHeader header;          // of a header
  std::vector<std::string> ids;  // of a launch: what was about to run
  std::string problem;           // Problem::text(), of a launch and of an outcome
  std::string header_hash;  // of a launch and of an outcome: hash_of() its header, which may be
                            // damaged; empty in an older version's journal
  std::string sources;      // Family::sources()' hash, of an outcome
  Outcome outcome;
  double seconds = 0;  // since the last header, of an outcome; 0 in a journal that has no times
};

struct JournalText {
  std::vector<JournalEntry> entries;
  std::vector<std::size_t> damaged_lines;  // skipped, from 1; a torn last line is one of them
  std::size_t whole_bytes = 0;             // up to the last newline
  std::size_t bytes = 0;
};

/// The most bytes of a journal that is read.
constexpr std::size_t most_journal_bytes = std::size_t{256} << 20;

JournalText parse_journal(const std::string& text);
/// Throws Error(io) that names the file.
JournalText read_journal(const std::filesystem::path& path);

/// "line 7", "lines 7, 9 and 12"; the first few of many, and how many more there are.
std::string line_numbers(const std::vector<std::size_t>& lines);

/// Identifies the device, driver, toolkit and data that outcomes are of.
std::string hash_of(const JournalHeader& header);

std::string journal_line(const JournalHeader& header);
std::string journal_line(const std::string& header_hash, const std::string& problem,
                         const std::vector<std::string>& launched);
std::string journal_line(const std::string& header_hash, const std::string& problem,
                         const std::string& sources, double seconds, const Outcome& outcome);

}  // namespace fftune

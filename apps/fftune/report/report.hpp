// fftune report: its input, the summary of each search's journal, the data, and the page.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "apps/fftune/terminal/json.hpp"
#include "registry/catalog.hpp"
#include "store/json.hpp"
#include "store/preset_file.hpp"
#include "tuning/journal/journal_lines.hpp"

namespace fftune::tool {

/// A step down of the best time so far.
struct BestSoFar {
  double seconds = 0;  // since the search began
  int variants = 0;    // measured by then
  double microseconds = 0;
};

/// The best time of any variant that has a parameter at this value.
struct ValueWorth {
  std::string value;
  double best_us = 0;
  int variants = 0;
};

struct Failures {
  std::string kind;    // outcome_kind_name()
  std::string reason;  // of the first
  std::string id;      // the first variant
  int count = 0;
};

/// The variants of one problem that cover the same stages.
struct GroupSearch {
  std::string stages;  // "gate_up+down"
  std::vector<BestSoFar> best;
  double seconds = 0;  // of the last outcome
  int measured = 0;    // variants, each once
  int cached = 0;      // variants that needed no compilation
  double compile_seconds = 0;
  std::string winner;  // the fastest measured variant
  double winner_us = 0;
  /// For the winner's family: by parameter, the values that were measured. A parameter that has one
  /// value alone is left out.
  std::map<std::string, std::vector<ValueWorth>> parameters;
  std::vector<Failures> failures;  // the most frequent first
};

struct SearchSummary {
  std::filesystem::path path;
  JournalHeader header;
  std::string problem;  // Problem::text()
  std::vector<GroupSearch> groups;
};

/// One summary for each problem of the journal, in the order in which they were searched. Throws
/// Error(invalid_input) for a file that is not a journal. `damaged`, if it is not null, becomes the
/// numbers of the lines that cannot be read, without one that was torn off at the end.
std::vector<SearchSummary> summarise_journal(const std::filesystem::path& path,
                                             const Catalog& catalog,
                                             std::vector<std::size_t>* damaged = nullptr);

struct ReportedFile {
  std::size_t path = 0;  // which of the paths it came from
  PresetFile presets;
};

struct ReportedBench {
  std::size_t path = 0;
  JsonValue document;
};

struct ReportInput {
  std::vector<std::string> paths;
  std::vector<ReportedFile> files;
  std::vector<SearchSummary> searches;
  std::vector<ReportedBench> benches;
  std::vector<std::string> left_out;  // what could not be read, one line each
};

/// Each path is a preset file, a journal (*.jsonl), the JSON document of `fftune bench`, or a
/// folder: of presets, whose `<device>/<op>.json` are read, or of journals, whose newest of each
/// op is. A file that cannot be read is named in left_out, and the others are taken. Throws
/// Error(invalid_input) for a path that is not there, and where nothing can be read.
ReportInput read_report_input(const std::vector<std::string>& paths, const Catalog& catalog);

/// `date`: when the report is made, UTC.
///   records      of every preset file, with the command that repeats each search
///   searches     of every journal
///   benches      of every bench document: the contenders
///   comparisons  of records of one problem that come from different devices or paths: the first is
///                the one before, each other one after
/// A bench document that cannot be drawn is named in `input.left_out`.
Json report_data(ReportInput& input, const Catalog& catalog, const std::string& date);

/// "fftune ffn --d 1024 --h 2048 --m 64 --dtype bf16": the command that searches this problem
/// again.
std::string search_command(const Problem& problem, const Verdict& verdict,
                           const Provenance& provenance, const Catalog& catalog);

/// Throws Error(unavailable) if fftune was built without Chart.js.
std::string report_page(const Json& data);

}  // namespace fftune::tool

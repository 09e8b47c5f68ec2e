// Summary of a search's journal, short enough for a page: how the best time fell, the effect of
// each parameter, and why variants failed.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
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
/// number of lines that cannot be read, without one that was torn off at the end.
std::vector<SearchSummary> summarise_journal(const std::filesystem::path& path,
                                             const Catalog& catalog,
                                             std::size_t* damaged = nullptr);

}  // namespace fftune::tool

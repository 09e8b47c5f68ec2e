// The input of a report: presets, journals of searches, and the output of `bench --json`.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "apps/fftune/report/search_summary.hpp"
#include "store/json.hpp"
#include "store/preset_file.hpp"

namespace fftune::tool {

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

}  // namespace fftune::tool

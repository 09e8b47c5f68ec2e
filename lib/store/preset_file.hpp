// One preset file, <folder>/<device slug>/<op>.json: reading, checking, merging.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "core/file_access.hpp"
#include "registry/catalog.hpp"
#include "store/comparison.hpp"
#include "store/record.hpp"

namespace fftune {

struct PresetFile {
  std::filesystem::path path;
  PresetDevice device;
  std::string op;
  std::vector<PresetRecord> records;    // sorted by problem; those that could be read
  std::vector<std::string> complaints;  // "path:record: reason", one for each bad part skipped
  std::string misplaced;  // where its place is, if it is elsewhere; it is read even so
};

/// Never throws for the content: an empty or truncated file, or one of a newer or another format,
/// is a complaint.
PresetFile read_preset_file(const std::filesystem::path& path);

/// Every `*/*.json` below `folder`, sorted by path. A folder that is not there has no files.
std::vector<PresetFile> read_preset_folder(const std::filesystem::path& folder);

/// Adds or replaces the records (equal compared_part() of the problem) in <folder>/<slug>/<op>.json
/// under a lock and publishes the whole file by an atomic rename; returns its path. An existing
/// file that cannot be read whole is an Error(invalid_input) and is left as it is. Throws
/// Error(io).
std::filesystem::path merge_preset_records(const std::filesystem::path& folder,
                                           const PresetDevice& device, const std::string& op,
                                           const std::vector<PresetRecord>& records,
                                           const LockWait& wait = {},
                                           const Comparison& comparison = {});

/// Makes <folder>/<slug>, takes the lock once, and throws what merge_preset_records() would throw
/// of the file that is there: for work, or a merge into several files, to fail before it begins.
void require_mergeable(const std::filesystem::path& folder, const PresetDevice& device,
                       const std::string& op, const LockWait& wait = {});

/// The text of a file with these records, as merge would write it: sorted, stable, small diffs.
std::string preset_text(const PresetDevice& device, const std::string& op,
                        std::vector<PresetRecord> records);

/// One record and one problem as JSON, compact; and a problem back, throwing Error(invalid_input)
/// that names the wrong field: "op", "pass" (default "fwd"), "dtype" (optional: then `dtype_given`
/// is false), sizes as integers, options as strings.
std::string record_json(const PresetRecord& record);
std::string problem_json(const Problem& problem);
struct ParsedProblem {
  Problem problem;
  bool dtype_given = false;
  bool any_tokens = false;  // the token size was {"max": N}: the problem is that of N tokens
};
ParsedProblem problem_from_json(const std::string& text);
/// The same as people write it, in the C API's problem_json. A numeric option of the op may be a
/// JSON number too ("eps": 1e-6), and a field of the wrong type is named with the type that the op
/// expects. The size that counts tokens may be {"max": N}.
ParsedProblem problem_from_json(const std::string& text, const Catalog& catalog);

}  // namespace fftune

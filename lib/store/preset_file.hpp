// One preset file, <folder>/<device slug>/<op>.json: reading, checking, merging.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "core/file_access.hpp"
#include "registry/catalog.hpp"
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

/// Every `*/*.json` below `folder`, sorted by path; every `*.json` of a folder that is a device's,
/// which has its name. A folder that is not there has no files.
std::vector<PresetFile> read_preset_folder(const std::filesystem::path& folder);

/// <folder>/<slug>/<op>.json, or <folder>/<op>.json where `folder` has the device's name.
std::filesystem::path preset_path(const std::filesystem::path& folder, const std::string& slug,
                                  const std::string& op);

/// Adds or replaces the records (equal compared_part() of the problem) in the file of preset_path()
/// under a lock and publishes the whole file by an atomic rename; returns its path. An existing
/// file that cannot be read whole is an Error(invalid_input) and is left as it is. Throws
/// Error(io).
std::filesystem::path merge_preset_records(const std::filesystem::path& folder,
                                           const PresetDevice& device, const std::string& op,
                                           const std::vector<PresetRecord>& records,
                                           const LockWait& wait = {},
                                           const Comparison& comparison = {});

/// Makes the device's folder, takes the lock once, and throws what merge_preset_records() would
/// throw of the file that is there: for work, or a merge into several files, to fail before it
/// begins.
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

// The format of a preset file, apart from any file: its version, and text to records.

/// Written as "schema"; raised whenever a field is added or changes its meaning. Files of an older
/// version are read: they lack what may be left out, and up to 2 they have old names of parameters
/// (store/renamed_parameters.hpp).
constexpr int preset_schema = 3;

/// Never throws for the contents of the text. `path` is where it comes from, for the complaints.
PresetFile parse_preset_text(const std::string& text, const std::filesystem::path& path);

// Merging records into several preset files at once.

/// The records of one op on one device, to be merged.
struct PresetBatch {
  PresetDevice device;
  std::string op;
  std::vector<PresetRecord> records;
  Comparison comparison{};  // of the op's problems; as it stands, every field counts
};

/// merge_preset_records() of several batches, all or nothing: every destination is locked, read and
/// checked, and its new text written beside it, before the first is replaced; should replacing one
/// fail, those before it are as they were. Only a crash between two of these steps leaves some
/// files new and others old, each whole; merging again completes it. Returns the paths, one for
/// each batch. If several batches are for one file, the later replace records of the earlier. If
/// records in one batch, or in the file, differ in performance-neutral fields alone, the one
/// measured last stays.
std::vector<std::filesystem::path> merge_preset_batches(const std::filesystem::path& folder,
                                                        const std::vector<PresetBatch>& batches,
                                                        const LockWait& wait = {});

}  // namespace fftune

// Merging records into several preset files at once.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "core/file_access.hpp"
#include "store/comparison.hpp"
#include "store/record.hpp"

namespace fftune {

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

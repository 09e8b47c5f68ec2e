// A folder's records of a device itself.
#pragma once

#include <filesystem>
#include <map>
#include <vector>

#include "store/preset_file.hpp"

namespace fftune::tool {

/// The records in <folder>/<device>/<op>.json by_compared_part(); none if there is no such file.
/// Throws Error(invalid_input) for one that cannot be read whole.
std::map<Problem, PresetRecord> own_records(const std::filesystem::path& folder,
                                            const PresetDevice& device, const Op& op);

/// The present winners of the op's problems, as far as they have one: those whose records a search
/// would replace. By the problem that records are of, unrepeated(). Throws like own_records().
std::map<Problem, Recipe> present_winners(const std::filesystem::path& folder,
                                          const PresetDevice& device, const Op& op,
                                          const std::vector<Problem>& problems);

}  // namespace fftune::tool

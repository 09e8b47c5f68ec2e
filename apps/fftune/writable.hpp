// Whether files can be written, found out before the work whose result they are to hold.
#pragma once

#include <filesystem>
#include <string>

#include "store/preset_file.hpp"

namespace fftune::tool {

/// Makes <folder>/<device>; throws Error(io) naming `folder` and why if a file cannot be made in
/// it, and Error(invalid_input) if there is an <op>.json that a record could not be merged into.
void require_mergeable(const std::filesystem::path& folder, const PresetDevice& device,
                       const std::string& op);

/// Opens and closes `file` for writing; throws Error(io) that starts with `where`.
void require_writable_file(const std::filesystem::path& file, const std::string& where);

}  // namespace fftune::tool
